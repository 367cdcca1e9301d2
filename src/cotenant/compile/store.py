"""Every candidate that was built and measured, and the libraries, in one folder.

A line of JSON a candidate, appended when it was built and again when it was measured: what an interruption leaves is
taken up. A library's name is its key: the digest of its text, the flags, the compiler and the processor. Loaded is only
what has the digest that was written down here, on this machine, when it was made.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from cotenant.compile.ckernel import dense, depthwise, runtime
from cotenant.compile.errors import CompileError
from cotenant.compile.knobs import Knobs, block_bytes, parallelism_of
from cotenant.compile.native import Runtime, load
from cotenant.compile.problem import Problem
from cotenant.compile.target import Target
from cotenant.compile.toolchain import Compiler
from cotenant.files import append_entry, read_entries

FORMAT = "cotenant-kernels/1"
ENTRIES, LIBRARIES = "candidates.jsonl", "libraries"
_MEND = "remove it and run cotenant compile again"


class Built(Struct, frozen=True):
    """A library: `digest` is the SHA-256 of the file, `maker` the machine that made it, `build_s` what that took."""

    key: str
    digest: str
    maker: str
    build_s: float


class KernelCandidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel for a problem: how it was made, and its CPU time alone on one core, lower quartile, in ns; 0: unknown.

    `parallelism` is its parallel extent times what is unrolled; `locality` are the bytes that a task touches.
    """

    problem: Problem
    knobs: Knobs
    library: Built
    parallelism: int
    locality: int
    cpu_ns: int = 0


class _StoreLine(Struct, frozen=True):
    """A line of the file."""

    format: str
    candidate: KernelCandidate | None = None
    runtime: Built | None = None


class Store:
    """The candidates in a folder, which is made if need be. Thread-safe; two processes may append to one."""

    def __init__(self, folder: Path, target: Target, maker: str) -> None:
        self.folder = folder
        self.target = target
        self.maker = maker
        self._lock = threading.Lock()
        self._candidates: dict[str, KernelCandidate] = {}
        self._runtimes: dict[str, Built] = {}
        self._loaded: dict[str, ctypes.CDLL] = {}
        for entry in read_entries(folder / ENTRIES):
            try:
                line = msgspec.convert(entry, _StoreLine)
            except msgspec.ValidationError:
                continue  # of another version
            if line.format == FORMAT and line.candidate is not None:
                self._candidates[line.candidate.library.key] = line.candidate
            elif line.format == FORMAT and line.runtime is not None:
                self._runtimes[line.runtime.key] = line.runtime

    def candidates(self, problem: Problem) -> list[KernelCandidate]:
        """What was made here for a problem, the fastest first, those that were not measured last."""
        found = [c for c in self._all() if c.problem == problem and c.library.maker == self.maker]
        return sorted(found, key=lambda each: (each.cpu_ns or 1 << 62, each.library.key))

    def find(self, key: str) -> KernelCandidate:
        """The candidate whose library has this key. Raises CompileError when none was made here."""
        with self._lock:
            found = self._candidates.get(key)
        if found is None:
            raise CompileError(f"{self.folder} has no record of a library {key}; run cotenant compile again")
        return found

    def key_of(self, text: str, compiler: Compiler) -> str:
        """The key of a library with this text."""
        whole = "\0".join((FORMAT, text, *self.target.flags, compiler.version, self.maker))
        return hashlib.sha256(whole.encode()).hexdigest()[:32]

    def build(self, problem: Problem, knobs: Knobs, compiler: Compiler) -> KernelCandidate:
        """Build a kernel, unless it is there. Raises CompileError."""
        text = text_of(problem, knobs, self.target)
        key = self.key_of(text, compiler)
        with self._lock:
            known = self._candidates.get(key)
        if known is not None and self._is_whole(known.library):
            return known
        made = KernelCandidate(
            problem,
            knobs,
            self._built(key, text, compiler),
            parallelism_of(problem, knobs, self.target),
            block_bytes(problem, knobs, self.target),
        )
        self._keep(made)
        return made

    def measured(self, candidate: KernelCandidate, cpu_ns: int) -> KernelCandidate:
        """The candidate with its time, which is kept."""
        made = msgspec.structs.replace(candidate, cpu_ns=max(1, cpu_ns))
        self._keep(made)
        return made

    def load(self, library: Built) -> ctypes.CDLL:
        """Load a library. Raises CompileError when it was not made here, or is not as it was made."""
        with self._lock:
            found = self._loaded.get(library.key)
        if found is not None:
            return found
        path = self.path_of(library)
        if library.maker != self.maker:
            raise CompileError(f"{path} was made on another machine ({library.maker}, this is {self.maker}); {_MEND}")
        if not path.is_file():
            raise CompileError(f"{path} is gone; run cotenant compile again")
        if not self._is_whole(library):
            raise CompileError(f"{path} is not the library that was made here: its digest differs; {_MEND}")
        found = load(path)
        with self._lock:
            return self._loaded.setdefault(library.key, found)

    def runtime(self, compiler: Callable[[], Compiler]) -> Runtime:
        """The library that runs steps; built where it is not there. Raises CompileError."""
        text = runtime.source(self.target)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._lock:
            known = [
                each for key, each in self._runtimes.items() if key.startswith(digest) and each.maker == self.maker
            ]
        whole = [each for each in known if self._is_whole(each)]
        if whole:
            return Runtime(self.load(whole[-1]))
        made = self._built(f"{digest}{self.key_of(text, compiler())[:16]}", text, compiler(), ("-pthread",))
        append_entry(self.folder / ENTRIES, msgspec.to_builtins(_StoreLine(FORMAT, runtime=made)))
        with self._lock:
            self._runtimes[made.key] = made
            self._loaded.pop(made.key, None)
        return Runtime(self.load(made))

    def path_of(self, library: Built) -> Path:
        """Where a library lies."""
        return self.folder / LIBRARIES / f"{library.key}.so"

    def _built(self, key: str, text: str, compiler: Compiler, more: tuple[str, ...] = ()) -> Built:
        path = self.folder / LIBRARIES / f"{key}.so"
        took = compiler.build(text, path, (*self.target.flags, *more))
        return Built(key, _digest(path), self.maker, round(took, 3))

    def _keep(self, candidate: KernelCandidate) -> None:
        with self._lock:
            self._candidates[candidate.library.key] = candidate
            append_entry(self.folder / ENTRIES, msgspec.to_builtins(_StoreLine(FORMAT, candidate=candidate)))

    def _all(self) -> Iterable[KernelCandidate]:
        with self._lock:
            return list(self._candidates.values())

    def _is_whole(self, library: Built) -> bool:
        try:
            return _digest(self.path_of(library)) == library.digest
        except OSError:
            return False


def text_of(problem: Problem, knobs: Knobs, target: Target) -> str:
    """The text of a kernel."""
    write = depthwise.source if problem.is_depthwise else dense.source
    return write(problem, knobs, target)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
