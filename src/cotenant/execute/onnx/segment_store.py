"""A model's files and its optimised graph on disk: made once for each content, onnxruntime version and processor.

onnxruntime writes the graph that it would run (fused operators, blocked convolution layout), with larger weights in a
file beside it. The rest is a small skeleton that is kept in memory and can be cut at any boundary. Sessions are made
from the files in the folder only, which also has copies of the model's files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, TypeProto, numpy_helper

from cotenant.execute.contents import HeldFolder, copy, digest_of, file_digest, opened, processor
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.fitness import has_branches, is_fit
from cotenant.execute.onnx.segment_session import load_session, session_options
from cotenant.graph.datatypes import NUMPY_TYPES
from cotenant.graph.dfg import Tensor
from cotenant.graph.errors import GraphError
from cotenant.graph.onnx import bind_inputs, parse_type, read_model
from cotenant.graph.rewrite.locales import replace_locales
from cotenant.graph.rewrite.zip_maps import drop_zip_maps

FORMAT = 4
"""Version of the folder's layout; folders of other versions are made again."""
GRAPH, WEIGHTS, MANIFEST, SOURCE = "graph.onnx", "weights.bin", "manifest.json", "source"
_INLINE_BYTES = "1024"
_LEVELS = ("ENABLE_ALL", "ENABLE_EXTENDED", "ENABLE_BASIC")
_log = logging.getLogger("cotenant.execute")
PLAIN = "plain"
"""Role, and suffix of the name, of a folder with a graph that keeps tensors in the layout of ONNX."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An optimised graph on disk.

    `files` are copies of the model's files, the ONNX file first, then external weights. `skeleton` has operators and
    small constants; larger ones are references into `folder / WEIGHTS`. `types` are those of tensors between operators,
    with open dimensions of the inputs as 1. `uncut_reason` says why the graph can only run as a whole, or is "".
    `is_optimised` is False when the optimiser breaks the model: the graph is then the original one.
    """

    folder: Path
    files: tuple[Path, ...]
    skeleton: onnx.ModelProto
    types: dict[str, TypeProto]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    uncut_reason: str
    is_optimised: bool

    def constant_outputs(self) -> dict[str, Any]:
        """Outputs that are constants of the graph, as read-only arrays that own their memory."""
        wanted = {tensor.name for tensor in self.outputs if tensor.dtype in NUMPY_TYPES}
        found: dict[str, Any] = {}
        for init in self.skeleton.graph.initializer:
            if init.name in wanted:
                found[init.name] = np.array(numpy_helper.to_array(init, str(self.folder)))
                found[init.name].flags.writeable = False
        return found


def open_store(path: Path, cache_dir: Path, content: str = "", *, plain: bool = False) -> tuple[HeldFolder, Stored]:
    """Find or make the optimised graph of the ONNX file at `path` in a folder under `cache_dir`.

    `content` is "", or the folder name of an earlier call, which is opened whatever is at `path` now. A `plain` graph
    keeps tensors in the layout of ONNX. Raises ModelError when the file cannot be read or run, holds weights outside
    its directory, or its content is not `content`.
    """

    def name() -> str:
        return f"{content_of(path)}-ort{ort.__version__}-{processor()}{'-' + PLAIN if plain else ''}"

    levels = _LEVELS[1:] if plain else _LEVELS
    role = PLAIN if plain else ""
    return opened(path, cache_dir, content, name, lambda folder, name: _make(path, folder, name, levels), _read, role)


def content_of(path: Path) -> str:
    """Prefix of a model's folder names, by the content of its files. Raises ModelError when they cannot be read."""
    return digest_of([path, *external_files(path, path).values()])


