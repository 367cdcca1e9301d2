"""What Linux says, read from files of another machine; and what is said where there is no Linux."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from pathlib import Path

import pytest

from cotenant import linux
from cotenant.errors import CotenantError


def write(root: Path, **texts: str) -> Path:
    """Files below a root; "__" in a name stands for a folder."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_first_processor_is_described(tmp_path: Path) -> None:
    facts = linux.processor_facts()
    assert facts["processor"] == "0"
    assert all(field == field.strip() and value == value.strip() for field, value in facts.items())
    assert linux.processor_facts(tmp_path) == {}
    assert linux.processor_flags(tmp_path) == ""
    assert linux.processor_name(tmp_path) in (platform.processor(), platform.machine())


def test_arm_processors_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives them no name: the part's number stands for it, and their flags are called features."""
    text = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: {}\n\nprocessor\t: 1\n"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    names = [linux.processor_name(write(tmp_path, proc__cpuinfo=text.format(part))) for part in ("0xd0c", "0xd40")]
    assert names == ["aarch64 0x41 0xd0c", "aarch64 0x41 0xd40"]
    assert linux.processor_flags(tmp_path) == "fp asimd sve"


GROUP = {"proc__self__cgroup": "0::/a/b\n"}


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({}, 4096 * 1024),
        (GROUP | {"sys__fs__cgroup__a__b/memory.max": "max", "sys__fs__cgroup__a__b/memory.current": "5"}, 4096 * 1024),
        (GROUP | {"sys__fs__cgroup__a__b/memory.max": "1000", "sys__fs__cgroup__a__b/memory.current": "300"}, 700),
        (GROUP | {"sys__fs__cgroup__a/memory.max": "1000", "sys__fs__cgroup__a/memory.current": "1300"}, 0),
        (
            {
                "proc__self__cgroup": "3:memory:/x\n",
                "sys__fs__cgroup__memory__x/memory.limit_in_bytes": "900",
                "sys__fs__cgroup__memory__x/memory.usage_in_bytes": "500",
            },
            400,
        ),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_all_groups(
    groups: dict[str, str], free: int, tmp_path: Path
) -> None:
    root = write(tmp_path, proc__meminfo="MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\n", **groups)
    assert linux.free_memory_bytes(root) == free


def test_processes_are_known_by_number_and_start() -> None:
    assert linux.start_time(os.getpid()).isdigit()
    assert linux.start_time(1 << 30) == ""
    assert linux.cpu_s(os.getpid()) > 0
    assert linux.cpu_s(1 << 30) == 0


def test_the_peak_of_memory_is_read_and_can_begin_anew(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__status="VmPeak:\t 9 kB\nVmHWM:\t    2208 kB\nVmRSS:\t 5 kB\n",
        proc__7__status="Name:\tx\n",
    )
    assert linux.peak_bytes(root=tmp_path) == 2208 << 10
    assert linux.peak_bytes(7, tmp_path) == linux.peak_bytes(0, tmp_path) == 0
    assert linux.reset_peak(tmp_path)
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"
    assert not linux.reset_peak(tmp_path / "elsewhere")
    assert linux.peak_bytes(os.getpid()) > 1 << 20


def test_two_locks_exclude_each_other(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as one, (tmp_path / "a").open("wb") as two:
        linux.lock(one.fileno(), is_shared=True)
        linux.lock(two.fileno(), is_shared=True, waits=False)
        with pytest.raises(BlockingIOError):
            linux.lock(two.fileno(), waits=False)


@pytest.mark.parametrize("size", [None, mmap.PAGESIZE])
def test_a_file_in_memory_never_shrinks(size: int | None) -> None:
    descriptor = linux.anonymous_file("test", size)
    if size is None:
        os.ftruncate(descriptor, mmap.PAGESIZE)
    else:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * size)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
        memory[0] = 1
        assert linux.free_pages(memory, 0, mmap.PAGESIZE)
        assert memory[0] == 0
    os.close(descriptor)


def test_calls_are_known_on_arm_and_x86() -> None:
    """Their numbers are those of the kernel's tables: x86-64's own, and the common one of newer architectures."""
    assert linux._CALLS == {
        "sched_setattr": {"x86_64": 314, "aarch64": 274},
        "sched_getattr": {"x86_64": 315, "aarch64": 275},
        "perf_event_open": {"x86_64": 298, "aarch64": 241},
    }


@pytest.mark.parametrize(("is_linux", "is_64_bit"), [(False, True), (True, False)])
def test_elsewhere_no_call_is_made(is_linux: bool, is_64_bit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "IS_LINUX", is_linux)
    monkeypatch.setattr(linux, "_IS_64_BIT", is_64_bit)
    with pytest.raises(OSError) as caught:
        linux.system_call("sched_getattr", 0, bytes(64), 64, 0)
    assert caught.value.errno == errno.ENOSYS


def test_elsewhere_the_answers_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    linux.require("this")
    monkeypatch.setattr(linux, "IS_LINUX", False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(CotenantError, match=r"this needs Linux, and this is Darwin: .* work here"):
        linux.require("this")
    assert linux.available_cores() == tuple(range(os.cpu_count() or 1))
    assert not linux.pin((0,))
    assert (linux.nice_value(), linux.thread_waits(), linux.timer_descriptor()) == (0, 0, None)
