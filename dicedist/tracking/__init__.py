"""Records and progress of a run, and the mirrors: processes that send the records to trackers such as MLflow."""
