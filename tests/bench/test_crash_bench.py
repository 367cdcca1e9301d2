"""What the crash benchmark makes of queries and kills."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bench._registry import BenchError
from bench.crash import Kill, lost_queries, rows_of, summary_of
from cotenant.load import LoadResult
from cotenant.load.result import Lag, TenantInfo
from cotenant.metrics import OutcomeLog, QueryRecord
from cotenant.types import Outcome
from cotenant.workload import TenantLoad, Uniform, Workload, arrivals

S = 10**9
LOAD = Workload((TenantLoad("a", "a", Uniform(10.0)), TenantLoad("b", "b", Uniform(5.0))), 2 * S, seed=1)


def result(records: Iterable[QueryRecord], reasons: dict[str, dict[str, int]] | None = None) -> LoadResult:
    tenants = tuple(TenantInfo(name, name, "http", S, 1.0, reasons=reasons or {}) for name in ("a",))
    return LoadResult(tenants, OutcomeLog.of(records), 2 * S, 0, 2 * S, 1, "2026-11-27T00:00:00+00:00", Lag(0, 0, 0))


def record(tenant: str, at_s: float, outcome: Outcome = Outcome.ANSWERED, took_s: float = 0.1) -> QueryRecord:
    return QueryRecord(tenant, round(at_s * S), round((at_s + took_s) * S), outcome)


def test_a_query_with_no_outcome_or_two_is_lost() -> None:
    sent = [
        QueryRecord(LOAD.tenants[each.tenant].name, each.time_ns, each.time_ns + 1, Outcome.FAILED)
        for each in arrivals(LOAD)
    ]
    assert len(sent) > 20
    assert lost_queries(LOAD, result(sent)) == 0
    assert lost_queries(LOAD, result(sent[1:])) == 1
    assert lost_queries(LOAD, result([*sent, sent[3]])) == 1
    never = {"failed": {"no answer within the client's limit": 3, "the worker of 'a' died": 9}}
    assert lost_queries(LOAD, result(sent, never)) == 3


def test_a_kill_is_told_by_what_it_cost_the_tenant_and_the_others() -> None:
    kinds = ("worker", "frontend", "engine")
    kills = [Kill(kind, 100.0 + 10 * number, 0.25, 0.5) for number, kind in enumerate(kinds)]
    queries = [
        record("minilm", -0.05, Outcome.FAILED),
        record("minilm", 1.5),
        record("magika", 2.0),
        record("magika", 7.0, Outcome.LATE),
        record("magika", 9.95, Outcome.FAILED),
        record("minilm", 11.0),
        record("magika", 12.0),
        record("resnet50", 13.0),
        *(record(model, 21.0, Outcome.REJECTED) for model in ("magika", "minilm", "resnet50")),
        record("magika", 22.0),
        record("minilm", 23.0),
        record("resnet50", 24.0, Outcome.LATE, 2.0),
    ]
    rows = rows_of(queries, kills, 100.0)
    worker, frontend, engine = rows
    assert [row["kind"] for row in rows] == list(kinds)
    assert (worker["recovery_s"], worker["all_recovered_s"]) == (1.6, 1.6)
    assert (frontend["recovery_s"], frontend["all_recovered_s"]) == (1.1, 3.1)
    assert (engine["recovery_s"], engine["all_recovered_s"]) == (2.1, 6.0)
    assert (worker["victim_after"], worker["victim_after_in_time"], worker["victim_failed"]) == (2, 1, 1)
    assert (worker["others_after_in_time"], worker["others_calm"], worker["others_calm_in_time"]) == (1, 1, 0)
    assert (worker["others_failed"], frontend["others_failed"]) == (0, 1), "it was inside at the second kill"
    assert (engine["victim_refused"], engine["others_refused"], engine["others_failed"]) == (1, 2, 0)
    summary = summary_of(rows, 0, {"server": 9.0})
    assert summary["others_attainment_drop_points"] == -100.0
    assert (summary["victim_failed"], summary["victim_attainment_pct"]) == (1, 50.0)
    assert (summary["recovery_s"], summary["engine_recovery_s"], summary["engine_all_recovered_max_s"]) == (
        1.6,
        2.1,
        6.0,
    )
    assert (summary["replacing_s"], summary["reloading_s"], summary["rss_server_mb"]) == (0.25, 0.5, 9.0)


def test_a_kill_that_a_tenant_does_not_recover_from_is_an_error() -> None:
    rows = rows_of([record("magika", 1.0), record("minilm", 2.0)], [Kill("engine", 50.0)], 50.0)
    assert rows[0]["recovery_s"] == 1.1
    with pytest.raises(BenchError, match="engine at 0 s"):
        summary_of(rows, 0, {})
