"""`python -m bench.plan`: `cotenant plan` with the yardstick planners, for devices that others measured (CSV files)."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from bench.papers.gpulet import _planners  # noqa: F401 - registers them
from bench.papers.gpulet._tables_csv import csv_tables
from cotenant.cli import main as cotenant
from cotenant.techniques.partitions.plan.sources import READERS


def main() -> None:
    """Run the command: its own options are taken off, all others are those of `cotenant plan`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan",
        description="As 'cotenant plan' (its options follow below); --planner may be greedy, sbp or ideal too, and a "
        "profile a CSV file of latencies with the columns model, partition_pct, batch, latency_ms.",
        add_help=False,
        allow_abbrev=False,
    )
    for option, about in (
        ("--util", "utilisation (CSV), for a linear model of interference"),
        ("--constants", "constants of that model (CSV)"),
        ("--models", "memory, largest batch and SLO (CSV); models.csv beside the latencies is found"),
    ):
        parser.add_argument(option, type=Path, metavar="FILE.csv", help=f"for CSV profiles: {about}")
    own, others = parser.parse_known_args(sys.argv[1:])
    if "--help" in others or "-h" in others:
        parser.print_help()
    READERS[".csv"] = partial(csv_tables, **vars(own))
    sys.argv = ["cotenant", "plan", *others]
    cotenant()


if __name__ == "__main__":
    main()
