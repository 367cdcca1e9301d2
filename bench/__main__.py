"""`python -m bench`: lists the benchmarks and runs one."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._data import DATA
from bench._disturbed import disturbed_text
from bench._pace import pace_us
from bench._registry import BenchError, benchmarks, find
from cotenant.errors import CotenantError

COMMANDS = {
    "report": "bench._report",
    "fetch": "bench._weights",
    "reproduce": "bench._reproduce",
    "sceptic": "bench._sceptic",
}
"""Commands that are not benchmarks: the module with the function of that name. Text that it returns is printed, a
number is the exit status."""
_OWN = (
    *("predictor_file", "models", "worlds", "profile", "util", "constants", "rates", "test", "source", "committed"),
    *("graph", "edges", "link", "memory"),
    *("kernels", "sms", "tflops", "gbps", "sets"),
    *("attacks", "frontends"),
)
"""Options that only some benchmarks or commands have."""
_NAMES = {"source": "from", "sets": "set", "attacks": "attack"}
"""Options by another name than the parameter that they are for."""


def main(arguments: list[str]) -> int:
    """Run the command line; give the exit status: 0 means that it ran, never that a goal was met."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.name is None:
            return _list()
        return _command(chosen) if chosen.name in COMMANDS else _run(chosen)
    except KeyboardInterrupt:
        return 130
    except CotenantError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Without a name: list the benchmarks. 'reproduce' runs the papers' experiments and prints their "
        "figures beside ours, 'fetch' gets the released weights that some of them need, 'report' prints the results "
        "that are kept as a table, 'sceptic' holds the figures of the pages against them.",
    )
    parser.add_argument("name", nargs="?", help=f"the benchmark to run, or one of {', '.join(COMMANDS)}")
    parser.add_argument("--quick", action="store_true", help="end within 50 s on two cores, and say what is left out")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as a last line of JSON; a full run (not --quick) also keeps it in bench/results",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("COTENANT_DATA") or DATA),
        metavar="DIR",
        help="folder of the papers' tables (default: the variable COTENANT_DATA, else bench/data)",
    )
    about = "abacus-*: weights as the world, for groups of K models (2 where K is left out); may be given several times"
    parser.add_argument("--predictor-file", action="append", metavar="K=FILE", help=about)
    parser.add_argument("--models", type=int, metavar="N", help="abacus-pairs: the first N models of the data")
    about = "veltair-qps, veltair-granularity, gacer-*: the number of drawn worlds"
    parser.add_argument("--worlds", type=int, metavar="N", help=about)
    for option, about in (
        ("--profile", "latency over partition and batch (veltair-*: of layers over cores)"),
        ("--util", "utilisation alone"),
        ("--constants", "constants of the linear interference model"),
    ):
        text = f"gpulet-*, planner: {about}, in a file of the form of the one in the data folder"
        parser.add_argument(option, type=Path, metavar="FILE.csv", help=text)
    about = "gpulet-interference: co-runs to test on, after a fit to all of the data folder's"
    parser.add_argument("--test", type=Path, metavar="FILE.csv", help=about)
    about = "fetch: a checkout of the authors' repository, or one of its checkpoints, instead of a download"
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR|FILE", help=about)
    about = "reproduce: run nothing, take the results that are kept"
    parser.add_argument("--committed", action="store_true", default=None, help=about)
    about = "sirplus-optimality: place these tasks, a table of task, device, ms and memory (bytes), and nothing else"
    parser.add_argument("--graph", type=Path, metavar="FILE.csv", help=about)
    about = "sirplus-optimality: what tasks exchange, a table of from, to, bytes and, if named, tensor"
    parser.add_argument("--edges", type=Path, metavar="FILE.csv", help=about)
    about = "sirplus-optimality: rate and latency between two devices, in both directions; may be given several times"
    parser.add_argument("--link", action="append", metavar="A:B=12GB/s,10us", help=about)
    about = "sirplus-optimality: what the tasks on a device may take together; may be given several times"
    parser.add_argument("--memory", action="append", metavar="DEVICE=BYTES", help=about)
    about = "gacer-sets: run these models together and nothing else, with batches; may be given several times"
    parser.add_argument("--set", dest="sets", action="append", metavar="NAME:BATCH,NAME:BATCH", help=about)
    about = (
        "gacer-sets: the models are those of this table of measured kernels, of a card that --sms and so on describe"
    )
    parser.add_argument("--kernels", type=Path, metavar="FILE.csv", help=about)
    for option, number, about in (
        ("--sms", int, "SMs of the card"),
        ("--tflops", float, "its peak operations, in 10^12 a second"),
        ("--gbps", float, "its peak bandwidth, in 10^9 bytes a second"),
    ):
        parser.add_argument(option, type=number, metavar="N", help=f"gacer-sets: {about}")
    about = "isolation: this attack, and nothing else but calm runs; may be given several times"
    parser.add_argument("--attack", dest="attacks", action="append", metavar="KIND", help=about)
    about = "isolation: front-end processes of the server in all rows; 0: none"
    parser.add_argument("--frontends", type=int, metavar="N", help=about)
    parser.add_argument("--rates", metavar="R,R,R", help="gpulet-scenarios: rates a second that a model may have")
    return parser


def _list() -> int:
    known = benchmarks()
    width = max(map(len, known), default=0)
    for name, benchmark in known.items():
        print(f"{name:{width}}  {benchmark.about}")
    return 0


def _command(chosen: argparse.Namespace) -> int:
    call = getattr(importlib.import_module(COMMANDS[chosen.name]), chosen.name)
    given = _own(chosen, call, "quick", "json")
    if "data_dir" in inspect.signature(call).parameters:
        given["data_dir"] = chosen.data
    answer = call(**given)
    if isinstance(answer, int):
        return answer
    if answer:
        print(answer)
    return 0


def _own(chosen: argparse.Namespace, call: Callable[..., object], *flags: str) -> dict[str, Any]:
    """The options that were given besides those that every benchmark has. Raises BenchError for one that is not its."""
    given = {key: getattr(chosen, key) for key in _OWN if getattr(chosen, key) is not None}
    given |= {key: True for key in flags if getattr(chosen, key)}
    unknown = [key for key in given if key not in inspect.signature(call).parameters]
    if unknown:
        raise BenchError(f"{chosen.name} has no option {_option(unknown[0])}")
    return given


def _option(key: str) -> str:
    return "--" + _NAMES.get(key, key).replace("_", "-")


def _run(chosen: argparse.Namespace) -> int:
    benchmark = find(chosen.name)
    run = benchmark.load()
    own = _own(chosen, run)
    before = pace_us()
    result = run(chosen.quick, chosen.data, **own)
    if text := disturbed_text(result["rows"]):
        print(text)
    if not chosen.json:
        return 0
    from bench._record import make_record, save, to_line

    options = [
        f"{_option(key)}={each}"
        for key, value in own.items()
        for each in (value if isinstance(value, list) else [value])
    ]
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
