"""Measuring groups on the real executor: it resumes, forgets what is stale, and what is fitted can be served from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cotenant.cli import main
from cotenant.config import DeviceSection, PolicySection
from cotenant.core.actions import Launch, group_of
from cotenant.core.predictor import Group, Member
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.measure.group_models import resolved, resolved_by
from cotenant.policies.facts import PairLatency
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.repository import groups_path, overlap_path
from cotenant.serve.server import Server
from cotenant.techniques.overlap.cli import errors_table
from cotenant.techniques.overlap.group_samples import SamplesError, load_samples
from cotenant.techniques.overlap.measure import measured_groups as groups_module
from cotenant.techniques.overlap.measure import overlap_models
from cotenant.techniques.overlap.measure.measured_groups import (
    GroupEffort,
    facts_of,
    fit_groups,
    load_overlap,
    measure_groups,
)
from cotenant.techniques.overlap.measure.overlap_models import pair_latencies
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.overlap.predict.overlap_errors import held_out, held_out_errors
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import OverlapFileError
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings
from cotenant.trace import read
from cotenant.work import Work
from group_campaign import CORES, GROUPS, SETTINGS, SLOTS, measure, profiled
from onnx_samples import residual_cnn
from repositories import config, write_good, write_model
from scenario import ONE_LANE, TWO_LANES

MILD = PairLatency((10, 10), 12)


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


def test_groups_are_measured_fitted_and_loaded(root: Path) -> None:
    profile = profiled(root)
    groups = measure(root, profile)
    assert 20 <= len(groups) <= 60
    assert {len(group) for group in groups} == set(range(1, SLOTS + 1))
    assert {member.work.tenant for group in groups for member in group} == {"add_sub", "encoder", "cnn"}
    assert any(member.work.start > 0 for group in groups for member in group if member.work.tenant == "cnn")
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
    assert loaded.group_ns([(Member(Work("add_sub", 0, 1, 0, changed.models["add_sub"].cuts[-1]), 1),)])[0] > 0
    counting.groups = 0
    again = measure(root, changed)
    kept = [group for group in groups if all(member.work.tenant != "add_sub" for member in group)]
    assert set(kept) <= set(again)
    assert counting.groups == len(again) - len(kept)


def test_what_cannot_be_used_is_said(root: Path) -> None:
    profile = profiled(root)
    with pytest.raises(OverlapFileError, match="profile --groups"):
        load_overlap(root, profile)
    with pytest.raises(ConfigError, match="no model has a valid profile"):
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
        return {} if member.work.tenant == "add_sub" else real(bench, member)

    monkeypatch.setattr(groups_module._Bench, "_tensors", tensors)
    samples, errors = measure_groups(root, SETTINGS, profile, GROUPS, fresh=True, on_step=lambda *_: None)
    assert all(member.work.tenant != "add_sub" for sample in samples for member in sample.members)
    assert samples
    assert any("add_sub" in name and "a member of the group failed" in text for name, text in errors.items())


def test_errors_are_those_of_groups_that_no_fit_has_seen(root: Path) -> None:
    profile = profiled(root)
    measure(root, profile, replace(GROUPS, count=120))
    _, samples = load_samples(groups_path(root))
    quick = FitSettings(width=8, steps=60, hidden_steps=20)
    folds = list(held_out(samples, facts_of(profile), settings=quick))
    assert sorted(each.members for tests, _ in folds for each in tests) == sorted(each.members for each in samples)
    found = held_out_errors(samples, facts_of(profile), settings=quick)
    assert sum(count for count, _ in found.by_tenants.values()) == found.groups == len(samples)
    mean = sum(count * mape for count, mape in found.by_tenants.values()) / found.groups
    assert found.mape_pct == pytest.approx(mean)
    assert 0 < found.coverage_pct <= 100
    console = Console(record=True, width=120)
    console.print(errors_table(found))
    text = console.export_text()
    assert f"MAPE {found.mape_pct:.1f} %" in text
    assert "single runs below the 99 % quantile" in text
    with pytest.raises(InvalidValueError, match="samples"):
        held_out_errors(samples[:10], facts_of(profile), settings=quick)


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


@pytest.mark.skipif(SLOTS < 2, reason="one core only")
def test_a_simulation_and_the_story_of_a_query_say_what_was_measured_of_its_groups(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    workload, path = root.parent / "workload.toml", root.parent / "trace.jsonl"
    loads = "".join(f'[[tenant]]\nmodel = "{name}"\nrate = 100.0\n' for name in ("add_sub", "cnn"))
    workload.write_text(f"seed = 3\nduration_s = 1.0\n{loads}", encoding="utf-8")

    def said(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["cotenant", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, None)
        return capfd.readouterr().out

    simulate = ("simulate", workload, root, "--policy", "overlap", "--set", "policy.barrier=true", "--trace", path)
    lanes = ("--cores", ",".join(map(str, CORES[:2])), "--lanes", "single")
    (run,) = json.loads(said(*simulate, *lanes, "--json"))["runs"]
    assert {each["members"] for each in run["groups"]} <= {1, 2}
    assert run["groups"]
    assert all(each["started"] >= each["nothing_near"] and not each["unmeasured"] for each in run["groups"])
    assert "groups started: " in said(*simulate, *lanes)
    fitted = load_overlap(root, profile)
    records = list(read(path)[1])
    launches = [
        msgspec.convert(action, Launch) for record in records for kind, action in record.actions if kind == "Launch"
    ]
    assert len(launches) >= sum(each["started"] for each in run["groups"])
    query, last = launches[-1].queries[0], [each for each in launches if group_of(each) == group_of(launches[-1])]
    near = fitted.near(tuple(Member(each.work, each.share.size) for each in last))
    told = said("explain", query, path)
    assert f"predicted as a group of {len(last)}" in told
    assert f"with {near or 'no'} measured group" in told


def test_pairs_side_by_side_are_set_against_the_slower_one_alone(root: Path) -> None:
    profile = profiled(root)
    measure(root, profile)
    fitted = fit_groups(root, profile)
    found = pair_latencies(fitted, profile, 1)
    assert list(found) == [
        *(("add_sub", other) for other in ("add_sub", "cnn", "encoder")),
        *(("cnn", other) for other in ("cnn", "encoder")),
        ("encoder", "encoder"),
    ]
    pair = tuple(Member(Work(name, 0, 1, 0, profile.models[name].cuts[-1]), 1) for name in ("cnn", "encoder"))
    alone = tuple(
        next(p.p50_ns for p in profile.models[m.work.tenant].points if (p.shape, p.items, p.cores) == (0, 1, 1))
        for m in pair
    )
    together = fitted.at(0.5).group_ns([pair])[0]
    assert found["cnn", "encoder"] == PairLatency(alone, together)
    assert found["cnn", "encoder"].slowdown == together / max(alone)


@pytest.mark.skipif(SLOTS < 2, reason="one core only")
def test_measured_groups_say_whether_lanes_need_a_barrier(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = msgspec.structs.replace(SETTINGS, policy=PolicySection("overlap"))
    assert resolved(root, SETTINGS, TWO_LANES) == SETTINGS.policy, "other policies have no barrier"
    assert resolved(root, overlap, TWO_LANES).options == {"barrier": False}, "nothing was measured"
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    hog = {("a", "a"): PairLatency((10, 10), 30), ("a", "b"): PairLatency((10, 10), 12), ("b", "b"): MILD}
    for pairs, needed in (({("a", "a"): MILD}, False), (hog, True)):
        monkeypatch.setattr(overlap_models, "pair_latencies", lambda *_, pairs=pairs: pairs)
        assert resolved(root, overlap, TWO_LANES).options == {"barrier": needed}
        assert resolved(root, overlap, ONE_LANE).options == {"barrier": False}, "one lane has nobody beside it"
    chosen = msgspec.structs.replace(overlap, policy=PolicySection("overlap", {"barrier": False, "ways": 2}))
    assert resolved(root, chosen, TWO_LANES) == chosen.policy


@pytest.mark.parametrize("section", [PolicySection("edf"), PolicySection("overlap", {"barrier": True})])
def test_groups_are_not_looked_for_where_nothing_was_left_open(section: PolicySection) -> None:
    assert resolved_by(section, TWO_LANES, lambda: pytest.fail("looked for groups")) == section


@pytest.mark.skipif(SLOTS < 2, reason="one core only")
def test_a_server_foresees_the_groups_that_its_decisions_will_ask_for(root: Path) -> None:
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    settings = msgspec.structs.replace(
        SETTINGS,
        device=DeviceSection(cores=CORES[:2], lanes="single", isolation="thread"),
        policy=PolicySection("overlap", {"barrier": True}),
    )
    server = Server(root, settings)
    server.start()
    try:
        for step in ("started", "model loaded again"):
            predictor = server.driver.read(lambda engine: engine.predictor)
            assert isinstance(predictor, GroupedPredictor)
            assert isinstance(server.policy, Overlap)
            groups = list(server.policy.likely_groups(server.driver.read(lambda engine: engine.tenants)))
            assert {member.work.tenant for group in groups for member in group} == {"add_sub", "encoder", "cnn"}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(predictor, "fitted", _Silent())
                assert min(predictor.group_ns(groups)) > 0, step
            server.load("cnn")
    finally:
        server.stop()


class _Silent(FittedGroups):
    key, quantile = "silent", 0.95

    def group_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        raise AssertionError(f"asked for {len(groups)} groups that should have been foreseen")
