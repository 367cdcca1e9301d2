"""Row independence of units: follows the axis of the rows through the graph, operator by operator.

A unit is row-independent if its results for some rows are those rows of its results for all rows. A rule of each
operator says where each axis of each input goes in its result (`Axes`), or why rows are mixed. Shapes at two numbers of
rows show which axes grow with the rows. Pure: `onnx_rows` and `torch_rows` read the operators of their formats. Source:
GACER (2023), section 4.2, which cuts any operator along the batch without a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

from cotenant.graph.dfg import Dfg
from cotenant.graph.errors import MixedRowsError

PROBES = (5, 7)
"""Numbers of rows at which shapes are inferred. A size in proportion to both is taken as proportional to the rows."""


class Extent(NamedTuple):
    """The size of an axis: `fixed + per_row * rows`."""

    fixed: int
    per_row: int


Shapes = Mapping[str, Sequence[int]]
"""Shapes of inputs, by name."""
Extents = tuple[Extent | None, ...] | None
"""Extents of the axes of a tensor; None for an unknown size or rank."""
AxisMap = tuple[int | None, ...]
"""Axis of the result to which each axis of an input goes; None for an axis that is reduced or removed."""
ONE = Extent(1, 0)
_FIXED, _COUNT = -1, -2
"""State of a tensor: independent of the rows, or dependent on their number. Other states are the axis of the rows."""


@dataclass(frozen=True, slots=True)
class Axes:
    """An operator that keeps rows independent. `maps` are by output; the last one also holds for further outputs.

    `fills`: it may make rows, all equal, if no input has rows. `broadcasts`: positions of inputs with which one row may
    serve all rows; other inputs need a row for every row.
    """

    maps: tuple[tuple[AxisMap, ...], ...]
    fills: bool = False
    broadcasts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Mixes:
    """An operator that mixes rows, or is unknown. `why` completes a sentence."""

    why: str


class Reshapes(NamedTuple):
    """An operator that returns the numbers of its first input, in the same order, in another shape."""


class Measures(NamedTuple):
    """An operator that returns the shape of its input."""


Rule = Axes | Mixes | Reshapes | Measures


@dataclass(frozen=True, slots=True)
class RowOperator:
    """An operator with its row rule. `inputs` are by position, "" if omitted; those in `sizes` only give a shape."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: Rule
    sizes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RowGraph:
    """The operators of a graph in the order of `dfg`, with the extents of all tensors and constants.

    `counts` are small tensors with values that depend on the number of rows, `known` small tensors with other known
    values. `problem` says why no row independence can be shown, or is "".
    """

    dfg: Dfg
    steps: tuple[RowOperator, ...]
    extents: Mapping[str, Extents]
    counts: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    problem: str = ""
    _whys: dict[tuple[int, int], str] = field(default_factory=dict, compare=False)

    @property
    def splits(self) -> tuple[bool, ...]:
        """Whether each unit is row-independent, with a row for every row in its inputs and outputs."""
        return tuple(not self.why_not(unit, unit + 1) for unit in range(len(self.dfg.units)))

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """Runs of units that may run in chunks: ascending boundaries at which chunks may begin and end.

        Between two boundaries is a row-independent unit, or several units that are row-independent only together.
        """
        flags = (False, *self.splits, False)
        edges = [0, *(at for at, (before, after) in enumerate(pairwise(flags)) if before != after), len(flags) - 2]
        found: list[list[int]] = []
        for at, (start, end) in enumerate(pairwise(edges)):
            if start < end and (at % 2 or not self.why_not(start, end)):
                if not found or found[-1][-1] != start:
                    found.append([start])
                found[-1].extend(range(start + 1, end + 1) if at % 2 else [end])
        return tuple(map(tuple, found))

    def why_not(self, start: int, end: int) -> str:
        """Why units [start, end) cannot run for some of the rows, as a sentence; "" when they can.

        Inside a run, unlike at its ends, rows may be along another axis than 0.
        """
        if (start, end) not in self._whys:
            try:
                self._follow(start, end)
                self._whys[start, end] = ""
            except MixedRowsError as error:
                self._whys[start, end] = str(error)
        return self._whys[start, end]

    def check(self, start: int, end: int) -> None:
        """Raises MixedRowsError, with the reason, when units [start, end) cannot run for some of the rows."""
        if why := self.why_not(start, end):
            raise MixedRowsError(f"model {self.dfg.model!r}: units {start} to {end} cannot run in chunks: {why}")

    # --- one run ------------------------------------------------------------------------------------------------------

    def _follow(self, start: int, end: int) -> None:
        if self.problem:
            raise MixedRowsError(self.problem)
        entering, leaving = self.dfg.segment_io(start, end)
        state: dict[str, int] = {}
        for name in entering:
            state[name] = self._entering(name)
        for unit in self.dfg.units[start:end]:
            for at in unit.operators:
                step = self.steps[at]
                try:
                    self._apply(step, state)
                except MixedRowsError as error:
                    raise MixedRowsError(f"operator {step.name!r} ({step.op_type}) {error}") from None
        for name in leaving:
            if state[name] != 0 or self._extent(name, 0) != (0, 1):
                raise MixedRowsError(f"tensor {name!r}, which they make, {self._form(name, state[name])}")

    def _entering(self, name: str) -> int:
        extents = self.extents.get(name)
        if name in self.counts:
            raise MixedRowsError(f"tensor {name!r}, which they read, tells the number of rows")
        if not self._grown(name) and extents == ():
            return _FIXED
        if self._grown(name) != [0] or self._extent(name, 0) != (0, 1):
            raise MixedRowsError(f"tensor {name!r}, which they read, {self._form(name, _FIXED)}")
        return 0

    def _form(self, name: str, axis: int) -> str:
        """Why a tensor does not have one row for every row."""
        grown = self._grown(name)
        if axis == _COUNT:
            return "tells the number of rows"
        if not grown:
            return "does not have a row for every row"
        if grown == [0] and self._extent(name, 0) != (0, 1):
            return "has several rows for every row"
        return f"has its rows along axis {', '.join(map(str, grown))}, expected axis 0 alone"

    def _apply(self, step: RowOperator, state: dict[str, int]) -> None:
        """Find the row axes of an operator's outputs. Raises MixedRowsError with a clause."""
        rule = step.rule
        if isinstance(rule, Mixes):
            raise MixedRowsError(rule.why)
        given = [state.get(name, _FIXED) for name in step.inputs]
        is_counted = any(at == _COUNT for at in given) or isinstance(rule, Measures)
        for output, name in enumerate(step.outputs):
            if is_counted and (name in self.counts or name in self.known):
                state[name] = _COUNT if name in self.counts else _FIXED
                continue
            if isinstance(rule, Measures) or any(
                at == _COUNT and place not in step.sizes for place, at in enumerate(given)
            ):
                raise MixedRowsError("computes with the number of rows")
            rows = {place: at for place, at in enumerate(given) if at >= 0 and place not in step.sizes}
            state[name] = self._row_axis(step, output, rows) if rows else self._without_rows(step, name)

    def _without_rows(self, step: RowOperator, name: str) -> int:
        """The row axis of an output if no input has rows."""
        grown = self._grown(name)
        if not grown:
            return _FIXED
        extents = self.extents[name] or ()
        is_uniform = all(
            self._aligned(each, grown[0], len(extents)) == ONE
            for place, each in enumerate(step.inputs)
            if each and place not in step.sizes
        )
        if len(grown) == 1 and isinstance(step.rule, Axes) and step.rule.fills and is_uniform:
            return grown[0]
        raise MixedRowsError(f"makes {name!r}, which grows with the rows, of other things than rows")

    def _aligned(self, name: str, axis: int, rank: int) -> Extent | None:
        """The extent of a tensor at an axis of a broadcast to `rank` axes; 1 for axes that it lacks."""
        extents = self.extents.get(name)
        at = axis - rank + len(extents) if extents is not None else -1
        return None if extents is None else extents[at] if at >= 0 else ONE

    def _row_axis(self, step: RowOperator, output: int, rows: Mapping[int, int]) -> int:
        name = step.outputs[output]
        if isinstance(step.rule, Reshapes):
            axis = self._reshaped(step.inputs[0], rows.get(0, _FIXED), name)
            self._expect(name, axis, None)
            return axis
        assert isinstance(step.rule, Axes)
        maps = step.rule.maps[min(output, len(step.rule.maps) - 1)]
        found: dict[int, int] = {}
        for place, at in rows.items():
            to = maps[place][at] if place < len(maps) and at < len(maps[place]) else None
            if to is None:
                raise MixedRowsError(f"works over axis {at} of {step.inputs[place]!r}, along which the rows lie")
            found.setdefault(to, place)
        if len(found) > 1:
            raise MixedRowsError("brings rows of one input together with others of another one")
        [(axis, first)] = found.items()
        for place, each in enumerate(step.inputs[: len(maps)]):
            if each and place not in rows and place not in step.sizes and axis in maps[place]:
                extents = self.extents.get(each)
                is_one = extents is not None and extents[maps[place].index(axis)] == ONE
                if not is_one or place not in step.rule.broadcasts:
                    raise MixedRowsError(f"has {each!r}, which does not go by rows, beside rows")
        self._expect(name, axis, self._extent(step.inputs[first], rows[first]))
        for place, at in rows.items():
            if self._extent(step.inputs[place], at) != self._extent(name, axis):
                raise MixedRowsError(f"has different numbers of rows in {step.inputs[place]!r} and {name!r}")
        return axis

    def _expect(self, name: str, axis: int, extent: Extent | None) -> None:
        """Check that an output grows along this axis only, in proportion to the rows and equal to `extent` if given."""
        found = self._extent(name, axis)
        if self._grown(name) != [axis] or found is None or found.fixed or (extent is not None and found != extent):
            raise MixedRowsError(f"makes {name!r}, which does not have a row for every row along axis {axis}")

    def _reshaped(self, source: str, axis: int, name: str) -> int:
        """The row axis in another shape of the same numbers: that with the same size of axes before it."""
        before, after = self.extents.get(source), self.extents.get(name)
        if axis < 0 or before is None or after is None:
            raise MixedRowsError(f"has a shape that is not known, of {name!r}")
        ahead = [each.fixed if each is not None and not each.per_row else 0 for each in before[:axis]]
        wanted, passed = prod(ahead), 1
        for at, each in enumerate(after):
            if each is None:
                break
            if each.per_row:
                if passed != wanted or each.fixed:
                    break
                inner = [size.fixed for size in before[axis + 1 :] if size is not None]
                grain = self._extent(source, axis)
                if grain is None or (grain.per_row * prod(inner)) % each.per_row:
                    break
                return at
            passed *= each.fixed
        raise MixedRowsError("takes axes together across the rows")

    def _extent(self, name: str, axis: int) -> Extent | None:
        extents = self.extents.get(name)
        return extents[axis] if extents is not None and axis < len(extents) else None

    def _grown(self, name: str) -> list[int]:
        """Axes of a tensor that grow with the rows. Raises MixedRowsError when they are unknown."""
        extents = self.extents.get(name)
        if extents is None or None in extents:
            raise MixedRowsError(f"tensor {name!r} has a shape that is not known before it runs")
        return [at for at, each in enumerate(extents) if each is not None and each.per_row]


