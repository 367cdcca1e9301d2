"""`cotenant.plan` gives what `cotenant plan --json` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import cotenant
from commands import Run
from cotenant import registry
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.file import read_plan
from repositories import write_good

TENANTS = """
[[device]]
name = "cpu"
count = 2
cores = 1

[[tenant]]
name = "add_sub"
rate = {rate}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("planned") / "models", "add_sub")
    cotenant.profile(root, budget_s=0.0, settings={"device.cores": [0]})
    for name, rate in (("few", 5), ("many", 100_000_000)):
        (root.parent / f"{name}.toml").write_text(TENANTS.format(rate=rate), encoding="utf-8")
    return root


def printed(run: Run, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", *words, "--planner", "elastic_int", "--json")[1])
    return found


def test_a_plan_is_that_of_the_command(root: Path, run: Run, tmp_path: Path) -> None:
    tenants = root.parent / "few.toml"
    found = cotenant.plan(tenants, root, planner="elastic_int")
    assert found.fits
    assert json.loads(json.dumps(found.to_json())) == printed(run, tenants, "--profiles", root)
    assert [row["tenant"] for row in found.rows()] == ["add_sub"]
    assert "add_sub" in found._repr_html_()
    found.save(tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").plan.devices
    assert cotenant.plan(tenants, {"cpu": root}, planner="elastic_int", quick=True).to_json()["growth"] is None


@pytest.mark.parametrize("devices", [1, {"cpu": 1}])
def test_the_number_of_devices(root: Path, devices: int | dict[str, int]) -> None:
    found = cotenant.plan(root.parent / "few.toml", root, devices=devices, planner="elastic_int", quick=True)
    assert found.to_json()["devices_there"] == 1


def test_options_are_those_of_the_command(root: Path, run: Run, tmp_path: Path) -> None:
    tenants, plan, picture = root.parent / "few.toml", tmp_path / "plan.toml", tmp_path / "plan.svg"
    found = cotenant.plan(tenants, root, planner="elastic_int", poisson=True, quantile="p99", quick=True)
    words = (tenants, "--profiles", root, "--poisson", "--quantile", "p99", "--quick")
    expected = printed(run, *words, "--out", plan, "--svg", picture)
    assert json.loads(json.dumps(found.to_json())) == expected
    assert found.to_json()["poisson"]
    assert found.text() == plan.read_text(encoding="utf-8")
    assert found.svg() == picture.read_text(encoding="utf-8")
    again = cotenant.plan(tenants, root, planner="elastic_int", quick=True, running=plan)
    assert json.loads(json.dumps(again.to_json())) == printed(
        run, tenants, "--profiles", root, "--quick", "--running", plan
    )


def test_a_check_is_that_of_the_command(root: Path, run: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    cotenant.plan(root.parent / "few.toml", root, planner="elastic_int", quick=True).save(good)
    check = cotenant.check_plan(good, root)
    assert check.holds
    assert check.same_profile
    assert check.rows() == []
    text = re.sub(r"rate = 5(\.0)?\n", "rate = 100000000.0\n", good.read_text(encoding="utf-8"))
    assert text != good.read_text(encoding="utf-8")
    bad.write_text(text, encoding="utf-8")
    check = cotenant.check_plan(bad, {"cpu": root}, quantile="p99")
    assert not check.holds
    expected = printed_check(run, bad, "--profiles", root, "--quantile", "p99")
    assert {**expected, "violations": list(check.violations), "same_profile": check.same_profile} == expected
    assert [row["violation"] for row in check.rows()] == expected["violations"]


def printed_check(run: Run, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", "--check", *words, "--json")[1])
    return found


def test_an_error_of_a_plan_or_a_check_has_all_problems(root: Path, tmp_path: Path) -> None:
    tenants, plan = tmp_path / "tenants.toml", tmp_path / "plan.toml"
    text = TENANTS.format(rate=5)
    tenants.write_text(text + "".join(f'[[tenant]]\nname = "{name}"\nrate = 1\n' for name in ("one", "two")), "utf-8")
    with pytest.raises(PlanError) as caught:
        cotenant.plan(tenants, root)
    assert [each.split(": ")[1] for each in caught.value.problems] == ["tenant 'one'", "tenant 'two'"]
    cotenant.plan(root.parent / "few.toml", root, planner="elastic_int", quick=True).save(plan)
    plan.write_text(plan.read_text("utf-8").replace('"add_sub"', '"gone"'), "utf-8")
    with pytest.raises(PlanError, match="gone"):
        cotenant.check_plan(plan, root)


def test_tenants_that_do_not_fit(root: Path, run: Run, tmp_path: Path) -> None:
    tenants = root.parent / "many.toml"
    found = cotenant.plan(tenants, root, planner="elastic_int")
    assert not found.fits
    assert json.loads(json.dumps(found.to_json())) == printed(run, tenants, "--profiles", root)
    assert {"kind", "name", "value", "text"} <= set(found.rows()[0])
    with pytest.raises(PlanError, match="there is no plan: 'add_sub' breaks"):
        found.save(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="there is no plan: 'add_sub' breaks"):
        found.svg()


def test_what_is_wrong_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = root.parent / "few.toml"
    with pytest.raises(PlanError, match="device 'gpu' is not in the file, which has cpu"):
        cotenant.plan(tenants, root, devices={"gpu": 1})
    with pytest.raises(PlanError, match="headroom and poisson are both given"):
        cotenant.plan(tenants, root, headroom=0.2, poisson=True)
    monkeypatch.setattr(registry, "load_all", lambda socket: {})
    with pytest.raises(PlanError, match="no planner of tenants is installed"):
        cotenant.plan(tenants, root)
    with pytest.raises(PlanError, match="no planner of tenants is installed"):
        cotenant.check_plan(tenants, root)
