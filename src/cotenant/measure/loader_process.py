"""Child processes that open, try and measure versions of models, and `Loader`, their parent in the server.

A model may loop forever, use all memory or crash on sample values: its child is then killed, and the server goes on. A
child serves several loads, since starting one takes about half a second.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe

from msgspec import Struct

from cotenant import linux
from cotenant.errors import CotenantError
from cotenant.execute.worker.child import KILLED, ChildProcess
from cotenant.measure.load_spec import MEASURING, LoadReport, VersionFacts, VersionSpec, decode, encode
from cotenant.shortages import report_error, start_thread

MODULE = "cotenant.measure.loader_process"
NICE = 5
"""Nice value of the child, that of threads that run models (`execute.registry.LANE_NICE`)."""
_TICK_S = 0.05
_IDLE_S = 10.0
"""Time in seconds for which an idle child is kept for the next load."""
_START_LIMIT_S = 60.0
_MEASURING_S = 10.0
"""Longest wait in seconds until another load has measured: a load that never ends must not block all others."""
_MIB = 1 << 20
_MOST_OF_FREE = 0.8
"""Share of the free memory that a load may use without `tenant.memory_limit_mib`."""


class VersionLoadError(CotenantError):
    """A version cannot be loaded. `is_internal`: for another cause than the version, as far as is known.

    `is_killed`: another process killed the loading process.
    """

    def __init__(self, *problems: str, is_internal: bool = False, is_killed: bool = False) -> None:
        super().__init__(*problems)
        self.is_internal = is_internal
        self.is_killed = is_killed


class LoadCancelledError(CotenantError):
    """The server is stopping and loads no more models."""


class _Message(Struct, frozen=True, tag=True):
    """Base of messages from the child."""


class _Hello(_Message, frozen=True):
    """The child is ready."""


class _Step(_Message, frozen=True):
    """A step begins. `facts` are the facts known so far. With `waits` the child waits for the server's reply."""

    name: str
    facts: VersionFacts | None = None
    waits: bool = False


class _Said(_Message, frozen=True):
    """A log record."""

    logger: str
    level: int
    text: str


class _Done(_Message, frozen=True):
    """The version is loaded."""

    report: LoadReport


class _Refused(_Message, frozen=True):
    """The version cannot be loaded. `trace` is the traceback of an unexpected error, or ""."""

    problems: tuple[str, ...]
    trace: str = ""


_FromChild = _Hello | _Step | _Said | _Done | _Refused


class _LostError(Exception):
    """The child ended or was killed, for the reason `sentence`. `facts` are the facts known by then."""

    def __init__(
        self, sentence: str, step: str, facts: VersionFacts | None, *, is_late: bool = False, is_killed: bool = False
    ) -> None:
        super().__init__(sentence)
        self.sentence, self.step, self.facts = sentence, step, facts
        self.is_late, self.is_killed = is_late, is_killed


