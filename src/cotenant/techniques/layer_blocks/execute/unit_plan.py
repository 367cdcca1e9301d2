"""The execution plan of a compiled model at given shapes: units on kernels, buffers, and the steps of each unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod

from cotenant.graph.dfg import Dfg
from cotenant.techniques.layer_blocks.compile.ckernel.moves import NUMBER_OF
from cotenant.techniques.layer_blocks.compile.packing import blocks_of
from cotenant.techniques.layer_blocks.compile.problem import NONE, Activation, Problem
from cotenant.techniques.layer_blocks.execute.nodes import HEAVY, KernelNode

_PIXEL_CHANNELS = 4
"""Images with at most this number of channels are stored channels last."""
Form = str
"""Layout of a tensor: `plain` as in ONNX, `blocked`, `pixels`, or `lined` (rows of numbers in blocks)."""


@dataclass(slots=True)
class BufferPlace:
    """A tensor in one layout in a run's memory: numbers per image, and the `offset` of the first.

    `plane` is rows, columns and border; `blocks` the number of blocks (or channels of pixels). Unit `first` writes it,
    unit `last` reads it last.
    """

    tensor: str
    form: Form
    plane: tuple[int, int, int]
    blocks: int
    image: int
    images: int
    first: int
    last: int
    offset: int = 0

    @property
    def size(self) -> int:
        """Numbers of all images."""
        return self.image * self.images


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step without addresses. `run` is the name of a move, or the problem that a kernel solves.

    Pointers are by position in the step: a buffer, the name of a plain tensor, or a node for its weights (1) or bias
    (2).
    """

    run: str | Problem
    pointers: dict[int, BufferPlace | str | KernelNode]
    numbers: dict[int, int]
    activation: Activation = NONE


@dataclass(slots=True)
class UnitPlan:
    """Steps by unit: unit u has those from `starts[u]` to `starts[u + 1]`; the last entry finishes the model.

    `ours` says of each unit whether kernels run it; the steps of others prepare inputs of onnxruntime. `makes` are the
    plain tensors that steps of a unit write, with shapes. `size` is the memory of a run, in numbers.
    """

    ours: tuple[bool, ...]
    steps: list[StepPlan] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    places: dict[tuple[str, Form], BufferPlace] = field(default_factory=dict)
    makes: list[list[tuple[str, tuple[int, ...]]]] = field(default_factory=list)
    size: int = 0

    @property
    def problems(self) -> list[Problem]:
        """The problems that need kernels, each once."""
        return list(dict.fromkeys(step.run for step in self.steps if isinstance(step.run, Problem)))


