"""Applications: what they refuse, and whether the division of their SLO keeps every path and needs least."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.application import Application, Stage, needed_share, stage_loads
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.types import DEVICES, LATENCY, Infeasible, Load
from plan_samples import CPU, GPU, MODELS, MS, costs

COSTS = costs()
BOOK = RoundCache(COSTS)
KINDS = (GPU,)


def app(*stages: Stage, rate: float = 200.0, slo_ms: float = 150.0) -> Application:
    return Application("app", int(slo_ms * MS), rate, stages)


def paths(application: Application) -> Iterator[tuple[str, ...]]:
    after = {stage.name: stage.after for stage in application.stages}
    needed = {name for names in after.values() for name in names}

    def back(name: str) -> Iterator[tuple[str, ...]]:
        for before in after[name]:
            yield from ((*path, name) for path in back(before))
        if not after[name]:
            yield (name,)

    for name in after:
        if name not in needed:
            yield from back(name)


def total(loads: tuple[Load, ...]) -> float:
    return sum(needed_share(BOOK, load, KINDS) for load in loads)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ((), "at least one stage"),
        ((Stage("a", "small"), Stage("a", "wide")), "name of its own"),
        ((Stage("a", "small", ("b",)),), "one of a"),
        ((Stage("a", "small", ("b",)), Stage("b", "small", ("a",))), "circle"),
        ((Stage("a", "small", ("a",)),), "circle"),
    ],
)
def test_an_impossible_graph_is_refused(stages: tuple[Stage, ...], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        app(*stages)


@pytest.mark.parametrize(("rate", "slo"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_rates_and_slos_are_positive(rate: float, slo: float) -> None:
    with pytest.raises(InvalidValueError, match="application 'app'"):
        app(Stage("a", "small"), rate=rate, slo_ms=slo)


def test_stages_beside_each_other_have_the_whole_slo() -> None:
    game = app(*(Stage(f"s{n}", "small") for n in range(3)), Stage("deep", "deep"))
    loads = stage_loads(game, KINDS, COSTS)
    assert [load.tenant for load in loads] == ["app.s0", "app.s1", "app.s2", "app.deep"]
    assert {(load.slo_ns, load.rate_per_s) for load in loads} == {(150 * MS, 200.0)}


@pytest.mark.parametrize("rate", [5.0, 60.0, 200.0, 900.0])
@pytest.mark.parametrize(
    "stages",
    [
        (Stage("a", "small"), Stage("b", "heavy", ("a",))),
        (Stage("a", "middle"), Stage("b", "deep", ("a",)), Stage("c", "wide", ("a",))),
        (Stage("a", "middle"), Stage("b", "deep"), Stage("c", "wide", ("a", "b"))),
    ],
)
def test_one_cut_is_as_good_as_the_best_of_a_grid(stages: tuple[Stage, ...], rate: float) -> None:
    application = app(*stages, rate=rate)
    needed = total(stage_loads(application, KINDS, COSTS))
    slo = application.slo_ns
    best = float("inf")
    for step in range(1, 300):
        cut = slo * step // 300
        loads = tuple(
            Load(stage.name, stage.model, rate, slo - cut if stage.after else cut) for stage in application.stages
        )
        best = min(best, total(loads))
    assert needed <= best * (1 + 1e-3)


def test_a_chain_of_three_is_near_the_best_of_a_grid() -> None:
    chain = app(Stage("a", "small"), Stage("b", "heavy", ("a",)), Stage("c", "middle", ("b",)), slo_ms=200)
    needed = total(stage_loads(chain, KINDS, COSTS))
    slo, steps = chain.slo_ns, 40
    best = float("inf")
    for first, second in product(range(1, steps), repeat=2):
        if first + second < steps:
            parts = (slo * first // steps, slo * second // steps, slo * (steps - first - second) // steps)
            loads = tuple(
                Load(stage.name, stage.model, 200.0, part) for stage, part in zip(chain.stages, parts, strict=True)
            )
            best = min(best, total(loads))
    assert needed <= best * 1.02


def test_more_may_be_needed_without_a_good_division() -> None:
    application = app(Stage("a", "small"), Stage("b", "heavy", ("a",)), rate=60.0)
    a, b = stage_loads(application, KINDS, COSTS)
    halves = tuple(Load(load.tenant, load.model, 60.0, 75 * MS) for load in (a, b))
    assert b.slo_ns > a.slo_ns
    assert total((a, b)) < 0.9 * total(halves)


def test_what_no_device_can_do_in_time_is_left_to_the_planner() -> None:
    application = app(Stage("a", "heavy"), Stage("b", "heavy", ("a",)), slo_ms=20)
    loads = stage_loads(application, KINDS, COSTS)
    assert sum(load.slo_ns for load in loads) <= application.slo_ns
    failed = Elastic().plan(loads, [GPU], COSTS)
    assert isinstance(failed, Infeasible)
    assert failed.constraint == LATENCY


def test_without_devices_the_planner_says_so() -> None:
    application = app(Stage("a", "small"), Stage("b", "heavy", ("a",)))
    loads = stage_loads(application, (), COSTS)
    assert 0 < sum(load.slo_ns for load in loads) <= application.slo_ns
    failed = Elastic().plan(loads, [], COSTS)
    assert isinstance(failed, Infeasible)
    assert failed.constraint == DEVICES


def test_a_load_needs_at_least_what_the_bound_says() -> None:
    for model, rate in product(MODELS, (1.0, 50.0, 1000.0)):
        load = Load(model, model, rate, 120 * MS)
        assert needed_share(BOOK, load, KINDS) >= BOOK.least_share(load, GPU) * (1 - 1e-8)


@st.composite
def graphs(draw: st.DrawFn) -> Application:
    stages: list[Stage] = []
    for number in range(draw(st.integers(1, 6))):
        after = tuple(f"s{n}" for n in range(number) if draw(st.booleans()))
        stages.append(Stage(f"s{number}", draw(st.sampled_from(sorted(MODELS))), after))
    rate = draw(st.floats(1.0, 500.0))
    return Application("app", draw(st.sampled_from((6, 40 * MS, 150 * MS, 800 * MS))), rate, tuple(stages))


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_no_path_takes_more_than_the_slo(application: Application) -> None:
    loads = stage_loads(application, (GPU, CPU), COSTS)
    slo = dict(zip((stage.name for stage in application.stages), (load.slo_ns for load in loads), strict=True))
    for path in paths(application):
        assert sum(slo[name] for name in path) <= application.slo_ns
    assert loads == stage_loads(application, (GPU, CPU), COSTS)
