"""Column generation: the linear relaxation (restricted master problem) over columns and splits, and its dual prices.

Variables: fractions `x_c` of columns c, and `y_s` of devices (price `q`) with split s. Minimise `sum_s q * y_s` under

- rates: `sum_c min(1, s_ci / r_i) * x_c >= 1` for each load i of rate `r_i`, served at `s_ci` by column c,
- partitions: `sum_(c of size z) x_c <= sum_s n_sz * y_s` for each size z, with `n_sz` partitions in split s,
- memory: `sum_c m_c * x_c <= sum_s y_s` for each device type, with `m_c` the share of its memory that column c takes.

The dual prices are the values of a row/s and of a partition, and the price of memory.

1. Solve over some columns by GLOP (OR-Tools, the extra `solver`).
2. Add the columns of positive reduced value, at most `_ADDED` of each size; repeat until there are none.

Source: Gilmore and Gomory (1961), with partitions instead of cutting patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import Column, Floats
from cotenant.techniques.partitions.plan.search.opt_pool import Pool

_ROUNDS = 60
_ADDED = 150
"""Most columns of a size that an iteration adds."""


class DualPrices(NamedTuple):
    """Prices of a row/s of each load, and of a byte of memory by device type. `least`: optimum of the relaxation."""

    rows: Floats
    memory: dict[str, float]
    least: float


def dual_prices(
    pools: Mapping[str, Pool], costs: Mapping[str, float], rates: Floats, more: Sequence[tuple[str, Column]] = ()
) -> DualPrices | None:
    """Dual prices of the relaxation over all columns of the pools; None if some rate cannot be served.

    `costs`: price of a device of each type; `more`: columns besides those of the pools.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    covers = [solver.Constraint(1.0, infinity) for _ in rates]
    has: dict[tuple[str, int], pywraplp.Constraint] = {}
    holds: dict[str, pywraplp.Constraint] = {}
    columns = []
    for name, pool in pools.items():
        kind = pool.generator.kind
        holds[name] = solver.Constraint(-infinity, 0.0)
        for size in kind.sizes:
            has[name, size] = solver.Constraint(-infinity, 0.0)
            lines = pool.lines[size]
            shares = np.minimum(1.0, lines.rates / rates[lines.loads])
            columns.append((name, size, shares, np.zeros(shares.shape[1], dtype=np.bool_)))
        for split in dict.fromkeys(kind.splits):
            use = solver.NumVar(0.0, infinity, "")
            solver.Objective().SetCoefficient(use, costs[name])
            holds[name].SetCoefficient(use, -1.0)
            for size in dict.fromkeys(split):
                has[name, size].SetCoefficient(use, -float(split.count(size)))
    solver.Objective().SetMinimization()
    missing = []
    most = max(costs.values()) * 1e3 + 1
    for cover in covers:  # makes the first programs feasible
        unserved = solver.NumVar(0.0, infinity, "")
        solver.Objective().SetCoefficient(unserved, most)
        cover.SetCoefficient(unserved, 1.0)
        missing.append(unserved)
    for name, column in more:
        pool = pools[name]
        use = solver.NumVar(0.0, infinity, "")
        has[name, column.size].SetCoefficient(use, 1.0)
        holds[name].SetCoefficient(use, pool.memory_bytes(column) / pool.generator.kind.memory_bytes)
        for number, rate in pool.served(column).items():
            covers[number].SetCoefficient(use, min(1.0, rate / float(rates[number])))
    for iteration in range(_ROUNDS):
        if iteration and solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        rows = np.array([cover.dual_value() for cover in covers]) if iteration else np.ones(len(rates))
        size_prices = {key: each.dual_value() if iteration else 0.0 for key, each in has.items()}
        bytes_ = {key: each.dual_value() if iteration else 0.0 for key, each in holds.items()}
        is_done = True
        for name, size, shares, is_in in columns:
            pool = pools[name]
            lines = pool.lines[size]
            memory = lines.memory / pool.generator.kind.memory_bytes
            gain = (rows[lines.loads] * shares).sum(axis=0) + size_prices[name, size] + memory * bytes_[name]
            gain = np.where(is_in, 0.0, gain)
            for line in np.argsort(-gain, kind="stable")[:_ADDED].tolist():
                if gain[line] <= 1e-7:
                    break
                is_done = False
                is_in[line] = True
                use = solver.NumVar(0.0, infinity, "")
                has[name, size].SetCoefficient(use, 1.0)
                holds[name].SetCoefficient(use, float(memory[line]))
                first, second = lines.loads[:, line].tolist()
                covers[first].SetCoefficient(use, float(shares[0, line]))
                if second != first:
                    covers[second].SetCoefficient(use, float(shares[1, line]))
        if iteration and is_done:
            break
    if any(unserved.solution_value() > 1e-6 for unserved in missing):
        return None
    memory_prices = {name: max(0.0, -bytes_[name]) / pool.generator.kind.memory_bytes for name, pool in pools.items()}
    return DualPrices(np.maximum(rows, 0.0) / rates, memory_prices, solver.Objective().Value())
