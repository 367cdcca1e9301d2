"""Memory that is used again: it never shows what it held before, and shared memory is one tenant's alone."""

from __future__ import annotations

import mmap
import os
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from cotenant.core.actions import Launch
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.protocol import LoadSpec
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.execute.worker.lane_link import LaneLink, Pending
from cotenant.execute.worker.shared_tensors import SharedBuffer
from cotenant.work import Work
from onnx_samples import Sketch, info
from repositories import X, scaled
from workers import CORE, OTHER, Host

POISON = 0xAB
ROUNDS = 60


def poison(buffer: SharedBuffer) -> int:
    """Overwrite all of a buffer; gives its size."""
    size = os.fstat(buffer.descriptor).st_size
    if size:
        with mmap.mmap(buffer.descriptor, size) as memory:
            memory[:] = bytes([POISON]) * size
    return size


def echo() -> onnx.ModelProto:
    """Numbers, halves of them as another type, and texts, as they come: three units."""
    s = Sketch()
    s.op("Softsign", s.op("MatMul", "x", s.constant(np.eye(6, dtype=np.float32))), out="soft")
    s.op("Cast", "x", out="whole", to=TensorProto.INT64)
    s.op("Identity", "text", out="said")
    return s.model(
        [info("x", ["batch", 6]), info("text", ["batch", 1], TensorProto.STRING)],
        [
            info("soft", ["batch", 6]),
            info("whole", ["batch", 6], TensorProto.INT64),
            info("said", ["batch", 1], TensorProto.STRING),
        ],
    )


def plain() -> onnx.ModelProto:
    """Of numbers alone, so that it is cut; its input is needed up to the end."""
    s = Sketch()
    x = s.op("MatMul", "x", s.constant(np.eye(6, dtype=np.float32)))
    x = s.op("MatMul", s.op("Softsign", x), s.constant(np.eye(6, dtype=np.float32)))
    s.op("Add", s.op("MatMul", x, s.constant(np.eye(6, dtype=np.float32))), "x", out="soft")
    return s.model([info("x", ["batch", 6])], [info("soft", ["batch", 6])])


def test_a_row_that_was_not_written_by_this_launch_is_never_answered(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both buffers of a lane are overwritten before each launch: batches of all sizes, whole and in segments."""
    overwritten: list[int] = []
    real = LaneLink._send

    def send(link: LaneLink, pending: Pending) -> None:
        overwritten.append(poison(link._inputs) + poison(link._outputs))
        real(link, pending)

    monkeypatch.setattr(LaneLink, "_send", send)
    host.load("echo", echo)
    host.load("plain", plain)
    units = {"echo": 1, "plain": host.units["plain"]}
    assert units["plain"] > 1
    rng, number = Random(3), 0
    for turn in range(ROUNDS):
        tenant = ("echo", "plain")[turn % 2]
        asked: dict[int, Any] = {}
        for _ in range(rng.randint(1, 4)):
            number += 1
            rows = rng.choice([1, 1, 2, 3, 40])
            inputs: dict[str, Any] = {"x": np.full((rows, 6), number, np.float32)}
            if tenant == "echo":
                words = [[f"{number} ".encode() * rng.choice([1, 2, 300])] for _ in range(rows)]
                inputs["text"] = np.array(words, np.object_)
            asked[number] = inputs
            host.executor.put(number, inputs)
        cuts = sorted({0, *rng.sample(range(units[tenant] + 1), min(2, units[tenant])), units[tenant]})
        items, lane = sum(len(inputs["x"]) for inputs in asked.values()), rng.choice([CORE, OTHER])
        for start, end in pairwise(cuts):
            number += 1
            last = end == units[tenant]
            launch = Launch(number, turn, tuple(asked), Work(tenant, 0, items, start, end), last, lane, 1)
            host.executor.start(launch, host._end)
            assert host.wait(number) == [None]
        for query, inputs in asked.items():
            got = host.executor.take(query)
            soft = inputs["x"] / (1 + inputs["x"])
            np.testing.assert_allclose(got["soft"], soft if tenant == "echo" else soft + inputs["x"], rtol=1e-5)
            if tenant == "echo":
                assert (got["whole"] == inputs["x"]).all()
                assert got["said"].tolist() == inputs["text"].tolist()
    assert max(overwritten) > 0


def shared_files(pid: int) -> set[int]:
    """The anonymous files that a process has open or mapped, by inode."""
    found: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # what lists the folder is closed by now
            if os.readlink(entry).startswith("/memfd:cotenant"):
                found.add(os.stat(entry).st_ino)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:cotenant" in line:
            found.add(int(line.split()[4]))
    return found


def test_shared_memory_of_one_tenant_is_never_open_in_another_ones_worker(host: Host) -> None:
    """Also not in one that is started, or started anew, while the other's buffers are in use."""
    before = shared_files(os.getpid())
    host.load("a", lambda: scaled(2.0))
    host.load("b", lambda: scaled(3.0))
    assert host.wait(host.start("a", 1, X), host.start("a", 2, X, OTHER), host.start("b", 3, X)) == [None] * 3
    first = shared_files(host.pid("a"))
    assert len(first) == 4  # inputs and outputs of two lanes
    assert len(shared_files(host.pid("b"))) == 2
    host.load("c", lambda: scaled(4.0))
    assert host.wait(host.start("c", 4, X)) == [None]
    os.kill(host.pid("b"), signal.SIGKILL)
    host.wait_resumed()
    assert host.wait(host.start("b", 5, X)) == [None]
    by_tenant = {name: shared_files(host.pid(name)) for name in "abc"}
    assert by_tenant["a"] == first
    assert [len(by_tenant[name]) for name in "bc"] == [2, 2]
    assert not by_tenant["a"] & by_tenant["b"]
    assert not by_tenant["a"] & by_tenant["c"]
    assert not by_tenant["b"] & by_tenant["c"]
    ours = shared_files(os.getpid()) - before  # nothing is left of the first b
    assert ours == by_tenant["a"] | by_tenant["b"] | by_tenant["c"]
    for query in (1, 2, 3, 4, 5):
        host.executor.discard(query)


ODD = [np.array(3.0, np.float32), np.arange(12, dtype=np.float32)[::2], np.zeros((0,), np.float32)]


class Plus(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("value", ODD, ids=["0-d", "strided", "empty"])
def test_arrays_of_odd_forms_keep_them_in_threads_and_on_streams(tmp_path: Path, value: Any) -> None:
    example = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
    path = tmp_path / "plus.pt2"
    torch.export.save(torch.export.export(Plus().eval(), (example,)), path)
    with TorchModel.open(path) as model:
        [got] = model.run(0, model.unit_count, {"x": value}).values()
        assert tuple(got.shape) == value.shape
        np.testing.assert_array_equal(got.numpy(), value + 1)
        executor = TorchExecutor(CpuStreams())
        executor.add_model("plus", executor.load_shared(model, LoadSpec((CORE,), (0, model.unit_count))))
        executor.put(0, {"x": value})
        ends: list[str | None] = []
        executor.start(
            Launch(0, 0, (0,), Work("plus", 0, 1, 0, model.unit_count), True, CORE, 1),
            lambda _, error, __: ends.append(error),
        )
        executor.close()
        assert ends == [None]
        [there] = executor.take(0).values()
        assert there.shape == value.shape
        np.testing.assert_array_equal(there, value + 1)
