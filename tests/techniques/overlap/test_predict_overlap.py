"""The overlap-aware predictor: monotone by construction, deterministic, honest about what it has not seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cotenant.core.predictor import Group, Member
from cotenant.errors import CotenantError, InvalidValueError
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.measure.group_sampler import sample_groups
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import WIDTH, MemberFeatures, TenantFacts, paper_features
from cotenant.techniques.overlap.predict.overlap_file import OverlapFileError, read_overlap, save_overlap
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings, fit_overlap, to_batch
from cotenant.techniques.overlap.predict.overlap_net import GroupArrays, Monotone, Net
from cotenant.types import Tenant
from cotenant.work import Work

MS = 1_000_000
SIZES = (1, 2, 4, 8)
UNITS = {"a": 6, "b": 9, "c": 4, "d": 12}
WHOLE_MS = {"a": 4.0, "b": 9.0, "c": 2.0, "d": 20.0}
QUICK = FitSettings(width=16, steps=700, hidden_steps=200)


def facts(name: str) -> TenantFacts:
    rows = tuple(
        LatencyRow(shape, items, cores, round(WHOLE_MS[name] * MS * (0.6 + 0.4 * items) * (1 + shape) / cores**0.8))
        for shape in (0, 1)
        for items in SIZES
        for cores in (1, 2)
    )
    weights = tuple(1.0 + (unit % 3) for unit in range(UNITS[name]))
    return TenantFacts(name, LatencyTable(rows, weights), macs=tuple(1000 * (1 + unit) for unit in range(UNITS[name])))


ALL = tuple(facts(name) for name in UNITS)
FEATURES = MemberFeatures(ALL, MS)


def world_ns(group: Group) -> float:
    """Members slow each other down: the longest one's time, and a part of the others'."""
    solo = sorted((FEATURES.solo_ns(member) for member in group), reverse=True)
    return 0.3 * MS + solo[0] + 0.6 * sum(solo[1:])


def draw(names: str, count: int, seed: int, noise: float = 0.03, runs: int = 3) -> list[GroupSample]:
    tenants = [Tenant(name, MS, cuts=tuple(range(UNITS[name] + 1)), max_batch=8) for name in names]
    groups = sample_groups(tenants, dict.fromkeys(names, SIZES), (1, 1, 1), count, seed, shapes=dict.fromkeys(names, 2))
    random = Random(seed)
    return [
        GroupSample(group, tuple(round(world_ns(group) * exp(random.gauss(0, noise))) for _ in range(runs)))
        for group in groups
    ]


@cache
def fitted(monotone: Monotone = Monotone.ALL) -> OverlapPredictor:
    """Fitted to three of the four tenants."""
    return fit_overlap(draw("abc", 1500, 1), ALL, seed=3, settings=replace(QUICK, monotone=monotone))


def error(predictor: OverlapPredictor, samples: list[GroupSample]) -> float:
    truth = np.array([world_ns(sample.members) for sample in samples])
    return float(np.mean(np.abs(np.array(predictor.group_ns([sample.members for sample in samples])) / truth - 1)))


# --- accuracy ---------------------------------------------------------------------------------------------------------


def test_it_predicts_groups_that_it_has_not_seen() -> None:
    assert error(fitted(), draw("abc", 400, 99)) < 0.06


def test_a_tenant_that_was_in_no_sample_is_predicted_from_its_profile() -> None:
    unseen = [sample for sample in draw("abcd", 600, 7) if any(member.work.tenant == "d" for member in sample.members)]
    assert not fitted().is_seen("d")
    assert error(fitted(), unseen) < 0.35


def test_a_changed_model_counts_as_unseen() -> None:
    changed = fitted().with_unseen([facts("a")])
    assert fitted().is_seen("a")
    assert not changed.is_seen("a")
    assert changed.is_seen("b")
    group = (Member(Work("b", 0, 1, 0, 9), 1),)
    assert changed.group_ns([group]) == fitted().group_ns([group])


@pytest.mark.parametrize("level", [0.9, 0.99])
def test_quantiles_cover_single_runs(level: float) -> None:
    fresh = draw("abc", 1500, 5)
    upper = fitted().at(level).group_ns([sample.members for sample in fresh])
    covered = np.mean([run <= bound for bound, sample in zip(upper, fresh, strict=True) for run in sample.runs_ns])
    assert abs(covered - level) < 0.035 if level < 0.95 else covered > 0.975


# --- monotone ---------------------------------------------------------------------------------------------------------


@st.composite
def members(draw_: st.DrawFn, tenant: str) -> Member:
    start = draw_(st.integers(0, UNITS[tenant] - 1))
    end = draw_(st.integers(start + 1, UNITS[tenant]))
    return Member(
        Work(tenant, draw_(st.integers(0, 1)), draw_(st.integers(1, 10)), start, end), draw_(st.integers(1, 3))
    )


@st.composite
def any_groups(draw_: st.DrawFn, most: int = 4) -> Group:
    """Groups of up to three members were measured."""
    names = draw_(st.lists(st.sampled_from("abcd"), min_size=1, max_size=most, unique=True))
    return tuple(draw_(members(name)) for name in names)


def grown(group: Group, at: int, how: str, by: int) -> Group:
    work, size = group[at]
    if how == "start":
        work = structs.replace(work, start=max(0, work.start - by))
    elif how == "end":
        work = structs.replace(work, end=min(UNITS[work.tenant], work.end + by))
    else:
        work = structs.replace(work, items=work.items + by)
    return (*group[:at], Member(work, size), *group[at + 1 :])


@pytest.mark.parametrize("quantile", [0.5, 0.95, 0.99])
@settings(max_examples=80, deadline=None)
@given(group=any_groups(), at=st.integers(0, 3), how=st.sampled_from(["start", "end", "items"]), by=st.integers(1, 9))
def test_more_units_or_rows_never_lower_a_prediction(quantile: float, group: Group, at: int, how: str, by: int) -> None:
    larger = grown(group, at % len(group), how, by)
    before, after = fitted().at(quantile).group_ns([group, larger])
    assert after >= before - 1  # a nanosecond of rounding


@pytest.mark.parametrize("quantile", [0.5, 0.95, 0.99])
@settings(max_examples=80, deadline=None)
@given(group=any_groups().filter(lambda group: len(group) > 1), at=st.integers(0, 3))
def test_another_member_never_lowers_a_prediction(quantile: float, group: Group, at: int) -> None:
    at %= len(group)
    smaller, all_of_it = fitted().at(quantile).group_ns([(*group[:at], *group[at + 1 :]), group])
    assert all_of_it >= smaller - 1


@settings(max_examples=40, deadline=None)
@given(group=any_groups(), at=st.integers(0, 3), how=st.sampled_from(["start", "end"]), by=st.integers(1, 9))
def test_monotone_in_units_alone_holds_for_units(group: Group, at: int, how: str, by: int) -> None:
    before, after = fitted(Monotone.UNITS).group_ns([group, grown(group, at % len(group), how, by)])
    assert after >= before - 1


def test_a_free_network_is_not_monotone() -> None:
    """Else the properties above would say nothing."""
    groups = [(Member(Work("d", 0, 4, start, 12), 1),) for start in range(12)]
    batch = to_batch(groups, FEATURES, "abcd")
    rises = 0
    for seed in range(5):
        net = Net.random(4, 16, Monotone.NOTHING, np.random.default_rng(seed))
        rises += int((np.diff(net.forward(batch)) > 0).any())
        assert (np.diff(Net(net.weights, Monotone.ALL).forward(batch)) <= 1e-6).all()
    assert rises > 0


@settings(max_examples=40, deadline=None)
@given(group=any_groups())
def test_the_order_of_members_means_nothing(group: Group) -> None:
    one, other = fitted().group_ns([group, group[::-1]])
    assert abs(one - other) <= 1


# --- mechanics --------------------------------------------------------------------------------------------------------


def test_the_gradient_is_the_derivative_of_the_output() -> None:
    groups = [sample.members for sample in draw("abc", 20, 2)]
    net = Net.random(3, 8, Monotone.UNITS, np.random.default_rng(1))
    net.weights = {name: value.astype(np.float64) for name, value in net.weights.items()}  # type: ignore[misc]
    found_batch = to_batch(groups, FEATURES, "abc")
    batch = GroupArrays(found_batch.x.astype(np.float64), found_batch.tenant, found_batch.norms.astype(np.float64))  # type: ignore[arg-type]
    direction = np.random.default_rng(2).standard_normal(len(groups))
    found = net.gradient(batch, lambda _: direction)
    rng = np.random.default_rng(3)
    for name, value in net.weights.items():
        for _ in range(3):
            at = tuple(int(rng.integers(0, size)) for size in value.shape)
            kept, step = value[at], 1e-5
            value[at] = kept + step
            above = float(net.forward(batch) @ direction)
            value[at] = kept - step
            below = float(net.forward(batch) @ direction)
            value[at] = kept
            assert found[name][at] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6), name


def test_equal_seeds_give_equal_predictors() -> None:
    samples = draw("ab", 80, 4)
    quick = replace(QUICK, steps=30, hidden_steps=10)
    groups = [sample.members for sample in samples]
    first, second, other = (fit_overlap(samples, ALL, seed=seed, settings=quick) for seed in (1, 1, 2))
    assert first.group_ns(groups) == second.group_ns(groups)
    assert first.group_ns(groups) != other.group_ns(groups)


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(any_groups(), min_size=1, max_size=9), times=st.sampled_from([1, 16]))
def test_many_groups_at_once_are_predicted_like_each_alone(groups: list[Group], times: int) -> None:
    together = fitted().at(0.9).group_ns(groups * times)
    assert together == together[: len(groups)] * times
    assert all(isinstance(each, int) and each > 0 for each in together)
    alone = [fitted().at(0.9).group_ns([group])[0] for group in groups]
    assert all(abs(a - b) <= 1 for a, b in zip(together, alone * times, strict=True))


@pytest.mark.parametrize("monotone", [Monotone.ALL, Monotone.NOTHING])
@settings(max_examples=30, deadline=None)
@given(groups=st.lists(any_groups(3), min_size=1, max_size=5))
def test_what_is_served_is_the_network_that_was_fitted(monotone: Monotone, groups: list[Group]) -> None:
    """The weights as they are folded for serving say the same as a pass of the network."""
    model = fitted(monotone).model
    net = Net({name: value.astype(np.float64) for name, value in model.weights.items()}, model.monotone)  # type: ignore[misc]
    outputs = net.forward(to_batch(groups, MemberFeatures(model.facts, model.scale_ns), model.tenants))
    for group, output, predicted in zip(groups, outputs.tolist(), fitted(monotone).group_ns(groups), strict=True):
        alone = [FEATURES.solo_ns(member) for member in group]
        least, most = sum(each**4 for each in alone) ** 0.25 / exp(3), sum(alone) * exp(3)
        assert predicted == pytest.approx(min(max(exp(output) * model.scale_ns, least), most), rel=1e-4, abs=1)


@pytest.mark.parametrize("astray", [-200.0, 200.0])
def test_a_fit_gone_astray_stays_within_reason(astray: float) -> None:
    """However wrong the weights are: not beyond 20 times the members in turn, nor below a 20th of the longest alone."""
    model = fitted().model
    wrong = OverlapPredictor(replace(model, weights={**model.weights, "b5": np.full(1, astray, np.float32)}))
    samples = draw("abc", 30, 9)
    for sample, among_many in zip(samples, wrong.group_ns([sample.members for sample in samples]), strict=True):
        alone = [FEATURES.solo_ns(member) for member in sample.members]
        (predicted,) = wrong.group_ns([sample.members])
        assert max(alone) / 21 <= predicted <= 21 * sum(alone)
        assert max(alone) / 21 <= among_many <= 21 * sum(alone)


def test_a_margin_multiplies_everything() -> None:
    groups = [sample.members for sample in draw("abc", 10, 8)]
    plain, raised = fitted().at(0.95), fitted().at(0.95).with_margin(1.5)
    assert raised.quantile == 0.95
    assert all(
        b == pytest.approx(1.5 * a, abs=2) for a, b in zip(plain.group_ns(groups), raised.group_ns(groups), strict=True)
    )
    solo = (Work("a", 0, 2, 0, 6), 1)
    assert raised.latency_ns(*solo) == pytest.approx(1.5 * plain.latency_ns(*solo), abs=2)
    assert plain.latency_ns(*solo) >= fitted().latency_ns(*solo) > 0
    assert fitted().unit_count("a") == 6


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InvalidValueError, match="quantile is 1"):
        fitted().at(1.0)
    with pytest.raises(InvalidValueError, match="factor is 0"):
        fitted().with_margin(0.0)
    with pytest.raises(CotenantError, match="no profile of 'ghost'"):
        fitted().group_ns([(Member(Work("ghost", 0, 1, 0, 1), 1),)])
    with pytest.raises(InvalidValueError, match="units within 0"):
        fitted().group_ns([(Member(Work("a", 0, 1, 3, 7), 1),)])
    with pytest.raises(InvalidValueError, match="items and cores"):
        fitted().group_ns([(Member(Work("a", 0, 0, 3, 6), 1),)])
    with pytest.raises(InvalidValueError, match="at least one member"):
        fitted().group_ns([()])
    assert fitted().group_ns([]) == []
    with pytest.raises(InvalidValueError, match="samples is 3"):
        fit_overlap(draw("ab", 3, 1), ALL)
    with pytest.raises(InvalidValueError, match="macs"):
        TenantFacts("a", facts("a").table, macs=(1, 2))


def test_the_papers_input_has_one_order_of_tenants() -> None:
    group = (Member(Work("b", 1, 4, 2, 9), 1), Member(Work("a", 0, 8, 0, 6), 1))
    x = paper_features([group, group[::-1]], ["a", "b", "c"], {"b": (8, 16)}, 2)
    assert x.tolist() == [[1, 1, 0, 0, 6, 8, 0, 2, 9, 4, 16]] * 2
    with pytest.raises(InvalidValueError, match="at most 1"):
        paper_features([group], ["a", "b"], {}, 1)


def test_features_grow_with_units_and_rows() -> None:
    small, _ = FEATURES.row(Member(Work("d", 1, 2, 3, 7), 2))
    large, _ = FEATURES.row(Member(Work("d", 1, 4, 2, 9), 2))
    assert len(small) == len(large) == WIDTH
    assert all(b >= a for a, b in zip(small[:-3], large[:-3], strict=True))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_predictor_predicts_the_same(tmp_path: Path) -> None:
    path = tmp_path / ".cotenant" / "overlap.npz"
    save_overlap(path, fitted())
    groups = [sample.members for sample in draw("abcd", 50, 6)]
    again = read_overlap(path, 0.95)
    assert again.group_ns(groups) == fitted().at(0.95).group_ns(groups)
    assert again.model.margins == fitted().model.margins
    assert not list(path.parent.glob("*.part"))


def test_a_damaged_predictor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "overlap.npz"
    with pytest.raises(OverlapFileError, match="cannot be read"):
        read_overlap(path)
    path.write_bytes(b"this is no archive")
    with pytest.raises(OverlapFileError, match="no fitted predictor"):
        read_overlap(path)
    np.savez(path, nothing=np.zeros(3))
    with pytest.raises(OverlapFileError, match="no fitted predictor"):
        read_overlap(path)
    model = fitted().model
    for change in ({"w4": model.weights["w4"][:3]}, {"b5": np.array([np.nan], np.float32)}):
        save_overlap(path, OverlapPredictor(model))
        broken = replace(model, weights={**model.weights, **change})
        good = OverlapPredictor(model)
        good.model = broken
        save_overlap(path, good)
        with pytest.raises(OverlapFileError, match="all finite"):
            read_overlap(path)
