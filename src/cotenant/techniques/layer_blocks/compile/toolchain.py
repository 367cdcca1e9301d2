"""The C compiler of this machine: search, version and calls."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cotenant.techniques.layer_blocks.compile.errors import CompileError

NAMES = ("gcc", "clang", "cc")
_COMMON = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-w")
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler by its command; `version` is the first line of its version text."""

    command: tuple[str, ...]
    version: str

    def build(self, text: str, library: Path, flags: tuple[str, ...]) -> float:
        """Compile C text to a library, atomically. Returns the time in seconds. Raises CompileError with the cause."""
        began = time.perf_counter()
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
            source, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
            source.write_text(text, encoding="utf-8")
            call = [*self.command, *_COMMON, *flags, "-o", str(made), str(source)]
            try:
                done = subprocess.run(call, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CompileError(f"{' '.join(self.command)} cannot be run: {error}; {_HINT}") from error
            if done.returncode or not made.exists():
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
                raise CompileError(
                    f"{' '.join(self.command)} ({self.version}) refused a kernel: {said}; install a newer gcc or clang"
                )
            os.replace(made, library)
        return time.perf_counter() - began


_HINT = "install gcc or clang, set CC, or run: pip install 'cotenant[compile]'"


def find_compiler() -> Compiler:
    """The compiler that CC names, else gcc, clang, cc, or that of the package ziglang.

    Raises CompileError, which names what to install, where there is none.
    """
    wanted = os.environ.get("CC", "")
    found = _found(wanted)
    if found is None:
        looked = f"CC is {wanted!r}, which does not run" if wanted else f"none of {', '.join(NAMES)} is installed"
        raise CompileError(f"no C compiler: {looked}; {_HINT}")
    return found


@cache
def _found(wanted: str) -> Compiler | None:
    if wanted:
        return _described(tuple(shlex.split(wanted)))
    for name in NAMES:
        path = shutil.which(name)
        found = _described((path,)) if path else None
        if found is not None:
            return found
    if importlib.util.find_spec("ziglang") is not None:
        return _described((sys.executable, "-m", "ziglang", "cc"))
    return None


def _described(command: tuple[str, ...]) -> Compiler | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return Compiler(command, lines[0].strip()) if done.returncode == 0 and lines else None
