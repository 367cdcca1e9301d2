"""Reads a torch.export archive (`.pt2`) without unpickling anything.

`torch.export.load` unpickles sample inputs and everything that the archive marks as pickled, evaluates sizes as Python,
and runs compiled code in it. This module reads the file itself: it checks the description (`archive_check`), reads
weights as plain bytes, and gives torch an archive that it has written. That archive has the checked description, and
weights of the right shapes without memory.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotenant.execute.contents import HeldFolder, copy, digest_of, opened
from cotenant.execute.errors import ModelError
from cotenant.execute.torch.archive_check import UnsafeArchiveError, check_fqn, clean_program

_COPY = "model.pt2"
_VERSION = "0"
_ROOT = "cotenant"
_MODEL = "models/model.json"
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_STAND_IN_BYTES = 16
_MOST_TEXT = 256 << 20
_STRIDED = 7
_COMPILED = ("data/aotinductor/", "data/executorch/", "data/mtia/")
_TYPES: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
}
"""Element types by torch's schema number; other types (complex, quantised, eight-bit floats) are refused."""
_AGAIN = "Export it again with torch.export.export and torch.export.save"


@dataclass(frozen=True, slots=True)
class Archive:
    """A program, its weights by their full names, and the names of its inputs and outputs."""

    program: torch.export.ExportedProgram
    weights: dict[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def open_copy(path: Path, cache_dir: Path, content: str = "") -> tuple[HeldFolder, Path]:
    """Find or make a copy of the archive at `path` in a folder under `cache_dir`; `content` as `wanted` of `opened`.

    Raises ModelError when the file cannot be copied, or its content is not `content`.
    """

    def name() -> str:
        try:
            return f"{digest_of([path])}-torch{torch.__version__}"
        except FileNotFoundError:
            raise ModelError(path, "the file does not exist", "Check the path") from None
        except OSError as error:
            raise _unreadable(path, error) from None

    def make(folder: Path, name: str) -> None:
        copy(path, [(path, folder / _COPY)], name)

    def read(folder: Path) -> Path | None:
        file = folder / _COPY
        return file if file.is_file() and folder.name.startswith(digest_of([file])) else None

    return opened(path, cache_dir, content, name, make, read)


def read_archive(path: Path, file: Path) -> Archive:
    """Read the archive of `path` from its copy, `file`; weights are on the CPU.

    Raises ModelError when it is no archive, is of another version or damaged, or holds pickled or compiled parts.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _read(path, archive)
    except zipfile.BadZipFile as error:
        raise ModelError(path, f"it is no complete torch.export archive ({error})", _AGAIN) from None
    except UnsafeArchiveError as error:
        raise ModelError(path, str(error), "Export a plain module in evaluation mode, without pickled parts") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(path, f"its description is not one that torch writes ({text})", _AGAIN) from error


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(path, f"it cannot be read ({error.strerror})", "Check the file and its permissions")


def _read(path: Path, file: zipfile.ZipFile) -> Archive:
    entries = _entries(path, file)
    version = _text(file, entries, "archive_version")
    if version != _VERSION:
        raise ModelError(path, f"it is of archive version {version!r}, expected {_VERSION!r}", _again())
    models = [name for name in entries if name.startswith("models/")]
    if models != [_MODEL]:
        raise ModelError(path, f"it holds the programs {models}, expected one called 'model'", _AGAIN)
    if any(name.startswith(_COMPILED) for name in entries):
        raise ModelError(path, "it holds compiled code, which is not run", "Save it with torch.export.save alone")
    if "byteorder" in entries and _text(file, entries, "byteorder") != "little":
        raise ModelError(path, "its weights are big-endian", "Export it on a little-endian machine")
    for legacy in ("data/weights/model.pt", "data/constants/model.pt"):
        if legacy in entries:
            raise ModelError(path, f"{legacy!r} in it is pickled, as older versions of torch did", _again())
    document = json.loads(_text(file, entries, _MODEL))
    _check_versions(path, document)
    clean, (inputs, outputs) = clean_program(document)
    configs = {
        name: _payloads(path, json.loads(_text(file, entries, name)) if name in entries else {"config": {}})
        for name in (_WEIGHTS, _CONSTANTS)
    }
    program = _program(path, _stripped(clean, configs))
    weights: dict[str, torch.Tensor] = {}
    for name, config in configs.items():
        weights.update(_weights(path, file, entries, name.rpartition("/")[0], config))
    for name, weight in weights.items():  # replace the weights without memory
        if name in program.state_dict:
            is_param = isinstance(program.state_dict[name], torch.nn.Parameter)
            program.state_dict[name] = torch.nn.Parameter(weight, requires_grad=False) if is_param else weight
        else:
            program.constants[name] = weight
    return Archive(program, weights, inputs, outputs)


def _entries(path: Path, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by their names below its root folder."""
    infos = file.infolist()
    roots = {info.filename.partition("/")[0] for info in infos}
    entries = {info.filename.partition("/")[2]: info for info in infos}
    if "version" in roots or "serialized_exported_program.json" in roots:
        raise ModelError(path, "it is of a format that torch dropped with version 2.8", _again())
    if len(roots) != 1 or "archive_format" not in entries or len(entries) != len(infos):
        raise ModelError(path, "it is no torch.export archive", _AGAIN)
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ModelError(path, "parts of it are compressed, which torch never does", _AGAIN)
    if _text(file, entries, "archive_format") != "pt2":
        raise ModelError(path, "it is an archive of another kind", _AGAIN)
    return entries


def _text(file: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], name: str) -> str:
    info = entries[name]
    if info.file_size > _MOST_TEXT:
        raise ValueError(f"{name} has {info.file_size} bytes")
    return file.read(info).decode()


