"""Inner loops: modules that run as plain Python over lists, or compiled by numba over arrays (the extra `solver`).

Such a module uses numbers, flat sequences and loops only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType, ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray

Ints = list[int]
"""A flat sequence of 64-bit integers: a list in the plain form, an array in the compiled one."""
Floats = list[float]
"""A flat sequence of 64-bit floating-point numbers, likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class InnerLoops:
    """Modules of loops in one of the two forms, by source, with constructors of the form's sequences."""

    modules: Mapping[ModuleType, ModuleType]
    is_compiled: bool

    def __getitem__(self, source: ModuleType) -> ModuleType:
        """A module in this form. Raises KeyError for a module that is not among them."""
        return self.modules[source]

    def ints(self, values: Sequence[int]) -> Ints:
        """Integers in the form that these loops take."""
        return cast(Ints, np.array(values, dtype=np.int64)) if self.is_compiled else list(values)

    def floats(self, values: Sequence[float] | NDArray[np.float64]) -> Floats:
        """Floating-point numbers in the form that these loops take."""
        return cast(Floats, np.array(values, dtype=np.float64)) if self.is_compiled else [float(x) for x in values]


def has_compiler() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def plain_loops(*sources: ModuleType) -> InnerLoops:
    """The modules as plain Python: about a hundred times slower than compiled."""
    return InnerLoops({source: source for source in sources}, False)


def best_loops(*sources: ModuleType) -> InnerLoops:
    """The modules compiled, in the order of `compiled_loops`; plain ones without numba."""
    return compiled_loops(*sources) if has_compiler() else plain_loops(*sources)


@cache
def compiled_loops(*sources: ModuleType) -> InnerLoops:
    """Compiled copies of the modules: each function is replaced, in the namespace of its copy, by its compiled form.

    A module comes after the modules that it calls in `sources`.

    A function is compiled when it is first called. Raises ImportError without numba.
    """
    import numba

    copies: dict[ModuleType, ModuleType] = {}
    compiled: dict[str, object] = {}
    for source in sources:
        name = f"{source.__name__}_compiled"
        spec = importlib.util.spec_from_file_location(name, source.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # numba looks modules of functions up by their names
        spec.loader.exec_module(module)
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == name:
                compiled[key] = numba.njit(value, cache=True)
            if isinstance(value, FunctionType) and key in compiled:  # its own, or imported from one before it
                setattr(module, key, compiled[key])
        copies[source] = module
    return InnerLoops(copies, True)