class UnitPlanner:
    """Plans one graph at one set of shapes. `units` are the nodes of each unit, None if kernels cannot run it."""

    def __init__(
        self,
        dfg: Dfg,
        units: Sequence[tuple[KernelNode, ...] | None],
        lanes: int,
        constant: Callable[[str], tuple[int, ...]],
    ) -> None:
        self._dfg, self._lanes, self._constant = dfg, lanes, constant
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of all tensors without open dimensions."""
        for name, each in dfg.tensors.items():
            dims = tuple(dim for dim in each.shape or () if isinstance(dim, int))
            if each.shape is not None and len(dims) == len(each.shape):
                self.shapes[name] = dims
        self._units = [nodes if nodes is not None and self._fits(nodes) else None for nodes in units]
        self._halos: dict[str, int] = {}
        self._rims: dict[str, int] = {}
        for nodes in self._units:
            for node in nodes or ():
                if node.kind == "conv":
                    halos = self._rims if self._is_pixels(node) else self._halos
                    halos[node.inputs[0]] = max(halos.get(node.inputs[0], 0), *node.pads)

    def problems(self) -> dict[int, list[Problem]]:
        """The problems of each unit that kernels can run, by its number."""
        return {
            unit: [self.problem(node) for node in nodes if node.kind in HEAVY]
            for unit, nodes in enumerate(self._units)
            if nodes is not None
        }

    def plan(self, has: Callable[[Problem], bool], left_out: Collection[int] = ()) -> UnitPlan:
        """The plan with kernels for all units that have them, except `left_out`."""
        needed = self.problems()
        able = [
            unit in needed and unit not in left_out and all(map(has, needed[unit])) for unit in range(len(self._units))
        ]
        return _Writer(self, self._dfg, self._with_heavy(able)).written()

    def _with_heavy(self, able: list[bool]) -> tuple[bool, ...]:
        """Without segments of units that only move data: layout changes cost more than they gain."""
        begin = 0
        for at in range(len(able) + 1):
            if at == len(able) or not able[at]:
                nodes = (node for unit in self._units[begin:at] for node in unit or ())
                if not any(node.kind in HEAVY for node in nodes):
                    able[begin:at] = [False] * (at - begin)
                begin = at + 1
        return tuple(able)

    def nodes(self, unit: int) -> tuple[KernelNode, ...]:
        """The nodes of a unit that kernels can run."""
        return self._units[unit] or ()

    def form_of(self, name: str, form: Form) -> tuple[tuple[int, int, int], int, int, int]:
        """Plane, blocks, numbers per image, and images of a tensor in a layout."""
        shape = self.shapes[name]
        if form == "lined":
            rows, depth = shape[-2], shape[-1]
            blocks = blocks_of(depth, self._lanes)
            return (1, rows, 0), blocks, blocks * rows * self._lanes, prod(shape[:-2])
        images, channels, height, width = (*shape, 1, 1)[:4] if len(shape) == 2 else shape
        if form == "pixels":
            rim = self._rims[name]
            return (height, width, rim), channels, (height + 2 * rim) * (width + 2 * rim) * channels, images
        halo = self._halos.get(name, 0)
        blocks = blocks_of(channels, self._lanes)
        return (height, width, halo), blocks, blocks * (height + 2 * halo) * (width + 2 * halo) * self._lanes, images

    def input_form(self, node: KernelNode) -> Form:
        """The layout of the first input of a convolution or product."""
        if node.kind == "product":
            return "blocked" if len(self.shapes[node.inputs[0]]) == 2 else "lined"
        return "pixels" if self._is_pixels(node) else "blocked"

    def problem(self, node: KernelNode) -> Problem:
        """The problem of a convolution or product."""
        shape = self.shapes[node.inputs[0]]
        if node.kind == "product":
            filters = self._constant(node.weights)[0 if node.turned else 1]
            rows = shape[-2] if len(shape) > 2 else 1
            return Problem(shape[-1], filters, 1, rows, activation=node.activation, rows=True)
        is_pixels = self._is_pixels(node)
        return Problem(
            shape[1],
            self.shapes[node.output][1],
            shape[2],
            shape[3],
            node.kernel,
            node.stride,
            node.pads,
            node.groups,
            node.activation,
            node.adds,
            (self._rims if is_pixels else self._halos).get(node.inputs[0], 0),
            self._halos.get(node.output, 0),
            self._halos.get(node.inputs[1], 0) if node.adds else 0,
            is_pixels,
            dilation=node.dilation,
        )

    def _is_pixels(self, node: KernelNode) -> bool:
        source = node.inputs[0]
        is_given = any(tensor.name == source for tensor in self._dfg.inputs)
        is_plain = node.groups == 1 and node.dilation == (1, 1)
        return is_given and is_plain and self.shapes[source][1] <= _PIXEL_CHANNELS

    def _fits(self, nodes: Sequence[KernelNode]) -> bool:
        """Whether all shapes are known, and concatenated channels are in whole blocks."""
        for node in nodes:
            for name in (*node.inputs, node.output):
                if 0 in self.shapes.get(name, (0,)):
                    return False
            if node.kind == "concat" and any(self.shapes[name][1] % self._lanes for name in node.inputs[:-1]):
                return False
        return True


class _Writer:
    def __init__(self, planner: UnitPlanner, dfg: Dfg, ours: tuple[bool, ...]) -> None:
        self._planner, self._dfg = planner, dfg
        self._plan = UnitPlan(ours)
        self._unit = 0
        self._plain: set[str] = {tensor.name for tensor in dfg.inputs}

    def written(self) -> UnitPlan:
        plan = self._plan
        for unit in self._dfg.units:
            self._begin(unit.index)
            if plan.ours[unit.index]:
                for node in self._planner.nodes(unit.index):
                    self._node(node)
            else:
                for name in unit.inputs:
                    self._need_plain(name)
                self._plain.update(unit.outputs)
        self._begin(len(self._dfg.units))
        for tensor in self._dfg.outputs:
            self._need_plain(tensor.name)
        plan.starts.append(len(plan.steps))
        plan.size = _placed(list({id(each): each for each in plan.places.values()}.values()))
        return plan

    def _begin(self, unit: int) -> None:
        self._unit = unit
        self._plan.starts.append(len(self._plan.steps))
        self._plan.makes.append([])

    def _put(self, tensor: str, form: Form) -> BufferPlace:
        plane, blocks, image, images = self._planner.form_of(tensor, form)
        made = BufferPlace(tensor, form, plane, blocks, image, images, self._unit, self._unit)
        self._plan.places[tensor, form] = made
        return made

    def _need(self, tensor: str, form: Form) -> BufferPlace:
        """A tensor in a layout, converted from its plain one if necessary."""
        found = self._plan.places.get((tensor, form))
        if found is not None:
            found.last = self._unit
            return found
        self._need_plain(tensor)
        made = self._put(tensor, form)
        shape = self._planner.shapes[tensor]
        height, width, rim = made.plane
        channels = shape[-1] if form == "lined" else shape[1]
        run = {"lined": "rows_in", "pixels": "pixels_in", "blocked": "blocks_in"}[form]
        numbers = {
            0: made.images,
            1: channels * height * width,
            3: made.image,
            4: channels,
            5: height,
            6: width,
            8: rim,
        }
        self._plan.steps.append(StepPlan(run, {0: tensor, 4: made}, numbers))
        return made

    def _need_plain(self, tensor: str) -> None:
        source = self._plan.places.get((tensor, "blocked"))
        if tensor in self._plain or source is None:
            return  # constants among the graph's outputs have no place
        self._to_plain(source, tensor, self._planner.shapes[source.tensor][1])

    def _to_plain(self, source: BufferPlace, tensor: str, channels: int) -> None:
        source.last = self._unit
        height, width, rim = source.plane
        numbers = {0: source.images, 1: source.image, 3: channels * height * width}
        numbers |= {4: channels, 5: height, 6: width, 7: rim}
        self._plan.steps.append(StepPlan("blocks_out", {0: source, 4: tensor}, numbers))
        self._make_plain(tensor)

    def _make_plain(self, tensor: str) -> None:
        self._plan.makes[-1].append((tensor, self._planner.shapes[tensor]))
        self._plain.add(tensor)

    def _node(self, node: KernelNode) -> None:
        if node.kind in HEAVY:
            self._heavy(node)
            return
        source = self._need(node.inputs[0], "blocked")
        height, width, rim = source.plane
        if node.kind == "flat":
            if height * width == 1 and not rim:
                self._plan.places[node.output, "blocked"] = source
            elif height * width == 1:
                self._copy(source, self._put(node.output, "blocked"))
            else:
                self._to_plain(source, node.output, self._planner.shapes[node.inputs[0]][1])
            return
        others = [self._need(name, "blocked") for name in node.inputs[1:]]
        made = self._put(node.output, "blocked")
        numbers = {0: source.images, 1: source.image, 3: made.image, 4: source.blocks, 5: height, 6: width}
        numbers |= {7: rim, 8: made.plane[2], 9: NUMBER_OF[node.activation.kind]}
        pointers: dict[int, BufferPlace | str | KernelNode] = {0: source, 4: made}
        if node.kind == "concat":
            self._concat([source, *others], made)
            return
        if node.kind == "pool":
            numbers |= {11: made.plane[0], 12: made.plane[1], 13: node.kernel[0], 14: node.kernel[1]}
            numbers |= {15: node.stride[0], 16: node.stride[1], 17: node.pads[0], 18: node.pads[1], 19: node.mode}
        elif others:
            pointers[3] = others[0]
            numbers |= {2: others[0].image, 10: others[0].plane[2]}
        self._plan.steps.append(StepPlan(node.kind, pointers, numbers, node.activation))

    def _concat(self, sources: Sequence[BufferPlace], made: BufferPlace) -> None:
        """Copies, each to the block behind the ones before; number 10 is its offset."""
        at = 0
        for source in sources:
            self._copy(source, made, at)
            at += source.blocks

    def _copy(self, source: BufferPlace, made: BufferPlace, block: int = 0) -> None:
        """A copy into a place with the same plane, from this block on."""
        height, width, rim = source.plane
        numbers = {0: source.images, 1: source.image, 3: made.image, 4: source.blocks, 5: height, 6: width, 7: rim}
        numbers |= {8: made.plane[2], 10: block * made.image // made.blocks}
        self._plan.steps.append(StepPlan("copy", {0: source, 4: made}, numbers))

    def _heavy(self, node: KernelNode) -> None:
        problem = self._planner.problem(node)
        source = self._need(node.inputs[0], self._planner.input_form(node))
        numbers = {0: source.images, 1: source.image}
        pointers: dict[int, BufferPlace | str | KernelNode] = {0: source, 1: node, 2: node}
        if node.adds:
            added = self._need(node.inputs[1], "blocked")
            pointers[3], numbers[2] = added, added.image
        if problem.rows:
            pointers[4], numbers[3] = node.output, problem.width * problem.filters
            self._make_plain(node.output)
        else:
            made = self._put(node.output, "blocked")
            pointers[4], numbers[3] = made, made.image
        self._plan.steps.append(StepPlan(problem, pointers, numbers))


def _placed(places: Sequence[BufferPlace]) -> int:
    """Assign an offset to each place. Returns the total size.

    Memory with a border is used again only for the same plane, so that the border stays zero.
    """
    kinds: dict[object, list[BufferPlace]] = {}
    for place in places:
        rimmed = (place.form == "pixels", place.blocks if place.form == "pixels" else 0, place.plane)
        kinds.setdefault(rimmed if place.plane[2] else None, []).append(place)
    base = 0
    for kind in kinds.values():
        taken: list[BufferPlace] = []
        top = 0
        step = 1 if kind[0].plane[2] else 16  # planes with a border reuse the same offsets
        for place in sorted(kind, key=lambda each: (each.first, -each.size)):
            taken = [each for each in taken if each.last >= place.first]
            at = base
            for other in sorted(taken, key=lambda each: each.offset):
                if at + place.size <= other.offset:
                    break
                at = max(at, other.offset + _whole(other.size, step))
            place.offset = at
            taken.append(place)
            top = max(top, at + place.size)
        base = max(base, _whole(top, 16))
    return base


def _whole(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step
