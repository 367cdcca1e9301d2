"""Random graphs of all that compiled kernels do, and the answers of compiled models on them held against onnxruntime.

A graph is a function of its seed. The reference is onnxruntime without its optimiser. Every unit that kernels can run
does so, on one candidate a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cotenant.execute.onnx.segment_session import load_session, session_options
from cotenant.execute.runner import to_numpy
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import runtime_of, store_of, version_of
from cotenant.techniques.layer_blocks.measure.kernel_judge import special_values

Values = dict[str, Any]
_OPSET, _IR = 21, 10
_TOLERANCE, _ABSOLUTE = 1e-4, 1e-6
_SQUARE = 12
"""Rows and columns of the matrix that products use turned and not turned."""
_LEAST, _MOST = 4, 9
"""Operators that a graph draws; some of them draw several."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one graph: answers that were compared, those that were wrong, and those that lost a NaN."""

    units: int
    on_kernels: int
    answers: int
    wrong: int
    nan_lost: int
    first: str = ""
    """The first answer that was wrong, in words."""


class RandomGraph:
    """A graph in the making. `shapes` are those of its tensors without the rows, which are open."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        size = int(self.rng.integers(1, 13)), int(self.rng.integers(1, 13))
        self.inputs: dict[str, tuple[int, ...]] = {"x": (int(self.rng.choice([1, 3, 4, 8, 17])), *size)}
        if self.rng.random() < 0.3:
            self.inputs["y"] = (int(self.rng.integers(1, 8)), _SQUARE)
        self.shapes = dict(self.inputs)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._square = ""
        self._unsure: set[str] = set()
        """Tensors of other shapes than ONNX infers: onnxruntime refuses most operators that read them."""
        draws = (
            *(self._convolution,) * 5,
            *(self._pool, self._mean, self._binary, self._factor, self._joined, self._activation, self._product) * 2,
            self._other,
        )
        for _ in range(int(self.rng.integers(_LEAST, _MOST))):
            draws[int(self.rng.integers(len(draws)))]()
        self._convolution()
        self._product()

    def model(self) -> onnx.ModelProto:
        """The graph; its outputs are the tensors that no operator reads, and some of the others."""
        read = {name for node in self.nodes for name in node.input}
        made = [name for node in self.nodes for name in node.output]
        outputs = [name for name in made if name not in read or self.rng.random() < 0.15]
        self.inputs = {name: dims for name, dims in self.inputs.items() if name in read}
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(k, TensorProto.FLOAT, ["n", *dims]) for k, dims in self.inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR)

    def _constant(self, value: Any, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def _normal(self, *shape: int, scale: float = 1.0) -> str:
        return self._constant(scale * self.rng.standard_normal(shape))

    def _op(self, kind: str, inputs: list[str], shape: tuple[int, ...], **given: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **given))
        self.shapes[name] = shape
        return name

    def _pick(self, rank: int, *, like: tuple[int, ...] | None = None) -> str | None:
        """A tensor of this rank (without rows), late ones more often, or one of exactly this shape."""
        sure = {name: dims for name, dims in self.shapes.items() if name not in self._unsure}
        found = [name for name, dims in sure.items() if (dims == like if like else len(dims) == rank)]
        return found[-1 - min(len(found) - 1, int(self.rng.exponential(1.5)))] if found else None

    def _maybe(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def _convolution(self) -> None:
        source = self._pick(3)
        if source is None:
            return
        rng, (channels, height, width) = self.rng, self.shapes[source]
        divisors = [each for each in range(1, channels + 1) if channels % each == 0]
        groups = int(rng.choice([1, 1, 1, channels, *divisors]))
        filters = groups * int(rng.integers(1, max(2, 40 // groups)))
        kernel, stride, dilation = ([int(each) for each in rng.integers(1, top, 2)] for top in (5, 4, 3))
        auto = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])) if self._maybe(0.2) else "NOTSET"
        pads = [int(each) for each in rng.integers(0, 3, 4)] if auto == "NOTSET" else [0] * 4
        made = []
        for at, size in enumerate((height, width)):
            padded = size + pads[at] + pads[at + 2]
            if auto.startswith("SAME"):
                dilation[at] = 1
                made.append(-(-size // stride[at]))
                continue
            if (kernel[at] - 1) * dilation[at] + 1 > padded:
                kernel[at] = dilation[at] = 1
            made.append((padded - (kernel[at] - 1) * dilation[at] - 1) // stride[at] + 1)
        deep = channels // groups
        weights = self._normal(filters, deep, *kernel, scale=(deep * kernel[0] * kernel[1]) ** -0.5)
        inputs = [source, weights, *([self._normal(filters)] if self._maybe(0.6) else [])]
        given: dict[str, Any] = {"group": groups, "strides": stride, "dilations": dilation, "kernel_shape": kernel}
        given |= {"pads": pads} if auto == "NOTSET" else {"auto_pad": auto}
        name = self._op("Conv", inputs, (filters, *made), **given)
        if self._maybe(0.25):
            shape = [(filters, 1, 1), (1, filters, 1, 1), (made[1],), ()][int(rng.integers(4))]
            name = self._op("Add", [name, self._normal(*shape)], self.shapes[name])
        other = self._pick(3, like=self.shapes[name])
        if other is not None and other != name and self._maybe(0.6):
            name = self._op("Add", [name, other], self.shapes[name])
        if self._maybe(0.5):
            self._activated(name)

    def _pool(self) -> None:
        source = self._pick(3)
        if source is None:
            return
        channels, *sizes = self.shapes[source]
        kernel = [int(each) for each in self.rng.integers(1, 4, 2)]
        stride = [int(each) for each in self.rng.integers(1, 4, 2)]
        pads = [int(self.rng.integers(0, kernel[at % 2])) for at in range(4)]
        is_ceil = self._maybe(0.5)
        made: list[int] = []
        is_unsure = False
        for at, size in enumerate(sizes):
            room = size + pads[at] + pads[at + 2] - kernel[at]
            if room < 0:
                return
            count = (-(-room // stride[at]) if is_ceil else room // stride[at]) + 1
            is_more = is_ceil and (count - 1) * stride[at] >= size + pads[at]
            is_unsure |= is_more
            made.append(count - is_more)
        given: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": pads, "ceil_mode": int(is_ceil)}
        kind = str(self.rng.choice(["MaxPool", "AveragePool"]))
        if kind == "AveragePool":
            given["count_include_pad"] = int(self.rng.integers(2))
        name = self._op(kind, [source], (channels, *made), **given)
        if is_unsure:
            self._unsure.add(name)
            if self._maybe(0.7):
                self._op("GlobalAveragePool", [name], (channels, 1, 1))

    def _mean(self) -> None:
        source = self._pick(3)
        if source is None:
            return
        shape = (self.shapes[source][0], 1, 1)
        if self._maybe(0.5):
            name = self._op("GlobalAveragePool", [source], shape)
        else:
            name = self._op("ReduceMean", [source, self._constant([2, 3], np.int64)], shape, keepdims=1)
        if self._maybe(0.6):  # a gate: by each channel
            gate = self._op("Sigmoid", [name], shape)
            pair = [source, gate] if self._maybe(0.5) else [gate, source]
            self._op("Mul", pair, self.shapes[source])

    def _binary(self) -> None:
        first = self._pick(3)
        second = None if first is None else self._pick(3, like=self.shapes[first])
        if first is not None and second is not None:
            self._op(str(self.rng.choice(["Add", "Mul"])), [first, second], self.shapes[first])

    def _factor(self) -> None:
        source = self._pick(3)
        if source is None:
            return
        channels, _, width = self.shapes[source]
        shape = [(channels, 1, 1), (1, channels, 1, 1), (width,), (1,), ()][int(self.rng.integers(5))]
        self._op(str(self.rng.choice(["Add", "Mul"])), [source, self._normal(*shape)], self.shapes[source])

    def _joined(self) -> None:
        first = self._pick(3)
        if first is None:
            return
        _, *plane = self.shapes[first]
        fits = [
            name
            for name, dims in self.shapes.items()
            if len(dims) == 3 and list(dims[1:]) == plane and name not in self._unsure
        ]
        names = [first, *(str(each) for each in self.rng.choice(fits, int(self.rng.integers(1, 3))))]
        total = sum(self.shapes[name][0] for name in names)
        if total <= 80:
            self._op("Concat", names, (total, *plane), axis=1)

    def _activation(self) -> None:
        source = self._pick(3)
        if source is not None:
            self._activated(source)

    def _activated(self, source: str) -> None:
        infinity = float("inf")
        kind, bounds, given = [
            ("Relu", [], {}),
            ("Clip", [0.0, 6.0], {}),
            ("Clip", [0.0, infinity], {}),
            ("Clip", [-infinity, 1.0], {}),
            ("LeakyRelu", [], {"alpha": 0.1}),
            ("Sigmoid", [], {}),
            ("HardSigmoid", [], {"alpha": 0.3, "beta": 0.4}),
            ("HardSwish", [], {}),
            ("Tanh", [], {}),
            ("Gelu", [], {}),
            ("QuickGelu", [], {"alpha": 1.702, "domain": "com.microsoft"}),
        ][int(self.rng.integers(11))]
        inputs = [source, *("" if each is None else self._constant(each) for each in bounds)]  # type: ignore[attr-defined]
        self._op(str(kind), inputs, self.shapes[source], **given)  # type: ignore[arg-type]

    def _product(self) -> None:
        ranks = [rank for rank in (1, 2, 3) if self._pick(rank) is not None]
        rank = int(self.rng.choice([*ranks, 1]))
        source = self._pick(rank)
        if source is None:
            image = self._pick(3)
            if image is None:
                return
            source = self._op("Flatten", [image], (int(np.prod(self.shapes[image])),))
        depth = self.shapes[source][-1]
        if self._maybe(0.4) and depth != _SQUARE:
            source = self._op("MatMul", [source, self._normal(depth, _SQUARE, scale=depth**-0.5)], ())
            self.shapes[source] = (*self._before(source), _SQUARE)
            depth = _SQUARE
        columns = _SQUARE if depth == _SQUARE and self._maybe(0.7) else int(self.rng.integers(1, 40))
        is_square = columns == depth == _SQUARE
        if is_square:
            self._square = self._square or self._normal(_SQUARE, _SQUARE, scale=_SQUARE**-0.5)
        shape = (*self.shapes[source][:-1], columns)
        if len(shape) == 1 and self._maybe(0.6):
            turned = self._maybe(0.5)
            dims = (columns, depth) if turned else (depth, columns)
            weights = self._square if is_square else self._normal(*dims, scale=depth**-0.5)
            bias = [None, (columns,), (1, columns), (1,), ()][int(self.rng.integers(5))]
            inputs = [source, weights, *([] if bias is None else [self._normal(*bias)])]
            given = {"alpha": 0.5, "beta": 2.0} if self._maybe(0.25) else {}
            name = self._op("Gemm", inputs, shape, transB=int(turned), **given)
        else:
            weights = self._square if is_square else self._normal(depth, columns, scale=depth**-0.5)
            name = self._op("MatMul", [source, weights], shape)
            if self._maybe(0.5):
                bias = [(columns,), (1, columns), ()][int(self.rng.integers(3))]
                name = self._op("Add", [name, self._normal(*bias)], shape)
        if self._maybe(0.5):
            self._activated(name)
        if is_square and self._maybe(0.5) and len(shape) == 1:
            self._op("Gemm", [name, self._square], shape, transB=int(self.rng.integers(2)))

    def _before(self, name: str) -> tuple[int, ...]:
        return self.shapes[self.nodes[-1].input[0]][:-1]

    def _other(self) -> None:
        """What kernels do not do."""
        source = self._pick(3)
        if source is not None:
            kind = str(self.rng.choice(["Softmax", "Neg", "Abs"]))
            given = {"axis": 1} if kind == "Softmax" else {}
            self._op(kind, [source], self.shapes[source], **given)


def judge(seed: int, folder: Path, compiler: Compiler) -> Verdict:
    """Compile the graph of this seed and compare its answers with onnxruntime's.

    The graph runs whole, with other rows, on two threads, and cut everywhere with kept tensors and with arrays. One row
    of two runs from the middle on. Inputs are numbers, and numbers with NaN and infinities.
    """
    graph = RandomGraph(seed)
    path, cache = folder / f"{seed}.onnx", folder / "cache"
    onnx.save(graph.model(), str(path))
    exact = load_session(path, path, session_options(1, optimise=False))
    store, backend = store_of(cache), CKernel(compiler)
    with CompiledModel.open(path, cache_dir=cache) as model:
        names = [tensor.name for tensor in model.outputs]
        shapes = {name: (1, *dims) for name, dims in graph.inputs.items()}
        asked = model.planner(shapes, store.target.lanes).problems()
        problems = dict.fromkeys(each for unit in asked.values() for each in unit)
        kernels = {each: [version_of(store, search(each, store, backend, SearchEffort(1))[0])] for each in problems}
        model.use(kernels, runtime_of(store), store.target.lanes)
        ours = model.prepared(shapes).plan.ours
        values, is_more = special_values(model, shapes)
        found: Counter[str] = Counter()
        first = ""
        for value in (0.0, *values):
            given = _inputs(graph, seed, value)
            right = dict(zip(names, exact.run(names, given), strict=True))
            for words, rows, got in _answers(model, given):
                expected = {name: array[:rows] for name, array in right.items()}
                said = _compared(got, expected, is_more=is_more)
                found[said] += 1
                if said != "right" and not first:
                    first = f"{words}, inputs with {value}: {said}"
    return Verdict(len(ours), sum(ours), found.total(), found["wrong"], found["nan_lost"], first)


def _inputs(graph: RandomGraph, seed: int, value: float) -> Values:
    """Two rows of numbers; a value that is not 0.0 stands at one place of each."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal((2, *dims)).astype(np.float32) for name, dims in graph.inputs.items()}
    if value != 0.0:
        for array in made.values():
            flat = array.reshape(2, -1)
            flat[[0, 1], rng.integers(0, flat.shape[1], 2)] = value
    return made


