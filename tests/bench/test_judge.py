"""Judging predictors: learning curves, and the pages of a repository's groups and co-runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import judge
from bench._judge_coruns import (
    ACTIVE,
    RANDOM,
    CurvePoint,
    active_order,
    learning_curve,
    needed,
    random_order,
    report_of,
    spread_counts,
)
from bench._judge_coruns_page import write_corun_report
from bench._judge_groups import LEVELS, cross_validate
from bench._judge_groups_page import write_predictor_report
from corun_rows import ROWS, pair
from cotenant.errors import InvalidValueError
from cotenant.repository import groups_path
from cotenant.techniques.overlap.group_samples import load_samples
from cotenant.techniques.overlap.measure.measured_groups import facts_of
from cotenant.techniques.overlap.predict.overlap_fit import FitSettings
from group_campaign import GROUPS, measure, profiled
from noisy_coruns import world
from repositories import write_good

# --- groups ----------------------------------------------------------------------------------------------------------


def test_the_report_says_how_wrong_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_good(tmp_path / "models", "add_sub", "encoder")
    profile = profiled(root)
    measure(root, profile, replace(GROUPS, count=120))
    _, samples = load_samples(groups_path(root))
    quick = FitSettings(width=8, steps=60, hidden_steps=20)
    judged = cross_validate(samples, facts_of(profile), settings=quick)
    assert sorted(each.sample.members for each in judged.judged) == sorted(sample.members for sample in samples)
    assert {tenant for tenant, _ in judged.unseen} <= {"add_sub", "encoder"}
    assert [level for level, _ in judged.coverage] == list(LEVELS)
    shares = [share for _, share in judged.coverage]
    assert shares == sorted(shares)
    write_predictor_report(tmp_path / "page.html", judged)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert f"{judged.mape:.1f} %" in page
    assert all(name in page for name, _, _ in judged.by_name())
    monkeypatch.setattr(judge, "cross_validate", lambda *_: judged)
    assert judge.main(root) == [groups_path(root).with_name("predictor.html")]


# --- co-runs ---------------------------------------------------------------------------------------------------------


def test_the_report_is_a_page_of_its_own(tmp_path: Path) -> None:
    assert report_of(ROWS) is None
    rows = [each for n in range(20) for each in pair(f"m{n % 5}", f"m{n % 7}", (1 + n / 50, 1.2))]
    found = report_of(rows)
    assert found is not None
    page = tmp_path / "deep" / "coruns.html"
    write_corun_report(page, "A < B", found.lead, found.curve, [("T", ["x"], [["<y>"]])])
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") >= 3
    assert "A &lt; B" in text
    assert "&lt;y&gt;" in text
    for point in found.curve:
        assert f"{point.median_error_pct:.1f} %" in text


def test_a_curve_needs_ten_measurements() -> None:
    with pytest.raises(InvalidValueError, match="at least ten"):
        learning_curve(world()[:9], [2], [0])


def test_the_count_that_is_needed_is_the_one_from_which_the_error_stays() -> None:
    errors = {10: 9.0, 20: 4.0, 30: 6.0, 40: 4.0, 50: 5.0}
    curve = [CurvePoint(ACTIVE, count, error, 2 * error) for count, error in errors.items()]
    assert needed(curve, ACTIVE, "median_error_pct", 5.0) == 40
    assert needed(curve, ACTIVE, "p90_error_pct", 12.0) == 20
    assert needed(curve, ACTIVE, "median_error_pct", 9.0) == 10
    assert needed(curve, ACTIVE, "median_error_pct", 4.5) is None
    assert needed(curve, RANDOM, "median_error_pct", 9.0) is None
    assert needed([*curve, CurvePoint(RANDOM, 10, 1.0, 1.0)], RANDOM, "median_error_pct", 1.0) == 10


def test_orders_take_each_once() -> None:
    runs = world()[:30]
    for order in (active_order, random_order):
        found = order(runs, 30, np.random.default_rng(3))
        assert sorted(found) == list(range(30))
        assert order(runs, 5, np.random.default_rng(3)) == found[:5]


@pytest.mark.parametrize("most", [4, 10, 50, 1800])
def test_counts_spread_up_to_the_most(most: int) -> None:
    counts = spread_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    assert counts[0] >= 1


def test_the_published_pairs_need_fewer_measurements(papers_data: Path) -> None:
    from bench.papers.gpulet._interference_csv import read_coruns, read_solo

    folder = papers_data / "mps_measured"
    coruns = read_coruns(folder / "corun_latency_train.csv", read_solo(folder / "solo_latency.csv"))
    curve = learning_curve([[each] for each in coruns], [105, 300], [1])
    at = {(point.order, point.count): point.p90_error_pct for point in curve}
    assert at[ACTIVE, 105] < at[RANDOM, 105]
