"""Algorithm 1 of the paper: members, the discriminator, objectives, networks, and the step that joins them.

This room handles tensors only: no files, no environment variables, no torch.distributed. Whatever crosses between ranks
goes through the exchange that the step is given (messages.py defines its interface).
"""
