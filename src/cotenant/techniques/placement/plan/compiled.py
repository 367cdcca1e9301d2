"""The kernels as machine code where numba is installed (the extra `solver`), else as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple, cast

import numpy as np

from cotenant.machine_code import compiled_copies, has_compiler
from cotenant.techniques.placement.plan import annealing, kernels, window
from cotenant.techniques.placement.plan.kernels import Ints


class Kernels(NamedTuple):
    """The functions of `kernels` and `annealing`, in the one form or the other, and how their sequences are made."""

    module: ModuleType
    annealing: ModuleType
    is_compiled: bool

    def ints(self, values: Sequence[int]) -> Ints:
        """Numbers in the form that these functions want."""
        if self.is_compiled:
            return cast(Ints, np.array(values, dtype=np.int64))
        return list(values)


PLAIN = Kernels(kernels, annealing, False)


@cache
def best_kernels() -> Kernels:
    """The compiled kernels, else the plain ones, which are a hundred times slower. A first call compiles, once."""
    return compiled_kernels() if has_compiler() else PLAIN


@cache
def compiled_kernels() -> Kernels:
    """The compiled kernels. Raises ImportError without numba."""
    evaluator, _, search = compiled_copies((kernels, window, annealing))
    return Kernels(evaluator, search, True)
