"""The flat rules of VELTAIR's benchmarks against those of the product: the same tables, the same decisions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.veltair import _flat, _flat_blocks, _flat_slack
from bench.papers.veltair._flat import CORES, DUE, END, FIELDS, FIXED, GONE, SINCE, STATE
from bench.papers.veltair._flat_rows import FlatRows
from block_sides import BYTE_COST, LOW, SWITCH_NS, Rules, Side, drawn_jobs, drawn_side, slack_rules
from cotenant.techniques.layer_blocks.policy import block_jobs, block_model, price_plans, published, slack_blocks
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockSnapshot, BlockStart, Change, JobDrop
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.price_plans import PRICES, choices_of
from cotenant.techniques.layer_blocks.policy.published import ALGORITHM_2, BlockRules
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks

SLO_NS = 10_000
DECISIONS = 50
"""Decisions for each drawn set of models."""


class FlatTables:
    """The tables of a model that flat rules use."""

    def __init__(self, model: BlockModel, side: Side) -> None:
        dims, budget = [model.units, model.versions, model.levels, model.cores], side.target * side.slo
        self.tight, self.averages = [0.0] * (model.levels * model.cores * model.units), [0] * model.levels
        _flat.fill_tight(dims, model.ns, 0, True, side.total, self.tight)
        _flat.fill_averages(dims, model.ns, 0, True, side.total, budget, self.averages)
        choices, rows = choices_of(model.cores), model.levels * len(PRICES)
        scratch = [[0.0] * len(choices), *([0] * len(choices) for _ in range(3))]
        sizes = (rows * model.units, rows * model.units, rows * (model.units + 1), rows * (model.units + 1))
        self.plans = [[0] * size for size in (*sizes, model.levels)]
        _flat_slack.fill_plans(
            *(dims, model.ns, model.moved, 0, PRICES, SWITCH_NS, BYTE_COST, choices, budget),
            *(*scratch, *self.plans),
        )


def agree_on_tables(model: BlockModel, flat: FlatTables) -> None:
    """The tables of both forms have the same numbers."""
    assert [each for level in model.tight for cores in level for each in cores] == flat.tight
    assert model.averages == flat.averages
    ends, widths, lefts, works, preferred = flat.plans
    assert model.preferred == preferred
    for at in range(model.levels * len(PRICES)):
        level, price = divmod(at, len(PRICES))
        plans, row, rest = model.plans[level], at * model.units, at * (model.units + 1)
        assert [each.ends[price] for each in plans] == ends[row : row + model.units]
        assert [each.cores[price] for each in plans] == widths[row : row + model.units]
        assert [each.left_ns[price] for each in plans] == lefts[rest : rest + model.units]
        assert [each.work_ns[price] for each in plans] == works[rest : rest + model.units]


def flat_decision(rules: Rules, blocks: BlockSnapshot, rows: FlatRows, tables: list[FlatTables]) -> list[Change]:
    """One decision by the flat rules, which write it into the rows as well."""
    lanes = blocks.now_ns, blocks.free, blocks.total, blocks.bandwidth, blocks.beside
    if isinstance(rules, BlockRules):
        count = _flat_blocks.decide_blocks(
            *(rules.grain, rules.by_slack, rules.capped, rules.target, rules.replans, rules.adapts, blocks.drops),
            *(*lanes, rows.dims, rows.spans, rows.moved),
            *([each.tight for each in tables], [each.averages for each in tables], rows.jobs, rows.rows, rows.out),
        )
    else:
        knobs = rules.target, rules.quantum_ns(SLO_NS), rules.narrow, rules.used_patience, rules.memory
        plans = [[each.plans[at] for each in tables] for at in range(5)]
        count = _flat_slack.decide_slack(
            *(knobs, blocks.drops, *lanes, len(PRICES), rows.dims, rows.spans, rows.moved),
            *(*plans, rows.jobs, rows.rows, rows.out),
        )
    return rows.changes(count)


def agree_on_rows(rows: FlatRows, before: list[int], changes: list[Change], now: int) -> None:
    """The rows that flat rules leave say the same as their changes."""
    expected, at = list(before), {each.first: FIELDS * row for row, each in enumerate(rows.found)}
    started = set()
    for change in changes:
        if isinstance(change, JobDrop):
            row = at[change.job.first]
            expected[row + STATE] = GONE
        elif isinstance(change, BlockStart):
            row = at[change.job.first]
            new = rows.jobs[row : row + FIELDS]
            due = now + change.takes_ns
            assert (new[END], new[CORES], new[SINCE], new[DUE]) == (change.end, change.cores, now, due)
            started.add(row)
        else:
            row = at[change.block.first]
            due = change.block.since_ns + change.takes_ns
            expected[row + STATE], expected[row + CORES], expected[row + DUE] = FIXED, change.cores, due
    for row in range(0, len(before), FIELDS):
        assert row in started or rows.jobs[row : row + FIELDS] == expected[row : row + FIELDS]


def drawn_rules(rng: Random, side: Side) -> Rules:
    if rng.random() < 0.4:
        narrow, patience = rng.choice([0.0, 0.5, 1.0]), rng.choice([1.0, 1.3, 5.0, None])
        return slack_rules(side.total, narrow, patience, rng.choice([0.5, 0.9]))
    grain = rng.choice([ALGORITHM_2, ALGORITHM_2, 1, 2])
    replans, adapts, by_slack, capped = (rng.random() < 0.6 for _ in range(4))
    return BlockRules(side.target, replans, adapts, grain, by_slack, capped)


def told(blocks: BlockSnapshot, changes: list[Change]) -> Iterator[str]:
    """The kinds of cases that a decision is."""
    for change in changes:
        yield type(change).__name__
    begun = [change for change in changes if isinstance(change, BlockStart)]
    yield from ("short" for start in begun if start.wanted)
    yield from ("resumed" for start in begun if start.job.has_begun)
    yield from ("own lanes" for start in begun if start.job.cores)
    yield from ("another version" for start in begun if start.version)
    yield from ("under pressure" for start in begun if start.pressure_pct == 100)
    yield from ("a block within a model" for start in begun if start.end < start.job.model.units)
    if len(begun) > 1:
        yield "several starts"
        if [start.job.first for start in begun] != sorted(start.job.first for start in begun):
            yield "another order"
    if not changes and blocks.free and blocks.ready:
        yield "all wait"
    if any(job.rank < LOW for job in blocks.ready):
        yield "priorities"


def play(seed: int, counts: Counter[str]) -> None:
    """Draw models and decisions, and compare both forms."""
    rng = Random(seed)
    side, now = drawn_side(rng), 5000
    tables = [FlatTables(model, side) for model in side.models]
    for model, flat in zip(side.models, tables, strict=True):
        agree_on_tables(model, flat)
    by_model = {id(model): flat for model, flat in zip(side.models, tables, strict=True)}
    for _ in range(DECISIONS):
        found, free = drawn_jobs(rng, side, now)
        blocks = side.sees(found, now, free, rng.random() < 0.5)
        blocks = replace(blocks, bandwidth=rng.choice([0.0, 2.0, 20.0]), beside=rng.choice([0.0, 0.0, 0.4]))
        rules, rows = drawn_rules(rng, side), FlatRows(blocks)
        before = list(rows.jobs)
        expected = flat_decision(rules, blocks, rows, [by_model[id(model)] for model in rows.models])
        quantum = rules.quantum_ns(SLO_NS) if isinstance(rules, SlackBlocks) else 0.0
        changes = side.decide(rules, blocks, quantum)
        assert changes == expected
        agree_on_rows(rows, before, changes, now)
        kind = type(rules).__name__
        counts.update([kind, *(f"{kind}: {each}" for each in told(blocks, changes))])


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(0, 1 << 30))
def test_both_forms_decide_the_same(seed: int) -> None:
    play(seed, Counter())


KINDS = (
    *("BlockStart", "JobDrop", "resumed", "own lanes", "another version", "under pressure", "several starts"),
    *("a block within a model", "another order", "priorities"),
)
FLOORS = {
    **{f"BlockRules: {kind}": 40 for kind in (*KINDS, "BlockExpansion", "short")},
    **{f"SlackBlocks: {kind}": 25 for kind in KINDS},
    "SlackBlocks: all wait": 5,
    "BlockRules": 3000,
    "SlackBlocks": 2000,
}
"""How many decisions must be cases of each kind."""
PRODUCT = (block_model, block_jobs, price_plans, published, slack_blocks)
FLAT = (_flat, _flat_blocks, _flat_slack)
OF_POLICIES = (
    "LayerBlock.",
    "SlackBlocks.changes",
    "SlackBlocks.queue_key",
    "SlackBlocks.__post_init__",
    "SlackBlocks.byte_price",
)
"""Methods that need more than jobs; other tests play them."""


def test_many_decisions_of_all_kinds_are_the_same_and_reach_every_line() -> None:
    files, reached = {module.__file__ for module in (*PRODUCT, *FLAT)}, set[tuple[str, str, int]]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in files:
            return None
        reached.add((code.co_filename, code.co_qualname, frame.f_lineno))
        return trace

    counts: Counter[str] = Counter()
    before = sys.gettrace()
    try:
        for seed in range(120):
            sys.settrace(trace if seed < 60 else before)
            play(seed, counts)
    finally:
        sys.settrace(before)
    assert {name: counts[name] for name, least in FLOORS.items() if counts[name] < least} == {}
    assert sorted(set(lines_of((*PRODUCT, *FLAT))) - reached) == []


def lines_of(modules: tuple[ModuleType, ...]) -> Iterator[tuple[str, str, int]]:
    """The lines of all functions of modules."""
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                functions = vars(value).values() if isinstance(value, type) else (value,)
                for each in functions:
                    each = each.fget if isinstance(each, property) else each
                    if isinstance(each, FunctionType) and each.__code__.co_filename == module.__file__:
                        yield from code_lines(each.__code__)


def code_lines(code: CodeType) -> Iterator[tuple[str, str, int]]:
    if code.co_qualname.startswith(OF_POLICIES):
        return
    for _, _, line in code.co_lines():
        if line is not None and line != code.co_firstlineno:
            yield code.co_filename, code.co_qualname, line
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.startswith("<"):
            yield from code_lines(each)
