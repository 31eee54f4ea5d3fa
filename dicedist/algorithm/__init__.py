"""Algorithm 1 of the paper: members, the discriminator, objectives, networks, and the step that joins them.

This room handles tensors only: no files, no environment variables, no torch.distributed. All messages between ranks
go through the exchange of the step (messages.py defines its interface).
"""
