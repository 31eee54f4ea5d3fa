"""Evaluate, calibrate, load and export a trained ensemble, and predict with it.

ensemble.py      Ensemble: members that predict together; every reader of trained weights uses it
loading.py       an Ensemble, or the part of it on one rank, from the checkpoint of a run
readings.py      logits and features of all members for a split, gathered on rank 0
evaluator.py     all measures of these readings: test set, calibration, redundancy, OOD sets
saved.py         `dicedist evaluate` of a run; standalone.py: of networks trained elsewhere; logits.py: of a file
calibration.py   temperature, label sets and thresholds, chosen on held-out inputs
findings.py      the results on the disk: evaluation.json, logits, gallery
prediction.py    `dicedist predict`; inputs.py converts what users give, answers.py holds what they get
formats.py       exported files; about.py: their description
"""
