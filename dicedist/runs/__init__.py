"""Runs on the disk: the folder of a run, its checkpoints, saving in the background, continuing, jobs that make runs."""
