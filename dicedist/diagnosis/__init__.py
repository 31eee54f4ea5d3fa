"""What this machine has and lacks for training: checks that say what to do, and the acceptance of a GPU machine."""
