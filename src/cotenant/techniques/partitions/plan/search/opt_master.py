"""What rows are worth: the linear relaxation of choosing columns and splits, and its prices.

Variables are fractions of columns and of split devices of each type; columns of a size take no more than the splits
have, memory is shared by all devices of a type, every rate is covered, each column counting for no more of a load than
is wanted. Solved by GLOP (OR-Tools, the extra `solver`) over a growing part of the columns.
Source: Gilmore and Gomory (1961), with partitions in the place of patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import Column, Floats
from cotenant.techniques.partitions.plan.search.opt_pool import Pool

_ROUNDS = 60
_ADDED = 150
"""Columns that are added to the linear program in a round at most."""


class DualPrices(NamedTuple):
    """Of a row/s of each load and, by type of device, of a byte of its memory; and the least price of fractions."""

    rows: Floats
    memory: dict[str, float]
    least: float


def dual_prices(
    pools: Mapping[str, Pool], costs: Mapping[str, float], rates: Floats, more: Sequence[tuple[str, Column]] = ()
) -> DualPrices | None:
    """Prices under which no column of the pools is worth more than it takes; None where not all can be served.

    `costs` are the prices of a device of each type, `more` columns beside those of the pools.
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
    for cover in covers:  # so that there is an answer from the first
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
