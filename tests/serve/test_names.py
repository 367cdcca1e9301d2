"""What serves a name, whatever became of it in the repository: a state machine over a small repository."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec import structs

from client import Client, LoaderHere, started
from cotenant.config import DeviceSection, ServerConfig
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.wire.api import InferRequest, ServeError, Status
from repositories import SLO_MS, config, scaled, write_model

NAMES = ("a", "b", "c")
X = np.linspace(-1, 1, 8, dtype=np.float32)[None]
APPLICATION = """
[application]
slo_ms = {slo_ms}

[[application.stage]]
name = "only"
model = "{stage}"
inputs = {{ x = "x" }}

[application.outputs]
y = "only.y"
"""
BROKEN = {"model": "[tenant\n", "application": "[application]\nslo_ms = 'soon'\n"}
GONE = "its worker is gone for good"
name = st.sampled_from(NAMES)


class CachedLoader(LoaderHere):
    """Measures the content of a file once."""

    known: ClassVar[dict[bytes, LoadReport]] = {}

    def load(self, spec: VersionSpec) -> LoadReport:
        content = spec.found.path.read_bytes() + spec.found.model.encode()
        report = self.known.get(content)
        if report is None or not report.facts.folder.exists():
            report = self.known[content] = super().load(spec)
        return structs.replace(report, facts=structs.replace(report.facts, found=spec.found))


@dataclass
class Content:
    """What the repository has under a name: a model's factor, or the model of an application's one stage."""

    kind: str
    what: Any
    is_broken: bool = False


@dataclass
class Entry:
    """What the last load that succeeded left, or an application that waits for its model."""

    kind: str
    what: Any
    is_gone: bool = False


@dataclass
class Expected:
    repository: dict[str, Content] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    def model_of(self, name: str) -> Entry | None:
        """The model that answers under a name, if one does."""
        entry = self.entries.get(name)
        if entry is not None and entry.kind == "application":
            entry = self.entries.get(entry.what)
            return entry if entry is not None and entry.kind == "model" else None
        return entry


class Names(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.server = Server(self.root, ServerConfig(device=DeviceSection(isolation="thread")))
        self.server.model_loader.loader_process = CachedLoader(60.0)
        self.server.start()
        self.client = Client(self.server)
        self.expected = Expected()
        self.factor = 0.0
        executor: Any = self.server._executor
        executor.problem = executor.lasting_problem = lambda tenant: self._problem(tenant)

    @initialize()
    def begin(self) -> None:
        for each in NAMES:
            self.roll_out(each, 0, is_broken=False)

    def teardown(self) -> None:
        self.server.stop()
        shutil.rmtree(self.root)

    def _problem(self, tenant: str) -> str:
        entry = self.expected.entries.get(tenant)
        return GONE if entry is not None and entry.is_gone else ""

    # --- the repository -------------------------------------------------------------------------------------------

    @rule(name=name, ahead=st.sampled_from((0, 0, 1, 1, 2, 2, 3)), is_broken=st.sampled_from((False, False, True)))
    def roll_out(self, name: str, ahead: int, is_broken: bool) -> None:
        """A model, or the application of a stage that is so far ahead in NAMES, takes the place of what is there."""
        if ahead:
            self._write(name, "application", NAMES[(NAMES.index(name) + ahead) % len(NAMES)])
        else:
            self.factor = (self.factor + 1) % 4
            self._write(name, "model", self.factor)
        if is_broken:
            self.touch(name, "break")
        self.load(name)

    @rule(name=name, how=st.sampled_from(("break", "mend", "remove")))
    def touch(self, name: str, how: str) -> None:
        """Change the files under a name, and load nothing."""
        content = self.expected.repository.get(name)
        if content is None:
            return
        if how == "break":
            content.is_broken = True
            (self.root / name / "config.toml").write_text(BROKEN[content.kind])
        elif how == "mend":
            self._write(name, content.kind, content.what)
        else:
            shutil.rmtree(self.root / name)
            del self.expected.repository[name]

    def _write(self, name: str, kind: str, what: Any) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        if kind == "model":
            write_model(self.root, name, config(), {1: lambda: scaled(what + 1.0)})
        else:
            (self.root / name).mkdir()
            (self.root / name / "config.toml").write_text(APPLICATION.format(slo_ms=SLO_MS, stage=what))
        self.expected.repository[name] = Content(kind, what)

    # --- the server -----------------------------------------------------------------------------------------------

    @rule(name=name)
    def load(self, name: str) -> None:
        content, entries = self.expected.repository.get(name), self.expected.entries
        before, was_served = entries.get(name), self.expected.model_of(name) is not None
        change = f"{before.kind if before and was_served else 'nothing'} to {content.kind if content else 'nothing'}"
        wanted: Status | None = None
        if content is None:
            wanted = Status.NOT_FOUND
        elif content.is_broken:
            wanted = Status.INVALID_ARGUMENT
        elif content.kind == "application":
            stage = entries.get(content.what)
            if content.what == name:
                wanted = Status.INVALID_ARGUMENT
            elif stage is None or stage.kind != "model":
                wanted = Status.UNAVAILABLE
        if wanted is None:
            assert content is not None
            entries[name] = Entry(content.kind, content.what)
            self.server.load(name)
        else:
            if not was_served and content is not None:
                entries.pop(name, None)
                if wanted is Status.UNAVAILABLE:
                    entries[name] = Entry("application", content.what)
            told = self._refused(lambda: self.server.load(name))
            assert told is wanted, (told, wanted, change)
        self.reached[f"{change}: {'failed' if wanted else 'loaded'}"] += 1

    @rule(name=name, how=st.sampled_from(("kill", "unload")))
    def end(self, name: str, how: str) -> None:
        """Unload a name, or kill the worker of a model so that it does not come back."""
        entry = self.expected.entries.get(name)
        if how == "kill":
            if entry is not None and entry.kind == "model":
                entry.is_gone = True
                self.reached["killed"] += 1
        elif entry is None:
            assert self._refused(lambda: self.server.unload(name)) is Status.NOT_FOUND
        else:
            self.expected.entries.pop(name)
            self.server.unload(name)
            self.reached["unloaded"] += 1

    def _refused(self, call: Callable[[], object]) -> Status:
        try:
            call()
        except ServeError as error:
            return error.status
        raise AssertionError("it was not refused")

    # --- what must be so ------------------------------------------------------------------------------------------

    @invariant()
    def index_readiness_and_inference_say_the_same(self) -> None:
        lines = self.server.index(ready_only=False)
        assert len({line.name for line in lines}) == len(lines), "a name is there once"
        states = {line.name: line for line in lines}
        assert {line.name for line in self.server.index(ready_only=True)} == {
            line.name for line in lines if line.state == "READY"
        }
        for name in NAMES:
            model = self.expected.model_of(name)
            is_ready = model is not None and not model.is_gone
            assert (states[name].state == "READY" if name in states else False) is is_ready, (name, states.get(name))
            assert self._ready(name) is is_ready
            assert self._infer(name) == (model.what + 1.0 if model is not None and is_ready else None)
            if model is not None:
                platform = self.server.metadata(name, "").platform
                assert (platform == "ensemble") is (self.expected.entries[name].kind == "application")

    def _ready(self, name: str) -> bool:
        try:
            return self.server.model_ready(name, "")
        except ServeError as error:
            return error.status is not Status.NOT_FOUND

    def _infer(self, name: str) -> float | str | None:
        """The factor of the model that answers; None where the name is refused; else what happened instead."""
        try:
            result = self.client.ask(name, {"x": X})
        except ServeError as error:
            return None if error.status in (Status.UNAVAILABLE, Status.NOT_FOUND) else str(error)
        if result.outcome is not Outcome.ANSWERED:
            return None if result.outcome is Outcome.REJECTED and GONE in result.reason else result.reason
        return round(float(result.outputs["y"][0, 0] / (X[0, 0] / (1 + abs(X[0, 0])))), 3)


def test_a_name_is_served_by_what_was_loaded_last_and_every_view_of_it_agrees() -> None:
    Names.reached.clear()
    run_state_machine_as_test(
        Names,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    kinds = ("model", "application")
    changes = [f"{one} to {other}: {end}" for one in kinds for other in kinds for end in ("loaded", "failed")]
    missed = {each for each in (*changes, "killed", "unloaded") if not Names.reached[each]}
    assert not missed, dict(Names.reached)


# --- a repository, and a server, that are not there ---------------------------------------------------------------


def test_a_load_while_the_repository_is_away_is_refused_with_a_sentence_and_what_ran_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "a", config(), {1: lambda: scaled(2.0)})
    server = started(root, loader=CachedLoader(60.0), device=DeviceSection(isolation="thread"))
    client = Client(server)
    for away in (root, root / "a"):
        away.rename(tmp_path / "away")
        for name in ("a", "unknown"):
            with pytest.raises(ServeError) as caught:
                server.load(name)
            assert caught.value.status is (Status.UNAVAILABLE if away is root else Status.NOT_FOUND)
            assert str(tmp_path) not in str(caught.value)
        assert client.ask("a", {"x": X}).outcome is Outcome.ANSWERED
        (tmp_path / "away").rename(away)
    server.load("a")
    server.stop()


def test_a_server_that_has_not_started_refuses_every_request_for_models(tmp_path: Path) -> None:
    write_model(tmp_path, "a", config(), {1: lambda: scaled(2.0)})
    server = Server(tmp_path, ServerConfig(device=DeviceSection(isolation="thread")))
    asks: tuple[Callable[[], object], ...] = (
        lambda: server.load("a"),
        lambda: server.submit(InferRequest("a", {"x": X}), lambda _: None),
        lambda: server.metadata("a", ""),
    )
    for ask in asks:
        with pytest.raises(ServeError, match="the server is starting") as caught:
            ask()
        assert caught.value.status is Status.UNAVAILABLE
    assert server.index(ready_only=False) == []
    server.stop()


def test_a_directory_whose_name_is_no_utf_8_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "a", config(), {1: lambda: scaled(2.0)})
    for odd in (b"\xff\xfe", b"b\xe9", b"\xed\xa0\x80"):
        (tmp_path / os.fsdecode(odd)).mkdir()
    server = started(tmp_path, loader=CachedLoader(60.0), device=DeviceSection(isolation="thread"))
    server.load("a")
    assert [line.name for line in server.index(ready_only=False)] == ["a"]
    json.dumps([line.name for line in server.index(ready_only=False)]).encode()
    for odd in ("\udcff\udcfe", "b\udce9"):
        with pytest.raises(ServeError) as caught:
            server.load(odd)
        assert caught.value.status is Status.NOT_FOUND
        str(caught.value).encode()
    told = [record.message for record in caplog.records if "its name is not UTF-8" in record.message]
    assert len(told) == 3
    "".join(told).encode()
    server.stop()
