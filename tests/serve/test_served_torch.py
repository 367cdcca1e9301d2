"""A torch.export archive beside an ONNX file of the same network: profiled and served by one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from client import Client, started
from cotenant.config import DeviceSection, ServerConfig
from cotenant.measure import opened_model
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.device import this_device
from cotenant.repository import find_versions
from cotenant.serve.server import Server
from onnx_samples import Sketch, info
from repositories import config, write_model

TEXT = config(max_batch=4) + "[segments]\nmax_ms = 0.001\n"


class Net(nn.Module):
    """Three layers, so that there is something to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"y": x, "half": x[:, :4]}


def twins(root: Path) -> None:
    """The same network as `as_torch` and `as_onnx`."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Net().eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    write_model(root, "as_torch", TEXT, {})
    (root / "as_torch" / "1").mkdir()
    program = torch.export.export(net, (), {"x": torch.zeros(2, 8)}, dynamic_shapes=batch)
    torch.export.save(program, root / "as_torch" / "1" / "model.pt2")
    s, name = Sketch(), "x"
    for position, layer in enumerate(net.layers):
        assert isinstance(layer, nn.Linear)
        weight, bias = (s.constant(each.detach().numpy()) for each in (layer.weight.T.contiguous(), layer.bias))
        name = s.op("Tanh", s.op("Gemm", name, weight, bias), **({"out": "y"} if position == 2 else {}))
    bounds = [s.constant(np.array([value])) for value in (0, 4, 1)]
    s.op("Slice", "y", *bounds, out="half")
    outputs = [info("y", ["batch", 8]), info("half", ["batch", 4])]
    write_model(root, "as_onnx", TEXT, {1: lambda: s.model([info("x", ["batch", 8])], outputs)})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    twins(folder)
    return folder


def sections(isolation: Any) -> dict[str, Any]:
    return {"device": DeviceSection(isolation=isolation)}


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_both_formats_answer_alike_in_one_server(root: Path, isolation: str) -> None:
    server: Server = started(root, **sections(isolation))
    try:
        assert [(each.name, each.state, each.reason) for each in server.index(False)] == [
            ("as_onnx", "READY", ""),
            ("as_torch", "READY", ""),
        ]
        client = Client(server)
        for seed, rows in enumerate((1, 3, 4)):
            x = np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)
            onnx_answer, torch_answer = (client.ask(name, {"x": x}) for name in ("as_onnx", "as_torch"))
            assert (onnx_answer.reason, torch_answer.reason) == ("", "")
            assert list(torch_answer.outputs) == ["y", "half"]
            for name, array in onnx_answer.outputs.items():
                np.testing.assert_allclose(torch_answer.outputs[name], array, rtol=1e-5, atol=1e-6)
        meta = server.metadata("as_torch", "")
        assert (meta.platform, server.config("as_torch", "")["backend"]) == ("pytorch_libtorch", "pytorch")
        assert server.metadata("as_onnx", "").platform == "onnxruntime_onnx"
        assert [(spec.name, spec.datatype, spec.shape) for spec in meta.inputs] == [("x", "FP32", (-1, 8))]
        assert int(server.config("as_torch", "")["parameters"]["segments"]["string_value"]) == 4
    finally:
        server.stop()


def test_profiles_hold_for_one_version_of_torch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(budget_s=0.0, min_runs=2, max_runs=2, warm_up=0)
    profile, errors = profile_repository(root, ServerConfig(), effort, fresh=True, on_step=lambda *_: None)
    assert errors == {}
    found = profile.models["as_torch"]
    assert len(found.unit_ns) == 4
    assert found.cuts[-1] == 4
    assert {point.items for point in found.points} == {1, 2, 4}
    assert profile.device.versions["torch"] == torch.__version__

    def valid() -> list[bool]:
        opened = [opened_model.open_version(root, find_versions(root, name)[0]) for name in ("as_torch", "as_onnx")]
        for each in opened:
            each.runner.close()
        return [opened_model.is_of(profile.models[each.found.tenant], profile.device, each) for each in opened]

    assert valid() == [True, True]
    here = this_device()
    other = type(here)(
        *(getattr(here, name) for name in ("processor", "cores", "memory_bytes", "system")),
        {**here.versions, "torch": "1.0"},
        here.fingerprint,
    )
    monkeypatch.setattr(opened_model, "this_device", lambda *_: other)
    assert valid() == [False, True]


def test_a_broken_archive_stays_in_the_index(tmp_path: Path) -> None:
    twins(tmp_path)
    (tmp_path / "as_torch" / "1" / "model.pt2").write_bytes(b"this is no model")
    server = started(tmp_path, **sections("process"))
    try:
        states = {entry.name: (entry.state, entry.reason) for entry in server.index(False)}
        assert states["as_onnx"] == ("READY", "")
        assert states["as_torch"][0] == "UNAVAILABLE"
        assert "no complete torch.export archive" in states["as_torch"][1]
    finally:
        server.stop()


def test_the_twins_are_twins(root: Path) -> None:
    model = onnx.load(root / "as_onnx" / "1" / "model.onnx")
    assert sum(numpy_helper.to_array(each).size == 64 for each in model.graph.initializer) == 3
