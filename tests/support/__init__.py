"""Code that tests share; no test imports another test."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
