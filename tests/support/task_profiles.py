"""Profiles of tasks that were made up: a wide model by hand, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from cotenant.techniques.placement.task_profile import DeviceTimes, ModelTasks, UnitTensor

US = 1000


def tasks_of(
    core_us: list[int], whole_us: list[int], edges: dict[int, tuple[int, ...]], hand_over_us: int = 10, cores: int = 2
) -> ModelTasks:
    """Units u0, u1, ... with times in us; `edges` gives the readers of what a unit makes."""
    return ModelTasks(
        "digest",
        "graph",
        cores,
        tuple(f"{i}:u{i}" for i in range(len(core_us))),
        tuple(UnitTensor(f"x{i}", i, readers, 64 * i) for i, readers in edges.items()),
        DeviceTimes(tuple(US * each for each in core_us), 5 * US, US * max(1, sum(core_us))),
        DeviceTimes(tuple(US * each for each in whole_us), 7 * US, US * max(1, sum(whole_us))),
        hand_over_us * US,
        0.0,
        1.0,
    )


def wide_tasks(branches: int = 6, body_us: int = 1000, branch_us: int = 500) -> ModelTasks:
    """A body of two units that gains from both cores, branches of two units that lose there, and a join."""
    join = 2 + 2 * branches
    edges = {0: (1,), 1: tuple(2 + 2 * each for each in range(branches))}
    edges |= {2 + 2 * each: (3 + 2 * each,) for each in range(branches)}
    edges |= {3 + 2 * each: (join,) for each in range(branches)}
    core = [body_us, body_us, *[branch_us] * (2 * branches), 20]
    whole = [body_us * 6 // 10, body_us * 6 // 10, *[branch_us * 11 // 10] * (2 * branches), 20]
    return tasks_of(core, whole, edges)


def linear_tasks(size: int = 5) -> ModelTasks:
    """A chain that gains from both cores."""
    return tasks_of([800] * size, [500] * size, {i: (i + 1,) for i in range(size - 1)})


@st.composite
def some_tasks(draw: st.DrawFn, most: int = 12) -> ModelTasks:
    """Any graph, any times, two to four cores."""
    size = draw(st.integers(2, most))
    times = st.lists(st.integers(0, 2000), min_size=size, max_size=size)
    edges = {}
    for i in range(size - 1):
        readers = draw(st.sets(st.integers(i + 1, size - 1), max_size=3))
        if readers:
            edges[i] = tuple(sorted(readers))
    return tasks_of(draw(times), draw(times), edges, draw(st.integers(0, 50)), draw(st.integers(2, 4)))
