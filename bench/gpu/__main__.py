"""`bench/gpu/run.sh` and `python -m bench.gpu`: measure a device within a time limit, and go on there the next time."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu._journal import Budget
from cotenant.errors import CotenantError

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 440.0
"""Leaves time for the end of the point under way and for files: the whole stays within 8 minutes."""
_GRACE_S = 35.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What a run is asked for."""
    parser = argparse.ArgumentParser(prog="bench/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries everything out on cores")
    parser.add_argument("--index", type=int, default=0, help="which GPU")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds to spend (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (a cpu run: a temporary one)")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "gpu-models", help="folder of model archives")
    parser.add_argument("--names", type=_list, default=(), help="models of the zoo, with commas; six by default")
    parser.add_argument("--steps", type=_list, default=(), help="names of steps, with commas; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny models and few runs: shows that it works")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs measured")
    return parser.parse_args(arguments, argparse.Namespace(command=shlex.join(["bench/gpu/run.sh", *arguments])))


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the exit status is 0 when figures were taken, 2 when there is nothing to measure on."""
    chosen = parse(arguments)
    budget = Budget(chosen.budget_s)
    if chosen.device == "cpu":
        # Threads that spin at a barrier take the core from the one that they wait for, as soon as anything else runs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A call into the driver that never returns would outlast any budget; results in the journal are safe.
    faulthandler.dump_traceback_later(chosen.budget_s + _GRACE_S, exit=True, file=2)
    try:
        from bench.gpu._session import measure

        folder, is_complete = measure(
            chosen, budget, lambda text: print(f"[{budget.spent_s:6.1f} s] {text}", flush=True)
        )
    except CotenantError as error:
        print(f"bench/gpu: {error}", file=sys.stderr)
        return 2
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"results: {folder}")
    if not is_complete:
        print("not everything is measured yet: run the same command again, it goes on where it stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