def _answers(model: CompiledModel, given: Values) -> Any:
    """Each way to run: words, the number of rows, and the answer."""
    end = model.unit_count
    one = {name: array[:1] for name, array in given.items()}
    yield "whole", 1, model.run(0, end, one)
    yield "two rows", 2, model.run(0, end, given)
    yield "two threads", 2, model.run(0, end, given, 2)
    for words, between in (("cut everywhere", dict), ("cut everywhere, arrays", _copied)):
        tensors: Mapping[str, Any] = given
        for unit in range(end):
            tensors = between(tensors) if unit else tensors
            tensors = model.run(unit, unit + 1, tensors)
        yield words, 2, tensors
    middle = end // 2
    if middle:
        live = _copied(model.run(0, middle, given))
        yield "one row of two", 1, model.run(middle, end, {name: array[:1] for name, array in live.items()})


def _copied(tensors: Mapping[str, Any]) -> Values:
    return {name: np.array(array) for name, array in to_numpy(tensors).items()}


def _compared(given: Mapping[str, Any], right: Values, *, is_more: bool) -> str:
    """`right`, `wrong` or `nan_lost`.

    `is_more`: NaN may be in more places than onnxruntime has it, as its MaxPool forgets it.
    """
    got, said = to_numpy(given), "right"
    for name, expected in right.items():
        array = got[name]
        if array.shape != expected.shape or array.dtype != expected.dtype:
            return "wrong"
        has, should = np.isnan(array), np.isnan(expected)
        if (should & ~has).any():
            said = "nan_lost"
        unlike = has & ~should & (not is_more)
        is_number = np.isfinite(expected) & ~has
        unlike |= ~is_number & ~has & ~should & (array != expected)
        numbers = expected[is_number]
        if numbers.size:
            largest = float(np.abs(numbers).max())
            far = np.abs(array[is_number].astype(np.float64) - numbers) > _TOLERANCE * largest + _ABSOLUTE
            if far.any():
                return "wrong"
        if unlike.any():
            return "wrong"
    return said
