"""Models, jobs and decisions of the rules of blocks, and what must hold of every decision."""

from __future__ import annotations

from random import Random

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
from cotenant.techniques.layer_blocks.policy.rules_blocks import decide_blocks
from cotenant.techniques.layer_blocks.policy.rules_slack import decide_slack, fill_plans
from cotenant.techniques.layer_blocks.policy.tables import PRICES, choices_of

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

    def blocks(
        self, grain: int, jobs: list[int], now: int, free: int, by_slack: bool = False, **options: bool
    ) -> list[list[int]]:
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
            *(grain, by_slack, *flags, now, free, self.total, 20.0, 0.0),
            *(self.dims, self.spans, self.moved, self.tight, self.averages, jobs, rows, out),
        )
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
