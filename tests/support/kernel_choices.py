"""Kernels for all that a model asks for, as `cotenant compile` keeps them."""

from __future__ import annotations

from pathlib import Path

from cotenant.execute.onnx.segment_store import content_of
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.execute.choice import (
    FORMAT,
    ChosenKernels,
    KernelChoice,
    choice_path,
    save_choice,
)
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import store_of
from kernels import a_compiler


def compiled(path: Path, cache: Path, shapes: dict[str, list[int]], count: int) -> KernelChoice:
    """Kernels for all units of a model, kept as its choice."""
    compiler, store = a_compiler(), store_of(cache)
    with CompiledModel.open(path, cache_dir=cache) as model:
        problems = [each for unit in model.planner(shapes, store.target.lanes).problems().values() for each in unit]
        found = {
            each: search(each, store, CKernel(compiler), SearchEffort(count, workers=2))
            for each in dict.fromkeys(problems)
        }
        kernels = tuple(ChosenKernels(each, tuple(c.library.key for c in made)) for each, made in found.items())
        choice = KernelChoice(FORMAT, model.unit_count, kernels)
    save_choice(choice_path(cache, content_of(path)), choice)
    return choice
