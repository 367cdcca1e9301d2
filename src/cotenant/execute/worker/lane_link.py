"""The server's end of a worker's lane: it sends one launch at a time, with its inputs in shared memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass

from cotenant.core.actions import Launch
from cotenant.execute.batches import BatchTensors
from cotenant.execute.protocol import OnEnd, OnExpanded, Tensors
from cotenant.execute.worker.channel import AddLane, Channel, Run
from cotenant.execute.worker.shared_tensors import SharedBuffer, TensorLayout


@dataclass(slots=True)
class Pending:
    """A launch that has not ended. Its `batch` has the inputs until they are written.

    `waited_ns` counts from the watchdog's first check after it was sent; -1 before.
    """

    launch: Launch
    on_end: OnEnd
    batch: BatchTensors
    input_ns: int = 0
    is_sent: bool = False
    waited_ns: int = -1
    on_expanded: OnExpanded = lambda _: None


class LaneLink:
    """Sends launches to one lane of a worker, each after the end of the one before: they share the buffers.

    Called under its supervisor's lock, except `outputs`, which only the supervisor's thread calls. The constructor
    raises OSError or MessageError, and leaves nothing behind, when the system or the worker has no room for it.
    """

    def __init__(self, control: Channel, cores: tuple[int, ...]) -> None:
        with contextlib.ExitStack() as if_it_fails:
            self._channel, theirs = Channel.pair()
            if_it_fails.callback(self._channel.close)
            with contextlib.closing(theirs):
                self._inputs = SharedBuffer.create("cotenant-inputs")
                if_it_fails.callback(self._inputs.close)
                self._outputs = SharedBuffer.create("cotenant-outputs")
                if_it_fails.callback(self._outputs.close)
                descriptors = [theirs.fileno(), self._inputs.descriptor, self._outputs.descriptor]
                with contextlib.suppress(OSError):  # the worker is dead: its supervisor detects it
                    control.send_with(AddLane(cores), descriptors)
            if_it_fails.pop_all()
        self._waiting: deque[Pending] = deque()
        self._is_busy = False

    def put(self, pending: Pending) -> None:
        """Send a launch now, or after those before it. Raises as `gather`, `write` and `send`: then it is not sent."""
        if self._is_busy:
            self._waiting.append(pending)
        else:
            self._send(pending)

    def next(self) -> Pending | None:
        """Take the next launch out of the queue, after the last one has ended; it is not sent yet."""
        self._is_busy = False
        return self._waiting.popleft() if self._waiting else None

    def outputs(self, layouts: tuple[TensorLayout, ...]) -> Tensors:
        """Copies of the outputs of the launch that has just ended. Raises SharedMemoryError."""
        return self._outputs.read(layouts, copy=True)

    def shut(self) -> None:
        """Send no more launches; the lane ends after those sent."""
        self._channel.shut()

    def close(self) -> None:
        """Close the channel and the buffers."""
        self._channel.close()
        self._inputs.close()
        self._outputs.close()

    def _send(self, pending: Pending) -> None:
        launch = pending.launch
        layouts: tuple[TensorLayout, ...] = ()
        if launch.work.start == 0 or launch.part:
            began = time.perf_counter_ns()
            layouts = self._inputs.write(pending.batch.gather())
            pending.input_ns = time.perf_counter_ns() - began
        with contextlib.suppress(OSError):  # the worker is dead: its supervisor reports it
            run = Run(launch.id, launch.batch, launch.work, launch.last, layouts, launch.part, launch.stops)
            self._channel.send(run)
        self._is_busy = pending.is_sent = True
