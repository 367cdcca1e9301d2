"""Co-runs of a repository: the file, the model that is fitted to it, and real measurements in processes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from corun_rows import ROWS, pair
from cotenant.cli.app import app
from cotenant.config import DeviceSection, ServerConfig
from cotenant.errors import ConfigError, CotenantError, InvalidValueError
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile, ProfileError, load_profile, save_profile
from cotenant.repository import coruns_path, profile_path
from cotenant.techniques.partitions.cli.profile_corun import divided, parse_split, show
from cotenant.techniques.partitions.coruns import (
    ANTAGONIST,
    FORMAT,
    CoRunProfile,
    CoRunRow,
    Timed,
    load_coruns,
    runs_of,
    save_coruns,
)
from cotenant.techniques.partitions.measure import corun_measure
from cotenant.techniques.partitions.measure.corun_interference import (
    antagonist_features,
    corun_interference,
    valid_rows,
)
from cotenant.techniques.partitions.measure.corun_judge import judge_random
from cotenant.techniques.partitions.measure.corun_measure import CoRunEffort, measure_coruns, partitions_of
from cotenant.techniques.partitions.measure.corun_side import Loop, Side, loop_together, within
from cotenant.work import Share
from repositories import config, fixed, scaled, write_good, write_model

MS = 1_000_000
SETTINGS = ServerConfig()
CORES = tuple(sorted(os.sched_getaffinity(0)))
TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
SHORT = CoRunEffort(budget_s=600.0, runs=4, rounds=1, window_s=0.02, array_bytes=1 << 20)
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="co-runs need two cores")


def quiet(done: int, total: int, text: str) -> None:
    """Nobody looks."""


def made(rows: tuple[CoRunRow, ...] = ROWS, **digests: str) -> CoRunProfile:
    return CoRunProfile(this_device(), "today", "cotenant profile", digests or {"a": "1", "b": "2"}, rows)


def profiled(root: Path, **digests: str) -> Profile:
    """A profile of models that need not be there."""
    point = Point(0, 1, 1, 3, MS, MS, MS, MS)
    models = {name: ModelProfile(digest, (point,), (MS,), (0, 1), 1.0) for name, digest in digests.items()}
    profile = Profile(this_device(), "today", "cotenant profile", models)
    root.mkdir(exist_ok=True)
    save_profile(profile_path(root), profile)
    return profile


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = coruns_path(tmp_path)
    save_coruns(path, made())
    assert load_coruns(path) == made()
    assert [each.name for each in path.parent.iterdir()] == ["coruns.json"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, "cannot be read"),
        (b"{", "is not a cotenant-coruns/1 file"),
        (msgspec.json.encode(replace(made(), format="x")), f"format is 'x', expected '{FORMAT}'"),
        (msgspec.json.encode(made()).replace(b"100000000", b"0"), "positive numbers"),
        (msgspec.json.encode(made()).replace(b'["b",1,1]', b'["b",0,1]'), "numbers from 1"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, change: bytes | None, text: str) -> None:
    path = tmp_path / "coruns.json"
    if change is not None:
        path.write_bytes(change)
    with pytest.raises(ProfileError, match=text) as caught:
        load_coruns(path)
    assert str(path) in str(caught.value)


def test_a_row_without_sense_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least one co-runner"):
        replace(ROWS[0], others=())
    with pytest.raises(InvalidValueError, match="positive numbers"):
        replace(ROWS[0], alone=Timed(1, 1, 0))


def test_factors_compare_like_quantiles() -> None:
    assert ROWS[0].corun().factor == pytest.approx(1.5)
    assert ROWS[0].corun("p95").factor == pytest.approx(2.25)


def test_rows_of_one_measurement_belong_together() -> None:
    assert [len(run) for run in runs_of(ROWS)] == [2, 2, 2, 2]
    assert [len(run) for run in runs_of(ROWS[1:])] == [1, 2, 2, 2]
    triple = [
        replace(ROWS[0], target=(name, 1, 1), others=tuple((other, 1, 1) for other in "abc" if other != name))
        for name in "abc"
    ]
    assert [len(run) for run in runs_of([*triple, *triple, *ROWS[4:6]])] == [3, 3, 2]
    assert runs_of(()) == []


def test_antagonists_tell_what_is_suffered_and_what_is_caused() -> None:
    found = antagonist_features(ROWS)
    assert list(found) == [("a", 1, 1), ("b", 1, 1)]
    assert (found["a", 1, 1].suffered, found["a", 1, 1].caused) == pytest.approx((1.5, 1.1))
    assert antagonist_features(ROWS[4:]) == {}


def test_rows_of_models_that_changed_do_not_hold(tmp_path: Path) -> None:
    save_coruns(coruns_path(tmp_path), made())
    assert valid_rows(tmp_path, profiled(tmp_path, a="1", b="2")) == ROWS
    kept = valid_rows(tmp_path, profiled(tmp_path, a="1", b="other"))
    assert {key[0] for each in kept for key in (each.target, *each.others)} == {"a", ANTAGONIST}
    profile = profiled(tmp_path, a="1", b="2")
    elsewhere = replace(profile, device=replace(profile.device, fingerprint="elsewhere"))
    assert valid_rows(tmp_path, elsewhere) == ()


# --- the model -------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_what_planners_are_told(tmp_path: Path) -> None:
    save_coruns(coruns_path(tmp_path), made())
    profiled(tmp_path, a="1", b="2")
    found = corun_interference(tmp_path)
    assert found is not None
    assert found.factor("a", 1, 1, []) == 1.0
    assert found.factor("a", 1, 1, [("b", 1, 1)]) == pytest.approx(1.2, abs=0.03)
    assert found.factor("a", 1, 1, [("a", 1, 1)]) < found.factor("a", 1, 1, [(ANTAGONIST, 1, 1)])
    assert found.factor_at(0.95, "a", 1, 1, [("b", 1, 1)]) >= found.factor("a", 1, 1, [("b", 1, 1)])
    tails = corun_interference(tmp_path, quantile="p95")
    assert tails is not None
    assert tails.factor("a", 1, 1, [("b", 1, 1)]) > 1.5
    with pytest.raises(InvalidValueError, match="p50, p95"):
        corun_interference(tmp_path, quantile="p99")


def test_without_measurements_there_is_no_model(tmp_path: Path) -> None:
    assert corun_interference(tmp_path) is None
    save_coruns(coruns_path(tmp_path), made())
    assert corun_interference(tmp_path) is None  # nothing says which models are there
    profiled(tmp_path, a="0", b="0")
    assert corun_interference(tmp_path) is None
    coruns_path(tmp_path).write_text("{")
    with pytest.raises(ProfileError):
        corun_interference(tmp_path)


def test_a_tenant_goes_by_the_name_of_its_model_too(tmp_path: Path) -> None:
    write_model(tmp_path, "network", config("a"), {1: fixed})
    write_model(tmp_path, "b", config(), {1: fixed})
    save_coruns(coruns_path(tmp_path), made())
    profiled(tmp_path, a="1", b="2")
    found = corun_interference(tmp_path)
    assert found is not None
    assert found.factor("network", 1, 1, [("b", 1, 1)]) == found.factor("a", 1, 1, [("b", 1, 1)])
    assert found.factor("b", 1, 1, [("network", 1, 1)]) == found.factor("b", 1, 1, [("a", 1, 1)])
    other = [("network", 1, 1)]
    assert found.factor_at(0.9, "b", 1, 1, other) == found.factor_at(0.9, "b", 1, 1, [("a", 1, 1)])


def test_random_co_runs_judge_the_fit_to_the_others() -> None:
    assert judge_random(ROWS) is None
    drawn = pair("b", "b", (1.05, 1.05), "random")
    judged = judge_random((*ROWS, *drawn))
    assert judged is not None
    assert (judged["tests"], judged["fitted_to"]) == (2, len(ROWS))
    assert 0 <= judged["median_error_pct"] <= judged["p90_error_pct"] < 20
    assert judge_random(drawn) is None


# --- partitions ------------------------------------------------------------------------------------------------------


def test_splits_are_read_and_refused() -> None:
    assert parse_split("1,1") == (1, 1)
    for text in ("", "1,x", "0,1", "1;1", "-1"):
        with pytest.raises(ConfigError, match="like '1,1'"):
            parse_split(text)
    with pytest.raises(ConfigError, match=f"needs {len(CORES) + 1} cores"):
        partitions_of(SETTINGS.device, [(len(CORES), 1)])
    with pytest.raises(ConfigError, match="two partitions or more"):
        divided(SETTINGS, ["1"], corun=True)
    assert divided(SETTINGS, [], corun=False) == (SETTINGS, [], ())


@two_cores
def test_partitions_are_neighbouring_cores_and_the_whole() -> None:
    cores = CORES[:2]
    section = DeviceSection(cores=cores)
    assert partitions_of(section, [(1, 1), (1,)]) == (
        Share(cores[:1]),
        Share(cores[1:]),
        Share(cores),
    )
    _, splits, parts = divided(ServerConfig(device=section), [], corun=True)
    assert splits == [(1, 1)]
    assert len(parts) == 3


def test_a_gpu_is_divided_by_its_shares_and_has_no_co_runs_here(tmp_path: Path) -> None:
    gpu = ServerConfig(device=DeviceSection(kind="cuda"))
    settings, splits, parts = divided(gpu, ["50,50"], corun=False)
    assert (settings.device.shares, splits, parts) == ((50.0, 50.0), [(50, 50)], ())
    with pytest.raises(ConfigError, match="in one way at a time"):
        divided(gpu, ["50,50", "20,80"], corun=False)
    with pytest.raises(ConfigError, match="on the CPU alone"):
        divided(gpu, ["50,50"], corun=True)
    profile = profiled(tmp_path, a="1")
    with pytest.raises(ConfigError, match="on the CPU alone"):
        measure_coruns(tmp_path, gpu, profile, [(50, 50)], SHORT, fresh=True, on_step=quiet)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_only_launches_that_ran_wholly_beside_the_others_count() -> None:
    mine = Loop((0, 10, 20, 30, 40), (9, 19, 29, 39, 49), (5, 6, 7, 8, 0))
    assert within(mine, []) == [6, 7, 8, 1]  # the first one finds cold caches
    assert within(mine, [Loop((5,), (45,), (40,))]) == [6, 7, 8]
    assert within(mine, [Loop((12, 20), (18, 45), (6, 20)), Loop((0,), (38,), (38,))]) == [7]
    assert within(mine, [Loop((50,), (60,), (10,))]) == []


def test_many_launches_are_drawn_and_few_are_all_there() -> None:
    import numpy as np

    targets = {(name, batch, 1): MS for name in "ab" for batch in (1, 2)}
    every = corun_measure._candidates([(1, 1)], targets, np.random.default_rng(0))
    assert len(every) == len(set(every)) == 10  # pairs of four, in no order
    many = {(f"m{n}", batch, size): MS for n in range(20) for batch in (1, 2) for size in (1, 2)}
    drawn = corun_measure._candidates([(1, 1, 1), (1, 2)], many, np.random.default_rng(0))
    assert len(drawn) == len(set(drawn)) <= corun_measure.MOST_CANDIDATES
    assert {tuple(sorted(size for _, _, size in launches)) for launches in drawn} == {(1, 1, 1), (1, 2)}
    assert drawn == corun_measure._candidates([(1, 1, 1), (1, 2)], many, np.random.default_rng(0))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("coruns") / "models", "add_sub", "encoder")
    device = ServerConfig(device=DeviceSection(cores=CORES[:2]))
    profile_repository(root, device, TINY, fresh=True, on_step=quiet, partitions=partitions_of(device.device, [(1, 1)]))
    return root


def measure(root: Path, effort: CoRunEffort, *, fresh: bool = False, stop_at: int = -1) -> tuple[CoRunProfile, Any]:
    device = ServerConfig(device=DeviceSection(cores=CORES[:2]))
    steps = 0

    def on_step(done: int, total: int, text: str) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at:
            raise KeyboardInterrupt

    profile = load_profile(profile_path(root))
    return measure_coruns(root, device, profile, [(1, 1)], effort, fresh=fresh, on_step=on_step)


@two_cores
def test_a_profile_has_every_size_of_the_partitions(repository: Path) -> None:
    for model in load_profile(profile_path(repository)).models.values():
        assert {point.cores for point in model.points} == {1, 2}


@two_cores
def test_an_interrupted_measurement_goes_on_and_a_finished_one_is_kept(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    real = corun_measure._Bench.measure

    def counting(self: Any, launches: Any, chosen: str) -> list[CoRunRow]:
        measured.append(launches)
        return real(self, launches, chosen)

    monkeypatch.setattr(corun_measure._Bench, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        measure(repository, SHORT, fresh=True, stop_at=6)
    assert len(measured) == 5
    assert not coruns_path(repository).exists()
    made, errors = measure(repository, SHORT)
    assert errors == {}
    assert len(measured) == len(set(measured)) == len(runs_of(made.rows))  # each once
    batches = {
        name: len({p.items for p in m.points}) for name, m in load_profile(profile_path(repository)).models.items()
    }
    total = sum(batches.values())
    assert len(measured) == 4 + total * (total + 1) // 2  # two models at two batches among antagonists; every pair
    assert load_coruns(coruns_path(repository)) == made
    assert made.device == this_device()
    assert not list(coruns_path(repository).parent.glob("*.journal"))
    for run in runs_of(made.rows):
        assert len(run) == 2
        assert run[0].others == (run[1].target,)
        assert run[0].chosen == run[1].chosen
        for each in run:
            assert 0 < each.alone.p50_ns <= each.alone.p95_ns
            assert 0 < each.beside.p50_ns <= each.beside.p95_ns
    reasons = [run[0].chosen for run in runs_of(made.rows)]
    assert reasons[:4] == ["antagonist"] * 4
    assert reasons[4:].count("random") == (len(reasons) - 4) // corun_measure.RANDOM_EVERY
    measured.clear()
    again, _ = measure(repository, SHORT)
    assert measured == []
    assert again.rows == made.rows
    found = corun_interference(repository)
    assert found is not None
    assert found.factor("encoder", 1, 1, [("add_sub", 1, 1)]) >= 1.0
    write_model(repository, "add_sub", config(max_batch=2), {})  # another model now
    made, errors = measure(repository, SHORT)
    assert "add_sub" in errors
    assert measured == []
    assert {key[0] for each in made.rows for key in (each.target, *each.others)} == {"encoder", ANTAGONIST}


@two_cores
def test_what_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "encoder")
    write_model(root, "slow", config(slo_ms=0.000001, max_batch=2), {1: lambda: scaled(2.0)})
    device = ServerConfig(device=DeviceSection(cores=CORES[:2]))
    profile_repository(root, device, TINY, fresh=True, on_step=quiet)
    made, errors = measure(root, replace(SHORT, budget_s=20.0))
    assert errors == {}
    assert {batch for each in made.rows for name, batch, _ in (each.target, *each.others) if name == "slow"} == {1}


@two_cores
def test_a_size_without_a_profile_is_named(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "encoder")
    device = ServerConfig(device=DeviceSection(cores=CORES[:2]))
    profile, _ = profile_repository(root, device, TINY, fresh=True, on_step=quiet)
    one = {name: replace(model, points=model.points[:0]) for name, model in profile.models.items()}
    with pytest.raises(ConfigError, match="no model was profiled on 1 core"):
        measure_coruns(root, device, replace(profile, models=one), [(1, 1)], SHORT, fresh=True, on_step=quiet)
    with pytest.raises(ConfigError, match="two partitions or more"):
        measure_coruns(root, device, profile, [(1,)], SHORT, fresh=True, on_step=quiet)
    with pytest.raises(ConfigError, match="run 'cotenant profile' first"):
        measure_coruns(root, device, replace(profile, models={}), [(1, 1)], SHORT, fresh=True, on_step=quiet)


@two_cores
def test_a_side_says_what_is_wrong_and_goes_on(repository: Path) -> None:
    side = Side(repository, CORES[:1], 1 << 20)
    try:
        with pytest.raises(CotenantError, match="no model belongs to tenant 'nobody'"):
            side.prepare(("nobody", 1, 1))
        side.prepare((ANTAGONIST, 1, 1))
        [loop] = loop_together([side], MS)
        assert len(loop.began_ns) == len(loop.ended_ns) == len(loop.took_ns) >= 2
        assert min(loop.took_ns) > 0
        assert all(begin < end for begin, end in zip(loop.began_ns, loop.ended_ns, strict=True))
    finally:
        side.close()
    with pytest.raises((CotenantError, OSError)):
        side.prepare(("encoder", 1, 1))


@two_cores
def test_the_command_measures_and_shows(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "encoder")
    (root / "cotenant.toml").write_text(f"[device]\ncores = {list(CORES[:2])}\n", encoding="utf-8")
    arguments = ["profile", str(root), "--budget", "0", "--partitions", "1,1", "--corun", "--budget-s", "2"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["coruns"]
    assert said["measurements"] >= 1
    assert said["file"] == str(coruns_path(root))
    assert len(said["rows"]) == len(load_coruns(coruns_path(root)).rows)
    console = Console(record=True, width=140)
    show(console, said)
    text = console.export_text()
    assert "encoder x" in text
    assert "co-runs saved to" in text
