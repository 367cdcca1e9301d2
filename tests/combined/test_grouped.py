"""Beliefs about groups: how they are followed while serving, and how a trace that was decided with them is replayed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cotenant import trace
from cotenant.core.actions import GroupBasis, Launch
from cotenant.core.events import LaunchEnded, PredictorChanged, QueryArrived
from cotenant.core.predictor import Group, Member
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.online import OnlineModel
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.trace import TraceError
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share, Work
from scenario import CORES, MS, TWO_LANES, play

TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS), LatencyRow(0, 1, 2, 6 * MS)), (1.0, 1.0))
TABLES = {"a": TABLE, "b": TABLE}
PAIR: Group = (Member(Work("a", 0, 1, 0, 2), 1), Member(Work("b", 0, 1, 0, 2), 1))
ALONE: Group = (Member(Work("a", 0, 1, 0, 2), 2),)


@dataclass
class Fitted(FittedGroups):
    """Pairs take 13 ms, single launches 6."""

    key: str = "abc"
    quantile: float = 0.95
    asked: int = 0

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        self.asked += len(groups)
        return [(13 if len(group) > 1 else 6) * MS for group in groups]


def test_fitted_groups_are_believed_times_the_factor_and_remembered() -> None:
    fitted = Fitted()
    predictor = GroupedPredictor(TABLES, None, fitted, 1.5)
    assert predictor.group_ns([PAIR, ALONE]) == [19_500_000, 9 * MS]
    assert predictor.group_ns([ALONE, PAIR, ALONE]) == [9 * MS, 19_500_000, 9 * MS]
    assert fitted.asked == 2
    assert predictor.scaled({"a": 2.0}).group_ns([PAIR]) == [19_500_000]
    assert predictor.scaled({"a": 2.0}).latency_ns(Work("a", 0, 1, 0, 2), 1) == 20 * MS
    assert predictor.with_beliefs(TABLES, {}, 1.0).group_ns([PAIR]) == [13 * MS]
    assert fitted.asked == 2, "corrections of factors forget nothing"


def test_members_in_another_order_are_the_same_group() -> None:
    fitted = Fitted()
    predictor = GroupedPredictor(TABLES, None, fitted)
    assert predictor.group_ns([PAIR[::-1]]) == predictor.group_ns([PAIR]) == predictor.group_ns([PAIR[::-1], PAIR])[:1]
    assert fitted.asked == 1


def test_without_a_fit_launches_are_believed_not_to_touch_each_other() -> None:
    assert GroupedPredictor(TABLES).group_ns([PAIR, ALONE]) == [10 * MS, 6 * MS]


def launch(number: int, group: int, tenant: str, cores: tuple[int, ...], predicted_ns: int) -> Launch:
    return Launch(
        number, number, (number,), Work(tenant, 0, 1, 0, 2), True, Share(cores), predicted_ns, basis=GroupBasis(group)
    )


def beliefs() -> OnlineModel:
    made = OnlineModel(2, grouped=True, quantile=0.9)
    for name in TABLES:
        made.add(name, TABLE)
    made.believe_groups(Fitted())
    return made


def follow(made: OnlineModel, group: int, took_ns: int) -> bool:
    """A pair that was predicted to take 13 ms; say whether the belief changed."""
    number, begin = 2 * group, group * 1000 * MS
    factor = made.predictor.factor if isinstance(made.predictor, GroupedPredictor) else 1.0
    predicted = round(13 * MS * factor)
    pair = [launch(number, group, "a", (0,), predicted), launch(number + 1, group, "b", (1,), predicted)]
    assert made(begin, QueryArrived(Query(number, "a", begin, begin)), list(pair), None) is None
    assert made(begin + took_ns // 2, LaunchEnded(number), [], None) is None, "the group has not ended"
    return isinstance(made(begin + took_ns, LaunchEnded(number + 1), [], None), PredictorChanged)


def test_groups_that_take_longer_than_promised_raise_the_margin_until_few_do() -> None:
    made = beliefs()
    changes = [follow(made, group, 20 * MS) for group in range(30)]
    assert any(changes)
    assert isinstance(made.predictor, GroupedPredictor)
    assert 20 / 13 < made.predictor.factor < 1.2 * 20 / 13
    assert made.predictor.latency_ns(Work("a", 0, 1, 0, 2), 1) == 10 * MS, "single launches are another matter"


def test_a_failed_group_says_nothing_of_its_latency() -> None:
    made = beliefs()
    pair = [launch(0, 0, "a", (0,), 13 * MS), launch(1, 0, "b", (1,), 13 * MS)]
    made(0, QueryArrived(Query(0, "a", 0, 0)), list(pair), None)
    made(MS, LaunchEnded(0, "it broke"), [], None)
    made(900 * MS, LaunchEnded(1), [], None)
    assert isinstance(made.predictor, GroupedPredictor)
    assert made.predictor.factor == 1.0


def test_launches_alone_correct_the_profile() -> None:
    made = beliefs()
    for number in range(20):
        begin = number * 1000 * MS
        made(begin, QueryArrived(Query(number, "a", begin, begin)), [launch(number, number, "a", (0, 1), 6 * MS)], None)
        made(begin + 12 * MS, LaunchEnded(number), [], None)
    assert made.predictor.latency_ns(Work("a", 0, 1, 0, 2), 2) == pytest.approx(12 * MS, rel=0.1)


def recorded(tmp_path: Path) -> Path:
    """A simulation under a fitted predictor, with its trace."""
    tenants = [Tenant(name, 60 * MS, cuts=(0, 1, 2)) for name in TABLES]
    predictor = GroupedPredictor(TABLES, None, Fitted(), 1.1)
    policy = Overlap(TWO_LANES)
    path = tmp_path / "trace.jsonl"
    file = io.BytesIO()
    writer = trace.TraceWriter(file, trace.header(policy, predictor, tenants, Machine.cpu(CORES), created=""))
    queries = [Query(number, "ab"[number % 2], number * 4 * MS, number * 4 * MS + 60 * MS) for number in range(40)]
    play(policy, tenants, predictor, queries, log=writer)
    writer.flush()
    path.write_bytes(file.getvalue())
    return path


def test_a_trace_is_replayed_with_the_fit_that_it_names(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    head, records = trace.read(path)
    asked: list[tuple[str, float]] = []

    def find(key: str, quantile: float) -> Fitted:
        asked.append((key, quantile))
        return Fitted()

    lines = [line for _, line in trace.replay(head, records, rebuild_policy, find)]
    assert lines == path.read_bytes().splitlines()[1:]
    assert asked == [("abc", 0.95)]


def test_a_replay_without_the_fit_says_what_is_missing(tmp_path: Path) -> None:
    head, records = trace.read(recorded(tmp_path))
    with pytest.raises(TraceError, match="the fitted predictor of groups abc, which is not here"):
        list(trace.replay(head, records, rebuild_policy))


def test_a_change_of_belief_is_written_and_read_back(tmp_path: Path) -> None:
    event = PredictorChanged(GroupedPredictor(TABLES, {"a": 1.25}, Fitted(), 1.5))
    line = trace.encode(5, event, [])
    path = tmp_path / "trace.jsonl"
    head = io.BytesIO()
    trace.TraceWriter(head, trace.header(Overlap(TWO_LANES), GroupedPredictor({}), (), Machine.cpu(CORES), created=""))
    path.write_bytes(head.getvalue() + line + b"\n")
    (record,) = trace.read(path)[1]
    back = trace.decode_event(record.kind, record.event, lambda key, quantile: Fitted(key, quantile))
    assert trace.encode(5, back, []) == line
