"""Runs on disk: the run's folder, checkpoints, background saving, resuming, copies in buckets, and jobs."""
