"""Measurements are found by content: every command that believes a profile refuses that of another model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from commands import Run
from cotenant.cluster.head import read_spec
from cotenant.config import ModelConfig, ModelSection, SampleSection, SegmentsSection, TenantSection
from cotenant.errors import CotenantError
from cotenant.profiles.profile_file import load_profile, save_profile
from cotenant.repository import ModelVersion, find_versions, profile_path
from cotenant.repository.measured_content import StaleProfileError, content_of, valid_profile
from repositories import scaled, write_model

CONFIG = "[tenant]\nslo_ms = 20000\nweight = 1.0\n[model]\nmax_batch = 2\n"
TENANTS = '[[device]]\nname = "cpu"\ncores = 1\n[[tenant]]\nname = "net"\nrate = 1\n'
WORKLOAD = 'duration_s = 1\n[[tenant]]\nmodel = "net"\nrate = 5\n'

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled repository, a file of tenants, a workload and a plan, to be copied."""
    from cotenant.config import load_server_config
    from cotenant.measure.solo import Effort
    from cotenant.measure.sweep import profile_repository

    folder = tmp_path_factory.mktemp("measured")
    root = folder / "models"
    write_model(root, "net", CONFIG, {1: lambda: scaled(2.0)})
    write_model(root, "other", CONFIG, {1: lambda: scaled(4.0)})
    server = load_server_config(root / "cotenant.toml", {"device.cores": [min(os.sched_getaffinity(0))]})
    _, errors = profile_repository(root, server, Effort(0.0, 1, 1, 0), fresh=False, on_step=lambda *_: None)
    assert errors == {}
    (folder / "tenants.toml").write_text(TENANTS)
    (folder / "load.toml").write_text(WORKLOAD)
    return folder


@pytest.fixture
def here(measured: Path, tmp_path: Path, run: Run) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(measured, folder)
    arguments = ("--profiles", folder / "models", "--quick", "--planner", "elastic", "-o", folder / "plan.toml")
    assert run("plan", folder / "tenants.toml", *arguments)[0] == 0
    return folder


COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "{}/tenants.toml", "--profiles", "{}/models", "--quick", "--planner", "elastic"),
    "check": ("plan", "--check", "{}/plan.toml", "--profiles", "{}/models"),
    "simulate": ("simulate", "{}/load.toml", "{}/models"),
    "simulate a plan": ("simulate", "{}/load.toml", "{}/models", "--plan", "{}/plan.toml"),
    "models": ("models", "{}/models", "--json"),
    "serve": ("serve", "{}/models", "--plan", "{}/plan.toml", "--frontends", "0"),
    "cluster": ("cluster",),
}


def asked(run: Run, here: Path, command: str, *more: str) -> tuple[bool, str]:
    """Whether a command goes on with what the profile says, and what it prints."""
    if command == "cluster":  # without Ray
        try:
            read_spec(here / "tenants.toml", here / "models", None, "elastic", 0.1, stale=bool(more))
        except CotenantError as error:
            return False, str(error)
        return True, ""
    status, out, err = run(*[text.format(here) for text in COMMANDS[command]], *more)
    text = " ".join((out + err).split())
    return status == 0 or "the plan was laid out" in text, text


@pytest.fixture(autouse=True)
def server_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise CotenantError("the plan was laid out")

    monkeypatch.setattr("cotenant.serve.server.Server.__init__", stop)


def other_file(root: Path) -> None:
    write_model(root, "net", CONFIG, {1: lambda: scaled(3.0)})


def more_files(root: Path) -> None:
    (root / "net" / "1" / "weights.bin").write_bytes(b"more")


def newer_version(root: Path) -> None:
    write_model(root, "net", CONFIG, {2: lambda: scaled(3.0)})


def larger_batch(root: Path) -> None:
    (root / "net" / "config.toml").write_text(CONFIG.replace("max_batch = 2", "max_batch = 4"))


def touch(root: Path) -> None:
    for path in sorted((root / "net").rglob("*")):
        os.utime(path, (1, 1))


def write_again(root: Path) -> None:
    path = root / "net" / "1" / "model.onnx"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def other_weight(root: Path) -> None:
    text = "# a comment\n" + CONFIG.replace("weight = 1.0", "weight = 2.0\npriority = 3\nmax_queue = 9")
    (root / "net" / "config.toml").write_text(text)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("change", [other_file, more_files, newer_version, larger_batch])
def test_what_was_measured_of_another_model_is_refused(run: Run, here: Path, change: Change, command: str) -> None:
    change(here / "models")
    goes_on, text = asked(run, here, command)
    assert not goes_on, text
    where = "net/config.toml" if change is larger_batch else "files in net/"
    assert f"'net': {where}" in text
    assert "changed since it was measured" in text
    assert f"'cotenant profile {here / 'models'}'" in text
    assert "'other':" not in text
    goes_on, text = asked(run, here, command, "--stale")
    assert goes_on, text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("change", [touch, write_again, other_weight])
