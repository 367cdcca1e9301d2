"""What makes kernels: a protocol that the search, the store and the selection of versions need, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cotenant.techniques.layer_blocks.compile.problem import Problem

if TYPE_CHECKING:
    from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store

CANDIDATES = 20
"""Candidates of a problem: of `ckernel`'s the best of them is within 1 % of the best of 40."""


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How many candidates there are, and when (`time.monotonic`) no further one is begun."""

    candidates: int = CANDIDATES
    deadline: float = float("inf")
    workers: int = 1
    """Compilers that run at a time."""


OnBuilt = Callable[["KernelCandidate"], None]


class KernelBackend(Protocol):
    """A maker of kernels. Its candidates carry a type of knobs of its own, whose tag is its `name`."""

    @property
    def name(self) -> str:
        """The tag of the knobs of its candidates."""

    @property
    def serves(self) -> bool:
        """Whether compiled models can run its kernels."""

    def build(self, problem: Problem, store: Store, effort: SearchEffort, on_built: OnBuilt) -> list[KernelCandidate]:
        """Candidates of a problem, built and kept in the store; what it has already is taken from it.

        After the deadline one at most is built. Raises CompileError when none can be.
        """

    def measure(self, problem: Problem, store: Store, built: Sequence[KernelCandidate]) -> list[KernelCandidate]:
        """The same with their times, which are kept: CPU time of one core in ns, lower quartile, taken in turn.

        Those whose results differ from the others' are left out.
        """

    def is_current(self, candidate: KernelCandidate, store: Store) -> bool:
        """Whether it would be made like this again: by the same text, flags, compiler and processor."""
