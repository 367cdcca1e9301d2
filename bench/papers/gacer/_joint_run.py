"""Simulation of models that start together and run by a plan on a device of kernels (`_kernel_world`).

Each member has a host that issues its kernels in order, those of chunks in turn, far ahead of the device. A barrier
lets the host go on when all has ended and the host was synchronised. The first part of a chunk stays in its member's
stream, the others run in streams of their own. A kernel that copies joins the rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from bench.papers.gacer._kernel_world import KernelCost, KernelCosts, KernelDevice, Stream, Streams
from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable


class KernelSpan(NamedTuple):
    """A kernel that ran: member, part of its rows (0 where all), unit, when it began and ended. The unit of what puts
    rows together is that behind the chunk."""

    member: int
    part: int
    unit: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class JointRun:
    """What a set took from its start, and its kernels in the order of their ends."""

    makespan_ns: int
    spans: tuple[KernelSpan, ...] = ()


@dataclass(slots=True)
class _Piece:
    """Kernels that run one after another, or none: a barrier. `issued` is how many its host issues before them since
    the last barrier, `every` how many for each of them."""

    member: int
    part: int
    start: int
    kernels: Sequence[KernelCost]
    cluster: int
    issued: int
    every: int
    ready_ns: int = 0
    missing: int = 0
    then: list[tuple[int, int]] = field(default_factory=list)
    """The segments that wait for it, and how long after its end they are ready."""


class JointWorld:
    """Models on a device, of which None is not there: an empty stream, which ends everything at once."""

    def __init__(self, tables: Sequence[KernelTable | None], device: KernelDevice) -> None:
        self._device = device
        self._costs = [None if table is None else KernelCosts(table, device) for table in tables]

    def run(self, plan: JointPlan, *, records: bool = False) -> JointRun:
        """Play a plan. Raises InvalidValueError when it is none for these tables, or its waits form a circle."""
        return self._play(self._pieces(plan), [member.rank for member in plan.members], records)

    def streams(self, rows: Sequence[int]) -> JointRun:
        """All at once, without a pointer or chunk, each with so many rows."""
        members = [
            JointMember(f"{number}", batch, 1 if costs is None else costs.table.size)
            for number, (batch, costs) in enumerate(zip(rows, self._costs, strict=True))
        ]
        return self.run(JointPlan(tuple(members)))

    def in_turn(self, rows: Sequence[int]) -> JointRun:
        """One after another in one stream, issued by one host."""
        kernels = [
            kernel
            for batch, costs in zip(rows, self._costs, strict=True)
            for kernel in (costs.at(batch) if costs is not None else ())
        ]
        return self._play([_Piece(0, 0, 0, kernels, 0, 0, 1)] if kernels else [], (0,), False)

    def _pieces(self, plan: JointPlan) -> list[_Piece]:
        if len(plan.members) != len(self._costs):
            raise InvalidValueError("joint plan", "members", len(plan.members), f"{len(self._costs)}")
        barriers = [_Piece(-1, 0, 0, (), number, 0, 0) for number in range(len(plan.barriers))]
        pieces = list(barriers)
        begins: dict[tuple[int, int], list[int]] = {}
        ends: dict[tuple[int, int], list[int]] = {}
        for member, costs in enumerate(self._costs):
            if costs is not None:
                self._check(plan, member, costs.table)
                self._member(plan, member, costs, pieces, begins, ends)
        for number, piece in enumerate(pieces):
            if piece.member < 0:
                if number:
                    _after(pieces, number, number - 1, 0)
                continue
            if piece.cluster < len(barriers):
                _after(pieces, piece.cluster, number, 0)
            if piece.cluster:
                _after(pieces, number, piece.cluster - 1, 0)
        for wait in plan.waits:
            for later in begins.get((wait.member, wait.unit), ()):
                for before in ends.get((wait.after, wait.after_unit), ()):
                    _after(pieces, later, before, self._device.event_ns)
        return pieces

    def _check(self, plan: JointPlan, member: int, table: KernelTable) -> None:
        where, units = f"joint plan of {plan.members[member].model!r}", plan.members[member].units
        if units != table.size:
            raise InvalidValueError(where, "units", units, f"{table.size}, as its table has")
        for part in plan.chunk_segments(member):
            if not table.may_split(*part):
                raise InvalidValueError(where, "chunk", part, "units that treat rows by themselves")

    def _member(
        self,
        plan: JointPlan,
        member: int,
        costs: KernelCosts,
        pieces: list[_Piece],
        begins: dict[tuple[int, int], list[int]],
        ends: dict[tuple[int, int], list[int]],
    ) -> None:
        """Add the segments of a member, one after the other, and note which begin and end at which units."""
        size, batch, device = costs.table.size, plan.members[member].batch, self._device
        chunks = {
            unit: chunk for chunk in plan.chunks if chunk.member == member for unit in range(chunk.start, chunk.end)
        }
        pointers = [barrier[member] for barrier in plan.barriers]
        cuts = {0, size, *pointers}
        cuts |= {wait.unit for wait in plan.waits if wait.member == member}
        cuts |= {wait.after_unit for wait in plan.waits if wait.after == member}
        cuts |= {edge for chunk in chunks.values() for edge in (chunk.start, chunk.end)}
        edges = sorted(cuts)
        before: list[int] = []
        cluster = issued = 0
        for start, end in pairwise(edges):
            now = sum(pointer <= start for pointer in pointers)
            if now != cluster:
                cluster, issued = now, 0
            chunk = chunks.get(start)
            parts = chunk.rows if chunk is not None else (batch,)
            mine = []
            for part, rows in enumerate(parts):
                mine.append(len(pieces))
                kernels = costs.at(rows)[start:end]
                pieces.append(_Piece(member, part, start, kernels, cluster, issued + part, len(parts)))
                if chunk is not None and start > chunk.start:
                    _after(pieces, mine[-1], before[part], device.gap_ns)
                else:
                    for number, other in enumerate(before):
                        _after(pieces, mine[-1], other, device.event_ns if part or number else device.gap_ns)
            begins[member, start] = mine
            issued += (end - start) * len(parts)
            join_ns = float(costs.table.join_ns[end - 1])
            if chunk is not None and end == chunk.end and join_ns:
                join = KernelCost.of(join_ns, 1.0, 0.0, 1.0, device.waves)
                pieces.append(_Piece(member, 0, end, (join,), cluster, issued, 1))
                for number, other in enumerate(mine):
                    _after(pieces, len(pieces) - 1, other, device.event_ns if number else device.gap_ns)
                mine = [len(pieces) - 1]
                issued += 1
            before = ends[member, end] = mine

    def _play(self, pieces: Sequence[_Piece], ranks: Sequence[int], records: bool) -> JointRun:
        device = self._device
        streams = Streams(device, records=records)
        hosts = len({piece.member for piece in pieces if piece.kernels})
        issue_ns = device.issue_ns(hosts - 1)
        opened = {0: 0}
        left = len(pieces)

        def begin(number: int) -> None:
            piece = pieces[number]
            if not piece.kernels:
                opened[piece.cluster + 1] = piece.ready_ns + device.sync_ns
                end(number, opened[piece.cluster + 1])
                return
            # kernel k of it is the (issued + k * every)-th that its host issues in this cluster
            issued_ns = opened[piece.cluster] + (piece.issued + 1 - piece.every) * issue_ns
            every_ns, rank = piece.every * issue_ns, ranks[piece.member]
            streams.add(Stream(number, piece.kernels, piece.ready_ns, issued_ns, every_ns, rank))

        def end(number: int, at_ns: int) -> None:
            nonlocal left
            left -= 1
            for later, delay_ns in pieces[number].then:
                piece = pieces[later]
                piece.ready_ns = max(piece.ready_ns, at_ns + delay_ns)
                piece.missing -= 1
                if not piece.missing:
                    begin(later)

        for number in [number for number, piece in enumerate(pieces) if not piece.missing]:
            begin(number)
        while ended := streams.advance():
            for number in ended:
                end(number, streams.now_ns)
        if left:
            raise InvalidValueError("joint plan", "waits", "a circle", "waits of which some can begin")
        spans = [
            KernelSpan(pieces[number].member, pieces[number].part, pieces[number].start + unit, start_ns, end_ns)
            for number, unit, start_ns, end_ns in streams.spans or ()
        ]
        return JointRun(streams.now_ns, tuple(spans))


def _after(pieces: Sequence[_Piece], later: int, before: int, delay_ns: int) -> None:
    pieces[before].then.append((later, delay_ns))
    pieces[later].missing += 1
