"""Measuring groups on the real executor: it resumes, forgets what is stale, and what is fitted can be served from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cotenant.cli import main
from cotenant.config import DeviceSection, PolicySection, ServerConfig
from cotenant.errors import ConfigError
from cotenant.policies.overlap import Overlap
from cotenant.predict.grouped import GroupedPredictor
from cotenant.predict.overlap_features import TenantFacts
from cotenant.predict.overlap_file import OverlapFileError, groups_path, overlap_path
from cotenant.predict.overlap_fit import FitSettings
from cotenant.predict.overlap_report import LEVELS, cross_validate
from cotenant.predict.protocol import Group, Member
from cotenant.predict.samples import SamplesError, load_samples
from cotenant.profile import groups as groups_module
from cotenant.profile.groups import GroupEffort, facts_of, fit_groups, load_overlap, measure_groups, slowdowns
from cotenant.profile.measure import Effort
from cotenant.profile.sweep import profile_repository
from cotenant.profile.table import Profile
from cotenant.report.predictor import write_predictor_report
from cotenant.serve import groups as serve_groups
from cotenant.serve.groups import settle_barrier
from cotenant.serve.server import Server
from onnx_samples import residual_cnn
from repositories import config, write_good, write_model

TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
GROUPS = GroupEffort(count=60, runs=3, warm_up=1)
CORES = tuple(sorted(os.sched_getaffinity(0)))
SETTINGS = ServerConfig(device=DeviceSection(cores=CORES[:2]))
SLOTS = min(2, len(CORES))


def profiled(root: Path) -> Profile:
    return profile_repository(root, SETTINGS, TINY, fresh=False, on_step=lambda *_: None)[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = write_good(tmp_path / "models", "add_sub", "encoder")
    write_model(root, "cnn", config(max_batch=4) + "[segments]\nmax_ms = 0.000001\n", {1: residual_cnn})
    return root


class Counting:
    """Counts the groups that are really run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = 0
        real = groups_module._Bench.measure

        def measure(bench: groups_module._Bench, group: tuple[Member, ...], effort: GroupEffort) -> list[int]:
            self.groups += 1
            return real(bench, group, effort)

        monkeypatch.setattr(groups_module._Bench, "measure", measure)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def measure(root: Path, profile: Profile, effort: GroupEffort = GROUPS) -> list[tuple[Member, ...]]:
    steps: list[tuple[int, int, str]] = []
    samples, errors = measure_groups(
        root, SETTINGS, profile, effort, fresh=False, on_step=lambda *step: steps.append(step)
    )
    assert errors == {}
    assert steps[-1][0] == steps[-1][1]
    assert all(len(sample.runs_ns) == effort.runs for sample in samples)
    return [sample.members for sample in samples]


def test_groups_are_measured_fitted_and_loaded(root: Path) -> None:
    profile = profiled(root)
    groups = measure(root, profile)
    assert 20 <= len(groups) <= 60
    assert {len(group) for group in groups} == set(range(1, SLOTS + 1))
    assert {member.tenant for group in groups for member in group} == {"add_sub", "encoder", "cnn"}
    assert any(member.start > 0 for group in groups for member in group if member.tenant == "cnn")
    assert not list(groups_path(root).parent.glob("*.journal"))
    fitted = fit_groups(root, profile)
    loaded = load_overlap(root, profile, quantile=0.9)
    assert loaded.quantile == 0.9
    assert loaded.group_ns(groups) == fitted.at(0.9).group_ns(groups)
    assert all(loaded.is_seen(name) for name in profile.models)
    header, _ = load_samples(groups_path(root))
    assert header.fingerprint == profile.device.fingerprint
    assert header.digests == {name: model.digest for name, model in profile.models.items()}


def test_an_interrupted_sweep_goes_on_and_a_finished_one_is_not_repeated(root: Path, counting: Counting) -> None:
    profile = profiled(root)

    def stop(done: int, total: int, text: str) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_groups(root, SETTINGS, profile, GROUPS, fresh=False, on_step=stop)
    assert counting.groups == 12
    groups = measure(root, profile)
    assert counting.groups == len(groups)
    assert measure(root, profile) == groups
    assert counting.groups == len(groups)


def test_the_time_is_bounded(root: Path, counting: Counting) -> None:
    assert measure(root, profiled(root), replace(GROUPS, budget_s=0.0)) == []
    assert counting.groups == 0


def test_groups_of_changed_or_removed_models_are_left_out(root: Path, counting: Counting) -> None:
    profile = profiled(root)
    groups = measure(root, profile)
    fit_groups(root, profile)
    write_model(root, "add_sub", config(max_batch=2), {})
    changed = profiled(root)
    few = replace(changed, models={"encoder": changed.models["encoder"]})
    with pytest.raises(SamplesError, match="of the present models"):
        fit_groups(root, few)
    loaded = load_overlap(root, changed)
    assert not loaded.is_seen("add_sub")
    assert loaded.is_seen("encoder")
    assert loaded.group_ns([(Member("add_sub", 0, 1, 0, changed.models["add_sub"].cuts[-1], 1),)])[0] > 0
    counting.groups = 0
    again = measure(root, changed)
    kept = [group for group in groups if all(member.tenant != "add_sub" for member in group)]
    assert set(kept) <= set(again)
    assert counting.groups == len(again) - len(kept)


