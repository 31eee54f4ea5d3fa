"""Checks of a machine for training, with remedies (`doctor`), and the acceptance of a GPU machine (`gpu-check`)."""
