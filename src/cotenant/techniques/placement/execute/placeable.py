"""What models of any engine that follow placements have in common: their pieces, and lanes to run them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from cotenant.execute.protocol import Followed
from cotenant.execute.strategy import RunnerWrapper, follows_of
from cotenant.execute.threads.lanes import Lane
from cotenant.profile.profile_file import ProfileError
from cotenant.techniques.placement.execute.pieces import PlacedPiece, pieces_of
from cotenant.techniques.placement.unit_placement import UnitPlacement, cores_of, device_names
from cotenant.work import Share

T = TypeVar("T")
STRATEGY = "placement"
"""Name under which the run strategy is registered."""


class Placeable(RunnerWrapper):
    """A model that follows the placements it was told, and else runs as the inner one does."""

    placed: Followed = ()
    """Sizes of the shares for which there are placements, each with its digest."""
    _pieces: Mapping[int, tuple[PlacedPiece, ...]] = {}

    @property
    def follows(self) -> Mapping[str, Followed]:
        """What the model follows, by run strategy."""
        return {**follows_of(self.inner), **({STRATEGY: self.placed} if self.placed else {})}

    def place(self, *placements: UnitPlacement) -> None:
        """Follow these from now on, one for each size of share, and no others.

        Raises ProfileError or InvalidValueError where one is of another graph.
        """
        graph = self.graph_path.parent.name
        pieces = {}
        for each in placements:
            if each.graph != graph:
                raise ProfileError(
                    f"placement of {each.model!r}: it is of graph {each.graph}, expected {graph}; "
                    "run 'cotenant place' again"
                )
            order, place = each.places(self.dfg.unit_names, device_names(each.cores, each.sms))
            pieces[each.size] = pieces_of(self.dfg, order, [cores_of(device, each.sms) for device in place])
        self._replace(pieces, tuple((each.size, digest_of(each)) for each in placements))

    def pieces(self, size: int) -> tuple[PlacedPiece, ...]:
        """What a run of the whole in a share of this size is made of; none where no placement is for it."""
        return self._pieces.get(size, ())

    def _replace(self, pieces: Mapping[int, tuple[PlacedPiece, ...]], placed: Followed) -> None:
        self._pieces, self.placed = pieces, placed


class Crew(Generic[T]):
    """What runs each piece, and lanes of cores to run them, which end when nobody uses this any more.

    `cores` are those of the machine, by their numbers in the pieces; number 0 is the calling thread's.
    """

    def __init__(self, pieces: Sequence[PlacedPiece], segments: Sequence[T], cores: Sequence[int]) -> None:
        self.pieces, self.segments = pieces, segments
        self.lanes: dict[int, Lane] = {}
        weakref.finalize(self, _stop, self.lanes).atexit = False
        for core in sorted({piece.cores[0] for piece in pieces} - {0}):
            self.lanes[core] = Lane(Share((cores[core],)))


def _stop(lanes: Mapping[int, Lane]) -> None:
    for lane in lanes.values():
        lane.stop()


def digest_of(placement: UnitPlacement) -> str:
    """What tells a placement from another."""
    return hashlib.sha256(msgspec.json.encode(placement)).hexdigest()[:16]
