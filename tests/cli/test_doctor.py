"""What `cotenant doctor` finds, from files as other machines have them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commands import Run
from cotenant import linux
from cotenant.cli.doctor import findings
from cotenant.execute.layout import usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


V2 = {
    "proc/self/cgroup": "0::/pod/container\n",
    "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/container/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 4\n",
    "sys/fs/cgroup/pod/container/memory.max": "max\n",
    "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/pod/memory.max": "1073741824\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/a\n3:cpu,cpuacct:/a\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2147483648\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "quota", "memory", "throttled"),
    [(V2, 1.5, 1 << 30, 4), (V1, 2.5, 1 << 31, 0), ({}, None, None, 0)],
)
def test_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None, memory: int | None, throttled: int
) -> None:
    root = write(tmp_path, files)
    assert linux.cpu_quota(root) == quota
    assert linux.memory_limit_bytes(root) == memory
    assert linux.throttled_periods(root) == throttled


def test_lanes_are_no_more_than_a_quota_pays_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 2, 8})
    assert usable_cores(tmp_path) == (1, 2, 3, 8)
    assert usable_cores(write(tmp_path / "v1", V1)) == (1, 2)
    assert usable_cores(write(tmp_path / "v2", V2)) == (1,)


def test_every_finding_that_warns_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 1.0, 1.0))
    cpu = "sys/devices/system/cpu"
    state = {
        f"{cpu}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{cpu}/cpu0/topology/thread_siblings_list": "0,2\n",
        f"{cpu}/cpu2/topology/thread_siblings_list": "0,2\n",
        f"{cpu}/cpu1/topology/thread_siblings_list": "1\n",
        "proc/stat": "cpu  50 0 20 20 0 0 0 10 0 0\ncpu0 1 1 1 1\n",
    }
    found = {each.what: each for each in findings(write(tmp_path, V2 | state))}
    assert found["cores"].detail.endswith("a quota of 1.5 (throttled 4 times): lanes on 1")
    assert found["steal time"].detail == "10.0% since the start"
    assert found["SMT"].hint == "give lanes one thread a core: device.cores = [0]"
    for what in ("cores", "steal time", "load", "memory", "frequency governor"):
        assert (found[what].level, bool(found[what].hint)) == ("warn", True)
    assert found["idle states"].level == "note"


def test_the_command_prints_one_line_a_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    _, out, _ = run("doctor", "--json")
    found = json.loads(out)["findings"]
    status, out, _ = run("doctor")
    assert status == int(any(each["level"] == "warn" for each in found))
    assert all(f"{each['what']}: " in out for each in found)
