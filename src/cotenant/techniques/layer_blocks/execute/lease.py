"""One run of a plan: its memory, its steps with addresses, and its tensors between two parts of the run."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from cotenant.execute.errors import TensorError
from cotenant.execute.runner import array_of
from cotenant.execute.threads.team import Team
from cotenant.techniques.layer_blocks.compile.native import KernelStep, Runtime
from cotenant.techniques.layer_blocks.compile.packing import Array, blocks_of, from_blocks, to_blocks, to_pixels
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion, pick
from cotenant.techniques.layer_blocks.execute.memory import floats
from cotenant.techniques.layer_blocks.execute.nodes import KernelNode
from cotenant.techniques.layer_blocks.execute.unit_plan import BufferPlace, UnitPlan

Kernels = Mapping[Problem, Sequence[KernelVersion]]
"""The versions of each problem; the first is the fastest alone."""
_FLOAT_BYTES = 4


class ShapeRefusedError(TensorError):
    """A tensor of a run differs in shape or type from its plan. The message names the tensor and both."""


class PreparedPlan:
    """A plan with weights and kernels, shared by its runs. `weights` are packed weights and bias by node."""

    def __init__(
        self,
        plan: UnitPlan,
        shapes: Mapping[str, tuple[int, ...]],
        kernels: Kernels,
        weights: Mapping[KernelNode, tuple[Array, Array]],
        runtime: Runtime,
        lanes: int,
    ) -> None:
        self.plan, self.shapes, self.kernels, self.weights = plan, shapes, kernels, weights
        self.runtime, self.lanes = runtime, lanes
        self.refused = ""
        """The reason why onnxruntime runs these shapes; empty if kernels run them."""
        self.versions = max((len(set(kernels[problem])) for problem in plan.problems), default=1)
        self._idle: list[Lease] = []
        self._lock = threading.Lock()

    def lease(self) -> Lease:
        """Memory that no other run uses."""
        with self._lock:
            return self._idle.pop() if self._idle else Lease(self)

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes are those of the plan; tensors without a known shape always are."""
        known = [(self.shapes[name], shape) for name, shape in shapes.items() if name in self.shapes]
        return bool(known) and all(expected == shape for expected, shape in known)

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> Fraction | None:
        """The ratio of their rows to those of the plan; None if they differ in more than rows."""
        found: set[Fraction] = set()
        for name, shape in shapes.items():
            expected = self.shapes.get(name, shape)
            if shape != expected:
                if len(shape) != len(expected) or shape[1:] != expected[1:] or not expected[0]:
                    return None
                found.add(Fraction(shape[0], expected[0]))
        return found.pop() if len(found) == 1 else None

    def give_back(self, lease: Lease) -> None:
        """Take back the memory of an ended run."""
        lease.forget()
        with self._lock:
            self._idle.append(lease)


