"""The line of work in which tenants have turns: nothing is lost, and no tenant waits for all the work of another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.serve.frontend.fair_line import FairLine

QUANTUM = 100
WAIT_S = 10
_KEYS = st.sampled_from("abc")
_COSTS = st.integers(1, 3 * QUANTUM)
_PUTS = st.tuples(_KEYS, _COSTS, st.booleans())
Taken = tuple[str, int, int]


def drained(line: FairLine[Taken]) -> Iterator[Taken]:
    while (work := line.take()) is not None:
        yield work


@given(st.lists(st.one_of(_PUTS, st.none()), max_size=60))
def test_every_piece_of_work_is_taken_once_in_the_order_of_its_key(steps: list[tuple[str, int, bool] | None]) -> None:
    line: FairLine[Taken] = FairLine(QUANTUM)
    wanted: dict[str, list[Taken]] = {"a": [], "b": [], "c": []}
    waiting = 0
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is None:
            taken = line.take()
            assert (taken is None) == (waiting == 0)
            if taken is not None:
                waiting -= 1
                assert wanted[taken[0]].pop(0) == taken
            continue
        key, cost, is_rest = step
        waiting += 1
        wanted[key].insert(0 if is_rest else len(wanted[key]), (key, cost, number))
        line.put(key, cost, (key, cost, number), is_rest=is_rest)
    assert line.take() is None
    assert not any(wanted.values())


@given(st.lists(st.tuples(_KEYS, st.integers(1, QUANTUM)), min_size=1, max_size=80))
def test_between_two_services_of_a_key_another_one_gets_at_most_a_quantum_and_a_piece(
    puts: list[tuple[str, int]],
) -> None:
    line: FairLine[Taken] = FairLine(QUANTUM)
    left = Counter(key for key, _ in puts)
    for number, (key, cost) in enumerate(puts):
        line.put(key, cost, (key, cost, number))
    since: dict[str, Counter[str]] = {key: Counter() for key in left}
    for key, cost, _ in drained(line):
        left[key] -= 1
        since[key] = Counter()
        for other, got in since.items():
            if other != key and left[other]:
                got[key] += cost
                assert got[key] <= QUANTUM + max(each for name, each in puts if name == key)


@given(st.lists(st.tuples(_KEYS, _COSTS), min_size=1, max_size=80))
def test_keys_that_wait_all_the_time_get_alike_whatever_their_pieces_cost(puts: list[tuple[str, int]]) -> None:
    line: FairLine[Taken] = FairLine(QUANTUM)
    left = Counter(key for key, _ in puts)
    for number, (key, cost) in enumerate(puts):
        line.put(key, cost, (key, cost, number))
    got: Counter[str] = Counter()
    largest = max(cost for _, cost in puts)
    for key, cost, _ in drained(line):
        left[key] -= 1
        got[key] += cost
        if all(left.values()):
            assert max(got[each] for each in left) - min(got[each] for each in left) <= 2 * QUANTUM + 2 * largest


def test_a_single_body_waits_for_one_piece_of_a_hundred_large_ones() -> None:
    line: FairLine[str] = FairLine(QUANTUM)
    for _ in range(100):
        line.put("many", 16 * QUANTUM, "large")
    assert line.take() == "large"
    line.put("one", 5, "small")
    assert line.take() == "small"
    assert [line.take() for _ in range(99)] == ["large"] * 99


def test_a_debt_is_kept_until_nothing_is_in_line() -> None:
    line: FairLine[str] = FairLine(QUANTUM)
    line.put("b", 1, "b")
    line.put("a", 3 * QUANTUM, "a")
    assert [line.take(), line.take()] == ["b", "a"]
    line.put("b", 1, "b1")
    line.put("a", 1, "a1")
    for number in range(2, 5):
        line.put("b", QUANTUM, f"b{number}")
    assert line.take() == "b1"
    line = FairLine(QUANTUM)
    line.put("a", 3 * QUANTUM, "a")
    line.put("b", 2 * QUANTUM, "b")
    line.put("b", 2 * QUANTUM, "b")
    assert [line.take(), line.take()] == ["a", "b"]
    line.put("a", 1, "a")
    assert [line.take(), line.take()] == ["b", "a"]


def test_work_in_steps_lets_other_keys_between_and_tells_its_result() -> None:
    threads = LoopThreads(1, "test")
    begun, gate = threading.Event(), threading.Event()
    done: list[str] = []

    def blocked() -> None:
        begun.set()
        gate.wait(WAIT_S)

    def steps(name: str, count: int) -> Iterator[int]:
        for number in range(count):
            done.append(f"{name}{number}")
            yield 1 << 20
        return name

    first = threads.submit(blocked)
    assert begun.wait(WAIT_S)
    long = threads.submit_steps(steps("long", 5), "a", 1 << 20)
    behind = threads.submit(lambda: done.append("behind"), "a")
    short = threads.submit(lambda: done.append("short"), "b")
    gate.set()
    assert long.result(WAIT_S) == "long"
    for each in (first, behind, short):
        each.result(WAIT_S)
    assert done.index("short") == 1
    assert [each for each in done if each != "short"] == [*(f"long{number}" for number in range(5)), "behind"]
    threads.shutdown()


def test_an_error_in_a_step_is_that_of_the_work() -> None:
    threads = LoopThreads(1, "test")

    def steps() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    assert str(threads.submit_steps(steps(), "a", 1).exception(WAIT_S)) == "broken"
    threads.shutdown()
