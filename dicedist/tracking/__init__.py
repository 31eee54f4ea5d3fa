"""Records and progress of a run while it trains. mlflow/ sends them on in its own process, which training starts."""
