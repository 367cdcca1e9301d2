"""Modules of plain loops as machine code, where numba is installed (the extra `solver`): one text, run in two ways."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType


def has_compiler() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compiled_copies(sources: Sequence[ModuleType]) -> list[ModuleType]:
    """The modules loaded a second time, every function of those second modules replaced, in the module's own namespace,
    by what numba makes of it: so functions call compiled functions. Who calls another stands behind it in the list.

    A function is compiled when it is first called. Raises ImportError without numba.
    """
    import numba

    copies: list[ModuleType] = []
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
        copies.append(module)
    return copies
