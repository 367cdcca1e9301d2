"""A model as a file: a `torch.export` archive, or ONNX translated from the same exported program."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.zoo import Model, examples
from cotenant.zoo.errors import ZooError

OPSET = 18
"""The oldest that torch's exporter writes without converting back; onnxruntime runs it since 1.14."""

BATCH = "batch"
_MOST = 1024  # rows; an upper bound keeps the exporter from asking for more constraints
_TRACED = 2  # rows: torch takes a dimension of 0 or 1 for a constant


class _Named(nn.Module):
    """A module with a dict of outputs by name: that is how an archive knows the names of its outputs."""

    def __init__(self, module: nn.Module, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.outputs = outputs

    def forward(self, *given: Any, **named: Any) -> dict[str, torch.Tensor]:
        found: Any = self.module(*given, **named)
        if isinstance(found, dict):
            return {name: found[name] for name in self.outputs}
        return dict(zip(self.outputs, found if isinstance(found, tuple) else (found,), strict=True))


def exported(model: Model) -> torch.export.ExportedProgram:
    """Trace the model: inputs by name as keywords, outputs as a dict by name, the batch open where `model.batched`.

    Raises:
        ZooError: the module cannot be exported.
    """

    def forward(self: _Named, *given: Any, **named: Any) -> dict[str, torch.Tensor]:
        return _Named.forward(self, *given, **named)

    # The exporter takes the names of the inputs from the signature, which the wrapper borrows from the module.
    forward.__signature__ = inspect.signature(type(model.module).forward)  # type: ignore[attr-defined]
    named = type("Named", (_Named,), {"forward": forward})(model.module, model.outputs).eval()
    dynamic = None
    if model.batched:
        batch = torch.export.Dim(BATCH, min=1, max=_MOST)
        dynamic = {name: {0: batch} for name in model.inputs}
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                named, (), examples(model, _TRACED if model.batched else 1), dynamic_shapes=dynamic
            )
    except Exception as error:  # the exporter raises whatever it met on its way
        raise ZooError(f"model {model.name!r}: cannot be exported: {error}") from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # the paths of this machine: a file is the same wherever it is made
    return program


def save_pt2(model: Model, path: Path, program: torch.export.ExportedProgram | None = None) -> None:
    """Write `path` as a `torch.export` archive without sample inputs, so that nothing in it is pickled.

    `program`: what `exported` returned for the model, where that is at hand; likewise below.

    Raises:
        ZooError: the module cannot be exported.
    """
    program = program or exported(model)
    program.example_inputs = None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # the archive's entries begin with its file's name
        part = Path(folder) / path.name
        torch.export.save(program, part)
        part.replace(path)


def save_onnx(model: Model, path: Path, program: torch.export.ExportedProgram | None = None) -> None:
    """Write `path` as one ONNX file of opset 18 with the names of the model; an open batch is called `batch`.

    Raises:
        ZooError: the module cannot be exported, or onnxscript, which translates it, is not installed.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ZooError("writing ONNX needs onnxscript, which is missing; run: pip install 'cotenant[torch]'") from None
    import onnx

    program = program or exported(model)
    try:
        with _quiet():
            translated = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(model.inputs),
                output_names=list(model.outputs),
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # as above
        raise ZooError(f"model {model.name!r}: cannot be translated to ONNX: {error}") from error
    assert translated is not None
    proto = translated.model_proto
    _tidy(proto)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    onnx.save(proto, os.fspath(part))
    onnx.checker.check_model(os.fspath(part))
    part.replace(path)


def _tidy(proto: Any) -> None:
    """Give the open dimension its name, and drop notes on Python's call stacks: half of a small file's size."""
    graph = proto.graph
    opened = {
        dim.dim_param: BATCH
        for value in graph.input
        for dim in value.type.tensor_type.shape.dim[:1]
        if dim.HasField("dim_param")
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        del value.metadata_props[:]
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = opened.get(dim.dim_param, dim.dim_param)
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    del graph.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that it could have used and on torch's own deprecations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