def _check_versions(path: Path, document: Any) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    major = document["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        by = str(document.get("torch_version", "another version"))[:40]
        raise ModelError(
            path, f"torch {by} wrote it in schema {major}, this torch reads schema {SCHEMA_VERSION[0]}", _again()
        )


def _again() -> str:
    return f"Export it again with torch {torch.__version__.partition('+')[0]}, which is installed here"


def _payloads(path: Path, document: Any) -> dict[str, Any]:
    config: dict[str, Any] = document["config"]
    for name, entry in config.items():
        check_fqn(name)
        meta = entry["tensor_meta"]
        if entry["use_pickle"] is not False or meta is None:
            raise ModelError(
                path, f"its weight {name!r} is pickled, which could run any code", "Keep plain tensors as weights"
            )
        if meta["dtype"] not in _TYPES or meta["layout"] != _STRIDED:
            raise ModelError(path, f"its weight {name!r} has an unsupported type", "Keep dense, plain weights")
    return config


def _stripped(clean: Any, configs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """An archive with the checked description, in which every weight is one repeated number (strides of 0)."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:

        def write(name: str, content: str | bytes) -> None:
            file.writestr(f"{_ROOT}/{name}", content)

        write("archive_format", "pt2")
        write("archive_version", _VERSION)
        write(".data/version", "6\n")
        write("byteorder", "little")
        write(_MODEL, json.dumps(clean))
        write("data/sample_inputs/model.pt", b"")
        for name, config in configs.items():
            folder, prefix = name.rpartition("/")[0], "weight_" if name == _WEIGHTS else "tensor_"
            stands: dict[int, str] = {}
            entries = {}
            for fqn, entry in config.items():
                meta = entry["tensor_meta"]
                file_name = stands.setdefault(meta["dtype"], f"{prefix}{meta['dtype']}")
                flat = [{"as_int": 0}] * len(meta["sizes"])
                device = {"type": "cpu", "index": None}
                stand_in = {**meta, "strides": flat, "storage_offset": {"as_int": 0}, "device": device}
                stand_in["requires_grad"] = False
                is_param = entry["is_param"] is True
                entries[fqn] = {
                    "path_name": file_name, "is_param": is_param, "use_pickle": False, "tensor_meta": stand_in,
                }  # fmt: skip
            for file_name in stands.values():
                write(f"{folder}/{file_name}", bytes(_STAND_IN_BYTES))
            write(name, json.dumps({"config": entries}))
    return target.getvalue()


def _program(path: Path, content: bytes) -> torch.export.ExportedProgram:
    import logging

    noisy = logging.getLogger("torch.export")
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        return torch.export.load(io.BytesIO(content))
    except Exception as error:  # torch raises exceptions of any class
        cause = error.__context__ or error
        text = (str(cause) or type(cause).__name__).strip().splitlines()[0][:200]
        raise ModelError(path, f"torch {torch.__version__} cannot load it: {text}", _again()) from error
    finally:
        noisy.setLevel(before)


def _weights(
    path: Path, file: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], folder: str, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Weights by full name; weights in one file share memory, as they did when they were saved."""
    stores: dict[str, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for fqn, entry in config.items():
        meta, place = entry["tensor_meta"], entry["path_name"]
        sizes, strides = ([dim["as_int"] for dim in meta[key]] for key in ("sizes", "strides"))
        offset, dtype = meta["storage_offset"]["as_int"], _TYPES[meta["dtype"]]
        if place not in stores:
            info = entries.get(f"{folder}/{place}")
            if info is None:
                raise ModelError(path, f"its weight {fqn!r} is missing ({place!r})", "Copy it again, completely")
            stores[place] = _bytes(file, info)
        store = stores[place]
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        is_sound = min([offset, *sizes, *strides]) >= 0 and (0 in sizes or (last + 1) * dtype.itemsize <= len(store))
        if not is_sound:
            raise ModelError(path, f"its weight {fqn!r} exceeds its bytes in the file", "Copy it again, completely")
        if 0 in sizes or not math.prod(sizes):
            found[fqn] = torch.empty(sizes, dtype=dtype)
        else:
            whole = store[: len(store) // dtype.itemsize * dtype.itemsize].view(dtype)
            found[fqn] = whole.as_strided(sizes, strides, offset)
    return found


def _bytes(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> torch.Tensor:
    """The bytes of one member, read directly into a tensor."""
    store = torch.empty(info.file_size, dtype=torch.uint8)
    view = memoryview(np.asarray(store).data).cast("B")
    with file.open(info) as source:
        at = 0
        while at < len(view):
            count = source.readinto(view[at:])  # type: ignore[attr-defined]
            if not count:
                raise zipfile.BadZipFile(f"{info.filename} ends early")
            at += count
    return store
