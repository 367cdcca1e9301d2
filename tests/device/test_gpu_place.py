"""A configuration that asks for a GPU, with the CPU's streams in its place: profiled and served as on hardware."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from client import LoaderHere
from cotenant.config import DeviceSection, ServerConfig
from cotenant.errors import ConfigError
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.gpu import configured
from cotenant.execute.gpu.sm_ladder import SmGrid
from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.registry import open_executor
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.measure import sweep
from cotenant.measure.campaign import Journal
from cotenant.measure.contention_profile import calibrate
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort, measure_model
from cotenant.measure.sweep import profile_repository
from cotenant.profiles import device as profile_device
from cotenant.profiles.device import this_device
from cotenant.repository import find_versions
from cotenant.serve.server import Server
from cotenant.techniques.overlap.measure.measured_groups import GroupEffort, measure_groups
from cotenant.wire.api import InferRequest, InferResult
from cotenant.work import Share
from repositories import config
from torch_small import save_small, small_cnn

WAIT_S = 30.0
HALVES = DeviceSection(kind="cuda", isolation="thread", shares=(50.0, 50.0))
SETTINGS = ServerConfig(device=HALVES)
TINY = Effort(0.0, 3, 3, 1)


class Gpu(CpuStreams):
    """The CPU's streams, which note how the device was divided and whether it was let go."""

    opened: list[Gpu]

    def __init__(self, section: DeviceSection, partitions: Sequence[Share]) -> None:
        super().__init__()
        self.partitions = tuple(partitions)
        self.lanes: list[Share] = []
        self.is_closed = False
        self.opened.append(self)

    def lane(self, partition: Share) -> Any:
        self.lanes.append(partition)
        return super().lane(Share((0,)) if partition.cores != (0,) else partition)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[Gpu]:
    """Two shares of four SMs each, in place of what the driver would say."""
    Gpu.opened = []
    monkeypatch.setattr(configured, "_ask_driver", lambda *_: SmGrid(8, 4))
    monkeypatch.setattr(configured, "open_streams", Gpu)
    monkeypatch.setattr(sweep, "this_device", lambda _: this_device())
    return Gpu


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    (made / "cnn" / "1").mkdir(parents=True)
    save_small(tmp_path)
    shutil.copy(tmp_path / "cnn.pt2", made / "cnn" / "1" / "model.pt2")
    (made / "cnn" / "config.toml").write_text(config(max_batch=2, more="priority = 1\n"), encoding="utf-8")
    return made


def test_a_profile_has_the_sizes_of_the_shares_and_no_single_sm(gpu: type[Gpu], root: Path) -> None:
    told: list[str] = []
    before = os.sched_getaffinity(0)
    profile, errors = profile_repository(
        root,
        SETTINGS,
        TINY,
        fresh=True,
        on_step=lambda done, total, text: told.append(text),
        loader=LoaderHere(limit_s=120.0),
    )
    assert errors == {}
    assert {(point.items, point.cores) for point in profile.models["cnn"].points} == {(1, 4), (2, 4)}
    [device] = gpu.opened
    assert device.partitions == (Share((0, 1, 2, 3), "cuda:0"), Share((4, 5, 6, 7), "cuda:0"))
    assert device.is_closed
    assert "cnn: 2 rows on 4 SM(s)" in told
    assert os.sched_getaffinity(0) == before


def test_a_server_profiles_and_answers_on_the_streams(gpu: type[Gpu], root: Path) -> None:
    server = Server(root, SETTINGS)
    server.model_loader.loader_process = LoaderHere(limit_s=120.0)  # where the device is faked
    server.start()
    device, *of_loads = gpu.opened
    assert of_loads
    assert all(each.is_closed for each in of_loads)
    try:
        assert server.machine.devices[0].cores == tuple(range(8))
        executor: Any = server._executor
        assert isinstance(executor, TorchExecutor)
        image = np.random.default_rng(0).standard_normal((1, 3, 16, 16)).astype(np.float32)
        results: list[InferResult] = []
        answered = threading.Event()

        def done(result: InferResult) -> None:
            results.append(result)
            answered.set()

        server.submit(InferRequest("cnn", {"x": image}), done)
        assert answered.wait(WAIT_S)
        with torch.inference_mode():
            expected = small_cnn()(torch.from_numpy(image)).numpy()
        np.testing.assert_allclose(next(iter(results[0].outputs.values())), expected, rtol=1e-4, atol=1e-5)
        assert executor._models["cnn"].urgent, "it has a priority"
        assert re.search(rb'^cotenant_gpu_launches_total{how="eager"} [1-9]', server.metrics(), re.MULTILINE)
        assert {each.cores for each in device.lanes} <= {lane.cores for lane in server.lanes}
    finally:
        server.stop()
    assert device.is_closed


