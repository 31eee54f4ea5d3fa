"""The discriminator's weights in the literal network of the paper."""

import torch

from tests.algorithm1 import LiteralDiscriminator


def literal_of(network):
    """The literal network with the weights of a PairClassifier."""
    num_members, feature_dim, _ = network.slots_MDH.shape
    literal = LiteralDiscriminator(num_members, feature_dim, len(network.embedding_KE))
    with torch.no_grad():
        literal.embedding.weight.copy_(network.embedding_KE)
        literal.first.weight.copy_(torch.cat([network.slots_MDH.flatten(0, 1), network.embedding_first_EH]).T)
        literal.first.bias.copy_(network.first_bias)
        literal.second.weight.copy_(torch.cat([network.second.weight.T, network.embedding_second_EH]).T)
        literal.second.bias.copy_(network.second.bias)
        for name in ("third", "last"):
            getattr(literal, name).load_state_dict(getattr(network, name).state_dict())
    return literal
