"""The kernels that were chosen for a model of ONNX, as a cache keeps them. Loads no kernel."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from cotenant.files import save
from cotenant.techniques.layer_blocks.compile.problem import Problem

FOLDER, CHOICES = "compiled", "choices"
"""In a cache: the store of candidates, and in it a file for the content of each model that was compiled."""
FORMAT = "cotenant-compiled/2"


class ChosenKernels(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of a problem, by the keys of their libraries: first the fastest alone.

    Where it was measured beside others who use the memory, version q is the one for level q of the pressure (one may
    stand at several), and `level_ns` has the time of each at each level. Others follow, or stand from small blocks on.
    """

    problem: Problem
    libraries: tuple[str, ...]
    level_ns: tuple[tuple[int, ...], ...] = ()


class KernelChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a model: kernels, units left to onnxruntime, numbers of threads at which it runs it whole.

    `most_bytes_per_s` is what all cores drew from the memory, where kernels were measured beside others who do.
    """

    format: str
    units: int
    kernels: tuple[ChosenKernels, ...]
    left_out: tuple[int, ...] = ()
    by_engine: tuple[int, ...] = ()
    most_bytes_per_s: int = 0


def choice_path(cache_dir: Path, content: str) -> Path:
    """Where the choice for a model lies; `content` as `content_of` gives it."""
    return cache_dir / FOLDER / CHOICES / f"{content}.json"


def save_choice(path: Path, choice: KernelChoice) -> None:
    """Keep a choice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, choice)
