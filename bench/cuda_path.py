"""The host's path of a launch on streams: what the executor of a GPU costs, measured over the streams of a CPU.

`executor`: a model without work, so that the executor takes all the time from the start of a launch to its completion.
Each launch starts when the last one has ended, as in a server with full queues. In "idle" each is started by a thread
that waits for its end.
`graphs`: eight small torch models with chains for six numbers of rows on four lanes, over streams that record captures.
The figures are the number of graphs, and the captures while 10,000 launches are served (none).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench._registry import BenchError
from bench.dispatch import TENANT, Chain
from cotenant.core.actions import Launch
from cotenant.execute.gpu.stream_target import IdentityModel
from cotenant.execute.gpu.streams import CpuStreams, Named, Replay, StreamLane
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.work import Share, Work

NAME = "cuda-path"
WINDOWS, QUICK_WINDOWS = 15, 3
LAUNCHES, WARM_UP = 2000, 200
MODELS, MAX_BATCH, LANES, SEGMENTS = 8, 32, 4, 3
SERVED, QUICK_SERVED = 10_000, 1_000
_DEPTH = 6  # layers of a model
_PATIENCE_S = 120.0


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `summary` has `executor_us_p50`, `executor_us_p99`, the same `_idle`, and the counts of graphs."""
    rows = [
        {"window": window, "mode": mode, **figures}
        for window in range(QUICK_WINDOWS if quick else WINDOWS)
        for mode, figures in _executor_window().items()
    ]
    summary: dict[str, float] = {}
    for mode in ("chained", "idle"):
        for key in ("p50", "p99"):
            name = f"executor_us_{key}" + ("_idle" if mode == "idle" else "")
            summary[name] = round(statistics.median(row[key] for row in rows if row["mode"] == mode), 1)
    summary |= _graphs(QUICK_SERVED if quick else SERVED)
    for name, value in summary.items():
        print(f"{name}: {value:g}")
    if quick:
        print(f"quick: {QUICK_WINDOWS} windows instead of {WINDOWS}, {QUICK_SERVED} launches instead of {SERVED}")
    return {"summary": summary, "rows": rows}


def _executor_window() -> dict[str, dict[str, float]]:
    core = sorted(os.sched_getaffinity(0))[-1]
    executor = TorchExecutor(CpuStreams())
    model: Any = IdentityModel()
    try:
        executor.add_model(TENANT, executor.load_shared(model, LoadSpec((Share((core,)),), (0, 1), max_batch=8)))
        chain = Chain(executor, core, {"x": np.ones((1, 8), np.float32)})  # type: ignore[arg-type]
        chain.run(WARM_UP)
        found = {"chained": chain.run(LAUNCHES), "idle": [chain.run(1)[0] for _ in range(LAUNCHES)]}
    finally:
        executor.close()
    return {
        mode: {key: float(np.percentile(values, q)) / 1e3 for key, q in (("p50", 50), ("p99", 99))}
        for mode, values in found.items()
    }


class NotingStreams(CpuStreams):
    """A CPU's streams that capture, by running Python again, and count what they capture."""

    why_no_graphs = ""

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def lane(self, share: Share) -> StreamLane:
        """See StreamDevice: all lanes on the first core."""
        lane: Any = super().lane(Share((min(os.sched_getaffinity(0)),)))
        lane.capture = self._capture
        return lane  # type: ignore[no-any-return]

    def _capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        self.captures += 1
        outputs = work()

        def replay() -> None:
            for name, tensor in work().items():
                outputs[name].copy_(tensor)

        return replay, outputs


def _graphs(launches: int) -> dict[str, float]:
    """Load the models, and let as many queries as that ask for all of their rows on all lanes."""
    import torch

    shares = tuple(Share((lane,)) for lane in range(LANES))
    device = NotingStreams()
    executor = TorchExecutor(device)
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as folder:
        path = Path(folder) / "model.pt2"
        layers = [layer for _ in range(_DEPTH) for layer in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
        batch = torch.export.Dim("batch", min=1, max=1024)
        example = (torch.zeros(2, 8),)
        module = torch.nn.Sequential(*layers).eval()
        torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: batch},)), path)
        models = [TorchModel.open(path, name=f"model{number}") for number in range(MODELS)]
        name = models[0].inputs[0].name
        units = models[0].unit_count
        cuts = tuple(units * at // SEGMENTS for at in range(SEGMENTS + 1))
        spec = LoadSpec(shares, cuts, ({name: (1, 8)},), MAX_BATCH)
        for model in models:
            executor.add_model(model.name, executor.load(model.name, model, spec))  # type: ignore[arg-type]
        captured = device.captures
        ended: list[str | None] = []

        def end(_: int, error: str | None, __: Timing) -> None:
            ended.append(error)

        rng = np.random.default_rng(0)
        feeds = [np.zeros((rows, 8), np.float32) for rows in range(1, MAX_BATCH + 1)]
        for query in range(launches):
            rows = int(rng.integers(1, MAX_BATCH + 1))
            executor.put(query, {name: feeds[rows - 1]})
            work = Work(models[query % MODELS].name, 0, rows, 0, units)
            executor.start(Launch(query, query, (query,), work, True, shares[query // MODELS % LANES], 0), end)
        _wait(ended, launches)
        counts: Sequence[float] = (captured / MODELS, device.captures - captured, executor.chains.eager)
        executor.close()
        for model in models:
            model.close()
    return dict(zip(("graphs_per_model", "captures_while_serving", "launches_run_eagerly"), counts, strict=True))


def _wait(ended: list[str | None], launches: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    while len(ended) < launches and time.monotonic() < until:
        time.sleep(0.05)
    if len(ended) < launches or any(ended):
        raise BenchError(f"{launches - len(ended)} of {launches} launches did not end, {sum(map(bool, ended))} failed")
