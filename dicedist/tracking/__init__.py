"""What a run records and shows while it trains; mlflow/ sends it on, in a process that training never imports."""
