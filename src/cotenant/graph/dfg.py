"""The data-flow graph (DFG) of a model as plain data: tensors, operators, units, and boundaries between units.

Standard library only, so that the core, the policies and the planner may import it. `graph.onnx` reads it from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Dim = int | str | None
"""One dimension: its size, the name of a dynamic dimension, or None for a dynamic dimension without a name."""

CHEAP_CUT_REACH = 3
"""Reach in units: a cheap cut has the fewest live tensors of all boundaries within it.

A residual block or an attention head group spans at least three units; in a plain chain all boundaries are cheap.
"""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that flows between operators.

    `dtype` is onnxruntime's type string, for example `tensor(float)`, or "" when unknown. `shape` is None when even the
    rank is unknown. `size_bytes` is 0 when the shape or the element size is unknown.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the graph.

    `inputs` and `outputs` are tensor names without constants and omitted optional ones. Values that a control-flow
    operator (If, Loop, Scan) captures from its scope count as inputs. `constants` are the names of its weights. `macs`
    and bytes are those of one run at the costed shapes. `is_costed` is False when shapes were missing or the operator
    has a sub-graph, so that some costs are 0.
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    macs: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    weight_bytes: int = 0
    is_costed: bool = True


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest schedulable part of a model: a contiguous run of operators, one operator or a fused chain.

    `inputs` and `outputs` cross the unit's boundaries. `read_bytes` and `write_bytes` count only these: tensors inside
    a chain are expected to stay in the cache.
    """

    index: int
    operators: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    macs: int
    read_bytes: int
    write_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The position before unit `index`; the last one is the end of the graph.

    `live` are the tensors that must exist there, in the order of their creation. They are graph inputs and results of
    earlier units that later units or the graph's outputs need.
    """

    index: int
    live: tuple[str, ...]
    live_bytes: int
    is_cheap: bool


@dataclass(frozen=True, slots=True)
class Dfg:
    """A model's operators in execution order, and its units.

    Every boundary 0..len(units) is a valid cut. `assumed` names the dynamic dimensions that were taken as 1 to count
    MACs and bytes. `tensors` has graph inputs and every operator's outputs.
    """

    model: str
    operators: tuple[Operator, ...]
    units: tuple[Unit, ...]
    boundaries: tuple[Boundary, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tensors: Mapping[str, Tensor]
    assumed: tuple[str, ...] = ()

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one run."""
        return sum(unit.macs for unit in self.units)

    @property
    def weight_bytes(self) -> int:
        """Bytes of constants, each counted once per unit that reads it."""
        return sum(unit.weight_bytes for unit in self.units)

    @property
    def cheap_cuts(self) -> tuple[int, ...]:
        """Boundaries inside the graph with few live tensors; see `CHEAP_CUT_REACH`."""
        return tuple(b.index for b in self.boundaries[1:-1] if b.is_cheap)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """A name for each unit: its number, and its operator with most MACs (the last of equals): "12:Conv_34"."""
        names = []
        for unit in self.units:
            members = [self.operators[index] for index in reversed(unit.operators)]
            main = max(members, key=lambda op: op.macs, default=None)
            names.append(f"{unit.index}:{main.name or main.op_type if main else ''}")
        return tuple(names)

    def live(self, boundary: int) -> tuple[str, ...]:
        """Names of the tensors live before unit `boundary`; at `len(units)`, the computed graph outputs."""
        return self.boundaries[boundary].live

    def crossing(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Edges between units: by tensor, the unit that makes it and the other units that read it."""
        producer = {name: unit.index for unit in self.units for name in unit.outputs}
        readers: dict[str, list[int]] = {}
        for unit in self.units:
            for name in unit.inputs:
                if name in producer:
                    readers.setdefault(name, []).append(unit.index)
        return {name: (producer[name], tuple(each)) for name, each in readers.items()}

    def segment_io(self, start: int, end: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensors that units [start, end) read from outside, and tensors that they make and that are live at `end`."""
        made = {name for unit in self.units[start:end] for name in unit.outputs}
        used = {name for unit in self.units[start:end] for name in unit.inputs}
        inputs = tuple(name for name in self.boundaries[start].live if name in used)
        return inputs, tuple(name for name in self.boundaries[end].live if name in made)


def build_dfg(
    model: str,
    operators: Sequence[Operator],
    groups: Sequence[Sequence[int]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    assumed: Sequence[str] = (),
) -> Dfg:
    """Build the DFG from operators and their grouping into units.

    `groups` lists, by unit, the positions of its operators in execution order; they are renumbered so that units are
    contiguous. A graph without operators gets one empty unit, so that a model always has a unit to run.
    """
    order = [position for group in groups for position in group]
    renumbered = {position: index for index, position in enumerate(order)}
    ordered = tuple(_at(operators[position], renumbered[position]) for position in order)
    last_use = {name: op.index for op in ordered for name in op.inputs}
    kept = {tensor.name for tensor in outputs}
    units: list[Unit] = []
    for group in groups or [()]:
        members = tuple(renumbered[position] for position in group)
        units.append(_unit(len(units), [ordered[m] for m in members], last_use, kept, tensors))
    return Dfg(
        model=model,
        operators=ordered,
        units=tuple(units),
        boundaries=_boundaries(units, [tensor.name for tensor in inputs], kept, tensors),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tensors=dict(tensors),
        assumed=tuple(assumed),
    )


def _at(op: Operator, index: int) -> Operator:
    return Operator(
        index,
        op.name,
        op.op_type,
        op.domain,
        op.inputs,
        op.outputs,
        op.constants,
        op.macs,
        op.read_bytes,
        op.write_bytes,
        op.weight_bytes,
        op.is_costed,
    )


def _size(names: Iterable[str], tensors: Mapping[str, Tensor]) -> int:
    return sum(tensors[name].size_bytes for name in names if name in tensors)


def _unit(
    index: int,
    members: Sequence[Operator],
    last_use: Mapping[str, int],
    kept: set[str],
    tensors: Mapping[str, Tensor],
) -> Unit:
    made = dict.fromkeys(name for op in members for name in op.outputs)
    last = members[-1].index if members else -1
    inputs = tuple(dict.fromkeys(name for op in members for name in op.inputs if name not in made))
    outputs = tuple(name for name in made if name in kept or last_use.get(name, -1) > last)
    return Unit(
        index=index,
        operators=tuple(op.index for op in members),
        inputs=inputs,
        outputs=outputs,
        macs=sum(op.macs for op in members),
        read_bytes=_size(inputs, tensors),
        write_bytes=_size(outputs, tensors),
        weight_bytes=sum(op.weight_bytes for op in members),
    )


def _boundaries(
    units: Sequence[Unit], inputs: Sequence[str], kept: set[str], tensors: Mapping[str, Tensor]
) -> tuple[Boundary, ...]:
    last_reader = {name: unit.index for unit in units for name in unit.inputs}
    end = len(units)
    live = [name for name in dict.fromkeys(inputs) if name in last_reader or name in kept]
    lists = [tuple(live)]
    for unit in units:
        live = [n for n in live if n in kept or last_reader[n] > unit.index]
        live.extend(unit.outputs)
        lists.append(tuple(live))
    counts = [len(names) for names in lists]
    return tuple(
        Boundary(i, names, _size(names, tensors), 0 < i < end and counts[i] == min(_around(counts, i)))
        for i, names in enumerate(lists)
    )


def _around(counts: Sequence[int], position: int) -> Sequence[int]:
    """Counts near `position`, without the two ends of the graph, which are not cuts."""
    first = max(1, position - CHEAP_CUT_REACH)
    return counts[first : min(len(counts) - 1, position + CHEAP_CUT_REACH + 1)]
