"""The real server behind its real front-ends: unmodified clients, damaged requests, and books that balance."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from cotenant.config import ServerConfig
from cotenant.core.actions import Action, Launch
from cotenant.core.events import Event, QueryArrived
from cotenant.execute.protocol import Timing
from cotenant.serve.server import Server
from cotenant.types import Outcome, priority_rank
from fake_backend import MODES, CountingBackend, Ports, serving
from fuzz import (
    CLEAN_CODES,
    CLEAN_STATUSES,
    LIMITS,
    RawHttp,
    Target,
    grpc_message,
    grpc_outcome,
    grpc_request,
    http_request,
)
from onnx_samples import encoder_feeds
from repositories import BAD, GOOD, SLO_MS, write_bad, write_good

WAIT_S = 30.0
HTTP_REQUESTS = 4000
GRPC_REQUESTS = 2500
STREAM_REQUESTS = 300


@dataclass
class Served:
    root: Path
    server: Server
    backend: CountingBackend
    ports: Ports
    arrived: list[Any]
    launches: list[Launch]

    def balanced(self) -> None:
        """Every query that arrived has exactly one outcome, nothing is left inside, nothing is kept."""
        assert self.backend.settled(WAIT_S)
        assert self.server.driver.wait_idle(WAIT_S)
        assert self.server.driver.read(lambda engine: engine.live) == 0
        for name, counted in self.server.counters.by_tenant.items():
            assert sum(counted.outcomes.values()) == counted.arrived, name
        assert self.server._executor.kept == 0


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = write_bad(write_good(tmp_path_factory.mktemp("protocol") / "models"))
    server = Server(root, ServerConfig())
    arrived: list[Any] = []
    launches: list[Launch] = []

    def watch(_: int, event: Event, actions: list[Action], __: Timing | None) -> None:
        if isinstance(event, QueryArrived):
            arrived.append(event.query)
        launches.extend(action for action in actions if isinstance(action, Launch))

    server.start(watch)
    backend = CountingBackend(server)
    with serving(backend, LIMITS, request.param) as ports:
        yield Served(root, server, backend, ports, arrived, launches)
    server.stop()


CLIENTS = {"http": triton_http, "grpc": triton_grpc}


@pytest.fixture(params=sorted(CLIENTS))
def triton(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


def connect(triton: Any, served: Served) -> Any:
    port = served.ports.http if triton is triton_http else served.ports.grpc
    return triton.InferenceServerClient(f"127.0.0.1:{port}")


@pytest.fixture
def client(triton: Any, served: Served) -> Iterator[Any]:
    with connect(triton, served) as made:
        yield made


def infer(triton: Any, client: Any, model: str, arrays: dict[str, Any], **more: Any) -> Any:
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return client.infer(model, inputs, **more)


def engine(root: Path, model: str, version: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(str(root / model / str(version) / "model.onnx"), options)


@pytest.mark.parametrize(
    ("model", "version", "arrays"),
    [
        ("add_sub", 1, {"a": np.arange(8, dtype=np.int32).reshape(2, 4), "b": np.full((2, 4), 3, np.int32)}),
        ("cnn", 1, {"x": np.random.default_rng(1).standard_normal((3, 3, 16, 16)).astype(np.float32)}),
        ("encoder", 1, encoder_feeds(2, 11)),
        ("two", 2, {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}),
        ("chooser", 1, {"index": np.array([7])}),
    ],
)
def test_answers_are_those_of_the_engine(
    served: Served, triton: Any, client: Any, model: str, version: int, arrays: dict[str, Any]
) -> None:
    session = engine(served.root, model, version)
    names = [output.name for output in session.get_outputs()]
    expected = session.run(names, arrays)
    result = infer(triton, client, model, arrays)
    for name, array in zip(names, expected, strict=True):
        got = result.as_numpy(name)
        assert got.dtype == array.dtype
        np.testing.assert_allclose(got, array, rtol=1e-4, atol=1e-5)


def test_texts_and_versions(served: Served, triton: Any, client: Any) -> None:
    words = np.array([b"one", "zw\u00f6lf".encode(), b""], np.object_)
    assert infer(triton, client, "words", {"words": words}).as_numpy("same").tolist() == words.tolist()
    x = {"x": np.ones((1, 8), np.float32)}
    first = infer(triton, client, "two", x, model_version="1").as_numpy("y")
    np.testing.assert_allclose(infer(triton, client, "two", x).as_numpy("y"), 2 * first)


def test_concurrent_answers_equal_single_ones(served: Served, triton: Any) -> None:
    asked = [np.random.default_rng(seed).standard_normal((1, 3, 16, 16)).astype(np.float32) for seed in range(24)]
    before = len(served.launches)

    def ask(some: list[Any]) -> list[Any]:
        with connect(triton, served) as client:  # the HTTP client belongs to one thread
            return [infer(triton, client, "cnn", {"x": x}).as_numpy("y") for x in some]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [asked[which::8] for which in range(8)]))
    together = [answers[number % 8][number // 8] for number in range(len(asked))]
    assert sum(len(launch.queries) for launch in served.launches[before:]) == len(asked)
    session = engine(served.root, "cnn")
    for x, got in zip(asked, together, strict=True):
        np.testing.assert_allclose(got, session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_priority_and_time_out_arrive_in_the_core(served: Served, triton: Any, client: Any) -> None:
    before = len(served.arrived)
    x = {"x": np.zeros((1, 3, 16, 16), np.float32)}
    infer(triton, client, "cnn", x, priority=1, timeout=7_000_000)
    infer(triton, client, "cnn", x)
    asked, plain = served.arrived[before:]
    assert asked.rank == priority_rank(1)
    assert asked.expiry_ns - asked.arrival_ns == 7_000_000_000
    assert asked.deadline_ns == asked.expiry_ns
    assert plain.rank == priority_rank(0)  # the tenant has its own
    assert plain.deadline_ns - plain.arrival_ns == SLO_MS * 1_000_000


def test_refusals_carry_their_sentence(served: Served, triton: Any, client: Any) -> None:
    cases = [
        ("zzz", {"x": np.zeros((1, 8), np.float32)}, ("404", "NOT_FOUND"), "unknown"),
        ("no_slo", {"x": np.zeros((1, 8), np.float32)}, ("503", "UNAVAILABLE"), "slo_ms is missing"),
        ("two", {"x": np.zeros((1, 7), np.float32)}, ("400", "INVALID_ARGUMENT"), "expected [-1, 8]"),
        ("chooser", {"index": np.array([99])}, ("500", "INTERNAL"), "out of data bounds"),
    ]
    for model, arrays, statuses, sentence in cases:
        with pytest.raises(InferenceServerException) as caught:
            infer(triton, client, model, arrays)
        assert any(status in str(caught.value.status()) for status in statuses), caught.value
        assert sentence in caught.value.message()
        assert str(served.root) not in caught.value.message() or model == "no_slo"


def test_control_calls(served: Served, triton: Any, client: Any) -> None:
    plain = triton is triton_http
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("two", "1")
    assert not client.is_model_ready("no_slo")
    index = client.get_model_repository_index()
    entries = {(e["name"], e["state"]) for e in index} if plain else {(e.name, e.state) for e in index.models}
    assert entries == {(name, "READY") for name in GOOD} | {(name, "UNAVAILABLE") for name in BAD}
    client.unload_model("chooser")
    assert not client.is_model_ready("chooser")
    client.load_model("chooser")
    assert client.is_model_ready("chooser")
    with pytest.raises(InferenceServerException, match=r"\[\[model.shapes\]\]\nx = \[1, 128\]"):
        client.load_model("no_shape")
    with pytest.raises(InferenceServerException, match="no such directory"):
        client.load_model("..")

    def answered() -> int:
        statistics = client.get_inference_statistics("chooser")
        if plain:
            return int(statistics["model_stats"][0]["inference_stats"]["success"]["count"])
        return int(statistics.model_stats[0].inference_stats.success.count)

    before = answered()  # whatever it answered before it was unloaded counts on
    infer(triton, client, "chooser", {"index": np.array([1])})
    assert answered() == before + 1


@pytest.fixture
def target(served: Served) -> Target:
    array = np.arange(8, dtype=np.int32).reshape(2, 4)
    return Target(served.backend, "add_sub", {"a": ("INT32", array), "b": ("INT32", array)})


def test_damaged_http_requests(served: Served, target: Target) -> None:
    rng = random.Random(404)
    call = RawHttp(served.ports.http)
    statuses: Counter[int] = Counter()
    for number in range(HTTP_REQUESTS):
        request = http_request(rng, target)
        status, body = call(request)
        statuses[status] += 1
        assert status in CLEAN_STATUSES | {0}, (number, status, body, request)
        assert b"Traceback" not in body
        if not body:
            call.close()
    status, body = call(http_request(rng, target, damage=False))
    call.close()
    assert status == 200, body
    assert statuses[200] > 50
    assert statuses[400] > 400
    served.balanced()


def test_damaged_grpc_requests(served: Served, target: Target) -> None:
    rng = random.Random(405)
    codes: Counter[Any] = Counter()
    with grpc.insecure_channel(f"127.0.0.1:{served.ports.grpc}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for number in range(GRPC_REQUESTS):
            data = grpc_request(rng, target)
            code, details = grpc_outcome(call, data)
            codes[code] += 1
            assert code in CLEAN_CODES, (number, code, details, data)
            assert "Traceback" not in details
        good = grpc_message(target).SerializeToString()
        answer = service_pb2.ModelInferResponse.FromString(call(good, timeout=WAIT_S))
        assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        requests = [grpc_request(rng, target) for _ in range(STREAM_REQUESTS)] + [good]
        answers = list(stream(iter(requests), timeout=WAIT_S))
    assert len(answers) == len(requests)
    assert codes[grpc.StatusCode.OK] > 30
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 400
    served.balanced()


def test_clients_that_go_away_leave_one_outcome_each(served: Served, target: Target) -> None:
    """Half of the requests are not waited for: connections are cut and calls cancelled while queries are inside."""
    rng = random.Random(406)
    before = served.server.counters.by_tenant["add_sub"].arrived
    waited = 0
    for _ in range(60):
        call = RawHttp(served.ports.http)
        connection_request = http_request(rng, target, damage=False)
        if rng.random() < 0.5:
            assert call(connection_request)[0] == 200
            waited += 1
        else:
            with socket.create_connection(("127.0.0.1", served.ports.http), timeout=WAIT_S) as raw:
                raw.sendall(connection_request)
        call.close()
    with grpc.insecure_channel(f"127.0.0.1:{served.ports.grpc}") as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [ask.future(grpc_message(target).SerializeToString(), timeout=WAIT_S) for _ in range(60)]
        for number, pending in enumerate(calls):
            if number % 2:
                pending.cancel()
            else:
                assert pending.result()
                waited += 1
    served.balanced()
    counted = served.server.counters.by_tenant["add_sub"]
    assert counted.arrived - before >= waited > 40
    assert {outcome for outcome, count in counted.outcomes.items() if count} <= {
        Outcome.ANSWERED,
        Outcome.LATE,
        Outcome.CANCELLED,
        Outcome.DROPPED,
        Outcome.REJECTED,
    }
