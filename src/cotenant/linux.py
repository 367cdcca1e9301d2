"""The one home of calls and files of Linux: on other systems each function has the null answer that it documents.

Functions that read files take the root of the file system, so that tests can give another machine's files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from cotenant.errors import CotenantError

ROOT = Path("/")
IS_LINUX = sys.platform == "linux"
_IS_64_BIT = sys.maxsize > 1 << 32
_CALLS = {
    "sched_setattr": {"x86_64": 314, "aarch64": 274},
    "sched_getattr": {"x86_64": 315, "aarch64": 275},
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
}
"""Numbers of system calls without a function in the C library, by processor, for processes of 64 bits."""
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1
_LC_CTYPE_MASK = 1
_REAPED, _START_TIME = 13, 19
"""Fields of /proc/PID/stat behind the name of the process: user time of the ended children, and time of the start."""
_PROCESS_CLOCK = 2
"""Clock of the kernel: processor time of a process, its threads together."""
_IDLE = (3, 4)
"""Columns of a core's times in /proc/stat that count as idle. Columns from _TIMES on are part of the user's time."""
_TIMES = 8


def require(what: str) -> None:
    """Raise CotenantError for a command or class that needs Linux, on another system."""
    if not IS_LINUX:
        raise CotenantError(
            f"{what} needs Linux, and this is {platform.system() or sys.platform}: use a Linux container or "
            "machine; profile, simulate, plan, explain, load and infer work here"
        )


@cache
def _libc() -> ctypes.CDLL:
    """The C library, opened once. Raises OSError or TypeError where it cannot be found."""
    return ctypes.CDLL(None, use_errno=True)


# --- this machine -------------------------------------------------------------------------------------------------


def processor_facts(root: Path = ROOT) -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo ("model name", "flags", ...); empty on other systems."""
    lines = [line.partition(":") for line in _text(root / "proc/cpuinfo").partition("\n\n")[0].splitlines()]
    return {field.strip(): value.strip() for field, _, value in lines}


def processor_name(root: Path = ROOT) -> str:
    """Name of the processor; on Arm, where Linux gives no name, the architecture with the numbers of the part."""
    facts = processor_facts(root)
    part = " ".join(facts[field] for field in ("CPU implementer", "CPU part") if field in facts)
    return facts.get("model name") or platform.processor() or " ".join(filter(None, (platform.machine(), part)))


def processor_flags(root: Path = ROOT) -> str:
    """Names of the processor's instruction sets, separated by spaces; empty on other systems."""
    facts = processor_facts(root)
    return facts.get("flags") or facts.get("Features", "")


def caches(root: Path = ROOT) -> dict[str, str]:
    """Sizes of the first core's caches, such as "48K", by name: L1d, L1i, L2, L3. Empty on other systems."""
    found = {}
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(folder / name).strip() for name in ("level", "type", "size"))
        found["L" + level + {"Data": "d", "Instruction": "i"}.get(kind, "")] = size
    return found


def nvidia_driver(root: Path = ROOT) -> str:
    """Version of the loaded NVIDIA driver; empty without one and on other systems."""
    return _text(root / "sys/module/nvidia/version").strip()


def machine_id(root: Path = ROOT) -> str:
    """Random identity of this installation of the system; empty on other systems."""
    return _text(root / "etc/machine-id").strip()


def is_virtual(root: Path = ROOT) -> bool:
    """Whether the driver of the idle states is that of a virtual machine; False on other systems."""
    return _text(root / "sys/devices/system/cpu/cpuidle/current_driver").strip() == "haltpoll"


def perf_event_paranoid(root: Path = ROOT) -> str:
    """Setting of the kernel for counters of the processor; "unknown" where it cannot be read."""
    return _text(root / "proc/sys/kernel/perf_event_paranoid").strip() or "unknown"


def total_memory_bytes() -> int:
    """Memory of this machine in bytes; 0 on Windows, where it is not known."""
    return _configured("SC_PAGE_SIZE") * _configured("SC_PHYS_PAGES")


