"""Runs on disk: the folder of a run, its checkpoints, saving in the background, resuming, jobs that start runs."""
