"""Evaluate, calibrate, load and export a trained ensemble, and predict with it."""
