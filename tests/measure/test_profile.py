"""Profiling a repository: it covers the points, resumes, and never believes what was measured of something else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from client import LoaderHere
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.graph.dfg import Tensor
from cotenant.measure import busy, loader, opened_model, sweep
from cotenant.measure import solo as measure
from cotenant.measure.campaign import Journal, OnStep
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort, Sweep, measure_model
from cotenant.measure.sweep import profile_repository
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import FORMAT, Profile, ProfileError, load_profile, save_profile
from cotenant.repository import find_versions, profile_path
from cotenant.work import Share, Work
from hostile_models import expanding_constant
from onnx_samples import residual_cnn
from repositories import config, scaled, unprofilable, write_bad, write_good, write_model

TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
SETTINGS = ServerConfig()
MODELS = ("add_sub", "encoder", "two")
POINTS = {"add_sub": 4, "encoder": 6, "Owner of two": 3, "Owner of two:1": 3}
"""Powers of two up to max_batch, at each declared shape, on one core."""


class Counting:
    """Counts the measurements that are really done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points = 0
        real = measure.in_turns

        def in_turns(works: Sequence[Callable[[], object]], effort: Effort, **more: bool) -> list[list[int]]:
            self.points += len(works) == 1
            return real(works, effort, **more)

        monkeypatch.setattr(measure, "in_turns", in_turns)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_good(tmp_path / "models", *MODELS)


def sweep_all(root: Path, *, fresh: bool = False, settings: ServerConfig = SETTINGS) -> tuple[Profile, list[str]]:
    steps: list[tuple[int, int, str]] = []
    profile, errors = measured_here(root, settings, fresh=fresh, on_step=lambda *step: steps.append(step))
    assert errors == {}
    texts = [text for _, _, text in steps if text]
    assert [done for done, _, text in steps if text] == list(range(1, len(texts) + 1))
    assert all(done <= total for done, total, _ in steps)
    assert steps[-1][:2] == (len(texts), len(texts))
    return profile, texts


def measured_here(
    root: Path, settings: ServerConfig = SETTINGS, *, fresh: bool = False, on_step: OnStep = lambda *_: None
) -> tuple[Profile, dict[str, str]]:
    """Measured in this process, where measurements are counted."""
    return profile_repository(root, settings, TINY, fresh=fresh, on_step=on_step, loader=LoaderHere(1.0))


def test_a_sweep_covers_every_point_and_unit(root: Path, counting: Counting) -> None:
    profile, steps = sweep_all(root)
    assert counting.points == sum(POINTS.values())
    assert {name: len(model.points) for name, model in profile.models.items()} == POINTS
    assert len(steps) == sum(POINTS.values()) + 2 * len(POINTS)
    encoder = profile.models["encoder"]
    assert {(point.shape, point.items, point.cores) for point in encoder.points} == {
        (shape, items, 1) for shape in (0, 1) for items in (1, 2, 4)
    }
    for model in profile.models.values():
        for point in model.points:
            assert 0 < point.p50_ns <= point.p90_ns <= point.p95_ns <= point.p99_ns
            assert point.runs == 3
        assert min(model.unit_ns) > 0
        assert model.segment_ratio >= 1
        assert model.cuts[0] == 0
        assert model.cuts[-1] == len(model.unit_ns)
    assert load_profile(profile_path(root)) == profile
    assert profile.device == this_device()
    assert profile.created.endswith("+00:00")
    assert not list(profile_path(root).parent.glob("*.journal"))
    predictor = TablePredictor(profile.tables())
    assert predictor.latency_ns(Work("encoder", 0, 2, 0, len(encoder.unit_ns)), 1) > 0


def test_a_profile_of_an_older_version_is_read(root: Path) -> None:
    profile, _ = sweep_all(root)
    stored = msgspec.json.decode(profile_path(root).read_bytes())
    for model in stored["models"].values():
        del model["memory_bytes"]
        for point in model["points"]:
            assert point.pop("cpu_ns") > 0
    profile_path(root).write_bytes(msgspec.json.encode(stored))
    older = load_profile(profile_path(root))
    assert {point.cpu_ns for model in older.models.values() for point in model.points} == {0}
    assert {model.memory_bytes for model in older.models.values()} == {0}
    assert older.tables("p99") == profile.tables("p99")
    assert all(row["cpu_ms"] is row["p99_ms"] is None and row["upper_ms"] > 0 for row in older.rows())


