"""What a run records and shows while it trains; mlflow/ sends it on, in its own process; training never imports it."""
