"""A model of ONNX whose launches in a share run over its cores as a placement says, and all else as ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import onnxruntime as ort
from typing_extensions import override

from cotenant.errors import CotenantError
from cotenant.execute.onnx.segment_session import LoadedSegment, as_ort_value
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.techniques.placement.execute.piece_run import PieceRun
from cotenant.techniques.placement.execute.pieces import PlacedPiece
from cotenant.techniques.placement.execute.placeable import Crew, Placeable
from cotenant.work import TaskTime

_log = logging.getLogger(__name__)


class PlacedModel(Placeable):
    """Runs any range of units of one ONNX model; see `execute.runner.Runner`.

    Once it has placements, a run of the whole on as many named cores as one of them is for follows that one. The
    calling thread sits on the first core, and runs the pieces of core 0 and those of several cores from it on; each
    other core has a lane. Where pieces or lanes cannot be had, a warning says so, and such runs are sequential as all
    others are.
    """

    inner: SegmentedModel

    def __init__(self, inner: SegmentedModel) -> None:
        super().__init__(inner)
        self._is_closed = False
        self._crews: dict[tuple[int, ...], Crew[LoadedSegment] | None] = {}
        """By cores of the machine what runs there; None where that cannot be."""
        self._crew_lock = threading.Lock()
        self._told = threading.local()

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """See Runner: where a placement holds, its pieces are loaded instead of the whole."""
        whole = (0, self.unit_count)
        for each in ranges:
            if each != whole or self._crew(threads) is None:
                super().prepare([each], self._sequential(threads) if each == whole else threads)

    @override
    def keep(self, threads: Iterable[Threads]) -> None:
        kept = list(threads)
        with self._crew_lock:
            self._crews = {cores: crew for cores, crew in self._crews.items() if cores in kept}
        super().keep([*kept, *map(self._sequential, kept)])

    @override
    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        inner = self.inner
        if start or end != self.unit_count or not isinstance(threads, tuple):
            return inner.run(start, end, tensors, threads, version)
        crew = self._crew(threads)
        if crew is None:
            return inner.run(start, end, tensors, self._sequential(threads), version)
        inner.check_inputs(tensors)
        values = {name: as_ort_value(value) for name, value in tensors.items()}
        options = ort.RunOptions()

        def stop() -> None:
            options.terminate = True

        def execute(at: int, values: dict[str, Any]) -> None:
            if crew.segments[at].session is not None:
                inner.run_segment(crew.segments[at], values, options)

        began = time.perf_counter_ns()
        run = PieceRun(crew.pieces, crew.lanes, execute, [tensor.name for tensor in self.outputs], stop)
        run.run(values)
        self._told.pieces = tuple(
            TaskTime(tuple(piece.cores), len(piece.units), start - began, end - began)
            for piece, (start, end) in zip(crew.pieces, run.times, strict=True)
        )
        return inner.outputs_of(values)

    def take_task_times(self) -> tuple[TaskTime, ...]:
        """What the last run on this thread ran by a placement, once."""
        pieces: tuple[TaskTime, ...] = self._told.__dict__.pop("pieces", ())
        return pieces

    @override
    def close(self) -> None:
        self._is_closed = True
        super().close()
        with self._crew_lock:
            self._crews = {}

    def _replace(self, pieces: Mapping[int, tuple[PlacedPiece, ...]], placed: tuple[tuple[int, str], ...]) -> None:
        with self._crew_lock:
            super()._replace(pieces, placed)
            self._crews = {}

    def _sequential(self, threads: Threads) -> Threads:
        """Where the whole runs in one session: a single piece may be on one core."""
        pieces = () if isinstance(threads, int) else self.pieces(len(threads))
        return 1 if len(pieces) == 1 and len(pieces[0].cores) == 1 else threads

    def _crew(self, threads: Threads) -> Crew[LoadedSegment] | None:
        """What runs the pieces on these cores, made at the first call; None where they are not several, or fail."""
        if isinstance(threads, int) or len(self.pieces(len(threads))) < 2:
            return None
        crews = self._crews  # `keep` may put another one there
        if threads in crews:
            return crews[threads]
        with self._crew_lock:
            if threads not in self._crews:
                self._crews[threads] = None if self._is_closed else self._manned(threads)
            return self._crews[threads]

    def _manned(self, cores: tuple[int, ...]) -> Crew[LoadedSegment] | None:
        pieces = self.pieces(len(cores))
        try:
            keys = [tuple(cores[each] for each in piece.cores) if len(piece.cores) > 1 else 1 for piece in pieces]
            weights = [sum(self.dfg.units[unit].macs for unit in piece.units) for piece in pieces]
            segments = [
                self.inner.load_units(key, each.units, (each.inputs, each.outputs), is_most=2 * weight > sum(weights))
                for key, each, weight in zip(keys, pieces, weights, strict=True)
            ]
            return Crew(pieces, segments, cores)
        except (CotenantError, RuntimeError) as error:  # no session, or no thread
            _log.warning("model %s: its placement is not used, it runs on %d threads: %s", self.name, len(cores), error)
            return None
