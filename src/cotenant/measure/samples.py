"""Sample values of a model's inputs, from `[samples]` of its `config.toml`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from cotenant.config import SampleSection
from cotenant.errors import ConfigError
from cotenant.files import UNREADABLE, read_bytes
from cotenant.graph.datatypes import numpy_type
from cotenant.graph.dfg import Tensor

_KINDS = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "U": "texts"}
_MOST_WORDS = 8
"""Words of a made-up text."""


class Samples:
    """Values of the inputs that `[samples]` names. All other inputs have made-up values.

    `words`: texts that the model knows, for made-up texts (`graph.onnx.vocabulary`).
    """

    def __init__(
        self, sections: Mapping[str, SampleSection], values: Mapping[str, Any], digest: str, words: Sequence[str] = ()
    ) -> None:
        self._sections = sections
        self._values = values
        self._words = np.array(words, np.object_)
        self.digest = digest
        """Digest of the section and its files; "" without a section."""

    @classmethod
    def read(
        cls,
        model: str,
        inputs: Sequence[Tensor],
        sections: Mapping[str, SampleSection],
        folder: Path,
        words: Sequence[str] = (),
    ) -> Samples:
        """The samples of a model with its `config.toml` in `folder`.

        Raises ConfigError with all problems: an unknown input, an unreadable file, values not of the input's type.
        """
        known = {tensor.name: numpy_type(tensor.dtype) for tensor in inputs}
        values: dict[str, Any] = {}
        digest = hashlib.sha256(msgspec.json.encode(sections, order="sorted"))
        faults: list[str] = []
        for name, section in sections.items():
            where = f"model {model!r}: [samples.{name}]"
            try:
                if name not in known:
                    raise ConfigError(f"{where} names no input of the model, expected one of {', '.join(known)}")
                dtype = known[name]
                if dtype is None:
                    raise ConfigError(f"{where}: values of that type cannot be given, expected numbers or texts")
                if section.file is not None:
                    values[name] = _typed(_read(folder, section.file, where), dtype, f"{where}.file")
                    digest.update(read_bytes(folder / section.file, ConfigError))
                elif section.values is not None:
                    values[name] = _typed(np.array(section.values, np.object_), dtype, f"{where}.values")
                else:
                    _check_range(section, dtype, where)
            except ConfigError as error:
                faults += error.problems
        if faults:
            raise ConfigError(*faults)
        return cls(sections, values, digest.hexdigest() if sections else "", words)

    def __contains__(self, name: str) -> bool:
        """Whether this input has sample values."""
        return name in self._sections

    def draw(self, name: str, dtype: np.dtype[Any], dims: Sequence[int], rng: np.random.Generator) -> Any:
        """An array of this shape for an input; None for an input without samples."""
        if name in self._values:
            return np.resize(self._values[name], tuple(dims))
        section = self._sections.get(name)
        if section is None:
            return None
        if section.integers is not None:
            low, high = section.integers
            return rng.integers(low, high, dims, np.int64, endpoint=True).astype(dtype)
        return rng.uniform(*section.uniform or (0.0, 1.0), dims).astype(dtype)

    def texts(self, dims: Sequence[int], rng: np.random.Generator) -> Any:
        """Texts of 1 to `_MOST_WORDS` words that the model knows, half of them of one; None if it knows none."""
        if not self._words.size:
            return None
        made = np.empty(dims, np.object_)
        for at in np.ndindex(*dims):
            count = max(1, int(rng.integers(2 - _MOST_WORDS, _MOST_WORDS, endpoint=True)))
            made[at] = " ".join(rng.choice(self._words, count))
        return made


NO_SAMPLES = Samples(MappingProxyType({}), MappingProxyType({}), "")
"""All values are made up."""


def _read(folder: Path, file: str, where: str) -> Any:
    """The array in a file, which must be in the model's directory."""
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{where}.file: {file!r} is outside the model's directory, expected a file in it")
    if path.suffix not in (".npy", ".json"):
        raise ConfigError(f"{where}.file: {file!r} has an unknown suffix, expected .npy or .json")
    try:
        content = read_bytes(path, ConfigError)
        if path.suffix == ".npy":
            found = np.load(BytesIO(content), allow_pickle=False)
        else:
            found = np.array(json.loads(content), np.object_)
    except (ConfigError, EOFError, *UNREADABLE) as error:
        raise ConfigError(f"{where}.file: {file!r} cannot be read ({error}), expected a {path.suffix} file") from None
    if found.size == 0:
        raise ConfigError(f"{where}.file: {file!r} holds no values, expected at least one")
    return found


def _typed(values: Any, dtype: np.dtype[Any], where: str) -> Any:
    """The values in the type of the input. Raises ConfigError for a value that does not fit."""
    flat = values.ravel().tolist()
    expected = _KINDS.get(_kind(dtype), "numbers")
    for item in flat:
        if not _fits(item, dtype):
            raise ConfigError(f"{where} has {item!r}, expected {expected}{_range_of(dtype)}")
    return np.array(flat, np.object_ if dtype.kind == "U" else dtype).reshape(values.shape)


def _fits(item: object, dtype: np.dtype[Any]) -> bool:
    kind = _kind(dtype)
    if kind == "U":
        return isinstance(item, str)
    if kind == "b":
        return isinstance(item, bool) or item in (0, 1)
    if isinstance(item, bool) or not isinstance(item, int | float):
        return False
    if kind == "f":
        return True
    if isinstance(item, float) and not item.is_integer():
        return False
    return bool(np.iinfo(dtype).min <= item <= np.iinfo(dtype).max)


def _check_range(section: SampleSection, dtype: np.dtype[Any], where: str) -> None:
    kind = _kind(dtype)
    if section.integers is not None:
        if kind == "U" or not all(math.isfinite(end) and _fits(end, dtype) for end in section.integers):
            raise ConfigError(
                f"{where}.integers is {list(section.integers)}, expected {_KINDS.get(kind, 'numbers')}"
                f"{_range_of(dtype)}"
            )
    elif kind != "f":
        raise ConfigError(f"{where}.uniform is for inputs of real numbers; the input takes {_KINDS.get(kind, dtype)}")


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if dtype.name == "bfloat16" else dtype.kind


def _range_of(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "iu":
        return ""
    return f" from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
