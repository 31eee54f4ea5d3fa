"""Which members of a run a user's `members=` selects."""

from typing import Any

from dicedist.algorithm.objectives import Method


def chosen_members(wanted: list[int] | None, size: int) -> list[int]:
    if wanted is None:
        return list(range(size))
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(size)):
        raise ValueError(f"members={wanted}: the run has members 0 to {size - 1}, name some of them once each")
    return sorted(wanted)


def members_or_student(wanted: Any, method: Method, size: int) -> list[int]:
    """wanted: None for all members, a list of numbers, or "student"."""
    if wanted == "student":
        student = method.student(size)
        if student is None:
            raise ValueError(f"members=student: method={method.name} trains none, the run has members 0 to {size - 1}")
        return [student]
    if wanted is not None and not (isinstance(wanted, list) and all(type(number) is int for number in wanted)):
        raise ValueError(f"members={wanted}: write numbers like [0,2], or student")
    return chosen_members(wanted, size)
