"""Sweeps: one simulation for each value of a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import cotenant
from commands import Run
from cotenant.api.sweeping import SweepResult
from cotenant.errors import CotenantError
from repositories import write_good

WORKLOAD = {"duration_s": 4.0, "seed": 3, "tenant": [{"model": "add_sub", "rate": 40.0}]}
ONE_CORE = {"device.cores": [0]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("swept") / "models", "add_sub")
    cotenant.profile(root, budget_s=0.0, settings=ONE_CORE)
    (root.parent / "workload.toml").write_text(
        'duration_s = 4.0\nseed = 3\n[[tenant]]\nmodel = "add_sub"\nrate = 40.0\n'
    )
    return root


@pytest.mark.parametrize(
    ("key", "values", "single"),
    [
        ("tenant.add_sub.slo_ms", [0.01, 50], lambda value: {"settings": ONE_CORE | {"tenant.add_sub.slo_ms": value}}),
        ("policy", ["edf", "fcfs"], lambda value: {"policy": value, "settings": ONE_CORE}),
        ("noise", [0.0, 1], lambda value: {"noise": float(value), "settings": ONE_CORE}),
        ("decision_us", [10, 20_000.0], lambda value: {"decision_us": float(value), "settings": ONE_CORE}),
    ],
)
def test_every_run_is_that_of_a_single_simulation(root: Path, key: str, values: list[Any], single: Any) -> None:
    found = cotenant.sweep(WORKLOAD, root, key, values, settings=ONE_CORE)
    for value, run in zip(values, found.runs, strict=True):
        assert run.to_json() == cotenant.simulate(WORKLOAD, root, **single(value)).to_json()
    assert [row["value"] for row in found.rows()] == values


def test_the_command_prints_draws_and_tells_what_the_function_returns(root: Path, run: Run, tmp_path: Path) -> None:
    workload, picture = root.parent / "workload.toml", tmp_path / "sweep.svg"
    words = "sweep", "decision_us=10,1000,500000", workload, root, "--cores", "0"
    found = cotenant.sweep(workload, root, "decision_us", [10, 1000, 500_000], settings=ONE_CORE)
    printed = json.loads(run(*words, "--json")[1])
    assert printed == json.loads(json.dumps({**found.to_json(), "is_whole": True}))
    _, out, _ = run(*words, "--svg", picture)
    assert "SLO attainment by decision_us" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│ ")] == ["10", "1000", "500000"]
    drawing = ElementTree.parse(picture).getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "add_sub" in picture.read_text()
    assert found.rows()[0]["least_attainment"] > found.rows()[2]["least_attainment"]


def test_values_that_are_names_are_drawn_side_by_side(root: Path) -> None:
    found = cotenant.sweep(WORKLOAD, root, "policy", ["edf", "fcfs"], settings=ONE_CORE)
    assert "policy: edf, fcfs" in found.svg()
    assert SweepResult("rate", (), ()).svg()
    assert SweepResult("rate", (1,), found.runs[:1]).svg()


@pytest.mark.parametrize(
    ("key", "values", "sentence"),
    [
        ("slo", [1], "the key is 'slo', expected SECTION.KEY"),
        ("rate", ["fast"], "rate is 'fast', expected a number from 0"),
        ("rate", [0], "expected a positive factor"),
        ("noise", [1000], "expected a number up to 10"),
        ("rate", [], "0 values, expected from 1 to 100"),
        ("tenant.nobody.slo_ms", [1], "no tenant 'nobody'"),
        ("tenant.add_sub.slo_ms", [5, -1], "slo_ms"),
        ("policy", ["edf", "best"], "best"),
    ],
)
def test_wrong_keys_and_values_are_named_before_the_first_run(
    root: Path, key: str, values: list[Any], sentence: str
) -> None:
    with pytest.raises(CotenantError, match=sentence):
        cotenant.sweep(WORKLOAD, root, key, values, settings=ONE_CORE)


@pytest.mark.parametrize("words", ["rate", "rate=", "=1,2", "rate=1,,2"])
def test_an_assignment_of_another_form_is_refused(root: Path, run: Run, words: str) -> None:
    status, _, err = run("sweep", words, root.parent / "workload.toml", root)
    assert status == 2
    assert "expected KEY=A,B,C" in err


def test_lists_are_values(root: Path, run: Run) -> None:
    _, out, _ = run("sweep", "device.cores=[0],[0,1]", root.parent / "workload.toml", root)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│ ")] == ["[0]", "[0,"]


def test_an_interrupted_sweep_shows_the_values_that_are_done(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cotenant.api import sweeping

    real, count = sweeping.Simulation.runs, iter(range(9))

    def interrupted(self: Any, seeds: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(self, seeds)

    monkeypatch.setattr(sweeping.Simulation, "runs", interrupted)
    _, out, err = run("sweep", "rate=1,2,3,4", root.parent / "workload.toml", root, "--cores", "0")
    assert "interrupted after 2 of 4 values" in err
    assert len([line for line in out.splitlines() if line.startswith("│ ")]) == 2