def test_without_a_gpu_the_reason_is_given(root: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"\[device\]: kind is 'cuda', but "):
        Server(root, SETTINGS)
    with pytest.raises(ConfigError, match=r"\[device\]: kind is 'cuda', but "):
        profile_repository(root, SETTINGS, TINY, fresh=True, on_step=lambda *_: None, loader=LoaderHere(limit_s=120.0))


def test_what_is_measured_on_cores_alone_says_so(gpu: type[Gpu], root: Path) -> None:
    profile, _ = profile_repository(
        root, SETTINGS, TINY, fresh=True, on_step=lambda *_: None, loader=LoaderHere(limit_s=120.0)
    )
    with pytest.raises(ConfigError, match="groups are measured on the CPU alone"):
        measure_groups(root, SETTINGS, profile, GroupEffort(), fresh=True, on_step=lambda *_: None)
    with pytest.raises(ConfigError, match="contention is measured on the CPU alone"):
        calibrate(root, SETTINGS, TINY)


def test_places(gpu: type[Gpu]) -> None:
    cores = open_executor(DeviceSection()).target
    assert isinstance(cores, CoreTarget)
    executor = open_executor(HALVES)
    streams = executor.target
    assert isinstance(streams, StreamTarget)
    assert streams.device == CpuStreams.name
    executor.close()


@pytest.mark.parametrize(("slo_ms", "floor_ms", "longest_ms"), [(500.0, 0.1, 10.0), (30.0, 0.1, 3.0), (30.0, 2.0, 6.0)])
def test_segments_are_a_part_of_the_slo_and_longer_than_launches_cost(
    gpu: type[Gpu], root: Path, monkeypatch: pytest.MonkeyPatch, slo_ms: float, floor_ms: float, longest_ms: float
) -> None:
    (root / "cnn" / "config.toml").write_text(config(max_batch=2, slo_ms=slo_ms), encoding="utf-8")
    monkeypatch.setattr(StreamTarget, "floor_ns", lambda *_: round(floor_ms * 1e6))
    monkeypatch.setattr(StreamTarget, "unit_ns", lambda _, model, *__: (1_000_000,) * model.unit_count)
    [found] = find_versions(root, "cnn")
    opened = replace(open_version(root, found), device="cuda:0")
    with closing(open_executor(HALVES)) as executor, closing(opened.runner) as runner:
        sweep = opened.sweep((Share((0, 1, 2, 3), "cuda:0"),), TINY)
        cuts = measure_model(runner, sweep, Journal(None), lambda _: None, executor.target).cuts
    assert max(end - start for start, end in pairwise(cuts)) <= longest_ms
    fewer = ceil(cuts[-1] / longest_ms)
    assert fewer <= len(cuts) - 1 <= 2 * fewer + 1


def test_a_launch_that_does_nothing_has_a_price_on_streams_alone(gpu: type[Gpu]) -> None:
    with closing(open_executor(HALVES)) as executor:
        assert executor.target.floor_ns(Share((0, 1, 2, 3), "cuda:0")) > 0
    with closing(open_executor(DeviceSection(isolation="thread"))) as cores:
        assert cores.target.floor_ns(Share((0,))) == 0


def test_a_gpu_is_another_device_with_other_bindings_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="Fake GPU", multi_processor_count=132, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    found = {}
    for installed in ("", "13.0.3", "13.5.0"):

        def version(package: str, installed: str = installed) -> str:
            if package == "cuda-bindings":
                if installed:
                    return installed
                raise PackageNotFoundError(package)
            return metadata.version(package)

        monkeypatch.setattr(profile_device, "version", version)
        found[installed] = this_device("cuda:0")
        assert found[installed].versions["cuda-bindings"] == (installed or "none")
        assert (found[installed].processor, found[installed].cores) == ("Fake GPU", 132)
    assert len({each.fingerprint for each in found.values()}) == 3