def test_each_version_is_opened_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = opened_model.open_model

    def counted(path: Path, *, name: str, **more: Any) -> Any:
        opened.append(name)
        return real(path, name=name, **more)

    monkeypatch.setattr(opened_model, "open_model", counted)
    for _ in range(2):
        sweep_all(root)
        assert sorted(opened) == sorted(POINTS)
        opened.clear()


@pytest.mark.usefixtures("measured_apart")
def test_a_model_that_ends_its_process_is_left_out(root: Path) -> None:
    write_model(root, "memory", config(more="memory_limit_mib = 100"), {1: expanding_constant})
    profile, errors = profile_repository(root, SETTINGS, TINY, fresh=False, on_step=lambda *_: None)
    assert profile.models.keys() == POINTS.keys()
    assert errors.keys() == {"memory"}
    assert "100 MiB are allowed" in errors["memory"]


def test_a_known_profile_is_not_measured_again_unless_asked(root: Path, counting: Counting) -> None:
    first, _ = sweep_all(root)
    counting.points = 0
    again, steps = sweep_all(root)
    assert (counting.points, steps) == (0, [])
    assert again.models == first.models
    sweep_all(root, fresh=True)
    assert counting.points == sum(POINTS.values())


def test_weights_in_files_beside_the_model_are_part_of_what_a_profile_is_of(tmp_path: Path) -> None:
    """And one that is a single file is identified by its bytes, as profiles have it since there are any."""
    root = write_good(tmp_path / "models", "add_sub")
    write_model(root, "cnn", config(), {1: residual_cnn})
    path = root / "cnn" / "1" / "model.onnx"
    onnx.save(residual_cnn(), path, save_as_external_data=True, location="w.data", size_threshold=0)

    def digest(name: str) -> str:
        (found,) = find_versions(root, name)
        opened = open_version(root, found)
        opened.runner.close()
        return opened.digest

    first = digest("cnn")
    assert digest("cnn") == first
    weights = path.with_name("w.data")
    weights.write_bytes(weights.read_bytes()[::-1])
    assert digest("cnn") != first
    (found,) = find_versions(root, "add_sub")
    opened = open_version(root, found)
    opened.runner.close()
    form = msgspec.json.encode((opened.shapes, found.config.model.max_batch, 10.0))
    assert opened.digest == hashlib.sha256(found.path.read_bytes() + form).hexdigest()[:16]


def test_an_interrupted_sweep_goes_on_where_it_stopped(root: Path, counting: Counting) -> None:
    stop_after = 7
    for _ in range(2):

        def stop(done: int, total: int, text: str) -> None:
            if done == stop_after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measured_here(root, on_step=stop)
    [journal] = profile_path(root).parent.glob("*.journal")
    with journal.open("ab") as file:
        file.write(b'{"key": "cut sho')  # as a kill in the middle of a write leaves it
    interrupted = counting.points
    profile, _ = sweep_all(root)
    assert counting.points == sum(POINTS.values())  # each point once, whatever was interrupted
    assert 0 < interrupted < counting.points
    assert {name: len(model.points) for name, model in profile.models.items()} == POINTS


def test_disturbed_points_stay_marked_when_a_sweep_goes_on(
    root: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "MOST_OTHERS", -1.0)  # whatever others do is too much

    def stop(done: int, total: int, text: str) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_repository(root, SETTINGS, TINY, fresh=False, on_step=stop)
    profile, _ = sweep_all(root)
    assert counting.points == sum(POINTS.values()) * (1 + TINY.repeats)
    points = [point for model in profile.models.values() for point in model.points]
    assert all(point.is_disturbed and point.cpu_ns > 0 for point in points)


@pytest.mark.parametrize(
    "torn", [b'{"key": "cut sho', b'{"key": "b", "value": "\xc3', b"\x00\x00", b"[1, 2]\n17", b"\n"]
)
def test_a_line_cut_short_costs_itself_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "deep" / "x.journal"
    Journal(path).put("first", [1, 2])
    for number in range(3):
        with path.open("ab") as file:
            file.write(torn)
        Journal(path).put(f"after {number}", number)
    again = Journal(path)
    assert again.values() == ([1, 2], 0, 1, 2)
    assert again.remember("after 1", lambda: 17) == 1
    again.remove()
    assert Journal(path).values() == ()


