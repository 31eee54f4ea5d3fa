"""What ranks tell each other before they become a group: on which node each is, and that all mean the same run."""

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dicedist import world
from dicedist.config import Config, changes, flattened

# What each node may have its own way. What only rank 0 uses is among it.
OF_A_NODE = ("run.dir", "data.root", "data.download", "data.num_threads", "tracking.", "network.trusted")
VERSIONS = ("dicedist", "torch")


def meet(config: Config, size: int | str) -> tuple[list[int], int | str]:
    """All ranks call, before the group is made: the node of each rank, and the ensemble's size as rank 0 knows it."""
    card = {
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "host": platform.node(),
        "dicedist": f"{version('dicedist')} ({code_digest()})",
        "torch": torch.__version__,
        "size": size,
        "config": flattened(config),
    }
    cards = world.meet(card, config.distributed.timeout)
    refuse_strangers(cards)
    return [card["node"] for card in cards], cards[0]["size"]


def refuse_strangers(cards: Sequence[dict[str, Any]]) -> None:
    first = cards[0]
    for rank, card in enumerate(cards):
        for name in VERSIONS:
            if card[name] != first[name]:
                raise ValueError(
                    f"rank {rank} on {card['host']} has {name} {card[name]}, rank 0 on {first['host']} has "
                    f"{first[name]}: install the same on all nodes, or use one image"
                )
        if changed := changes(first["config"], card["config"], OF_A_NODE):
            raise ValueError(
                f"rank {rank} on {card['host']} has another config than rank 0 on {first['host']} "
                f"({'; '.join(changed)}): start all nodes with the same command"
            )


def code_digest() -> str:
    """Two checkouts of one version may differ."""
    package = Path(__file__).parent
    sources = sorted(package.rglob("*.py"))
    text = b"".join(str(path.relative_to(package)).encode() + path.read_bytes() for path in sources)
    return hashlib.sha256(text).hexdigest()[:10]
