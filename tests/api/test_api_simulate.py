"""`cotenant.simulate` gives what `cotenant simulate --json` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cotenant
from commands import Run
from cotenant.errors import CotenantError
from cotenant.workload import load_workload
from repositories import write_good

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
    root = write_good(tmp_path_factory.mktemp("simulated") / "models", "add_sub", "two")
    cotenant.profile(root, budget_s=0.0)
    (root.parent / "workload.toml").write_text(WORKLOAD, encoding="utf-8")
    return root


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
