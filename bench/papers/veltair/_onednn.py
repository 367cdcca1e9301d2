"""A convolution on oneDNN, through its C interface: a yardstick, where the package onednn-cpu-gomp is installed.

Tensors lie as oneDNN chooses; changes of layout are not timed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.trial import Trial

PACKAGE = "onednn-cpu-gomp"
# As `oneapi/dnnl/dnnl_types.h` of version 3 has them.
_CPU, _F32, _ANY, _IN_ORDER, _INFERENCE, _DIRECT = 1, 3, 1, 1, 96, 1
_SOURCE, _TARGET, _WEIGHTS, _BIAS, _FROM, _TO = 1, 17, 33, 41, 1, 17
_QUERIES = {_SOURCE: 129, _WEIGHTS: 131, _TARGET: 133}
_ACTIVATIONS = {"relu": 32, "clip": 47}
_ALLOCATE = c_void_p(-1)


class _Dims(ctypes.Array[c_int64]):
    _length_ = 12
    _type_ = c_int64


class _Argument(ctypes.Structure):
    _fields_ = (("what", c_int), ("memory", c_void_p))


def library() -> ctypes.CDLL | None:
    """oneDNN, or None where the package is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libdnnl.so.3" or (file.name.startswith("libdnnl.so.3.") and file.name.count(".") > 2):
            return ctypes.CDLL(os.fspath(file.locate()))
    return None


class OneDnn:
    """Convolutions with the operators fused to them, on as many threads as OMP_NUM_THREADS says."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self._engine, self._stream = c_void_p(), c_void_p()
        self._call("engine_create", byref(self._engine), c_int(_CPU), ctypes.c_size_t(0))
        self._call("stream_create", byref(self._stream), self._engine, c_int(_IN_ORDER))

    def _call(self, name: str, *given: Any) -> None:
        status = getattr(self._lib, f"dnnl_{name}")(*given)
        if status:
            raise RuntimeError(f"oneDNN: dnnl_{name} says {status}")

    def _described(self, shape: Sequence[int], *, is_open: bool) -> c_void_p:
        made = c_void_p()
        if is_open:
            self._call("memory_desc_create_with_tag", byref(made), len(shape), _Dims(*shape), _F32, _ANY)
            return made
        steps = [int(np.prod(shape[at + 1 :])) for at in range(len(shape))]
        self._call("memory_desc_create_with_strides", byref(made), len(shape), _Dims(*shape), _F32, _Dims(*steps))
        return made

    def _memory(self, described: c_void_p, values: Any = None) -> c_void_p:
        made = c_void_p()
        handle = _ALLOCATE if values is None else c_void_p(values.ctypes.data)
        self._call("memory_create", byref(made), described, self._engine, handle)
        return made

    def _execute(self, primitive: c_void_p, arguments: dict[int, c_void_p]) -> None:
        given = (_Argument * len(arguments))(*(_Argument(what, each) for what, each in arguments.items()))
        self._call("primitive_execute", primitive, self._stream, len(arguments), given)
        self._call("stream_wait", self._stream)

    def _moved(self, source: c_void_p, first: c_void_p, target: c_void_p, second: c_void_p) -> None:
        described, primitive = c_void_p(), c_void_p()
        create = "reorder_primitive_desc_create"
        self._call(create, byref(described), first, self._engine, second, self._engine, None)
        self._call("primitive_create", byref(primitive), described)
        self._execute(primitive, {_FROM: source, _TO: target})

    def convolution(self, problem: Problem, trial: Trial) -> tuple[Any, Any]:
        """A call of a problem on a trial's tensors, and what gives its output [filters, rows, columns]."""
        p = problem
        weights = trial.weights
        if p.groups > 1:
            weights = weights.reshape(p.groups, p.filters // p.groups, *weights.shape[1:])
        out = np.zeros((1, p.filters, p.out_height, p.out_width), np.float32)
        if p.adds:
            out[...] = trial.plain_added
        plain = {_SOURCE: trial.values, _WEIGHTS: np.ascontiguousarray(weights), _TARGET: out}
        closed = {what: self._described(each.shape, is_open=False) for what, each in plain.items()}
        opened = {what: self._described(each.shape, is_open=True) for what, each in plain.items()}
        bias = self._described((p.filters,), is_open=False)
        described, primitive = c_void_p(), c_void_p()
        top, left, bottom, right = p.pads
        between = _Dims(*(each - 1 for each in p.dilation))
        pads = (_Dims(top, left), _Dims(bottom, right))
        descriptions = (opened[_SOURCE], opened[_WEIGHTS], bias, opened[_TARGET])
        self._call(
            "convolution_forward_primitive_desc_create",
            *(byref(described), self._engine, _INFERENCE, _DIRECT, *descriptions),
            *(_Dims(*p.stride), between, *pads, self._fused(p)),
        )
        self._call("primitive_create", byref(primitive), described)
        query = self._lib.dnnl_primitive_desc_query_md
        query.restype, query.argtypes = c_void_p, (c_void_p, c_int, c_int)
        chosen = {what: c_void_p(query(described, number, 0)) for what, number in _QUERIES.items()}
        laid = {what: self._memory(each) for what, each in chosen.items()}
        given = {what: self._memory(closed[what], each) for what, each in plain.items()}
        for what in plain:
            self._moved(given[what], closed[what], laid[what], chosen[what])
        arguments = {**laid, _BIAS: self._memory(bias, trial.bias)}

        def result() -> Any:
            self._moved(laid[_TARGET], chosen[_TARGET], given[_TARGET], closed[_TARGET])
            return plain[_TARGET][0]

        return (lambda: self._execute(primitive, arguments)), result

    def _fused(self, problem: Problem) -> c_void_p:
        """The sum with what the output holds, then the activation."""
        attributes, steps = c_void_p(), c_void_p()
        self._call("primitive_attr_create", byref(attributes))
        self._call("post_ops_create", byref(steps))
        if problem.adds:
            self._call("post_ops_append_sum", steps, c_float(1.0), c_int32(0), c_int(0))
        kind = problem.activation.kind
        if kind:
            low, high = (*problem.activation.parameters, 0.0, 0.0)[:2]
            self._call("post_ops_append_eltwise", steps, c_int(_ACTIVATIONS[kind]), c_float(low), c_float(high))
        self._call("primitive_attr_set_post_ops", attributes, steps)
        return attributes
