"""Measures the memory of a model's worker process: its peak after the largest batch in each share (decision 0081)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from queue import SimpleQueue

from cotenant import linux
from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.errors import CotenantError
from cotenant.execute.protocol import LoadSpec, ModelExecutor
from cotenant.execute.registry import open_executor
from cotenant.execute.source import source_of
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import OpenedModel
from cotenant.measure.solo import Sweep
from cotenant.work import CPU, Work

_LONGEST_NS = 60_000_000_000
"""Predicted latency of a launch, in ns: ten times that later, its worker counts as hung."""
_log = logging.getLogger(__name__)


def worker_peak_bytes(opened: OpenedModel, sweep: Sweep, cuts: Sequence[int]) -> int:
    """Peak resident memory of a new worker with the sessions for the shares of a sweep, in bytes.

    The worker runs the largest batch at the largest shape in each share. 0 where this cannot be measured: on a GPU, on
    other systems than Linux, and after an error, which is logged.
    """
    if opened.device != CPU or not linux.IS_LINUX:
        return 0
    try:
        with closing(open_executor(DeviceSection(), sweep.shares)) as executor:
            return _peak_bytes(executor, opened, sweep, tuple(cuts))
    except (CotenantError, OSError) as error:
        _log.warning("model %r: the memory of its worker is not measured: %s", opened.found.model, error)
        return 0


def _peak_bytes(executor: ModelExecutor, opened: OpenedModel, sweep: Sweep, cuts: tuple[int, ...]) -> int:
    tenant, model = opened.found.tenant, opened.runner
    spec = LoadSpec(sweep.shares, cuts, sweep.shapes, sweep.max_batch)
    executor.add_model(tenant, executor.load(tenant, source_of(model), spec))
    shape = sweep.largest_shape
    inputs = make_inputs(model.inputs, shape, sweep.max_batch, sweep.max_batch > 1, sweep.samples)
    work = Work(tenant, sweep.shapes.index(shape), sweep.max_batch, 0, model.unit_count)
    ends: SimpleQueue[str | None] = SimpleQueue()
    for number, share in enumerate(sweep.shares):
        executor.put(number, inputs)
        launch = Launch(number, number, (number,), work, True, share, _LONGEST_NS)
        executor.start(launch, lambda _, reason, __: ends.put(reason))
        if (reason := ends.get()) is not None:
            raise CotenantError(reason)
        executor.take(number)
    [status] = executor.workers()
    return linux.peak_bytes(status.pid)
