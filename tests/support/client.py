"""A server in the process of the tests: its clients, its observers, and the check that its books balance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.config import ServerConfig
from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.errors import CotenantError
from cotenant.execute.protocol import Timing
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.measure.loader import load
from cotenant.measure.loader_process import Loader, VersionLoadError
from cotenant.serve.server import Server
from cotenant.wire.api import InferRequest, InferResult
from onnx_samples import encoder_feeds

WAIT_S = 30.0


class Client:
    """Asks and waits; keeps every result."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._results: dict[int, InferResult] = {}
        self._changed = threading.Condition()
        self.twice = 0

    def done(self, result: InferResult) -> None:
        with self._changed:
            self.twice += result.query in self._results
            self._results[result.query] = result
            self._changed.notify_all()

    def submit(self, model: str, inputs: dict[str, Any], **more: Any) -> int:
        return self._server.submit(InferRequest(model, inputs, **more), self.done)

    def wait(self, *numbers: int) -> list[InferResult]:
        with self._changed:
            assert self._changed.wait_for(lambda: set(numbers) <= set(self._results), WAIT_S)
            return [self._results[number] for number in numbers]

    def ask(self, model: str, inputs: dict[str, Any], **more: Any) -> InferResult:
        return self.wait(self.submit(model, inputs, **more))[0]


class Watch:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Event, list[Action]]] = []

    def __call__(self, now: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        self.seen.append((now, event, actions))

    def events(self, kind: type) -> list[Any]:
        return [event for _, event, _ in self.seen if isinstance(event, kind)]

    def actions(self, kind: type) -> list[Any]:
        return [action for _, _, actions in self.seen for action in actions if isinstance(action, kind)]


class SharedLoader(Loader):
    """A loader with one child that serves the loads of many servers in turn: starting a child takes 0.5 s."""

    def cancel(self) -> None:
        """Servers come and go; its child ends when it is idle."""

    def close(self) -> None:
        """See `cancel`."""


class LoaderHere(SharedLoader):
    """Loads in this process, where tests look on."""

    def load(self, spec: VersionSpec) -> LoadReport:
        try:
            return load(spec, lambda step, facts: self.on_step(spec.found.model, step))
        except CotenantError as error:
            raise VersionLoadError(str(error)) from error


SHARED = SharedLoader(limit_s=120.0)


def started(root: Path, watch: Watch | None = None, loader: Loader = SHARED, **sections: Any) -> Server:
    server = Server(root, ServerConfig(**sections))
    server.model_loader.loader_process = loader
    server.start(*([watch] if watch else []))
    return server


def feeds(model: str, seed: int = 0, rows: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    match model:
        case "add_sub":
            return {name: rng.integers(-9, 9, (rows, 4)).astype(np.int32) for name in ("a", "b")}
        case "cnn":
            return {"x": rng.standard_normal((rows, 3, 16, 16)).astype(np.float32)}
        case "encoder":
            return encoder_feeds(rows, 5 + seed % 20, seed)
        case "two":
            return {"x": rng.standard_normal((rows, 8)).astype(np.float32)}
        case "chooser":
            return {"index": rng.integers(0, 10, rows)}
        case _:
            return {"words": np.array([b"one", "zw\u00f6lf".encode(), b""], np.object_)}


def sample(page: str, name: str, **labels: str) -> float:
    wanted = name + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "} "
    [line] = [line for line in page.splitlines() if line.startswith(wanted)]
    return float(line.rsplit(" ", 1)[1])


def assert_balanced(server: Server) -> None:
    for name, counted in server.counters.by_tenant.items():
        assert sum(counted.outcomes.values()) == counted.arrived, name
    assert server.counters._open == {}
    assert server.counters._running == {}
    assert server.driver.read(lambda engine: (engine.live, engine.running)) == (0, 0)
    assert server._executor.kept == 0


def until(condition: Callable[[], bool], step: Callable[[], object]) -> None:
    """Do steps until something is so, with a time limit."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        step()
