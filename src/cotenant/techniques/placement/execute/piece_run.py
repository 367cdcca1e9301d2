"""One run of pieces: a thread a core of the share, each in the order of the plan, asleep until a piece is ready."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from cotenant.execute.threads.lanes import Lane
from cotenant.techniques.placement.execute.pieces import PlacedPiece

Execute = Callable[[int, dict[str, Any]], None]
"""Runs the piece of a number: takes what it reads from the tensors by name, and puts there what it makes."""


class PieceRun:
    """Runs all pieces once. The thread that calls `run` is that of core 0; `lanes` are those of the others, by core.

    No lock is held while a piece runs. A tensor is dropped when the last piece that reads it has ended, those of `kept`
    stay. After a piece that raises none is begun any more; `stop` is told so that those under way may end early, and
    `run` raises what was raised first, when nothing is left on any lane.
    """

    def __init__(
        self,
        pieces: Sequence[PlacedPiece],
        lanes: Mapping[int, Lane],
        execute: Execute,
        kept: Collection[str] = (),
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._pieces = pieces
        self._lanes = lanes
        self._execute = execute
        self._stop = stop
        # Counts are lists to take numbers from, 0 last: taking is atomic, and who gets the 0 knows that he was last.
        self._waits = [[*range(piece.waits)] for piece in pieces]
        readers = Counter(name for piece in pieces for name in piece.inputs if name not in kept)
        self._readers = {name: [*range(count)] for name, count in readers.items()}
        self._left = [*range(len(pieces))]
        self.times: list[tuple[int, int]] = [(0, 0)] * len(pieces)
        """When each piece began and ended, by the performance counter."""
        self._tensors: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        """Taken by who fails first."""
        self._turn: SimpleQueue[int] = SimpleQueue()
        """Pieces that are ready for the calling thread; -1 when all have ended."""

    def run(self, tensors: dict[str, Any]) -> None:
        """Run the pieces on these tensors, which becomes what is kept and what no piece read."""
        self._tensors = tensors
        for at in [at for at, waits in enumerate(self._waits) if not waits]:
            self._hand_over(at)
        while True:
            try:
                at = self._turn.get()
            except BaseException as error:  # an interrupt: leave when the lanes have ended what they do
                self._fail(error)
                continue
            if at < 0:
                break
            self._follow(at)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this run, and with it sessions and tensors

    def _hand_over(self, at: int) -> None:
        core = self._pieces[at].cores[0]
        if core:
            self._lanes[core].put(partial(self._follow, at))
        else:
            self._turn.put(at)

    def _follow(self, at: int) -> None:
        """Run a piece, and those behind it on the same thread that are ready by then."""
        upcoming: int | None = at
        while upcoming is not None:
            if self._error is None:
                began = time.perf_counter_ns()
                try:
                    self._execute(upcoming, self._tensors)
                except BaseException as error:
                    self._fail(error)
                self.times[upcoming] = began, time.perf_counter_ns()
            upcoming = self._end(upcoming)

    def _fail(self, error: BaseException) -> None:
        if self._failing.acquire(blocking=False):
            self._error = error
            self._stop()

    def _end(self, at: int) -> int | None:
        """A piece has ended: others become ready, what it read may go. Gives the one of this thread, if any."""
        piece = self._pieces[at]
        core, mine = piece.cores[0], None
        for follower in piece.followers:  # first of all: they wait for it
            if not self._waits[follower].pop():
                if self._pieces[follower].cores[0] == core:
                    mine = follower
                else:
                    self._hand_over(follower)
        for name in piece.inputs:
            readers = self._readers.get(name)
            if readers is not None and not readers.pop():
                self._tensors.pop(name, None)
        if not self._left.pop():
            self._turn.put(-1)
        return mine
