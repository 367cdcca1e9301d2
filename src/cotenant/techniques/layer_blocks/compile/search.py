"""The search over the kernels of one problem: candidates built, checked, measured, and kept."""

from __future__ import annotations

from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store


def search(
    problem: Problem,
    store: Store,
    backend: CKernel,
    effort: SearchEffort = SearchEffort(),
) -> list[KernelCandidate]:
    """Candidates for a problem with their times, the fastest first; those that the store has are taken from it.

    After the deadline nothing is built, and what is there is measured; at least one is built. Those that give another
    result than the first are left out. Raises CompileError when none can be built.
    """
    built = backend.build(problem, store, effort)
    if any(not each.cpu_ns for each in built):
        built = backend.measure(problem, store, built)
    return sorted(built, key=lambda each: (each.cpu_ns, each.name))
