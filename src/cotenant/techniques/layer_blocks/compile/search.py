"""The search over the kernels of one problem: candidates are built, checked, measured and stored."""

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
    """Measured candidates of a problem, the fastest first; stored candidates are used again.

    After the deadline none is built (but at least one in all). Candidates with another result than the first one are
    removed. Raises CompileError when none can be built.
    """
    built = backend.build(problem, store, effort)
    if any(not each.cpu_ns for each in built):
        built = backend.measure(problem, store, built)
    return sorted(built, key=lambda each: (each.cpu_ns, each.name))