class Loader:
    """Runs `loader.load` in child processes, as many as there are cores, from two to eight. Thread-safe.

    On other systems than Linux it runs in this process, one load at a time, without limits.

    Versions are opened concurrently, and measured one after another; on a GPU one load runs at a time. `limit_s` bounds
    each step of a load. Memory is bounded by `tenant.memory_limit_mib`, else by a share of the memory that is free when
    the load begins. `is_quiet` drops the log records of the children.
    """

    def __init__(self, limit_s: float, *, is_quiet: bool = False) -> None:
        self.most = max(2, min(8, os.cpu_count() or 1))
        """Most concurrent loads; further loads wait."""
        self._limit_s = limit_s
        self._is_quiet = is_quiet
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.most)
        self._measuring, self._on_gpu = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._starter = ThreadPoolExecutor(1, "cotenant-loader")
        """Its thread starts the children: a child ends with the thread that started it."""
        self._resting: list[_Child] = []
        self._idle: threading.Timer | None = None
        self.on_step: Callable[[str, str], None] = lambda model, step: None
        """Called with the model and the step that its load begins or waits for."""

    def load(self, spec: VersionSpec) -> LoadReport:
        """Load a version. A version that does not end on sample values gets an assumed profile and a warning.

        Raises VersionLoadError, and LoadCancelledError after `cancel`.
        """
        with self._slots, nullcontext() if spec.device is None else self._on_gpu:
            if not linux.IS_LINUX:
                with self._measuring:
                    tell = partial(self.on_step, spec.found.model)
                    return _report_of(_answer_to(spec, lambda step, facts: tell(step)), _name_of(spec))
            with self._lock:
                child = self._resting.pop() if self._resting else None
            return self._load(spec, child)

    def cancel(self) -> None:
        """End loads under way at once, and refuse new ones; never blocks. May be called by a signal handler."""
        self._stopped.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether new loads are refused."""
        return self._stopped.is_set()

    def close(self) -> None:
        """Wait until the loads under way have ended, and end the children."""
        self.cancel()
        for _ in range(self.most):
            self._slots.acquire()
        self.rest()
        self._starter.shutdown(wait=False)
        self._slots.release(self.most)

    def rest(self) -> None:
        """End the idle children."""
        with self._lock:
            children, self._resting = self._resting, []
            if self._idle is not None:
                self._idle.cancel()
        for child in children:
            child.end()

    def _load(self, spec: VersionSpec, child: _Child | None) -> LoadReport:
        from cotenant.measure.loader import assumed_profile, untried

        try:
            try:
                return self._ask(spec, child)
            except _LostError as lost:
                if child is None or lost.is_late:
                    raise
                return self._ask(spec, None)  # an earlier load may have caused its death
        except _LostError as lost:
            if spec.effort is not None or not (lost.is_late and lost.facts is not None):
                raise VersionLoadError(*spec.faults, lost.sentence, is_killed=lost.is_killed) from None
            why = f"{lost.step} had not ended after {self._limit_s:g} s"
            facts = untried(lost.facts, why)
            return LoadReport(facts, assumed_profile(facts, spec.shares), why)

    def _ask(self, spec: VersionSpec, child: _Child | None) -> LoadReport:
        where = _name_of(spec)
        try:
            child = (
                child or self._starter.submit(_Child, self._stopped, self._measuring, is_quiet=self._is_quiet).result()
            )
        except RuntimeError as error:
            raise VersionLoadError(
                f"{where}: no process can be started to load it ({error})", is_internal=True
            ) from None
        except OSError as error:
            report_error(error, f"{where} is not loaded")
            text = f"{where}: no process can be started to load it ({error.strerror})"
            raise VersionLoadError(text, is_internal=True) from None
        limit_mib = spec.found.config.tenant.memory_limit_mib
        try:
            most = None if limit_mib is None else round(limit_mib * _MIB)
            report = child.load(spec, where, self._limit_s, most, partial(self.on_step, spec.found.model))
        except VersionLoadError:
            self._keep(child)
            raise
        except BaseException:
            child.end()
            raise
        self._keep(child)
        return report

    def _keep(self, child: _Child) -> None:
        """Keep a child for the next load, for `_IDLE_S`."""
        timer = threading.Timer(_IDLE_S, self.rest)
        timer.daemon = True
        with self._lock:
            self._resting.append(child)
            if self._idle is not None:
                self._idle.cancel()
            self._idle = timer
        try:
            start_thread(timer, "a process that loads models is ended at once, and started for each")
        except RuntimeError:
            self.rest()


class _Child:
    """The child process and the server's end of its pipe. Raises OSError when it cannot be started."""

    def __init__(self, stopped: threading.Event, measuring: threading.Lock, *, is_quiet: bool) -> None:
        self._stopped, self._measuring, self._is_quiet = stopped, measuring, is_quiet
        self._pipe, theirs = Pipe()
        try:
            self._process = ChildProcess(MODULE, "loader", theirs.fileno(), NICE)
        except OSError:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        self._base_bytes = 0
        """Resident memory before it opened a model."""

    def load(
        self, spec: VersionSpec, where: str, limit_s: float, memory_bytes: int | None, on_step: Callable[[str], None]
    ) -> LoadReport:
        """Run a load in the child. Raises _LostError, VersionLoadError and LoadCancelledError."""
        if not self._base_bytes:
            self._receive("starting", None, time.monotonic() + _START_LIMIT_S, None, where)
            self._base_bytes = self._process.resident_bytes()
        most = self._base_bytes + (_free_bytes() if memory_bytes is None else memory_bytes)
        with suppress(OSError):  # it has died: detected below
            self._pipe.send_bytes(encode(spec))
        limits_s = limit_s, limit_s if spec.effort is None else math.inf
        with ExitStack() as measuring:
            return self._follow(where, limits_s, most, measuring, on_step)

    def _follow(
        self,
        where: str,
        limits_s: tuple[float, float],
        most: int,
        measuring: ExitStack,
        on_step: Callable[[str], None],
    ) -> LoadReport:
        """Follow the steps of a load to its end; `measuring` holds the lock for measurements.

        `limits_s` are those of a step that does not measure, and of one that does.
        """
        step, facts = "opening its files", None
        on_step(step)
        until = time.monotonic() + limits_s[0]
        while True:
            message = self._receive(step, facts, until, most, where)
            match message:
                case _Step(step, found, waits):
                    facts = found or facts
                    if waits:
                        if self._measuring.locked():
                            on_step("it waits until another model is measured")
                        self._wait_to_measure(where, measuring)
                    on_step(step)
                    until = time.monotonic() + limits_s[step.startswith(MEASURING)]
                case _Said(logger, level, text):
                    if not self._is_quiet:
                        logging.getLogger(logger).log(level, "%s", text)
                case _Done() | _Refused():
                    return _report_of(message, where)

    def _wait_to_measure(self, where: str, measuring: ExitStack) -> None:
        """Let the child measure: exclusively, or after `_MEASURING_S` beside another one."""
        until = time.monotonic() + _MEASURING_S
        while not self._measuring.acquire(timeout=_TICK_S):
            if self._stopped.is_set():
                raise LoadCancelledError(f"{where} is not loaded: the server is stopping")
            if time.monotonic() > until:
                break
        else:
            measuring.callback(self._measuring.release)
        with suppress(OSError):  # it has died: detected below
            self._pipe.send_bytes(b"")

    def end(self) -> None:
        """Kill the child, and free its resources."""
        self._process.kill()
        self._process.wait()
        self._process.close()
        self._pipe.close()

    def _receive(
        self, step: str, facts: VersionFacts | None, until: float, most_bytes: int | None, where: str
    ) -> _FromChild:
        while not self._is_there():
            if self._stopped.is_set():
                raise LoadCancelledError(f"{where} is not loaded: the server is stopping")
            if time.monotonic() > until:
                text = f"{where}: {step} had not ended in time (server.load_limit_s)"
                raise _LostError(text, step, facts, is_late=True)
            held = self._process.resident_bytes() - self._base_bytes
            if most_bytes is not None and held > (limit := most_bytes - self._base_bytes):
                sizes = f"{held / _MIB:.0f} MiB, and {limit / _MIB:.0f} MiB are allowed (tenant.memory_limit_mib)"
                more = f"give it more below [tenant], as memory_limit_mib = {2 * held / _MIB:.0f}"
                raise _LostError(f"{where}: {step} took {sizes}; {more}", step, facts)
        try:
            message: _FromChild = decode(self._pipe.recv_bytes(), _FromChild)
        except (EOFError, OSError):
            self._process.kill()
            how = self._process.wait()
            text = f"{where}: {step} ended its process, which {how}"
            raise _LostError(text, step, facts, is_killed=how == KILLED) from None
        return message

    def _is_there(self) -> bool:
        try:
            return self._pipe.poll(_TICK_S)
        except OSError:
            return True  # the child is gone: reading raises the error


