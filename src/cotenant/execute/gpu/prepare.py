"""Prepares a model on the lanes of a device: captures its segments as far as possible, and runs them twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product

from cotenant.execute.batches import reason_of, row_buckets
from cotenant.execute.gpu.chains import Chains, Prepared, capture_chain, form_of, warm_segments
from cotenant.execute.gpu.resident import MIB, Resident
from cotenant.execute.gpu.streams import Named, StreamDevice, StreamLane, causes, wait_for
from cotenant.execute.protocol import LoadSpec, Shapes
from cotenant.execute.strategy import WholeRun, strategies
from cotenant.execute.warm import zeros
from cotenant.work import Share

_FREE_SHARE = 8
"""Captures stop when less than 1 / _FREE_SHARE of the memory is free: launches without a chain need memory."""
_log = logging.getLogger("cotenant.torch")


class Preparation:
    """Prepares one model on one device. `why_eager` says why the rest of it is not captured.

    If CUDA refuses one batch size in one share, only that one is left out. Such batches are padded to the next captured
    size, the largest batch to twice its rows.
    """

    def __init__(
        self, device: StreamDevice, chains: Chains, resident: Resident, spec: LoadSpec, cores: Sequence[int] = ()
    ) -> None:
        self._device = device
        self._chains = chains
        self._resident = resident
        self._spec = spec
        self._cores = cores
        self._began = time.monotonic()
        self._before = len(chains)
        self._free = 0
        self._refused: list[str] = []
        self.why_eager = device.why_no_graphs or next(
            filter(None, (resident.model.why_eager(*each) for each in pairwise(spec.cuts))), ""
        )
        self.why_way_eager = device.why_no_graphs

    @property
    def steps(self) -> list[tuple[Share, Shapes, int]]:
        """Captures to make, each a task of its own: launches of a lane that serves run in between."""
        spec = self._spec
        rows = (0,) if spec.max_batch == 1 else spec.rows or row_buckets(spec.max_batch)
        return [(*each, count) for each in product(dict.fromkeys(spec.shares), spec.shapes) for count in rows]

    def capture(self, step: tuple[Share, Shapes, int], lane: StreamLane, wait_idle: Callable[[], None]) -> None:
        """Capture the model for one share, shape and batch size, on the thread of the lane, if it can be captured.

        `wait_idle` waits for launches of the lane: memory that they free during a capture would be recorded. Raises the
        error by which a device is lost.
        """
        resident, share = self._resident, step[0]
        if share not in resident.ways:
            found = (each.on_stream(resident.model, share, lane, self._cores) for each in strategies().values())
            resident.ways[share] = next((way for way in found if way is not None), None)
        for way in dict.fromkeys((None, resident.ways[share])):
            is_wanted = not self.why_eager if way is None else not self.why_way_eager
            if is_wanted:
                wait_idle()
                with lane.stream(resident.urgent):  # kernels of a graph keep the priority of its stream
                    is_refused = self._capture(*step, lane, way)
                    if is_refused and step[2] == self._spec.max_batch and way is None:
                        self._capture(share, step[1], 2 * step[2], lane, way)

    def tell(self) -> None:
        """Log the captures, their memory, and the reason why the rest runs eagerly."""
        made = len(self._chains) - self._before
        if self._refused:
            _log.warning(
                "model %r: CUDA refused to capture %d batch sizes (first: %s): they are padded to larger ones, or run "
                "eagerly. Set another model.precision, or sharing = 'streams', to use other kernels",
                *(self._resident.model.name, len(self._refused), self._refused[0]),
            )
        if made or (self.why_eager and not self._device.why_no_graphs):
            _log.info(
                "model %r: %d chains of %d segments captured on %s in %.1f s, %.0f MiB%s",
                *(self._resident.model.name, made, len(self._spec.cuts) - 1),
                *(self._device.name, time.monotonic() - self._began),
                max(0, self._free - self._device.room()[0]) / MIB if made else 0,
                f"; the rest runs eagerly: {self.why_eager}" if self.why_eager else "",
            )
        if any(self._resident.ways.values()) and self.why_way_eager and not self._device.why_no_graphs:
            _log.info("model %r: its run strategy runs eagerly: %s", self._resident.model.name, self.why_way_eager)

    def _capture(self, share: Share, shape: Shapes, rows: int, lane: StreamLane, way: WholeRun | None) -> bool:
        """Capture the model, or its run strategy `way`, for so many rows; note the reason if that is impossible.

        Returns whether CUDA refused only these rows in this share, so that others may be captured.
        """
        model = self._resident.model
        number = self._resident.number if way is None else -self._resident.number

        def run(start: int, end: int, tensors: Named) -> Named:
            return model.run(start, end, tensors, lane.threads)

        dims = {name: (rows, *each[1:]) if rows else tuple(each) for name, each in shape.items()}
        inputs = {each.name: lane.gather([zeros(each.dtype, dims[each.name])]) for each in model.inputs}
        form = form_of(inputs, rows, self._spec.max_batch)
        if self._chains.has(number, share, form, rows):
            return False
        why = ""
        try:
            if way is None:
                warm_segments(lane, run, self._spec.cuts, inputs)
            else:
                way.warm(inputs, rows)
            wait_for(lane.record())
            free, total = self._device.room()  # captures cannot use memory that torch caches from the warm-up
            self._free = self._free or free
            if free < total // _FREE_SHARE:
                why = f"{free / MIB:.0f} of {total / MIB:.0f} MiB are free on {self._device.name}"
            else:
                chain: Prepared = (
                    capture_chain(lane, run, self._spec.cuts, inputs, rows)
                    if way is None
                    else way.capture(inputs, rows)
                )
                wait_for(lane.record())
                self._chains.add(number, share, form, chain)
        except Exception as error:
            if self._device.is_lost(error):
                raise
            why = f"{rows or 1} rows: {reason_of(error)}"
            if way is None and not self._device.why_no_graphs and _is_refusal(error):
                self._refused.append(f"in {share.size} SMs {why}")
                return True
        if way is None:
            self.why_eager = why
        else:
            self.why_way_eager = why
        return False


def _is_refusal(error: BaseException) -> bool:
    """Whether CUDA refused a launch but still works. torch has no class for it, so the message is searched."""
    return any("CUDA error" in str(each) and "out of memory" not in str(each) for each in causes(error))