def load_average() -> float | None:
    """Number of runnable threads in the last minute; None on Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# --- control groups -----------------------------------------------------------------------------------------------


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
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def free_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may still use, in bytes: of the machine, and of its control groups.

    0 on other systems, where it is not known.
    """
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    unknown = _configured("SC_AVPHYS_PAGES") * _configured("SC_PAGE_SIZE")
    free = next((1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"), unknown)
    return min([free, *(max(0, limit - used) for limit, used in _memory_limits(root))])


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits on memory and memory in use, in bytes, of the control groups of this process that have a limit."""
    for controller, limit, usage in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in _groups(root, controller):
            limits = _numbers(group / limit, 1)
            if limits and 0 < limits[0] < 1 << 60:
                yield limits[0], sum(_numbers(group / usage, 1))


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
    ticks = _core_ticks(root).get("cpu", [])
    return sum(ticks), ticks[7] if len(ticks) == _TIMES else 0


def busy_s(cores: Sequence[int], root: Path = ROOT) -> float:
    """Seconds that cores were busy since the machine started; 0.0 on other systems."""
    ticks = _core_ticks(root)
    counted = [each for core in cores for at, each in enumerate(ticks.get(f"cpu{core}", ())) if at not in _IDLE]
    return sum(counted) / _ticks_per_s()


def _core_ticks(root: Path) -> dict[str, list[int]]:
    """Times of all cores ("cpu") and of each ("cpu0", ...) in ticks, by column of /proc/stat."""
    lines = (line.split() for line in _text(root / "proc/stat").splitlines() if line.startswith("cpu"))
    return {name: list(map(int, columns[:_TIMES])) for name, *columns in lines}


# --- threads ------------------------------------------------------------------------------------------------------


def available_cores(thread: int = 0) -> tuple[int, ...]:
    """Cores that a thread (0: the calling one) may use; on other systems all cores of the machine."""
    if IS_LINUX:
        return tuple(sorted(os.sched_getaffinity(thread)))
    return tuple(range(os.cpu_count() or 1))


def pin(cores: Collection[int], thread: int = 0) -> bool:
    """Pin a thread (0: the calling one) to cores, which need not be among its present ones. Returns whether it is done.

    A thread stays unpinned on other systems, where a core does not exist, and when the thread has ended.
    """
    if not IS_LINUX:
        return False
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return False
    return True


def nice_value() -> int:
    """Nice value of the calling thread; 0 on other systems."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if IS_LINUX else 0


def raise_nice(nice: int) -> None:
    """Raise the nice value of the calling thread, and of threads that it starts, to at least `nice`.

    A higher value is kept: only the superuser may lower it. Nothing happens on other systems, which have one value for
    all threads of a process.
    """
    if IS_LINUX:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(nice_value(), nice))


def thread_waits() -> int:
    """Number of voluntary context switches of the calling thread: own waits, not preemption. 0 on other systems."""
    if not IS_LINUX:
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def run_delay_s(thread: int | None = None, root: Path = ROOT) -> float:
    """Seconds that a thread of this process, by default all of them, was ready to run and had no core.

    0.0 on other systems, and on kernels without statistics of the scheduler.
    """
    names = "*" if thread is None else str(thread)
    return sum(sum(_numbers(path, 2)[1:]) for path in (root / "proc/self/task").glob(f"{names}/schedstat")) / 1e9


def sleep_precisely() -> None:
    """Set the timer slack of the calling thread to 1 ns: the kernel may wake it that much later. Linux only."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def system_call(name: str, *arguments: object) -> int:
    """Result of a system call; integers are passed as C longs.

    Raises OSError, on other systems and unknown processors that of an unknown call (ENOSYS).
    """
    number = _CALLS[name].get(platform.machine()) if IS_LINUX and _IS_64_BIT else None
    if number is None:
        raise OSError(errno.ENOSYS, f"unknown on {platform.system()} {platform.machine()}")
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)]
    result = int(_libc().syscall(*words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


def timer_descriptor() -> int | None:
    """A new timerfd of the monotonic clock; None where the system has none. Python has it since 3.13."""
    if not IS_LINUX:
        return None
    try:
        create = _libc().timerfd_create
    except (OSError, AttributeError):
        return None
    found = int(create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    return found if found >= 0 else None


def arm_timer(descriptor: int, due_ns: int) -> None:
    """Let a timerfd expire at a time of the monotonic clock, in ns. Raises OSError."""
    at = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(due_ns, 1_000_000_000)))
    if _libc().timerfd_settime(descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(at), None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime failed")


# --- processes ----------------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of the process `parent` that started it ends. For workers and
    server processes, on Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before
        os._exit(1)


def end_first() -> None:
    """Out of memory, let the kernel end this process rather than others. Linux only."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def open_file_limits() -> tuple[int, int] | None:
    """Number of files that this process may open, and the most that it may allow itself; -1 for no limit. None on
    Windows."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_file_limit() -> None:
    """Let this process open as many files as it may allow itself. Nothing happens on Windows."""
    limits = open_file_limits()
    if limits is not None and limits[0] != limits[1]:
        import resource

        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))


def open_statm(pid: int) -> int:
    """A descriptor that tells the memory of a process. Raises OSError, on other systems always."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def resident_bytes(statm: int) -> int:
    """Resident memory of the process of `open_statm`, shared pages included; 0 once the process is dead."""
    try:
        return int(os.pread(statm, 128, 0).split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def peak_bytes(pid: int | None = None, root: Path = ROOT) -> int:
    """Largest resident memory of a process (None: this one) since its start or `reset_peak`; 0 where it is unknown."""
    lines = (line.split() for line in _text(root / f"proc/{'self' if pid is None else pid}/status").splitlines())
    return next((1024 * int(words[1]) for words in lines if words[:1] == ["VmHWM:"]), 0)


def reset_peak(root: Path = ROOT) -> bool:
    """Let the peak of this process begin at its present resident memory. Returns whether the system allows it."""
    try:
        return (root / "proc/self/clear_refs").write_text("5", encoding="ascii") > 0
    except OSError:
        return False


def private_bytes() -> int:
    """Resident memory of this process without shared pages; 0 on other systems."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, all threads, in seconds; 0.0 once it is gone, and on other systems."""
    if not IS_LINUX:
        return 0.0
    try:
        return time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK) / 1e9
    except (OSError, OverflowError):
        return 0.0


def processes_below(pid: int) -> Iterator[tuple[int, str]]:
    """Processes that a process started, directly or not: number, and module that `python -m` runs there, else "".

    None on other systems, and where the kernel lists no children.
    """
    for listing in sorted(Path(f"/proc/{pid}/task").glob("*/children")):
        for child in map(int, _text(listing).split()):
            words = _text(Path(f"/proc/{child}/cmdline")).split("\0")
            yield child, words[words.index("-m") + 1] if "-m" in words[:-1] else ""
            yield from processes_below(child)


def family_cpu_s(pid: int) -> float:
    """Processor time in seconds of a process, of all processes below it, and of those that have ended and were waited
    for. 0.0 on other systems."""
    found = 0.0
    for each in (pid, *[below for below, _ in processes_below(pid)]):
        fields = _stat_fields(each)
        found += cpu_s(each) + sum(map(int, fields[_REAPED : _REAPED + 2])) / _ticks_per_s()
    return found


def processes_named(name: str) -> list[int]:
    """Processes with this name (see `name_process`) that this one can see; none on other systems."""
    listed = os.listdir("/proc") if IS_LINUX else []
    return [int(each) for each in listed if each.isdigit() and _text(Path("/proc", each, "comm")).rstrip() == name]


def name_process(name: str) -> None:
    """Name this process, in at most 15 characters. Nothing happens on other systems."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks, which identifies it together with its process ID.

    "" if there is no such process or it is a zombie, and on other systems.
    """
    fields = _stat_fields(pid)
    return fields[_START_TIME] if fields and fields[0] != "Z" else ""


def _stat_fields(pid: int) -> list[str]:
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def mapped_by_others() -> Iterator[str]:
    """Lines of /proc/PID/maps of the other processes, as far as they are readable; none on other systems."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name != str(os.getpid()):
            yield from _text(process / "maps").splitlines()


# --- files and memory ---------------------------------------------------------------------------------------------


def open_flags(*names: str) -> int:
    """Flags of `os.open` by name; those that this system lacks are left out. Windows gets O_BINARY."""
    return sum(getattr(os, name, 0) for name in (*names, "O_BINARY"))


def lock(file: int, *, is_shared: bool = False, waits: bool = True) -> None:
    """Lock an open file or folder, until it is closed, against other processes that do the same.

    Raises BlockingIOError where it does not wait and another process has the lock, and OSError on Windows.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "files cannot be locked on this system") from None
    fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def anonymous_file(name: str, size: int | None = None) -> int:
    """Descriptor of a new file in memory that no process can shrink, nor enlarge with a `size` in bytes. Linux only.

    `name` is only visible in /proc. Raises OSError.
    """
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if size is not None:
            os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | (0 if size is None else fcntl.F_SEAL_GROW)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def free_pages(memory: mmap.mmap, start: int, size: int) -> bool:
    """Free the pages of a part of a mapped file, which then reads as zeros. Returns whether the system did it."""
    try:
        memory.madvise(mmap.MADV_REMOVE, start, size)
    except (AttributeError, OSError):
        return False
    return True