def _name_of(spec: VersionSpec) -> str:
    return f"model {spec.found.model!r} version {spec.found.version}"


def _answer_to(spec: VersionSpec, tell: Callable[[str, VersionFacts | None], None]) -> _Done | _Refused:
    """Load a version in this process; `tell` gets each step before."""
    from cotenant.measure.loader import load

    try:
        return _Done(load(spec, tell))
    except CotenantError as error:
        return _Refused(error.problems)
    except Exception as error:  # any error of a library: report it to the server
        sentence = f"model {spec.found.model!r} cannot be loaded: {type(error).__name__}: {error}"
        return _Refused((*spec.faults, sentence), traceback.format_exc())


def _report_of(answer: _Done | _Refused, where: str) -> LoadReport:
    """The report of an answer. Raises VersionLoadError."""
    if isinstance(answer, _Done):
        return answer.report
    if answer.trace:
        logging.getLogger("cotenant.server").error("loading %s failed:\n%s", where, answer.trace)
    raise VersionLoadError(*answer.problems, is_internal=bool(answer.trace))


def _free_bytes() -> int:
    """Bytes that a load may use of the memory that is free on this machine, or in its control group."""
    return round(_MOST_OF_FREE * linux.free_memory_bytes())


# --- the child ----------------------------------------------------------------------------------------------------


class _ToServer(logging.Handler):
    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the server, which logs it."""
        with suppress(OSError):
            self._pipe.send_bytes(encode(_Said(record.name, record.levelno, record.getMessage())))


def main() -> None:
    """Run the child."""
    import signal

    from cotenant.execute.threads.lanes import be_nice, run_gently

    _, _, descriptor, parent, nice = sys.argv
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server
        signal.signal(number, signal.SIG_IGN)
    linux.die_with(int(parent))
    be_nice(int(nice))
    run_gently(partial(import_module, "cotenant.measure.loader"))
    linux.end_first()  # out of memory, rather than the server
    with suppress(EOFError, OSError):
        _serve(Connection(int(descriptor)))
    sys.stderr.flush()
    os._exit(0)  # skips the slow clean-up of libraries


def _serve(pipe: Connection) -> None:
    logging.basicConfig(level=logging.INFO, handlers=[_ToServer(pipe)], force=True)
    pipe.send_bytes(encode(_Hello()))
    may_measure = False

    def tell(step: str, facts: VersionFacts | None) -> None:
        nonlocal may_measure
        waits = step.startswith(MEASURING) and not may_measure
        pipe.send_bytes(encode(_Step(step, facts, waits)))
        if waits:
            pipe.recv_bytes()
            may_measure = True

    while True:
        may_measure = False
        spec = decode(pipe.recv_bytes(), VersionSpec)
        pipe.send_bytes(encode(_answer_to(spec, tell)))


if __name__ == "__main__":
    main()
