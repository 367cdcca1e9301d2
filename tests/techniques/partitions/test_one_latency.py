"""Planner, plan checker and predictor are asked the same questions of the same profiles, and give the same latencies.

`tests/golden/latencies.txt` has their answers for profiles that are drawn once; see `pytest --bless`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import PlanError
from cotenant.predict.online import OnlineModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import QUANTILES, ModelProfile, Point, Profile, load_profile, save_profile
from cotenant.techniques.partitions.plan.check import step_ns
from cotenant.techniques.partitions.plan.sources import TAIL, CostBasis, basis_of, read_profile_costs
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import DeviceType, Load, PartitionPlan, Slot
from cotenant.work import Work
from golden_files import GOLDEN, agree

DEVICE = DeviceType("cpu", ((12,), *((part, 12 - part) for part in range(1, 7))), 1 << 40)
"""A device with partitions of every size from 1 to 12."""
ROWS = (1, 2, 3, 5, 8, 13, 40)


def drawn_model(rng: Random) -> ModelProfile:
    """A model whose latency follows Amdahl's law and is linear in rows, but for noise, so that quantiles may rise with
    cores or fall with rows. Some of the points were not measured."""
    cores = sorted(rng.sample((1, 2, 3, 4, 6, 8, 12), rng.randint(1, 4)))
    batches = sorted(rng.sample((1, 2, 4, 6, 8, 16, 32), rng.randint(1, 5)))
    fixed_ms, row_ms, serial = rng.uniform(0.1, 20), rng.uniform(0.0, 10), rng.random()
    noise = rng.choice((0.0, 0.05, 0.5))
    points = []
    for shape in range(rng.randint(1, 3)):
        grid = [(items, count) for items in batches for count in cores]
        for items, count in sorted(rng.sample(grid, max(1, len(grid) - rng.randint(0, 2)))):
            ms = (fixed_ms + row_ms * items * (1 + shape)) * (serial + (1 - serial) / count)
            ns = max(1, round(ms * 1e6 * (1 + noise * rng.random())))
            points.append(Point(shape, items, count, 9, ns, *sorted(ns + rng.randint(0, ns) for _ in range(3))))
    return ModelProfile("digest", tuple(points), (1, 2), (0, 2), 1.0, padded=rng.random() < 0.2)


def drawn_profile(rng: Random, count: int) -> Profile:
    return Profile(this_device(), "2026-01-01", "a test", {f"m{number}": drawn_model(rng) for number in range(count)})


def basis_for(path: Path, profile: Profile, model: str, quantile: str) -> CostBasis:
    """What `cotenant plan` plans with."""
    save_profile(path, profile)
    return basis_of({"": read_profile_costs(path, quantile)}, [DEVICE], [model])


def predictor_of(path: Path, model: str, quantile: str) -> TablePredictor:
    """What a server predicts with before it has seen a launch."""
    online = OnlineModel(DEVICE.whole)
    online.add(model, load_profile(path).models[model].table(quantile))
    return online.predictor


def planned(costs: TableCosts, model: str, rows: int, cores: int) -> int | None:
    """The planner's latency; None where it has no such batches or sizes."""
    try:
        return costs.latency_ns(Work(model, 0, rows), cores, DEVICE.name)
    except PlanError:
        return None


def predicted(predictor: TablePredictor, model: str, shape: int, rows: int, cores: int) -> int:
    return predictor.latency_ns(Work(model, shape, rows, 0, predictor.unit_count(model)), cores)


def checked(costs: TableCosts, model: str, rows: int, cores: int) -> int | None:
    """The checker's latency of a batch with nothing beside it."""
    slot = Slot("tenant", rows, 1.0)
    loads = {"tenant": Load("tenant", model, 1.0, 10**12)}
    return step_ns(PartitionPlan(cores, 10**12, (slot,)), [slot], [], DEVICE.name, loads, costs)[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "profile.json"


@given(rng=st.randoms(use_true_random=False), quantile=st.sampled_from(QUANTILES))
@settings(max_examples=60, deadline=None)
def test_planner_checker_and_predictor_have_one_latency(path: Path, rng: Random, quantile: str) -> None:
    profile = drawn_profile(rng, 1)
    shapes = {point.shape for point in profile.models["m0"].points}
    least = min(point.cores for point in profile.models["m0"].points)
    basis = basis_for(path, profile, "m0", quantile)
    assert basis.tail is not None
    predictor, late = (predictor_of(path, "m0", each) for each in (quantile, TAIL))
    most = max(basis.costs.batches("m0"))
    for cores in range(1, 13):
        for rows in range(1, most + 2):
            found = planned(basis.costs, "m0", rows, cores)
            assert (found is not None) == (cores >= least and rows <= most)
            if found is None:
                continue
            assert found == max(predicted(predictor, "m0", shape, rows, cores) for shape in shapes)
            assert found == checked(basis.costs, "m0", rows, cores)
            assert planned(basis.tail, "m0", rows, cores) == max(
                predicted(late, "m0", shape, rows, cores) for shape in shapes
            )


def answers(path: Path) -> Iterator[str]:
    profile = drawn_profile(Random(64), 8)
    for model, measured in profile.models.items():
        costs = basis_for(path, profile, model, "p95").costs
        predictor = predictor_of(path, model, "p95")
        yield f"{model}{', padded' if measured.padded else ''}: latencies of {', '.join(map(str, ROWS))} rows, ns"
        for shape, cores in sorted({(point.shape, point.cores) for point in measured.points}):
            known = [each for each in measured.points if (each.shape, each.cores) == (shape, cores)]
            batches = " ".join(f"{each.items}:{each.p95_ns}" for each in known)
            yield f"  measured, {cores} cores, shape {shape}, rows:ns: {batches}"
        for cores in range(1, 13):
            told = [planned(costs, model, rows, cores) for rows in ROWS]
            yield f"  planner, {cores} cores: {' '.join('-' if ns is None else str(ns) for ns in told)}"
            for shape in sorted({point.shape for point in measured.points}):
                told = [predicted(predictor, model, shape, rows, cores) for rows in ROWS]
                yield f"  predictor, {cores} cores, shape {shape}: {' '.join(map(str, told))}"


def test_answers_are_the_golden_ones(path: Path, bless: bool) -> None:
    agree(GOLDEN / "latencies.txt", "".join(f"{line}\n" for line in answers(path)).encode(), bless)
