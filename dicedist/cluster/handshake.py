"""The handshake of ranks before they form a group: exchange the node of each rank, and check that all run the same."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dicedist.cluster.process import this_rank, world_size
from dicedist.cluster.world import enter
from dicedist.config import Scope, changed_keys

PACKAGE = Path(__file__).parent.parent
VERSIONS = ("dicedist", "torch")
Card = dict[str, Any]


def shake_hands(config: Mapping[str, Any], size: int | str, timeout: float) -> tuple[list[int], int | str]:
    """Return the node of each rank, and the ensemble's size from rank 0. All ranks call this before the group exists.

    config: flattened into full keys and their values.
    """
    own = {
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "host": platform.node(),
        "dicedist": f"{version('dicedist')} ({code_digest()})",
        "torch": torch.__version__,
        "size": size,
        "config": {**config},
    }
    cards = exchange_cards(own, timeout)
    refuse_strangers(cards)
    return [card["node"] for card in cards], cards[0]["size"]


def exchange_cards(own: Card, timeout: float) -> list[Card]:
    """Return the cards of all ranks. All ranks call this."""
    if world_size() == 1:
        return [own]
    store = enter(timeout).store
    store.set(f"card/{this_rank()}", json.dumps(own))
    cards = []
    for rank in range(world_size()):
        try:
            cards.append(json.loads(store.get(f"card/{rank}")))
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} did not join within {timeout:.0f} s") from error
    return cards


def refuse_strangers(cards: Sequence[Card]) -> None:
    first = cards[0]
    for rank, card in enumerate(cards):
        for name in VERSIONS:
            if card[name] != first[name]:
                raise ValueError(
                    f"rank {rank} on {card['host']} has {name} {card[name]}, rank 0 on {first['host']} has "
                    f"{first[name]}: install the same on all nodes, or use one image"
                )
        if changed := changed_keys(first["config"], card["config"], set(Scope) - {Scope.NODE}):
            raise ValueError(
                f"rank {rank} on {card['host']} has another config than rank 0 on {first['host']} "
                f"({'; '.join(changed)}): start all nodes with the same command"
            )


def code_digest() -> str:
    """Return a digest of the source, because two checkouts of one version may differ."""
    sources = sorted(PACKAGE.rglob("*.py"))
    text = b"".join(str(path.relative_to(PACKAGE)).encode() + path.read_bytes() for path in sources)
    return hashlib.sha256(text).hexdigest()[:10]
