#!/usr/bin/env python3
"""Draw what each policy gives up: the pictures of docs/policies.md, from the simulator. Run it in the environment."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from random import Random

from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.policies import policy_class
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld

FOLDER = Path(__file__).parents[1] / "docs" / "policies"
NAMES = ("shares", "most", "fair", "weighted", "edf", "sjf", "fcfs")
MS = 1_000_000
MODELS = {"78 ms": (78, 250), "23 ms": (23, 120), "100 ms": (100, 400), "7 ms": (7, 30)}
"""Latency and SLO in ms."""
LANES = (Share((0,)), Share((1,)))
LOAD, SECONDS, SEED, BOUNDARY_MS = 2.0, 60, 1, 8


def attainments(policy: str) -> dict[str, float]:
    """The share of each tenant's queries that is answered in time, and of all."""
    units = {name: max(1, round(ms / BOUNDARY_MS)) for name, (ms, _) in MODELS.items()}
    tenants = [Tenant(name, slo * MS, tuple(range(units[name] + 1))) for name, (_, slo) in MODELS.items()]
    predictor = TablePredictor(
        {name: LatencyTable((LatencyRow(0, 1, 1, ms * MS),), (1.0,) * units[name]) for name, (ms, _) in MODELS.items()}
    )
    random, sent = Random(SEED), list[tuple[int, str]]()
    for name, (ms, _) in MODELS.items():
        now = 0.0
        while (now := now + random.expovariate(LOAD * len(LANES) / len(MODELS) / (ms / 1e3))) < SECONDS:
            sent.append((round(now * 1e9), name))
    queries = [Query(at, name, now, now + MODELS[name][1] * MS) for at, (now, name) in enumerate(sorted(sent))]
    answered: Counter[str] = Counter()

    def note(respond: Respond, _: int) -> None:
        answered[queries[respond.query].tenant] += respond.outcome is Outcome.ANSWERED

    simulate(
        Engine(tenants, policy_class(policy)(LANES), predictor, Machine.cpu((0, 1))),
        TableWorld(predictor),
        queries,
        note,
    )
    asked = Counter(query.tenant for query in queries)
    return {name: answered[name] / asked[name] for name in MODELS} | {"all": answered.total() / len(queries)}


def picture(policy: str, shares: dict[str, float]) -> str:
    """One bar a tenant: dark what was in time, light what was not."""
    width, left, long, row = 300, 58, 190, 20
    height = row * len(shares) + 4
    title = escape(f"{policy}: " + ", ".join(f"{name} {100 * part:.0f} %" for name, part in shares.items()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12" fill="#667">',
        f"<title>{title}</title>",
    ]
    for number, (name, part) in enumerate(shares.items()):
        y = 3 + row * number
        lines += [
            f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{long}" height="15" fill="#f2c9b8"/>',
            f'<rect x="{left}" y="{y}" width="{long * part:.1f}" height="15" fill="#2f6f8f"/>',
            f'<text x="{left + long + 6}" y="{y + 12}">{100 * part:.0f} %</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        (FOLDER / f"{name}.svg").write_text(picture(name, attainments(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
