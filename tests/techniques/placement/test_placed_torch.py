"""A torch model over a stream and cores: one answer in whatever order the device runs, and one copy of a tensor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.techniques.placement.execute import placeable
from cotenant.techniques.placement.execute.placed_torch import PlacedTorch, placed_stream
from cotenant.techniques.placement.unit_placement import GPU_LANE, UnitPlacement, device_names
from cotenant.work import Share, Work
from fake_streams import FakeStreams
from late_streams import LateStreams
from placed_torch_samples import BRANCHES, SHARE, WIDTH, on_cores, open_placed_torch, placement, save_wide
from torch_samples import SAMPLES, exported

WAIT_S = 20.0
CORES = (0, 0)
"""Two lanes, wherever there is one core alone."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedTorch]:
    with open_placed_torch(save_wide(tmp_path_factory.mktemp("wide") / "wide.pt2")) as model:
        yield model


def random_placement(model: PlacedTorch, seed: int) -> UnitPlacement:
    """Any order in which units can run, in streaks on devices."""
    rng = Random(seed)
    home = {name: unit.index for unit in model.dfg.units for name in unit.outputs}
    waiting = {u.index: {home[name] for name in u.inputs if name in home} for u in model.dfg.units}
    devices = device_names(2, SHARE.size)
    device, order = rng.choice(devices), []
    while waiting:
        unit = rng.choice(sorted(unit for unit, before in waiting.items() if before.isdisjoint(waiting)))
        del waiting[unit]
        device = rng.choice(devices) if rng.random() < 0.5 else device
        order.append((model.dfg.unit_names[unit], device))
    return placement(model, order)


def values(seed: int, rows: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((rows, WIDTH)).astype(np.float32) for name in ("a", "b")}


class Served:
    """A model that an executor has loaded, whole launches of it, and how they ended."""

    def __init__(self, model: PlacedTorch, device: Any, cores: tuple[int, ...] = CORES, max_batch: int = 4) -> None:
        self.executor = TorchExecutor(device, cores)
        self.model = model
        shape = {"a": (1, WIDTH), "b": (1, WIDTH)}
        self.loaded = self.executor.load_shared(model, LoadSpec((SHARE,), (0, model.unit_count), (shape,), max_batch))
        self.executor.add_model("wide", self.loaded)
        self.timings: list[Timing] = []

    def close(self) -> None:
        self.executor.remove_model("wide")
        self.loaded.close()
        self.executor.close()

    def ask(self, inputs: list[dict[str, Any]]) -> list[Any]:
        """All at once; gives the answers, or the reasons why there are none."""
        ended, errors = threading.Semaphore(0), {}

        def end(launch: int, error: str | None, timing: Timing) -> None:
            errors[launch] = error
            self.timings.append(timing)
            ended.release()

        for query, each in enumerate(inputs):
            self.executor.put(query, each)
            work = Work("wide", 0, len(each["a"]), 0, self.model.unit_count)
            self.executor.start(Launch(query, query, (query,), work, True, SHARE, 1), end)
        for _ in inputs:
            assert ended.acquire(timeout=WAIT_S)
        answers = [errors[query] or self.executor.take(query) for query in range(len(inputs))]
        for query in range(len(inputs)):
            self.executor.discard(query)
        assert self.executor.kept == 0
        return answers


def lanes(before: set[threading.Thread]) -> list[threading.Thread]:
    return [each for each in set(threading.enumerate()) - before if each.name.startswith("cotenant-lane")]


def check(model: PlacedTorch, inputs: list[dict[str, Any]], answers: list[Any]) -> None:
    for given_, got in zip(inputs, answers, strict=True):
        expected = model.run(0, model.unit_count, given_)
        assert set(got) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value.numpy(), rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_any_placement_gives_what_the_whole_gives_in_any_order_of_the_device(wide: PlacedTorch, seed: int) -> None:
    wide.place(random_placement(wide, seed))
    pieces = wide.tasks(SHARE.size)
    assume(len(pieces) > 1)  # else it runs as ever, and copies what is submitted at once
    inputs = [values(seed + at, rows) for at, rows in enumerate((1, 3, 2, 4, 1))]
    with closing(Served(wide, LateStreams(seed))) as served:
        check(wide, inputs, served.ask(inputs))
        assert served.executor.chains.eager == 0
        for timing in served.timings:
            assert [each.units for each in timing.task_times] == [len(piece.units) for piece in pieces]
            assert all(0 <= each.start_ns <= each.end_ns for each in timing.task_times)


@pytest.mark.parametrize("name", ["encoder", "chooses"])
def test_pieces_of_any_module_have_their_sizes_and_weights(tmp_path: Path, name: str) -> None:
    torch.export.save(exported(name)[1], tmp_path / "model.pt2")
    with open_placed_torch(tmp_path / "model.pt2") as model, torch.inference_mode():
        inputs = SAMPLES[name].inputs(3)
        expected = model.run(0, model.unit_count, inputs)
        for seed in range(6):
            model.place(random_placement(model, seed))
            placed = placed_stream(model, SHARE, CpuStreams().lane(Share((0,))), CORES)
            assert (placed is None) == (len(model.tasks(SHARE.size)) < 2)
            if placed is not None:
                launch = placed.launch(0)
                launch.fill(0, inputs)
                got = launch.replay(0, model.unit_count)
                assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_a_tensor_is_copied_once_whoever_reads_it(wide: PlacedTorch) -> None:
    """The stem, which all branches read, goes down once; what two pieces of the device read of a core goes up once."""
    wide.place(on_cores(wide, *BRANCHES))
    device = LateStreams()
    with closing(Served(wide, device, max_batch=1)) as served:
        before = dict(device.copies)
        check(wide, [values(0)], served.ask([values(0)]))
        pieces = wide.tasks(SHARE.size)
        made = {name: bool(piece.cores[0]) for piece in pieces for name in piece.outputs}
        read = {(name, bool(piece.cores[0])) for piece in pieces for name in piece.inputs}
        down = sum(1 for name, on_core in read if on_core and made.get(name) is False)
        up = sum(1 for name, on_core in read if not on_core and made.get(name, True))
        assert device.copies["up"] - before["up"] == up
        assert device.copies["down"] - before["down"] == down + 2  # and the outputs
        assert min(down, up) > 0