def external_files(path: Path, file: Path) -> dict[str, Path]:
    """Files of external weights by location. Raises ModelError for files outside the model's directory, or too short.

    `file` is read: the model at `path` itself, or a copy.
    """
    try:
        model = read_model(file)
    except GraphError as error:
        raise ModelError(path, str(error), "Give a complete ONNX file") from error
    home = file.resolve().parent
    found: dict[str, Path] = {}
    for tensor in _tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entry = {item.key: item.value for item in tensor.external_data}
        location = Path(entry.get("location", ""))
        target = (file.parent / location).resolve()
        if not location.name or location.is_absolute() or ".." in location.parts or not target.is_relative_to(home):
            raise ModelError(
                path,
                f"weight {tensor.name!r} is kept in {str(location)!r}, outside the model's directory",
                "Put the weights beside the model and export it again with a relative location",
            )
        if target.exists() and not target.is_file():
            reason = f"its weight file {str(location)!r} is a directory, a device, a FIFO or a socket"
            raise ModelError(path, reason, "Put a regular file there")
        if not target.is_file():
            raise ModelError(path, f"its weight file {str(location)!r} is missing", "Copy it beside the model")
        try:
            needed = int(entry.get("offset", 0)) + int(entry.get("length", 0))
        except ValueError:
            raise ModelError(path, f"weight {tensor.name!r} has no readable offset", "Export it again") from None
        if target.stat().st_size < needed:
            raise ModelError(
                path,
                f"its weight file {str(location)!r} ends before weight {tensor.name!r}",
                "Copy it again, completely",
            )
        found[str(location)] = target
    return found


