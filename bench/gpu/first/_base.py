"""What the first scripts share: a device, or cores for a trial run, models, captured work, and tables.

Run as a script it makes the archives of all models, in processes of their own.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu._models import DEFAULT, HALF, TINY, Subjects
from bench.gpu._stats import median, plain
from bench.gpu.first._device import Cpu, Cuda, Work

ROOT = Path(__file__).resolve().parents[3]
NAMES = (*DEFAULT, "vgg16", "efficientnet_b0")
TASKS = ("faster_rcnn", "ssd_mobilenet", "inception_v3")
PRECISIONS = {"tf32": "", "fp16": HALF}
"""What a model's name ends with in each; on a CPU the first one is plain FP32."""
_BATCHES = 5
_GRACE_S = 20.0


class Script:
    """What a script was asked for: a device, models, a folder of tables, and the time at which it ends."""

    def __init__(self, about: str | None, seconds: float) -> None:
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("given", nargs="*", help="seconds, or names: see above")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--quick", action="store_true", help="tiny models and short runs")
        parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-first", help="folder of the tables")
        parser.add_argument("--models", type=Path, default=ROOT / "build" / "gpu-models", help="folder of archives")
        chosen = parser.parse_args()
        self.given: list[str] = chosen.given
        is_named = any(map(str.isalpha, "".join(self.given)))
        self.quick: bool = chosen.quick or (chosen.device == "cpu" and not is_named)
        seconds = float(self.given[0]) if self.given and not is_named else seconds
        self._end = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)  # a call that never returns
        self.device: Any = Cuda() if chosen.device == "cuda" else Cpu()
        self.out, self.models = chosen.out, chosen.models / f"torch-{str(torch.__version__).replace('+', '-')}"
        self._subjects: Subjects | None = None
        print(f"{self.device.name}: torch {torch.__version__}, {seconds:g} s{', quick' if self.quick else ''}")

    def is_over(self) -> bool:
        """Whether its time is over: no point begins any more."""
        return time.monotonic() >= self._end

    def open(self, names: Sequence[str], suffixes: Sequence[str] = ("",)) -> tuple[str, ...]:
        """Have archives of these models in these precisions; the names, of tiny models where it is quick."""
        names = TINY if self.quick else names
        wanted = [name + suffix for suffix in suffixes for name in names]
        self._subjects = Subjects(self.models, self.device.name, wanted)
        workers = 1 if self.quick else max(1, min(14, len(os.sched_getaffinity(0)) - 1))
        for name, why in self._subjects.build(workers).items():
            print(f"{name} is left out: {why}")
        return tuple(names)

    def subject(self, name: str) -> Any:
        """An opened model. Raises MeasureError when it could not be made or opened."""
        assert self._subjects is not None
        return self._subjects.get(name)

    def work(self, name: str, rows: int) -> Work:
        """A run of a whole model over inputs that lie on the device; channels last where it is FP16."""
        subject = self.subject(name)
        given = {key: self.device.put(array) for key, array in subject.feeds(rows).items()}
        return lambda: subject.model.run(0, subject.units, given)

    def table(self, name: str, columns: str) -> Table:
        """A table of these columns, with one for errors."""
        return Table(self, self.out / f"{name}.csv", [*columns.split(), "error"])

    def timed(self, work: Work, seconds: float = 0.25) -> dict[str, Any]:
        """Device time of work and host time to submit it, on the current stream.

        Runs follow each other without a pause; medians of five batches of them.
        """
        device = self.device
        for _ in range(2):
            began = device.mark()
            work()
            ended = device.mark()
            ended.synchronize()
        once = max(1e-3, began.elapsed_time(ended))
        count = 2 if self.quick else max(2, min(500, int(seconds * 1e3 / _BATCHES / once)))
        ms, host = [], []
        for _ in range(_BATCHES):
            began, start = device.mark(), time.perf_counter()
            for turn in range(count):
                work()
                if turn < 16:  # beyond that the host may wait for room in the queue
                    host_s = (time.perf_counter() - start) / (turn + 1)
            ended = device.mark()
            ended.synchronize()
            ms.append(began.elapsed_time(ended) / count)
            host.append(host_s * 1e6)
        return {"ms": plain(median(ms)), "host_us": plain(median(host)), "runs": _BATCHES * count}


class Table:
    """Points, each a row on disk as soon as it is measured; one that fails is a row with its error."""

    def __init__(self, script: Script, path: Path, columns: Sequence[str]) -> None:
        self._script = script
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, restval="", lineterminator="\n")
        self._writer.writeheader()

    def row(self, **values: Any) -> None:
        """Write a row."""
        self._writer.writerow(values)
        self._file.flush()

    def point(self, measure: Callable[[], Mapping[str, Any]], **keys: Any) -> None:
        """Measure a point and write its row, unless time is over."""
        if not self._script.is_over():
            try:
                found = dict(measure())
                self._script.device.trim()
            except Exception as error:
                self.fail(error, **keys)
            else:
                self.row(**{**keys, **found})

    def fail(self, error: Exception, **keys: Any) -> None:
        """Write a row that says why there are no figures."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(*keys.values(), text, flush=True)
        self.row(**keys, error=text)


if __name__ == "__main__":
    _script = Script("Make the archives of all models.", 300.0)
    _script.open(NAMES, tuple(PRECISIONS.values()))
    _script.open(TASKS)
