"""`cotenant devices`: what the machine offers, each with yes or the reason why not and what would change that."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli import main
from cotenant.execute import devices
from cotenant.execute.devices import NO_GPU, Devices, Feature, engines_here, survey, this_cpu
from cotenant.execute.gpu.cuda_driver import GpuError
from fake_cuda import FakeCuda

TORCH = Feature("torch", "cuda", True, "built for CUDA 13.0, sees 1 GPU(s)", version="2.13.0")


def found(driver: FakeCuda, torch: Feature = TORCH) -> Devices:
    return survey(lambda: driver, lambda: (torch,))


def way(seen: Devices, name: str, device: str = "cuda") -> Feature:
    (one,) = (each for each in seen.sharing if (each.name, each.device) == (name, device))
    return one


def no_driver() -> Any:
    raise GpuError("the package cuda-bindings is not installed; torch for CUDA 13 brings it")


def test_the_cpu_is_the_one_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = this_cpu()
    assert cpu.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert cpu.installed >= len(cpu.cores)
    assert cpu.memory_bytes > 1 << 28
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    (folder := tmp_path / "sys/devices/system/cpu/cpu0/cache/index0").mkdir(parents=True)
    for name, text in {"level": "2", "type": "Unified", "size": "2048K\n"}.items():
        (folder / name).write_text(text)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor: 0\nmodel name\t: Chip <X>\nflags: fpu avx2 fma amx_tile\n\nflags:"
    )
    cpu = this_cpu(tmp_path)
    assert (cpu.model, cpu.cores, cpu.simd) == ("Chip <X>", (3, 5), ("fma", "avx2", "amx_tile"))
    assert cpu.caches == {"L2": 2 << 20}


def test_a_gpu_with_all_there_is() -> None:
    driver = FakeCuda(gpus=2)
    seen = found(driver)
    first, second = seen.gpus
    assert (first.name, first.model, first.capability, first.sms) == ("cuda:0", "Fake GPU", "9.0", 132)
    assert (second.name, first.memory_bytes >> 30, seen.cuda, seen.gpu_problem) == ("cuda:1", 80, "13.0", "")
    for gpu in ("cuda:0", "cuda:1"):
        assert way(seen, "green contexts", gpu).detail == "16 groups of 8 SMs, 4 SMs left over"
    assert all(each.usable and not each.hint for each in seen.sharing if each.device != "cpu")
    assert way(seen, "streams").usable
    assert driver.primary == 0


def test_a_gpu_whose_driver_is_old_without_torch() -> None:
    seen = found(FakeCuda(version=12020), Feature("torch", "cuda", False, "not installed", "install it"))
    green = way(seen, "green contexts", "cuda:0")
    assert (green.usable, green.hint) == (False, "a driver of CUDA 12.4 or newer")
    assert "the driver is of CUDA 12.2" in green.detail
    streams = way(seen, "streams")
    assert (streams.usable, streams.detail, streams.hint) == (False, "torch: not installed", "install it")


@pytest.mark.parametrize(
    ("files", "load", "problem", "hint"),
    [
        (True, no_driver, "the package cuda-bindings is not installed", "pip install 'cuda-bindings>=13'"),
        (False, no_driver, "there is no /dev/nvidia0", NO_GPU),
        (True, lambda: FakeCuda(gpus=0), "the driver sees no GPU", NO_GPU),
    ],
)
def test_why_no_gpu_can_be_used(
    monkeypatch: pytest.MonkeyPatch, files: bool, load: Any, problem: str, hint: str
) -> None:
    monkeypatch.setattr(devices, "_has_device_files", lambda: files)
    seen = survey(load, lambda: (TORCH,))
    assert seen.gpus == ()
    assert problem in seen.gpu_problem
    for name in ("green contexts", "streams"):
        assert (way(seen, name).usable, way(seen, name).detail, way(seen, name).hint) == (False, seen.gpu_problem, hint)


def test_one_core_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert not way(found(FakeCuda()), "pinned cores", "cpu").usable
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    assert way(found(FakeCuda()), "pinned cores", "cpu").usable


def test_the_engines_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime
    import torch

    runtime, on_cpu, on_gpu = engines_here()
    assert (runtime.name, runtime.version, runtime.usable) == ("onnxruntime", onnxruntime.__version__, True)
    assert (on_cpu.device, on_cpu.version, on_cpu.usable) == ("cpu", torch.__version__, True)
    assert on_gpu.usable == torch.cuda.is_available()
    for cuda, available, text in (
        (None, False, "built for the CPU alone"),
        ("13.0", False, "built for CUDA 13.0, but sees no GPU"),
        ("13.0", True, "built for CUDA 13.0, sees 3 GPU(s)"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        on_gpu = engines_here()[2]
        assert (on_gpu.usable, on_gpu.detail, bool(on_gpu.hint)) == (available, text, not available)
    monkeypatch.setitem(sys.modules, "torch", None)
    _, on_cpu, on_gpu = engines_here()
    assert (on_cpu.usable, on_cpu.detail, on_gpu.usable) == (False, "not installed", False)
    assert on_gpu.hint == "pip install 'cotenant[torch]'"


@pytest.mark.parametrize("load", [no_driver, FakeCuda])
def test_the_command_prints_all_of_it(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = survey(load, lambda: (TORCH,))
    monkeypatch.setattr(devices, "survey", lambda: seen)

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["cotenant", "devices", *arguments])
        with contextlib.suppress(SystemExit):  # of status 0: an error would have printed nothing
            main()
        return capsys.readouterr().out

    told = json.loads(run("--json"))
    assert told["cpu"]["cores"] == sorted(os.sched_getaffinity(0))
    assert [gpu["sms"] for gpu in told["gpus"]] == [gpu.sms for gpu in seen.gpus]
    assert [each["name"] for each in told["sharing"]] == [each.name for each in seen.sharing]
    text = run()
    for each in (*seen.engines, *seen.sharing):
        assert each.name in text
    assert ("Fake GPU" in text) == bool(seen.gpus)
    assert ("cuda-bindings" in text or "/dev/nvidia0" in text) == (not seen.gpus)
