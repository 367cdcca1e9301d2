"""Loading cannot hurt or lie: what models do on made-up values, and what becomes of versions that cannot be loaded."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from client import SHARED, WAIT_S, Client, started
from cotenant.config import DeviceSection
from cotenant.errors import CotenantError
from cotenant.execute.worker.child import ChildProcess
from cotenant.measure import loader_process
from cotenant.measure.load_spec import VersionSpec
from cotenant.measure.loader import ASSUMED_SHARE
from cotenant.measure.loader_process import LoadCancelledError, Loader, VersionLoadError
from cotenant.repository import find_versions
from cotenant.serve.server import Server
from cotenant.serve.server_process import spawn
from cotenant.types import Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.work import Share
from onnx_samples import Sketch, info
from repositories import SLO_MS, chooser, config, fixed, open_shape, scaled, unsupported, write_model
from stubborn_models import STOP, columns, deep, hungry, looping, number_of_text, one_row, unranked

IN_THREADS = {"device": DeviceSection(isolation="thread")}
ONE = (Share((0,)),)
X = np.linspace(-1, 1, 8, dtype=np.float32)[None]
LOOPING = "[[model.shapes]]\nx = [4]\n"


@contextmanager
def serving(root: Path, loader: Loader = SHARED, **sections: Any) -> Iterator[tuple[Server, Client]]:
    server = started(root, loader=loader, **{**IN_THREADS, **sections})
    try:
        yield server, Client(server)
    finally:
        server.stop()


@contextmanager
def loading(limit_s: float = 60.0) -> Iterator[Loader]:
    loader = Loader(limit_s)
    try:
        yield loader
    finally:
        loader.close()


def spec_of(root: Path, model: str, version: int = -1) -> VersionSpec:
    return VersionSpec(str(root), find_versions(root, model)[version], ONE)


def states(server: Server) -> dict[tuple[str, str], str]:
    return {(each.name, each.version): each.state for each in server.index(ready_only=False)}


# --- values that do not suit --------------------------------------------------------------------------------------


def test_a_model_that_never_ends_on_made_up_values_is_served_where_it_ends_on_real_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "a_loop", config() + LOOPING, {1: looping})
    write_model(tmp_path, "b_plain", config(max_batch=4), {1: lambda: scaled(2.0)})
    with loading(1.0) as loader, serving(tmp_path, loader, device=DeviceSection(cores=(0,))) as (server, client):
        assert states(server) == {("a_loop", "1"): "READY", ("b_plain", "1"): "READY"}
        [text] = [each.message for each in caplog.records if "a_loop" in each.message and "assumed" in each.message]
        assert "measuring it quickly on sample values had not ended after 1 s" in text
        assert f"assumed latency of {SLO_MS * ASSUMED_SHARE:g} ms (50% of its SLO)" in text
        assert "[samples.INPUT]" in text
        assert server.beliefs.alone_ns("a_loop") == SLO_MS * ASSUMED_SHARE * 1_000_000
        result = client.ask("a_loop", {"x": np.array([STOP, 1, 2], np.int64)})
        assert result.outcome is Outcome.ANSWERED, result.reason
        assert result.outputs["y"].tolist() == [2 * STOP, 2, 4]
        assert client.ask("b_plain", {"x": X}).outcome is Outcome.ANSWERED
        for _ in range(10):
            client.ask("a_loop", {"x": np.array([STOP], np.int64)})
        assert server.beliefs.alone_ns("a_loop") < SLO_MS * ASSUMED_SHARE * 1_000_000, "launches show another one"


@pytest.mark.parametrize(
    ("make", "max_batch", "sample", "feeds", "expected"),
    [
        (number_of_text, 1, 'words = {values = ["7", "-1.5"]}', np.array([b"4", b"2"], object), [4, 2]),
        (lambda: number_of_text("batch"), 4, 'words = {values = ["7"]}', np.array([b"4"], object), [4]),
        (one_row, 1, "index = {integers = [0, 0]}", np.array([0, 0]), [[5, 7], [5, 7]]),
        (one_row, 4, "index = {values = [0]}", np.array([0]), [[5, 7]]),
        (chooser, 8, "index = {integers = [0, 9]}", np.array([9]), [[18, 19]]),
    ],
)
def test_a_model_that_refuses_made_up_values_is_served_with_a_warning_and_without_one_by_samples(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Any],
    max_batch: int,
    sample: str,
    feeds: Any,
    expected: list[Any],
) -> None:
    text = config(max_batch=max_batch)
    write_model(tmp_path, "m", text, {1: make})
    with serving(tmp_path) as (server, client):
        name = server.metadata("m", "").inputs[0].name
        assert client.ask("m", {name: feeds}).outputs["y"].tolist() == expected
        is_warned = make is not chooser
        assert ("it cannot be run on sample values" in caplog.text) is is_warned
        merging = server.names.models["m"][""].facts.merging
        assert merging.verdict in ("proven", "single"), "by the graph, which needs no values"
        caplog.clear()
        (tmp_path / "m" / "config.toml").write_text(f"{text}[samples]\n{sample}\n")
        server.load("m")
        assert "it cannot be run on sample values" not in caplog.text
        assert all(point.runs > 0 for point in server.names.models["m"][""].profile.points)
        assert client.ask("m", {name: feeds}).outputs["y"].tolist() == expected


def unproven() -> onnx.ModelProto:
    """The row of a table that a text from "1000" on names, plus 0 by way of all rows: the graph proves nothing."""
    s = Sketch()
    number = s.op("Sub", s.op("Cast", "word", to=TensorProto.INT64), s.constant(np.array(1000)))
    found = s.op("Gather", s.constant(np.array([1.0, 2.0, 4.0], np.float32)), number, axis=0)
    nothing = s.op("Mul", s.op("ReduceMax", found, axes=[0], keepdims=1), s.constant(np.array(0, np.float32)))
    s.op("Add", found, nothing, out="y")
    return s.model([info("word", ["batch", 1], TensorProto.STRING)], [info("y", ["batch", 1])])


def test_samples_are_what_the_trial_of_merging_runs_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = config(max_batch=4)
    write_model(tmp_path, "m", text, {1: unproven})
    words = np.array([[b"1002"], [b"1000"]], object)
    with serving(tmp_path) as (server, client):
        assert "it cannot be run on sample values" in caplog.text
        assert server.metadata("m", "").max_batch_size == 0, "nothing shows that its queries may be merged"
        (tmp_path / "m" / "config.toml").write_text(text + '[samples]\nword = {values = ["1000", "1001", "1002"]}\n')
        server.load("m")
        assert server.names.models["m"][""].facts.merging.verdict == "tried"
        assert server.metadata("m", "").max_batch_size == 4
        assert client.ask("m", {"word": words}).outputs["y"].tolist() == [[4], [1]]


def test_what_takes_too_much_memory_ends_with_its_process(tmp_path: Path) -> None:
    write_model(tmp_path, "hungry", config(more="memory_limit_mib = 100"), {1: hungry})
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    with loading() as loader:
        loader.load(spec_of(tmp_path, "plain"))
        with pytest.raises(VersionLoadError, match=r"'hungry' version 1: .* took \d+ MiB, and 100 MiB are allowed"):
            loader.load(spec_of(tmp_path, "hungry"))
        assert loader.load(spec_of(tmp_path, "plain")).warning == ""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    made: list[ChildProcess] = []
    real = ChildProcess.__init__

    def note(self: ChildProcess, *arguments: Any) -> None:
        real(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ChildProcess, "__init__", note)
    return made


def test_a_child_that_dies_is_replaced_and_what_kills_a_new_one_is_refused(
    tmp_path: Path, children: list[ChildProcess]
) -> None:
    write_model(tmp_path, "loop", config() + LOOPING, {1: looping})
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    with loading() as loader:
        loader.load(spec_of(tmp_path, "plain"))
        os.kill(children[-1].pid, signal.SIGKILL)
        assert loader.load(spec_of(tmp_path, "plain")).warning == ""
        assert len(children) == 2

        def killer() -> None:
            seen = 1
            while seen < 3:  # the child that is there, and the new one
                if len(children) > seen:
                    time.sleep(0.3)
                    os.kill(children[seen].pid, signal.SIGKILL)
                    seen += 1

        thread = threading.Thread(target=killer)
        thread.start()
        with pytest.raises(
            VersionLoadError, match=r"'loop' version 1: .* ended its process, which was killed by signal 9"
        ):
            loader.load(spec_of(tmp_path, "loop"))
        thread.join()
        assert loader.load(spec_of(tmp_path, "plain")).warning == ""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[None]:
    """Gets an item when a load asks whether it may measure."""
    asked: SimpleQueue[None] = SimpleQueue()
    real = loader_process._Child._wait_to_measure

    def note(self: Any, *arguments: Any) -> None:
        asked.put(None)
        real(self, *arguments)

    monkeypatch.setattr(loader_process._Child, "_wait_to_measure", note)
    return asked


@pytest.mark.parametrize("is_endless", [False, True], ids=["measures", "never ends"])
def test_loads_are_side_by_side_and_measure_one_after_another(
    tmp_path: Path,
    children: list[ChildProcess],
    turns: SimpleQueue[None],
    monkeypatch: pytest.MonkeyPatch,
    is_endless: bool,
) -> None:
    """A load that measures has its turn; another one waits for that, and no longer than for the limit."""
    monkeypatch.setattr(loader_process, "_MEASURING_S", 0.1 if is_endless else 60.0)
    write_model(tmp_path, "loop", config() + LOOPING, {1: looping})
    write_model(tmp_path, "plain", config(max_batch=4), {1: lambda: scaled(1.0)})
    with loading(600.0) as loader, ThreadPoolExecutor(2) as pool:
        endless = pool.submit(loader.load, spec_of(tmp_path, "loop"))
        turns.get(timeout=WAIT_S)
        plain = pool.submit(loader.load, spec_of(tmp_path, "plain"))
        turns.get(timeout=WAIT_S)
        if is_endless:
            assert all(point.runs > 0 for point in plain.result(WAIT_S).profile.points)
            loader.cancel()
        else:
            assert not plain.done()
            os.kill(children[0].pid, signal.SIGKILL)
            assert plain.result(WAIT_S).warning == ""
        with pytest.raises(LoadCancelledError if is_endless else VersionLoadError):
            endless.result(WAIT_S)
        assert len(children) == 2


def test_a_load_under_way_ends_when_the_server_stops(tmp_path: Path, children: list[ChildProcess]) -> None:
    write_model(tmp_path, "loop", config() + LOOPING, {1: looping})
    with loading(600.0) as loader:
        threading.Timer(0.5, loader.cancel).start()
        with pytest.raises(LoadCancelledError, match="the server is stopping"):
            loader.load(spec_of(tmp_path, "loop"))
    assert not Path(f"/proc/{children[-1].pid}").exists()


# --- versions -----------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[], Any] | bytes | None, str]] = {
    "good": (lambda: scaled(1.0), ""),
    "empty": (b"", "holds no ONNX graph"),
    "cut": (scaled(1.0).SerializeToString()[:200], "no readable ONNX model"),
    "junk": (b"\x00\xffnothing", "no readable ONNX model"),
    "missing": (None, "is missing"),
    "unsupported": (unsupported, "NoSuchOperator"),
    "fixed": (fixed, "set max_batch = 1"),
    "open": (open_shape, "is open"),
    "too many inputs": (lambda: columns(300), ""),
}


def write_version(root: Path, version: int, kind: str) -> None:
    make, _ = KINDS[kind]
    if make is None:
        (root / "m" / str(version)).mkdir(parents=True, exist_ok=True)
        (root / "m" / str(version) / "model.onnx").unlink(missing_ok=True)
    else:
        write_model(root, "m", config(max_batch=4), {version: make})


@pytest.mark.parametrize("seed", range(12))
def test_what_can_be_loaded_is_served_and_the_rest_is_named(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "config.toml").write_text(config(max_batch=4))
    bad = [kind for kind in KINDS if kind != "good"]
    kinds = {number: rng.choice(["good", *rng.sample(bad, 2)]) for number in range(1, rng.randint(3, 5))}
    for number, kind in kinds.items():
        write_version(root, number, kind)
    good = [number for number, kind in kinds.items() if kind == "good"]
    with serving(root) as (server, client):
        check(server, client, kinds, good)
        for number in kinds:
            if number not in good:
                assert f"version {number} is not loaded" in caplog.text or not good
        if not good:
            write_version(root, 1, "good")
            kinds[1], good = "good", [1]
        newest = max(kinds)
        if kinds[newest] == "good":
            server.load("m")
        else:
            with pytest.raises(ServeError) as caught:
                server.load("m")
            assert KINDS[kinds[newest]][1] in caught.value.message
            assert str(tmp_path) not in caught.value.message
        check(server, client, kinds, good)
        added = newest + 1
        kind = rng.choice(bad)
        write_version(root, added, kind)
        with pytest.raises(ServeError) as caught:
            server.load("m")
        assert caught.value.status is Status.INVALID_ARGUMENT
        check(server, client, {**kinds, added: kind}, good)
        write_version(root, added, "good")
        server.load("m")
        check(server, client, {**kinds, added: "good"}, [*good, added])


def check(server: Server, client: Client, kinds: dict[int, str], good: list[int]) -> None:
    """These versions are served, the newest as the default one, and the index names the others."""
    names = tuple(map(str, good))
    if not good:
        assert set(states(server).values()) == {"UNAVAILABLE"}
        return
    assert {version for (_, version), state in states(server).items() if state == "READY"} == set(names)
    meta = server.metadata("m", "")
    assert meta.versions == names
    for number, kind in kinds.items():
        if number in good:
            result = client.ask("m", {"x": X}, version=str(number))
            assert (result.outcome, result.model_version) == (Outcome.ANSWERED, str(number))
        else:
            [entry] = [each for each in server.index(ready_only=False) if each.version == str(number)]
            assert entry.state == "UNAVAILABLE"
            assert KINDS[kind][1] in entry.reason
            with pytest.raises(ServeError, match=f"version {number} is not served") as caught:
                server.metadata("m", str(number))
            assert caught.value.status is Status.UNAVAILABLE
    assert client.ask("m", {"x": X}).model_version == names[-1]
    tenants = {each.tenant.name for each in server.names.models["m"].values()}
    assert tenants == {"m", *(f"m:{number}" for number in good[:-1])}


def test_a_version_that_was_served_stays_when_its_file_is_overwritten(tmp_path: Path) -> None:
    for number in (1, 2):
        write_version(tmp_path, number, "good")
    with serving(tmp_path) as (server, client):
        write_version(tmp_path, 2, "junk")
        with pytest.raises(ServeError, match="no readable ONNX model"):
            server.load("m")
        check(server, client, {1: "good", 2: "good"}, [1, 2])


# --- what a file says of its tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 4])
def test_an_unknown_rank_is_any_rank(tmp_path: Path, max_batch: int) -> None:
    shapes = "[[model.shapes]]\nx = [1, 3]\n[[model.shapes]]\nx = [1, 3, 2]\n"
    write_model(tmp_path, "m", config(max_batch=max_batch) + shapes, {1: unranked})
    with serving(tmp_path) as (server, client):
        for shape in ((1,), (1, 3), (1, 3, 2), *(((), (5, 1)) if max_batch == 1 else ((2, 2), (4,)))):
            x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
            result = client.ask("m", {"x": x})
            assert result.outcome is Outcome.ANSWERED, result.reason
            assert np.array_equal(result.outputs["y"], 2 * x)
        assert [spec.shape for spec in server.metadata("m", "").inputs] == [(-1,)]
        if max_batch > 1:
            with pytest.raises(ServeError, match=r"input 'x' has shape \[\]"):
                client.ask("m", {"x": np.zeros((), np.float32)})
            with pytest.raises(ServeError, match="expected 1 to 4"):
                client.ask("m", {"x": np.zeros((5, 2), np.float32)})


def test_an_unknown_rank_needs_a_declared_shape(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config(), {1: unranked})
    with (
        loading() as loader,
        pytest.raises(VersionLoadError, match=r"the shape of input 'x' is open.*\n\[\[model.shapes\]\]"),
    ):
        loader.load(spec_of(tmp_path, "m"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: columns(256), ""),
        (lambda: columns(257), "'m' has 257 inputs, and a request carries at most 256"),
        (lambda: deep(32), ""),
        (lambda: deep(33), "input 'x' has 33 dimensions, and a tensor of a request has at most 32"),
    ],
)
def test_limits_of_the_protocol_are_those_of_models(tmp_path: Path, make: Callable[[], Any], sentence: str) -> None:
    write_model(tmp_path, "m", config(), {1: make})
    with serving(tmp_path) as (server, client):
        if sentence:
            [entry] = server.index(ready_only=False)
            assert sentence in entry.reason
        else:
            inputs = {spec.name: np.ones([1] * len(spec.shape), np.float32) for spec in server.metadata("m", "").inputs}
            assert client.ask("m", inputs).outcome is Outcome.ANSWERED


def test_errors_of_a_loader_are_sentences(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config() + "[samples]\ny = {values = [1]}\n", {1: lambda: scaled(1.0)})
    with loading() as loader, pytest.raises(CotenantError, match=r"\[samples.y\] names no input .*expected one of x"):
        loader.load(spec_of(tmp_path, "m"))


# --- the whole server -----------------------------------------------------------------------------------------------


def test_sigterm_ends_a_start_that_a_model_holds_up(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "loop", config() + LOOPING, {1: looping})
    process = spawn("serve", str(root), log=tmp_path / "log")
    try:
        until = time.monotonic() + 60
        while "is measured quickly" not in (tmp_path / "log").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 20, "the limit of a step is 120 s"
    finally:
        process.kill()
        process.wait()


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "\ufeff" + config(), {1: fixed})
    assert find_versions(tmp_path, "m")[0].config.tenant.slo_ms == SLO_MS
