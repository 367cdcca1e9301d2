"""Joint plans of models that start together: synchronisation pointers and chunks, as plan files hold them.

Source: GACER (2023), section 4. A *barrier* is one of its synchronisation pointers. A *chunk* is an operator that is
cut along the batch. Waits between two models are not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from cotenant.errors import InvalidValueError

_Name = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Number = Annotated[int, Meta(ge=0)]


class JointMember(Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a set, with the rows of its batch and its number of units. `graph` is the digest of the graph that has
    these units; it is empty for a plan that belongs to no repository. A member of lower `rank` goes first where two
    could start."""

    model: _Name
    batch: _Count
    units: _Count
    rank: _Number = 0
    graph: str = ""


class Wait(Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Unit `unit` of a member starts after member `after` has ended all units before `after_unit`."""

    member: _Number
    unit: _Number
    after: _Number
    after_unit: _Count


class Chunk(Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Units [start, end) of a member, run concurrently in chunks of its batch. `rows` is the number of rows of each
    chunk; behind `end` the rows are joined."""

    member: _Number
    start: _Number
    end: _Count
    rows: Annotated[tuple[_Count, ...], Meta(min_length=2)]


class JointPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A joint schedule of models that start together. Each member is a stream of its units, in order. On top of that:

    - `barriers`: barrier i holds one unit number per member. Each member ends the units before its number, then all
      continue. The numbers of a member never decrease; equal ones, 0 and `units` give empty segments.
    - `waits` between two members.
    - `chunks`: those of a member do not overlap. All chunks start when the unit before has ended; the unit behind
      starts when all chunks have ended. A barrier or a wait inside holds for each of them.

    An absent member is an empty stream: it ends everything at once.

    Raises InvalidValueError when a number is out of its range.
    """

    members: Annotated[tuple[JointMember, ...], Meta(min_length=1)] = field(name="member")
    barriers: tuple[tuple[_Number, ...], ...] = ()
    waits: tuple[Wait, ...] = field(name="wait", default=())
    chunks: tuple[Chunk, ...] = field(name="chunk", default=())

    def __post_init__(self) -> None:
        where = "joint plan of " + ", ".join(f"{each.model}:{each.batch}" for each in self.members)
        ends = [member.units for member in self.members]
        before = [0] * len(ends)
        for barrier in self.barriers:
            fits = len(barrier) == len(ends) and all(
                low <= at <= end for low, at, end in zip(before, barrier, ends, strict=True)
            )
            if not fits:
                raise InvalidValueError(where, "barrier", barrier, f"a unit of each, from {before} to {ends}")
            before = list(barrier)
        for wait in self.waits:
            if not (
                wait.member != wait.after
                and max(wait.member, wait.after) < len(ends)
                and wait.unit < ends[wait.member]
                and wait.after_unit <= ends[wait.after]
            ):
                raise InvalidValueError(where, "wait", wait, "units of two different members")
        free = [0] * len(ends)
        for chunk in sorted(self.chunks):
            if not (
                chunk.member < len(ends)
                and free[chunk.member] <= chunk.start < chunk.end <= ends[chunk.member]
                and sum(chunk.rows) == self.members[chunk.member].batch
            ):
                raise InvalidValueError(
                    where, "chunk", chunk, "units of one member that no other chunk has, and all its rows"
                )
            free[chunk.member] = chunk.end

    @property
    def is_streams(self) -> bool:
        """Whether all members start at once, each as one stream, and no member has precedence."""
        ranks = {member.rank for member in self.members}
        return not (self.barriers or self.waits or self.chunks) and len(ranks) == 1

    def cuts_of(self, model: str, cuts: Sequence[int]) -> tuple[int, ...]:
        """The cuts of a model, from 0 to its units, with those at which this plan stops it. They stay as they are for a
        model that is no member, or has another number of units there."""
        found = dict.fromkeys(cuts)
        for number, member in enumerate(self.members):
            if (member.model, member.units) == (model, cuts[-1]):
                found |= dict.fromkeys(self._stops_of(number))
                for chunk in self.chunks:
                    if chunk.member == number:
                        found |= dict.fromkeys((chunk.start, chunk.end))
        return tuple(sorted(found))

    def chunk_segments(self, member: int) -> Iterator[tuple[int, int]]:
        """Segments [start, end) of units that a member runs in chunks, split where barriers and waits stop it."""
        stops = sorted(self._stops_of(member)) if self.chunks else ()
        for chunk in self.chunks:
            if chunk.member == member:
                inner = (stop for stop in stops if chunk.start < stop < chunk.end)
                yield from pairwise((chunk.start, *inner, chunk.end))

    def _stops_of(self, member: int) -> set[int]:
        """Units at which barriers and waits stop a member."""
        stops = {barrier[member] for barrier in self.barriers}
        stops.update(wait.unit for wait in self.waits if wait.member == member)
        stops.update(wait.after_unit for wait in self.waits if wait.after == member)
        return stops


def cuts_of_all(plans: Iterable[JointPlan], model: str, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The cuts of a model, with those of several plans."""
    for plan in plans:
        cuts = plan.cuts_of(model, cuts)
    return cuts


class StoredJointPlan(JointPlan, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A joint plan of tenants as plan files hold it, for `lanes` lanes of `lane_cores` cores each. `makespan_ns` and
    `streams_ns` are with the plan, and with all members at once. Both are measured on the device if `is_measured`, else
    predicted. `sequential_ns` is one member after another on all cores. `bound_ns` is a lower bound on the predicted
    makespan of all plans. `profile` is the fingerprint of the tables that the plan was made from."""

    lanes: Annotated[int, Meta(ge=1)]
    lane_cores: _Count = 1
    makespan_ns: _Number
    streams_ns: _Number
    sequential_ns: _Number
    bound_ns: _Number
    is_measured: bool = False
    profile: str = ""

    @property
    def plan(self) -> JointPlan:
        """The plan without the figures."""
        return JointPlan(self.members, self.barriers, self.waits, self.chunks)

    def at_units(self, cuts: Sequence[Sequence[int]]) -> StoredJointPlan:
        """The same plan for models with finer units: unit i of a member starts at its i-th cut."""
        members = tuple(replace(member, units=places[-1]) for member, places in zip(self.members, cuts, strict=True))
        return replace(
            self,
            members=members,
            barriers=tuple(tuple(cuts[m][at] for m, at in enumerate(barrier)) for barrier in self.barriers),
            waits=tuple(
                Wait(w.member, cuts[w.member][w.unit], w.after, cuts[w.after][w.after_unit]) for w in self.waits
            ),
            chunks=tuple(Chunk(c.member, cuts[c.member][c.start], cuts[c.member][c.end], c.rows) for c in self.chunks),
        )

    @property
    def key(self) -> tuple[tuple[tuple[str, int], ...], int, int]:
        """The identity of the plan: tenants with their batches, number of lanes, cores of each."""
        return tuple(sorted((each.model, each.batch) for each in self.members)), self.lanes, self.lane_cores
