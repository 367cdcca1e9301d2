"""The launches of an engine: running and waiting ones, and the ownership of slots.

A waiting launch has a claim on its slots from the decision on. It owns the slots that were free then. The other slots
pass to it when the launches that hold them end. So a launch never finds a slot taken, and no slot has two owners.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from cotenant.core.actions import Launch
from cotenant.core.batches import Batch
from cotenant.core.lifecycle import TaskState, TaskStep, next_task_state
from cotenant.core.snapshot import Running
from cotenant.errors import ProtocolViolationError
from cotenant.work import Share

_NEW, _RUNNING, _WAITING = TaskState.NEW, TaskState.RUNNING, TaskState.WAITING
_LAUNCH, _END = TaskStep.LAUNCH, TaskStep.END


class Launches:
    """Running and waiting launches by number. `free_mask` has the free slots; `expandable` counts expandable launches.

    `count` is the number of the next launch.
    """

    __slots__ = ("_needs", "_promised", "_sources", "count", "expandable", "free_mask", "running", "waiting")

    def __init__(self, free_mask: int) -> None:
        self.running: dict[int, Running] = {}
        self.waiting: dict[int, Launch] = {}
        self.free_mask = free_mask
        self.count = 0
        self.expandable = 0
        self._needs: dict[int, set[int]] = {}
        """By waiting launch, the launches that have to end before it starts."""
        self._sources: dict[int, dict[int, int]] = {}
        """By waiting launch, the slots that it inherits from each other launch, as masks."""
        self._promised: dict[int, int] = {}
        """By launch, the slots that waiting launches inherit when it ends, as masks."""

    def is_known(self, number: int) -> bool:
        """Whether a launch runs or waits."""
        return number in self.running or number in self.waiting

    def held_for(self, number: int) -> int:
        """The slots of a launch that no waiting launch inherits yet."""
        run = self.running.get(number)
        launch = self.waiting[number] if run is None else run.launch
        return launch.share.mask & ~self._promised.get(number, 0)

    def book(self, launch: Launch, batch: Batch, now_ns: int) -> bool:
        """Reserve the slots of a new launch. Whether it starts now; else it waits."""
        self.count += 1
        mask, number = launch.share.mask, launch.id
        rest = mask & ~self.free_mask
        self.free_mask &= ~mask
        needs = {other for other in launch.after if self.is_known(other)} if launch.after else None
        if not needs:
            self._start(launch, batch, now_ns, _NEW)
            return True
        sources = self._sources[number] = {}
        for other in launch.after:
            taken = rest & self.held_for(other) if other in needs else 0
            if taken:
                sources[other] = taken
                self._promised[other] = self._promised.get(other, 0) | taken
                rest &= ~taken
        next_task_state(_NEW, TaskStep.WAIT, number)
        self.waiting[number] = launch
        self._needs[number] = needs
        return False

    def end(self, number: int) -> Running:
        """End a launch: its slots become free, or pass to the launches that inherit them.

        Raises ProtocolViolationError when it does not run.
        """
        run = self.running.pop(number, None)
        if run is None:
            raise ProtocolViolationError(f"launch {number} ended, but it is not running")
        next_task_state(run.state, _END, number)
        launch = run.launch
        if launch.stops and run.state is _RUNNING:
            self.expandable -= 1
        if self._sources:
            self.free_mask |= launch.share.mask & ~self._promised.pop(number, 0)
            for sources in self._sources.values():
                sources.pop(number, None)
        else:
            self.free_mask |= launch.share.mask
        return run

    def due(self, ended: int) -> list[Launch]:
        """The launches that waited for this one alone, oldest first; the caller wakes each."""
        made: list[Launch] = []
        for number, needs in self._needs.items():
            needs.discard(ended)
            if not needs:
                made.append(self.waiting[number])
        return made

    def wake(self, launch: Launch, batch: Batch, now_ns: int) -> Launch:
        """Start a launch that has waited, with the queries that its batch has now."""
        del self.waiting[launch.id], self._needs[launch.id], self._sources[launch.id]
        if launch.queries != batch.query_ids:
            launch = structs.replace(launch, queries=batch.query_ids)
        self._start(launch, batch, now_ns, _WAITING)
        return launch

    def cancel(self, batch: int) -> int:
        """Remove the waiting launches of a batch without live queries; returns their number.

        Launches that waited for a removed launch inherit its dependencies and its slots.
        """
        gone = [launch for launch in self.waiting.values() if launch.batch == batch]
        for launch in reversed(gone):
            number = launch.id
            next_task_state(_WAITING, TaskStep.CANCEL, number)
            del self.waiting[number]
            needs, sources = self._needs.pop(number), self._sources.pop(number)
            for heir, others in self._needs.items():
                if number in others:
                    others.remove(number)
                    others |= needs
                    passed = self._sources[heir].pop(number, 0)
                    for other, mask in sources.items():
                        if mask & passed:
                            self._sources[heir][other] = self._sources[heir].get(other, 0) | (mask & passed)
            loose = launch.share.mask & ~self._promised.pop(number, 0)
            for other, mask in sources.items():
                left = self._promised.pop(other) & ~(mask & loose)
                if left:
                    self._promised[other] = left
                loose &= ~mask
            self.free_mask |= loose
        return len(gone)

    def expand(self, number: int, share: Share, predicted_ns: int) -> None:
        """Reserve free slots for a running launch, which takes them at its next stop."""
        run = self.running[number]
        self.free_mask &= ~share.mask
        self.expandable -= 1
        self.running[number] = structs.replace(
            run,
            launch=structs.replace(run.launch, share=share, predicted_ns=predicted_ns),
            state=next_task_state(run.state, TaskStep.EXPAND, number),
        )

    def expanded(self, number: int) -> None:
        """The launch uses its new slots. Raises ProtocolViolationError when no Expand was decided for it."""
        run = self.running.get(number)
        if run is None:
            raise ProtocolViolationError(f"launch {number} expanded, but it does not run")
        self.running[number] = structs.replace(run, state=next_task_state(run.state, TaskStep.EXPANDED, number))
        self.expandable += 1

    def waiting_of(self, batch: int) -> int:
        """Number of waiting launches of a batch."""
        return sum([launch.batch == batch for launch in self.waiting.values()]) if self.waiting else 0

    def of_tenant(self, tenant: str, *, running: bool = False) -> Iterable[int]:
        """Numbers of a tenant's batches that have waiting launches, or, with `running`, running ones."""
        launches = [*[run.launch for run in self.running.values() if running], *self.waiting.values()]
        return dict.fromkeys(launch.batch for launch in launches if launch.work.tenant == tenant)

    def is_ending(self, batch: Batch) -> bool:
        """Whether a running batch ends with its running launches."""
        return batch.until == batch.tenant.cuts[-1] and not self.waiting_of(batch.id)

    def _start(self, launch: Launch, batch: Batch, now_ns: int, state: TaskState) -> None:
        self.running[launch.id] = Running(launch, batch, now_ns, next_task_state(state, _LAUNCH, launch.id))
        if launch.stops:
            self.expandable += 1
