"""Sets of models with random kernels, and random plans of them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable, runs_of
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy


def random_table(rng: random.Random, name: str, units: int, batch: int) -> KernelTable:
    """Units with times and needs that rise with the rows, from half of all on: needs in 32nds, shares in 16ths."""
    shape = (units, batch)
    whole = np.array([[rng.randint(4, 60)] for _ in range(units)]) * 1000.0
    rows = np.arange(1, batch + 1) / batch
    need = np.array([[rng.randint(2, 40) / 32] for _ in range(units)])
    return KernelTable(
        name,
        batch,
        tuple(f"{name}{unit}" for unit in range(units)),
        np.round(whole * (0.4 + 0.6 * rows)),
        np.maximum(np.round(need * rows * 32), 1) / 32,
        np.broadcast_to(np.array([[rng.randint(0, 16) / 16] for _ in range(units)]), shape).copy(),
        np.broadcast_to(np.array([[rng.randint(0, 16) / 16] for _ in range(units)]), shape).copy(),
        np.array([rng.choice((0.0, 500.0)) for _ in range(units)]),
        runs_of([rng.random() < 0.8 for _ in range(units)]),
    )


def random_set(seed: int, members: int = 3, most_units: int = 6, batch: int = 4) -> tuple[KernelTable, ...]:
    """Members with so many units at most."""
    rng = random.Random(seed)
    return tuple(random_table(rng, "abcdef"[m], rng.randint(1, most_units), batch) for m in range(members))


def with_long_steps(seed: int, tables: tuple[KernelTable, ...]) -> tuple[KernelTable, ...]:
    """The same where some units treat rows by themselves with their neighbours alone."""
    rng = random.Random(seed)
    return tuple(
        replace(
            table,
            splits=tuple(
                (run[0], *(edge for edge in run[1:-1] if rng.random() < 0.4), run[-1]) for run in table.splits
            ),
        )
        for table in tables
    )


def random_rules(seed: int) -> Occupancy:
    """Costs that matter beside such units, any admission and issuing."""
    rng = random.Random(seed)
    admission = rng.choice((Admission.WHOLE, Admission.FILL))
    return Occupancy(
        *(rng.choice((0, 700, 3000)) for _ in range(4)),
        admission,
        rng.choice(tuple(Issuing)),
        rng.random() < 0.7,
        admission is Admission.WHOLE and rng.random() < 0.3,
    )


def random_plan(seed: int, tables: tuple[KernelTable, ...]) -> JointPlan:
    """Some of everything; its waits may go round in a circle."""
    rng = random.Random(seed)
    sizes = [table.size for table in tables]
    barriers = rng.choice((0, 0, 1, 2))
    cuts = [sorted(rng.randint(0, size) for _ in range(barriers)) for size in sizes]
    chunks: list[Chunk] = []
    for m, table in enumerate(tables):
        for run in table.splits:
            if rng.random() < 0.5:
                a, b = sorted((rng.choice(run), rng.choice(run)))
                if a < b:
                    first = rng.randint(1, table.batch - 1)
                    chunks.append(Chunk(m, a, b, (first, table.batch - first)))
    waits: list[Wait] = []
    for _ in range(rng.choice((0, 0, 1, 2)) if len(tables) > 1 else 0):
        m, after = rng.sample(range(len(tables)), 2)
        waits.append(Wait(m, rng.randrange(sizes[m]), after, rng.randint(1, sizes[after])))
    members = tuple(JointMember(table.model, table.batch, table.size, rng.randint(0, 1)) for table in tables)
    return JointPlan(members, tuple(zip(*cuts, strict=True)), tuple(dict.fromkeys(waits)), tuple(chunks))
