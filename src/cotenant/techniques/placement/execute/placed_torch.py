"""A torch model whose launches in a share of a GPU run over its stream and cores beside it, as a placement says.

Not yet run on hardware: docs/placement.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from cotenant.errors import CotenantError
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.chains import WARM_RUNS
from cotenant.execute.gpu.completions import sleep_precisely
from cotenant.execute.gpu.streams import Event, Named, Replay, StreamLane, wait_for
from cotenant.execute.torch.arrays import array_of
from cotenant.execute.torch.model import TorchModel, first_line
from cotenant.execute.torch.segment import Segment
from cotenant.execute.torch.threads import use_threads
from cotenant.techniques.placement.execute.piece_run import PieceRun
from cotenant.techniques.placement.execute.pieces import PlacedPiece
from cotenant.techniques.placement.execute.placeable import Crew, Placeable
from cotenant.work import Share, TaskTime

LOOK_S = 1e-5
"""Between two looks of a core at an event of the stream that it waits for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchPiece:
    """Units as a function where they are placed; `why_eager` says why they are not captured.

    Of what it makes the other side reads `crossing`.
    """

    segment: Segment
    weights: tuple[torch.Tensor, ...]
    crossing: tuple[str, ...]
    why_eager: str

    def run(self, given: Sequence[torch.Tensor]) -> Named:
        """Compute on the calling thread, or submit to its stream."""
        return dict(zip(self.segment.outputs, self.segment.function(*given, *self.weights), strict=True))


class PlacedTorch(Placeable):
    """Runs any range of units, see `TorchModel`; an executor of streams follows its placements."""

    inner: TorchModel

    def __init__(self, inner: TorchModel) -> None:
        super().__init__(inner)
        self.device, self.arithmetic = inner.device, inner.arithmetic
        self.check, self.check_values, self.why_eager = inner.check, inner.check_values, inner.why_eager

    def cut(self, pieces: Sequence[PlacedPiece]) -> list[TorchPiece]:
        """The pieces of a placement; those of cores have their weights in the host's memory, too.

        Raises ModelError where one needs a size that it cannot have, or the model is closed.
        """
        sides = [
            {name for piece in pieces if bool(piece.cores[0]) == on_core for name in piece.inputs}
            for on_core in (False, True)
        ]
        held: dict[str, torch.Tensor] = {}
        return [self._piece(piece, sides[not piece.cores[0]], held) for piece in pieces]

    def unit_ns(self, inputs: Mapping[str, Any], lane: StreamLane | None = None) -> tuple[int, ...]:
        """See `TorchModel.unit_ns`."""
        return self.inner.unit_ns(inputs, lane)

    def _piece(self, piece: PlacedPiece, others: set[str], held: dict[str, torch.Tensor]) -> TorchPiece:
        on_core = bool(piece.cores[0])
        segment, weights = self.inner.load_units(piece.units, (piece.inputs, piece.outputs), on_host=on_core)
        if on_core:
            held.update({name: weight.cpu() for name, weight in weights.items() if name not in held})
            weights = held
        why = next(filter(None, (self.why_eager(unit, unit + 1) for unit in piece.units)), "")
        crossing = tuple(name for name in segment.outputs if name in others)
        return TorchPiece(segment, tuple(weights[name] for name in segment.weights), crossing, why)


@dataclass(slots=True, eq=False)
class _Spot:
    """A tensor of one run: on the host, on the device, or on both. `event` is behind its copy to the host."""

    here: torch.Tensor | None = None
    there: torch.Tensor | None = None
    event: Event | None = None


