"""What `python -m dicedist.bench` measures."""
