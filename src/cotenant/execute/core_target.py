"""The cores of this machine as a place where models are opened, measured and run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cotenant.execute.protocol import Inputs, LoadSpec, Run
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.lanes import pin
from cotenant.work import CPU, Share


class CoreTarget:
    """Cores of this machine: the calling thread sits on the first, a runner's pool on the others."""

    device = CPU
    unit = "core"
    is_padded = False

    def runs_inline(self, share: Share) -> bool:
        """See TargetDevice."""
        return share.size == 1

    @contextmanager
    def at(self, share: Share) -> Iterator[None]:
        """See TargetDevice."""
        before = os.sched_getaffinity(0)
        pin(share.cores[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """See TargetDevice."""
        for threads, ranges in spec.sessions:
            model.prepare(ranges, threads)

        def run(share: Share, inputs: Inputs, ranges: Sequence[tuple[int, int]]) -> None:
            tensors, threads = inputs, share.cores if share.size > 1 else 1
            for start, end in ranges:
                tensors = model.run(start, end, tensors, threads)
            to_numpy(tensors)  # which waits, where others than this thread run it

        yield run

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """See TargetDevice."""
        with self.at(share):
            model.run(0, model.unit_count, inputs)  # which says it well when that cannot be
            return model.unit_ns(inputs)

    def floor_ns(self, share: Share) -> int:
        """See TargetDevice."""
        return 0
