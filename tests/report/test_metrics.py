from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cotenant.errors import InvalidValueError
from cotenant.metrics import OutcomeLog, QueryRecord, percentile_ns, summarise
from cotenant.report.tables import outcome_table, percent, to_json
from cotenant.types import ANSWERS, Outcome

S = 1_000_000_000

records = st.builds(
    lambda tenant, scheduled, latency, outcome: QueryRecord(tenant, scheduled, scheduled + latency, outcome),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 10 * S),
    st.integers(0, 5 * S),
    st.sampled_from(Outcome),
)


@given(values=st.lists(st.integers(0, 1000), min_size=1), pct=st.integers(1, 100))
def test_percentile_is_the_smallest_value_that_covers_its_share(values: list[int], pct: int) -> None:
    found = percentile_ns(values, pct)
    assert found in values
    covered = [sum(other <= value for other in values) * 100 >= pct * len(values) for value in sorted(values)]
    assert found == sorted(values)[covered.index(True)]


@pytest.mark.parametrize(("pct", "expected"), [(50, 50), (99, 99), (100, 100), (99.5, 100), (1, 1), (0.5, 1)])
def test_percentile_of_one_to_a_hundred(pct: float, expected: int) -> None:
    assert percentile_ns(list(range(100, 0, -1)), pct) == expected


def test_percentile_of_nothing_is_none_and_of_nonsense_an_error() -> None:
    assert percentile_ns([], 99) is None
    with pytest.raises(InvalidValueError):
        percentile_ns([1], 0)


@given(queries=st.lists(records, max_size=60))
def test_every_query_counts_once_and_the_total_is_the_sum(queries: list[QueryRecord]) -> None:
    summary = summarise(queries, end_ns=8 * S, start_ns=S, tenants=["a", "b", "c"])
    inside = [query for query in queries if S <= query.scheduled_ns < 8 * S]
    assert summary.total.offered == len(inside) == sum(line.offered for line in summary.tenants)
    for line in summary.tenants:
        mine = [query for query in inside if query.tenant == line.tenant]
        for outcome in Outcome:
            assert getattr(line, outcome.value) == sum(query.outcome is outcome for query in mine)
        completed = [q.latency_ns for q in mine if q.outcome in ANSWERS]
        assert line.p99_ns == percentile_ns(completed, 99)
        if mine:
            assert line.attainment == line.answered / len(mine)
        else:
            assert line.attainment is None
        assert line.goodput_per_s == pytest.approx(line.answered / 7)


@given(queries=st.lists(records, max_size=60))
def test_log_gives_back_what_was_put_in(queries: list[QueryRecord]) -> None:
    log = OutcomeLog.of(queries)
    assert len(log) == len(queries)
    assert sorted(log.records(), key=repr) == sorted(queries, key=repr)
    for tenant in log.tenants:
        mine = [query for query in queries if query.tenant == tenant]
        assert log.columns(tenant, last=3).ended_ns.tolist() == [query.ended_ns for query in mine[-3:]]
        assert log.columns(tenant).of(Outcome.LATE).tolist() == [query.outcome is Outcome.LATE for query in mine]


def test_logs_of_two_runs_are_summed_up_as_one() -> None:
    one, two = OutcomeLog(["a"]), OutcomeLog(["a", "b"])
    one.add("a", 0, 10, Outcome.ANSWERED)
    two.add("a", 5, 35, Outcome.LATE)
    two.add("b", 7, 8, Outcome.DROPPED)
    one.extend(two)
    assert one.tenants == ("a", "b")
    assert len(one) == 3
    assert one.columns("a").latency_ns.tolist() == [10, 30]
    assert len(two) == 2


def test_log_can_grow_after_it_was_read() -> None:
    log = OutcomeLog(["a"])
    log.add("a", 0, 1, Outcome.ANSWERED)
    columns = log.columns("a")
    log.add("a", 1, 2, Outcome.LATE)
    assert (columns.outcome.size, log.columns("a").outcome.size) == (1, 2)
    with pytest.raises(InvalidValueError, match="'z'"):
        log.columns("z")


