"""Algorithm 1 of the paper: members, the discriminator, objectives, networks, and the step that joins them.

Knows tensors only: no files, no environment variables, no torch.distributed. What crosses between ranks goes through
the exchange that it is given (messages.py says what that can do).
"""
