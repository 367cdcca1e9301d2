"""The campaign and its command: compiled, judged by onnxruntime, kept, taken up again, served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import Run, runner
from cotenant.config import ServerConfig
from cotenant.errors import ConfigError
from cotenant.execute.onnx.segment_store import content_of
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.open_model import open_model
from cotenant.execute.runner import to_numpy
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import QUICK
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import load_profile
from cotenant.profiles.version_table import VersionTable
from cotenant.repository import STATE_FOLDER, find_versions, profile_path
from cotenant.techniques.layer_blocks.compile import toolchain
from cotenant.techniques.layer_blocks.compile.knobs import Knobs
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion, pick
from cotenant.techniques.layer_blocks.compile.store import Built, KernelCandidate
from cotenant.techniques.layer_blocks.execute.choice import choice_path
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.measure import compile_campaign, version_pressure
from cotenant.techniques.layer_blocks.measure.compile_campaign import (
    CompileEffort,
    compile_repository,
    versions_of,
)
from cotenant.work import Share
from kernel_graphs import SIZE, network
from kernels import a_compiler

ONE = (Share((0,)),)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that was compiled once."""
    a_compiler()
    made = tmp_path_factory.mktemp("repository")
    (made / "net" / "1").mkdir(parents=True)
    network(made / "net" / "1" / "model.onnx")
    (made / "net" / "config.toml").write_text(
        f'[tenant]\nname = "net"\nslo_ms = 50\n[[model.shapes]]\nx = [1, 3, {SIZE}, {SIZE}]\n', encoding="utf-8"
    )
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capfd)


def model_of(root: Path) -> Any:
    path = root / "net" / "1" / "model.onnx"
    return open_model(path, cache_dir=root / STATE_FOLDER / "graphs")


def choice_of(root: Path) -> Path:
    return choice_path(root / STATE_FOLDER / "graphs", content_of(root / "net" / "1" / "model.onnx"))


def test_a_repository_is_compiled_and_taken_up_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int, str]] = []
    results, errors = compile_repository(root, ONE, CompileEffort(1), lambda *step: steps.append(step))
    assert errors == {}
    result = results["net"]
    assert result.error < 1e-3
    assert result.layers == 10
    assert set(result.ratios) == {1}
    assert [done for done, _, _ in steps] == list(range(steps[-1][1] + 1))
    assert choice_of(root).exists() == (result.units > 0 and result.ratios[1] <= 1)

    def fail(*_: object) -> float:
        raise AssertionError("everything was built before")

    monkeypatch.setattr(toolchain.Compiler, "build", fail)
    again, errors = compile_repository(root, ONE, CompileEffort(1))
    assert errors == {}
    assert again["net"].layers == 10


@pytest.mark.parametrize(("ratio", "is_kept"), [(0.9, True), (0.97, True), (0.98, False), (1.0, False)])
def test_a_model_runs_on_kernels_where_they_win_by_three_percent(
    root: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, is_kept: bool
) -> None:
    choice_of(root).unlink(missing_ok=True)
    monkeypatch.setattr(compile_campaign, "_slower", lambda *_: ())
    monkeypatch.setattr(compile_campaign, "_ratio", lambda *_, **__: ratio)
    _, errors = compile_repository(root, ONE, CompileEffort(1))
    assert errors == {}
    assert choice_of(root).exists() == is_kept


def test_what_is_faster_is_used_and_its_profile_is_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice_of(root).unlink(missing_ok=True)
    (found,) = find_versions(root, "net")
    plain = open_version(root, found)
    plain.runner.close()
    monkeypatch.setattr(compile_campaign, "_NO_SLOWER", 1e9)
    results, _ = compile_repository(root, ONE, CompileEffort(1))
    assert results["net"].units >= results["net"].of_units - 1
    opened = open_version(root, found)
    assert isinstance(opened.runner, CompiledModel)
    assert opened.digest != plain.digest
    given = {"x": np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), np.float32)}
    got = to_numpy(opened.runner.run(0, opened.runner.unit_count, given))
    with SegmentedModel.open(found.path, cache_dir=root / STATE_FOLDER / "graphs") as other:
        right = to_numpy(other.run(0, other.unit_count, given))
    for name, array in right.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-3, atol=1e-4)
    content = opened.runner.graph_path.parent.name
    again = open_model(found.path, cache_dir=root / STATE_FOLDER / "graphs", content=content)
    assert again.kernels == opened.runner.kernels != ""
    again.close()
    opened.runner.close()


def test_what_is_slower_stays_with_onnxruntime(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_campaign, "_slower", lambda *_: ())
    monkeypatch.setattr(compile_campaign, "_ratio", lambda *_, is_wall: 0.8 if is_wall else 1.2)
    results, _ = compile_repository(root, (Share((0, 1)),), CompileEffort(1))
    assert results["net"].ratios == {1: 1.2, 2: 0.8}
    kept = json.loads(choice_of(root).read_text(encoding="utf-8"))
    assert kept["by_engine"] == [1]
    with model_of(root) as model:
        given = {"x": np.zeros((1, 3, SIZE, SIZE), np.float32)}
        model.run(0, model.unit_count, given)
        assert not model.prepared({"x": (1, 3, SIZE, SIZE)})._idle
    monkeypatch.undo()
    monkeypatch.setattr(compile_campaign, "_slower", lambda model, *_: tuple(range(model.unit_count)))
    compile_repository(root, ONE, CompileEffort(1))
    assert not choice_of(root).exists()
    with model_of(root) as model:
        assert not isinstance(model, CompiledModel)


