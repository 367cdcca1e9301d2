"""Modules of plain numeric functions, compiled: loaded a second time, with every function given to numba.

With NUMBA_DISABLE_JIT set the functions run as they stand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from bench._registry import BenchError


def loaded(module: str, given: Mapping[str, Any] | None = None, *, compiled: bool = True) -> ModuleType:
    """A copy of a module with compiled functions, and of the modules of ours that it imports.

    `given` are names of it that stand for something else. Raises BenchError where numba is asked for and not there.
    """
    return _copied(module, given or {}, _compiler() if compiled else None)


def _copied(module: str, given: Mapping[str, Any], compiler: Callable[[Any], Any] | None) -> ModuleType:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.loader is None:
        raise BenchError(f"there is no module {module!r} of rules")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for name, value in list(vars(made).items()):
        if name in given:
            setattr(made, name, given[name])
        elif compiler is not None and isinstance(value, FunctionType) and value.__module__.startswith(_OURS):
            own = value.__module__ == module
            setattr(made, name, compiler(value) if own else getattr(_rules(value.__module__), value.__name__))
    return made


_OURS = ("cotenant.", "bench.")


@cache
def _rules(module: str) -> ModuleType:
    return _copied(module, {}, _compiler())


@cache
def _compiler() -> Callable[[Any], Any]:
    try:
        import numba
    except ImportError:
        raise BenchError(
            "numba is not installed: this benchmark needs it (it is among the development tools)"
        ) from None
    made: Callable[[Any], Any] = numba.njit
    return made
