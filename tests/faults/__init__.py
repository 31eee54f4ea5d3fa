"""A campaign of faults: every round harms a tiny run, lets it recover, and compares what it leaves behind with an
undisturbed run. `python -m tests.faults --help`."""
