"""The placement of parts on ranks: a pure function of the world size, the members, the method and the nodes.

N = M + 1       one member per rank, the discriminator on its own rank
N = M           one member per rank, the discriminator on a rank with a member
N < M           members spread evenly, the discriminator on a rank with the fewest members
N = 1           everything in one process
N = R * M (+1)  ensemble.replicas=R: each member on R ranks that split its batch, the discriminator on its own rank

redundancy.ranks=W puts equal copies of the discriminator on W ranks, which divide the pairs of members:

N = M + W       on their own ranks
N <= M          on the ranks with the fewest members; redundancy.ranks=members: on all ranks with members

redundancy.ranks=all puts a copy on every rank, for N = M + 1 or fewer. `auto` starts as 1; a measurement may divide it.

The ranks of a node are consecutive, and members fill them in order. Among the ranks that may host it, the discriminator
takes the one whose node holds the most members, so that the fewest messages leave a node; in a tie, the last.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

DEFAULT_SIZE = 4
MEMBERS = "members"  # redundancy.ranks: every rank that hosts members has a share of the discriminator
ALL, AUTO = "all", "auto"  # every rank has a share; measured when the run begins
REPORTER = 0  # the rank that keeps the records and prints the output


@dataclass(frozen=True)
class Placement:
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each member, one for each of its replicas
    discriminators: tuple[int, ...] = ()  # the ranks of w, or of another counterpart; the first saves it
    called: str = "discriminator"

    @property
    def num_members(self) -> int:
        return len(self.hosts)

    @property
    def replicas(self) -> int:
        return len(self.hosts[0])

    @property
    def host_of(self) -> list[int]:
        """Return the rank of each member's first replica, which evaluates and saves the member."""
        return [ranks[0] for ranks in self.hosts]

    @property
    def discriminator(self) -> int | None:
        return self.discriminators[0] if self.discriminators else None

    @property
    def member_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.hosts for rank in ranks})

    @property
    def parts(self) -> list[str]:
        """Return a description of the parts of each rank."""
        return [", ".join(self.parts_on(rank)) for rank in range(self.world_size)]

    @property
    def divided(self) -> "Placement":
        """Return this placement with a share of the discriminator on every rank."""
        return replace(self, discriminators=tuple(range(self.world_size)))

    def members_on(self, rank: int) -> list[int]:
        return [member for member, ranks in enumerate(self.hosts) if rank in ranks]

    def replica_on(self, rank: int) -> int:
        """Return the index of the replica that a rank hosts."""
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
    """Place the parts. node_of: the node of each rank, by default one node for all. ranks_of_w: redundancy.ranks.

    called: the name of the method's counterpart.
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
            f"ensemble.replicas={replicas} gives a rank some rows of a batch, but w needs all: write redundancy.ranks=1"
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
        shares = len(groups) if ranks_of_w == MEMBERS else min(own, world_size)
        crowd, held = [node_of[rank] for (rank,) in hosts], Counter(rank for (rank,) in hosts)
        discriminators = nearest(ranks, shares, node_of, crowd, held)
    placed = Placement(world_size, hosts, discriminators, called)
    return placed.divided if needs_discriminator and ranks_of_w == ALL else placed


def fitting(world_size: int, own: int, replicas: int) -> int:
    """Return the size for ensemble.size=auto: four members, or one per rank if there are more. own: see `own_ranks`.

    With replicas, the number of ranks decides, because replicas need all of their ranks.
    """
    held = max(1, (world_size - own) // replicas)
    return held if replicas > 1 and world_size > 1 else max(DEFAULT_SIZE, held)


def own_ranks(needs_discriminator: bool, ranks_of_w: int | str) -> int:
    """Return the number of ranks for the discriminator alone, if there are enough ranks."""
    if not needs_discriminator or ranks_of_w == MEMBERS:
        return 0
    return 1 if ranks_of_w in (ALL, AUTO) else int(ranks_of_w)


def ranks_of(num_members: int, needs_discriminator: bool, replicas: int, ranks_of_w: int | str) -> int:
    """Return the number of ranks that gives every part its own device."""
    return replicas * num_members + own_ranks(needs_discriminator, ranks_of_w)


def nearest(
    candidates: Iterable[int], count: int, node_of: Sequence[int], crowd: Sequence[int], held: Mapping[int, int]
) -> tuple[int, ...]:
    """Return `count` candidates: those that hold the least, then those whose node is most frequent in the crowd.

    In a tie, the last candidate comes first.
    """
    on_node = Counter(crowd)
    order = sorted(candidates, key=lambda rank: (held[rank], -on_node[node_of[rank]], -rank))
    return tuple(sorted(order[:count]))


def launch_line(num_ranks: int) -> str:
    return f"torchrun --nproc_per_node={num_ranks} -m dicedist.train"
