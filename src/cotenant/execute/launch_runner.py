"""A launch from its inputs to what it leaves, on the thread of a lane: for threads of the server and of its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cotenant.core.actions import Launch
from cotenant.execute.batches import Batches, BatchTensors, ModelGoneError, for_client, for_engine, reason_of
from cotenant.execute.protocol import OnEnd, OnGrew, Tensors, Timing
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.team import Team
from cotenant.work import Share, TaskTime

if TYPE_CHECKING:
    from cotenant.execute.worker.channel import Run

_MOST_GROWN = 64
"""Launches that may be told to grow and have not come to their stops."""


class LaunchRunner:
    """Runs launches on the threads that call `run`. Tensors of paused batches stay in `batches`. Thread-safe.

    A launch that can grow stops at each of its stops, unless cores can join the model while it runs.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._grown: dict[int, tuple[Share, OnGrew]] = {}
        """What launches under way are to take in at their next stop."""
        self._teams: dict[int, Team] = {}
        """Launches under way that take cores in at once."""
        self._lock = threading.Lock()

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> bool:
        """See Executor."""
        with self._lock:
            team = self._teams.get(launch)
            if team is None:
                if len(self._grown) >= _MOST_GROWN:  # from a worker's server it may come when the launch has just ended
                    del self._grown[next(iter(self._grown))]
                self._grown[launch] = share, on_grew
                return False
        team.grow(share.cores)
        return True

    def run(
        self,
        launch: Launch | Run,
        share: Share,
        model: Runner | None,
        batch: BatchTensors | Tensors | Exception,
        hand_out: Callable[[Any, Any, Tensors], None],
        on_end: OnEnd,
        began_ns: int = 0,
    ) -> None:
        """Run a launch of a batch that has begun, just now or at `began_ns`, and tell how it ended.

        `batch` may be the inputs alone, where nothing of it stays behind. `hand_out` takes the outputs, and may raise.
        A launch whose model or batch is not there, or that raises, ends with the reason.
        """
        began = gathered = ran = began_ns or time.perf_counter_ns()
        error: str | None = None
        pieces: tuple[TaskTime, ...] = ()
        steal_ns = 0
        try:
            if isinstance(batch, Exception):
                raise batch
            if model is None:
                raise ModelGoneError(launch.work.tenant)
            start = launch.work.start
            part = batch.part if isinstance(batch, BatchTensors) else None
            tensors: Any
            if part is not None:
                read, made = model.dfg.segment_io(start, launch.work.end)
                tensors = part.tensors(read if start else None)
                if not start:
                    tensors = {name: for_engine(array) for name, array in tensors.items()}
            elif start == 0:
                inputs = batch.whole() if isinstance(batch, BatchTensors) else batch
                tensors = {name: for_engine(array) for name, array in inputs.items()}
            elif isinstance(batch, BatchTensors):
                tensors = batch.kept
            given = frozenset(tensors) if part is not None else frozenset()  # names alone: tensors may go in between
            version = {"version": launch.work.version} if launch.work.version else {}
            gathered = ran = time.perf_counter_ns()
            on_core_ns = time.thread_time_ns()
            team = self._team(launch, share) if launch.stops and model.joins else None
            for end in (launch.work.end,) if team else (*launch.stops, launch.work.end):
                threads = team or (share.cores if share.size > 1 else 1)
                tensors = model.run(start, end, tensors, threads, **version)
                if end != launch.work.end and (more := self._grown.pop(launch.id, None)) is not None:
                    share, on_grew = more
                    on_grew(launch.id)
                start = end
            ran = time.perf_counter_ns()
            if share.size == 1 and not team:  # else threads of the engine work, too, and wait for each other
                steal_ns = max(0, ran - gathered - (time.thread_time_ns() - on_core_ns))
            take_pieces = getattr(model, "take_pieces", None)
            pieces = () if take_pieces is None else take_pieces()
            if part is not None:
                own = {name: tensors[name] for name in made}
                alike = {name: tensors[name] for name in tensors if name not in own and name not in given}
                names = [tensor.name for tensor in model.outputs]
                joined = self._batches.join(launch, names, own, alike if launch.last else {})
                if joined is not None:
                    hand_out(launch, joined[0], for_client(joined[1]))
            elif launch.last:
                hand_out(launch, batch, for_client(to_numpy(tensors)))
            elif isinstance(batch, BatchTensors):
                self._batches.pause(launch, batch, tensors)
        except Exception as caught:
            ran = max(gathered, time.perf_counter_ns())
            error = reason_of(caught)
        output_ns = time.perf_counter_ns() - ran
        on_end(launch.id, error, Timing(gathered - began, ran - gathered, output_ns, pieces, steal_ns))
        if launch.stops:  # only now nobody asks for more
            with self._lock:
                self._grown.pop(launch.id, None)
                self._teams.pop(launch.id, None)

    def _team(self, launch: Launch | Run, share: Share) -> Team:
        """The cores of a launch, with those that have come already."""
        team = Team(share.cores)
        with self._lock:
            self._teams[launch.id] = team
            early = self._grown.pop(launch.id, None)
        if early is not None:
            team.grow(early[0].cores)
            early[1](launch.id)
        return team
