"""The store of a repository's kernels: all built candidates with their times, and the libraries.

Each candidate has a line of JSON, appended when it is built and again when it is measured, so that an interrupted
search resumes. A library's name is its key, a digest of its text, flags, compiler and processor. A library is loaded
only if its file has the digest recorded on this machine when it was built.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from cotenant.files import append_entry, read_entries, write_whole
from cotenant.linux import lock
from cotenant.techniques.layer_blocks.compile.ckernel import runtime
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.knobs import Knobs
from cotenant.techniques.layer_blocks.compile.native import Runtime, load
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import Target
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler

FORMAT = "cotenant-kernels/2"
ENTRIES, LIBRARIES = "candidates.jsonl", "libraries"
_LOCK = ".lock"
_YOUNG_S = 3600.0
_HINT = "remove it and run cotenant compile again"


class Built(Struct, frozen=True):
    """A library: `digest` is the SHA-256 of the file, `maker` the machine that built it in `build_s` seconds."""

    key: str
    digest: str
    maker: str
    build_s: float


class KernelCandidate(Struct, frozen=True):
    """A kernel for a problem, with its CPU time alone on one core in ns, lower quartile; 0: not measured.

    `tasks` is its parallel extent, `parallelism` that times the unrolled iterations, `locality` the bytes of a task. A
    field `function` of older versions is ignored.
    """

    problem: Problem
    knobs: Knobs
    library: Built
    tasks: int
    parallelism: int
    locality: int
    cpu_ns: int = 0

    @property
    def name(self) -> str:
        """Its name in choices: the key of its library."""
        return self.library.key


class _StoreLine(Struct, frozen=True):
    """A line of the file."""

    format: str
    candidate: KernelCandidate | None = None
    runtime: Built | None = None


class Store:
    """The candidates in a folder, which is created if missing. Thread-safe; several processes may append."""

    def __init__(self, folder: Path, target: Target, maker: str) -> None:
        self.folder = folder
        self.target = target
        self.maker = maker
        self._lock = threading.Lock()
        self._candidates: dict[str, KernelCandidate] = {}
        self._runtimes: dict[str, Built] = {}
        self._loaded: dict[str, ctypes.CDLL] = {}
        for line in _lines(folder):
            if line.candidate is not None:
                self._candidates[line.candidate.name] = line.candidate
            elif line.runtime is not None:
                self._runtimes[line.runtime.key] = line.runtime

    def candidates(self, problem: Problem) -> list[KernelCandidate]:
        """The candidates of a problem that were built here, the fastest first, unmeasured ones last."""
        with self._lock:
            known = list(self._candidates.values())
        found = [each for each in known if each.problem == problem and each.library.maker == self.maker]
        return sorted(found, key=lambda each: (each.cpu_ns or 1 << 62, each.name))

    def find(self, name: str) -> KernelCandidate:
        """The candidate of this name. Raises CompileError when none was built here."""
        with self._lock:
            found = self._candidates.get(name)
        if found is None:
            raise CompileError(f"{self.folder} has no record of a library {name}; run cotenant compile again")
        return found

    def key_of(self, *made_of: str) -> str:
        """The key of a library that is made from these texts."""
        whole = "\0".join((FORMAT, *made_of, self.maker))
        return hashlib.sha256(whole.encode()).hexdigest()[:32]

    def whole(self, name: str) -> KernelCandidate | None:
        """The candidate of this name, if its library is unchanged."""
        with self._lock:
            known = self._candidates.get(name)
        return known if known is not None and self._is_whole(known.library) else None

    def built(self, key: str, build: Callable[[Path], float]) -> Built:
        """Build a library by `build(path)`, which returns its seconds; replaces a loaded one with this key."""
        path = self.folder / LIBRARIES / f"{key}.so"
        took = build(path)
        with self._lock:
            self._loaded.pop(key, None)
        return Built(key, _digest(path), self.maker, round(took, 3))

    def keep(self, candidate: KernelCandidate) -> None:
        """Store a candidate in place of its former record."""
        with self._lock:
            self._candidates[candidate.name] = candidate
            self._append(_StoreLine(FORMAT, candidate=candidate))

    def measured(self, candidate: KernelCandidate, cpu_ns: int) -> KernelCandidate:
        """The candidate with its time, stored."""
        made = msgspec.structs.replace(candidate, cpu_ns=max(1, cpu_ns))
        self.keep(made)
        return made

    def load(self, library: Built) -> ctypes.CDLL:
        """Load a library. Raises CompileError as `checked`."""
        with self._lock:
            found = self._loaded.get(library.key)
        if found is not None:
            return found
        found = load(self.checked(library))
        with self._lock:
            return self._loaded.setdefault(library.key, found)

    def checked(self, library: Built) -> Path:
        """The path of a library. Raises CompileError when it was not built here, or has changed."""
        path = self.path_of(library)
        if library.maker != self.maker:
            raise CompileError(f"{path} was made on another machine ({library.maker}, this is {self.maker}); {_HINT}")
        if not path.is_file():
            raise CompileError(f"{path} is gone; run cotenant compile again")
        if not self._is_whole(library):
            raise CompileError(f"{path} is not the library that was made here: its digest differs; {_HINT}")
        return path

    def runtime(self, compiler: Callable[[], Compiler]) -> Runtime:
        """The library that runs steps, built if missing. Raises CompileError."""
        text = runtime.source(self.target)
        digest = _text_digest(text)
        with self._lock:
            known = list(self._runtimes.values())
        whole = [each for each in known if self._is_runtime(each) and self._is_whole(each)]
        if whole:
            return Runtime(self.load(whole[-1]))
        key, flags = self.key_of(text, *self.target.flags, compiler().version), (*self.target.flags, "-pthread")
        made = self.built(f"{digest}{key[:16]}", partial(compiler().build, text, flags=flags))
        with self._lock:
            self._append(_StoreLine(FORMAT, runtime=made))
            self._runtimes[made.key] = made
        return Runtime(self.load(made))

    def drop(self, is_stale: Callable[[KernelCandidate], bool], in_use: Collection[str]) -> list[str]:
        """Remove stale candidates and runtimes that are not in use. Returns the keys of the removed libraries.

        `in_use` are keys of libraries. Lines of other formats are removed, and older lines of each candidate; lines
        that other processes append meanwhile stay. Libraries without a line stay for an hour: another process may be
        about to write it.
        """
        with self._lock, self._alone():
            named = {each.library.key for each in self._candidates.values()} | set(self._runtimes)
            runtimes: dict[str, Built] = {}
            candidates: dict[str, KernelCandidate] = {}
            for line in _lines(self.folder):
                named |= {each.key for each in (line.runtime, line.candidate and line.candidate.library) if each}
                if line.candidate is not None and (
                    line.candidate.library.key in in_use or not is_stale(line.candidate)
                ):
                    candidates[line.candidate.name] = line.candidate
                elif line.runtime is not None and (line.runtime.key in in_use or self._is_runtime(line.runtime)):
                    runtimes[line.runtime.key] = line.runtime
            kept = [_StoreLine(FORMAT, runtime=each) for each in runtimes.values()]
            kept += [_StoreLine(FORMAT, candidate=each) for each in candidates.values()]
            self._candidates, self._runtimes = candidates, runtimes
            if kept or (self.folder / ENTRIES).exists():
                write_whole(self.folder / ENTRIES, b"".join(msgspec.json.encode(each) + b"\n" for each in kept))
            wanted = {*runtimes, *(each.library.key for each in candidates.values()), *in_use}
            return self._unlink(named, wanted)

    def path_of(self, library: Built) -> Path:
        """The path of a library."""
        return self.folder / LIBRARIES / f"{library.key}.so"

    def _append(self, line: _StoreLine) -> None:
        with self._alone():
            append_entry(self.folder / ENTRIES, msgspec.to_builtins(line))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A lock against other processes that write the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("wb") as file:
            lock(file.fileno())
            yield

    def _unlink(self, named: Collection[str], wanted: Collection[str]) -> list[str]:
        removed = []
        young = time.time() - _YOUNG_S
        for path in sorted((self.folder / LIBRARIES).glob("*.so")):
            if path.stem not in wanted and (path.stem in named or path.stat().st_mtime < young):
                path.unlink(missing_ok=True)  # processes that have it mapped keep it
                self._loaded.pop(path.stem, None)
                removed.append(path.stem)
        return removed

    def _is_runtime(self, library: Built) -> bool:
        """Whether it is the runtime that this machine would build now, by any compiler."""
        return library.maker == self.maker and library.key.startswith(_text_digest(runtime.source(self.target)))

    def _is_whole(self, library: Built) -> bool:
        try:
            return _digest(self.path_of(library)) == library.digest
        except OSError:
            return False


def _lines(folder: Path) -> Iterator[_StoreLine]:
    """The lines of this format."""
    for entry in read_entries(folder / ENTRIES):
        try:
            line = msgspec.convert(entry, _StoreLine)
        except msgspec.ValidationError:
            continue  # of another version
        if line.format == FORMAT:
            yield line


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
