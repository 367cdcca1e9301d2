"""One run: opens the device and the models, goes through the steps, and leaves a folder of results."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu._context import Context
from bench.gpu._fingerprint import read_clocks, read_fingerprint
from bench.gpu._journal import Budget, Journal, MeasureError, Row
from bench.gpu._models import DEFAULT, TINY, Subjects
from bench.gpu._profile import write_folder
from bench.gpu._rig import open_rig
from bench.gpu._runner import QUICK, Effort
from bench.gpu._steps import STEPS, run_steps

JOURNAL = "journal.jsonl"
_PROFILES = Path(__file__).resolve().parents[2] / "profiles"
_WORKERS = 8


def measure(request: Namespace, budget: Budget, tell: Callable[[str], None]) -> tuple[Path, bool]:
    """Measure until all is there or time is over; give the folder, and whether all is there. `request`: see `parse`.

    Raises MeasureError when there is nothing to measure on, an unknown step, or a lost device. The results so far are
    in the folder then.
    """
    if importlib.util.find_spec("torch") is None:
        raise MeasureError("torch is missing: choose another interpreter with PYTHON=...")
    known = {step.name: step for step in STEPS}
    unknown = [name for name in request.steps if name not in known]
    if unknown:
        raise MeasureError(f"there is no step {unknown[0]!r}; expected some of {', '.join(known)}")
    steps = [step for step in STEPS if step.name in (request.steps or known)]
    with ExitStack() as stack:
        rig = open_rig(request.device, request.index)
        device = read_fingerprint(request.device, request.index)
        folder = _folder(request, device.folder)
        tell(f"{device.name}: {device.units} {'SMs' if rig.kind == 'cuda' else 'cores'}, torch {device.torch}")
        journal = Journal(folder / JOURNAL)
        models = request.models / f"torch-{device.torch.replace('+', '-')}"
        subjects = Subjects(models, rig.device, request.names or (TINY if request.quick else DEFAULT))
        stack.callback(subjects.close)
        notes: list[Row] = []
        created = datetime.now(UTC).isoformat(timespec="seconds")
        if rig.no_shares:
            notes.append({"what": "no green contexts, all shares are plain streams", "why": rig.no_shares})
            tell(f"no green contexts: {rig.no_shares}")
        for name, why in subjects.build(1 if request.quick else min(_WORKERS, len(os.sched_getaffinity(0)))).items():
            notes.append({"what": f"{name} is left out", "why": why})
            tell(f"{name} is left out: {why}")
        tell(f"{len(subjects.names)} models are built")
        context = Context(rig, subjects, journal, QUICK if request.quick else Effort(), request.quick)
        stack.callback(context.close)

        def write() -> None:
            write_folder(folder, journal, device, notes, request.command, created)

        try:
            is_complete = run_steps(context, steps, budget, tell, write)
        finally:
            if rig.kind == "cuda":
                clocks = read_clocks(request.index)
                notes.append({"what": "clocks at the end", "why": ", ".join(f"{k} {v}" for k, v in clocks.items())})
            write()
    return folder, is_complete


def _folder(request: Namespace, name: str) -> Path:
    """The folder of results. Those measured without a GPU, or with tiny models, never lie among the profiles."""
    if request.out is not None:
        folder = request.out
    elif request.device == "cuda" and not request.quick:
        folder = _PROFILES / name
    else:
        folder = Path(tempfile.mkdtemp(prefix=f"cotenant-{name}-"))
    if request.fresh and (folder / JOURNAL).exists():
        (folder / JOURNAL).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return Path(folder)
