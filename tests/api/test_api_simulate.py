"""`cotenant.simulate` gives what `cotenant simulate --json` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cotenant
from commands import Run
from cotenant.errors import CotenantError
from cotenant.workload import load_workload
from repositories import write_good, write_profiled

WORKLOAD = """
seed = 3
duration_s = 2.0

[[tenant]]
model = "add_sub"
rate = 80.0

[[tenant]]
model = "two"
rate = 30.0
timeout_ms = 40.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profiled(tmp_path_factory.mktemp("simulated") / "models", WORKLOAD, "add_sub", "two")


@pytest.mark.parametrize("policy", ["edf", "shares"])
def test_a_run_is_that_of_the_command(root: Path, run: Run, policy: str) -> None:
    workload = root.parent / "workload.toml"
    status, out, err = run("simulate", workload, root, "--policy", policy, "--seeds", 2, "--cores", "0", "--json")
    assert (status, err) == (0, "")
    first, second = json.loads(out)["runs"]
    settings = {"device.cores": [0]}
    found = cotenant.simulate(workload, root, policy=policy, settings=settings)
    assert found.to_json() == first
    assert (
        cotenant.simulate(workload, cotenant.Repository(root), policy=policy, seed=4, settings=settings).to_json()
        == second
    )
    assert found.tenant("add_sub").offered == first["tenants"]["add_sub"]["offered"] > 0
    assert [row["tenant"] for row in found.rows()] == ["add_sub", "two", "total"]
    assert "add_sub" in found._repr_html_()


def test_ways_to_give_a_workload(root: Path) -> None:
    path = root.parent / "workload.toml"
    tables = {"seed": 3, "duration_s": 2.0, "tenant": [{"model": "add_sub", "rate": 80.0}]}
    spec = load_workload(path)
    assert cotenant.simulate(spec, root).to_json() == cotenant.simulate(str(path), root).to_json()
    assert cotenant.simulate(tables, root, noise=0.0, world="table").summary.total.answered > 0


def test_what_cannot_be_simulated(root: Path, tmp_path: Path) -> None:
    workload = root.parent / "workload.toml"
    with pytest.raises(CotenantError, match="world is 'flat', expected one of table, contention, groups"):
        cotenant.simulate(workload, root, world="flat")
    with pytest.raises(CotenantError, match="'nonsense'"):
        cotenant.simulate(workload, root, policy="nonsense")
    with pytest.raises(CotenantError, match="make it with 'cotenant profile'"):
        cotenant.simulate(workload, write_good(tmp_path / "models", "add_sub", "two"))


def test_a_trace_is_explained(root: Path, run: Run, tmp_path: Path) -> None:
    workload, trace = root.parent / "workload.toml", tmp_path / "trace.jsonl"
    options = {"policy": "edf", "settings": {"device.cores": [0]}}
    found = cotenant.simulate(workload, root, trace=trace, bound=True, **options)  # type: ignore[arg-type]
    words = ("--policy", "edf", "--cores", "0", "--bound", "--json")
    [printed] = json.loads(run("simulate", workload, root, *words)[1])["runs"]
    assert found.to_json() == printed
    assert found.bound is not None
    story = cotenant.explain(trace, 0)
    assert "\n".join(story.sentences()) == run("explain", 0, trace)[1].rstrip("\n")
    assert [row["units"] for row in story.rows()] == [(0, 2)]
    assert "headroom_ns" in story._repr_html_()


ASSUMED = {"a": cotenant.AssumedModel(slo_ms=100, latency_ms=10), "b": cotenant.AssumedModel(slo_ms=50, latency_ms=20)}
LOAD = {"duration_s": 20.0, "seed": 1, "tenant": [{"model": "a", "rate": 50.0}, {"model": "b", "rate": 25.0}]}


def test_assumed_models_need_no_repository(tmp_path: Path) -> None:
    shares = [
        cotenant.simulate(LOAD, ASSUMED, policy="edf", settings={"device.cores": cores}, noise=0.0)
        .tenant("a")
        .attainment
        for cores in ([0], [0, 1, 2, 1000])  # of another machine
    ]
    assert shares[0] < 0.99
    assert shares[1] == 1.0
    cotenant.simulate(LOAD, ASSUMED, policy="shares", settings={"device.cores": [0]}, trace=tmp_path / "trace.jsonl")
    assert cotenant.explain(tmp_path / "trace.jsonl", 0).outcome == "answered"


def test_assumptions_that_cannot_be_simulated() -> None:
    with pytest.raises(CotenantError, match="the workload has the model 'b', expected one of a"):
        cotenant.simulate(LOAD, {"a": ASSUMED["a"]})
    with pytest.raises(CotenantError, match="assumed models are simulated without a plan and in the world 'table'"):
        cotenant.simulate(LOAD, ASSUMED, world="groups")
    with pytest.raises(CotenantError, match="slo_ns is 0"):
        cotenant.simulate(LOAD, ASSUMED | {"a": cotenant.AssumedModel(slo_ms=0, latency_ms=1)})
