"""The benchmarks of `python -m dicedist.bench`."""