class CapturedPieces:
    """Pieces of a stream captured for batches of `rows` rows, over tensors that stay. 0: not a batch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tensors: dict[str, torch.Tensor] = {}
        self.replays: dict[int, Replay] = {}

    def has(self, start: int, end: int) -> bool:
        """The whole alone is placed, and nobody asks for anything else."""
        return True


class PlacedStream:
    """One model in a share of a GPU and on cores beside it: made once, it serves one launch at a time."""

    def __init__(self, model: PlacedTorch, streams: StreamLane, crew: Crew[TorchPiece]) -> None:
        self.model = model
        self.streams = streams
        self.crew = crew
        for lane in crew.lanes.values():
            lane.put(sleep_precisely)

    def launch(self, rows: int, captured: CapturedPieces | None = None) -> PlacedLaunch:
        """A launch of so many rows, or of those that were captured."""
        return PlacedLaunch(self, captured or CapturedPieces(rows))

    def warm(self, inputs: Named, rows: int, captured: CapturedPieces | None = None) -> PlacedLaunch:
        """Run it twice on the thread of its lane, and give the last launch. Raises what the model does."""
        for _ in range(WARM_RUNS):
            launch = self.launch(rows, captured)
            launch.given = {}
            launch.fill(0, inputs)
            launch.replay(0, self.model.unit_count)
        return launch

    def capture(self, inputs: Named, rows: int) -> CapturedPieces:
        """Capture each piece of the stream, unless that cannot be, for inputs of these shapes, and run all twice.

        Only on the thread of the lane. Raises what `StreamLane.capture` raises, and what the model does.
        """
        given = self.warm(inputs, rows).given or {}
        made = CapturedPieces(rows)
        for at, piece in enumerate(self.crew.segments):
            if at not in given or piece.why_eager:
                continue

            def work(piece: TorchPiece = piece, like: Sequence[torch.Tensor] = given[at]) -> Named:
                for name, tensor in zip(piece.segment.inputs, like, strict=True):
                    if name not in made.tensors:  # of the lane's memory, too
                        made.tensors[name] = torch.empty_like(tensor)
                return piece.run([made.tensors[name] for name in piece.segment.inputs])

            made.replays[at], outputs = self.streams.capture(work)
            made.tensors.update(outputs)
        made.tensors = dict(self.streams.unowned(made.tensors))
        self.warm(inputs, rows, made)
        return made


class PlacedLaunch:
    """One launch by a placement, with the surface of a `SegmentChain`; it holds its tensors until it has landed.

    The thread of the lane submits the pieces of the stream, in order, and waits for nothing but pieces of cores. A
    tensor that the other side reads is copied once, on a stream for that direction: what a piece of the device makes as
    soon as it is made, what it reads when it is there. Cores look at the event of the copy; the stream waits for it.
    """

    def __init__(self, home: PlacedStream, captured: CapturedPieces) -> None:
        self.rows = captured.rows
        self.given: dict[int, tuple[torch.Tensor, ...]] | None = None
        """What pieces of the stream have read, by their number, where somebody wants to know."""
        self._home, self._streams, self._crew, self._captured = home, home.streams, home.crew, captured
        self._tensors: dict[str, _Spot] = {}
        self._held: list[torch.Tensor] = []
        """What was copied up: its memory is of the stream of copies, which does not know when it was read."""
        self._began_ns = 0
        self._began: Event | None = None
        self._marks: dict[int, tuple[Event, Event]] = {}
        self._times: list[tuple[int, int]] = []

    def fill(self, start: int, values: Named) -> None:
        """Take the inputs, which lie on the host, with rows of zeros where there are too few. Raises TensorError."""
        self._home.model.check(values)
        for name, value in values.items():
            missing = self.rows - len(value) if self.rows else 0
            if missing:
                zeros = value.new_zeros((missing, *value.shape[1:]))
                value = self._streams.gather([array_of(value), array_of(zeros)])
            self._tensors[name] = _Spot(here=value)

    def replay(self, start: int, end: int) -> Named:
        """Run everything of the host, and submit everything of the device. Gives the outputs, wherever they lie.

        Raises what a piece raised first, when no core has anything of it left.
        """
        streams, model = self._streams, self._home.model
        self._began, self._began_ns = streams.record(True), perf_counter_ns()
        with streams.crossing(up=True):
            streams.follow(self._began)  # who ran before may still read where copies go
        names = [tensor.name for tensor in model.outputs]
        run = PieceRun(self._crew.pieces, self._crew.lanes, self._execute, [*names, *self._tensors])
        try:
            run.run(self._tensors)
        finally:
            for up in (True, False):
                with streams.crossing(up):
                    event = streams.record()
                streams.follow(event)
        self._times = run.times  # and not the run, which holds this
        spots = {name: self._tensors[name] for name in names}
        self._tensors = {}
        return {name: spot.there if spot.there is not None else self._on_host(spot) for name, spot in spots.items()}

    def times(self) -> tuple[TaskTime, ...]:
        """When each piece ran, by the clock of the device or the host: once all has ended."""
        times = [(start - self._began_ns, end - self._began_ns) for start, end in self._times]
        for at, marks in self._marks.items():
            times[at] = (marks[0].ns_since(self._began), marks[1].ns_since(self._began))
        return tuple(
            TaskTime(tuple(piece.cores), len(piece.units), *each)
            for piece, each in zip(self._crew.pieces, times, strict=True)
        )

    def _execute(self, at: int, tensors: dict[str, _Spot]) -> None:
        piece = self._crew.segments[at]
        try:
            if self._crew.pieces[at].cores[0]:
                self._on_core(piece, tensors)
            else:
                self._on_stream(at, piece, tensors)
        except CotenantError:
            raise
        except Exception as error:
            units = self._crew.pieces[at].units
            reason = f"units {units[0]} to {units[-1]} failed: {first_line(error)}"
            raise ModelError(self._home.model.path, reason, "Check the shapes and values of its inputs") from error

    def _on_core(self, piece: TorchPiece, tensors: dict[str, _Spot]) -> None:
        given = [self._on_host(tensors[name]) for name in piece.segment.inputs]
        use_threads(1)
        with torch.inference_mode():
            made = piece.run(given)
            for name, value in made.items():  # into memory that the device can copy from while the host goes on
                is_read = name in piece.crossing
                tensors[name] = _Spot(here=self._streams.gather([array_of(value)]) if is_read else value)

    def _on_stream(self, at: int, piece: TorchPiece, tensors: dict[str, _Spot]) -> None:
        streams, known = self._streams, self._captured.tensors
        names = piece.segment.inputs
        given = tuple(self._on_device(name, tensors[name]) for name in names)
        if self.given is not None:
            self.given[at] = given
        before = streams.record(True)
        replay = self._captured.replays.get(at)
        if replay is not None and all(
            known[name].shape == value.shape for name, value in zip(names, given, strict=True)
        ):
            for name, value in zip(names, given, strict=True):
                if value is not known[name]:
                    known[name].copy_(value, non_blocking=True)
            replay()
            made: Named = {name: known[name] for name in piece.segment.outputs}
        else:
            made = piece.run(given)
        after = streams.record(True)
        self._marks[at] = before, after
        spots = {name: _Spot(there=value) for name, value in made.items()}
        if piece.crossing:
            with streams.crossing(up=False):
                streams.follow(after)
                for name in piece.crossing:
                    spots[name].here = streams.download(made[name])
                event = streams.record()
            for name in piece.crossing:
                spots[name].event = event
        tensors.update(spots)

    def _on_host(self, spot: _Spot) -> torch.Tensor:
        if spot.event is not None:
            wait_for(spot.event, LOOK_S)
        assert spot.here is not None
        return spot.here

    def _on_device(self, name: str, spot: _Spot) -> torch.Tensor:
        if spot.there is None:
            assert spot.here is not None
            into = self._captured.tensors.get(name)
            with self._streams.crossing(up=True):
                spot.there = self._streams.upload(
                    spot.here, into if into is not None and into.shape == spot.here.shape else None
                )
                event = self._streams.record()
            self._streams.follow(event)
            self._held.append(spot.there)
        return spot.there


def placed_stream(model: object, share: Share, streams: StreamLane, cores: Sequence[int]) -> PlacedStream | None:
    """What runs a model in a share by its placement; None where it has none that is worth it, or a warning says why."""
    pieces = model.pieces(share.size) if isinstance(model, PlacedTorch) else ()
    if not isinstance(model, PlacedTorch) or len(pieces) < 2:
        return None
    most = max(piece.cores[-1] for piece in pieces)
    try:
        if most > len(cores):
            raise ModelError(model.path, f"there are {len(cores)} cores beside it, it needs {most}", "Place it again")
        return PlacedStream(model, streams, Crew(pieces, model.cut(pieces), (-1, *cores)))
    except (CotenantError, RuntimeError) as error:  # no piece, no memory, or no thread
        _log.warning("model %s: its placement is not used, it runs on %s alone: %s", model.name, share.device, error)
        return None


def copy_times(streams: StreamLane, size_bytes: int, runs: int) -> tuple[list[int], list[int]]:
    """What copies of so much take to the host and back, in ns, as launches make them: with the waits for their ends."""
    here = streams.gather([np.zeros(size_bytes, np.uint8)])
    there = streams.upload(here)
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(runs):
        for up, times in enumerate(taken):
            made = streams.record()
            wait_for(made)
            began = perf_counter_ns()
            with streams.crossing(bool(up)):
                streams.follow(made)
                copy = streams.upload(here, there) if up else streams.download(there)
                event = streams.record()
            wait_for(event, LOOK_S)
            times.append(perf_counter_ns() - began)
            del copy
    return taken
