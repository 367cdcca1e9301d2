"""The rate that a policy of ours bears with other options, in worlds and on arrivals that are never reported.

    python -m bench.papers.veltair._tuning --classes mix,heavy --worlds 4 reserve=0.1,quantum_ms=2 reserve=0.2

tries slack_blocks as it is and with each of the lists of options. It prints queries a second beside those of FULL, of
the best published policy and of the bound. These are kept until their own rules change.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from bench._campaign import run_all
from bench._data import DATA
from bench.papers.veltair import _baseline_rules, _flat, _flat_blocks
from bench.papers.veltair._capacity import Effort, clairvoyant
from bench.papers.veltair._models import CLASSES, Efficiency, Model, of_class, read_models
from bench.papers.veltair._play import Stage, warm_up
from bench.papers.veltair._worlds import kept_worlds, tables_of
from bench.papers.veltair.qps import CONTENDERS, OURS, Task, _best

FIRST_WORLD = 50_000
EFFORT = Effort(2000, 2, 1000, 1, (0.6, 0.8, 0.4, 0.5, 0.7), 0.02)


def baselines(models: Sequence[Model], made: Efficiency, task: Task) -> list[dict[str, Any]]:
    """What the others bear, and the bound."""
    mine = of_class(models, task.load)
    stage = Stage(task.drawn, [tables_of(task.drawn, model, made) for model in mine])
    judged, trained = task.effort.reported(mine), task.effort.tuned(mine)
    bound = clairvoyant(stage, judged, 0.95, task.effort.grain)
    where = {"world": task.drawn.seed, "class": task.load}
    rows = [where | {"policy": "clairvoyant", "qps": bound}]
    for name, policy in CONTENDERS.items():
        if name != OURS:
            found = _best(stage, policy, judged, trained, bound / 2, task.effort)
            rows.append(where | {"policy": name, "qps": found.qps, "target": found.target})
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers.veltair._tuning")
    parser.add_argument("options", nargs="*", help="options of slack_blocks, such as reserve=0.1,quantum_ms=2")
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--worlds", type=int, default=3)
    parser.add_argument("--first", type=int, default=FIRST_WORLD, help="the first seed of a world")
    chosen = parser.parse_args()
    models, made = read_models(DATA)
    drawn = kept_worlds(DATA, chosen.first, chosen.worlds)
    warm_up(drawn[0], models, made)
    tasks = [Task(each, load, EFFORT, True) for load in chosen.classes.split(",") for each in drawn]
    key = sha256(
        b"".join(Path(str(each.__file__)).read_bytes() for each in (_flat, _flat_blocks, _baseline_rules))
    ).hexdigest()
    known = run_all("veltair-tuning", key, tasks, partial(baselines, models, made), lambda rows: str(rows[0]))
    at = {(row["world"], row["class"], row["policy"]): row["qps"] for row in known}
    for text in ["", *chosen.options]:
        given = {name: float(value) for name, _, value in (each.partition("=") for each in text.split(",")) if name}
        policy = replace(CONTENDERS[OURS], **given)  # type: ignore[arg-type]
        effort = replace(EFFORT, targets=(policy.target,)) if "target" in given else EFFORT
        gains: list[float] = []
        for task in tasks:
            began = time.monotonic()
            mine = of_class(models, task.load)
            stage = Stage(task.drawn, [tables_of(task.drawn, model, made) for model in mine])
            where = task.drawn.seed, task.load
            bound = at[*where, "clairvoyant"]
            found = _best(stage, policy, effort.reported(mine), effort.tuned(mine), bound / 3, effort)
            best = max((at[*where, name], name) for name in CONTENDERS if name != OURS)
            gains.append(found.qps / (at[*where, "FULL"] or 1.0))
            print(
                f"{text or 'as it is'}: world {where[0]} {where[1]:6} ours {found.qps:.4g} at {found.target}, "
                f"FULL {at[*where, 'FULL']:.4g}, best {best[1]} {best[0]:.4g}, of the bound {found.qps / bound:.2f} "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
        print(f"{text or 'as it is'}: over FULL {np.exp(np.mean(np.log(np.maximum(gains, 1e-3)))):.3f}", flush=True)


if __name__ == "__main__":
    main()
