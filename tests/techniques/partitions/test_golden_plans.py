"""Golden plans: the files of plans for a few small requests, byte for byte.

Only planners whose answers rest on plain arithmetic are asked: neither the version of a solver nor how a machine adds
up vectors is to be seen here. `pytest --bless` writes the files anew: read the difference first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from bench import plan as bench_plan
from commands import Run, runner
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.file import PlanFile, Request, parse_plan, plan_text, read_plan
from cotenant.techniques.partitions.plan.scaling import Scaled, ScalingSettings, least_devices, rescale
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.types import Load, Plan
from golden_files import GOLDEN, agree
from plan_samples import CPU, GPU, MODELS, MS, costs, latencies

PLANS = GOLDEN / "plans"

GPUS = """
[[device]]
name = "gpu"
kind = "gpu"
count = 3
splits = [[100], [20, 80], [40, 60], [50, 50]]
memory_gib = 11
partition_mib = 512
"""
CORES = """
[[device]]
name = "cpu"
count = 2
cores = 4
price = 0.25
"""

TRAFFIC = """
[[application]]
name = "traffic"
rate = 70
slo_ms = 220

[[application.stage]]
name = "find"
model = "middle"

[[application.stage]]
name = "cars"
model = "small"
after = ["find"]

[[application.stage]]
name = "people"
model = "wide"
after = ["find"]

[[application.stage]]
name = "join"
model = "small"
after = ["cars", "people"]
"""


def tenant(name: str, rate: float, slo_ms: float, model: str = "") -> str:
    of = f'model = "{model}"\n' if model else ""
    return f'[[tenant]]\nname = "{name}"\n{of}rate = {rate}\nslo_ms = {slo_ms}\n'


REQUESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "interference": (  # neighbours slow each other down, so much that the first attempt to place all fails
        GPUS + tenant("middle", 120, 80) + tenant("heavy", 120, 60) + tenant("small", 120, 40) + tenant("deep", 60, 40),
        ("--planner", "elastic_int", "--headroom", "0.2"),
    ),
    "shared": (  # a device of four cores, whose partitions serve several tenants in rounds
        CORES.replace("count = 2", "count = 1")
        + tenant("clicks", 40, 60, "small")
        + tenant("search", 25, 150, "middle")
        + tenant("photos", 8, 300, "wide")
        + tenant("papers", 10, 400, "deep"),
        ("--planner", "elastic"),
    ),
    "applications": (  # the SLO of the whole is divided among the stages; one model serves two of them and a tenant
        CORES + TRAFFIC + tenant("own", 15, 120, "small"),
        ("--planner", "elastic_int", "--headroom", "0.35"),
    ),
    "devices": (  # devices of two kinds, filled one after the other, and a memory that does not hold every model
        GPUS.replace("memory_gib = 11", "memory_gib = 2.5")
        + CORES
        + tenant("heavy", 190, 150)
        + tenant("wide", 90, 200)
        + tenant("middle", 20, 200)
        + tenant("small", 30, 100)
        + tenant("deep", 15, 300),
        ("--planner", "sbp"),
    ),
    "apart": (  # no partition is shared
        GPUS + tenant("small", 300, 25) + tenant("middle", 120, 60) + tenant("heavy", 110, 150),
        ("--planner", "greedy", "--devices", "gpu=2"),
    ),
}
"""File of tenants and options of the command."""


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[str | Path, ...]:
    """Options that name the profiles of both kinds of device, and what is known of interference on a GPU."""
    options: list[str | Path] = []
    for kind in (GPU, CPU):
        rows = [
            f"{model},{size},{batch},{ns / MS}"
            for model, sizes in latencies(kind.sizes, kind.whole).items()
            for size, points in sizes.items()
            for batch, ns in points.items()
        ]
        path = write(tmp_path / f"{kind.name}.csv", ("model,partition_pct,batch,latency_ms", *rows))
        options += ["--profiles", f"{kind.name}={path}"]
    used = [f"{model},1,{100 * l2},{100 * dram}" for model, (_, _, _, l2, dram) in MODELS.items()]
    facts = [f"{model},1x3x8x8,100,{900 + 100 * number},16" for number, model in enumerate(MODELS)]
    return (
        *options,
        *("--util", write(tmp_path / "util.csv", ("model,batch,l2_util_pct,dram_util_pct", *used))),
        *("--constants", write(tmp_path / "constants.csv", ("c1,c2,c3,c4,c5", "0.1,0.7,0.35,0.2,0.95"))),
        *("--models", write(tmp_path / "models.csv", ("model,input,slo_ms,memory_mb,max_batch", *facts))),
    )


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command, with yardstick planners and CSV files as profiles."""
    return runner(monkeypatch, capfd, bench_plan.main)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_plan_is_the_golden_one(
    name: str, plan: Run, tmp_path: Path, profiles: tuple[str | Path, ...], bless: bool
) -> None:
    request, options = REQUESTS[name]
    out = tmp_path / "plan.toml"
    arguments = (write(tmp_path / "tenants.toml", request.splitlines()), *profiles, *options, "--quick", "-o", out)
    status, text, err = plan(*arguments)
    assert status == 0, text + err
    agree(PLANS / f"{name}.toml", out.read_bytes(), bless)
    assert plan("--check", out, *profiles)[0] == 0


