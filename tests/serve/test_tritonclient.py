"""Unmodified tritonclient, in its four forms, against both front-ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from cotenant.wire.codec import DTYPES
from fake_backend import MODES, CountingBackend, FakeBackend, Ports, identity_name, sample, serving

SYNC = {"http": triton_http, "grpc": triton_grpc}
ASYNC = {"http": triton_http_aio, "grpc": triton_grpc_aio}
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture(scope="module")
def backend() -> Iterator[CountingBackend]:
    inner = FakeBackend()
    backend = CountingBackend(inner)
    yield backend
    assert backend.settled()
    inner.close()


@pytest.fixture(scope="module", params=MODES)
def ports(request: pytest.FixtureRequest, backend: CountingBackend) -> Iterator[Ports]:
    with serving(backend, mode=request.param) as ports:
        yield ports


@pytest.fixture
def client(protocol: str, ports: Ports) -> Iterator[Any]:
    options = {"concurrency": 4} if protocol == "http" else {}
    client = SYNC[protocol].InferenceServerClient(f"127.0.0.1:{getattr(ports, protocol)}", **options)
    yield client
    client.close()


def tensor(module: Any, datatype: str, array: Any, name: str = "x", **options: Any) -> Any:
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **options)
    return made


@protocols
@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (2, 0)])
def test_round_trip_of_every_datatype(client: Any, protocol: str, datatype: str, shape: tuple[int, ...]) -> None:
    array = sample(datatype, shape)
    result = client.infer(identity_name(datatype), [tensor(SYNC[protocol], datatype, array)], request_id="r1")
    found = result.as_numpy("y")
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()
    response = result.get_response()
    assert (response["id"] if protocol == "http" else response.id) == "r1"


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("FP16", "BF16")])
@pytest.mark.parametrize("binary_out", [False, True])
def test_json_tensors(ports: Ports, datatype: str, binary_out: bool) -> None:
    array = sample(datatype)
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        given = tensor(triton_http, datatype, array, binary_data=False)
        wanted = [triton_http.InferRequestedOutput("y", binary_data=binary_out)]
        found = client.infer(identity_name(datatype), [given], outputs=wanted).as_numpy("y")
    expected = [[item.decode() for item in row] for row in array] if datatype == "BYTES" else array.tolist()
    if datatype == "BYTES" and binary_out:
        expected = array.tolist()
    assert found.tolist() == expected


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_compression(ports: Ports, algorithm: str) -> None:
    array = sample("FP32", (64, 64))
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        result = client.infer(
            "identity_fp32",
            [tensor(triton_http, "FP32", array)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    assert (result.as_numpy("y") == array).all()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_grpc_compression(ports: Ports, algorithm: str) -> None:
    array = sample("FP32", (64, 64))
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        result = client.infer("identity_fp32", [tensor(triton_grpc, "FP32", array)], compression_algorithm=algorithm)
    assert (result.as_numpy("y") == array).all()


@protocols
def test_control(client: Any, protocol: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("inline", "1")
    if protocol == "grpc":  # over HTTP the client sends the slash of a name unquoted
        assert client.is_model_ready("model with/odd name")
    options = {} if protocol == "http" else {"as_json": True}
    assert client.get_server_metadata(**options)["name"] == "cotenant"
    assert [entry["name"] for entry in client.get_model_metadata("add_sub", **options)["inputs"]] == ["a", "b"]
    config = client.get_model_config("add_sub", **options)
    assert config.get("config", config)["max_batch_size"] == 8
    stats = client.get_inference_statistics("tiny", **options)["model_stats"]
    assert [entry["name"] for entry in stats] == ["tiny"]
    index = client.get_model_repository_index(**options)
    names = {entry["name"] for entry in (index if protocol == "http" else index["models"])}
    assert {"tiny", "broken"} <= names
    client.unload_model("drop")
    assert not client.is_model_ready("drop")
    client.load_model("drop")
    assert client.is_model_ready("drop")


@protocols
@pytest.mark.parametrize(
    ("model", "fragment"),
    [
        ("unknown", "unknown"),
        ("fail", "division by zero"),
        ("drop", "deadline passed"),
        ("identity_int8", "expected INT8"),
        ("crash", "internal error"),
    ],
)
def test_errors_carry_the_sentence(client: Any, protocol: str, model: str, fragment: str) -> None:
    with pytest.raises(InferenceServerException, match=fragment) as caught:
        client.infer(model, [tensor(SYNC[protocol], "FP32", np.ones((1, 4), np.float32))])
    assert "Traceback" not in caught.value.message()


@protocols
def test_shared_memory_is_refused(client: Any, protocol: str) -> None:
    with pytest.raises(InferenceServerException, match="shared memory is not supported"):
        client.register_system_shared_memory("r", "/r", 16)
    given = SYNC[protocol].InferInput("x", [1, 4], "FP32")
    given.set_shared_memory("r", 16)
    with pytest.raises(InferenceServerException, match="shared memory is not supported"):
        client.infer("identity_fp32", [given])


@protocols
def test_classification_and_options(backend: CountingBackend, client: Any, protocol: str) -> None:
    module: Any = SYNC[protocol]
    wanted = [module.InferRequestedOutput("y", class_count=2)]
    given = [tensor(module, "FP32", np.arange(32, dtype=np.float32).reshape(2, 16))]
    result = client.infer("tiny", given, outputs=wanted, priority=2, timeout=5_000_000, sequence_id=4)
    assert result.as_numpy("y").tolist() == [[b"15.000000:15", b"14.000000:14"], [b"31.000000:15", b"30.000000:14"]]
    seen = backend._backend.requests[-1]  # type: ignore[attr-defined]
    assert (seen.priority, seen.timeout_ns, seen.outputs) == (2, 5_000_000_000, ("y",))


@pytest.mark.parametrize("outputs", [["difference"], ["difference", "sum"]])
@protocols
def test_two_inputs_and_chosen_outputs(client: Any, protocol: str, outputs: list[str]) -> None:
    module: Any = SYNC[protocol]
    a, b = np.full((2, 4), 7, np.int32), np.full((2, 4), 2, np.int32)
    given = [tensor(module, "INT32", b, "b"), tensor(module, "INT32", a, "a")]
    result = client.infer("add_sub", given, outputs=[module.InferRequestedOutput(name) for name in outputs])
    assert (result.as_numpy("difference") == 5).all()
    assert (result.as_numpy("sum") is None) == ("sum" not in outputs)


def test_http_async_infer(ports: Ports) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}", concurrency=4) as client:
        arrays = [np.full((1, 16), number, np.float32) for number in range(40)]
        calls = [client.async_infer("tiny", [tensor(triton_http, "FP32", array)]) for array in arrays]
        for call, array in zip(calls, arrays, strict=True):
            assert (call.get_result().as_numpy("y") == array).all()


def test_grpc_async_infer(ports: Ports) -> None:
    results: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        for number in range(40):
            array = np.full((1, 16), number, np.float32)
            client.async_infer(
                "tiny",
                [tensor(triton_grpc, "FP32", array)],
                callback=lambda result, error: results.put((result, error)),
                request_id=str(number),
            )
        for _ in range(40):
            result, error = results.get(timeout=20)
            assert error is None
            assert (result.as_numpy("y") == float(result.get_response().id)).all()


def test_grpc_stream(ports: Ports) -> None:
    results: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        given = [tensor(triton_grpc, "FP32", np.ones((1, 4), np.float32))]
        for number, model in enumerate(["identity_fp32", "fail", "identity_fp32"]):
            client.async_stream_infer(model, given, request_id=str(number))
        seen = [results.get(timeout=20) for _ in range(3)]
        client.stop_stream()
    answered = sorted(result.get_response().id for result, error in seen if error is None)
    assert answered == ["0", "2"]
    assert [error.message() for _, error in seen if error is not None] == ["the model raised: division by zero"]


@protocols
def test_aio_clients(ports: Ports, protocol: str) -> None:
    module: Any = ASYNC[protocol]
    tensors: Any = SYNC[protocol]

    async def talk() -> None:
        async with module.InferenceServerClient(f"127.0.0.1:{getattr(ports, protocol)}") as client:
            assert await client.is_server_ready()
            arrays = [np.full((1, 16), number, np.float32) for number in range(20)]
            results = await asyncio.gather(
                *[client.infer("tiny", [tensor(tensors, "FP32", array)]) for array in arrays]
            )
            for result, array in zip(results, arrays, strict=True):
                assert (result.as_numpy("y") == array).all()
            with pytest.raises(InferenceServerException, match="division by zero"):
                await client.infer("fail", [tensor(tensors, "FP32", np.ones((1, 4), np.float32))])

    asyncio.run(talk())


def test_grpc_aio_stream(ports: Ports) -> None:
    async def talk() -> list[tuple[str, str]]:
        async def requests() -> Any:
            for number, model in enumerate(["inline", "drop", "inline"]):
                given = [tensor(triton_grpc, "FP32", np.ones((1, 4), np.float32))]
                yield {"model_name": model, "inputs": given, "request_id": str(number)}

        found = []
        async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            async for result, error in client.stream_infer(requests()):
                found.append((result.get_response().id, "") if error is None else ("", error.message()))
        return found

    found = asyncio.run(talk())
    assert sorted(id_ for id_, _ in found) == ["", "0", "2"]
    assert [text for _, text in found if text] == ["the deadline passed while the query was queued"]
