"""What Linux says of this machine and of the limits of this process; on other systems nothing is known.

Every function takes the root of the file system, so that another machine's files can be read.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of processor time that the control groups of this process allow; None without a limit.

    Reads `cpu.max` (cgroup v2) or `cpu.cfs_quota_us` (v1) of the process's group and of all groups above it.
    """
    found = [_ratio(*_numbers(group / "cpu.max", 2)) for group in _groups(root, "")]
    found += [
        _ratio(*_numbers(group / "cpu.cfs_quota_us", 1), *_numbers(group / "cpu.cfs_period_us", 1))
        for group in _groups(root, "cpu")
    ]
    return min((each for each in found if each is not None), default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Memory that the control groups of this process allow, in bytes; None without a limit."""
    limits = [_numbers(group / "memory.max", 1) for group in _groups(root, "")]
    limits += [_numbers(group / "memory.limit_in_bytes", 1) for group in _groups(root, "memory")]
    return min((each[0] for each in limits if each and 0 < each[0] < 1 << 60), default=None)


def throttled_periods(root: Path = ROOT) -> int:
    """Periods in which the quota of the process's control group was used up, since the group was made."""
    counts = (line.split() for group in _groups(root, "")[:1] for line in _text(group / "cpu.stat").splitlines())
    return next((int(words[1]) for words in counts if words[:1] == ["nr_throttled"]), 0)


def governor(root: Path = ROOT) -> str:
    """How the frequency of the first core is chosen; empty where the system leaves it to the hardware or the host."""
    return _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()


def siblings(root: Path = ROOT) -> list[tuple[int, ...]]:
    """The sets of hardware threads that share a core, where a core has more than one."""
    found: set[tuple[int, ...]] = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        found.add(_numbers_of_list(_text(path).strip()))
    return sorted(each for each in found if len(each) > 1)


def core_times(root: Path = ROOT) -> tuple[int, int]:
    """Time of all cores since the start of the system, and the part of it that the host took (steal time), in ticks."""
    words = next((line.split() for line in _text(root / "proc/stat").splitlines() if line.startswith("cpu ")), [])
    ticks = [int(word) for word in words[1:9]]
    return sum(ticks), ticks[7] if len(ticks) == 8 else 0


def _groups(root: Path, controller: str) -> list[Path]:
    """The control group of this process for a controller, "" for version 2, and the groups above it."""
    home = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            inner = Path(path.lstrip("/"))
            return [home / inner, *(home / above for above in inner.parents)]
    return []


def _ratio(*numbers: int) -> float | None:
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else None


def _numbers(path: Path, count: int) -> tuple[int, ...]:
    """The numbers of a file; none where it has a word instead, as `max`."""
    words = _text(path).split()[:count]
    return tuple(map(int, words)) if words and all(word.lstrip("-").isdigit() for word in words) else ()


def _numbers_of_list(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
