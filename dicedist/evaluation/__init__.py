"""What a trained ensemble is worth, and the ensemble as it is used: readings, measures, estimates, exports."""
