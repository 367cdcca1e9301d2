"""The launches of an engine: those under way, those that wait for others, and who holds which slots.

A launch that waits for others has its slots from the decision on: those that were free then are its own at once, those
that a launch before it holds pass on to it when that one ends. So what waits never finds its place taken, and two
launches never hold one slot.
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
    """See above. `free_mask` has the slots that no launch holds; `expandable` counts the launches that may get more.

    `count` numbers launches: the next one gets it.
    """

    __slots__ = ("_needs", "_promised", "_sources", "count", "expandable", "free_mask", "running", "waiting")

    def __init__(self, free_mask: int) -> None:
        self.running: dict[int, Running] = {}
        self.waiting: dict[int, Launch] = {}
        self.free_mask = free_mask
        self.count = 0
        self.expandable = 0
        self._needs: dict[int, set[int]] = {}
        """What each of those that wait still waits for."""
        self._sources: dict[int, dict[int, int]] = {}
        """The slots that each of those that wait gets of each launch that still holds them."""
        self._promised: dict[int, int] = {}
        """The slots of a launch that pass on to others when it ends."""

    def is_known(self, number: int) -> bool:
        """Whether a launch is under way or waits."""
        return number in self.running or number in self.waiting

    def held_for(self, number: int) -> int:
        """The slots of a launch that nobody gets yet when it ends."""
        run = self.running.get(number)
        launch = self.waiting[number] if run is None else run.launch
        return launch.share.mask & ~self._promised.get(number, 0)

    def book(self, launch: Launch, batch: Batch, now_ns: int) -> bool:
        """Take the slots of a new launch. Says whether it starts now; else it waits."""
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
        """A launch has ended: its slots are free, or go to those that they were promised to.

        Raises ProtocolViolationError when it is not under way.
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
        """Those that waited for this launch alone, the oldest first; each is to be woken."""
        made: list[Launch] = []
        for number, needs in self._needs.items():
            needs.discard(ended)
            if not needs:
                made.append(self.waiting[number])
        return made

    def wake(self, launch: Launch, batch: Batch, now_ns: int) -> Launch:
        """Let a launch start that has waited; for the queries that are in its batch by now."""
        del self.waiting[launch.id], self._needs[launch.id], self._sources[launch.id]
        if launch.queries != batch.query_ids:
            launch = structs.replace(launch, queries=batch.query_ids)
        self._start(launch, batch, now_ns, _WAITING)
        return launch

    def cancel(self, batch: int) -> int:
        """Nobody waits for a batch: forget those of its launches that wait, and say how many.

        Who waits for them waits for what they waited for, and gets of it the slots that they were to pass on.
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
        """A launch is to take in slots that are free."""
        run = self.running[number]
        self.free_mask &= ~share.mask
        self.expandable -= 1
        self.running[number] = structs.replace(
            run,
            launch=structs.replace(run.launch, share=share, predicted_ns=predicted_ns),
            state=next_task_state(run.state, TaskStep.EXPAND, number),
        )

    def expanded(self, number: int) -> None:
        """It has them. Raises ProtocolViolationError when no Expand was decided for it."""
        run = self.running.get(number)
        if run is None:
            raise ProtocolViolationError(f"launch {number} expanded, but it does not run")
        self.running[number] = structs.replace(run, state=next_task_state(run.state, TaskStep.EXPANDED, number))
        self.expandable += 1

    def waiting_of(self, batch: int) -> int:
        """How many launches of a batch wait."""
        return sum([launch.batch == batch for launch in self.waiting.values()]) if self.waiting else 0

    def of_tenant(self, tenant: str, *, running: bool = False) -> Iterable[int]:
        """The batches of a tenant that have launches that wait, or, with `running`, are under way."""
        launches = [*[run.launch for run in self.running.values() if running], *self.waiting.values()]
        return dict.fromkeys(launch.batch for launch in launches if launch.work.tenant == tenant)

    def is_ending(self, batch: Batch) -> bool:
        """Whether a batch that runs has ended when its launches under way have."""
        return batch.until == batch.tenant.cuts[-1] and not self.waiting_of(batch.id)

    def _start(self, launch: Launch, batch: Batch, now_ns: int, state: TaskState) -> None:
        self.running[launch.id] = Running(launch, batch, now_ns, next_task_state(state, _LAUNCH, launch.id))
        if launch.stops:
            self.expandable += 1
