"""Ranks: placement of the parts, messages, joining and leaving the group, signals, devices, the launcher.

This is the only room that uses torch.distributed. It knows nothing about runs, their folders, or metrics.
"""
