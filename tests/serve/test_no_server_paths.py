"""No error that a client can get names a path of the server: through HTTP and gRPC, whatever is wrong."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from client import WAIT_S, started
from cotenant.config import DeviceSection
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.server import Server
from repositories import BAD, config, fixed, scaled, write_bad, write_good, write_model

PATH = re.compile(r"(?<![\w.\]])/(?:tmp|root|home|usr|var|opt|etc|proc|dev|work|private)\b")
SERVICE = "/inference.GRPCInferenceService"
APPLICATION = """
[application]
slo_ms = 100
outputs = { y = "a.y" }
[[application.stage]]
name = "a"
model = "%s"
inputs = { x = "x" }
"""


class Asked:
    """A server whose repository is broken in many ways, and all that its clients were told."""

    def __init__(self, root: Path, server: Server) -> None:
        self.root = root
        self._web, self._rpc = HttpServer(server, port=0), GrpcServer(server, port=0)
        self._port = self._web.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._rpc.start()}")

    def close(self) -> None:
        self._channel.close()
        self._rpc.stop(0.1)
        self._web.stop(0.1)

    def http(self, method: str, path: str, body: bytes = b"", **fields: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in fields.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def grpc(self, method: str, message: Any) -> str:
        call = self._channel.unary_unary(f"{SERVICE}/{method}")
        try:
            return repr(call(message.SerializeToString(), timeout=WAIT_S))
        except grpc.RpcError as error:
            return f"{error.details()} {error.trailing_metadata()}"


@pytest.fixture(scope="module", params=["process", "thread"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    root = write_bad(write_good(tmp_path_factory.mktemp("paths") / "models", "two", "chooser"))
    write_model(root, "half", config(), {1: fixed, 2: b"this is no model"})
    write_model(root, "folder", config(), {1: lambda: scaled(2.0)})
    (root / "folder" / "1" / "model.onnx").unlink()
    (root / "folder" / "1" / "model.onnx").mkdir()
    write_model(root, "link", config(), {1: lambda: scaled(2.0)})
    (root / "link" / "1" / "model.onnx").unlink()
    (root / "link" / "1" / "model.onnx").symlink_to(root / "nowhere.onnx")
    write_model(root, "samples", config() + '[samples.x]\nfile = "../../secret.bin"\n', {1: lambda: scaled(2.0)})
    write_model(root, "torch", config(), {1: lambda: scaled(2.0)})
    (root / "torch" / "1" / "model.onnx").rename(root / "torch" / "1" / "model.pt2")
    for name, stage in (("app", "nowhere"), ("app2", "broken_file")):
        (root / name).mkdir()
        (root / name / "config.toml").write_text(APPLICATION % stage)
    server = started(root, device=DeviceSection(isolation=request.param))
    made = Asked(root, server)
    yield made
    made.close()
    server.stop()


def assert_clean(asked: Asked, *texts: str) -> None:
    for text in texts:
        assert str(asked.root.parent) not in text
        assert not PATH.search(text), text
        assert "Traceback" not in text


NAMES = (*BAD, "half", "folder", "link", "samples", "torch", "app", "app2", "nowhere", "..", "../two", "two")


@pytest.mark.parametrize("model", NAMES)
def test_loads_and_calls_about_a_model_name_no_path(asked: Asked, model: str) -> None:
    quoted = model.replace("/", "%2F")
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [0.5] * 8}]}).encode()
    texts = [
        asked.http("POST", f"/v2/repository/models/{quoted}/load")[1],
        asked.http("POST", f"/v2/models/{quoted}/infer", body)[1],
        *[asked.http("GET", f"/v2/models/{quoted}{part}")[1] for part in ("", "/ready", "/config", "/stats")],
        asked.http("GET", f"/v2/models/{quoted}/versions/2")[1],
        asked.grpc("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=model)),
        asked.grpc("ModelMetadata", service_pb2.ModelMetadataRequest(name=model)),
        asked.grpc("ModelConfig", service_pb2.ModelConfigRequest(name=model)),
        asked.grpc("ModelInfer", service_pb2.ModelInferRequest(model_name=model)),
    ]
    if model not in ("two", "..", "half"):
        texts.append(asked.http("POST", f"/v2/repository/models/{quoted}/unload")[1])
    assert_clean(asked, *texts)


def test_the_index_and_statistics_name_no_path(asked: Asked) -> None:
    index = asked.http("POST", "/v2/repository/index")[1]
    assert "UNAVAILABLE" in index
    assert_clean(
        asked,
        index,
        asked.http("GET", "/v2/models/stats")[1],
        asked.http("GET", "/v2/cotenant/plan")[1],
        asked.grpc("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
        asked.grpc("ModelStatistics", service_pb2.ModelStatisticsRequest()),
    )


REQUESTS: dict[str, Callable[[Asked], str]] = {
    "no JSON": lambda asked: asked.http("POST", "/v2/models/two/infer", b"{")[1],
    "no input": lambda asked: asked.http("POST", "/v2/models/two/infer", b'{"inputs":[]}')[1],
    "bad gzip": lambda asked: asked.http("POST", "/v2/models/two/infer", b"{}", content_encoding="gzip")[1],
    "bad encoding": lambda asked: asked.http("POST", "/v2/models/two/infer", b"{}", content_encoding="br")[1],
    "bad path": lambda asked: asked.http("GET", "/v2/%2Fx%2Fshadow")[1],
    "override": lambda asked: asked.http("POST", "/v2/repository/models/two/load", b'{"parameters":{"config":"{}"}}')[
        1
    ],
    "shared memory": lambda asked: asked.http("GET", "/v2/systemsharedmemory/status")[1],
    "a model that raises": lambda asked: asked.http("POST", "/v2/models/chooser/infer", _index(99))[1],
    "a model that raises, gRPC": lambda asked: asked.grpc("ModelInfer", _index_message(99)),
}


def _index(at: int) -> bytes:
    tensor = {"name": "index", "datatype": "INT64", "shape": [1], "data": [at]}
    return json.dumps({"inputs": [tensor]}).encode()


def _index_message(at: int) -> Any:
    made = service_pb2.ModelInferRequest(model_name="chooser")
    made.inputs.add(name="index", datatype="INT64", shape=[1])
    made.raw_input_contents.append(np.array([at]).tobytes())
    return made


@pytest.mark.parametrize("what", REQUESTS)
def test_bad_requests_name_no_path(asked: Asked, what: str) -> None:
    text = REQUESTS[what](asked)
    assert "error" in text.lower()
    assert_clean(asked, text)


def test_files_that_go_while_the_server_runs_name_no_path(asked: Asked) -> None:
    shutil.rmtree(asked.root / "half" / "2")
    (asked.root / "half" / "config.toml").unlink()
    texts = [asked.http("POST", "/v2/repository/models/half/load")[1]]
    moved = asked.root.with_name("moved")
    asked.root.rename(moved)
    try:
        texts.append(asked.http("POST", "/v2/repository/models/two/load")[1])
        texts.append(asked.grpc("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="two")))
        texts.append(asked.http("POST", "/v2/repository/index")[1])
    finally:
        moved.rename(asked.root)
    assert_clean(asked, *texts)
