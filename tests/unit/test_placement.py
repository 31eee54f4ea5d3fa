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
def test_replicas_of_a_member_are_neighbours(ranks, size, needs_w, replicas, hosts, discriminator):
    placement = place(ranks, size, needs_w, replicas)
    assert (placement.hosts, placement.discriminator) == (hosts, discriminator)
    assert [placement.replica_on(rank) for ranks in hosts for rank in ranks] == [*range(replicas)] * len(hosts)


@pytest.mark.parametrize(
    ("node_of", "size", "hosts", "discriminator"),
    [
        ((0, 0, 1, 1), 3, ((0,), (1,), (2,)), 3),  # of equal choices the last
        ((0, 0, 0, 1, 1), 4, ((0,), (1,), (3,), (4,)), 2),  # two messages leave a node, not three
        ((0, 1, 1, 1, 2), 5, ((0,), (1,), (2,), (3,), (4,)), 3),  # beside a member of the largest node
        ((0, 1, 1), 5, ((0,), (0,), (1,), (1,), (2,)), 2),
    ],
)
def test_the_discriminator_is_where_most_members_are(node_of, size, hosts, discriminator):
    placement = place(len(node_of), size, True, 1, node_of)
    assert (placement.hosts, placement.discriminator) == (hosts, discriminator)


def test_parts_are_named():
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
        (2, "auto", True, "ensemble.size=4"),
        (1, 1, True, "at least 2"),
    ],
)
def test_misfits_say_what_works(ranks, size, needs_w, line):
    with pytest.raises(ValueError, match=line):
        place(ranks, size, needs_w)


def test_replicas_need_all_their_ranks():
    with pytest.raises(ValueError, match="4 ranks are too few for 2 members of 2 replicas.*nproc_per_node=5"):
        place(4, 2, True, replicas=2)
