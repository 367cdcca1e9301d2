"""The server over a real repository: what it serves, what it says of the rest, and that it counts exactly."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from msgspec import structs

from client import WAIT_S, Client, LoaderHere, Watch, assert_balanced, feeds, sample, started, until
from cotenant.config import DeviceSection, PolicySection, ServerConfig, ServerSection
from cotenant.core.actions import Enqueue, Launch, group_of
from cotenant.core.events import (
    LaunchEnded,
    LookAheadDue,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    TenantAdded,
    TenantRemoved,
)
from cotenant.core.snapshot import DropRule
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.measure import loader
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import Profile, load_profile, save_profile
from cotenant.repository import profile_path, quick_profiles_path
from cotenant.serve.models import served_models as models_module
from cotenant.serve.server import Server
from cotenant.types import ANSWERS, LossCause, Outcome, priority_rank
from cotenant.wire.api import InferRequest, ServeError, Status
from cotenant.work import Share, Work
from installed import known
from intruder import Intruder
from onnx_samples import encoder_feeds, residual_cnn
from repositories import BAD, GOOD, SLO_MS, chooser, config, scaled, write_bad, write_good, write_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bad(write_good(tmp_path_factory.mktemp("served") / "models"))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def server(root: Path, watch: Watch) -> Iterator[Server]:
    made = started(root, watch)
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    yield made
    assert made.twice == 0


def run(root: Path, model: str, inputs: dict[str, Any], version: int = 1) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(root / model / str(version) / "model.onnx"), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_same(got: Any, expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        if array.dtype == np.object_:
            assert got[name].tolist() == [item.encode() for item in array.tolist()]
        else:
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)


# --- what is served ---------------------------------------------------------------------------------------------------


def test_good_models_are_ready_and_bad_ones_stay_in_the_index(server: Server) -> None:
    index = server.index(ready_only=False)
    ready = [(entry.name, entry.version) for entry in index if entry.state == "READY"]
    assert ready == [(name, str(number)) for name in sorted(GOOD) for number in GOOD[name][1]]
    assert sorted(entry.name for entry in index if entry.state == "UNAVAILABLE") == sorted(BAD)
    assert [(entry.name, entry.version) for entry in server.index(ready_only=True)] == ready


@pytest.mark.parametrize("model", sorted(BAD))
def test_the_index_says_what_is_wrong_and_how_to_mend_it(server: Server, model: str) -> None:
    [entry] = [entry for entry in server.index(ready_only=False) if entry.name == model]
    for text in BAD[model][2]:
        assert text in entry.reason
    assert "Traceback" not in entry.reason
    assert str(server.root.parent) not in entry.reason
    assert server.model_ready(model, "") is False
    with pytest.raises(ServeError, match=re.escape(entry.reason)):
        server.load(model)
    with pytest.raises(ServeError, match="is not served") as caught:
        server.submit(InferRequest(model, {}), lambda _: None)
    assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.parametrize("model", sorted(GOOD))
def test_answers_are_those_of_the_engine(server: Server, client: Client, root: Path, model: str) -> None:
    assert server.model_ready(model, "")
    for seed in range(3):
        inputs = feeds(model, seed)
        result = client.ask(model, inputs)
        assert (result.outcome, result.reason, result.status) == (Outcome.ANSWERED, "", None)
        engine_inputs = {
            name: np.array([item.decode() for item in array], np.object_) if array.dtype == np.object_ else array
            for name, array in inputs.items()
        }
        version = max(GOOD[model][1])
        assert result.model_version == str(version)
        assert_same(result.outputs, run(root, model, engine_inputs, version))


def test_each_version_answers_for_itself(client: Client, server: Server) -> None:
    inputs = feeds("two", 1)
    base = client.ask("two", inputs, version="1").outputs["y"]
    np.testing.assert_allclose(client.ask("two", inputs, version="2").outputs["y"], 2 * base, rtol=1e-6)
    assert client.ask("two", inputs).model_version == "2"
    with pytest.raises(ServeError, match=r"no version '3'; it has 1, 2") as caught:
        client.ask("two", inputs, version="3")
    assert caught.value.status is Status.NOT_FOUND


def test_batched_answers_equal_single_ones(server: Server, client: Client, watch: Watch) -> None:
    """While a long batch runs, queries pile up and are merged; each gets its own rows back."""
    before = len(watch.seen)
    asked = [(model, feeds(model, seed, 1 + seed % 2)) for seed in range(12) for model in ("cnn", "add_sub", "two")]
    barrier = threading.Barrier(4)
    numbers: dict[int, int] = {}

    def send(which: int) -> None:
        barrier.wait(WAIT_S)
        for at in range(which, len(asked), 4):
            numbers[at] = client.submit(*asked[at])

    threads = [threading.Thread(target=send, args=(which,), daemon=True) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    results = client.wait(*[numbers[at] for at in range(len(asked))])
    launches = [action for _, _, actions in watch.seen[before:] for action in actions if isinstance(action, Launch)]
    assert any(len(launch.queries) > 1 for launch in launches)
    for (model, inputs), result in zip(asked, results, strict=True):
        assert result.outcome is Outcome.ANSWERED
        alone = client.ask(model, inputs)
        for name, array in alone.outputs.items():
            np.testing.assert_allclose(result.outputs[name], array, rtol=1e-4, atol=1e-5)


def test_metadata_and_config_describe_the_model(server: Server) -> None:
    meta = server.metadata("cnn", "")
    assert (meta.name, meta.versions, meta.platform, meta.max_batch_size) == ("cnn", ("1",), "onnxruntime_onnx", 4)
    assert [(spec.name, spec.datatype, spec.shape) for spec in meta.inputs] == [("x", "FP32", (-1, 3, 16, 16))]
    assert server.metadata("two", "1").versions == ("1", "2")
    config = server.config("cnn", "")
    assert config["max_batch_size"] == 4
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": (3, 16, 16)}]
    assert "dynamic_batching" in config
    assert config["parameters"]["slo_ms"]["string_value"] == str(SLO_MS)
    words = server.config("words", "1")
    assert words["max_batch_size"] == 0
    assert words["input"][0]["data_type"] == "TYPE_STRING"
    assert "dynamic_batching" not in words


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["zzz", "", ".", "..", "cnn/1", "/etc", ".cotenant", "a" * 300, "nul\0", "../models/cnn"]
)
def test_unknown_names_are_not_found_and_leave_no_mark(server: Server, name: str) -> None:
    index = server.index(ready_only=False)
    calls = (
        lambda: server.metadata(name, ""),
        lambda: server.config(name, ""),
        lambda: server.model_ready(name, ""),
        lambda: server.submit(InferRequest(name, {}), lambda _: None),
        lambda: server.load(name),
        lambda: server.unload(name),
    )
    for call in calls:
        with pytest.raises(ServeError) as caught:
            call()
        assert caught.value.status is Status.NOT_FOUND
        assert str(server.root) not in caught.value.message
    assert server.index(ready_only=False) == index


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        ("add_sub", {"a": np.zeros((1, 4), np.int32)}, "input 'b' is missing"),
        ("add_sub", {"a": np.zeros((1, 4), np.int32), "b": np.zeros((1, 4), np.int64)}, "expected INT32"),
        ("add_sub", {"a": np.zeros((9, 4), np.int32), "b": np.zeros((9, 4), np.int32)}, "batch of 9, expected 1 to 8"),
        ("add_sub", {"a": np.zeros((0, 4), np.int32), "b": np.zeros((0, 4), np.int32)}, "batch of 0"),
        ("add_sub", {"a": np.zeros((2, 4), np.int32), "b": np.zeros((3, 4), np.int32)}, "'a' has 2, 'b' has 3"),
        ("cnn", {"x": np.zeros((1, 3, 16, 15), np.float32)}, "expected"),
        ("cnn", {**feeds("cnn"), "z": np.zeros(1)}, "'z' is unknown"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_they_count(
    server: Server, model: str, inputs: dict[str, Any], sentence: str
) -> None:
    """Rows that differ between inputs would shift the rows of everyone else in the batch."""
    arrived = server.counters.by_tenant[model].arrived
    with pytest.raises(ServeError, match=sentence) as caught:
        server.submit(InferRequest(model, inputs), lambda _: pytest.fail("done was called"))
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert server.counters.by_tenant[model].arrived == arrived


def test_a_model_that_raises_fails_its_query_alone(client: Client, server: Server) -> None:
    bad, good = client.submit("chooser", {"index": np.array([99])}), client.submit("chooser", {"index": np.array([4])})
    failed, answered = client.wait(bad, good)
    assert (failed.outcome, failed.status) == (Outcome.FAILED, Status.INTERNAL)
    assert "indices element out of data bounds" in failed.reason
    assert str(server.root) not in failed.reason
    np.testing.assert_array_equal(answered.outputs["y"], [[8.0, 9.0]])


@pytest.mark.parametrize(
    ("items", "at"),
    [
        ([b"\xff\xfe", b"", b""], 0),
        ([b"\0\0", "\u20ac".encode()[:2], "\u20ac".encode()[2:]], 1),
        ([b"", b"", b"\x80"], 2),
    ],
)
def test_text_that_is_none_is_refused_before_it_is_merged(
    client: Client, server: Server, items: list[bytes], at: int
) -> None:
    arrived = server.counters.by_tenant["words"].arrived
    with pytest.raises(ServeError, match=f"input 'words' has .* as element {at}, expected UTF-8 text") as caught:
        client.submit("words", {"words": np.array(items, np.object_)})
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert server.counters.by_tenant["words"].arrived == arrived
    texts = ["\u20ac\0".encode(), b"\0", b""]
    assert client.ask("words", {"words": np.array(texts, np.object_)}).outcome is Outcome.ANSWERED


def test_priority_and_time_out_reach_the_core(client: Client, server: Server, watch: Watch) -> None:
    numbers = [
        client.submit("cnn", feeds("cnn")),
        client.submit("cnn", feeds("cnn"), priority=1),
        client.submit("add_sub", feeds("add_sub"), timeout_ns=5 * 10**9),
        client.submit("add_sub", feeds("add_sub"), timeout_ns=90 * 10**9),
    ]
    client.wait(*numbers)
    queries = {event.query.id: event.query for event in watch.events(QueryArrived)}
    plain, first, short, long = (queries[number] for number in numbers)
    slo_ns = SLO_MS * 10**6
    assert (plain.rank, first.rank) == (priority_rank(0), priority_rank(1))  # the tenant has its own
    assert plain.deadline_ns - plain.arrival_ns == slo_ns
    assert plain.expiry_ns is None
    assert short.deadline_ns == short.expiry_ns == short.arrival_ns + 5 * 10**9
    assert long.deadline_ns == long.arrival_ns + slo_ns
    assert long.expiry_ns == long.arrival_ns + 90 * 10**9


def test_a_declared_shape_is_found_for_every_length(client: Client, watch: Watch) -> None:
    numbers = [client.submit("encoder", encoder_feeds(1, length)) for length in (2, 8, 9, 32, 40, 8)]
    client.wait(*numbers)
    queries = {event.query.id: event.query for event in watch.events(QueryArrived)}
    assert [queries[number].shape for number in numbers] == [0, 0, 1, 1, 1, 0]
    keys = [queries[number].merge_key for number in numbers]
    assert keys[1] == keys[5]
    assert len(set(keys)) == 5  # other lengths cannot be merged with it


def test_merge_keys_do_not_fill_the_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "_MOST_MERGE_KEYS", 3)
    served = server.names.find("encoder", "")
    keys = [served.form(InferRequest("encoder", encoder_feeds(1, length))).merge_key for length in range(40, 60)]
    assert len(served._merge_keys) <= 3
    assert len(set(keys)) == len(keys), "a key that was forgotten is not given to another shape"


def test_merge_keys_differ_whatever_threads_ask_at_once(server: Server) -> None:
    served = server.names.find("encoder", "")
    lengths = range(100, 160)
    found: list[dict[int, int]] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait(WAIT_S)
        found.append({n: served.form(InferRequest("encoder", encoder_feeds(1, n))).merge_key for n in lengths})

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [found[0]] * 4
    assert len(set(found[0].values())) == len(lengths)


# --- counters ---------------------------------------------------------------------------------------------------------


def test_statistics_and_metrics_count_exactly(tmp_path: Path) -> None:
    watch = Watch()
    server = started(write_good(tmp_path / "models", "chooser", "two"), watch)
    client = Client(server)
    try:
        for seed, rows in ((0, 1), (1, 3), (2, 2)):
            client.ask("two", feeds("two", seed, rows))
        client.ask("two", feeds("two"), version="1")
        client.ask("chooser", {"index": np.array([99])})
        client.ask("chooser", {"index": np.array([1])})
        statistics = {(each.name, each.version): each for each in server.statistics("", "")}
        assert sorted(statistics) == [("chooser", "1"), ("two", "1"), ("two", "2")]
        two = statistics["two", "2"]
        assert (two.inference_count, two.execution_count, two.success.count, two.fail.count) == (6, 3, 3, 0)
        assert two.queue.count == two.compute_infer.count == two.compute_input.count == two.compute_output.count == 3
        assert two.success.ns >= two.queue.ns + two.compute_infer.ns > 0
        assert two.last_inference_ms > 1_700_000_000_000
        old = statistics["two", "1"]
        assert (old.inference_count, old.success.count) == (1, 1)
        chooser = statistics["chooser", "1"]
        assert (chooser.success.count, chooser.fail.count, chooser.execution_count) == (1, 1, 2)
        assert chooser.compute_infer.count == 1  # a failed query has no share in the times of answered ones
        page = server.metrics().decode()
        assert sample(page, "cotenant_queries_total", tenant="Owner of two", outcome="answered") == 3
        assert sample(page, "cotenant_queries_total", tenant="Owner of two:1", outcome="answered") == 1
        assert sample(page, "cotenant_queries_total", tenant="chooser", outcome="failed") == 1
        assert sample(page, "cotenant_latency_seconds_count", tenant="Owner of two") == 3
        [decided] = [line for line in page.splitlines() if line.startswith("cotenant_decision_lag_seconds_count ")]
        assert float(decided.split()[1]) >= 2 * 6  # each query comes, and each launch ends
        assert sample(page, "cotenant_slo_seconds", tenant="chooser") == SLO_MS / 1000
        assert sample(page, "cotenant_slo_attainment_ratio", tenant="chooser") == 0.5
        causes = {each: sample(page, "cotenant_lost_total", tenant="chooser", cause=each) for each in LossCause}
        assert causes == dict.fromkeys(LossCause, 0) | {LossCause.FAILED: 1}
        assert sample(page, "cotenant_queue_length", tenant="chooser") == 0
        assert sample(page, "nv_inference_request_success", model="Owner of two") == 3
        assert sample(page, "nv_inference_count", model="Owner of two") == 6
        assert sample(page, "nv_inference_request_failure", model="chooser") == 1
        assert sample(page, "nv_inference_pending_request_count", model="chooser") == 0
        launches = len(watch.actions(Launch))
        assert launches == sum(each.execution_count for each in statistics.values()) == 6
        server.unload("chooser")
        with pytest.raises(ServeError, match="it was unloaded"):
            client.ask("chooser", {"index": np.array([1])})
        assert server.losses.lost["chooser"] == {LossCause.FAILED: 1, LossCause.GONE: 1}
    finally:
        server.stop()


# --- life -------------------------------------------------------------------------------------------------------------


def test_metrics_and_index_can_be_asked_before_the_start(tmp_path: Path) -> None:
    server = Server(write_good(tmp_path / "models", "two"), ServerConfig())
    assert b"cotenant_queue_length" in server.metrics()
    assert server.index(ready_only=False) == []
    assert server.ready() is False
    assert server.live() is True
    with pytest.raises(ServeError) as caught:
        server.submit(InferRequest("two", feeds("two")), lambda _: None)
    assert caught.value.status is Status.UNAVAILABLE
    server.stop()


def test_unload_load_and_reload(tmp_path: Path) -> None:
    watch = Watch()
    root = write_good(tmp_path / "models", "two", "chooser")
    server = started(root, watch)
    client = Client(server)
    try:
        server.unload("two")
        assert not server.model_ready("two", "")
        assert [entry.name for entry in server.index(ready_only=True)] == ["chooser"]
        with pytest.raises(ServeError, match="it was unloaded") as caught:
            client.ask("two", feeds("two"))
        assert caught.value.status is Status.UNAVAILABLE
        with pytest.raises(ServeError, match="is not loaded"):
            server.unload("two")
        assert client.ask("chooser", {"index": np.array([0])}).outcome is Outcome.ANSWERED
        server.load("two")
        assert client.ask("two", feeds("two")).outcome is Outcome.ANSWERED

        write_model(root, "two", config(max_batch=2, slo_ms=7777), {3: lambda: scaled(3.0)})
        server.load("two")
        assert server.metadata("two", "").versions == ("1", "2", "3")
        inputs = feeds("two")
        base = client.ask("two", inputs, version="1").outputs["y"]
        np.testing.assert_allclose(client.ask("two", inputs).outputs["y"], 3 * base, rtol=1e-6)
        assert server.config("two", "3")["parameters"]["slo_ms"]["string_value"] == "7777"

        (root / "two" / "3" / "model.onnx").write_bytes(b"damaged")
        with pytest.raises(ServeError, match="no readable ONNX model"):
            server.load("two")
        assert client.ask("two", inputs).model_version == "3"  # what was served goes on being served

        write_model(root, "new", config(), {1: chooser})
        server.load("new")
        assert client.ask("new", {"index": np.array([2])}).outcome is Outcome.ANSWERED
        added = [event.tenant.name for event in watch.events(TenantAdded)]
        removed = [event.tenant for event in watch.events(TenantRemoved)]
        assert added.count("two") == removed.count("two") + 1
        assert_balanced(server)
    finally:
        server.stop()


def test_a_query_that_was_checked_against_a_model_never_runs_in_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_good(tmp_path / "models", "two")
    server = started(root)
    client = Client(server)
    form = models_module.ServedModel.form
    forms: list[models_module.QueryForm] = []

    def reloaded(served: models_module.ServedModel, request: InferRequest) -> models_module.QueryForm:
        """The model is reloaded when the first query has been checked and before it arrives."""
        forms.append(form(served, request))
        if len(forms) == 1:
            write_model(root, "two", config(max_batch=2), {2: chooser})
            server.load("two")
        return forms[-1]

    monkeypatch.setattr(models_module.ServedModel, "form", reloaded)
    try:
        with pytest.raises(ServeError, match="send the request again") as caught:
            client.submit("two", feeds("two"))
        assert caught.value.status is Status.UNAVAILABLE
        assert client.ask("two", {"index": np.array([1])}).outcome is Outcome.ANSWERED
        assert forms[0].merge_key != forms[1].merge_key
        assert server.driver.wait_idle(WAIT_S)
        assert_balanced(server)
    finally:
        server.stop()


def test_reloads_and_control_calls_under_load_lose_no_query(tmp_path: Path) -> None:
    server = started(write_good(tmp_path / "models", "two", "chooser", "add_sub"))
    client = Client(server)
    stop = threading.Event()
    sent: list[int] = []
    errors: list[ServeError] = []
    crashed: list[BaseException] = []

    def send(which: int) -> None:
        seed = which
        try:
            while not stop.is_set():
                seed += 1
                model = ("two", "chooser", "add_sub")[seed % 3]
                try:
                    number = client.submit(model, feeds(model, seed))
                    sent.append(number)
                    if seed % 5 == 0:
                        server.cancel(number)
                    elif seed % 4 == 0:
                        client.wait(number)
                except ServeError as error:
                    errors.append(error)
                server.index(ready_only=False)
                server.statistics("", "")
                server.metrics()
        except BaseException as error:
            crashed.append(error)

    threads = [threading.Thread(target=send, args=(which,), daemon=True) for which in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        server.load("two")
        server.unload("add_sub")
        server.load("add_sub")
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert crashed == []
    results = client.wait(*sent)
    assert client.twice == 0
    assert {result.outcome for result in results} <= {
        Outcome.ANSWERED,
        Outcome.CANCELLED,
        Outcome.FAILED,
        Outcome.REJECTED,
    }
    assert {result.reason for result in results if result.outcome is Outcome.FAILED} <= {
        "the model was reloaded",
        "the model was unloaded",
    }
    assert {error.status for error in errors} <= {Status.UNAVAILABLE}
    assert server.driver.wait_idle(WAIT_S)
    assert_balanced(server)
    server.stop()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_reload_with_other_weights_loses_no_query(tmp_path: Path, isolation: str) -> None:
    """Each answer is of the weights before or after, under its version; none is refused, failed or of both."""
    root = tmp_path / "models"
    text = config(max_batch=4)
    write_model(root, "m", text, {1: lambda: scaled(1.0)})
    server = started(root, device=DeviceSection(isolation=isolation))
    client = Client(server)
    x = np.ones((1, 8), np.float32)
    stop, errors, sent = threading.Event(), list[BaseException](), list[int]()

    def send() -> None:
        try:
            while not stop.is_set():
                numbers = [client.submit("m", {"x": x}) for _ in range(3)]
                sent.extend(numbers)
                client.wait(*numbers)
        except BaseException as error:
            errors.append(error)

    pause = partial(stop.wait, 0.002)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        for version in (2, 3, 4):
            before = len(sent)
            until(lambda before=before: len(sent) > before + 6 or bool(errors), pause)  # type: ignore[misc]
            write_model(root, "m", text, {version: lambda version=version: scaled(float(version))})
            server.load("m")
        before = len(sent)
        until(lambda: len(sent) > before + 6 or bool(errors), pause)
        stop.set()
        thread.join(WAIT_S)
        assert errors == []
        results = client.wait(*sent)
        assert {(result.outcome, result.reason) for result in results} == {(Outcome.ANSWERED, "")}
        for result in results:
            np.testing.assert_allclose(result.outputs["y"], float(result.model_version) * 0.5, rtol=1e-6)
        versions = [int(result.model_version) for result in results]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2, 3, 4}
        assert server.driver.wait_idle(WAIT_S)
        assert_balanced(server)
    finally:
        stop.set()
        server.stop()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_draining_answers_what_is_inside(tmp_path: Path, isolation: Any) -> None:
    root = tmp_path / "models"
    write_model(root, "cnn", config(max_batch=1), {1: residual_cnn})
    server = started(root, device=DeviceSection(lanes="all", isolation=isolation))
    client = Client(server)
    numbers = [client.submit("cnn", feeds("cnn", seed)) for seed in range(30)]
    threads = threads_of(server)
    stopper = threading.Thread(target=server.stop, daemon=True)
    stopper.start()
    refused = 0
    while stopper.is_alive():
        try:
            result = client.ask("cnn", feeds("cnn"))
            refused += result.status is Status.UNAVAILABLE and "shutting down" in result.reason
        except ServeError as error:
            refused += error.status is Status.UNAVAILABLE
    stopper.join(WAIT_S)
    assert refused > 0
    assert {result.outcome for result in client.wait(*numbers)} == {Outcome.ANSWERED}
    assert not server.ready()
    assert len(threads) == 2  # of the clock, and of the lane or of the worker
    assert not any(thread.is_alive() for thread in threads)


def threads_of(server: Server) -> Sequence[threading.Thread]:
    executor = server._executor
    if isinstance(executor, ProcessExecutor):
        own = [supervisor._thread for supervisor in executor._all]
    else:
        own = [lane._thread for lane in executor._lanes.values()]
    return [*own, server.clock._thread]  # type: ignore[attr-defined]


def test_what_does_not_end_within_the_drain_time_fails_with_a_reason(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "cnn", config(), {1: residual_cnn})
    server = started(root, server=ServerSection(drain_s=0.0))
    client = Client(server)
    numbers = [client.submit("cnn", feeds("cnn", seed)) for seed in range(50)]
    server.stop()
    results = client.wait(*numbers)
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    assert {result.reason for result in failed} <= {"the server stopped"}
    assert len(failed) + sum(result.outcome is Outcome.ANSWERED for result in results) == 50
    assert_balanced(server)


def test_a_loader_that_crashes_costs_the_other_models_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loader.open_untried

    def crash(root: Path, found: Any, *more: Any, **options: Any) -> Any:
        if found.model == "chooser":
            raise MemoryError("a library's own")
        return real(root, found, *more, **options)

    monkeypatch.setattr(loader, "open_untried", crash)
    server = started(write_good(tmp_path / "models", "two", "chooser"), loader=LoaderHere(1.0))
    try:
        states = {entry.name: (entry.state, entry.reason) for entry in server.index(ready_only=False)}
        assert states["two"][0] == "READY"
        assert states["chooser"][0] == "UNAVAILABLE"
        assert "MemoryError: a library's own" in states["chooser"][1]
    finally:
        server.stop()


# --- profiles and belief ----------------------------------------------------------------------------------------------


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    measured: list[str] = []
    real = loader.measure_model

    def spy(model: Any, *args: Any) -> Any:
        measured.append(model.name)
        return real(model, *args)

    monkeypatch.setattr(loader, "measure_model", spy)
    return measured


def test_a_profile_is_used_when_it_is_of_this_model_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cotenant.measure.solo import Effort
    from cotenant.measure.sweep import profile_repository

    root = write_good(tmp_path / "models", "two", "chooser")
    quick = Effort(0.0, 1, 1, 0)
    profile, errors = profile_repository(root, ServerConfig(), quick, fresh=False, on_step=lambda *_: None)
    assert errors == {}
    path = profile_path(root)
    measured = count_measurements(monkeypatch)

    def loads() -> list[str]:
        measured.clear()
        quick_profiles_path(root).unlink(missing_ok=True)
        started(root, loader=LoaderHere(1.0), device=DeviceSection(isolation="thread")).stop()
        return sorted(measured)

    assert loads() == []
    write_model(root, "chooser", config(max_batch=2), {})  # another configuration: its profile is stale
    assert loads() == ["chooser"]
    write_model(root, "chooser", config(), {})
    assert loads() == []
    device = this_device()
    for other in (
        {"processor": "another processor"},
        {"versions": {**device.versions, "onnxruntime": "1.0"}},
    ):
        stranger = type(device)(**{**{f: getattr(device, f) for f in device.__slots__}, **other})
        save_profile(path, Profile(stranger, "", "", profile.models))
        assert loads() == ["Owner of two", "Owner of two:1", "chooser"]
    chopped = {
        name: type(model)(model.digest, model.points, (*model.unit_ns, 5), (*model.cuts, model.cuts[-1] + 1), 1.0)
        for name, model in profile.models.items()
    }
    save_profile(path, Profile(device, "", "", chopped))  # cut by an optimiser that made other units
    assert loads() == ["Owner of two", "Owner of two:1", "chooser"]
    path.write_text("{", encoding="utf-8")
    assert loads() == ["Owner of two", "Owner of two:1", "chooser"]
    assert path.read_text(encoding="utf-8") == "{"  # a server measures for itself, it writes no profile
    save_profile(path, profile)
    assert loads() == []
    assert load_profile(path).models.keys() == {"Owner of two", "Owner of two:1", "chooser"}


def believe(server: Server, tenant: str, factor: float) -> None:
    """As if the profile had been wrong by this factor."""
    base = server.beliefs._tables[tenant]
    rows = tuple(
        type(row)(row.shape, row.items, row.cores, max(1, round(row.latency_ns * factor))) for row in base.rows
    )
    server.driver.read(lambda _: server.beliefs.add(tenant, type(base)(rows, base.unit_weights, base.segment_ratio)))
    server.driver.post(PredictorChanged(server.beliefs.predictor))


def test_belief_follows_what_is_observed(tmp_path: Path) -> None:
    """A profile that is wrong by a factor of 1000 is corrected by the launches, by more than one of them could say."""
    root = write_good(tmp_path / "models", "two")
    watch = Watch()
    server = started(root, watch)
    client = Client(server)
    calibration = server.beliefs._calibration
    try:
        for factor, is_corrected in (
            (1000.0, lambda found: found < calibration.smallest),
            (1e-6, lambda found: found > calibration.largest),
        ):
            believe(server, "Owner of two", factor)
            for seed in range(40):
                client.ask("two", feeds("two", seed))
            assert is_corrected(calibration.factor("Owner of two"))
            believed = server.driver.read(lambda engine: engine.predictor)
            assert believed is server.beliefs.predictor
            assert believed.scales == calibration.scales  # type: ignore[attr-defined]
    finally:
        server.stop()
    assert [event for event in watch.events(PredictorChanged) if event.predictor.scales]


def test_a_belief_that_changes_while_a_model_is_loaded_is_that_of_the_core(tmp_path: Path) -> None:
    server = started(write_good(tmp_path / "models", "two", "add_sub"))

    def believe() -> None:
        """As an observer does it, when another thread brings it an event."""
        with intruder.inner:
            server.beliefs._use({"Owner of two": 2.0 - server.beliefs._calibration.factor("Owner of two")})
            server.driver._handle(PredictorChanged(server.beliefs.predictor), server.clock.now_ns())

    for moment in range(100):
        intruder = Intruder(server.driver, moment, believe)
        server.load("add_sub")
        intruder.leave()
        assert server.driver.read(lambda engine: engine.predictor) is server.beliefs.predictor
        if not intruder.came:
            break
    assert 4 < moment < 99
    assert Client(server).ask("add_sub", feeds("add_sub")).outcome is Outcome.ANSWERED
    server.stop()


def test_a_belief_that_refuses_everything_is_corrected_by_probes(tmp_path: Path) -> None:
    """Nothing is launched while all is refused: without probes nothing would ever be served again."""
    root = tmp_path / "models"
    write_model(root, "two", config(slo_ms=2000), {1: lambda: scaled(1.0)})
    server = started(root)
    client = Client(server)
    try:
        assert client.ask("two", feeds("two")).outcome is Outcome.ANSWERED
        alone = server.beliefs.alone_ns("two")
        believe(server, "two", 10**9 / alone)
        for _ in range(20):  # as a stall of the machine would teach it
            scales = server.beliefs._calibration.observe("two", 10**9, 8 * 10**9, 1.0)
        assert scales is None
        server.beliefs.predictor = server.beliefs.predictor.scaled(server.beliefs._calibration.scales)
        server.driver.post(PredictorChanged(server.beliefs.predictor))
        assert server.beliefs.alone_ns("two") > 7 * 10**9
        assert client.ask("two", feeds("two")).outcome is Outcome.ANSWERED, "a probe"
        until = time.monotonic() + 60
        while server.beliefs.alone_ns("two") > 2 * 10**9 and time.monotonic() < until:
            assert client.ask("two", feeds("two")).outcome in {Outcome.ANSWERED, Outcome.REJECTED}
        assert client.ask("two", feeds("two")).outcome is Outcome.ANSWERED
        assert server.counters.by_tenant["two"].probes < 20
    finally:
        server.stop()


@pytest.mark.parametrize("tail_aware", [True, False])
def test_answers_that_leave_late_make_tail_aware_policies_count_on_it(tmp_path: Path, tail_aware: bool) -> None:
    root = write_good(tmp_path / "models", "two")
    server = started(root, policy=PolicySection("edf", {"drop": DropRule.NONE, "tail_aware": tail_aware}))
    try:
        client = Client(server)
        result = client.ask("two", feeds("two"))
        assert 0 < result.ended_ns <= server.clock.now_ns()
        for _ in range(200):
            server.replied(structs.replace(result, ended_ns=server.clock.now_ns() - 10**9))
        server.replied(structs.replace(result, ended_ns=0))  # of an application: nobody knows when it ended
        client.ask("two", feeds("two"))
        client.ask("two", feeds("two"))
        added_ns = server.driver.read(lambda engine: engine.predictor).upper_ns("two", 1000, 10**10) - 1000
        assert added_ns > 2 * 10**8 if tail_aware else added_ns == 0
    finally:
        server.stop()


@pytest.mark.skipif(not known("overlap"), reason="the package of overlap is not here")
@pytest.mark.parametrize(("isolation", "enqueue_ms"), [("thread", 0.0), ("thread", 0.5), ("process", 0.0)])
def test_groups_of_several_tenants_are_served(tmp_path: Path, isolation: str, enqueue_ms: float) -> None:
    """Under overlap with its barrier, before any group was measured: right answers, and one group at a time."""
    root = write_good(tmp_path / "models", "cnn", "two", "encoder")
    watch = Watch()
    server = started(
        root,
        watch,
        policy=PolicySection("overlap", {"drop": DropRule.NONE, "barrier": True, "enqueue_ms": enqueue_ms}),
        device=DeviceSection(isolation=isolation),
    )
    try:
        client = Client(server)
        asked = [(model, feeds(model, seed)) for seed in range(10) for model in ("cnn", "two", "encoder")]
        results = client.wait(*[client.submit(model, inputs) for model, inputs in asked])
        for (model, inputs), result in zip(asked, results, strict=True):
            assert result.outcome in ANSWERS, result.reason
            for name, expected in run(root, model, inputs, 2 if model == "two" else 1).items():
                np.testing.assert_allclose(result.outputs[name], expected, rtol=1e-4, atol=1e-5)
        assert client.twice == 0
    finally:
        server.stop()
    running: dict[int, int] = {}
    for _, event, actions in watch.seen:
        if isinstance(event, LaunchEnded):
            del running[event.launch]
        started_now = [action for action in actions if isinstance(action, Launch)]
        assert not (running and started_now), "a group starts before the last one has ended"
        running.update({launch.id: group_of(launch) for launch in started_now})
    assert len(watch.events(LookAheadDue)) > 0
    assert bool(watch.actions(Enqueue)) is bool(enqueue_ms)
    if len(server.lanes) > 1:
        assert max(Counter(group_of(launch) for launch in watch.actions(Launch)).values()) > 1


def test_a_launch_of_a_model_that_was_reloaded_teaches_nothing_of_the_new_one(server: Server) -> None:
    launch = Launch(10**6, 10**6, (), Work("chooser", 0, 1, 0, 1), True, Share((0,)), 10)
    server.beliefs(0, QueryCancelled(0), [launch], None)
    server.load("chooser")
    counts = _launch_counts(server)
    assert server.beliefs(10**9, LaunchEnded(10**6), [], None) is None
    assert _launch_counts(server) == counts


def test_in_the_end_the_books_of_the_whole_module_balance(server: Server) -> None:
    assert server.driver.wait_idle(WAIT_S)
    assert_balanced(server)


def _launch_counts(server: Server) -> dict[str, int]:
    known = server.beliefs._calibration._known
    return {tenant: sum(each.count for each in shapes.values()) for tenant, shapes in known.items()}
