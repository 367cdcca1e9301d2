"""Applications through unmodified clients of both protocols, and under the load generator."""

from __future__ import annotations

import asyncio
import json
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from application_clients import CLIENTS, WAIT_S, check_calls_given_up, check_stream, tensors
from application_samples import APPLICATIONS, CHAIN, chain, diamond, softsign, write_application, write_models, x_of
from cotenant.config import ServerConfig
from cotenant.load import run_load
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.wire.oip import QUERY_KEY
from cotenant.workload import parse_workload
from fake_backend import MODES, CountingBackend, Ports, serving


@dataclass
class Served:
    server: Server
    backend: CountingBackend
    ports: Ports


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = write_models(tmp_path_factory.mktemp("protocol") / "models")
    for name, text in APPLICATIONS.items():
        write_application(root, name, text)
    write_application(root, "hopeless", CHAIN, slo_ms=0.000001)
    write_application(root, "wrong", CHAIN.replace("first.y", "first.zzz"))
    server = Server(root, ServerConfig())  # a worker process for every tenant
    server.start()
    backend = CountingBackend(server)
    with serving(backend, mode=request.param) as ports:
        yield Served(server, backend, ports)
        assert backend.settled(WAIT_S)
    server.stop()
    for name, counted in server.counters.by_tenant.items():
        assert sum(counted.outcomes.values()) == counted.arrived, name
    assert server._executor.kept == 0


@pytest.fixture(params=sorted(CLIENTS))
def triton(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


@pytest.fixture
def client(triton: Any, served: Served) -> Iterator[Any]:
    port = served.ports.http if triton is triton_http else served.ports.grpc
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as made:
        yield made


def test_answers(triton: Any, client: Any) -> None:
    x = x_of(rows=2)
    result = client.infer("chain", tensors(triton, {"x": x}), request_id="q1", priority=1, timeout=20_000_000)
    np.testing.assert_allclose(result.as_numpy("y"), chain(x)[0], rtol=1e-5)
    np.testing.assert_allclose(result.as_numpy("between"), chain(x)[1], rtol=1e-5)
    wanted = [triton.InferRequestedOutput("total")]
    result = client.infer("diamond", tensors(triton, {"x": x}), model_version="1", outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("total"), diamond(x), rtol=1e-5)


def test_tensors_as_json(served: Served) -> None:
    x = x_of(rows=2)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.ports.http}") as client:
        wanted = [triton_http.InferRequestedOutput("between", binary_data=False)]
        result = client.infer("chain", tensors(triton_http, {"x": x}, binary_data=False), outputs=wanted)
        np.testing.assert_allclose(result.as_numpy("between"), chain(x)[1], rtol=1e-5)
        assert result.as_numpy("y") is None
        words = np.array([b"one", b"", "zw\u00f6lf".encode()], np.object_)
        result = client.infer("wording", tensors(triton_http, {"words": words}, binary_data=False))
        assert result.as_numpy("same").tolist() == words.tolist()


def test_the_best_classes_of_an_output(triton: Any, client: Any) -> None:
    x = x_of()
    wanted = [triton.InferRequestedOutput("y", class_count=1)]
    [[best]] = client.infer("chain", tensors(triton, {"x": x}), outputs=wanted).as_numpy("y").tolist()
    assert best.decode().split(":")[1] == str(int(chain(x)[0].argmax()))


