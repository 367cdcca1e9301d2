"""BF16 on every way from a client to an engine and back: the same bits, or a sentence."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import Client
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.worker.shared_tensors import SharedBuffer
from cotenant.serve import server as server_module
from cotenant.serve.server import Server
from fake_backend import MODES, Ports, serving
from onnx_samples import Sketch, info
from repositories import config, write_model

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TEXT = config(max_batch=4) + "[segments]\nmax_ms = 0.001\n"


def numbers(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype(BFLOAT16)


class Brain(nn.Module):
    """Layers that compute in BF16, so that there is something to cut; FP32 beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]).to(torch.bfloat16)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"y": x, "z": x.float() * w}


def brain() -> Brain:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Brain().eval()


def expected(x: Any, w: Any) -> tuple[Any, Any]:
    with torch.inference_mode():
        found = brain()(torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16), torch.from_numpy(w))
    return found["y"].float().numpy().astype(BFLOAT16), found["z"].numpy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("brain") / "models"
    write_model(made, "brain", TEXT, {})
    (made / "brain" / "1").mkdir()
    example = {"x": torch.zeros(2, 8, dtype=torch.bfloat16), "w": torch.zeros(2, 8)}
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(brain(), (), example, dynamic_shapes={name: {0: batch} for name in example})
    torch.export.save(program, made / "brain" / "1" / "model.pt2")
    return made


@pytest.fixture(scope="module", params=["process", "thread", "streams"])
def server(request: Any, root: Path) -> Iterator[Server]:
    isolation = "thread" if request.param == "streams" else request.param
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "streams":
            executor = TorchExecutor(CpuStreams())
            patch.setattr(server_module, "open_executor", lambda *_: executor)
        made = Server(root, ServerConfig(device=DeviceSection(isolation=isolation)))
    made.start()
    yield made
    made.stop()


def test_answers_are_those_of_torch_one_by_one_and_merged(server: Server) -> None:
    assert [(each.name, each.state, each.reason) for each in server.index(False)] == [("brain", "READY", "")]
    client = Client(server)
    inputs = [(numbers(rows, rows), numbers(rows, 9).astype(np.float32)) for rows in (1, 2, 1, 1, 3, 1)]
    asked = [client.submit("brain", {"x": x, "w": w}) for x, w in inputs]
    for (x, w), result in zip(inputs, client.wait(*asked), strict=True):
        assert result.reason == ""
        assert [array.dtype for array in result.outputs.values()] == [BFLOAT16, np.float32]
        for array, right in zip(result.outputs.values(), expected(x, w), strict=True):
            np.testing.assert_allclose(array.astype(np.float32), right.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.fixture(params=MODES)
def ports(request: pytest.FixtureRequest, server: Server) -> Iterator[Ports]:
    with serving(server, mode=request.param) as ports:
        yield ports


def test_clients_send_and_receive_it_as_binary_data(ports: Ports) -> None:
    x, w = numbers(2), np.ones((2, 8), np.float32)
    y = expected(x, w)[0].astype(np.float32)
    request = service_pb2.ModelInferRequest(model_name="brain", raw_input_contents=[x.tobytes(), w.tobytes()])
    request.inputs.add(name="x", datatype="BF16", shape=x.shape)
    request.inputs.add(name="w", datatype="FP32", shape=w.shape)
    request.outputs.add(name="y")
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert (answer.outputs[0].name, answer.outputs[0].datatype) == ("y", "BF16")
    found = np.frombuffer(answer.raw_output_contents[0], BFLOAT16).reshape(2, 8)
    np.testing.assert_allclose(found.astype(np.float32), y, rtol=0.02, atol=0.02)

    connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=20)
    sizes = {"binary_data_size": x.nbytes}, {"binary_data_size": w.nbytes}
    inputs = [
        {"name": "x", "datatype": "BF16", "shape": x.shape, "parameters": sizes[0]},
        {"name": "w", "datatype": "FP32", "shape": w.shape, "parameters": sizes[1]},
    ]
    for binary, status in ((True, 200), (False, 400)):
        outputs = [{"name": "y", "parameters": {"binary_data": binary}}]
        head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection.request("POST", "/v2/models/brain/infer", head + x.tobytes() + w.tobytes(), headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status == status
        if binary:
            raw = content[int(response.headers["inference-header-content-length"]) :]
            np.testing.assert_array_equal(np.frombuffer(raw, BFLOAT16).reshape(2, 8), found)
        else:
            assert b"BF16 has no JSON form" in content
    connection.close()


def test_it_crosses_shared_memory_by_its_bits() -> None:
    buffer = SharedBuffer.create("test")
    first, second = numbers(2), numbers(3, 1)
    tensors = {"x": [first, second], "w": [np.arange(5)], "one": [np.array(1.5, BFLOAT16)]}
    for _ in range(2):
        layouts = buffer.write(tensors)
        found = buffer.read(layouts, copy=True)
        assert [array.dtype for array in found.values()] == [BFLOAT16, np.int64, BFLOAT16]
        np.testing.assert_array_equal(found["x"].view(np.uint16), np.concatenate([first, second]).view(np.uint16))
        assert (found["one"].shape, found["one"].item()) == ((), 1.5)
    buffer.close()


def cast(given: int, inner: int, taken: int) -> onnx.ModelProto:
    s = Sketch()
    s.op("Cast", s.op("Cast", "x", to=inner), to=taken, out="y")
    return s.model([info("x", ["batch", 8], given)], [info("y", ["batch", 8], taken)])


def test_onnx_models_that_exchange_it_say_so_and_others_compute_with_it(tmp_path: Path) -> None:
    root = tmp_path / "models"
    wide, brain = TensorProto.FLOAT, TensorProto.BFLOAT16
    write_model(root, "takes", config(), {1: lambda: cast(brain, wide, wide)})
    write_model(root, "gives", config(), {1: lambda: cast(wide, wide, brain)})
    write_model(root, "inside", config(), {1: lambda: cast(wide, brain, wide)})
    server = Server(root, ServerConfig(device=DeviceSection(isolation="thread")))
    server.start()
    reasons = {each.name: each.reason for each in server.index(False)}
    assert reasons["inside"] == ""
    for name, tensor in (("takes", "x"), ("gives", "y")):
        assert f"'{tensor}' is a tensor(bfloat16), which onnxruntime does not exchange" in reasons[name]
    x = numbers(1).astype(np.float32) * np.float32(1.001)
    answer = Client(server).ask("inside", {"x": x})
    np.testing.assert_array_equal(answer.outputs["y"], x.astype(BFLOAT16).astype(np.float32))
    server.stop()
