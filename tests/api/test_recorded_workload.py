"""A recorded trace as the workload of a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cotenant
from commands import Run
from cotenant.api.simulation import workload_of
from cotenant.errors import CotenantError
from cotenant.trace import TraceError
from cotenant.trace.recorded_workload import is_trace, recorded_workload
from cotenant.workload import arrivals
from repositories import write_good

ONE_CORE = {"device.cores": [0]}
LOADS = [
    {"model": "add_sub", "rate": 30.0},
    {"model": "add_sub", "name": "urgent", "rate": 5.0, "priority": 1, "timeout_ms": 500},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("recorded") / "models", "add_sub")
    cotenant.profile(root, budget_s=0.0, settings=ONE_CORE)
    return root


@pytest.fixture(scope="module")
def trace(root: Path) -> Path:
    """A run with 20 ms for each launch."""
    path = root.parent / "trace.jsonl"
    workload = {"duration_s": 5.0, "seed": 2, "tenant": LOADS}
    cotenant.simulate(workload, root, settings=ONE_CORE, decision_us=20_000, noise=0.0, trace=path)
    return path


def test_the_arrivals_are_those_of_the_trace_with_all_that_clients_sent(trace: Path) -> None:
    assert is_trace(trace)
    found = recorded_workload(trace, lambda tenant: tenant)
    made = workload_of({"duration_s": 5.0, "seed": 2, "tenant": LOADS}, trace)
    times = [sent_ns for sent_ns, _, _ in arrivals(made)]
    assert [sent_ns for sent_ns, _, _ in arrivals(found)] == [each - times[0] for each in times]
    usual, urgent = found.tenants
    assert (usual.name, usual.priority, usual.timeout_ns) == ("add_sub", 0, None)
    assert (urgent.name, urgent.priority, urgent.timeout_ns) == ("add_sub (priority 1, 500 ms)", 1, 500_000_000)


def test_simulated_again_under_its_own_settings_a_trace_has_its_own_outcomes(root: Path, trace: Path) -> None:
    again = cotenant.simulate(trace, root, settings=ONE_CORE, decision_us=20_000, noise=0.0)
    first = cotenant.simulate(
        {"duration_s": 5.0, "seed": 2, "tenant": LOADS}, root, settings=ONE_CORE, decision_us=20_000, noise=0.0
    )
    for name, other in (("add_sub", "add_sub"), ("urgent", "add_sub (priority 1, 500 ms)")):
        assert again.tenant(other).offered == first.tenant(name).offered
        assert again.tenant(other).answered == first.tenant(name).answered
        assert again.tenant(other).p99_ns == first.tenant(name).p99_ns


def test_commands_take_a_trace_where_a_workload_goes(root: Path, trace: Path, run: Run) -> None:
    found = json.loads(run("simulate", trace, root, "--cores", "0", "--policy", "fcfs", "--json")[1])
    assert set(found["runs"][0]["tenants"]) == {"add_sub", "add_sub (priority 1, 500 ms)"}
    _, out, _ = run("sweep", "policy=edf,fcfs", trace, root, "--cores", "0")
    assert "fcfs" in out


def test_a_faster_replay_has_all_arrivals_in_less_time(root: Path, trace: Path) -> None:
    found = cotenant.sweep(trace, root, "rate", [0.5, 1, 2], settings=ONE_CORE)
    assert len({run.tenant("add_sub").offered for run in found.runs}) == 1
    slow, usual, fast = (row["goodput_per_s"] for row in found.rows())
    assert slow < usual < fast


def test_a_trace_with_a_gap_says_so(trace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    lines = trace.read_text().splitlines()
    end_ns = json.loads(lines[len(lines) // 2])[0]
    path.write_text("\n".join([*lines[: len(lines) // 2 + 1], json.dumps([end_ns, "LogFull", {}, []])]) + "\n")
    recorded_workload(path, lambda tenant: tenant)
    assert "events are missing" in caplog.text


def test_refused_requests_arrive_as_usual_queries(tmp_path: Path, trace: Path) -> None:
    lines = trace.read_text().splitlines()
    at_ns = 1_000_000_000
    refused = [at_ns, "QueryRefused", {"tenant": "add_sub", "arrival_ns": at_ns, "reason": "full"}, []]
    path = tmp_path / "trace.jsonl"
    later = next(at for at, line in enumerate(lines) if at and json.loads(line)[0] >= at_ns)
    lines.insert(later, json.dumps(refused))
    path.write_text("\n".join(lines) + "\n")
    before, after = (recorded_workload(each, lambda tenant: tenant).tenants[0].process for each in (trace, path))
    assert len(after.times_ns) == len(before.times_ns) + 1  # type: ignore[union-attr]


def test_other_files_and_unknown_tenants_are_named(root: Path, trace: Path, tmp_path: Path) -> None:
    other = write_good(tmp_path / "models", "chooser")
    with pytest.raises(CotenantError, match="tenant 'add_sub', expected one of"):
        cotenant.simulate(trace, other)
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}\n')
    with pytest.raises(TraceError):
        cotenant.simulate(path, root)
    path.write_text(trace.read_text().splitlines()[0] + "\n")
    with pytest.raises(TraceError, match="has no arrivals"):
        cotenant.simulate(path, root)
