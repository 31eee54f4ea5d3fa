"""Support for the training loop in dicedist.trainer: start, resume, validation, records, listeners."""