def test_what_has_changed_is_measured_again_and_nothing_else(root: Path, counting: Counting) -> None:
    first, _ = sweep_all(root)
    counting.points = 0
    write_model(root, "add_sub", config(max_batch=2), {})
    profile, _ = sweep_all(root)
    assert counting.points == 2
    assert profile.models["encoder"] == first.models["encoder"]
    assert profile.models["add_sub"].digest != first.models["add_sub"].digest
    counting.points = 0
    write_model(root, "add_sub", config(max_batch=2), {1: residual_cnn})
    sweep_all(root)
    assert counting.points == 2


def test_a_file_under_another_name_or_version_is_not_measured_again(root: Path, counting: Counting) -> None:
    first, _ = sweep_all(root)
    counting.points = 0
    (root / "two" / "3").mkdir()
    (root / "two" / "3" / "model.onnx").write_bytes((root / "two" / "1" / "model.onnx").read_bytes())
    write_model(root, "copy", config(max_batch=4), {1: lambda: scaled(2.0)})
    profile, _ = sweep_all(root)
    assert counting.points == 0
    assert profile.models["Owner of two"] == profile.models["Owner of two:1"] == first.models["Owner of two:1"]
    assert profile.models["Owner of two:2"] == profile.models["copy"] == first.models["Owner of two"]


def test_longest_segments_are_part_of_the_digest(tmp_path: Path, counting: Counting) -> None:
    root = tmp_path / "models"
    write_model(root, "cnn", config(), {1: residual_cnn})
    whole, _ = sweep_all(root)
    assert len(whole.models["cnn"].cuts) == 2
    write_model(root, "cnn", config() + "[segments]\nmax_ms = 0.000001\n", {})
    cut, _ = sweep_all(root)
    assert len(cut.models["cnn"].cuts) == len(cut.models["cnn"].unit_ns) + 1
    assert cut.models["cnn"].segment_ratio >= 1


def test_a_profile_of_another_device_is_replaced(root: Path, counting: Counting) -> None:
    profile, _ = sweep_all(root)
    path = profile_path(root)
    save_profile(path, replace(profile, device=replace(profile.device, fingerprint="0123456789ab")))
    counting.points = 0
    again, _ = sweep_all(root)
    assert counting.points == sum(POINTS.values())
    assert again.device == this_device()


def test_what_another_device_left_unfinished_is_not_believed(
    root: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    other = replace(this_device(), fingerprint="0123456789ab")
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "this_device", lambda *_: other)
        with pytest.raises(KeyboardInterrupt):
            measured_here(root, on_step=stop)
    assert counting.points == 2  # the units come first
    counting.points = 0
    sweep_all(root)
    assert counting.points == sum(POINTS.values())


@pytest.mark.skipif(this_device().cores < 2, reason="one core only")
def test_lanes_of_more_cores_are_measured_when_they_come(root: Path, counting: Counting) -> None:
    sweep_all(root)
    counting.points = 0
    both = msgspec.structs.replace(SETTINGS, device=DeviceSection(lanes="all"))
    profile, _ = sweep_all(root, settings=both)
    assert counting.points == 2 * sum(POINTS.values())  # one core and all of them
    for model in profile.models.values():
        assert {point.cores for point in model.points} == {1, this_device().cores}
    counting.points = 0
    sweep_all(root, settings=SETTINGS)
    assert counting.points == 0


