"""Small policies that launch tasks: parts of batches side by side, launches that wait, and launches that expand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.lifecycle import TaskState
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, DropRule, Expansion, PolicySpec, QueueView, Snapshot, Start
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work


@dataclass(frozen=True)
class TaskPolicy:
    """First come, first served; a batch goes to the first lanes when they are free. `how` it is run differs."""

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.NONE
    preempt: bool = True

    name: ClassVar[str] = "tasks"

    @property
    def spec(self) -> PolicySpec:
        return PolicySpec(name=self.name, lanes=self.lanes, shares=self.lanes, drop=self.drop, preempt=self.preempt)

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return (query.id,)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        queues = sorted((each for each in snapshot.queues.values() if each.queries), key=lambda each: each.keys[0])
        paused = [(batch.tenant.work(batch.shape, batch.items, batch.next_unit), batch.id) for batch in snapshot.paused]
        for work, queries, batch in [*((w, (), b) for w, b in paused), *map(_batch, queues)]:
            starts = tuple(self.starts(snapshot, work, queries, batch))
            if starts:
                return Decision(starts)
        return Decision()

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """How this work is launched; nothing while it cannot be."""
        raise NotImplementedError

    def start(
        self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None, lane: int, *after: int
    ) -> Start:
        share = self.lanes[lane]
        latency = snapshot.predictor.latency_ns(work, share.size, share.device)
        return Start(work, queries, share, latency, batch, after)

    def is_free(self, snapshot: Snapshot, *lanes: int) -> bool:
        return all(self.lanes[lane].mask & snapshot.free_mask == self.lanes[lane].mask for lane in lanes)


def _batch(queue: QueueView) -> tuple[Work, tuple[Query, ...], None]:
    """The head of a queue with those behind it that fit."""
    head, *rest = queue.queries
    chosen, rows = [head], head.items
    for query in rest:
        if (query.shape, query.merge_key) != (
            head.shape,
            head.merge_key,
        ) or rows + query.items > queue.tenant.max_batch:
            break
        chosen.append(query)
        rows += query.items
    return queue.tenant.work(head.shape, rows), tuple(chosen), None


def _middle(snapshot: Snapshot, work: Work) -> int:
    """A cut near the middle of what is left; the end where there is none."""
    cuts = [cut for cut in snapshot.queues[work.tenant].tenant.cuts if work.start < cut]
    return cuts[(len(cuts) - 1) // 2]


class Halves(TaskPolicy):
    """Half of the rows on each of two lanes up to a cut in the middle; then the whole on the first, once both are."""

    name: ClassVar[str] = "halves"

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """See TaskPolicy."""
        if not self.is_free(snapshot, 0, 1):
            return
        first, half, cut = snapshot.next_launch, work.items // 2, _middle(snapshot, work)
        if not half:
            yield self.start(snapshot, work, queries, batch, 0)
            return
        begun = work.until(cut)
        yield self.start(snapshot, begun.part(0, half), queries, batch, 0)
        yield self.start(snapshot, begun.part(half, work.items), queries, batch, 1)
        if cut < work.end:
            yield self.start(snapshot, work.since(cut), queries, batch, 0, first, first + 1)


class Middle(TaskPolicy):
    """The units between the first cut and the last one run for a half of the rows each, on two lanes; those before and
    behind for all, on the first."""

    name: ClassVar[str] = "middle"

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """See TaskPolicy."""
        if not self.is_free(snapshot, 0, 1):
            return
        cuts = snapshot.queues[work.tenant].tenant.cuts
        first, half, low, high = snapshot.next_launch, work.items // 2, cuts[1], cuts[-2]
        if work.start or not half:
            yield self.start(snapshot, work, queries, batch, 0)
            return
        run = work.since(low).until(high)
        yield self.start(snapshot, work.until(low), queries, batch, 0)
        yield self.start(snapshot, run.part(0, half), queries, batch, 0, first)
        yield self.start(snapshot, run.part(half, work.items), queries, batch, 1, first)
        yield self.start(snapshot, work.since(high), queries, batch, 0, first + 1, first + 2)


class Branches(TaskPolicy):
    """The units up to the first cut on one device, those up to the second on another one, beside them; they meet, and
    the rest runs on the first."""

    name: ClassVar[str] = "branches"

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """See TaskPolicy."""
        if not self.is_free(snapshot, 0, 1):
            return
        cuts = [cut for cut in snapshot.queues[work.tenant].tenant.cuts if cut > work.start]
        first = snapshot.next_launch
        if len(cuts) < 3:
            yield self.start(snapshot, work, queries, batch, 0)
            return
        yield self.start(snapshot, work.until(cuts[0]), queries, batch, 0)
        yield self.start(snapshot, work.since(cuts[0]).until(cuts[1]), queries, batch, 1)
        yield self.start(snapshot, work.since(cuts[1]), queries, batch, 0, first, first + 1)


class Pointers(TaskPolicy):
    """A batch runs up to a cut on the lane that is free; on a busy one it waits for what runs there, which is decided
    at once. One batch waits at most."""

    name: ClassVar[str] = "pointers"

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """See TaskPolicy."""
        begun = work.until(_middle(snapshot, work))
        for lane in range(len(self.lanes)):
            if self.is_free(snapshot, lane):
                yield self.start(snapshot, begun, queries, batch, lane)
                running = sorted(snapshot.running)
                rest = work.since(begun.end)
                if rest.start < rest.end and running and not snapshot.waiting:
                    other = snapshot.running[running[0]].launch.share  # its lane, when both have ended
                    at = self.lanes.index(other) if other in self.lanes else lane
                    yield self.start(snapshot, rest, queries, batch, at, snapshot.next_launch, running[0])
                return


class Expanding(TaskPolicy):
    """A batch begins on the first lane that is free; what runs takes in all that is free when nobody waits."""

    name: ClassVar[str] = "expanding"

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        made = TaskPolicy.decide(self, snapshot, memory)
        if made.starts:
            return made
        for run in snapshot.running.values():
            had = run.launch.share
            free = [lane for lane in self.lanes if lane.mask & snapshot.free_mask == lane.mask]
            if run.launch.stops and run.state is TaskState.RUNNING and free:
                cores = (*had.cores, *(core for lane in free for core in lane.cores))
                return Decision(expansions=(Expansion(run.launch.id, Share(cores), run.launch.predicted_ns),))
        return Decision()

    def starts(self, snapshot: Snapshot, work: Work, queries: tuple[Query, ...], batch: int | None) -> Iterator[Start]:
        """See TaskPolicy."""
        for lane in range(len(self.lanes)):
            if self.is_free(snapshot, lane):
                start = self.start(snapshot, work, queries, batch, lane)
                yield Start(start.work, start.queries, start.share, start.predicted_ns, start.batch, is_expandable=True)
                return


TASK_POLICIES = {policy.name: policy for policy in (Halves, Middle, Branches, Pointers, Expanding)}
