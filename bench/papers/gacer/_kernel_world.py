"""A world of one GPU with launches that run beside each other, each as a stream of kernels, in order.

A kernel is a unit of a launch for its rows. It needs slots (`KernelTable.need`), as blocks that each hold theirs for as
long as they last, and are never moved. It also needs operations and bandwidth, which are shared max-min fairly between
the running launches. Launches are issued by hosts of their own. A host takes `launch_ns` to issue each kernel, and the
kernel reaches the device then. It begins `gap_ns` after the one before it in its launch has ended, at the earliest. The
rule of admission says which kernels begin. Nothing here depends on predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.fair_share import fair_shares
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.layer_blocks.world.many_core_rules import FULL
from cotenant.work import Share
from cotenant.world.simulated import WorldEvent

SLOTS = 256
"""Parts of the device that blocks hold. What a kernel needs is rounded to whole ones, and is one at least."""
GRAIN = 16
"""Of these, how many blocks of a kernel begin together at least, unless it has no more."""
MOST_WAVES = 4
"""Waves of blocks that a kernel is followed in; where it has more, several count as one."""


class Admission(StrEnum):
    """How free slots go to kernels with waiting blocks; kernels of lower rank come first."""

    WHOLE = "whole"
    """In the order in which kernels came; one begins when it can have all its slots, or those of the whole device."""
    IN_ORDER = "in_order"
    """Blocks fill the free slots: all of the kernel that came first, then those of the next."""
    SHARED = "shared"
    """Blocks fill the free slots, those of all kernels of a rank in equal parts."""


@dataclass(frozen=True, slots=True)
class KernelDevice:
    """Parameters of a GPU and its host.

    `launch_ns` is the host's time to issue a kernel; it grows by `host_loss` of itself for every other launch that is
    issued meanwhile. `gap_ns` lies between kernels of a stream. `sync_ns` is a host's wait for all of the device until
    it issues again, `event_ns` a wait of a stream for another. `waves` tells whether blocks come in waves, so that the
    last one leaves slots free. Of the device's operations and bandwidth, `compute_loss` and `bandwidth_loss` are lost
    while several launches run.

    Raises InvalidValueError when a number is out of its range.
    """

    admission: Admission
    launch_ns: int
    gap_ns: int = 0
    sync_ns: int = 0
    event_ns: int = 0
    waves: bool = True
    host_loss: float = 0.0
    compute_loss: float = 0.0
    bandwidth_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("launch_ns", "gap_ns", "sync_ns", "event_ns", "host_loss"):
            if getattr(self, name) < 0:
                raise InvalidValueError("kernel device", name, getattr(self, name), "a number from 0")
        for name in ("compute_loss", "bandwidth_loss"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidValueError("kernel device", name, getattr(self, name), "a share from 0, below 1")

    def issue_ns(self, beside: int) -> int:
        """What it takes to issue a kernel while so many other launches are issued."""
        return round(self.launch_ns * (1 + self.host_loss * beside))


@dataclass(frozen=True, slots=True)
class KernelCost:
    """A kernel: the slots of its blocks in all, and at once where it runs alone.

    It also has the time that a block holds them alone, in parts of a nanosecond. Its shares of operations and bandwidth
    are those while it has these slots.
    """

    blocks: int
    most: int
    work: int
    compute: float
    bandwidth: float

    @classmethod
    def of(cls, duration_ns: float, need: float, compute: float, bandwidth: float, waves: bool) -> KernelCost:
        """What takes so long alone, with these means of shares over that time."""
        count, held = 1, min(need, 1.0)
        if need > 1:
            count = min(ceil(need - 1e-9), MOST_WAVES) if waves else MOST_WAVES
            if waves:  # no fewer than what it uses of the device on average, at most all of it at once
                held = max(need / ceil(need - 1e-9), compute, bandwidth)
        blocks = max(1, round(SLOTS * count * held))
        most = min(blocks, SLOTS)
        full = most * count / blocks
        work = max(1, round(duration_ns / count)) * FULL
        return cls(blocks, most, work, min(1.0, compute * full), min(1.0, bandwidth * full))


class KernelCosts:
    """The kernels of a model on a device, for any number of rows that its table has."""

    def __init__(self, table: KernelTable, device: KernelDevice) -> None:
        self.table = table
        self._waves = device.waves
        self._by_rows: dict[int, tuple[KernelCost, ...]] = {}

    def at(self, rows: int) -> tuple[KernelCost, ...]:
        """By unit. Raises InvalidValueError for rows that the table does not have."""
        if rows not in self._by_rows:
            table = self.table
            if not 1 <= rows <= table.batch:
                raise InvalidValueError(f"launch of {table.model!r}", "rows", rows, f"1 to {table.batch}")
            columns = (table.duration_ns, table.need, table.compute, table.bandwidth)
            ns, need, compute, bandwidth = (column[:, rows - 1].tolist() for column in columns)
            self._by_rows[rows] = tuple(
                KernelCost.of(*each, self._waves) for each in zip(ns, need, compute, bandwidth, strict=True)
            )
        return self._by_rows[rows]


@dataclass(slots=True)
class Stream:
    """Kernels that run one after another. Kernel k is issued at `issued_ns` + (k + 1) * `issue_ns`.

    The first is ready at `ready_ns`; each other one is ready after the gap when the one before it has ended.
    """

    id: int
    kernels: Sequence[KernelCost]
    ready_ns: int
    issued_ns: int
    issue_ns: int
    rank: int = 0
    at: int = 0
    """The kernel that runs, or is the next to."""
    waiting: int = 0
    """Blocks of it that have not begun."""
    place: int = 0
    """Its place in the order in which kernels reached the device."""
    began_ns: int = -1
    running: list[tuple[int, int]] | None = None
    """Blocks of it that run: what is left for them, and how many slots they hold."""

    @property
    def arrives_ns(self) -> int:
        """When the next kernel reaches the device."""
        return max(self.ready_ns, self.issued_ns + (self.at + 1) * self.issue_ns)

    def copy(self) -> Stream:
        """One that goes on by itself."""
        running = None if self.running is None else self.running.copy()
        return Stream(
            self.id,
            self.kernels,
            self.ready_ns,
            self.issued_ns,
            self.issue_ns,
            self.rank,
            self.at,
            self.waiting,
            self.place,
            self.began_ns,
            running,
        )


class Streams:
    """All that runs on a device, as it goes on."""

    def __init__(self, device: KernelDevice, *, records: bool = False) -> None:
        self.now_ns = 0
        self.spans: list[tuple[int, int, int, int]] | None = [] if records else None
        """Of kernels that have ended, where they are recorded: stream, number, when its first block began, when the
        last ended."""
        self._device = device
        self._free = SLOTS
        self._streams: list[Stream] = []
        self._arrived = 0

    def copy(self) -> Streams:
        """One that goes on by itself, and records nothing."""
        made = Streams(self._device)
        made.now_ns, made._free, made._arrived = self.now_ns, self._free, self._arrived
        made._streams = [stream.copy() for stream in self._streams]
        return made

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Let a stream of one kernel or more go on from now."""
        self._streams.append(stream)

    def advance(self, until_ns: int | None = None) -> list[int]:
        """Go on until streams end, and say which; or until a time, or until nothing is to come, and say none.

        What begins at that time is left for later: others may be added.
        """
        while until_ns is None or self.now_ns < until_ns:
            self._arrive()
            running = self._begin()
            rates = self._rates(running)
            span = -1
            for stream, rate in zip(running, rates, strict=True):
                for left, _ in stream.running or ():
                    wait = -(-left // rate)
                    if span < 0 or wait < span:
                        span = wait
            for stream in self._streams:
                if not stream.waiting and not stream.running:
                    wait = stream.arrives_ns - self.now_ns
                    if span < 0 or wait < span:
                        span = wait
            if until_ns is not None and not 0 <= span <= until_ns - self.now_ns:
                self._go_on(running, rates, until_ns - self.now_ns)
                return []
            if span < 0:
                return []
            ended = self._go_on(running, rates, span)
            if ended:
                return ended
        return []

    def _arrive(self) -> None:
        for stream in self._streams:
            if not stream.waiting and not stream.running and stream.arrives_ns <= self.now_ns:
                stream.waiting = stream.kernels[stream.at].blocks
                stream.place = self._arrived
                stream.began_ns = -1
                self._arrived += 1

    def _begin(self) -> list[Stream]:
        """Give free slots to blocks that wait; those of a kernel that begin together end together."""
        waiting = [stream for stream in self._streams if stream.waiting]
        if waiting and self._free:
            waiting.sort(key=lambda stream: (stream.rank, stream.place))
            match self._device.admission:
                case Admission.WHOLE:
                    waiting.sort(key=lambda stream: stream.began_ns < 0)  # running blocks go on
                    for stream in waiting:
                        most = stream.kernels[stream.at].most
                        if stream.began_ns < 0 and most > self._free:
                            break
                        self._start(stream, self._free)
                case Admission.IN_ORDER:
                    for stream in waiting:
                        self._start(stream, self._free)
                        if stream.waiting:
                            break
                case Admission.SHARED:
                    while waiting and self._free:
                        rank = waiting[0].rank
                        some = [stream for stream in waiting if stream.rank == rank]
                        waiting = waiting[len(some) :]
                        some.sort(key=lambda stream: (stream.waiting, stream.place))
                        for number, stream in enumerate(some):
                            self._start(stream, max(GRAIN, -(-self._free // (len(some) - number))))
        return [stream for stream in self._streams if stream.running]

    def _start(self, stream: Stream, slots: int) -> None:
        taken = min(slots, stream.waiting, self._free)
        if taken < min(GRAIN, stream.waiting):
            return
        if stream.began_ns < 0:
            stream.began_ns = self.now_ns
        stream.waiting -= taken
        self._free -= taken
        stream.running = [*(stream.running or ()), (stream.kernels[stream.at].work, taken)]

    def _rates(self, running: Sequence[Stream]) -> list[int]:
        """How fast blocks go on, by stream: FULL is as fast as alone."""
        count = len(running)
        if count < 2:
            return [FULL] * count
        compute, bandwidth = [0.0] * count, [0.0] * count
        for number, stream in enumerate(running):
            kernel = stream.kernels[stream.at]
            held = sum([slots for _, slots in stream.running or ()]) / kernel.most
            compute[number], bandwidth[number] = kernel.compute * held, kernel.bandwidth * held
        parts, ones = [1.0] * count, [1] * count
        device = self._device
        for demand, capacity in ((compute, 1 - device.compute_loss), (bandwidth, 1 - device.bandwidth_loss)):
            if sum(demand) > capacity:
                granted = fair_shares(demand, ones, capacity)
                for number in range(count):
                    if granted[number] < demand[number]:
                        parts[number] = min(parts[number], granted[number] / demand[number])
        return [max(1, int(FULL * part)) for part in parts]

    def _go_on(self, running: Sequence[Stream], rates: Sequence[int], span_ns: int) -> list[int]:
        self.now_ns += span_ns
        ended: list[int] = []
        for stream, rate in zip(running, rates, strict=True):
            left: list[tuple[int, int]] = []
            for work, slots in stream.running or ():
                if work > rate * span_ns:
                    left.append((work - rate * span_ns, slots))
                else:
                    self._free += slots
            stream.running = left
            if left or stream.waiting:
                continue
            if self.spans is not None:
                self.spans.append((stream.id, stream.at, stream.began_ns, self.now_ns))
            stream.at += 1
            stream.ready_ns = self.now_ns + self._device.gap_ns
            if stream.at == len(stream.kernels):
                ended.append(stream.id)
        if ended:
            self._streams = [stream for stream in self._streams if stream.at < len(stream.kernels)]
        return ended


class KernelWorld:
    """See above, for the simulator: a stream for each launch. Units and rows of a tenant are those of a table.

    A launch that waited for others (`Launch.after`) pays `event_ns`; its first kernel was issued meanwhile. The first
    one behind launches that had other rows of its batch begins with the kernel that joins these. Shares are not read:
    streams of one context have all slots of the device. Launches do not expand.
    """

    def __init__(self, tables: Mapping[str, KernelTable], device: KernelDevice) -> None:
        self._device = device
        self._costs = {name: KernelCosts(table, device) for name, table in tables.items()}
        self._streams = Streams(device)
        self._ended: list[tuple[int, int]] = []
        self._parts: dict[int, dict[int, set[tuple[int, ...]]]] = {}
        """By batch and unit, the rows of the parts that end there and are not joined yet."""
        self._ahead: tuple[list[int], Streams] | None = None
        """The next event if nothing else is started: which launches end, and all that runs then."""

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World. Raises InvalidValueError for a tenant without a table, and units or rows that it does not have."""
        work, costs = launch.work, self._costs.get(launch.work.tenant)
        if costs is None:
            raise InvalidValueError("kernel world", "tenant", work.tenant, f"one of {', '.join(self._costs)}")
        kernels = costs.at(work.items)[work.start : work.end]
        if not kernels or work.end > costs.table.size:
            raise InvalidValueError(f"launch of {work.tenant!r}", "end", work.end, f"up to {costs.table.size} units")
        kernels = (*self._join(launch, costs.table), *kernels)
        while ended := self._streams.advance(now_ns):
            self._ended += [(self._streams.now_ns, each) for each in ended]
        device, begin = self._device, self._streams.now_ns
        issue_ns = device.issue_ns(len(self._streams))
        ready_ns, issued_ns = (begin + device.event_ns, begin - issue_ns) if launch.after else (begin, begin)
        self._streams.add(Stream(launch.id, kernels, ready_ns, issued_ns, issue_ns))
        self._ahead = None

    def _join(self, launch: Launch, table: KernelTable) -> tuple[KernelCost, ...]:
        """The kernel that a launch begins with where parts of its batch are to be put together."""
        work = launch.work
        parts = self._parts.setdefault(launch.batch, {})
        joins = work.rows not in parts.get(work.start, {work.rows})
        if joins:
            del parts[work.start]
        if work.rows and work.end < table.size:
            parts.setdefault(work.end, set()).add(work.rows)
        if not parts:
            del self._parts[launch.batch]
        join_ns = float(table.join_ns[work.start - 1]) if joins else 0.0
        return (KernelCost.of(join_ns, 1.0, 0.0, 1.0, self._device.waves),) if join_ns else ()

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """See World: it does not."""

    def next_ns(self) -> int | None:
        """See World."""
        if self._ended:
            return self._ended[0][0]
        if self._ahead is None:
            streams = self._streams.copy()
            self._ahead = streams.advance(), streams
        ended, streams = self._ahead
        return streams.now_ns if ended else None

    def pop(self) -> WorldEvent:
        """See World. Raises InvalidValueError when nothing is to come."""
        at = self.next_ns()
        if at is None:
            raise InvalidValueError("world", "running launches", 0, "one that ends")
        if not self._ended:
            assert self._ahead is not None
            ended, self._streams = self._ahead
            self._ended = [(at, each) for each in ended]
            self._ahead = None
        return WorldEvent(self._ended.pop(0)[1])
