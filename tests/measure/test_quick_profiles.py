"""Quick profiles outlive the server that measured them, on the same processor and with the same libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from cotenant.graph.dfg import Tensor
from cotenant.graph.onnx import vocabulary
from cotenant.measure import quick_profiles
from cotenant.measure.inputs import make_inputs
from cotenant.measure.load_spec import VersionSpec
from cotenant.measure.loader import load
from cotenant.measure.quick_profiles import QuickProfiles
from cotenant.measure.samples import Samples
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile
from cotenant.repository import find_versions, quick_profiles_path
from cotenant.work import Share
from onnx_samples import Sketch, info
from repositories import config, scaled, write_good, write_model


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VersionSpec:
    root = write_good(tmp_path_factory.mktemp("quick") / "models", "add_sub")
    return VersionSpec(str(root), find_versions(root, "add_sub")[0], (Share((0,)),))


@pytest.fixture(scope="module")
def profile(spec: VersionSpec) -> ModelProfile:
    report = load(spec)
    assert report.is_measured
    return report.profile


def test_a_load_with_a_known_profile_measures_nothing(spec: VersionSpec, profile: ModelProfile, tmp_path: Path) -> None:
    path = quick_profiles_path(tmp_path)
    QuickProfiles(path).add(profile)
    known = QuickProfiles(path).known
    assert known == (profile,)
    report = load(VersionSpec(spec.root, spec.found, spec.shares, known))
    assert (report.is_measured, report.profile.points) == (False, profile.points)


def test_another_processor_and_other_libraries_measure_anew(
    profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quick_profiles_path(tmp_path)
    QuickProfiles(path).add(profile)
    here = this_device()
    for other in (replace(here, processor="another"), replace(here, versions={**here.versions, "onnxruntime": "1.0"})):
        monkeypatch.setattr(quick_profiles, "this_device", lambda other=other: other)
        assert QuickProfiles(path).known == ()


def test_disturbed_profiles_and_damaged_files_are_not_kept(profile: ModelProfile, tmp_path: Path) -> None:
    path = quick_profiles_path(tmp_path)
    points = tuple(replace(point, cores=2, is_disturbed=True) for point in profile.points)
    busy = QuickProfiles(path)
    busy.add(replace(profile, points=points))
    assert len(busy.known) == 1
    assert not path.exists()
    on_one_core = replace(profile, points=tuple(replace(point, is_disturbed=True) for point in profile.points))
    busy.add(on_one_core)  # its latencies leave out what others took
    assert QuickProfiles(path).known == (on_one_core,)
    path.write_text("{", encoding="utf-8")
    assert QuickProfiles(path).known == ()


def test_there_is_a_limit(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_profiles, "_MOST", 2)
    kept = QuickProfiles(None)
    for digest in ("a", "b", "a", "c"):
        kept.add(replace(profile, digest=digest))
    assert [each.digest for each in kept.known] == ["a", "c"]


def centred() -> onnx.ModelProto:
    """x without the mean of the rows of its batch; dynamic batch."""
    s = Sketch()
    s.op("Sub", "x", s.op("ReduceMean", "x", axes=[0]), out="y")
    return s.model([info("x", ["batch", 8])], [info("y", ["batch", 8])])


def counted_words() -> onnx.ModelProto:
    """How often a text has two words; any other text has none of them."""
    s = Sketch()
    words = {"pool_strings": ["pump", "invoice"], "ngram_counts": [0], "ngram_indexes": [0, 1]}
    s.op("TfIdfVectorizer", "text", out="y", mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0, **words)
    return s.model([info("text", ["batch", 1], TensorProto.STRING)], [info("y", ["batch", 2])])


@pytest.mark.parametrize(
    ("make", "verdict", "rows"),
    [(centred, "refused", 1), (lambda: scaled(2.0), "proven", 8), (counted_words, "tried", 8)],
)
def test_what_init_measured_is_not_measured_again(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], verdict: str, rows: int
) -> None:
    """`init` writes the `max_batch` that its trial allows, which is part of a profile's digest."""
    write_model(tmp_path, "new", config(), {1: make})
    [found] = find_versions(tmp_path, "new")
    drafted = load(VersionSpec(str(tmp_path), found, (Share((0,)),), is_draft=True))
    assert (drafted.is_measured, drafted.facts.merging.verdict) == (True, verdict)
    write_model(tmp_path, "new", config(max_batch=rows), {1: make})
    [found] = find_versions(tmp_path, "new")
    served = load(VersionSpec(str(tmp_path), found, (Share((0,)),), (drafted.profile,)))
    assert (served.is_measured, served.facts.found.config.model.max_batch) == (False, rows)


def test_made_up_texts_are_of_words_that_the_model_knows(tmp_path: Path) -> None:
    onnx.save(counted_words(), tmp_path / "model.onnx")
    samples = Samples({}, {}, "", vocabulary(tmp_path / "model.onnx"))
    tensor = Tensor("text", "tensor(string)", (None, 1))
    made = make_inputs([tensor], {"text": (1, 1)}, 8, True, samples)["text"]
    assert made.shape == (8, 1)
    assert {word for text in made.ravel() for word in text.split()} == {"pump", "invoice"}
    assert len(set(made.ravel())) > 1
    assert (make_inputs([tensor], {"text": (1, 1)}, 2, True)["text"] == "text").all()
