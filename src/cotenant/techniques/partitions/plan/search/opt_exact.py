"""Exact answers for what is small: all configurations of a device, and the cheapest choice that covers all rates.

The choice is a covering problem for CP-SAT (OR-Tools, the extra `solver`), imported when it is first needed. It runs in
one thread with a fixed seed and a limit of deterministic time, so that equal questions have equal answers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import TypeVar

from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, DeviceConfiguration, Floats

_UNITS = 10_000_000_000
"""Parts into which a rate is cut for whole numbers. What a configuration serves is rounded up: every choice that serves
all rates is then one for the solver too, so that its proofs hold. What it finds may lack some parts: it is checked.
"""
_PRICES = 100_000
_T = TypeVar("_T")


@cache
def has_solver() -> bool:
    """Whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def all_configurations(
    generator: ColumnGenerator, rates: Floats, most_slots: int, limit: int
) -> list[DeviceConfiguration] | None:
    """Every configuration of a device that none makes superfluous; None where more than `limit` have to be looked at.

    Rates beyond the wanted `rates` (rows/s by load) count for nothing. A column has at most one slot of each load.
    Without interference, columns that serve no load more than another does are left out before they are combined.
    """
    numbers = range(len(generator.loads))
    columns: dict[int, list[Column]] = {}
    for size in generator.kind.sizes:
        made = []
        able = [n for n in numbers if generator.best[size][n] > 0]
        for count in range(1, most_slots + 1):
            for chosen in combinations(able, count):
                batches = [list(generator.positions[number]) for number in chosen]
                if math.prod(map(len, batches)) > limit:
                    return None
                made += [Column(size, tuple(zip(chosen, each, strict=True))) for each in product(*batches)]
                if len(made) > limit:
                    return None
        alone = [column for column in made if generator.config((column,)) is not None]
        if not generator.interference:
            kept = _undominated(generator, ((generator.config((column,)), column) for column in alone), rates)
            alone = [column for _, column in kept]
        columns[size] = alone
    splits = list(dict.fromkeys(tuple(sorted(split)) for split in generator.kind.splits))
    if sum(math.prod(1 + len(columns[size]) for size in split) for split in splits) > limit:
        return None
    found: dict[tuple[Column, ...], DeviceConfiguration] = {}
    for split in splits:
        for chosen_columns in product(*([None, *columns[size]] for size in split)):
            used = tuple(sorted(column for column in chosen_columns if column is not None))
            if used and used not in found:
                config = generator.config(used)
                if config is not None:
                    found[used] = config
    return [config for config, _ in _undominated(generator, ((config, None) for config in found.values()), rates)]


def _undominated(
    generator: ColumnGenerator, made: Iterable[tuple[DeviceConfiguration | None, _T]], rates: Floats
) -> list[tuple[DeviceConfiguration, _T]]:
    """Those whose rates, up to the wanted ones, no other one's reach all."""
    ordered = sorted(
        (
            (tuple(min(rate, most) for rate, most in zip(config.served, rates.tolist(), strict=True)), config, what)
            for config, what in made
            if config is not None
        ),
        key=lambda each: (-sum(share / most for share, most in zip(each[0], rates.tolist(), strict=True)), each[1]),
    )
    kept: list[tuple[tuple[float, ...], DeviceConfiguration, _T]] = []
    for served, config, what in ordered:
        if not any(all(a >= b for a, b in zip(other, served, strict=True)) for other, _, _ in kept):
            kept.append((served, config, what))
    return [(config, what) for _, config, what in kept]


def cover(
    pool: Mapping[str, Sequence[DeviceConfiguration]],
    generators: Mapping[str, ColumnGenerator],
    counts: Mapping[str, int],
    rates: Floats,
    seconds: float,
    seed: int,
) -> tuple[list[tuple[str, DeviceConfiguration]] | None, bool]:
    """The cheapest configurations that serve all rates, of a pool by type of device; None where there are none.

    `counts` are the devices of each type, `seconds` the deterministic time allowed. Also says whether the answer is
    proven for this pool. The rates served may fall short by what `_UNITS` says.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    uses: list[tuple[str, DeviceConfiguration, cp_model.IntVar]] = []
    for name, configs in pool.items():
        own = [model.new_int_var(0, counts[name], "") for _ in configs]
        model.add(sum(own) <= counts[name])
        uses += [(name, config, use) for config, use in zip(configs, own, strict=True)]
    for number, rate in enumerate(rates.tolist()):
        served = [
            (min(_UNITS, math.ceil(config.served[number] / rate * _UNITS * (1 + 1e-12))), use)
            for _, config, use in uses
        ]
        model.add(sum(units * use for units, use in served if units) >= _UNITS)
    model.minimize(sum(round(generators[name].kind.price * _PRICES + 1) * use for name, _, use in uses))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = [(name, config) for name, config, use in uses for _ in range(solver.value(use))]
        return chosen, status == cp_model.OPTIMAL
    return None, status == cp_model.INFEASIBLE