def _tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the file: weights, attributes, sub-graphs, functions."""

    def of_nodes(nodes: Any) -> Iterator[TensorProto]:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                for sparse in (
                    *attribute.sparse_tensors,
                    *([attribute.sparse_tensor] * attribute.HasField("sparse_tensor")),
                ):
                    yield from (sparse.values, sparse.indices)
                for graph in (*attribute.graphs, *([attribute.g] * attribute.HasField("g"))):
                    yield from of_graph(graph)

    def of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        yield from of_nodes(graph.node)

    yield from of_graph(model.graph)
    for function in model.functions:
        yield from of_nodes(function.node)


def _make(path: Path, folder: Path, name: str, levels: Sequence[str]) -> None:
    """Fill `folder` from the model at `path`; `name` begins with the digest of its content."""
    source = folder / SOURCE / path.name
    external = external_files(path, path)
    copies = {folder / SOURCE / location: target for location, target in external.items()}
    copy(path, [(path, source), *((target, place) for place, target in copies.items())], name)
    external_files(path, source)  # the file may have changed just before the copy
    model = read_model(source)
    if dropped := drop_zip_maps(model):
        _log.info("%s: ZipMap is dropped: %s are tensors with a column for each class", path, ", ".join(dropped))
    if replaced := replace_locales(model):
        _log.info("%s: upper and lower case follow C.UTF-8: not installed is %s", path, ", ".join(replaced))
    if dropped or replaced:
        onnx.save(model, str(source))
    whole, types, reason = _written(path, source, folder, levels)
    is_sound = not has_branches(model) or _is_fit(path, model, source, [whole], [] if reason else [folder / GRAPH])
    if not is_sound:
        whole, types, reason = _written(path, source, folder, ("DISABLE_ALL",))
    if reason:
        del model.graph.initializer[:]
        onnx.save(model, str(folder / GRAPH))
    files = [source, *copies]
    written = [*files, *(file for file in (folder / GRAPH, folder / WEIGHTS) if file.exists())]
    manifest = {
        "format": FORMAT,
        "source": [str(file.relative_to(folder)) for file in files],
        "inputs": _declared(whole.get_inputs(), model.graph.input),
        "outputs": _declared(whole.get_outputs(), model.graph.output),
        "types": types,
        "uncut_reason": reason,
        "is_optimised": is_sound,
        "files": {str(file.relative_to(folder)): file_digest(file) for file in written},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _declared(infos: Sequence[ort.NodeArg], values: Sequence[onnx.ValueInfoProto]) -> list[list[Any]]:
    """Name, type and shape of each value; shape None for an unknown rank, which onnxruntime also reports as []."""
    ranked = {value.name: value.type.tensor_type.HasField("shape") for value in values}
    return [[info.name, info.type, list(info.shape) if info.shape or ranked.get(info.name) else None] for info in infos]


def _is_fit(
    path: Path, model: onnx.ModelProto, source: Path, sessions: Sequence[ort.InferenceSession], files: Sequence[Path]
) -> bool:
    """Whether these sessions, and sessions of these files, run where the unoptimised model does."""
    try:
        plain, *others = (load_session(path, file, session_options(1, optimise=False)) for file in (source, *files))
    except ModelError:  # no session to compare with
        return True
    return is_fit(plain, [*sessions, *others], model)


def _written(
    path: Path, source: Path, folder: Path, levels: Sequence[str]
) -> tuple[ort.InferenceSession, dict[str, list[Any]], str]:
    """Write the graph at the first of these levels that can be read back; returns its session and types.

    If no level works, returns an ordinary session and the reason, and writes nothing.
    """
    reason = ""
    for level in levels:
        try:
            return _export(path, source, folder, level), _types(folder), ""
        except Exception as error:  # the graph cannot be written or read back: try a lower level
            reason = reason or f"its optimised graph cannot be cut: {_first_line(error)}"
            for file in (GRAPH, WEIGHTS):
                (folder / file).unlink(missing_ok=True)
    is_plain = levels[0] == "DISABLE_ALL"
    return load_session(path, source, session_options(1, optimise=not is_plain)), {}, reason


def _export(path: Path, source: Path, folder: Path, level: str) -> ort.InferenceSession:
    options = session_options(1, optimise=True)
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.optimized_model_filepath = str(folder / GRAPH)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", _INLINE_BYTES)
    options.add_session_config_entry("session.disable_prepacking", "1")
    return load_session(path, source, options)


def types_at(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, TypeProto]:
    """Types of all tensors between operators of the stored graph, with its inputs bound to `shapes`.

    Raises GraphError when `shapes` does not fit the declared inputs, ModelError when onnxruntime refuses them.
    """
    found = {name: parse_type(text, shape) for name, (text, shape) in _types(folder, shapes).items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _types(folder: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, list[Any]]:
    """Types of the tensors by onnxruntime's own inference, which knows its contrib operators.

    Also proves that the written graph can be loaded. Without `shapes`, open dimensions are 1 if the graph allows it.
    """
    model = onnx.load(str(folder / GRAPH), load_external_data=False)
    graph = model.graph
    constants = {init.name for init in graph.initializer}
    declared = {info.name for info in graph.output} | constants
    names = [name for node in graph.node for name in node.output if name and name not in declared]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    bound, _ = bind_inputs([info for info in graph.input if info.name not in constants], shapes or {})
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for info in fixed.graph.input:
        if info.name in bound:
            info.type.CopyFrom(bound[info.name])
    try:
        return _probe(fixed, folder)
    except ModelError:
        if shapes is not None:
            raise
        return _probe(model, folder)


def _probe(model: onnx.ModelProto, folder: Path) -> dict[str, list[Any]]:
    options = session_options(1, optimise=False)
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    outputs = load_session(folder / GRAPH, model.SerializeToString(), options).get_outputs()
    return {info.name: [info.type, [d if isinstance(d, int) else None for d in info.shape]] for info in outputs}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read(folder: Path) -> Stored | None:
    """The content of `folder`; None when it is missing, of another format, incomplete or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or GRAPH not in manifest["files"]:
            return None
        if any(file_digest(folder / file) != digest for file, digest in manifest["files"].items()):
            return None
        types = {name: parse_type(text, shape) for name, (text, shape) in manifest["types"].items()}
        return Stored(
            folder=folder,
            files=tuple(folder / file for file in manifest["source"]),
            skeleton=onnx.load(str(folder / GRAPH), load_external_data=False),
            types={name: kind for name, kind in types.items() if kind is not None},
            inputs=tuple(_spec(*entry) for entry in manifest["inputs"]),
            outputs=tuple(_spec(*entry) for entry in manifest["outputs"]),
            uncut_reason=manifest["uncut_reason"],
            is_optimised=manifest["is_optimised"],
        )
    except Exception:  # a damaged cache is made again
        return None


def _spec(name: str, dtype: str, shape: list[Any] | None) -> Tensor:
    if shape is None:
        return Tensor(name, dtype, None)
    return Tensor(name, dtype, tuple(d if isinstance(d, int) else None for d in shape))
