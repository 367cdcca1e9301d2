"""The names of `import cotenant`: light to import, complete, documented, and with examples that run."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cotenant

HEAVY = {"numpy", "msgspec", "onnx", "onnxruntime", "grpc", "httptools", "typer", "rich", "pandas", "asyncio"}
MODULES = (
    "cotenant",
    "cotenant.api.assumed",
    "cotenant.api.embedded_server",
    "cotenant.api.explaining",
    "cotenant.api.planning",
    "cotenant.api.profiling",
    "cotenant.api.repository",
    "cotenant.api.simulation",
    "cotenant.tabular",
    "cotenant.wire.client",
)


def loaded_after(statement: str) -> set[str]:
    """The modules of a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    environment = {"PYTHONPATH": str(Path(cotenant.__file__).parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_loads_no_other_module() -> None:
    found = loaded_after("import cotenant; dir(cotenant); cotenant.__all__")
    assert {name for name in found if name.startswith("cotenant")} == {"cotenant"}
    assert found.isdisjoint(HEAVY)


def test_a_policy_and_a_repository_load_no_engine() -> None:
    assert loaded_after("import cotenant; cotenant.Policy").isdisjoint(HEAVY - {"msgspec"})
    assert loaded_after("import cotenant; cotenant.Repository").isdisjoint({"onnxruntime", "grpc", "typer", "rich"})


@pytest.mark.parametrize("name", cotenant.__all__)
def test_a_name_is_there_and_documented(name: str) -> None:
    found = getattr(cotenant, name)
    assert name in dir(cotenant)
    assert callable(found)
    assert inspect.getdoc(found)
    if isinstance(found, type):
        for member, value in vars(found).items():
            is_field = inspect.ismemberdescriptor(value)  # the class describes those
            assert member.startswith("_") or is_field or inspect.getdoc(value), f"{name}.{member}"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'server'"):
        _ = cotenant.server


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0