def private_memory(size: int) -> mmap.mmap:
    """Anonymous memory of so many bytes, on huge pages if possible; shared mappings, Python's default, get none."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: small ones work too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def return_memory() -> None:
    """Return freed memory to the system: glibc keeps memory of closed sessions, hundreds of MB for large models."""
    if IS_LINUX:
        with suppress(AttributeError, OSError):  # another C library
            _libc().malloc_trim(0)


def has_locale(name: bytes) -> bool:
    """Whether a locale of letter cases, such as b"en_US.UTF-8", is installed; True where glibc cannot be asked."""
    if not IS_LINUX:
        return True
    try:
        make, free = _libc().newlocale, _libc().freelocale
    except (AttributeError, OSError):  # another C library
        return True
    make.restype, make.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    free.argtypes = (ctypes.c_void_p,)
    made = make(_LC_CTYPE_MASK, name, None)
    if made:
        free(made)
    return bool(made)


# --- reading ------------------------------------------------------------------------------------------------------


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


def _configured(name: str) -> int:
    """A value of the system's configuration (sysconf); 0 where it is unknown."""
    try:
        return os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return 0


def _ticks_per_s() -> int:
    return _configured("SC_CLK_TCK") or 100


def _prctl(option: int, value: int) -> None:
    """Set an attribute of the calling thread or process; nothing happens on other systems."""
    if IS_LINUX:
        with suppress(AttributeError, OSError):  # another C library
            _libc().prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
