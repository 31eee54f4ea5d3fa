"""Who hosts what: a pure function of the world size, the members and the method.

N = M + 1   one member a rank, the discriminator alone on the last
N = M       one member a rank, the discriminator beside the last member
N < M       members dealt evenly, the discriminator on the rank with the fewest
N = 1       everything in one process
"""

from dataclasses import dataclass

DEFAULT_SIZE = 4


@dataclass
class EnsembleConfig:
    size: int | str  # a number, or auto: as many members as the ranks can hold one each
    replicas: int


@dataclass(frozen=True)
class Placement:
    world_size: int
    host_of: tuple[int, ...]  # the rank of each member
    discriminator: int | None  # its rank

    @property
    def num_members(self) -> int:
        return len(self.host_of)

    @property
    def member_ranks(self) -> list[int]:
        return sorted(set(self.host_of))

    @property
    def parts(self) -> list[str]:
        """What each rank hosts, for people."""
        return [", ".join(self.parts_on(rank)) for rank in range(self.world_size)]

    def members_on(self, rank: int) -> list[int]:
        return [member for member, host in enumerate(self.host_of) if host == rank]

    def parts_on(self, rank: int) -> list[str]:
        parts = [f"member {member}" for member in self.members_on(rank)]
        return parts + (["discriminator"] if rank == self.discriminator else [])


def place(world_size: int, size: int | str, needs_discriminator: bool) -> Placement:
    spare = 1 if needs_discriminator and world_size > 1 else 0
    num_members = (max(1, world_size - spare) if world_size > 1 else DEFAULT_SIZE) if size == "auto" else int(size)
    if needs_discriminator and num_members < 2:
        raise ValueError(
            f"this method compares members, so it needs at least 2, but {world_size} ranks make {num_members}: "
            f"{launch_line(DEFAULT_SIZE + 1)} or ensemble.size={DEFAULT_SIZE}"
        )
    largest = num_members + (1 if needs_discriminator else 0)
    if world_size > largest:
        raise ValueError(
            f"{world_size} ranks are too many for {num_members} members"
            f"{' and a discriminator' if needs_discriminator else ''}: {launch_line(largest)} or a larger ensemble.size"
        )
    num_hosts = min(world_size, num_members)
    share, extra = divmod(num_members, num_hosts)
    host_of = [rank for rank in range(num_hosts) for _ in range(share + (rank < extra))]
    return Placement(world_size, tuple(host_of), world_size - 1 if needs_discriminator else None)


def launch_line(num_ranks: int) -> str:
    return f"torchrun --nproc_per_node={num_ranks} -m dicedist.train"
