"""Inside the simulation of plans: queues, and lanes that run the rounds of their partitions. Times are in ns."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from cotenant.techniques.partitions.plan.types import CoRunner, Costs
from cotenant.work import Slot, Work

DROPPED = -1
"""In the place of the end of a query that was dropped."""
NEVER = 1 << 62

Finish = Callable[[list[int], int], None]


class Queue:
    """Rows of one tenant that wait for the partitions of one device.

    `times` may hold arrivals yet to come; those before `head` were taken. For tenants of their own `ends` grows with
    `head`. Rows of an application's stage are handed to `finish` when they end, and to `lose` when they are dropped;
    `deadlines` is kept where rows arrive later than their queries did.
    """

    __slots__ = ("deadlines", "ends", "finish", "head", "ids", "lanes", "lose", "slo_ns", "tenant", "times")

    def __init__(self, tenant: str, slo_ns: int, finish: Finish | None = None, lose: Finish | None = None) -> None:
        self.tenant = tenant
        self.slo_ns = slo_ns
        self.times: list[int] = []
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.deadlines: list[int] | None = None
        self.head = 0
        self.finish = finish
        self.lose = lose
        self.lanes: list[Lane] = []


class LaneSlot:
    """A slot of a round with what its batches take: position n of each list is for n rows, position 0 unused."""

    __slots__ = ("alone_ns", "batch", "believed_ns", "cache", "device", "model", "queue", "runs", "size", "tenant")

    def __init__(self, slot: Slot, model: str, size: int, device: str, costs: Costs, actual: Costs) -> None:
        self.queue = Queue(slot.tenant, 0)
        self.tenant = slot.tenant
        self.model = model
        self.device = device
        self.batch = slot.batch
        self.size = size
        self.runs = [0] * (slot.batch + 1)
        self.believed_ns = [0] * (slot.batch + 1)
        self.alone_ns = [0] * (slot.batch + 1)
        self.cache: dict[object, int] = {}
        known = [batch for batch in costs.batches(model) if batch < slot.batch]
        quickest = slot.batch
        least = costs.latency_ns(Work(model, 0, quickest), size, device)
        upper = slot.batch
        for batch in (*reversed(known), 0):
            taken = actual.latency_ns(Work(model, 0, quickest), size, device)
            for rows in range(batch + 1, upper + 1):
                self.runs[rows], self.believed_ns[rows], self.alone_ns[rows] = quickest, least, taken
            upper = batch
            if batch:
                its = costs.latency_ns(Work(model, 0, batch), size, device)
                if its < least:
                    quickest, least = batch, its


class Lane:
    """One partition: its slots in turn, the next as soon as the last one ended, none while no query waits."""

    __slots__ = (
        "busy_ns",
        "device",
        "due",
        "flight",
        "index",
        "is_retired",
        "next",
        "number",
        "peers",
        "rows",
        "running",
        "slots",
        "start_ns",
        "turns",
    )

    def __init__(self, number: int, device: int, index: int, slots: list[LaneSlot], start_ns: int) -> None:
        self.number = number
        self.device = device
        self.index = index
        self.slots = slots
        self.start_ns = start_ns
        self.peers: list[Lane] = []
        self.running: CoRunner | None = None
        self.flight: tuple[Queue, list[int]] | None = None
        self.next = 0
        self.due = NEVER
        self.busy_ns = self.turns = self.rows = 0
        self.is_retired = False


class Lanes:
    """All lanes and the heap of their next events. Ties are taken in the order of the lanes' numbers."""

    def __init__(self, actual: Costs, noise: Iterator[float] | None, is_dropping: bool) -> None:
        self._actual = actual
        self._noise = noise
        self._is_dropping = is_dropping
        self._heap: list[tuple[int, int]] = []
        self.all: list[Lane] = []
        self.on_retired: Callable[[Lane, int], None] = lambda lane, now: None

    def wake(self, lane: Lane, at: int) -> None:
        """Let a lane that is not running look for work at a time, or sooner if it would have."""
        if at < lane.due:
            lane.due = at
            heappush(self._heap, (at, lane.number))

    def push(self, queue: Queue, query: int, deadline: int, now: int) -> None:
        """Add a row that has just become ready."""
        queue.times.append(now)
        queue.ids.append(query)
        assert queue.deadlines is not None
        queue.deadlines.append(deadline)
        for lane in queue.lanes:
            if lane.running is None:
                self.wake(lane, now)

    def run(self, until: int) -> None:
        """Handle everything before `until`."""
        heap, lanes = self._heap, self.all
        while heap and heap[0][0] < until:
            now, number = heappop(heap)
            lane = lanes[number]
            if lane.due != now:
                continue
            lane.due = NEVER
            if lane.running is not None:
                lane.running = None
                if lane.flight is not None:
                    queue, ids = lane.flight
                    lane.flight = None
                    assert queue.finish is not None
                    queue.finish(ids, now)
                if lane.is_retired:
                    self.on_retired(lane, now)
                    continue
            ns = self._turn(lane, now)
            if ns:
                lane.due = now + ns
                heappush(heap, (now + ns, number))
            else:
                wake = NEVER
                for slot in lane.slots:
                    waiting = slot.queue
                    if waiting.head < len(waiting.times):
                        wake = min(wake, waiting.times[waiting.head])
                if wake < NEVER:
                    lane.due = wake
                    heappush(heap, (wake, number))

    def _turn(self, lane: Lane, now: int) -> int:
        """Launch the next slot of the round that has rows; the time that takes, 0 where no query waits."""
        slots = lane.slots
        turn = lane.next
        for _ in range(len(slots)):
            slot = slots[turn]
            turn += 1
            if turn == len(slots):
                turn = 0
            queue = slot.queue
            times, head = queue.times, queue.head
            if head >= len(times) or times[head] > now:
                continue
            rows = bisect_right(times, now, head, min(head + slot.batch, len(times))) - head
            if self._is_dropping:
                rows = self._drop(slot, queue, rows, now)
                if not rows:
                    continue
                head = queue.head
            ns = self._time(lane, slot, rows)
            queue.head = head + rows
            if queue.finish is None:
                queue.ends += [now + ns] * rows
            else:
                lane.flight = (queue, queue.ids[head : head + rows])
            lane.next = turn
            lane.running = (slot.model, slot.runs[rows], slot.size)
            lane.busy_ns += ns
            lane.turns += 1
            lane.rows += rows
            return ns
        return 0

    def _time(self, lane: Lane, slot: LaneSlot, rows: int) -> int:
        peers = lane.peers
        if not peers:
            ns = slot.alone_ns[rows]
        else:
            key = (rows, peers[0].running) if len(peers) == 1 else (rows, *[peer.running for peer in peers])
            known = slot.cache.get(key)
            if known is None:
                others = [peer.running for peer in peers if peer.running is not None]
                factor = self._actual.factor(slot.model, slot.runs[rows], slot.size, others, slot.device)
                known = slot.cache[key] = math.ceil(slot.alone_ns[rows] * factor)
            ns = known
        return ns if self._noise is None else max(1, round(ns * next(self._noise)))

    def _drop(self, slot: LaneSlot, queue: Queue, rows: int, now: int) -> int:
        """Drop the rows at the head that cannot be in time. Returns how many rows then go into this slot.

        A batch is made smaller for the sake of its first row, but not while more rows wait than a batch takes. Else
        ever more of them would be late.
        """
        times, head, deadlines, believed_ns = queue.times, queue.head, queue.deadlines, slot.believed_ns
        lost = []
        while rows:
            deadline = times[head] + queue.slo_ns if deadlines is None else deadlines[head]
            if deadline >= now + believed_ns[rows]:
                break
            after = head + slot.batch
            if after >= len(times) or times[after] > now:
                while rows and deadline < now + believed_ns[rows]:
                    rows -= 1
                if rows:
                    break
            lost.append(queue.ids[head])
            head += 1
            rows = bisect_right(times, now, head, min(head + slot.batch, len(times))) - head
        if lost:
            queue.head = head
            if queue.lose is None:
                queue.ends += [DROPPED] * len(lost)
            else:
                queue.lose(lost, now)
        return rows
