"""The cores of this machine as a target device: models are opened, measured and run on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cotenant import linux
from cotenant.execute.protocol import Inputs, LoadSpec, Run
from cotenant.execute.runner import Runner, to_numpy
from cotenant.work import CPU, Share


class CoreTarget:
    """Cores of this machine: the calling thread is pinned to the first, a runner's thread pool to the others."""

    device = CPU
    unit = "core"
    is_padded = False

    def runs_inline(self, share: Share) -> bool:
        """Whether the share is one core, which the calling thread runs on."""
        return share.size == 1

    @contextmanager
    def at(self, share: Share) -> Iterator[None]:
        """Inside, the calling thread is pinned to the first core of the share."""
        before = linux.available_cores()
        linux.pin(share.cores[:1])
        try:
            yield
        finally:
            linux.pin(before)

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """The model with its sessions prepared. Raises ModelError when a session cannot be loaded."""
        for threads, ranges in spec.sessions:
            model.prepare(ranges, threads)

        def run(share: Share, inputs: Inputs, ranges: Sequence[tuple[int, int]]) -> None:
            tensors, threads = inputs, share.cores if share.size > 1 else 1
            for start, end in ranges:
                tensors = model.run(start, end, tensors, threads)
            to_numpy(tensors)  # waits for results that other threads compute

        yield run

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """Median latency of each unit in ns, on one thread."""
        with self.at(share):
            model.run(0, model.unit_count, inputs)  # raises a better error than a run of single units
            return model.unit_ns(inputs)

    def floor_ns(self, share: Share) -> int:
        """0: a launch on cores waits for no device."""
        return 0