def test_what_cannot_be_used_is_said(root: Path) -> None:
    profile = profiled(root)
    with pytest.raises(OverlapFileError, match="profile --groups"):
        load_overlap(root, profile)
    with pytest.raises(ConfigError, match="no model has a profile"):
        measure_groups(root, SETTINGS, replace(profile, models={}), GROUPS, fresh=False, on_step=lambda *_: None)
    measure(root, profile)
    fit_groups(root, profile)
    elsewhere = replace(profile, device=replace(profile.device, fingerprint="other"))
    with pytest.raises(OverlapFileError, match="another device"):
        load_overlap(root, elsewhere)


def test_a_member_that_fails_does_not_hold_up_the_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profiled(root)
    real = groups_module._Bench._tensors

    def tensors(bench: groups_module._Bench, member: Member) -> object:
        return {} if member.tenant == "add_sub" else real(bench, member)

    monkeypatch.setattr(groups_module._Bench, "_tensors", tensors)
    samples, errors = measure_groups(root, SETTINGS, profile, GROUPS, fresh=True, on_step=lambda *_: None)
    assert all(member.tenant != "add_sub" for sample in samples for member in sample.members)
    assert samples
    assert any("add_sub" in name and "a member of the group failed" in text for name, text in errors.items())


def test_the_report_says_how_wrong_it_is(root: Path, tmp_path: Path) -> None:
    profile = profiled(root)
    measure(root, profile, replace(GROUPS, count=120))
    _, samples = load_samples(groups_path(root))
    quick = FitSettings(width=8, steps=60, hidden_steps=20)
    judged = cross_validate(samples, facts_of(profile), settings=quick)
    assert sorted(each.sample.members for each in judged.judged) == sorted(sample.members for sample in samples)
    assert {tenant for tenant, _ in judged.unseen} <= {"add_sub", "encoder", "cnn"}
    assert [level for level, _ in judged.coverage] == list(LEVELS)
    shares = [share for _, share in judged.coverage]
    assert shares == sorted(shares)
    write_predictor_report(tmp_path / "page.html", judged)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert f"{judged.mape:.1f} %" in page
    assert all(name in page for name, _, _ in judged.by_name())


def test_the_command_measures_fits_and_reports(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", root, "--budget", 0, "--groups", "--groups-count", 60, "--json"]
    monkeypatch.setattr("sys.argv", ["cotenant", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    found = json.loads(capfd.readouterr().out)
    assert 20 <= found["groups"]["groups"] <= 60
    assert found["report"] is None
    assert overlap_path(root).exists()
    assert isinstance(facts_of(profiled(root))[0], TenantFacts)


def test_pairs_side_by_side_are_set_against_the_slower_one_alone(root: Path) -> None:
    profile = profiled(root)
    measure(root, profile)
    fitted = fit_groups(root, profile)
    found = slowdowns(fitted, profile, 1)
    assert list(found) == [
        *(("add_sub", other) for other in ("add_sub", "cnn", "encoder")),
        *(("cnn", other) for other in ("cnn", "encoder")),
        ("encoder", "encoder"),
    ]
    pair = tuple(Member(name, 0, 1, 0, profile.models[name].cuts[-1], 1) for name in ("cnn", "encoder"))
    alone = max(
        next(p.p50_ns for p in profile.models[m.tenant].points if (p.shape, p.items, p.cores) == (0, 1, 1))
        for m in pair
    )
    assert found["cnn", "encoder"] == fitted.at(0.5).group_ns([pair])[0] / alone


@pytest.mark.skipif(SLOTS < 2, reason="one core only")
def test_measured_groups_say_whether_lanes_need_a_barrier(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = msgspec.structs.replace(SETTINGS, policy=PolicySection(name="overlap"))
    assert settle_barrier(root, SETTINGS) == SETTINGS, "other policies have no barrier"
    assert settle_barrier(root, overlap).policy.barrier is False, "nothing was measured"
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    for typical, needed in ((1.1, False), (1.3, False), (1.7, True)):
        monkeypatch.setattr(serve_groups, "slowdowns", lambda *_, typical=typical: {("a", "b"): typical})
        assert settle_barrier(root, overlap).policy.barrier is needed
    chosen = msgspec.structs.replace(overlap, policy=PolicySection(name="overlap", barrier=False))
    assert settle_barrier(root, chosen) == chosen


@pytest.mark.skipif(SLOTS < 2, reason="one core only")
def test_a_server_foresees_the_groups_that_its_decisions_will_ask_for(root: Path) -> None:
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    settings = msgspec.structs.replace(
        SETTINGS,
        device=DeviceSection(cores=CORES[:2], lanes="single", isolation="thread"),
        policy=PolicySection(name="overlap", barrier=True),
    )
    server = Server(root, settings)
    server.start()
    try:
        for step in ("started", "model loaded again"):
            predictor = server.driver.read(lambda engine: engine.predictor)
            assert isinstance(predictor, GroupedPredictor)
            assert isinstance(server.policy, Overlap)
            groups = list(server.policy.likely_groups(server.driver.read(lambda engine: engine.tenants)))
            assert {member.tenant for group in groups for member in group} == {"add_sub", "encoder", "cnn"}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(predictor, "fitted", _Silent())
                assert min(predictor.group_ns(groups)) > 0, step
            server.load("cnn")
    finally:
        server.stop()


class _Silent:
    key, quantile = "silent", 0.95

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        raise AssertionError(f"asked for {len(groups)} groups that should have been foreseen")
