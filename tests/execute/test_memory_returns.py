"""Memory that one launch needed and those after it do not: shared buffers, the arena of a worker, and large answers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from client import Client, assert_balanced, started
from cotenant.config import ServerSection
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.memory_watch import MemoryWatch
from cotenant.execute.worker.shared_tensors import SharedBuffer
from cotenant.serve.server import Server
from cotenant.types import Outcome
from onnx_samples import info
from repositories import config, write_model

MIB = 1 << 20
CALM = 16


def pages(buffer: SharedBuffer) -> int:
    """Bytes of a buffer that have pages."""
    return os.fstat(buffer.descriptor).st_blocks * 512


# --- shared buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_buffer_keeps_what_its_last_writes_needed_and_every_tensor_is_read_as_it_was_written(seed: int) -> None:
    rng = random.Random(seed)
    ours = SharedBuffer.create("test")
    theirs = SharedBuffer(os.dup(ours.descriptor))
    forms = [rng.choice((3, 500, 70_000, 300_000, MIB, 5 * MIB)) for _ in range(5)]
    for number in range(100):
        if number == 60:
            forms = [50, 60_000]
        size = rng.choice(forms)
        tensors: dict[str, Any] = {"x": [np.full(size, number % 251, np.uint8)]}
        if rng.random() < 0.3:
            tensors["text"] = [np.array([b"a" * (number % 7), b"b"], np.object_)]
        if rng.random() < 0.3:
            tensors["y"] = [np.full((2, size // 2), number % 13, np.uint8)] * 2
        found = theirs.read(ours.write(tensors), copy=bool(number % 2))
        for name, pieces in tensors.items():
            np.testing.assert_array_equal(found[name], np.concatenate(pieces))
    assert pages(ours) <= MIB
    ours.close()
    theirs.close()


def test_a_buffer_whose_pages_went_back_reserves_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the system does not have is an error of that write and no signal later, for known forms too."""
    buffer = SharedBuffer.create("test")
    large = {"x": [np.ones(8 * MIB, np.uint8)]}
    buffer.write(large)
    for _ in range(CALM):
        buffer.write({"x": [np.ones(10, np.uint8)]})
    assert pages(buffer) <= MIB
    reserved: list[int] = []
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: (reserved.append(a[2]), real(*a)))
    buffer.write(large)
    assert reserved == [8 * MIB]
    assert pages(buffer) == 8 * MIB
    buffer.close()


# --- the arena --------------------------------------------------------------------------------------------------------


def launches(watch: MemoryWatch, base: int, needs: Iterator[int]) -> list[int]:
    """Private bytes after each launch of a process that keeps what it took until it shrinks, and never less than it
    needs."""
    held, found, shrinks = base, [], False
    for need in needs:
        held = max(need, base) if shrinks else max(held, need)
        shrinks = watch.ended(held)
        found.append(held)
    return found


@pytest.mark.parametrize("seed", range(50))
def test_what_one_launch_took_goes_and_what_launches_take_stays(seed: int) -> None:
    rng = random.Random(seed)
    base, usual = 100 * MIB, rng.choice((110, 140, 400)) * MIB
    watch = MemoryWatch()
    assert not watch.ended(base)
    steady = launches(watch, base, (rng.randrange(base, usual) for _ in range(3000)))
    drops = sum(later < earlier - 10 * MIB for earlier, later in pairwise(steady))
    assert drops <= 12  # each time twice as many launches have to pass
    once = launches(watch, base, iter([3000 * MIB] + [usual] * (1 << 17)))
    assert once[0] == 3000 * MIB
    assert once[-1] <= usual + 64 * MIB


def test_without_figures_of_the_system_nothing_shrinks() -> None:
    watch = MemoryWatch()
    assert not any(watch.ended(0) for _ in range(100))


# --- a server ---------------------------------------------------------------------------------------------------------


def sized() -> onnx.ModelProto:
    """Makes as many numbers as it is asked for, in a few kernels."""
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["z"], value=helper.make_tensor("v", TensorProto.FLOAT, [1], [0.5])),
        helper.make_node("Exp", ["z"], ["e"]),
        helper.make_node("Neg", ["e"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "sized", [info("n", [1], TensorProto.INT64)], [info("y", [None])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SAMPLES = "\n[samples.n]\nvalues = [8]\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_model(tmp_path / "models", "sized", config() + SAMPLES, {1: sized})
    made = started(tmp_path / "models", server=ServerSection(max_answer_mib=100))
    yield made
    made.stop()


def held(server: Server) -> int:
    assert isinstance(server._executor, ProcessExecutor)
    [worker] = server._executor.workers()
    return worker.resident_bytes


def test_a_worker_gives_back_what_a_large_answer_took(server: Server) -> None:
    client = Client(server)

    def ask(count: int) -> Any:
        return client.ask("sized", {"n": np.array([count])}, timeout_ns=60_000_000_000)

    for _ in range(5):
        ask(100)
    before = held(server)
    assert len(ask(20 * MIB).outputs["y"]) == 20 * MIB  # 80 MiB
    assert held(server) > before + 150 * MIB
    for _ in range(200):
        result = ask(100)
        assert result.outcome in (Outcome.ANSWERED, Outcome.LATE), result
        np.testing.assert_allclose(result.outputs["y"], np.full(100, -np.exp(np.float32(0.5))))
    assert held(server) < before + 40 * MIB
    assert_balanced(server)


def test_an_answer_beyond_the_limit_fails_alone_before_the_server_copies_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server)
    read: list[int] = []
    real = SharedBuffer.read

    def reading(self: SharedBuffer, layouts: Any, *, copy: bool) -> Any:
        read.append(sum(each.nbytes for each in layouts))
        return real(self, layouts, copy=copy)

    monkeypatch.setattr(SharedBuffer, "read", reading)
    long = {"timeout_ns": 60_000_000_000}
    numbers = [client.submit("sized", {"n": np.array([count])}, **long) for count in (50, 26 * MIB, 60)]
    first, refused, last = client.wait(*numbers)
    assert [len(each.outputs["y"]) for each in (first, last)] == [50, 60]
    assert refused.outcome is Outcome.FAILED
    size, most = 26 * MIB * 4, 100 * MIB
    assert f"the response has {size} bytes, expected at most {most}" in refused.reason
    assert "server.max_answer_mib" in refused.reason
    assert max(read) < MIB
    assert len(client.ask("sized", {"n": np.array([24 * MIB])}, **long).outputs["y"]) == 24 * MIB
    assert_balanced(server)
