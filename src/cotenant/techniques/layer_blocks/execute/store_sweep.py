"""Garbage collection of a repository's kernel store: choices, candidates, libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from cotenant.files import load
from cotenant.linux import mapped_by_others
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.store import LIBRARIES, KernelCandidate, Store
from cotenant.techniques.layer_blocks.execute.choice import CHOICES, FORMAT, KernelChoice


def sweep(store: Store, backend: CKernel, problems: Collection[Problem], contents: Collection[str]) -> list[str]:
    """Remove all that no model needs. Returns the keys of the removed libraries.

    `problems` and `contents` are those of the present models. These stay:

    - libraries that a choice of one of them names
    - libraries that a running process has mapped: its worker may restart and load them again
    - current candidates for the models' layers, those that `backend` would build with the same key
    """
    in_use = mapped(store.folder / LIBRARIES)
    named = _chosen(store, contents, in_use)
    return store.drop(_stale(store, backend, problems, named), in_use | named)


def mapped(folder: Path) -> set[str]:
    """Names without suffix of the files in a folder that other processes have mapped, as far as they are readable."""
    found: set[str] = set()
    within = f"{folder.resolve()}{os.sep}"
    for line in mapped_by_others():
        _, _, name = line.partition(within)
        if name:
            found.add(name.removesuffix(" (deleted)").removesuffix(".so"))
    return found


def _chosen(store: Store, contents: Collection[str], in_use: Collection[str]) -> set[str]:
    """The libraries that choices name; removes choices of models that are gone and not in use."""
    named: set[str] = set()
    for path in sorted((store.folder / CHOICES).glob("*.json")):
        try:
            choice = load(path, KernelChoice, FORMAT, CompileError, "")
        except CompileError:
            path.unlink(missing_ok=True)  # nothing can load it
            continue
        names = {name for kernels in choice.kernels for name in kernels.libraries}
        if path.stem in contents or not names.isdisjoint(in_use):
            named |= names
        else:
            path.unlink(missing_ok=True)
    return named


def _stale(
    store: Store, backend: CKernel, problems: Collection[Problem], named: Collection[str]
) -> Callable[[KernelCandidate], bool]:
    def is_stale(candidate: KernelCandidate) -> bool:
        if candidate.name in named:
            return False
        if candidate.problem not in problems or candidate.library.maker != store.maker:
            return True
        return not backend.is_current(candidate, store)

    return is_stale
