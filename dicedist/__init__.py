"""dicedist: diverse deep ensembles, one member per device."""

__version__ = "0.1.0"
