"""Who hosts what: a pure function of the world size, the members, the method and the nodes.

N = M + 1       one member per rank, the discriminator on a rank of its own
N = M           one member per rank, the discriminator beside one
N < M           members dealt evenly, the discriminator on a rank with the fewest
N = 1           everything in one process
N = R * M (+1)  ensemble.replicas=R: each member on R ranks that split its batch, the discriminator on a rank of its own

redundancy.ranks=W puts the discriminator on W ranks, which hold the same one and divide its pairs of members:

N = M + W       on ranks of their own
N <= M          beside members, on the ranks with the fewest; redundancy.ranks=members: on all of them

redundancy.ranks=all puts it on every rank, N = M + 1 or fewer. `auto` begins as 1, and may be divided after a
measurement.

The ranks of a node are consecutive, and members fill them in order. Among the ranks that may host it, the discriminator
takes the one whose node holds the most members, so that the fewest messages leave a node; in a tie, the last.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

DEFAULT_SIZE = 4
MEMBERS = "members"  # redundancy.ranks: every rank that hosts members has a share of the discriminator
ALL, AUTO = "all", "auto"  # every rank has one; measured when the run begins
REPORTER = 0  # the rank that keeps the records, prints the output, and receives the reports of the others


@dataclass(frozen=True)
class Placement:
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each member, one for each of its replicas
    discriminators: tuple[int, ...] = ()  # the ranks that hold w, or what stands for it; the first of them saves it
    called: str = "discriminator"

    @property
    def num_members(self) -> int:
        return len(self.hosts)

    @property
    def replicas(self) -> int:
        return len(self.hosts[0])

    @property
    def host_of(self) -> list[int]:
        """The rank of each member's first replica, which evaluates and saves the member."""
        return [ranks[0] for ranks in self.hosts]

    @property
    def discriminator(self) -> int | None:
        return self.discriminators[0] if self.discriminators else None

    @property
    def member_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.hosts for rank in ranks})

    @property
    def parts(self) -> list[str]:
        """What each rank hosts, in words."""
        return [", ".join(self.parts_on(rank)) for rank in range(self.world_size)]

    @property
    def divided(self) -> "Placement":
        """The same members, and a share of the discriminator on every rank."""
        return replace(self, discriminators=tuple(range(self.world_size)))

    def members_on(self, rank: int) -> list[int]:
        return [member for member, ranks in enumerate(self.hosts) if rank in ranks]

    def replica_on(self, rank: int) -> int:
        """Which replica of its members a rank holds."""
        return next((ranks.index(rank) for ranks in self.hosts if rank in ranks), 0)

    def parts_on(self, rank: int) -> list[str]:
        which = f" replica {self.replica_on(rank)}" if self.replicas > 1 else ""
        parts = [f"member {member}{which}" for member in self.members_on(rank)]
        return parts + ([self.share_on(rank)] if rank in self.discriminators else [])

    def share_on(self, rank: int) -> str:
        ranks = self.discriminators
        return self.called + (f" {ranks.index(rank) + 1}/{len(ranks)}" if len(ranks) > 1 else "")


def place(
    world_size: int,
    size: int | str,
    needs_discriminator: bool,
    replicas: int = 1,
    node_of: Sequence[int] | None = None,
    ranks_of_w: int | str = 1,
    called: str = "discriminator",
) -> Placement:
    """node_of: the node of each rank; all on one by default. ranks_of_w: redundancy.ranks.

    called: what the method has for a discriminator.
    """
    node_of = node_of or [0] * world_size
    own = own_ranks(needs_discriminator, ranks_of_w)
    num_members = fitting(world_size, own, replicas) if size == "auto" else int(size)
    if needs_discriminator and num_members < 2:
        raise ValueError(
            f"this method compares members, so it needs at least 2 of them, not {num_members}: "
            f"{launch_line(DEFAULT_SIZE * replicas + own)} or ensemble.size={DEFAULT_SIZE}"
        )
    if ranks_of_w in (MEMBERS, ALL) and replicas > 1:
        raise ValueError(
            f"ensemble.replicas={replicas} gives a rank some rows of a batch, and w needs all: write redundancy.ranks=1"
        )
    largest = ranks_of(num_members, needs_discriminator, replicas, ranks_of_w)
    without_w = largest - own
    if world_size > largest or (replicas > 1 and world_size < largest) or without_w < world_size < largest:
        given = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
        named = f"{num_members} members" + (f" of {replicas} replicas" if replicas > 1 else "")
        parts = {0: named, 1: f"{named} and a {called}"}.get(own, f"{named} and a {called} on {own} ranks")
        raise ValueError(
            f"{given} too {'many' if world_size > largest else 'few'} for {parts}: {launch_line(largest)} or another "
            f"{'redundancy.ranks' if without_w < world_size < largest else 'ensemble.size'}"
        )
    if 1 < world_size < own:
        raise ValueError(f"redundancy.ranks={own}, but there are {world_size} ranks: {launch_line(largest)}")
    apart = own > 0 and world_size == largest
    discriminators = nearest(range(world_size), own, node_of, node_of, Counter()) if apart else ()
    ranks = [rank for rank in range(world_size) if rank not in discriminators]
    groups = [tuple(ranks[first : first + replicas]) for first in range(0, len(ranks), replicas)]
    share, extra = divmod(num_members, len(groups))
    hosts = tuple(group for nth, group in enumerate(groups) for _ in range(share + (nth < extra)))
    if needs_discriminator and not apart:
        beside = len(groups) if ranks_of_w == MEMBERS else min(own, world_size)
        crowd, held = [node_of[rank] for (rank,) in hosts], Counter(rank for (rank,) in hosts)
        discriminators = nearest(ranks, beside, node_of, crowd, held)
    placed = Placement(world_size, hosts, discriminators, called)
    return placed.divided if needs_discriminator and ranks_of_w == ALL else placed


def fitting(world_size: int, own: int, replicas: int) -> int:
    """Return the members of ensemble.size=auto: four, or one for each rank where there are more. own: as `own_ranks`.

    Replicas need all of their ranks, so with them the ranks decide.
    """
    held = max(1, (world_size - own) // replicas)
    return held if replicas > 1 and world_size > 1 else max(DEFAULT_SIZE, held)


def own_ranks(needs_discriminator: bool, ranks_of_w: int | str) -> int:
    """How many ranks the discriminator has beyond those of the members, if there are enough."""
    if not needs_discriminator or ranks_of_w == MEMBERS:
        return 0
    return 1 if ranks_of_w in (ALL, AUTO) else int(ranks_of_w)


def ranks_of(num_members: int, needs_discriminator: bool, replicas: int, ranks_of_w: int | str) -> int:
    """The number of ranks that gives every part its own device."""
    return replicas * num_members + own_ranks(needs_discriminator, ranks_of_w)


def nearest(
    candidates: Iterable[int], count: int, node_of: Sequence[int], crowd: Sequence[int], held: Mapping[int, int]
) -> tuple[int, ...]:
    """The first `count` candidates in this order: those that hold the least, then those whose node appears most often
    in the crowd, then the last."""
    on_node = Counter(crowd)
    order = sorted(candidates, key=lambda rank: (held[rank], -on_node[node_of[rank]], -rank))
    return tuple(sorted(order[:count]))


def launch_line(num_ranks: int) -> str:
    return f"torchrun --nproc_per_node={num_ranks} -m dicedist.train"
