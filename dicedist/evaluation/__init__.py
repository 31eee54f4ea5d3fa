"""Evaluates a trained ensemble and puts it to use: readings, measures, estimates, exports."""