def extents_of(shapes: Sequence[Sequence[object] | None]) -> Extents:
    """Extents from the shapes of a tensor at the two numbers of `PROBES`; sizes that are not numbers are unknown."""
    first, second = shapes
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(_extent(a, b) for a, b in zip(first, second, strict=True))


def _extent(a: object, b: object) -> Extent | None:
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    per_row, rest = divmod(b - a, PROBES[1] - PROBES[0])
    return None if rest else Extent(a - per_row * PROBES[0], per_row)


# --- maps of many operators -------------------------------------------------------------------------------------------


def kept(rank: int, over: Sequence[int] = (), *, removed: bool = False) -> AxisMap:
    """Every axis keeps its position, except those in `over`; with `removed` these are removed from the result."""
    gone = {axis % rank for axis in over} if rank else set()
    return tuple(None if axis in gone else axis - sum(each < axis for each in gone) * removed for axis in range(rank))


def aligned(rank: int, whole: int) -> AxisMap:
    """Axes of a tensor that is broadcast to `whole` axes."""
    return tuple(range(whole - rank, whole))


def batch_first(rank: int) -> AxisMap:
    """Rows are along axis 0; all other axes are reduced."""
    return (0, *[None] * (rank - 1)) if rank else ()


def nowhere(rank: int) -> AxisMap:
    """An input without rows."""
    return (None,) * rank


def spread(*maps: AxisMap) -> Axes:
    """An operator that broadcasts all of its inputs."""
    return Axes((maps,), broadcasts=frozenset(range(len(maps))))


def matrix_product(left: int, right: int, turned: tuple[bool, bool] = (False, False)) -> tuple[AxisMap, AxisMap]:
    """Axis maps of two factors of these ranks; `turned`: the last two axes of a factor are exchanged before."""
    batch = max(left, right, 2) - 2

    def side(rank: int, matrix: tuple[int | None, int | None], is_turned: bool) -> AxisMap:
        if rank < 2:
            return (None,) * rank
        return (*range(batch - rank + 2, batch), *(reversed(matrix) if is_turned else matrix))

    return side(left, (batch, None), turned[0]), side(right, (None, batch + (left > 1)), turned[1])