def test_what_is_slower_on_any_number_of_cores_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_campaign, "_slower", lambda *_: ())
    monkeypatch.setattr(compile_campaign, "_ratio", lambda *_, is_wall: 1.01)
    compile_repository(root, ONE, CompileEffort(1))
    assert not choice_of(root).exists()


def test_kernels_that_give_another_answer_are_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_campaign, "_slower", lambda *_: ())
    monkeypatch.setattr(compile_campaign, "error_of", lambda *_: 0.01)
    results, _ = compile_repository(root, ONE, CompileEffort(1))
    assert results["net"].error == 0.01
    assert not choice_of(root).exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="pressure needs another core")
def test_versions_for_levels_are_kept_and_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(_: object, problem: Problem, candidates: list[KernelCandidate], *__: object) -> dict[str, list[float]]:
        """The slowest alone is the one that bears pressure."""
        robust = candidates[-1].name
        return {
            each.name: [each.cpu_ns * (1.0 if each.name == robust else 1.0 + at) for at in range(5)]
            for each in candidates
        }

    monkeypatch.setattr(compile_campaign, "_NO_SLOWER", 1e9)
    monkeypatch.setattr(version_pressure.PressureBench, "times", times)
    monkeypatch.setattr(version_pressure, "measure_bandwidth", lambda *_, **__: (10**9, 10**9))
    steps: list[tuple[int, int, str]] = []
    effort = CompileEffort(2, under_pressure=True)
    results, errors = compile_repository(root, (Share((0,)), Share((1,))), effort, lambda *step: steps.append(step))
    assert errors == {}
    assert [done for done, _, _ in steps] == list(range(steps[-1][1] + 1))
    assert any("under pressure" in text for _, _, text in steps)
    assert results["net"].versions == 2
    kept = json.loads(choice_of(root).read_text(encoding="utf-8"))
    assert all(len(each["libraries"]) >= 5 for each in kept["kernels"])
    for each in kept["kernels"]:
        assert len(each["level_ns"]) == len(each["libraries"])
        best = [min(some[level] for some in each["level_ns"]) for level in range(5)]
        assert [some[level] for level, some in enumerate(each["level_ns"][:5])] == best
    with model_of(root) as model:
        given = {"x": np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), np.float32)}
        right = to_numpy(model.run(0, model.unit_count, given))
        for level in range(1, 5):
            for name, array in to_numpy(model.run(0, model.unit_count, given, version=level)).items():
                np.testing.assert_allclose(array, right[name], rtol=1e-3, atol=1e-4)
    profile, errors = profile_repository(root, ServerConfig(), QUICK, fresh=True, on_step=lambda *_: None)
    assert errors == {}
    table = profile.models["net"].versions
    assert isinstance(table, VersionTable)
    assert (table.levels, table.bandwidth_bytes_per_s) == (5, 10**9)
    assert any(len(unit.implementations) == 2 for unit in table.units)
    assert load_profile(profile_path(root)).tables()["net"].versions == table
    with pytest.raises(ConfigError, match="two cores or more"):
        compile_repository(root, ONE, effort)
    choice_of(root).unlink()


def test_no_version_is_stored_that_no_policy_can_choose() -> None:
    """Without times under pressure policies know version 0 alone, which is the fastest on its cores."""

    def candidate(key: str, ns: int, parallelism: int, locality: int) -> KernelCandidate:
        return KernelCandidate(Problem(1, 1, 1, 1), Knobs(), Built(key, "", "", 0.0), 1, parallelism, locality, ns)

    made = [candidate("a", 100, 9, 9), candidate("b", 120, 1, 8), candidate("c", 150, 8, 1), candidate("d", 201, 1, 1)]
    assert versions_of(made, [1]) == ["a"]
    stored = [next(each for each in made if each.name == name) for name in versions_of(made, [1, 2, 4])]
    loaded = [KernelVersion(at, each.tasks, each.cpu_ns) for at, each in enumerate(stored)]
    assert {pick(loaded, 0, cores).address for cores in (1, 2, 4)} == set(range(len(loaded)))


def test_a_version_for_more_cores_is_kept_where_the_fastest_has_one_task() -> None:
    problem = Problem(4, 4, 8, 8)
    made = [
        KernelCandidate(problem, Knobs(rows=rows), Built(key, "", "", 0.0), tasks, 9, locality, ns)
        for key, rows, tasks, locality, ns in (("one", 8, 1, 1, 100), ("two", 4, 2, 2, 110), ("three", 3, 3, 3, 111))
    ]
    assert versions_of(made, [1, 2, 4]) == ["one", "two", "three"]
    loaded = [KernelVersion(at, tasks, ns) for at, (tasks, ns) in enumerate(((1, 100), (2, 110), (3, 111)))]
    assert [pick(loaded, 0, cores).address for cores in (1, 2, 3, 64)] == [0, 1, 2, 2]
    assert [pick(loaded, version, 2).address for version in (1, 2, 9)] == [1, 2, 2]


def test_the_command_tells_what_came_of_it(root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run("compile", root, "--candidates", 1, "--lanes", "0", "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["errors"] == {}
    assert result["models"]["net"]["layers"] == 10
    status, out, _ = run("compile", root, "--candidates", 1, "--lanes", "0", "--budget-s", 0)
    assert status == 0
    assert "net" in out
    monkeypatch.setenv("CC", "no-such-compiler")
    status, _, err = run("compile", root)
    assert status == 2
    assert "no C compiler: CC is 'no-such-compiler', which does not run; install gcc or clang" in err
