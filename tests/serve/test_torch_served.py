"""A real server whose models are torch.export archives on the streams of the CPU, under load and changes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.serve import server as server_module
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.wire.api import InferRequest, InferResult
from repositories import config
from torch_small import save_small, small_cnn

WAIT_S = 30.0
QUERIES = 60


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("archives")
    save_small(made)
    return made


def write(root: Path, archives: Path, name: str, archive: str, **options: Any) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    shutil.copy(archives / f"{archive}.pt2", folder / "model.pt2")
    (root / name / "config.toml").write_text(config(**options))


@pytest.fixture
def server(tmp_path: Path, archives: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    root = tmp_path / "models"
    write(root, archives, "cnn", "cnn", max_batch=4, slo_ms=20_000)
    write(root, archives, "table", "picky", slo_ms=20_000)
    executor = TorchExecutor(CpuStreams())
    monkeypatch.setattr(server_module, "open_executor", lambda *_: executor)
    made = Server(root, ServerConfig(device=DeviceSection(isolation="thread")))
    made.start()
    yield made
    made.stop()
    assert executor.kept == 0


class Answers:
    """Every result by the number that was asked with; a second one for the same query is an error."""

    def __init__(self) -> None:
        self.results: dict[int, InferResult] = {}
        self._changed = threading.Condition()

    def ask(self, server: Server, key: int, model: str, inputs: dict[str, Any]) -> None:
        def done(result: InferResult) -> None:
            with self._changed:
                assert key not in self.results
                self.results[key] = result
                self._changed.notify_all()

        server.submit(InferRequest(model, inputs), done)

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.results) >= count, WAIT_S)


def image(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((1, 3, 16, 16)).astype(np.float32)


def test_every_query_gets_its_own_answer(server: Server) -> None:
    answers = Answers()
    for number in range(QUERIES):
        if number % 3:
            answers.ask(server, number, "cnn", {"x": image(number)})
        else:
            answers.ask(server, number, "table", {"index": np.array([number % 10])})
    answers.wait(QUERIES)
    reference = small_cnn()
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    for number, result in answers.results.items():
        assert result.outcome is Outcome.ANSWERED, result.reason
        (got,) = result.outputs.values()
        if number % 3:
            with torch.inference_mode():
                expected = reference(torch.from_numpy(image(number))).numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, table[[number % 10]])


def test_a_query_that_raises_fails_alone(server: Server) -> None:
    answers = Answers()
    for number, index in enumerate((3, 99, 4)):
        answers.ask(server, number, "table", {"index": np.array([index])})
    answers.wait(3)
    outcomes = [answers.results[number].outcome for number in range(3)]
    assert outcomes == [Outcome.ANSWERED, Outcome.FAILED, Outcome.ANSWERED]
    assert "input 'index' has the value 99, expected an index from 0 to 9" in answers.results[1].reason


def test_a_model_that_is_reloaded_under_load_loses_no_query(server: Server) -> None:
    """Each query has one outcome; those that the old model had begun end with it, and the new one answers."""
    answers = Answers()
    asked = 0
    for _ in range(3):
        for _ in range(10):
            answers.ask(server, asked, "cnn", {"x": image(asked)})
            asked += 1
        server.load("cnn")
    answers.ask(server, asked, "cnn", {"x": image(asked)})
    answers.wait(asked + 1)
    assert len(answers.results) == asked + 1
    assert answers.results[asked].outcome is Outcome.ANSWERED
    assert {result.outcome for result in answers.results.values()} == {Outcome.ANSWERED}
