"""Sockets: a package adds a service, a campaign, a command and a world; and a technique may be absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from cotenant import registry
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.strategy import strategies
from cotenant.serve.server import Server
from repositories import write_good

GUEST = '''
from dataclasses import dataclass
from typing import Annotated

import typer

from cotenant.cli.campaigns import ProfileCampaign
from cotenant.serve.services import Service

HEARD = []


class Notes(Service):
    def start(self):
        HEARD.append("start")

    def added(self, served):
        HEARD.append(f"added {served.tenant.name}")

    def followed(self, policy):
        HEARD.append("followed")
        return policy

    def settled(self):
        HEARD.append(f"settled {[each.tenant.name for each in self.server.served_models()]}")

    def ready(self):
        HEARD.append("ready")

    def close(self, until_s):
        HEARD.append("close")


@dataclass
class Greeting(ProfileCampaign):
    greet: Annotated[str, typer.Option("--greet", help="Whom to greet.")] = ""

    def found(self):
        return {"greeting": f"hello {self.greet}" if self.greet else None}


def greet(name: str = "you") -> None:
    """Greet."""
    print(f"hello {name}")


def world_of(tables, seed):
    return None
'''
ENTRY_POINTS = """
[cotenant.services]
notes = guest_package:Notes
[cotenant.campaigns]
greeting = guest_package:Greeting
[cotenant.commands]
greet = guest_package:greet
[cotenant.worlds]
guests = guest_package:world_of
"""
SECONDS = 60


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing of the package is known before and after a test."""
    strategies.cache_clear()
    yield
    strategies.cache_clear()
    sys.modules.pop("guest_package", None)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which the package is installed."""
    site = tmp_path / "site"
    info = site / "guest-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "guest_package.py").write_text(GUEST, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return site


def cotenant(site: Path, *words: str) -> str:
    path = os.pathsep.join((str(site), *(each for each in sys.path if each)))
    command = [sys.executable, "-m", "cotenant", *words]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_service_is_called_at_its_moments(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    server = Server(write_good(tmp_path / "models", "two"), ServerConfig(device=DeviceSection(isolation="thread")))
    try:
        server.start()
        server.load("two")
    finally:
        server.stop()
    heard = sys.modules.pop("guest_package").HEARD
    moments = [moment for moment, _ in groupby(each.split()[0] for each in heard)]
    loaded = ["added", "followed", "settled"]
    assert moments == ["start", *loaded, "ready", *loaded, "close"]
    assert {each for each in heard if each.startswith("added")} == {"added Owner of two", "added Owner of two:1"}
    assert heard[-2] == "settled ['Owner of two:1', 'Owner of two']"


def test_a_command_and_a_campaign_join_the_command_line(site: Path, tmp_path: Path) -> None:
    assert cotenant(site, "greet", "--name", "world") == "hello world\n"
    root = write_good(tmp_path / "models", "two")
    told = json.loads(cotenant(site, "profile", str(root), "--budget", "0", "--greet", "world", "--json"))
    assert told["greeting"] == "hello world"
    assert {"profile", "groups", "report", "coruns", "contention", "errors"} < told.keys()
    assert "--greet" in cotenant(site, "profile", "--help")


def test_names_of_this_distribution_stay_its_own(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (site / "guest-1.0.dist-info" / "entry_points.txt").read_text(encoding="utf-8")
    taken = entries.replace("greet = guest_package:greet", "compile = guest_package:greet")
    (site / "guest-1.0.dist-info" / "entry_points.txt").write_text(taken, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    assert registry.registered(registry.COMMANDS)["compile"] == registry.BUILT_IN[registry.COMMANDS]["compile"]
    assert "guests" in registry.load_all(registry.WORLDS)


def test_every_reference_leads_somewhere() -> None:
    for socket, found in registry.BUILT_IN.items():
        for name in found:
            assert registry.load(socket, name) is not None, (socket, name)


def test_a_technique_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.built_in.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "find_spec", lambda name: None if name.endswith(".overlap") else name)
        names = registry.built_in(registry.POLICIES)
        assert "overlap" not in names
        assert "duty_cycle" not in names, "partitions need it"
        assert "joint" in names
        assert registry.built_in(registry.GROUP_MODELS) == {}
    registry.built_in.cache_clear()
    assert "overlap" in registry.built_in(registry.POLICIES)
