"""Everything around the training loop of dicedist.trainer: start, resume, validation, records, listeners."""
