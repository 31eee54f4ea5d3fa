"""Which rank hosts what (the tables of docs/clusters.md), without any process."""

import pytest

from dicedist.cluster.placement import place


@pytest.mark.parametrize(
    ("ranks", "size", "needs_w", "host_of", "discriminator"),
    [
        (5, "auto", True, (0, 1, 2, 3), 4),
        (3, 2, True, (0, 1), 2),
        (4, 4, True, (0, 1, 2, 3), 3),
        (2, 4, True, (0, 0, 1, 1), 1),
        (3, 4, True, (0, 0, 1, 2), 2),
        (3, 5, True, (0, 0, 1, 1, 2), 2),
        (1, "auto", True, (0, 0, 0, 0), 0),
        (1, 7, True, (0,) * 7, 0),
        (2, "auto", True, (0, 0, 1, 1), 1),
        (3, "auto", True, (0, 0, 1, 2), 2),
        (4, "auto", True, (0, 1, 2, 3), 3),
        (7, "auto", True, (0, 1, 2, 3, 4, 5), 6),
        (2, "auto", False, (0, 0, 1, 1), None),
        (5, "auto", False, (0, 1, 2, 3, 4), None),
        (2, 3, False, (0, 0, 1), None),
        (1, 1, False, (0,), None),
    ],
)
def test_table(ranks, size, needs_w, host_of, discriminator):
    placement = place(ranks, size, needs_w)
    assert placement.host_of == [*host_of]
    assert placement.discriminator == discriminator
    hosted = [member for rank in range(ranks) for member in placement.members_on(rank)]
    assert hosted == list(range(placement.num_members))
    counts = [len(placement.members_on(rank)) for rank in placement.member_ranks]
    assert max(counts) - min(counts) <= 1
    if discriminator is not None:
        fewest = min(len(placement.members_on(rank)) for rank in range(ranks))
        assert len(placement.members_on(discriminator)) == fewest


@pytest.mark.parametrize(
    ("ranks", "size", "needs_w", "replicas", "hosts", "discriminator"),
    [
        (5, 2, True, 2, ((0, 1), (2, 3)), 4),
        (5, "auto", True, 2, ((0, 1), (2, 3)), 4),
        (6, "auto", False, 3, ((0, 1, 2), (3, 4, 5)), None),
    ],
)
def test_replicas_of_a_member_are_neighbors(ranks, size, needs_w, replicas, hosts, discriminator):
    placement = place(ranks, size, needs_w, replicas)
    assert (placement.hosts, placement.discriminator) == (hosts, discriminator)
    assert [placement.replica_on(rank) for ranks in hosts for rank in ranks] == [*range(replicas)] * len(hosts)


@pytest.mark.parametrize(
    ("node_of", "size", "hosts", "discriminator"),
    [
        ((0, 0, 1, 1), 3, ((0,), (1,), (2,)), 3),  # of equal choices the last
        ((0, 0, 0, 1, 1), 4, ((0,), (1,), (3,), (4,)), 2),  # two messages leave a node, not three
        ((0, 1, 1, 1, 2), 5, ((0,), (1,), (2,), (3,), (4,)), 3),  # with a member of the largest node
        ((0, 1, 1), 5, ((0,), (0,), (1,), (1,), (2,)), 2),
    ],
)
def test_the_discriminator_is_where_most_members_are(node_of, size, hosts, discriminator):
    placement = place(len(node_of), size, True, 1, node_of)
    assert (placement.hosts, placement.discriminator) == (hosts, discriminator)


@pytest.mark.parametrize(
    ("node_of", "size", "ranks_of_w", "hosts", "discriminators"),
    [
        ((0,) * 6, 4, 2, ((0,), (1,), (2,), (3,)), (4, 5)),  # on ranks of their own
        ((0,) * 6, "auto", 2, ((0,), (1,), (2,), (3,)), (4, 5)),
        ((0, 0, 0, 1, 1, 1, 1), 5, 2, ((0,), (1,), (2,), (3,), (4,)), (5, 6)),
        ((0,) * 4, 4, 2, ((0,), (1,), (2,), (3,)), (2, 3)),  # with members
        ((0,) * 3, 4, 2, ((0,), (0,), (1,), (2,)), (1, 2)),  # where the fewest are
        ((0,) * 3, 4, "members", ((0,), (0,), (1,), (2,)), (0, 1, 2)),
        ((0,) * 4, "auto", "members", ((0,), (1,), (2,), (3,)), (0, 1, 2, 3)),
        ((0,), 4, 3, ((0,),) * 4, (0,)),  # everything in one process
    ],
)
def test_a_divided_discriminator(node_of, size, ranks_of_w, hosts, discriminators):
    placement = place(len(node_of), size, True, 1, node_of, ranks_of_w)
    assert (placement.hosts, placement.discriminators) == (hosts, discriminators)


@pytest.mark.parametrize(
    ("ranks", "size", "replicas", "ranks_of_w", "line"),
    [
        (5, 4, 1, 2, "5 ranks are too few for 4 members and a discriminator on 2 ranks: .*=6 .* redundancy.ranks"),
        (2, 4, 1, 3, "redundancy.ranks=3, but there are 2 ranks: torchrun --nproc_per_node=7"),
        (5, 4, 1, "members", "5 ranks are too many for 4 members: .*=4"),
        (8, 4, 2, "members", "ensemble.replicas=2 .* write redundancy.ranks=1"),
    ],
)
def test_divisions_that_cannot_be(ranks, size, replicas, ranks_of_w, line):
    with pytest.raises(ValueError, match=line):
        place(ranks, size, True, replicas, ranks_of_w=ranks_of_w)


def test_parts_are_named():
    assert place(6, 4, True, ranks_of_w=2).parts[4:] == ["discriminator 1/2", "discriminator 2/2"]
    placement = place(3, 4, True)
    assert [placement.parts_on(rank) for rank in range(3)] == [
        ["member 0", "member 1"],
        ["member 2"],
        ["member 3", "discriminator"],
    ]


@pytest.mark.parametrize(
    ("ranks", "size", "needs_w", "line"),
    [
        (9, 4, True, "torchrun --nproc_per_node=5 -m dicedist.train"),
        (9, 4, False, "torchrun --nproc_per_node=4 -m dicedist.train"),
        (1, 1, True, "at least 2"),
    ],
)
def test_misfits_say_what_works(ranks, size, needs_w, line):
    with pytest.raises(ValueError, match=line):
        place(ranks, size, needs_w)


def test_replicas_need_all_their_ranks():
    with pytest.raises(ValueError, match="4 ranks are too few for 2 members of 2 replicas.*nproc_per_node=5"):
        place(4, 2, True, replicas=2)
