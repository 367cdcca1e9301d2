"""Profiles: measured latencies of models over batch, shape and cores, and the sweeps that measure them.

The package itself can be called: `cotenant.profile(repository)` is `cotenant.api.profiling.profile`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package as a function of the Python API, which has the same name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Measure the models of a repository: see `cotenant.api.profiling.profile`."""
        return import_module("cotenant.api.profiling").profile(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