def test_what_was_measured_at_other_sizes_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models that a sweep fails at, or does not come to before it is interrupted."""
    first, _ = sweep_all(root)
    wide = {
        name: replace(model, points=tuple(replace(point, cores=77) for point in model.points))
        for name, model in first.models.items()
    }
    save_profile(profile_path(root), replace(first, models=wide))

    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("encoder") and "units" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured_here(root, on_step=stop)
    interrupted = load_profile(profile_path(root)).models
    assert interrupted["encoder"] == wide["encoder"]
    assert {point.cores for point in interrupted["add_sub"].points} == {1, 77}

    def fail(model: Any, *rest: Any) -> Any:
        if model.name == "encoder":
            raise ModelError(model.path, "out of memory", "Buy some")
        return measure_model(model, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "measure_model", fail)
        _, errors = measured_here(root)
    assert list(errors) == ["encoder"]
    assert load_profile(profile_path(root)).models["encoder"] == wide["encoder"]
    again, _ = sweep_all(root)
    for name, model in again.models.items():
        assert set(wide[name].points) < set(model.points)
        assert {point.cores for point in model.points} == {1, 77}
        assert len(model.points) == 2 * POINTS[name]
    write_model(root, "add_sub", config(max_batch=2), {})
    assert {point.cores for point in sweep_all(root)[0].models["add_sub"].points} == {1}
    assert {point.cores for point in sweep_all(root, fresh=True)[0].models["encoder"].points} == {1}


def test_models_that_cannot_be_profiled_are_left_out_with_the_reason(root: Path) -> None:
    write_bad(write_good(root, "chooser"))
    write_model(root, "fails_always", config(), {1: unprofilable})
    profile, errors = profile_repository(root, SETTINGS, TINY, fresh=False, on_step=lambda *_: None)
    assert profile.models.keys() == {*POINTS, "chooser"}
    assert "already owns model 'chooser'" in errors["twin"]
    assert "set max_batch = 1" in errors["no_batch"]
    assert "slo_ms is missing" in errors["no_slo"]
    assert "units 0 to" in errors["fails_always"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read .*make it with 'cotenant profile'"),
        (b"", "is not a cotenant-profile/1 file .*remove it and make it with 'cotenant profile'"),
        (b"[]", "is not a cotenant-profile/1 file .*remove it and make it with 'cotenant profile'"),
        (
            b'{"device": 5, "format": "cotenant-profile/1"}',
            "is not a cotenant-profile/1 file .*remove it and make it with 'cotenant profile'",
        ),
        (b"\xff", "is not a cotenant-profile/1 file .*remove it and make it with 'cotenant profile'"),
    ],
)
def test_files_that_are_no_profile_are_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=sentence) as caught:
        load_profile(path)
    assert str(caught.value).startswith(str(path))


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, Profile(this_device(), "", "", {}, "cotenant-profile/0"))
    with pytest.raises(ProfileError, match=f"format is 'cotenant-profile/0', expected '{FORMAT}'"):
        load_profile(path)


def test_saving_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / ".cotenant" / "profile.json"
    save_profile(path, Profile(this_device(), "", "", {}))
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_the_device_is_the_same_every_time() -> None:
    assert this_device() == this_device()
    assert len(this_device().fingerprint) == 12
    assert this_device().cores >= 1
    assert this_device().memory_bytes > 1 << 28


def test_batches_are_powers_of_two_and_the_largest() -> None:
    def batches(largest: int) -> tuple[int, ...]:
        return Sweep("", ({"x": (1,)},), largest, ((0,),), 1).batches

    assert [batches(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


@pytest.fixture
def cnn(tmp_path: Path) -> Iterator[SegmentedModel]:
    write_model(tmp_path, "cnn", config(), {1: residual_cnn})
    with SegmentedModel.open(tmp_path / "cnn" / "1" / "model.onnx", cache_dir=tmp_path / "graphs") as model:
        yield model


def test_units_are_timed_one_by_one(cnn: SegmentedModel) -> None:
    inputs = make_inputs(cnn.inputs, {"x": (1, 3, 16, 16)}, 1, True)
    units = cnn.unit_ns(inputs)
    assert len(units) == cnn.unit_count
    assert min(units) > 0


def test_measuring_gives_the_thread_its_cores_back(cnn: SegmentedModel) -> None:

    before = os.sched_getaffinity(0)
    plan = Sweep("d", ({"x": (1, 3, 16, 16)},), 2, (Share(tuple(sorted(before))[:1]),), 1000, TINY)
    told: list[str] = []
    profile = measure_model(cnn, plan, Journal(None), told.append)
    assert os.sched_getaffinity(0) == before
    assert len(told) == plan.steps
    assert len(profile.cuts) > 2
    assert profile.segment_ratio >= 1

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_model(cnn, plan, Journal(None), interrupt)
    assert os.sched_getaffinity(0) == before


def test_made_up_inputs_have_the_declared_shapes() -> None:
    tensors = (
        Tensor("x", "tensor(float)", (None, 3)),
        Tensor("n", "tensor(int64)", (None,)),
        Tensor("s", "tensor(string)", (None,)),
    )
    shape = {"x": (1, 3), "n": (1,), "s": (1,)}
    made = make_inputs(tensors, shape, 4, True)
    assert {name: array.shape for name, array in made.items()} == {"x": (4, 3), "n": (4,), "s": (4,)}
    assert [made[name].dtype for name in "xns"] == [np.float32, np.int64, np.object_]
    assert (make_inputs(tensors, shape, 4, True)["x"] == made["x"]).all()
    assert make_inputs(tensors, shape, 1, False)["x"].shape == (1, 3)
