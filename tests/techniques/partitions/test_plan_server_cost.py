"""Plans count what a server needs for requests besides models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cotenant
from commands import Run
from cotenant.profiles.profile_file import load_profile, save_profile
from cotenant.profiles.server_cost import PROTOCOLS, ProcessCost, RequestCost, ServerCost
from cotenant.repository import profile_path
from cotenant.techniques.partitions.plan.sources import basis_of, read_profile_costs
from cotenant.techniques.partitions.plan.types import DeviceType
from cotenant.work import Work
from repositories import write_good

US = 1000
REQUEST = RequestCost(
    ProcessCost(100 * US, 1024.0 * US, 0.0), ProcessCost(60 * US), ProcessCost(0), 50 * US, 40 * US, 400 * US
)
COST = ServerCost(1, dict.fromkeys(PROTOCOLS, REQUEST), 20 * US, 10 * US)
TENANTS = '[[device]]\nname = "cpu"\ncount = 1\ncores = 2\n\n[[tenant]]\nname = "add_sub"\nrate = {}\n'


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two repositories with equal profiles, of which the second has the cost of requests."""
    found = []
    for server in (None, COST):
        root = write_good(tmp_path_factory.mktemp("cost") / "models", "add_sub")
        if not found:
            cotenant.profile(root, budget_s=0.0, settings={"device.cores": [0]})
        else:
            path = profile_path(root)
            path.parent.mkdir()
            path.write_bytes(profile_path(found[0]).read_bytes())
            save_profile(path, replace(load_profile(path), server=server))
        found.append(root)
    return found[0], found[1]


def test_a_launch_costs_the_hand_over_and_its_requests_on_the_cores_of_the_partition(roots: tuple[Path, Path]) -> None:
    [profiled] = load_profile(profile_path(roots[0])).models.values()
    assert profiled.row_bytes
    taken = max(profiled.row_bytes, key=sum)[0]
    device = DeviceType("cpu", ((2,), (1, 1)), 1 << 34)
    free, charged = (basis_of({"": read_profile_costs(root)}, [device], ["add_sub"]).costs for root in roots)
    for batch, size in ((1, 1), (4, 2)):
        work = Work("add_sub", 0, batch)
        more = charged.latency_ns(work, size, "cpu") - free.latency_ns(work, size, "cpu")
        assert more == 30 * US + -(-batch * (160 * US + round(US * taken)) // size)


def test_more_requests_than_a_front_end_can_read_do_not_fit_and_the_remedies_do(
    roots: tuple[Path, Path], tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS.format(12_000))
    assert cotenant.plan(path, roots[0], planner="elastic_int", quick=True).fits
    found = cotenant.plan(path, roots[1], planner="elastic_int", quick=True).to_json()
    assert found["fits"] is False
    assert found["broken"]["constraint"] == "server"
    assert "--frontends 3" in found["broken"]["detail"]
    assert found["remedies"]
    _, out, _ = run("plan", path, "--profiles", roots[1], "--planner", "elastic_int", "--quick")
    assert "more 'cpu'" in out
    assert "server: measured" in out


def test_rates_grow_as_far_as_the_server_allows(roots: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS.format(1000))
    growth = cotenant.plan(path, roots[1], planner="elastic_int").to_json()["growth"]
    [profiled] = load_profile(profile_path(roots[1])).models.values()
    front_s = (100 * US + US * max(profiled.row_bytes, key=sum)[0]) / 1e9
    assert growth["factor"] <= 0.85 / front_s / 1100
