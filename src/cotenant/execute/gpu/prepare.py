"""Making a model ready on the lanes of a device: its segments are captured, as far as they can be, and run twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise, product

from cotenant.execute.batches import reason_of, row_buckets
from cotenant.execute.gpu.chains import Chains, capture_chain, form_of, warm_segments
from cotenant.execute.gpu.resident import MIB, Resident
from cotenant.execute.gpu.streams import Named, StreamDevice, StreamLane, wait_for
from cotenant.execute.protocol import LoadSpec, Shapes
from cotenant.execute.warm import zeros
from cotenant.work import Share

_FREE_SHARE = 8
"""Nothing is captured where less than this part of the memory would be left: launches without a chain need some."""
_log = logging.getLogger("cotenant.torch")


class Preparation:
    """What becomes of one model on one device. `why_eager` says what keeps the rest of it from being captured."""

    def __init__(self, device: StreamDevice, chains: Chains, resident: Resident, spec: LoadSpec) -> None:
        self._device = device
        self._chains = chains
        self._resident = resident
        self._spec = spec
        self._began = time.monotonic()
        self._before = len(chains)
        self._free = 0
        self.why_eager = device.why_no_graphs or next(
            filter(None, (resident.model.why_eager(*each) for each in pairwise(spec.cuts))), ""
        )

    @property
    def steps(self) -> list[tuple[Share, Shapes, int]]:
        """What is to be captured, each by itself: launches of a lane that serves may come in between."""
        spec = self._spec
        rows = (0,) if spec.max_batch == 1 else spec.rows or row_buckets(spec.max_batch)
        return [(*each, count) for each in product(dict.fromkeys(spec.shares), spec.shapes) for count in rows]

    def capture(self, step: tuple[Share, Shapes, int], lane: StreamLane, wait_idle: Callable[[], None]) -> None:
        """Capture what launches in a share will ask for, on the thread of its lane, unless something is against it.

        `wait_idle` waits for its launches: memory that one of them lets go of meanwhile would be recorded. Raises what
        says that the device is lost.
        """
        if not self.why_eager:
            wait_idle()
            with lane.stream(self._resident.urgent):  # whose priority kernels of a graph keep
                self._capture(*step, lane)

    def tell(self) -> None:
        """Say what was captured, what it takes, and what runs eagerly."""
        made = len(self._chains) - self._before
        if made or (self.why_eager and not self._device.why_no_graphs):
            _log.info(
                "model %r: %d chains of %d segments captured on %s in %.1f s, %.0f MiB%s",
                *(self._resident.model.name, made, len(self._spec.cuts) - 1),
                *(self._device.name, time.monotonic() - self._began),
                max(0, self._free - self._device.room()[0]) / MIB if made else 0,
                f"; the rest runs eagerly: {self.why_eager}" if self.why_eager else "",
            )

    def _capture(self, share: Share, shape: Shapes, rows: int, lane: StreamLane) -> None:
        model = self._resident.model

        def run(start: int, end: int, tensors: Named) -> Named:
            return model.run(start, end, tensors, lane.threads)

        dims = {name: (rows, *each[1:]) if rows else tuple(each) for name, each in shape.items()}
        inputs = {each.name: lane.gather([zeros(each.dtype, dims[each.name])]) for each in model.inputs}
        form = form_of(inputs, rows, self._spec.max_batch)
        if self._chains.has(self._resident.number, share, form, rows):
            return
        try:
            warm_segments(lane, run, self._spec.cuts, inputs)
            wait_for(lane.record())
            free, total = self._device.room()  # captured work cannot have what torch keeps of the warm-up
            self._free = self._free or free
            if free < total // _FREE_SHARE:
                self.why_eager = f"{free / MIB:.0f} of {total / MIB:.0f} MiB are free on {self._device.name}"
                return
            chain = capture_chain(lane, run, self._spec.cuts, inputs, rows)
            wait_for(lane.record())
        except Exception as error:
            if self._device.is_lost(error):
                raise
            self.why_eager = f"{rows or 1} rows: {reason_of(error)}"
        else:
            self._chains.add(self._resident.number, share, form, chain)
