"""Who hosts what: a pure function of the world size, the members, the method and the nodes.

N = M + 1       one member per rank, the discriminator on a rank of its own
N = M           one member per rank, the discriminator beside one
N < M           members dealt evenly, the discriminator on a rank with the fewest
N = 1           everything in one process
N = R * M (+1)  ensemble.replicas=R: each member on R ranks that split its batch, the discriminator on a rank of its own

The ranks of a node are consecutive, and members fill them in order. Among the ranks that may host it, the discriminator
takes the one whose node holds the most members, so that the fewest messages leave a node; in a tie, the last.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_SIZE = 4
REPORTER = 0  # the rank that keeps the records, prints the output, and receives the reports of the others


@dataclass(frozen=True)
class Placement:
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each member, one for each of its replicas
    discriminator: int | None  # its rank, or that of what the method has in its place
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
    def member_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.hosts for rank in ranks})

    @property
    def parts(self) -> list[str]:
        """What each rank hosts, in words."""
        return [", ".join(self.parts_on(rank)) for rank in range(self.world_size)]

    def members_on(self, rank: int) -> list[int]:
        return [member for member, ranks in enumerate(self.hosts) if rank in ranks]

    def replica_on(self, rank: int) -> int:
        """Which replica of its members a rank holds."""
        return next((ranks.index(rank) for ranks in self.hosts if rank in ranks), 0)

    def parts_on(self, rank: int) -> list[str]:
        which = f" replica {self.replica_on(rank)}" if self.replicas > 1 else ""
        parts = [f"member {member}{which}" for member in self.members_on(rank)]
        return parts + ([self.called] if rank == self.discriminator else [])


def place(
    world_size: int,
    size: int | str,
    needs_discriminator: bool,
    replicas: int = 1,
    node_of: Sequence[int] | None = None,
    called: str = "discriminator",
) -> Placement:
    """node_of: the node of each rank; all on one by default. called: what the method has for a discriminator."""
    node_of = node_of or [0] * world_size
    spare = 1 if needs_discriminator and world_size > 1 else 0
    fitting = max(1, (world_size - spare) // replicas) if world_size > 1 else DEFAULT_SIZE
    num_members = fitting if size == "auto" else int(size)
    if needs_discriminator and num_members < 2:
        raise ValueError(
            f"this method compares members, so it needs at least 2, but {world_size} ranks make {num_members}: "
            f"{launch_line(DEFAULT_SIZE * replicas + 1)} or ensemble.size={DEFAULT_SIZE}"
        )
    largest = ranks_of(num_members, needs_discriminator, replicas)
    named = f"{num_members} members" + (f" of {replicas} replicas" if replicas > 1 else "")
    if world_size > largest or (replicas > 1 and world_size < largest):
        given = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
        raise ValueError(
            f"{given} too {'many' if world_size > largest else 'few'} for {named}"
            f"{f' and a {called}' if needs_discriminator else ''}: {launch_line(largest)} or another ensemble.size"
        )
    discriminator = most_crowded(range(world_size), node_of, node_of) if needs_discriminator else None
    alone = needs_discriminator and world_size == largest
    ranks = [rank for rank in range(world_size) if not (alone and rank == discriminator)]
    groups = [tuple(ranks[first : first + replicas]) for first in range(0, len(ranks), replicas)]
    share, extra = divmod(num_members, len(groups))
    hosts = tuple(group for nth, group in enumerate(groups) for _ in range(share + (nth < extra)))
    if needs_discriminator and not alone:
        fewest = [rank for (rank,) in groups if hosts.count((rank,)) == share]
        discriminator = most_crowded(fewest, node_of, [node_of[rank] for (rank,) in hosts])
    return Placement(world_size, hosts, discriminator, called)


def ranks_of(num_members: int, needs_discriminator: bool, replicas: int) -> int:
    """The number of ranks that gives every part its own device."""
    return replicas * num_members + (1 if needs_discriminator else 0)


def most_crowded(candidates: Sequence[int], node_of: Sequence[int], crowd: Sequence[int]) -> int:
    """The last of the candidates whose node appears most often in the crowd."""
    on_node = Counter(crowd)
    return max(candidates, key=lambda rank: (on_node[node_of[rank]], rank))


def launch_line(num_ranks: int) -> str:
    return f"torchrun --nproc_per_node={num_ranks} -m dicedist.train"
