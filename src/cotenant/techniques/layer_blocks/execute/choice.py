"""The kernels that were chosen for an ONNX model, as a file in a cache. Loads no kernel."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from cotenant.files import save
from cotenant.techniques.layer_blocks.compile.problem import Problem

FOLDER, CHOICES = "compiled", "choices"
"""In a cache: the folder of the store, and in it that of the choices, one file for each compiled model."""
FORMAT = "cotenant-compiled/2"


class ChosenKernels(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of a problem by the keys of their libraries; the first is the fastest alone.

    If it was measured under pressure, version q is that for level q (levels may share one). `level_ns` then has the
    times of each version by level. Versions for several cores follow.
    """

    problem: Problem
    libraries: tuple[str, ...]
    level_ns: tuple[tuple[int, ...], ...] = ()


class KernelChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The choice for a model: kernels, units that stay with onnxruntime, and numbers of threads at which onnxruntime
    runs all.

    `most_bytes_per_s` is the measured memory bandwidth of all cores, if kernels were measured under pressure.
    """

    format: str
    units: int
    kernels: tuple[ChosenKernels, ...]
    left_out: tuple[int, ...] = ()
    by_engine: tuple[int, ...] = ()
    most_bytes_per_s: int = 0


def choice_path(cache_dir: Path, content: str) -> Path:
    """The path of the choice for a model; `content` is its digest from `content_of`."""
    return cache_dir / FOLDER / CHOICES / f"{content}.json"


def save_choice(path: Path, choice: KernelChoice) -> None:
    """Write a choice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, choice)
