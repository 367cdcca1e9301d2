"""Decisions of the rules of blocks: what they give out, in which order, and what they write into the rows."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from block_models import random_spans, spans_of
from cotenant.core.predictor import Spans
from cotenant.techniques.layer_blocks.policy.rules import (
    ACTS,
    CORES,
    DEADLINE,
    DROP,
    DUE,
    END,
    FIELDS,
    FIXED,
    GONE,
    GROW,
    MODEL,
    PAUSED,
    RUNS,
    SINCE,
    START,
    STATE,
    UNIT,
    VERSION,
    WAITS,
    WANTED,
    fill_averages,
    fill_tight,
)
from cotenant.techniques.layer_blocks.policy.rules_blocks import (
    DYNAMIC,
    FIXED_BLOCKS,
    LAYERS,
    WHOLE,
    averages_of,
    decide_blocks,
    decide_prema,
)
from cotenant.techniques.layer_blocks.policy.rules_slack import decide_slack, fill_plans
from cotenant.techniques.layer_blocks.policy.tables import PRICES, choices_of

SOME = settings(max_examples=80, deadline=None, database=None)
LOW = 1 << 16


class Side:
    """Models and what the rules look up of them."""

    def __init__(self, models: list[Spans], total: int, target: float = 0.9, slo: int = 10_000) -> None:
        self.models, self.total, self.target = models, total, target
        self.dims = [each for spans in models for each in spans[:4]]
        self.spans, self.moved = [spans.ns for spans in models], [spans.moved for spans in models]
        self.tight, self.averages, self.plans = [], [], ([], [], [], [], [])
        for model, spans in enumerate(models):
            tight, averages = [0.0] * (spans.levels * spans.cores * spans.units), [0] * spans.levels
            fill_tight(self.dims, spans.ns, model, True, total, tight)
            fill_averages(self.dims, spans.ns, model, True, total, target * slo, averages)
            self.tight.append(tight)
            self.averages.append(averages)
            choices, rows = choices_of(total), spans.levels * len(PRICES)
            scratch = [[0.0] * len(choices), *([0] * len(choices) for _ in range(3))]
            sizes = (rows * spans.units, rows * spans.units, rows * (spans.units + 1), rows * (spans.units + 1))
            made = [[0] * size for size in (*sizes, spans.levels)]
            fill_plans(
                *(self.dims, spans.ns, spans.moved, model, PRICES, 50.0, 0.5, choices, target * slo),
                *(*scratch, *made),
            )
            for kept, each in zip(self.plans, made, strict=True):
                kept.append(each)

    def blocks(self, granularity: int, jobs: list[int], now: int, free: int, **options: bool) -> list[list[int]]:
        rows = len(jobs) // FIELDS
        out = [0] * (ACTS * rows)
        flags = (
            options.get("capped", False),
            self.target,
            options.get("replans", True),
            True,
            options.get("drops", False),
        )
        count = decide_blocks(
            *(granularity, 2, *flags, now, free, self.total, 20.0, 0.0),
            *(self.dims, self.spans, self.moved, self.tight, self.averages, jobs, rows, out),
        )
        return [out[at : at + ACTS] for at in range(0, count * ACTS, ACTS)]

    def prema(self, jobs: list[int], now: int, free: int, drops: bool = False, quantum: int = 1) -> list[list[int]]:
        rows = len(jobs) // FIELDS
        out = [0] * (ACTS * rows)
        count = decide_prema(quantum, drops, now, free, self.total, self.dims, self.spans, jobs, rows, out)
        return [out[at : at + ACTS] for at in range(0, count * ACTS, ACTS)]

    def slack(
        self,
        jobs: list[int],
        now: int,
        free: int,
        drops: bool = False,
        knobs: tuple[float, ...] = (0.9, 800, 0.5, 1.3, 0.5),
    ) -> list[list[int]]:
        rows = len(jobs) // FIELDS
        out = [0] * (ACTS * rows)
        count = decide_slack(
            *(knobs, drops, now, free, self.total, 20.0, 0.0, len(PRICES)),
            *(self.dims, self.spans, self.moved, *self.plans, jobs, rows, out),
        )
        return [out[at : at + ACTS] for at in range(0, count * ACTS, ACTS)]

    def presses(self, job: list[int], now: int, patience: float) -> bool:
        """Whether a job has begun and must go on: by definition, on every unit by itself."""
        spans, units = self.models[job[MODEL]], range(job[UNIT], self.models[job[MODEL]].units)
        base = (self.total - 1) * (spans.units + 1)
        alone = sum(spans.ns[base + unit + 1] - spans.ns[base + unit] for unit in units)
        return job[STATE] == PAUSED and job[DEADLINE] - now <= patience * alone


def row(model: int, state: int, arrival: int, deadline: int, unit: int = 0, cores: int = 0, **more: int) -> list[int]:
    return [
        *(model, state, arrival, deadline, unit, more.get("end", 0), cores, more.get("wanted", 0)),
        *(more.get("version", 0), more.get("since", 0), more.get("due", 0), more.get("rank", LOW)),
    ]


def even(units: int, cores: int, ns: int = 600) -> Spans:
    """Units that scale perfectly."""
    return spans_of([[[[ns // count] * units for count in range(1, cores + 1)]]], [[[0] * units] * cores])


@st.composite
def floors(draw: st.DrawFn) -> tuple[Side, list[int], int, int, int]:
    """A side, rows of jobs, now, free cores and the seed."""
    rng = Random(draw(st.integers(0, 10_000)))
    total = rng.choice([1, 2, 4, 12])
    models = [random_spans(rng, rng.randint(1, 7), total, rng.choice([1, 3])) for _ in range(rng.randint(1, 3))]
    jobs: list[int] = []
    free, now = total, 5000
    for _ in range(rng.randint(1, 7)):
        model = rng.randrange(len(models))
        units, levels = models[model].units, models[model].levels
        arrival, slo = now - rng.randint(0, 3000), rng.randint(500, 20_000)
        kind, unit = rng.choice([WAITS, WAITS, PAUSED, RUNS, FIXED]), rng.randrange(units)
        if kind >= RUNS and free > 0:
            cores, end = rng.randint(1, free), rng.randint(unit + 1, units)
            kind = kind if end - unit > 1 else FIXED
            wanted = cores + rng.randint(1, 4) if kind == RUNS else 0
            since = now - rng.randint(0, 500)
            free -= cores
            due = since + rng.randint(1, 2000)
            version = rng.randrange(levels)
            more = {"end": end, "wanted": min(wanted, total), "version": version, "since": since, "due": due}
            jobs += row(model, kind, arrival, arrival + slo, unit, cores, **more)
        elif kind == PAUSED and unit:
            jobs += row(model, PAUSED, arrival, arrival + slo, unit, rng.choice([0, min(free, 3)]))
        else:
            jobs += row(model, WAITS, arrival, arrival + slo, rank=rng.choice([1, LOW, LOW]))
    return Side(models, total), jobs, now, free, rng.randrange(1000)


def hold(side: Side, before: list[int], jobs: list[int], made: list[list[int]], now: int, free: int) -> None:
    """What every decision must be, and that the rows say the same as the changes."""
    assert len({change[0] for change in made}) == len(made), "a job is changed once"
    for number, act, end, version, cores, wanted, takes, _ in made:
        at = FIELDS * number
        old, new = before[at : at + FIELDS], jobs[at : at + FIELDS]
        spans = side.models[new[MODEL]]
        if act == DROP:
            assert old[STATE] <= PAUSED
            assert new[STATE] == GONE
        elif act == START:
            free -= cores
            assert old[STATE] <= PAUSED
            assert old[UNIT] == new[UNIT] < end <= spans.units
            assert (new[END], new[VERSION], new[CORES], new[WANTED]) == (end, version, cores, wanted)
            assert cores >= 1
            assert wanted == 0 or wanted > cores
            assert version < spans.versions
            assert (new[SINCE], new[DUE]) == (now, now + takes)
            assert new[STATE] == (RUNS if wanted and end - new[UNIT] > 1 else FIXED)
            assert takes in [spans.block_ns(new[UNIT], end, version, at, cores) for at in range(spans.levels)]
        else:
            assert act == GROW
            free -= cores - old[CORES]
            assert old[STATE] == RUNS
            assert old[CORES] < cores == new[CORES] <= old[WANTED]
            assert new[STATE] == FIXED
            assert new[DUE] <= old[DUE] or new[DUE] <= now + (old[DUE] - old[SINCE])
    assert free >= 0, "more cores than there are"
    unchanged = set(range(len(jobs) // FIELDS)) - {change[0] for change in made}
    assert all(
        jobs[FIELDS * at : FIELDS * at + FIELDS] == before[FIELDS * at : FIELDS * at + FIELDS] for at in unchanged
    )


@SOME
@given(floors(), st.sampled_from([WHOLE, LAYERS, FIXED_BLOCKS, DYNAMIC]), st.booleans(), st.booleans(), st.booleans())
def test_decisions_of_blocks_hold(floor: tuple, granularity: int, capped: bool, replans: bool, drops: bool) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = side.blocks(granularity, jobs, now, free, capped=capped, replans=replans, drops=drops)
    hold(side, before, jobs, made, now, free)
    for number, act, end, _, _, wanted, _, _ in made:
        units, unit = side.models[jobs[FIELDS * number + MODEL]].units, before[FIELDS * number + UNIT]
        if act == START:
            assert granularity not in (WHOLE, LAYERS, FIXED_BLOCKS) or end == {
                WHOLE: units,
                LAYERS: unit + 1,
                FIXED_BLOCKS: min(units, unit + 2),
            }.get(granularity)
            assert granularity != WHOLE or wanted == 0, "whole models wait for their cores"
    idle = free - sum(c[4] - (before[FIELDS * c[0] + CORES] if c[1] == GROW else 0) for c in made if c[1] != DROP)
    waiting = [at for at in range(0, len(jobs), FIELDS) if WAITS <= jobs[at + STATE] <= PAUSED]
    assert granularity == WHOLE or not idle or not waiting, "somebody waits beside a free core"


@SOME
@given(floors(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_decisions_by_slack_hold(floor: tuple, drops: bool, narrow: float) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = side.slack(jobs, now, free, drops, (0.9, 800, narrow, 1.3, 0.5))
    hold(side, before, jobs, made, now, free)
    assert all(wanted == 0 for *_, wanted, _, _ in made), "it takes what it planned for"
    begun = [before[FIELDS * c[0] : FIELDS * c[0] + FIELDS] for c in made if c[1] == START]
    order = [(old[-1], not side.presses(old, now, 1.3), old[DEADLINE]) for old in begun]
    assert order == sorted(order), "who has begun and must go on first, then deadlines"
    runs = any(before[at + STATE] >= RUNS for at in range(0, len(before), FIELDS))
    waits = any(WAITS <= jobs[at + STATE] <= PAUSED for at in range(0, len(jobs), FIELDS))
    assert not waits or runs or begun or not free, "a wait that nothing ends"


@SOME
@given(floors(), st.booleans())
def test_decisions_of_prema_hold(floor: tuple, drops: bool) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = side.prema(jobs, now, free, drops)
    hold(side, before, jobs, made, now, free)
    begun = [change for change in made if change[1] == START]
    waits = any(WAITS <= jobs[at + STATE] <= PAUSED for at in range(0, len(jobs), FIELDS))
    assert len(begun) == (1 if free == side.total and (begun or waits) else 0)


def test_a_cap_keeps_a_block_to_its_average_and_the_threshold() -> None:
    """The first unit hardly scales and takes most of the time: the second asks for all cores, and a block that begins
    with it is not bounded."""
    steep = spans_of([[[[260, 400], [255, 200], [252, 133], [250, 100]]]], [[[0, 0]] * 4])
    side = Side([steep, steep], 4, target=0.875, slo=480)
    assert side.averages == [[3], [3]]
    beside = row(1, FIXED, 0, 480, 0, 1, end=2, since=0, due=400)  # both average 3: the threshold is 0
    jobs = [*row(0, PAUSED, 0, 480, 1, 0), *beside]
    free = side.blocks(DYNAMIC, list(jobs), 0, 3, replans=False)[0]
    capped = side.blocks(DYNAMIC, list(jobs), 0, 3, replans=False, capped=True)[0]
    assert (free[4], free[5]) == (3, 4), "it starts with what is free and wants all"
    assert (capped[4], capped[5]) == (3, 0)


def test_who_continues_keeps_its_own_cores_then_growers_then_the_queue() -> None:
    side = Side([even(4, 8)], 8, slo=1000)
    slow = row(0, RUNS, 0, 1000, 0, 2, end=4, wanted=4, since=100, due=1300)
    again = row(0, PAUSED, 0, 900, 2, 2)
    new = row(0, WAITS, 50, 1050)
    jobs = [*new, *slow, *again]
    made = side.blocks(FIXED_BLOCKS, jobs, 400, 6, replans=False)
    assert sorted((c[0], c[1]) for c in made) == [(0, START), (1, GROW), (2, START)]
    made.sort(key=lambda change: -change[0])
    averages = averages_of(side.dims, side.averages, jobs, 3, 0, 0.0)
    assert averages == 3 * side.averages[0][0]
    assert made[1][4] == 4
    assert sum(c[4] for c in made) - 2 == 6, "all free cores are given out"
    assert made[2][5] > made[2][4], "the last one wants more than was left"


def test_layers_go_by_slack_and_the_others_by_arrival() -> None:
    side = Side([even(3, 4)], 4, slo=2000)
    jobs = [*row(0, WAITS, 0, 2000), *row(0, WAITS, 10, 600)]
    assert [c[0] for c in side.blocks(LAYERS, list(jobs), 20, 1)] == [1]
    assert [c[0] for c in side.blocks(DYNAMIC, list(jobs), 20, 1)] == [0]
    assert [c[0] for c in side.slack(list(jobs), 20, 1)] == [1]


def test_tokens_grow_with_waiting_and_the_shortest_of_those_with_enough_goes() -> None:
    side = Side([even(4, 2, 1000), even(1, 2, 1000)], 2)
    long, short = row(0, WAITS, 0, 90_000), row(1, WAITS, 3000, 90_000)
    assert [c[0] for c in side.prema([*long, *short], 3000, 2)] == [1], "1 + 3000 / 2000 tokens are fewer than 3"
    assert [c[0] for c in side.prema([*long, *short], 4000, 2)] == [1], "the short one has 1 + 1000 / 500: 3 as well"
    assert [c[0] for c in side.prema([*long, *row(1, WAITS, 3900, 90_000)], 4000, 2)] == [0]
    assert side.prema([*long, *short], 4000, 1) == [], "one task at a time"
    assert side.prema([*long], 0, 2, quantum=600)[0][2] == 2, "at the first unit after the quantum"


def test_hopeless_jobs_are_given_up() -> None:
    side = Side([even(4, 2)], 2)
    late, good = row(0, WAITS, 0, 1500), row(0, WAITS, 0, 1900)
    for decide in (
        lambda jobs: side.blocks(DYNAMIC, jobs, 500, 2, drops=True),
        lambda jobs: side.slack(jobs, 500, 2, True),
    ):
        made = decide([*late, *good])
        assert made[0][:2] == [0, DROP]
        assert made[0][6] == 1200
        assert made[1][:2] == [1, START]


def test_ours_shares_the_cores_equally_and_gives_the_late_more() -> None:
    side = Side([even(40, 8, 840)], 8, target=0.9, slo=1_000_000)
    knobs = 0.9, 4200, 0.5, 1.3, 0.5
    alone = side.slack([*row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert alone[0][4] == 8
    assert alone[0][2] == 40, "a block of the whole model, within the quantum"
    both = side.slack([*row(0, WAITS, 0, 1_000_000), *row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert [c[4] for c in both] == [4, 4]
    assert both[0][2] == 20, "as long as the quantum on four cores"
    late = side.slack([*row(0, WAITS, 0, 5000), *row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert late[0][4] == 8


def test_ours_waits_for_cores_that_come_soon_and_nobody_passes() -> None:
    side = Side([even(40, 8, 80)], 8, slo=100_000)
    runs = row(0, FIXED, 0, 100_000, 0, 7, end=4, since=0, due=50)
    jobs = [*runs, *row(0, WAITS, 0, 450), *row(0, WAITS, 0, 100_000)]
    assert side.slack(list(jobs), 10, 1) == []
    assert side.slack(list(jobs), 10, 1, knobs=(0.9, 800, 0.0, 1.3, 0.5))[0][:2] == [1, START]


def test_ours_gives_up_who_has_become_too_dear_while_others_wait() -> None:
    steep = spans_of([[[[300 * 4, 300 * 4], [900, 900], [800, 800], [750, 750]]]], [[[0, 0]] * 4])
    side = Side([steep], 4, target=0.9, slo=3000)
    jobs = [*row(0, WAITS, 0, 1700), *row(0, WAITS, 0, 3000)]
    made = side.slack(list(jobs), 0, 4, True, (1.0, 800, 0.5, 1.2, 0.5))
    assert made[0][:2] == [0, DROP]
    assert side.slack(jobs[:FIELDS], 0, 4, True, (1.0, 800, 0.5, 1.2, 0.5))[0][:2] == [0, START], "nobody else waits"


def test_who_has_begun_lets_others_pass_only_while_it_can_wait() -> None:
    side = Side([even(10, 1, 100)], 1, slo=10_000)
    knobs = 0.9, 800, 0.5, 3.0, 0.5
    for left, first in ((1501, 1), (1500, 0)):  # 500 ns are left to run, and 3 times as long is its patience
        jobs = [*row(0, PAUSED, 0, left, 5), *row(0, WAITS, 0, 1450)]
        assert side.slack(jobs, 0, 1, knobs=knobs)[0][:2] == [first, START]
    begun = [*row(0, PAUSED, 0, 1500, 5), *row(0, PAUSED, 0, 1400, 5), *row(0, PAUSED, 0, 1000, 9)]
    assert side.slack(begun, 0, 1, knobs=knobs)[0][0] == 1, "of two that must go on the earlier deadline"
    ranked = [*row(0, PAUSED, 0, 600, 5), *row(0, WAITS, 0, 9000, rank=LOW - 1)]
    assert side.slack(ranked, 0, 1, knobs=knobs)[0][0] == 1, "a priority goes before all"
