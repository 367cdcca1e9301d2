"""What is removed from a store, and what never is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cotenant.repository import STATE_FOLDER
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.knobs import Knobs
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.store import ENTRIES, FORMAT, LIBRARIES, KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import this_target
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler
from cotenant.techniques.layer_blocks.execute.choice import FOLDER as CHOICE_FOLDER
from cotenant.techniques.layer_blocks.execute.choice import FORMAT as CHOICE_FORMAT
from cotenant.techniques.layer_blocks.execute.choice import ChosenKernels, KernelChoice, choice_path, save_choice
from cotenant.techniques.layer_blocks.execute.store_sweep import mapped, sweep
from cotenant.techniques.layer_blocks.measure.compile_campaign import CompileEffort, compile_repository
from cotenant.work import Share
from kernel_graphs import network, products
from kernels import a_compiler, a_store

FIRST, SECOND = Problem(16, 16, 4, 4), Problem(16, 16, 5, 5)
KNOBS = Knobs(1, 1, 4)


def made(store: Store, problem: Problem, knobs: Knobs = KNOBS) -> KernelCandidate:
    return CKernel(a_compiler()).make(problem, knobs, store)


def files(store: Store) -> set[str]:
    return {path.stem for path in (store.folder / LIBRARIES).iterdir()}


def swept(store: Store, problems: set[Problem], contents: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return sweep(store, CKernel(a_compiler()), problems, contents)


def test_what_no_model_needs_goes_and_the_rest_stays(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    kept, gone = made(store, FIRST), made(store, SECOND)
    kept = store.measured(kept, 5)
    runtime = store.runtime(a_compiler)
    assert runtime.block()
    lines = (tmp_path / ENTRIES).read_bytes().count(b"\n")
    assert swept(store, {FIRST}) == [gone.library.key]
    assert lines == 4
    assert (tmp_path / ENTRIES).read_bytes().count(b"\n") == 2, "one line about each that stays"
    again = a_store(tmp_path)
    assert again.candidates(FIRST) == [kept] == store.candidates(FIRST)
    assert again.candidates(SECOND) == [] == store.candidates(SECOND)
    assert gone.library.key not in files(store)
    assert again.load(kept.library)
    assert len(files(store)) == 2, "the kernel and what runs it"
    assert swept(again, {FIRST}) == []


def test_what_another_compiler_or_machine_made_goes(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    older = CKernel(Compiler(compiler.command, "an older one")).make(FIRST, KNOBS, store)
    other = CKernel(compiler).make(FIRST, KNOBS, Store(tmp_path, this_target(), "another machine"))
    current = made(a_store(tmp_path), FIRST)
    assert len({each.library.key for each in (older, other, current)}) == 3
    assert set(swept(a_store(tmp_path), {FIRST})) == {older.library.key, other.library.key}
    assert files(store) == {current.library.key}


def test_what_a_model_has_chosen_stays(tmp_path: Path) -> None:
    """A choice may name a kernel of an older compiler; that of a model that is gone goes with its kernels."""
    store, compiler = a_store(tmp_path / CHOICE_FOLDER), a_compiler()
    older = CKernel(Compiler(compiler.command, "an older one")).make(FIRST, KNOBS, store)
    gone = made(store, SECOND)
    for content, candidate in (("a" * 32, older), ("b" * 32, gone)):
        kernels = (ChosenKernels(candidate.problem, (candidate.name,)),)
        save_choice(choice_path(tmp_path, content), KernelChoice(CHOICE_FORMAT, 1, kernels))
    choice_path(tmp_path, "c" * 32).write_text("{}")
    assert swept(store, {FIRST}, {"a" * 32}) == [gone.library.key]
    assert [path.stem for path in choice_path(tmp_path, "").parent.iterdir()] == ["a" * 32]
    assert files(store) == {older.library.key}


def test_what_a_running_process_has_in_memory_stays(tmp_path: Path) -> None:
    store = a_store(tmp_path / CHOICE_FOLDER)
    candidate, idle = made(store, FIRST), made(store, SECOND)
    save_choice(
        choice_path(tmp_path, "a" * 32),
        KernelChoice(CHOICE_FORMAT, 1, (ChosenKernels(FIRST, (candidate.name,)),)),
    )
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('there', flush=True); sys.stdin.read()"
    path = store.path_of(candidate.library)
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"there\n"
        assert mapped(path.parent) == {candidate.library.key}
        assert swept(store, set()) == [idle.library.key]
        assert path.exists()
        assert choice_path(tmp_path, "a" * 32).exists(), "its worker may start again"
        assert a_store(store.folder).find(candidate.name) == candidate
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(30) == 0
    assert swept(store, set()) == [candidate.library.key]
    assert not choice_path(tmp_path, "a" * 32).exists()


def test_a_library_in_memory_works_on_without_its_file(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    candidate = made(store, FIRST)
    library = store.load(candidate.library)
    assert swept(store, set()) == [candidate.library.key]
    assert library.kernel
    with pytest.raises(CompileError, match="is gone"):
        store.load(candidate.library)


def test_lines_of_others_stay_while_theirs_are_removed(tmp_path: Path) -> None:
    """Another process added a kernel after this one read the file; of other formats nothing stays."""
    store = a_store(tmp_path)
    gone = made(store, SECOND)
    theirs = made(a_store(tmp_path), FIRST)
    with (tmp_path / ENTRIES).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"format": "cotenant-kernels/0", "candidate": {}}) + '\n{"format": "' + FORMAT)
    assert swept(store, {FIRST}) == [gone.library.key]
    assert store.candidates(FIRST) == [theirs]
    assert (tmp_path / ENTRIES).read_bytes().count(b"\n") == 1


def test_a_library_without_a_line_stays_for_an_hour(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    kept = made(store, FIRST)
    stray = store.folder / LIBRARIES / "stray.so"
    shutil.copy(store.path_of(kept.library), stray)
    assert swept(store, {FIRST}) == []
    os.utime(stray, (0, 0))
    assert swept(store, {FIRST}) == ["stray"]


def test_compiling_removes_what_a_model_left_behind(tmp_path: Path) -> None:
    a_compiler()
    for name, write in (("net", network), ("rows", products)):
        (tmp_path / name / "1").mkdir(parents=True)
        write(tmp_path / name / "1" / "model.onnx")
    shapes = {"net": "[1, 3, 12, 12]", "rows": "[1, 7, 20]"}
    for name, shape in shapes.items():
        text = f'[tenant]\nname = "{name}"\nslo_ms = 50\n[[model.shapes]]\nx = {shape}\n'
        (tmp_path / name / "config.toml").write_text(text, encoding="utf-8")
    store = a_store(tmp_path / STATE_FOLDER / "graphs" / CHOICE_FOLDER)
    results, errors = compile_repository(tmp_path, (Share((0,)),), CompileEffort(1))
    assert errors == {}
    before = files(store)
    layers = sum(each.layers for each in results.values())
    assert len(before) == 1 + layers
    (tmp_path / "rows" / "config.toml").write_text("slo = ", encoding="utf-8")
    _, errors = compile_repository(tmp_path, (Share((0,)),), CompileEffort(1))
    assert set(errors) == {"rows"}
    assert files(store) == before, "of a model that cannot be opened nobody knows what it needs"
    shutil.rmtree(tmp_path / "rows")
    results, errors = compile_repository(tmp_path, (Share((0,)),), CompileEffort(1))
    assert errors == {}
    assert len(files(store)) == 1 + results["net"].layers
    lines = [json.loads(line) for line in (store.folder / ENTRIES).read_bytes().splitlines()]
    assert {msgspec.convert(each["candidate"], KernelCandidate).name for each in lines if each["candidate"]} < before