class Lease:
    """The memory and steps of one run at a time. `plain` are tensors in ONNX layout, `position` is the next unit."""

    def __init__(self, prepared: PreparedPlan) -> None:
        self.prepared = prepared
        self.position = 0
        self.busy = threading.Lock()
        self.plain: dict[str, Any] = {}
        plan = prepared.plan
        self.memory = floats(max(1, plan.size))
        self.block = prepared.runtime.block()
        self.steps = (KernelStep * len(plan.steps))()
        self._chosen = [(0, 1)] * len(plan.steps)
        self.readers: dict[str, list[tuple[int, int]]] = {}
        base = self.memory.ctypes.data
        for at, (step, wanted) in enumerate(zip(self.steps, plan.steps, strict=True)):
            problem = wanted.run if isinstance(wanted.run, Problem) else None
            step.run = prepared.kernels[problem][0].address if problem else prepared.runtime.moves[str(wanted.run)]
            for pointer, target in wanted.pointers.items():
                if isinstance(target, BufferPlace):
                    extra = wanted.numbers.get(10, 0) if wanted.run == "copy" and pointer == 4 else 0
                    step.p[pointer] = base + _FLOAT_BYTES * (target.offset + extra)
                elif isinstance(target, KernelNode):
                    step.p[pointer] = prepared.weights[target][pointer - 1].ctypes.data
                else:
                    self.readers.setdefault(target, []).append((at, pointer))
            for number, value in wanted.numbers.items():
                step.n[number] = value
            for number, parameter in enumerate(wanted.activation.parameters):
                step.f[number] = (-math.inf, math.inf)[number] if parameter is None else parameter

    def set_plain(self, name: str, value: Any) -> None:
        """Set a tensor in ONNX layout, an array or an OrtValue; steps use it in place.

        Raises ShapeRefusedError if steps use it and its shape or type differs from the plan.
        """
        readers = self.readers.get(name)
        if readers:
            is_ort = isinstance(value, ort.OrtValue)
            value = value if is_ort else np.ascontiguousarray(value)
            self._check(name, value.shape() if is_ort else value.shape, value.data_type() if is_ort else value.dtype)
            where = value.data_ptr() if is_ort else value.ctypes.data
            for step, pointer in readers:
                self.steps[step].p[pointer] = where
        self.plain[name] = value

    def _check(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        expected = self.prepared.shapes[name]
        if tuple(shape) != expected or dtype not in ("tensor(float)", np.float32):
            raise ShapeRefusedError(
                f"tensor {name!r} has shape {tuple(shape)} and type {dtype}; "
                f"its kernels are for shape {expected} and type float32"
            )

    def forget(self) -> None:
        """Release the tensors of a run and their addresses in steps."""
        for name in self.plain:
            for step, pointer in self.readers.get(name, ()):
                self.steps[step].p[pointer] = None
        self.plain.clear()
        self.position = 0

    def run_steps(self, start: int, end: int, team: Team, version: int) -> None:
        """Run the steps of units [start, end)."""
        plan = self.prepared.plan
        for unit in range(start, end):
            for name, shape in plan.makes[unit]:
                self.set_plain(name, np.empty(shape, np.float32))
        first, last = plan.starts[start], plan.starts[end]
        if first == last:
            return
        runtime = self.prepared.runtime
        runtime.open(self.block)
        with team.at_work(partial(runtime.call, self.block)) as cores:
            chosen = version, len(cores)
            if any(each != chosen for each in self._chosen[first:last]):
                self._choose(first, last, chosen)
            runtime.run(self.block, self.steps, first, last, cores[1:])

    def _choose(self, first: int, last: int, chosen: tuple[int, int]) -> None:
        for at in range(first, last):
            problem = self.prepared.plan.steps[at].run
            if isinstance(problem, Problem):
                self.steps[at].run = pick(self.prepared.kernels[problem], *chosen).address
            self._chosen[at] = chosen

    def array(self, place: BufferPlace) -> Array:
        """The content of a place, [images, numbers of an image]."""
        return self.memory[place.offset : place.offset + place.size].reshape(place.images, place.image)

    def value(self, name: str, shape: tuple[int, ...]) -> Array:
        """A tensor in ONNX layout, from its blocks. Raises TensorError when its memory was used again."""
        place = self.prepared.plan.places[name, "blocked"]
        if place.last < self.position:
            raise TensorError(f"tensor {name!r} is gone: later units of its run have been run")
        height, width, rim = place.plane
        lanes = self.prepared.lanes
        blocks = self.array(place).reshape(place.images, place.blocks, height + 2 * rim, width + 2 * rim, lanes)
        return np.array(from_blocks(blocks, shape[1], rim)).reshape(shape)  # of one pixel it is a view of the blocks

    def take_in(self, name: str, value: Any, start: int) -> None:
        """Take a tensor that was made elsewhere before unit `start`, in all layouts that later units read.

        Raises ShapeRefusedError as `set_plain`.
        """
        plain = np.asarray(array_of(value))
        self.set_plain(name, plain if isinstance(value, Kept) else value)
        for form in ("blocked", "pixels", "lined"):
            place = self.prepared.plan.places.get((name, form))
            if place is None or place.first >= start or place.last < start:
                continue
            self._check(name, plain.shape, plain.dtype)
            height, width, rim = place.plane
            lanes, shape = self.prepared.lanes, plain.shape
            if form == "lined":
                rows, depth = shape[-2], shape[-1]
                padded = np.zeros((place.images, rows, blocks_of(depth, lanes) * lanes), np.float32)
                padded[:, :, :depth] = plain.reshape(place.images, rows, depth)
                laid = padded.reshape(place.images, rows, -1, lanes).transpose(0, 2, 1, 3)
            else:
                whole = plain.reshape(place.images, -1, height, width)
                laid = to_pixels(whole, rim) if form == "pixels" else to_blocks(whole, lanes, rim)
            self.array(place)[...] = laid.reshape(place.images, -1)


class Kept:
    """A tensor between two parts of a run, left in its memory. `numpy` returns it in ONNX layout."""

    __slots__ = ("_shape", "lease", "name", "token")

    def __init__(self, lease: Lease, token: object, name: str, shape: tuple[int, ...]) -> None:
        self.lease, self.token, self.name, self._shape = lease, token, name, shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in ONNX layout."""
        return self._shape

    def numpy(self) -> Array:
        """A copy."""
        return self.lease.value(self.name, self._shape)