def test_what_changes_nothing_is_accepted(run: Run, here: Path, change: Change, command: str) -> None:
    change(here / "models")
    goes_on, text = asked(run, here, command)
    assert goes_on, text
    assert "stale" not in text


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"models"}))
def test_what_is_not_asked_for_may_be_stale(run: Run, here: Path, command: str) -> None:
    write_model(here / "models", "other", CONFIG, {1: lambda: scaled(3.0)})
    goes_on, text = asked(run, here, command)
    assert goes_on, text
    assert "stale" not in text


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"models", "serve", "simulate a plan"}))
def test_a_missing_profile_is_said(run: Run, here: Path, command: str) -> None:
    profile_path(here / "models").unlink()
    goes_on, text = asked(run, here, command)
    assert not goes_on
    assert "profile" in text
    assert "has no profile yet: run 'cotenant profile" in text or "make it with 'cotenant profile'" in text


def test_models_says_what_has_no_profile(run: Run, here: Path) -> None:
    profile_path(here / "models").unlink()
    goes_on, text = asked(run, here, "models")
    assert goes_on
    assert '"profile": "no"' in text


def test_a_profile_of_before_is_renewed_without_measuring(run: Run, here: Path) -> None:
    root, path = here / "models", profile_path(here / "models")
    before = load_profile(path)
    old = {name: replace(model, content=UNSET) for name, model in before.models.items()}
    save_profile(path, replace(before, models=old))
    with pytest.raises(StaleProfileError, match="has no digests of its files"):
        valid_profile(root)
    assert run("profile", root, "--json", "--budget", 0)[0] == 0
    assert valid_profile(root).models == before.models


KEYS: dict[str, st.SearchStrategy[object]] = {
    "max_batch": st.sampled_from([1, 8]),
    "batching": st.sampled_from(["exact", "trust"]),
    "shapes": st.sampled_from([({"x": (1, 8)},), ({"x": (1, 4)},)]),
    "precision": st.sampled_from(["fp32", "fp16"]),
    "channels_last": st.booleans(),
    "placement": st.just("auto"),
}
OWNER: dict[str, st.SearchStrategy[object]] = {
    "weight": st.floats(0.1, 9),
    "share": st.floats(0.1, 1),
    "rate": st.floats(1, 9),
    "priority": st.integers(1, 9),
    "max_queue": st.integers(1, 9),
    "memory_limit_mib": st.floats(1, 9),
    "slo_ms": st.floats(6, 9),
}


def version(folder: Path, config: ModelConfig) -> ModelVersion:
    return ModelVersion("net", 1, True, folder / "net" / "1" / "model.onnx", config)


@settings(max_examples=60)
@given(data=st.data())
def test_every_key_that_latency_depends_on_counts_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "keys"
    if not folder.exists():
        write_model(folder, "net", CONFIG, {1: b"whatever"})
        (folder / "net" / "x.npy").write_bytes(b"values")
    plain = ModelConfig(TenantSection(slo_ms=5.0))
    before = content_of(version(folder, plain))
    fields = data.draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True))
    owner = data.draw(st.lists(st.sampled_from(sorted(OWNER)), unique=True))
    tenant = structs.replace(plain.tenant, **{name: data.draw(OWNER[name]) for name in owner})
    model = structs.replace(plain.model, **{name: data.draw(KEYS[name]) for name in fields})
    segments = data.draw(st.sampled_from([SegmentsSection(), SegmentsSection(max_ms=3.0)]))
    samples = data.draw(st.sampled_from([{}, {"x": SampleSection(file="x.npy")}, {"x": SampleSection(values=(1,))}]))
    made = ModelConfig(tenant, model, segments, samples)
    after = content_of(version(folder, made))
    is_same = (model, segments, samples) == (ModelSection(), SegmentsSection(), {})
    assert (after.config == before.config) == is_same
    assert (after.files == before.files) == ("x.npy" not in str(samples))


def test_all_files_of_a_version_count(tmp_path: Path) -> None:
    write_model(tmp_path, "net", CONFIG, {1: b"model", 2: b"model"})
    first, second = find_versions(tmp_path, "net")
    assert content_of(first) == content_of(second)
    seen = {content_of(first)}
    for name, content in (("a", b"1"), ("b", b"1"), ("b", b"2"), ("deep/b", b"2"), ("a", b"12")):
        path = tmp_path / "net" / "1" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        assert content_of(first) not in seen
        seen.add(content_of(first))
    (tmp_path / "net" / "1" / ".hidden").write_bytes(b"")
    assert content_of(first) in seen