def test_what_clients_are_told(triton: Any, client: Any) -> None:
    assert client.is_model_ready("chain")
    assert not client.is_model_ready("wrong")
    options = {"as_json": True} if triton is triton_grpc else {}
    metadata = client.get_model_metadata("diamond", **options)
    assert metadata["platform"] == "ensemble"
    assert [(each["name"], each["datatype"]) for each in metadata["inputs"]] == [("x", "FP32")]
    config = client.get_model_config("diamond", **options)
    config = config.get("config", config)
    steps = config["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["twice", "thrice", "half", "join"]
    assert steps[1]["input_map"] == {"x": "start.y"}
    assert config["parameters"]["slo_ms"]["string_value"] == "20000"
    index = client.get_model_repository_index(**options)
    lines = {each["name"]: each for each in (index.get("models", []) if isinstance(index, dict) else index)}
    assert lines["chain"]["state"] == "READY"
    assert "has no output 'zzz', expected one of 'y'" in lines["wrong"]["reason"]
    stats = client.get_inference_statistics("chain", **options)["model_stats"]
    assert stats[0]["name"] == "chain"


def test_refusals_and_failures_carry_their_sentence(triton: Any, client: Any) -> None:
    for model, arrays, status, sentence in (
        ("chain", {"x": x_of(rows=5)}, ("400", "StatusCode.INVALID_ARGUMENT"), "batch of 5, expected 1 to 4"),
        ("wrong", {"x": x_of()}, ("503", "StatusCode.UNAVAILABLE"), "is not served"),
        ("hopeless", {"x": x_of(rows=2)}, ("503", "StatusCode.UNAVAILABLE"), "stage 'first'"),
        ("failing", {"x": x_of(), "index": np.array([77])}, ("500", "StatusCode.INTERNAL"), "stage 'pick'"),
    ):
        with pytest.raises(InferenceServerException, match=sentence) as caught:
            client.infer(model, tensors(triton, arrays))
        assert caught.value.status() in status


def test_loading_and_unloading(triton: Any, client: Any, served: Served) -> None:
    client.unload_model("wording")
    assert not client.is_model_ready("wording")
    client.load_model("wording")
    assert client.is_model_ready("wording")
    with pytest.raises(InferenceServerException, match="zzz"):
        client.load_model("wrong")


def test_a_stream_of_queries(served: Served) -> None:
    check_stream(served.ports.grpc)


def test_many_at_once(served: Served) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.ports.http}", concurrency=8) as client:
        calls = [client.async_infer("diamond", tensors(triton_http, {"x": x_of(seed, 2)})) for seed in range(40)]
        for seed, call in enumerate(calls):
            np.testing.assert_allclose(call.get_result().as_numpy("total"), diamond(x_of(seed, 2)), rtol=1e-5)


def test_calls_that_clients_give_up(served: Served) -> None:
    check_calls_given_up(served.ports.grpc)


def test_an_answer_carries_its_number(served: Served) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": x_of().ravel().tolist()}]}
    url = f"http://127.0.0.1:{served.ports.http}/v2/models/chain/infer"
    call = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=WAIT_S) as answer:
        assert int(answer.headers[QUERY_KEY]) >= 0
        outputs = {each["name"]: each for each in json.load(answer)["outputs"]}
    np.testing.assert_allclose(outputs["between"]["data"], 2 * softsign(x_of()).ravel(), rtol=1e-5)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_load_generator_takes_an_application_for_a_tenant(served: Served, protocol: str) -> None:
    text = f"""
seed = 1
duration_s = 0.5
[[tenant]]
model = "chain"
rate = 40
protocol = "{protocol}"
[[tenant]]
model = "diamond"
rate = 20
items = 2
protocol = "{protocol}"
"""
    assert served.backend.settled(WAIT_S)
    before = served.server.counters.by_tenant["chain"].outcomes[Outcome.ANSWERED]
    ports = served.ports
    result = asyncio.run(
        run_load(
            parse_workload(tomllib.loads(text)),
            http_url=f"http://127.0.0.1:{ports.http}",
            grpc_url=f"127.0.0.1:{ports.grpc}",
        )
    )
    lines = {line.tenant: line for line in result.summary.tenants}
    assert lines["chain"].offered > 0
    assert lines["chain"].slo_ns == 20_000_000_000
    assert lines["chain"].answered == lines["chain"].offered
    assert lines["diamond"].answered == lines["diamond"].offered
    assert served.backend.settled(WAIT_S)
    counted = served.server.counters.by_tenant["chain"]
    assert counted.outcomes[Outcome.ANSWERED] - before == lines["chain"].offered


def test_the_page_for_prometheus_has_a_row_of_the_application(served: Served) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.ports.http}/metrics", timeout=WAIT_S) as page:
        text = page.read().decode()
    assert 'cotenant_queries_total{outcome="rejected",tenant="hopeless"}' in text
    assert 'nv_inference_request_success{model="diamond"}' in text
