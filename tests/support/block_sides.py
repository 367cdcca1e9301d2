"""Models, jobs and decisions of the rules of blocks, and what must hold of every decision."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from block_models import random_spans, spans_of
from cotenant.core.predictor import Spans
from cotenant.techniques.layer_blocks.policy.block_jobs import (
    BlockJob,
    BlockSnapshot,
    BlockStart,
    Change,
    JobDrop,
    RunningBlock,
)
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.price_plans import choices_of
from cotenant.techniques.layer_blocks.policy.published import ALGORITHM_2, BlockRules
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.types import Tenant
from cotenant.work import Share

LOW = 1 << 16
QUANTUM_NS = 800
SWITCH_NS, BYTE_COST = 50.0, 0.5
BANDWIDTH = 20.0
Rules = BlockRules | SlackBlocks
"""What decides."""


def model_of(spans: Spans, slo: int = 10_000) -> BlockModel:
    """A model without tables."""
    return BlockModel(Tenant("a", slo, cuts=tuple(range(spans.units + 1))), 0, 1, spans)


def slack_rules(cores: int, narrow: float = 0.5, patience: float | None = 1.3, target: float = 0.9) -> SlackBlocks:
    """Options by which drawn models have something to decide."""
    lanes = tuple(Share((core,)) for core in range(cores))
    return SlackBlocks(lanes, target=target, narrow=narrow, patience=patience, memory=0.5)


class Side:
    """Models with the tables of all rules."""

    def __init__(self, models: list[Spans], total: int, target: float = 0.9, slo: int = 10_000) -> None:
        self.total, self.target, self.slo = total, target, slo
        self.models = [model_of(spans, slo) for spans in models]
        for model in self.models:
            model.add_pivots(True, target * slo)
            model.add_plans(choices_of(model.cores), BYTE_COST, target * slo, SWITCH_NS)

    def sees(self, jobs: list[BlockJob | RunningBlock], now: int, free: int, drops: bool = False) -> BlockSnapshot:
        """Jobs in the order of their numbers."""
        ready = [each for each in jobs if isinstance(each, BlockJob)]
        running = [each for each in jobs if isinstance(each, RunningBlock)]
        return BlockSnapshot(now, free, self.total, BANDWIDTH, 0.0, drops, ready, running)

    def decide(self, rules: Rules, blocks: BlockSnapshot, quantum: float = QUANTUM_NS) -> list[Change]:
        """One decision on a copy."""
        own = replace(blocks)
        return rules.changes(own) if isinstance(rules, BlockRules) else rules.within(quantum, own)

    def rules(self, grain: int = ALGORITHM_2, **options: bool) -> BlockRules:
        """Rules of `layer_block` that plan for the target of the tables."""
        return BlockRules(self.target, options.pop("replans", True), True, grain, **options)

    def waits(self, first: int, model: int, arrival: int, deadline: int, rank: int = LOW) -> BlockJob:
        return BlockJob(first, self.models[model], False, arrival, deadline, rank)

    def paused(
        self, first: int, model: int, arrival: int, deadline: int, unit: int, cores: int = 0, rank: int = LOW
    ) -> BlockJob:
        return BlockJob(first, self.models[model], True, arrival, deadline, rank, unit, cores)

    def runs(
        self, first: int, model: int, deadline: int, unit: int, end: int, cores: int, since: int, due: int, **more: int
    ) -> RunningBlock:
        """One that began with too few lanes if `wanted` is more than these, and then can grow unless told otherwise."""
        wanted = more.get("wanted", 0)
        grows = bool(more.get("grows", wanted > 0 and end - unit > 1))
        place = self.models[model], first, unit, end, more.get("version", 0), cores, wanted, grows
        return RunningBlock(first, *place, since, due, deadline)


def even(units: int, cores: int, ns: int = 600) -> Spans:
    """Units that scale perfectly."""
    return spans_of([[[[ns // count] * units for count in range(1, cores + 1)]]], [[[0] * units] * cores])


def nothing(units: int, cores: int, levels: int) -> Spans:
    """Units that take no time and move no bytes in any version: all costs are equal."""
    row = [[0] * units] * cores
    return spans_of([[row] * levels] * levels, [row] * levels)


def drawn_side(rng: Random) -> Side:
    """A few models; sometimes one of units that take no time, or models measured on fewer lanes than there are."""
    total = rng.choice([1, 2, 4, 12])
    cores = total if rng.random() < 0.8 else max(1, total // 2)
    models = [random_spans(rng, rng.randint(1, 7), cores, rng.choice([1, 3])) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        models.append(nothing(rng.randint(2, 5), cores, rng.choice([1, 3])))
    return Side(models, total)


def drawn_jobs(rng: Random, side: Side, now: int) -> tuple[list[BlockJob | RunningBlock], int]:
    """Jobs in all states, and how many lanes they leave free. Sometimes most are paused beside small growing blocks."""
    jobs: list[BlockJob | RunningBlock] = []
    free, is_paused = side.total, rng.random() < 0.3
    kinds = ["grows", "paused", "paused"] if is_paused else ["waits", "waits", "paused", "grows", "runs"]
    for first in range(rng.randint(1, 7)):
        model = rng.randrange(len(side.models))
        units, levels = side.models[model].units, side.models[model].levels
        arrival, slo = now - rng.randint(0, 3000), rng.randint(500, 20_000)
        kind, unit = rng.choice(kinds), rng.randrange(units)
        rank = rng.choice([1, LOW, LOW])
        if kind in ("grows", "runs") and free > 0:
            cores, end = rng.randint(1, min(free, 2) if is_paused else free), rng.randint(unit + 1, units)
            wanted = min(cores + rng.randint(1, 4), side.total) if kind == "grows" and end - unit > 1 else 0
            since = now - rng.randint(0, 500)
            due = since + rng.randint(1, 2000)
            more = {"wanted": wanted, "version": rng.randrange(levels)}
            jobs.append(side.runs(first, model, arrival + slo, unit, end, cores, since, due, **more))
            free -= cores
        elif kind == "paused" and unit:
            own = rng.choice([0, free, rng.randint(0, free)])
            jobs.append(side.paused(first, model, arrival, arrival + slo, unit, own, rank))
        else:
            jobs.append(side.waits(first, model, arrival, arrival + slo, rank))
    return jobs, free


@st.composite
def sides(draw: st.DrawFn) -> tuple[Side, list[BlockJob | RunningBlock], int, int]:
    """A side, its jobs, now, and free lanes."""
    rng = Random(draw(st.integers(0, 10_000)))
    side, now = drawn_side(rng), 5000
    jobs, free = drawn_jobs(rng, side, now)
    return side, jobs, now, free


def starts_of(changes: list[Change]) -> list[BlockStart]:
    return [change for change in changes if isinstance(change, BlockStart)]


def number_of(change: Change) -> int:
    """The number of the job that a change is of."""
    return change.job.first if isinstance(change, BlockStart | JobDrop) else change.block.first


def idle_after(blocks: BlockSnapshot, changes: list[Change]) -> int:
    """Free lanes that a decision leaves."""
    free = blocks.free
    for change in changes:
        if isinstance(change, BlockStart):
            free -= change.cores
        elif not isinstance(change, JobDrop):
            free -= change.cores - change.block.cores
    return free


def hold(blocks: BlockSnapshot, changes: list[Change]) -> None:
    """What every decision must be."""
    numbers = [number_of(change) for change in changes]
    assert len(set(numbers)) == len(numbers), "a job is changed once"
    for change in changes:
        if isinstance(change, JobDrop):
            assert blocks.drops
            assert change.job in blocks.ready
        elif isinstance(change, BlockStart):
            job, model = change.job, change.job.model
            assert job in blocks.ready
            assert job.unit < change.end <= model.units
            assert change.cores >= 1
            assert change.wanted == 0 or change.wanted > change.cores
            assert change.version < model.versions
            ends = [
                model.ns[at + change.end] - model.ns[at + job.unit]
                for at in (model.row(change.version, level, change.cores) for level in range(model.levels))
            ]
            assert change.takes_ns in ends
        else:
            block, due = change.block, change.block.since_ns + change.takes_ns
            assert block in blocks.running
            assert block.is_expandable
            assert block.cores < change.cores <= block.wanted
            assert due <= block.due_ns or due <= blocks.now_ns + (block.due_ns - block.since_ns)
    assert idle_after(blocks, changes) >= 0, "more lanes than there are"
