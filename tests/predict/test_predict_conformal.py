"""Margins that cover what they promise, also when the device drifts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import conformal_quantile, make_margins
from cotenant.predict.online import AdaptiveConformal


def test_the_quantile_is_the_one_of_split_conformal() -> None:
    scores = list(range(1, 100))
    assert conformal_quantile(scores, 0.9) == 90  # ceil(100 * 0.9)th of 99
    assert conformal_quantile(scores, 0.99) == 99
    assert conformal_quantile([3.0, 1.0], 0.99) == 3.0
    with pytest.raises(InvalidValueError, match="scores"):
        conformal_quantile([], 0.9)
    with pytest.raises(InvalidValueError, match="level"):
        conformal_quantile([1.0], 1.0)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_split_conformal_covers_on_average(level: float) -> None:
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(300):
        bound = conformal_quantile(rng.exponential(size=60), level)
        hits.append((rng.exponential(size=60) <= bound).mean())
    assert level - 0.01 < np.mean(hits) < level + 1 / 61 + 0.01


def test_margins_cover_short_and_long_groups_of_every_size() -> None:
    rng = np.random.default_rng(1)

    def groups(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        predicted = np.exp(rng.uniform(13, 18, count))
        size = rng.integers(1, 4, count)
        noise = rng.standard_normal((count, 4)) * (0.02 + 0.03 * size)[:, None]
        return predicted, size, predicted[:, None] * np.exp(noise) + 2e5 * rng.random((count, 4))

    predicted, size, runs = groups(6000)
    margins = make_margins(predicted.tolist(), runs.astype(int).tolist(), size.tolist(), 3)
    shares = np.array(margins.shares(0.95))
    assert shares[1] < shares[2]
    assert margins.shares(0.5) == (0.0, 0.0, 0.0)
    predicted, size, runs = groups(6000)
    upper = predicted + shares[size - 1] * (predicted + margins.floor_ns)
    hit = runs <= upper[:, None]
    assert abs(hit.mean() - 0.95) < 0.01
    for kind in (1, 2, 3):
        assert abs(hit[size == kind].mean() - 0.95) < 0.02
    assert min(hit[predicted < 1e6].mean(), hit[predicted > 1e7].mean()) > 0.9


def test_few_groups_of_a_kind_take_the_margin_of_all() -> None:
    margins = make_margins([1000.0] * 60, [[1000 + step] for step in range(60)], [1] * 59 + [2], 2)
    assert margins.shares(0.9)[1] >= 0.05
    with pytest.raises(InvalidValueError, match="groups"):
        make_margins([], [], [], 1)


@settings(max_examples=25, deadline=None)
@given(
    level=st.sampled_from([0.8, 0.9, 0.95]),
    shift=st.floats(0.7, 3.0),
    spread=st.floats(0.01, 0.3),
    seed=st.integers(0, 10_000),
)
def test_adaptive_coverage_converges_under_a_shift(level: float, shift: float, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    margin = AdaptiveConformal(level, tolerance=0.0)
    observed = 1e6 * np.exp(rng.normal(0, spread, 3000)) * np.where(np.arange(3000) < 1000, 1.0, shift)
    missed = 0
    for value in observed:
        predicted = round(1e6 * margin.factor)
        missed += value > predicted
        margin.observe(predicted, int(value))
    # The promise of the method, for any sequence: the sum of steps is the way that the margin has gone.
    assert abs(missed / 3000 - (1 - level)) <= (np.log(8.0 / 0.5) / 0.05 + 1) / 3000 + 1e-3
    assert 0.5 <= margin.factor <= 8.0


def test_the_factor_in_use_changes_only_when_it_is_worth_it() -> None:
    margin = AdaptiveConformal(0.9, step=0.05, tolerance=0.08)
    assert margin.observe(100, 200) is None
    assert margin.factor == 1.0
    changed = margin.observe(100, 200)
    assert changed == margin.factor == pytest.approx(np.exp(2 * 0.045))
    # An observation that was predicted before the change is judged without it.
    assert margin.observe(100, 150, factor=1.0) is None


@pytest.mark.parametrize("bad", [{"level": 1.0}, {"step": 0.0}, {"smallest": 0.0}, {"largest": 0.5}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(bad))):
        AdaptiveConformal(**bad)