# --- from plan to plan ------------------------------------------------------------------------------------------------

LOOKS = (1.0, 8.0, 12.0, 3.0, 3.0, 1.0)
"""Rates at each look over those of the first."""


def shared(factor: float) -> tuple[Load, ...]:
    """The loads of the golden plan of that name, with so much larger rates."""
    loads = read_plan(PLANS / "shared.toml").request.loads
    return tuple(structs.replace(each, rate_per_s=each.rate_per_s * factor) for each in loads)


@pytest.mark.parametrize(("name", "devices", "then", "now"), [("moved", 1, 1.0, 5.0), ("kept", 4, 18.0, 20.0)])
def test_a_plan_that_starts_from_a_running_one_is_the_golden_one(
    name: str, devices: int, then: float, now: float, bless: bool
) -> None:
    """Of the planner by columns as it is without a solver, where the first plans that it tries cost least already."""
    inventory = (CPU,) * devices
    running = Elastic(with_interference=True, headroom=0.1).plan(shared(then), inventory, costs())
    assert isinstance(running, Plan)
    running = replace(running, devices=running.devices[::-1])  # which the planner would not have come to
    loads = shared(now)
    found = Optimal(headroom=0.1, solver=False).solve(loads, inventory, costs(), running)
    assert found.price == found.bound, "no search, whose sums would depend on the machine"
    assert isinstance(found.plan, Plan)
    text = plan_text(PlanFile(Request(loads, inventory), found.plan, 0.1))
    moved = f"# moved: {', '.join(found.moved) or 'nobody'}\n"
    agree(PLANS / f"{name}.toml", (moved + text).encode(), bless)
    assert parse_plan(text, name).plan == found.plan


def test_devices_are_taken_and_given_back_as_in_the_golden_file(bless: bool) -> None:
    planner, settings = Elastic(with_interference=True, headroom=0.1), ScalingSettings(margin=0.1, patience=2)
    inventory = read_plan(PLANS / "shared.toml").request.devices * 4
    held: Scaled | None = None
    lines: list[str] = []
    for factor in LOOKS:
        loads = shared(factor)
        if held is None:
            held = least_devices(planner, loads, inventory, costs())
        else:
            held = rescale(planner, loads, inventory, costs(), held, settings)
        assert isinstance(held.plan, Plan)
        lines.append(f"rates x {factor:g}: {held.devices} devices, too many at {held.calm} looks")
        for number, device in enumerate(held.plan.devices):
            for part in device.partitions:
                slots = ", ".join(f"{slot.tenant} {slot.rate_per_s!r}/s by {slot.batch}" for slot in part.slots)
                lines.append(f"    device {number}, {part.size} cores, {part.duty_ns} ns: {slots}")
    agree(PLANS / "scaling.txt", "".join(f"{line}\n" for line in lines).encode(), bless)


def test_no_golden_plan_is_without_its_request() -> None:
    assert sorted(path.name for path in PLANS.iterdir()) == sorted(
        [*(f"{name}.toml" for name in REQUESTS), "kept.toml", "moved.toml", "scaling.txt"]
    )
