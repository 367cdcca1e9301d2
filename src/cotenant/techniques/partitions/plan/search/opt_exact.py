"""Exact plans of small instances: enumerates the configurations of a device, and solves a covering problem.

With configurations c of price `q_c` that serve load i at the rate `s_ci`, and integers `x_c`:

    minimise sum_c q_c * x_c    subject to    sum_c s_ci * x_c >= r_i for all i

CP-SAT (OR-Tools, the extra `solver`) solves it in one thread, with a fixed seed and a deterministic time limit.
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
"""Integer units of a rate. Served rates are rounded up, so that the solver's proofs hold. Its solutions may serve a
little less than the rates, so they are checked.
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
    """Every undominated configuration of a device; None if more than `limit` must be evaluated.

    Served rates count up to `rates` (rows/s by load). A column has at most one slot of each load. Without interference,
    dominated columns are removed before they are combined.
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
    """The configurations that no other one dominates in all rates, counted up to the wanted `rates`."""
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
    """The cheapest configurations of a pool (by device type) that serve all rates, or None; and whether that is proven.

    `counts`: devices of each type; `seconds`: deterministic time limit. Served rates may fall short by the rounding of
    `_UNITS`.
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
