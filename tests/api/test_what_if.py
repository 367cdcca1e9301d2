"""What-if simulations: other keys of tenants, and SLOs of the workload."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import cotenant
from commands import Run
from cotenant.errors import CotenantError
from repositories import write_profiled

WORKLOAD = """
seed = 3
duration_s = 2.0

[[tenant]]
model = "add_sub"
rate = 200.0

[[tenant]]
model = "two"
rate = 60.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profiled(tmp_path_factory.mktemp("what_if") / "models", WORKLOAD, "add_sub", "two")


@pytest.fixture
def workload(root: Path) -> Path:
    return root.parent / "workload.toml"


def with_lines(root: Path, model: str, lines: str, to: Path) -> Path:
    """A copy of the repository with other lines in the section of a tenant."""
    shutil.copytree(root, to)
    path = to / model / "config.toml"
    text = re.sub(r"^slo_ms = .*$", lines, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    return to


CHANGES = {
    "slo": ({"slo_ms": 7}, "slo_ms = 7"),
    "all": (
        {"slo_ms": 0.5, "priority": 1, "weight": 2.5, "rate": 3, "max_rate": 50.0, "max_queue": 2, "share": 0.5},
        "slo_ms = 0.5\npriority = 1\nweight = 2.5\nrate = 3\nmax_rate = 50.0\nmax_queue = 2\nshare = 0.5",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_set_gives_what_a_repository_with_these_keys_gives(
    root: Path, workload: Path, run: Run, tmp_path: Path, name: str
) -> None:
    keys, lines = CHANGES[name]
    other = with_lines(root, "add_sub", lines, tmp_path / "models")
    traces = tmp_path / "set.jsonl", tmp_path / "file.jsonl"
    chosen = [part for key, value in keys.items() for part in ("--set", f"tenant.add_sub.{key}={value}")]
    common = ("--decision-us", 20_000, "--json", "--trace")
    status, of_set, err = run("simulate", workload, root, *chosen, *common, traces[0])
    assert (status, err) == (0, "")
    status, of_file, _ = run("simulate", workload, other, *common, traces[1])
    assert status == 0
    assert of_set == of_file
    assert traces[0].read_bytes() == traces[1].read_bytes()
    _, plain, _ = run("simulate", workload, root, *common, tmp_path / "plain.jsonl")
    assert json.loads(plain)["runs"] != json.loads(of_set)["runs"]
    settings = {f"tenant.add_sub.{key}": value for key, value in keys.items()}
    found = cotenant.simulate(workload, root, settings=settings, decision_us=20_000)
    assert found.to_json() == json.loads(of_set)["runs"][0]


def test_an_slo_in_the_workload_is_promised_and_not_only_judged(root: Path, workload: Path) -> None:
    text = workload.read_text(encoding="utf-8")
    tight = workload.with_name("tight.toml")
    tight.write_text(text.replace('model = "add_sub"', 'model = "add_sub"\nslo_ms = 4'), encoding="utf-8")
    found = cotenant.simulate(tight, root, decision_us=3000)
    chosen = cotenant.simulate(workload, root, settings={"tenant.add_sub.slo_ms": 4}, decision_us=3000)
    assert found.to_json() == chosen.to_json()
    line = found.tenant("add_sub")
    assert line.slo_ns == 4_000_000
    assert line.dropped + line.rejected > 0
    over = cotenant.simulate(tight, root, settings={"tenant.add_sub.slo_ms": 1000}, decision_us=3000)
    plain = cotenant.simulate(workload, root, settings={"tenant.add_sub.slo_ms": 1000}, decision_us=3000)
    assert over.to_json() == plain.to_json()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "tenant.add_sbu.slo_ms",
            5,
            r"no tenant 'add_sbu', expected one of add_sub, Owner of two; did you mean 'add_sub'\?",
        ),
        (
            "tenant.add_sub.slo",
            5,
            r"tenant.add_sub has no key 'slo', expected one of slo_ms, .*; did you mean 'slo_ms'",
        ),
        ("tenant.add_sub.slo_ms", -5, r"tenant.add_sub.slo_ms: Expected `float` > 0"),
        ("tenant.add_sub.slo_ms", "fast", r"tenant.add_sub.slo_ms: Expected `float`, got `str`"),
        ("tenant.add_sub.name", "x", r"no key 'name', expected one of slo_ms, weight, share, rate, max_rate, priority"),
        ("tenant.slo_ms", 5, r"the key is tenant.slo_ms, expected tenant.NAME.KEY"),
    ],
)
def test_wrong_keys_of_tenants(root: Path, workload: Path, key: str, value: object, said: str) -> None:
    with pytest.raises(CotenantError, match=said):
        cotenant.simulate(workload, root, settings={key: value})
