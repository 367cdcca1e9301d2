"""`python -m bench`: lists the benchmarks and runs one."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import sys
from pathlib import Path

from bench._pace import pace_us
from bench._registry import BenchError, benchmarks, find
from cotenant.errors import CotenantError

REPORT = "report"
_OWN = ("predictor_file", "models", "profile", "util", "constants", "rates", "test")
"""Options that only some benchmarks have."""


def main(arguments: list[str]) -> int:
    """Run the command line; give the exit status: 0 means that it ran, never that a goal was met."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.name is None:
            return _list()
        if chosen.name == REPORT:
            from bench._report import report

            print(report())
            return 0
        return _run(chosen)
    except CotenantError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Without a name: list the benchmarks. 'report' prints the results that are kept as a table.",
    )
    parser.add_argument("name", nargs="?", help="the benchmark to run, or 'report'")
    parser.add_argument("--quick", action="store_true", help="end within 50 s on two cores, and say what is left out")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as a last line of JSON; a full run (not --quick) also keeps it in bench/results",
    )
    data = os.environ.get("COTENANT_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(data) if data else None,
        metavar="DIR",
        help="folder of the papers' figures (default: the variable COTENANT_DATA)",
    )
    parser.add_argument(
        "--predictor-file", type=Path, metavar="FILE", help="abacus-pairs: other weights of the same form as the world"
    )
    parser.add_argument("--models", type=int, metavar="N", help="abacus-pairs: the first N models of the data")
    for option, about in (
        ("--profile", "latency over partition and batch"),
        ("--util", "utilisation alone"),
        ("--constants", "constants of the linear interference model"),
    ):
        text = f"gpulet-*, planner: {about}, in a file of the form of the one in the data folder"
        parser.add_argument(option, type=Path, metavar="FILE.csv", help=text)
    about = "gpulet-interference: co-runs to test on, after a fit to all of the data folder's"
    parser.add_argument("--test", type=Path, metavar="FILE.csv", help=about)
    parser.add_argument("--rates", metavar="R,R,R", help="gpulet-scenarios: rates a second that a model may have")
    return parser


def _list() -> int:
    known = benchmarks()
    width = max(map(len, known), default=0)
    for name, benchmark in known.items():
        print(f"{name:{width}}  {benchmark.about}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    benchmark = find(chosen.name)
    run = benchmark.load()
    own = {key: getattr(chosen, key) for key in _OWN if getattr(chosen, key) is not None}
    unknown = [key for key in own if key not in inspect.signature(run).parameters]
    if unknown:
        raise BenchError(f"{benchmark.name} has no option --{unknown[0].replace('_', '-')}")
    before = pace_us()
    result = run(chosen.quick, chosen.data, **own)
    if not chosen.json:
        return 0
    from bench._record import make_record, save, to_line

    options = [f"--{key.replace('_', '-')}={value}" for key, value in own.items()]
    options += [option for option, is_set in (("--quick", chosen.quick), ("--json", chosen.json)) if is_set]
    record = make_record(
        benchmark.name, shlex.join(["python", "-m", "bench", benchmark.name, *options]), result, (before, pace_us())
    )
    if record["summary"] and not chosen.quick and not own:
        save(record)
    sys.stdout.flush()
    print(to_line(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
