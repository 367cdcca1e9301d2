"""A model of ONNX whose launches in a share run over its cores as a placement says, and all else as ever."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import onnxruntime as ort

from cotenant.errors import CotenantError
from cotenant.execute.concurrent.piece_run import PieceRun
from cotenant.execute.concurrent.pieces import PlacedPiece, pieces_of
from cotenant.execute.contents import HeldFolder
from cotenant.execute.onnx.segment_store import Stored
from cotenant.execute.onnx.segments import Segment, SegmentedModel, as_ort_value
from cotenant.execute.threads.lanes import Lane
from cotenant.execute.threads.names import Threads
from cotenant.profile.profile_file import ProfileError
from cotenant.profile.unit_placement import UnitPlacement, cores_of, device_names
from cotenant.work import Share

_log = logging.getLogger(__name__)


class PlacedModel(SegmentedModel):
    """Runs any range of units of one ONNX model; see `execute.runner.Runner`.

    Once it has a placement, a run of the whole on exactly that many named cores follows it. The calling thread sits on
    the first of them and runs the pieces of core 0 and of all cores together; each other core has a lane. Where pieces
    or lanes cannot be had, a warning says so and such runs are sequential, as all others are.
    """

    def __init__(self, path: Path, held: HeldFolder, stored: Stored, name: str, owned: Path | None = None) -> None:
        super().__init__(path, held, stored, name, owned)
        self.pieces: tuple[PlacedPiece, ...] = ()
        self._cores = 0
        self._crews: dict[tuple[int, ...], _Crew | None] = {}
        """By cores of the machine what runs there; None where that cannot be."""
        self._crew_lock = threading.Lock()

    def place(self, placement: UnitPlacement | None) -> None:
        """Follow this placement from now on, or none.

        Raises ProfileError or InvalidValueError where it is of another graph.
        """
        pieces: tuple[PlacedPiece, ...] = ()
        if placement is not None:
            if placement.graph != self.graph_path.parent.name:
                raise ProfileError(
                    f"placement of {placement.model!r}: it is of graph {placement.graph}, expected "
                    f"{self.graph_path.parent.name}; run 'cotenant plan --placement' again"
                )
            order, place = placement.places(self.dfg.unit_names, device_names(placement.cores))
            pieces = pieces_of(self.dfg, order, [cores_of(device) for device in place])
        with self._crew_lock:
            self.pieces, self._crews = pieces, {}
            self._cores = placement.cores if placement is not None else 0

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """See Runner: where the placement holds, its pieces are loaded instead of the whole."""
        wanted = list(ranges)
        whole = (0, self.unit_count)
        if whole in wanted and self._is_placed(threads):
            if len(self.pieces) == 1:
                super().prepare([whole], self._alone(threads))
                wanted.remove(whole)
            elif self._crew(threads) is not None:
                wanted.remove(whole)
        super().prepare(wanted, threads)

    def keep(self, threads: Iterable[Threads]) -> None:
        """See Runner."""
        kept = list(threads)
        with self._crew_lock:
            self._crews = {cores: crew for cores, crew in self._crews.items() if cores in kept}
        super().keep([*kept, *(self._alone(each) for each in kept if self._is_placed(each) and len(self.pieces) == 1)])

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads = 1, version: int = 0
    ) -> dict[str, Any]:
        """See Runner."""
        if start or end != self.unit_count or not self._is_placed(threads):
            return super().run(start, end, tensors, threads, version)
        if len(self.pieces) == 1:
            return super().run(start, end, tensors, self._alone(threads), version)
        crew = self._crew(threads)
        if crew is None:
            return super().run(start, end, tensors, threads, version)
        self._check_inputs(tensors)
        values = {name: as_ort_value(value) for name, value in tensors.items()}
        options = ort.RunOptions()

        def stop() -> None:
            options.terminate = True

        def execute(at: int, values: dict[str, Any]) -> None:
            if crew.segments[at].session is not None:
                self._run_segment(crew.segments[at], values, options)

        PieceRun(crew.pieces, crew.lanes, execute, [tensor.name for tensor in self.outputs], stop).run(values)
        return self._outputs(values)

    def close(self) -> None:
        """See Runner."""
        super().close()
        with self._crew_lock:
            self._crews = {}

    def _is_placed(self, threads: Threads) -> TypeGuard[tuple[int, ...]]:
        return isinstance(threads, tuple) and len(threads) == self._cores

    def _alone(self, threads: Threads) -> Threads:
        """Where the only piece runs."""
        return threads if len(self.pieces[0].cores) > 1 else 1

    def _crew(self, cores: tuple[int, ...]) -> _Crew | None:
        """What runs the pieces on these cores, made at the first call; None where that cannot be."""
        if cores in self._crews:
            return self._crews[cores]
        with self._crew_lock:
            if cores not in self._crews:
                self._crews[cores] = None if self._is_closed else self._manned(cores)
            return self._crews[cores]

    def _manned(self, cores: tuple[int, ...]) -> _Crew | None:
        try:
            keys = [tuple(cores[each] for each in piece.cores) if len(piece.cores) > 1 else 1 for piece in self.pieces]
            segments = [
                self._cut(key, piece.units, piece.inputs, piece.outputs)
                for key, piece in zip(keys, self.pieces, strict=True)
            ]
            return _Crew(self.pieces, segments, cores)
        except (CotenantError, RuntimeError) as error:  # no session, or no thread
            _log.warning("model %s: its placement is not used, it runs on %d threads: %s", self.name, len(cores), error)
            return None


class _Crew:
    """The sessions of pieces, and lanes of these cores to run them, which end when nobody uses this any more."""

    def __init__(self, pieces: Sequence[PlacedPiece], segments: Sequence[Segment], cores: tuple[int, ...]) -> None:
        self.pieces, self.segments = pieces, segments
        self.lanes: dict[int, Lane] = {}
        weakref.finalize(self, _stop, self.lanes).atexit = False
        for core in sorted({piece.cores[0] for piece in pieces} - {0}):
            self.lanes[core] = Lane(Share((cores[core],)))


def _stop(lanes: Mapping[int, Lane]) -> None:
    for lane in lanes.values():
        lane.stop()