def mixed() -> list[QueryRecord]:
    return [
        *(QueryRecord("fast", i * S, i * S + 5_000_000, Outcome.ANSWERED) for i in range(8)),
        QueryRecord("fast", 8 * S, 8 * S + 50_000_000, Outcome.LATE),
        QueryRecord("fast", 9 * S, 9 * S, Outcome.REJECTED),
        QueryRecord("slow", 0, 2 * S, Outcome.DROPPED),
    ]


def test_drops_and_rejections_are_misses() -> None:
    summary = summarise(mixed(), end_ns=10 * S, slo_ns={"fast": 10_000_000})
    fast = summary.tenant("fast")
    assert fast.attainment == 0.8
    assert (fast.p50_ms, fast.p99_ms, fast.slo_ms) == (5.0, 50.0, 10.0)
    assert fast.goodput_per_s == 0.8
    assert summary.tenant("slow").attainment == 0.0
    assert summary.tenant("slow").p99_ns is None
    assert summary.worst_attainment == 0.0
    assert summary.mean_attainment == 0.4
    assert summary.total.attainment == 8 / 11


def test_empty_window_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="later than start_ns"):
        summarise([], end_ns=5, start_ns=5)


def test_json_is_plain_and_has_nulls_not_nans() -> None:
    summary = summarise(mixed(), end_ns=10 * S, tenants=["idle"])
    data = json.loads(json.dumps(to_json(summary), allow_nan=False))
    assert data["tenants"]["idle"]["attainment"] is None
    assert data["tenants"]["fast"]["answered"] == 8
    assert math.isclose(data["total"]["attainment"], 8 / 11)


def render(queries: list[QueryRecord]) -> str:
    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(outcome_table(summarise(queries, end_ns=10 * S), "a title"))
    return capture.get()


def test_table_shows_every_tenant_and_the_total() -> None:
    text = render(mixed())
    assert "a title" in text
    fast = next(line for line in text.splitlines() if "fast" in line)
    assert [cell.strip() for cell in fast.strip("│").split("│")] == [
        *("fast", "–", "10", "8", "1", "0", "1", "5", "50", "0.8", "80.0 %")
    ]
    assert "total" in text
    assert not any(name in text for name in ("failed", "cancelled", "excluded"))
    assert "cancelled" in render([*mixed(), QueryRecord("fast", 0, 1, Outcome.CANCELLED)])


def test_a_share_below_one_is_never_shown_as_all() -> None:
    assert [percent(share) for share in (1.0, 0.99999, 0.9994, 0.5, None)] == [
        "100.0 %",
        "99.9 %",
        "99.9 %",
        "50.0 %",
        "–",
    ]


def test_impatient_clients_and_those_that_leave_in_time_are_counted_apart() -> None:
    queries = [
        QueryRecord("a", 0, 50, Outcome.ANSWERED),
        QueryRecord("a", 0, 99, Outcome.CANCELLED),
        QueryRecord("a", 0, 101, Outcome.CANCELLED),  # it waited for the whole SLO
        QueryRecord("hasty", 0, 5, Outcome.ANSWERED),
        QueryRecord("hasty", 0, 20, Outcome.DROPPED),
        QueryRecord("nearly", 0, 97, Outcome.DROPPED),
        QueryRecord("unknown", 0, 1, Outcome.CANCELLED),
    ]
    slos = {"a": 100, "hasty": 100, "nearly": 100}
    summary = summarise(queries, end_ns=S, slo_ns=slos, limit_ns={"hasty": 20, "nearly": 97})
    lines = {line.tenant: (line.offered, line.excluded, line.attainment) for line in summary.tenants}
    assert lines == {"a": (3, 1, 0.5), "hasty": (2, 2, None), "nearly": (1, 0, 0.0), "unknown": (1, 0, 0.0)}
    assert (summary.total.excluded, summary.total.attainment) == (3, 1 / 4)
    assert summary.worst_attainment == 0.0
    console = Console(width=160, record=True)
    with console.capture() as capture:
        console.print(outcome_table(summary, "a title"))
    assert "excluded" in capture.get()
    assert to_json(summary)["tenants"]["hasty"]["apart"] == 2
