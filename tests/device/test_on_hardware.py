"""Shares and streams of a real GPU. Beside this the conformance suite runs the executor there.

Needs torch, numpy and msgspec alone.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu._sm_probe import LENGTH, SmSurvey, further_of, probing, survey
from cotenant.core.actions import Launch
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.gpu.cuda_streams import CudaStreams
from cotenant.execute.gpu.sm_groups import ask_grid
from cotenant.execute.gpu.sm_ladder import shares_of, whole
from cotenant.execute.gpu.sm_shares import GreenShares, PlainShares
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.work import Share, Work
from placed_torch_samples import BRANCHES, WIDTH, on_cores, open_placed_torch, save_wide
from torch_small import save_small, small_cnn


def real() -> GreenShares:
    try:
        return GreenShares.open(0)
    except GpuError as error:
        pytest.skip(f"no green contexts here: {error}")


@pytest.mark.device
def test_shares_of_a_real_gpu_are_disjoint_and_as_large_as_granted() -> None:
    for percents in ((50, 50), (25, 75), (25, 25, 50)):
        with closing(real()) as shares:
            lanes = shares_of(percents, shares.grid, 0)
            shares.split(lanes)
            assert shares.granted == {lane: lane.size for lane in lanes}
            assert survey(shares).problems == ()
            shares.split([whole(shares.grid, 0)])
            assert survey(shares).problems == ()


@pytest.mark.device
def test_torch_computes_on_the_streams_of_a_real_share() -> None:
    with closing(real()) as shares:
        lanes = shares_of((50, 50), shares.grid, 0)
        shares.split(lanes)
        numbers = torch.arange(1 << 16, device="cuda:0", dtype=torch.float32)
        torch.cuda.synchronize()
        for lane in lanes:
            stream = shares.stream(lane)
            with torch.cuda.stream(stream):
                total = (numbers * 2).sum()
            stream.synchronize()
            assert float(total) == pytest.approx(float((1 << 16) * ((1 << 16) - 1)), rel=1e-3)
        torch.cuda.synchronize()


@pytest.mark.device
def test_what_was_captured_keeps_to_the_sms_of_its_share() -> None:
    with closing(real()) as shares, probing(0) as probe:
        lanes = shares_of((25, 75), shares.grid, 0)
        shares.split(lanes)
        gpu = CudaStreams(0, shares)
        seen: dict[Share, tuple[int, ...]] = {}
        for share in lanes:
            counts = torch.zeros(LENGTH, dtype=torch.int32, device="cuda:0")
            torch.cuda.synchronize()
            lane, stream = gpu.lane(share), shares.stream(share)
            lane.settle()

            def count(share: Share = share, counts: torch.Tensor = counts) -> dict[str, torch.Tensor]:
                probe.launch(shares.stream(share).cuda_stream, counts.data_ptr(), shares.granted[share])
                return {}

            replay, _ = lane.capture(count)
            replay()
            stream.synchronize()
            seen[share] = tuple(counts.nonzero().flatten().tolist())
        torch.cuda.set_stream(torch.cuda.default_stream())
        assert SmSurvey(seen, dict(shares.granted), further_of(0)).problems == ()


@pytest.mark.device
def test_the_grid_of_a_real_gpu() -> None:
    real().close()
    assert ask_grid(0, "streams").total == ask_grid(0, "green").total


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device")
@pytest.mark.parametrize("prepared", [False, True])
def test_on_hardware_launches_answer_without_waiting_for_the_device(tmp_path: Path, prepared: bool) -> None:
    """The second half runs while torch makes an error of every wait of the host that it knows of."""
    save_small(tmp_path)
    shares = PlainShares.open(0)
    lane = whole(shares.grid, 0)
    shares.split([lane])
    executor = TorchExecutor(CudaStreams(0, shares))
    model = TorchModel.open(tmp_path / "cnn.pt2", device="cuda:0")
    cuts = (0, 3, model.unit_count)
    spec = LoadSpec((lane,), cuts, ({"x": (1, 3, 16, 16)},) if prepared else (), max_batch=4)
    executor.add_model("cnn", executor.load("cnn", model, spec))
    reference = small_cnn()
    ended = threading.Semaphore(0)
    errors: list[str | None] = []

    def end(_: int, error: str | None, __: Timing) -> None:
        errors.append(error)
        ended.release()

    try:
        for query in range(8):
            if query == 4:
                torch.cuda.set_sync_debug_mode("error")
            image = np.random.default_rng(query).standard_normal((3, 3, 16, 16)).astype(np.float32)
            executor.put(query, {"x": image})
            for number, span in enumerate(pairwise(cuts)):
                launch = Launch(2 * query + number, query, (query,), Work("cnn", 0, 3, *span), number == 1, lane, 1)
                executor.start(launch, end)
                assert ended.acquire(timeout=60)
                assert errors[-1] is None
            (got,) = executor.take(query).values()
            with torch.inference_mode():
                expected = reference(torch.from_numpy(image)).numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)  # TF32 convolutions
    finally:
        torch.cuda.set_sync_debug_mode("default")
        executor.close()
        model.close()
    assert (len(executor.chains), executor.chains.eager) == ((3, 0) if prepared else (0, 16))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device")
@pytest.mark.parametrize("prepared", [False, True])
def test_on_hardware_a_placement_runs_over_the_stream_and_cores(tmp_path: Path, prepared: bool) -> None:
    """Launches one behind the other: their copies and captured tensors meet."""
    shares = PlainShares.open(0)
    lane = whole(shares.grid, 0)
    shares.split([lane])
    executor = TorchExecutor(CudaStreams(0, shares), tuple(sorted(os.sched_getaffinity(0)))[:2] * 2)
    model = open_placed_torch(save_wide(tmp_path / "wide.pt2"), device="cuda:0")
    model.place(on_cores(model, *BRANCHES, sms=lane.size))
    shape = {"a": (1, WIDTH), "b": (1, WIDTH)}
    spec = LoadSpec((lane,), (0, model.unit_count), (shape,), max_batch=4)
    executor.add_model("wide", executor.load("wide", model, spec if prepared else replace(spec, max_batch=1)))
    ended, told = threading.Semaphore(0), []

    def end(_: int, error: str | None, timing: Timing) -> None:
        told.append((error, timing))
        ended.release()

    rng = np.random.default_rng(0)
    inputs = [{name: rng.standard_normal((3, WIDTH)).astype(np.float32) for name in shape} for _ in range(50)]
    try:
        for query, each in enumerate(inputs):
            executor.put(query, each)
            work = Work("wide", 0, 3, 0, model.unit_count)
            executor.start(Launch(query, query, (query,), work, True, lane, 1), end)
        for _ in inputs:
            assert ended.acquire(timeout=60)
        assert [error for error, _ in told if error] == []
        pieces = model.pieces(lane.size)
        for _, timing in told:
            assert [each.units for each in timing.task_times] == [len(piece.units) for piece in pieces]
            assert all(0 <= each.start_ns <= each.end_ns for each in timing.task_times)
        with open_placed_torch(tmp_path / "wide.pt2") as on_cpu:
            for query, each in enumerate(inputs):
                got = executor.take(query)
                for name, value in on_cpu.run(0, on_cpu.unit_count, each).items():
                    np.testing.assert_allclose(got[name], value.numpy(), rtol=1e-2, atol=1e-2)  # TF32
    finally:
        executor.close()
        model.close()
    assert (executor.chains.eager == 0) == prepared