def test_a_model_on_one_device_pays_nothing(wide: PlacedTorch) -> None:
    before = set(threading.enumerate())
    wide.place(placement(wide, [(name, GPU_LANE) for name in wide.dfg.unit_names]))
    with closing(Served(wide, LateStreams())) as served:
        assert lanes(before) == []
        check(wide, [values(1)], served.ask([values(1)]))
        assert served.timings[0].task_times == ()
        assert len(served.executor.chains) == 3


def test_what_cannot_be_captured_runs_eagerly_in_pieces(wide: PlacedTorch) -> None:
    wide.place(on_cores(wide, *BRANCHES))
    inputs = [values(2), values(3, 3)]
    with closing(Served(wide, CpuStreams())) as served:  # which has no graphs
        check(wide, inputs, served.ask(inputs))
        assert all(len(timing.task_times) > 2 for timing in served.timings)
        assert served.executor.chains.eager == 2


def test_all_pieces_but_those_that_cannot_be_are_captured(wide: PlacedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The join needs values on the host: the model as a whole is not captured, and what reads the join's result is."""
    monkeypatch.setattr(wide, "why_eager", lambda start, end: "it needs values" if start <= 12 < end else "")
    wide.place(on_cores(wide, *BRANCHES))
    device = FakeStreams()
    with closing(Served(wide, device)) as served:
        pieces = wide.tasks(SHARE.size)
        captured = [piece for piece in pieces if not piece.cores[0] and 12 not in piece.units]
        assert 0 < len(device.captures) == 3 * len(captured)
        before = device.replays
        inputs = [values(8), values(9, 3)]
        check(wide, inputs, served.ask(inputs))
        assert device.replays - before == 2 * len(captured)
        assert served.executor.chains.eager == 0


def test_a_piece_that_fails_fails_its_launch_alone_and_leaves_nothing(wide: PlacedTorch) -> None:
    wide.place(on_cores(wide, *BRANCHES))
    with closing(Served(wide, LateStreams())) as served:
        (resident,) = served.executor._models.values()
        placed = resident.ways[SHARE]
        assert placed is not None
        at = next(at for at, piece in enumerate(placed.loaded.tasks) if piece.cores[0])
        good = placed.loaded.segments[at].segment.function
        for error in (RuntimeError("no room"), ArithmeticError("odd")):

            def fail(*_: object, error: Exception = error) -> Any:
                raise error

            placed.loaded.segments[at].segment.function = fail
            answers = served.ask([values(4), values(5)])
            assert all(str(error) in answer for answer in answers)
            placed.loaded.segments[at].segment.function = good
            check(wide, [values(6)], served.ask([values(6)]))
        assert all(lane._queue.empty() for lane in placed.loaded.lanes.values())


@pytest.mark.parametrize("reason", ["needs 2 cores, 0 are there", "can't start new thread", "cannot be run separately"])
def test_without_cores_lanes_or_pieces_it_runs_on_its_device(
    wide: PlacedTorch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    def refuse(*_: object) -> None:
        raise (AssertionError if "separately" in reason else RuntimeError)(reason)

    wide.place(on_cores(wide, *BRANCHES))
    if "thread" in reason:
        monkeypatch.setattr(placeable, "Lane", refuse)
    elif "separately" in reason:
        monkeypatch.setattr(wide._cutter, "segment_of", refuse)
    with (
        caplog.at_level(logging.WARNING),
        closing(Served(wide, LateStreams(), () if "0" in reason else CORES)) as served,
    ):
        check(wide, [values(7)], served.ask([values(7)]))
        assert served.timings[0].task_times == ()
    assert "runs on cuda:0 alone, not by its placement" in caplog.text
    assert reason in caplog.text
    assert caplog.text.count("its placement") == 1


def test_lanes_end_with_what_was_loaded(wide: PlacedTorch) -> None:
    before = set(threading.enumerate())
    wide.place(on_cores(wide, *BRANCHES))
    with closing(Served(wide, LateStreams())):
        made = lanes(before)
        assert len(made) == 2
    for each in made:
        each.join(WAIT_S)
        assert not each.is_alive()


def test_wrong_inputs_are_named(wide: PlacedTorch) -> None:
    wide.place(on_cores(wide, *BRANCHES))
    with closing(Served(wide, LateStreams())) as served:
        (answer,) = served.ask([{"a": values(0)["a"], "c": values(0)["b"]}])
        assert "input 'b' is missing" in answer


def test_a_placement_of_cores_is_none_of_a_stream(wide: PlacedTorch, tmp_path: Path) -> None:
    units = [(name, GPU_LANE) for name in wide.dfg.unit_names]
    with pytest.raises(InvalidValueError, match="behind what they read"):
        wide.place(placement(wide, units[::-1]))
