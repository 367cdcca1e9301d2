"""The store and the search: what is kept, taken up again, and refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from cotenant.techniques.layer_blocks.compile import toolchain
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel, text_of
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.knobs import Knobs, draw
from cotenant.techniques.layer_blocks.compile.native import KernelStep
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.store import ENTRIES, KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler, find_compiler
from kernels import a_compiler, a_store

SMALL = Problem(16, 16, 6, 6, (3, 3), (1, 1), (1, 1, 1, 1), in_halo=1)


def searched(store: Store, count: int = 3, **more: float) -> list[KernelCandidate]:
    return search(SMALL, store, CKernel(a_compiler()), SearchEffort(count, **more))


def test_every_candidate_is_measured_and_kept(tmp_path: Path) -> None:
    found = searched(a_store(tmp_path))
    assert len(found) == 3
    assert [each.cpu_ns for each in found] == sorted(each.cpu_ns for each in found)
    assert found[0].cpu_ns > 0
    again = a_store(tmp_path)
    assert again.candidates(SMALL) == found
    assert {each.knobs for each in found} == set(draw(SMALL, this_target(), 3, 1))
    before = (tmp_path / ENTRIES).read_bytes()
    assert searched(again) == found
    assert (tmp_path / ENTRIES).read_bytes() == before, "nothing is built or measured twice"


def test_an_interrupted_search_is_taken_up(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    first = CKernel(compiler).make(SMALL, draw(SMALL, store.target, 3, 1)[0], store)
    stamp = store.path_of(first.library).stat().st_mtime_ns
    with (tmp_path / ENTRIES).open("a", encoding="utf-8") as file:
        file.write('{"format": "cotenant-ker')  # cut short
    again = a_store(tmp_path)
    assert again.candidates(SMALL) == [first]
    found = searched(again)
    assert len(found) == 3
    assert store.path_of(first.library).stat().st_mtime_ns == stamp
    assert len(a_store(tmp_path).candidates(SMALL)) == 3


def test_a_budget_that_is_spent_builds_one(tmp_path: Path) -> None:
    assert len(searched(a_store(tmp_path), deadline=time.monotonic() - 1)) == 1


def test_a_candidate_that_computes_something_else_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, right = a_store(tmp_path), toolchain.Compiler.build
    wrong = draw(SMALL, store.target, 3, 1)[1]
    wrong_text = text_of(SMALL, wrong, store.target)

    def build(self: Compiler, text: str, library: Path, flags: tuple[str, ...]) -> float:
        return right(
            self,
            text.replace("act(vec x) { return", "act(vec x) { return 1.01f *") if text == wrong_text else text,
            library,
            flags,
        )

    monkeypatch.setattr(toolchain.Compiler, "build", build)
    found = searched(store)
    assert len(found) == 2
    assert wrong not in [each.knobs for each in found]


def test_a_library_that_was_changed_is_refused_and_built_again(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    made = CKernel(compiler).make(SMALL, Knobs(1, 1, 3), store)
    path = store.path_of(made.library)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CompileError, match="is not the library that was made here: its digest differs"):
        a_store(tmp_path).load(made.library)
    again = CKernel(compiler).make(SMALL, Knobs(1, 1, 3), a_store(tmp_path))
    assert a_store(tmp_path).load(again.library)
    path.unlink()
    with pytest.raises(CompileError, match="is gone"):
        a_store(tmp_path).load(made.library)


def test_a_library_of_another_machine_is_refused_and_not_offered(tmp_path: Path) -> None:
    other = Store(tmp_path, this_target(), "another")
    made = CKernel(a_compiler()).make(SMALL, Knobs(1, 1, 3), other)
    here = a_store(tmp_path)
    with pytest.raises(CompileError, match=f"was made on another machine .another, this is {this_maker()}"):
        here.load(made.library)
    assert here.candidates(SMALL) == []
    assert CKernel(a_compiler()).make(SMALL, Knobs(1, 1, 3), here).library.key != made.library.key


def test_entries_of_another_format_are_left_out(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    CKernel(a_compiler()).make(SMALL, Knobs(1, 1, 3), store)
    lines = [json.loads(line) for line in (tmp_path / ENTRIES).read_text().splitlines()]
    for line in lines:
        line["format"] = "cotenant-kernels/0"
    (tmp_path / ENTRIES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert a_store(tmp_path).candidates(SMALL) == []


def test_lines_of_versions_that_knew_other_back_ends_are_read(tmp_path: Path) -> None:
    made = CKernel(a_compiler()).make(SMALL, Knobs(1, 1, 3), a_store(tmp_path))
    (line,) = [json.loads(line) for line in (tmp_path / ENTRIES).read_text().splitlines()]
    line["candidate"]["function"] = "kernel"
    theirs = json.loads(json.dumps(line))
    theirs["candidate"] |= {"knobs": {"type": "tvm", "tiles": [], "fused": 1, "unroll": 0}, "function": "version_0"}
    (tmp_path / ENTRIES).write_text(json.dumps(line) + "\n" + json.dumps(theirs) + "\n")
    assert a_store(tmp_path).candidates(SMALL) == [made]


def test_compilers_are_found_by_name_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain._found.cache_clear()
    found = a_compiler()
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "clang").symlink_to(shutil.which(found.command[0]) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    toolchain._found.cache_clear()
    assert find_compiler().command == (str(folder / "clang"),)
    monkeypatch.setenv("CC", "no-such-compiler -x")
    with pytest.raises(CompileError, match=r"CC is 'no-such-compiler -x', which does not run; install gcc or clang"):
        find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    toolchain._found.cache_clear()
    with pytest.raises(CompileError, match=r"none of gcc, clang, cc is installed; .*cotenant\[compile\]"):
        find_compiler()
    toolchain._found.cache_clear()


def test_what_a_compiler_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"refused a kernel: .*error"):
        a_compiler().build("int x = ;", tmp_path / "x.so", ())
    assert not (tmp_path / "x.so").exists()
    broken = Compiler((sys.executable, "-c", "import time; raise SystemExit(3)"), "0")
    with pytest.raises(CompileError, match="refused a kernel"):
        broken.build("", tmp_path / "x.so", ())


def steps_that_add_one(runtime: object, count: int, size: int) -> tuple[object, object]:
    """Steps y <- y + x over the same tensors: a part that is left out or done twice shows."""
    from cotenant.techniques.layer_blocks.compile.native import aligned

    x, y = aligned(size * 16), aligned(size * 16)
    x[:] = 1
    steps = (KernelStep * count)()
    for step in steps:
        step.run = runtime.moves["add"]  # type: ignore[attr-defined]
        step.p[0], step.p[3], step.p[4] = y.ctypes.data, x.ctypes.data, y.ctypes.data
        for at, number in {0: 1, 4: 1, 5: size, 6: 1}.items():
            step.n[at] = number
    return (x, y), steps


def test_a_team_does_every_part_once_and_takes_in_cores(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    runtime = store.runtime(lambda: compiler)
    (_, y), steps = steps_that_add_one(runtime, 300, 64)  # type: ignore[misc]
    block = runtime.block()
    cores = sorted(os.sched_getaffinity(0))
    assert runtime.run(block, steps, 0, 300) == 1
    assert set(y[: 64 * store.target.lanes]) == {300.0}
    others = [*cores[1:], 777]  # a core that is not there joins unpinned
    for turn in range(20):
        assert runtime.run(block, steps, 0, 300, others, wait=True) == 1 + len(others)
        assert set(y[: 64 * store.target.lanes]) == {300.0 * (turn + 2)}
    assert not runtime.call(block, others), "it has ended"


def test_a_block_under_way_takes_in_another_core(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    runtime = store.runtime(lambda: compiler)
    count = 40_000
    (_, y), steps = steps_that_add_one(runtime, count, 64)  # type: ignore[misc]
    block, most = runtime.block(), []
    thread = threading.Thread(target=lambda: most.append(runtime.run(block, steps, 0, count)))
    thread.start()
    while thread.is_alive() and not runtime.call(block, [888]):
        time.sleep(0.0005)
    thread.join()
    assert most == [2]
    assert y[0] == count


def test_cores_may_be_called_before_an_open_block_runs(tmp_path: Path) -> None:
    store, compiler = a_store(tmp_path), a_compiler()
    runtime = store.runtime(lambda: compiler)
    (_, y), steps = steps_that_add_one(runtime, 50, 64)  # type: ignore[misc]
    block = runtime.block()
    assert not runtime.call(block, [904])
    runtime.open(block)
    assert runtime.call(block, [904])
    assert runtime.run(block, steps, 0, 50, wait=True) == 2
    assert runtime.run(block, steps, 0, 50, wait=True) == 1, "it was called for one run"
    assert y[0] == 100


def test_two_blocks_share_the_threads_of_cores(tmp_path: Path) -> None:
    """Each runs to its end whoever the threads are with, and every part is done once."""
    store, compiler = a_store(tmp_path), a_compiler()
    runtime = store.runtime(lambda: compiler)
    results: list[set[float]] = []

    def run(cores: list[int]) -> None:
        (x, y), steps = steps_that_add_one(runtime, 40, 64)  # type: ignore[misc]
        block = runtime.block()
        for _ in range(40):
            runtime.run(block, steps, 0, 40, cores)
        assert x[0] == 1  # it must outlive the steps
        results.append({float(each) for each in y[: 64 * store.target.lanes]})

    threads = [threading.Thread(target=run, args=(cores,)) for cores in ([0, 901], [901, 0], [902, 901])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [{1600.0}] * 3
