"""The kernels as machine code where numba is installed (the extra `solver`), else as they are.

The sources of the three modules are loaded a second time, and every function of those second modules is replaced,
in the module's own namespace, by what numba makes of it: so functions call compiled functions, and there is one text.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import NamedTuple, cast

import numpy as np

from cotenant.plan.placement import annealing, kernels, window
from cotenant.plan.placement.kernels import Ints


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


def has_compiler() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def best_kernels() -> Kernels:
    """The compiled kernels, else the plain ones, which are a hundred times slower. A first call compiles, once."""
    return compiled_kernels() if has_compiler() else PLAIN


@cache
def compiled_kernels() -> Kernels:
    """The compiled kernels. Raises ImportError without numba."""
    import numba

    copies: dict[str, ModuleType] = {}
    compiled: dict[str, object] = {}
    for source in (kernels, window, annealing):
        name = f"{source.__name__}_compiled"
        spec = importlib.util.spec_from_file_location(name, source.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = copies[source.__name__] = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # numba looks modules of functions up by their names
        spec.loader.exec_module(module)
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == name:
                compiled[key] = numba.njit(value, cache=True)
            if isinstance(value, FunctionType) and key in compiled:  # its own, or imported from one before it
                setattr(module, key, compiled[key])
    return Kernels(copies[kernels.__name__], copies[annealing.__name__], True)
