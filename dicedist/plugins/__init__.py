"""Plug-ins that add conditional redundancy to the training loops of other libraries. Only tensors, as in algorithm/."""
