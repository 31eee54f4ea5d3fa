"""The mirror of a run in MLflow: a separate process that reads the run's folder, and the model that it logs."""
