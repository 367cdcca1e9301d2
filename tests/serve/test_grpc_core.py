"""How the core of gRPC is told to read sockets: only where it knows the switch, and never against the user's wish."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cotenant.serve.frontend.grpc_core import read_in_place

SERVER = """
import os, sys
from importlib.metadata import version
from cotenant.serve.frontend.grpc_core import read_in_place
read_in_place(os.environ, version("grpcio"))
assert "grpc" not in sys.modules
import grpc
server = grpc.server(None)
assert server.add_insecure_port("127.0.0.1:0")
server.start()
server.stop(0).wait(10)
"""


@pytest.mark.parametrize(
    ("version", "is_set"), [("1.66.0", True), ("1.85.1", True), ("1.86.0rc1", False), ("2.0", False), ("main", False)]
)
def test_only_versions_that_know_the_switch_get_it(version: str, is_set: bool) -> None:
    environment: dict[str, str] = {}
    assert read_in_place(environment, version) is is_set
    assert bool(environment) is is_set


def test_what_the_user_has_set_stays() -> None:
    environment = {"GRPC_EXPERIMENTS": ""}
    assert not read_in_place(environment, "1.80.0")
    assert environment == {"GRPC_EXPERIMENTS": ""}


def test_the_installed_version_knows_the_switch() -> None:
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
