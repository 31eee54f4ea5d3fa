"""Ranks: who hosts what, every message between them, joining and leaving, signals, devices, the launcher.

The only room that uses torch.distributed. Knows nothing of runs and their folders, or of measures.
"""
