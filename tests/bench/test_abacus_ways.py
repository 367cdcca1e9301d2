"""The paper's search for a group, the one that tries all, and ours: on beliefs that are made here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.abacus import ways as experiment
from bench.papers.abacus._ways import Asked, Published, Value, cut_at, exhaustive, group_of, value_of
from cotenant.core.predictor import Group, Member
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy.group_jobs import Candidate
from cotenant.techniques.overlap.policy.group_search import find_group
from cotenant.techniques.overlap.policy.group_splits import Splits
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work

UNITS = {"a": 5, "b": 9, "c": 4}
UNIT_NS = {"a": 30, "b": 20, "c": 50}


class Made(FittedGroups):
    """What would be fitted: the longest member, and a share of the others by who is beside whom."""

    key, quantile = "made", 0.5

    def __init__(self, share: float) -> None:
        self._share = share

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        found = []
        for group in groups:
            alone = [alone_ns(member.work) for member in group]
            found.append(max(1, round(max(alone) + self._share * (sum(alone) - max(alone)))))
        return found


def alone_ns(work: Work) -> int:
    return UNIT_NS[work.tenant] * (work.end - work.start) * (3 + work.items) // 4


def believed(share: float = 0.4) -> experiment.Unremembered:
    tables = {}
    for name, units in UNITS.items():
        rows = tuple(
            LatencyRow(0, items, size, alone_ns(Work(name, 0, items, 0, units)))
            for items, size in product((1, 2, 4), (1, 2, 3))
        )
        tables[name] = LatencyTable(rows, (1.0,) * units)
    return experiment.Unremembered(tables, None, Made(share))


def asked(waiting: dict[str, list[tuple[int, int]]], share: float = 0.4, members: int = 2, ways: int = 4) -> Asked:
    """`waiting` has deadlines and rows of the queries of each tenant; now is 0."""
    predictor = believed(share)
    candidates = []
    for number, (name, queries) in enumerate(waiting.items()):
        tenant = Tenant(name, 10**6, tuple(range(UNITS[name] + 1)), max_batch=1)
        made = [
            Query(100 * number + at, name, 0, deadline, items=items) for at, (deadline, items) in enumerate(queries)
        ]
        queue = SimpleNamespace(tenant=tenant, queries=made, are_alike=False)
        headroom = made[0].deadline_ns - predictor.latency_ns(tenant.work(0, made[0].items), members)
        needed = made[0].deadline_ns - headroom
        candidates.append(Candidate(0, headroom, made[0].id, name, queue, 0, True, needed))
    splits = Splits.of(tuple(Share((slot,)) for slot in range(members)), members)
    return Asked(sorted(candidates), predictor, splits, 0, ways, 10**6, False)


def queries_of(name: str) -> st.SearchStrategy[list[tuple[int, int]]]:
    least = UNITS[name] * UNIT_NS[name] * 2
    one = st.tuples(st.integers(least, 4 * least), st.sampled_from((1, 2, 4)))
    return st.lists(one, min_size=1, max_size=3).map(sorted)


situations = st.fixed_dictionaries({name: queries_of(name) for name in ("a", "b")})


@given(situations, st.floats(0.0, 1.0), st.sampled_from((1, 2, 4, 8)))
def test_the_paper_s_search_packs_what_a_scan_packs_in_few_predictions(
    waiting: dict[str, list[tuple[int, int]]], share: float, ways: int
) -> None:
    situation = asked(waiting, share)
    scan, search = Published(1, scans=True), Published(ways)
    expected, found = scan(*situation), search(*situation)
    assert group_of(found.jobs, found.split) == group_of(expected.jobs, expected.split)
    assert found.latency_ns == expected.latency_ns
    places = max(UNITS.values())
    assert (ways + 1) ** (search.rounds - 2) <= places  # a round for the queries, the others divide the places
    first = situation.candidates[0]
    if len(found.jobs) > 1:
        assert found.latency_ns <= first.headroom_ns + first.remaining_ns
    assert found.jobs[0].end == UNITS[first.tenant]


@given(situations, st.floats(0.0, 1.0), st.sampled_from((0, 1, 4, 8)))
def test_no_search_finds_a_better_group_than_the_one_that_tries_all(
    waiting: dict[str, list[tuple[int, int]]], share: float, ways: int
) -> None:
    situation = asked(waiting, share, ways=ways)
    choice, best = exhaustive(situation)
    assert value_of(situation, choice.jobs, choice.latency_ns) == best
    for found in (find_group(*situation), Published(2)(*situation)):
        value = value_of(situation, found.jobs, found.latency_ns)
        # The paper's search cuts a member that has done nothing by then, which we call no use.
        assert value <= best or any(job.value_ns <= 0 for job in found.jobs)
        assert 0.0 <= min(value, best).of(best) <= 1.0


def test_all_groups_are_those_that_can_be_written_down() -> None:
    situation = asked({"a": [(800, 1), (900, 2)], "b": [(850, 1)]})
    predictor = situation.predictor
    seen: set[Group] = set()
    plain = predictor.group_ns

    def noted(groups: Sequence[Group]) -> Sequence[int]:
        seen.update(groups)
        return plain(groups)

    predictor.group_ns = noted  # type: ignore[method-assign]
    exhaustive(situation)
    leader = situation.candidates[0].tenant
    other = "b" if leader == "a" else "a"
    led = [Work(leader, 0, 1, 0, end) for end in range(1, UNITS[leader] + 1)]
    rows = (1, 2) if other == "a" else (1,)
    beside = [Work(other, 0, items, 0, end) for items in rows for end in range(1, UNITS[other] + 1)]
    assert seen == {(Member(work, 2),) for work in led} | {
        (Member(work, 1), Member(each, 1)) for work in led for each in beside
    }


def test_a_cut_leaves_time_for_what_remains() -> None:
    situation = asked({"a": [(1000, 1)], "b": [(2000, 1)]})
    whole = Published(4)(*situation).jobs[0]
    cut = cut_at(situation, whole, 2)
    assert cut is not None
    assert (cut.end, cut.latest_ns) == (2, 1000 - 3 * UNIT_NS["a"])
    assert cut.value_ns == pytest.approx(whole.value_ns * 2 / 5)


def test_a_share_of_the_best_is_nothing_where_somebody_suffers() -> None:
    best = Value(True, True, 2.0)
    assert Value(True, True, 1.5).of(best) == 0.75
    assert Value(True, False, 3.0).of(best) == Value(False, False, 3.0).of(best) == 0.0
    assert Value(True, False, 1.0).of(Value(True, False, 4.0)) == 0.25


class World:
    """As an A100 of the models of this file; one nanosecond here is ten microseconds there."""

    models = tuple(SimpleNamespace(name=name, operators=units, lengths=()) for name, units in UNITS.items())

    def operators(self, name: str) -> int:
        return UNITS[name]

    def most(self, models: Sequence[str]) -> int:
        return min(2, len(models))

    def latency_ns(self, group: Group) -> float:
        return Made(0.5).group_ns([group])[0] * 1e4

    def latencies_ms(self, groups: list[Group]) -> Any:
        import numpy as np

        return np.array([self.latency_ns(group) for group in groups]) / 1e6


class Scaled(Made):
    """In the times of that world."""

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [found * 10_000 for found in super().group_ns(groups)]


def test_decisions_of_a_run_are_compared() -> None:
    pytest.importorskip("scipy")
    tables = {
        name: LatencyTable(
            tuple(
                LatencyRow(0, items, size, 10_000 * alone_ns(Work(name, 0, items, 0, units)))
                for items, size in product((4, 8, 16, 32), (1, 2))
            ),
            (1.0,) * units,
        )
        for name, units in UNITS.items()
    }
    fitted = Scaled(0.5)
    believed = GroupedPredictor(tables, None, fitted)
    setting = experiment.Setting(World(), believed, ("a", "b"), 60.0)  # type: ignore[arg-type]
    rows = experiment.compared(setting, 120, 3, experiment.Unremembered(tables, None, fitted))
    names = [*experiment.searches(), "exhaustive"]
    assert [row["search"] for row in rows] == names * (len(rows) // len(names))
    assert len(rows) >= 5 * len(names)
    for row in rows:
        assert 0.0 <= row["quality"] <= 1.0
        assert row["calls"] >= 1
    by_name = {name: experiment._row(name, rows, []) for name in names}
    assert by_name["exhaustive"]["quality"] == 1.0
    assert by_name["ours, 8 ways"]["quality"] >= by_name["ours, no cuts"]["quality"]
    assert by_name["published, 8 ways"]["calls"] <= by_name["published, operator by operator"]["calls"]
    summary = experiment._summary(list(by_name.values()), {1: 1.0})
    assert summary["quality_of_exhaustive"] == by_name["ours, 4 ways"]["quality"]
