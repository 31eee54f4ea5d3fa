"""The mirror of a run in MLflow: a process beside training that reads the run's folder, and the model that it logs."""
