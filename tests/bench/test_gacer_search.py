"""The benchmark of searches for joint plans: its rows on small sets, and its metrics by hand."""

from __future__ import annotations

import pytest

from bench._data import DATA
from bench.papers.gacer import search
from bench.papers.gacer._gpus import GPUS
from bench.papers.gacer._sets import paper_sets
from kernel_sets import random_rules, random_set


def test_rows_have_what_both_searches_believe_in() -> None:
    case = ("abc", random_set(3, 3, 8), random_rules(5))
    (race,) = search.races(iter([case]), (0.02, 0.04))
    for each in ("0.02", "0.04"):
        assert race["bound_ms"] <= race[f"ours_{each}s_ms"] <= race["streams_ms"] * (1 + 1e-9)
        assert race["bound_ms"] <= race[f"both_{each}s_ms"] <= race["streams_ms"] * (1 + 1e-9)
        assert race[f"ours_{each}s_plans"] > 0
    (residue,) = search.residues(iter([case]))
    assert residue["makespan_ms"] <= residue["streams_ms"]
    assert residue["residue_ms"] > 0


def test_the_sets_of_table_4_are_timed_with_the_batches_of_the_paper() -> None:
    rows = list(search.rates(DATA, 3))
    assert [row["set"] for row in rows] == ["R34+V16+LSTM", "R50+V16+M3", "R34+LSTM+BST"]
    assert all(row["plain_s"] > 0 for row in rows)
    (first, *_) = search.cases(paper_sets(DATA, GPUS[0])[-1:], 1)
    assert [table.batch for table in first[1]] == [8, 128, 64]


def test_metrics_by_hand() -> None:
    rows = [
        {"part": "rate", "plain_s": 3.0, "compiled_s": 0.2},
        {"part": "rate", "plain_s": 2.0, "compiled_s": 0.3},
        {"part": "race", "both_0.5s_ms": 2.0, "ours_0.5s_ms": 1.0, "both_2s_ms": 2.0, "ours_2s_ms": 2.0},
        {"part": "race", "both_0.5s_ms": 2.0, "ours_0.5s_ms": 4.0, "both_2s_ms": 9.0, "ours_2s_ms": 1.0},
        {"part": "residue", "makespan_ms": 1.0, "residue_ms": 1.005, "streams_ms": 1.1},
        {"part": "residue", "makespan_ms": 1.0, "residue_ms": 1.02, "streams_ms": 1.1},
        {"part": "residue", "makespan_ms": 1.0, "residue_ms": 1.2, "streams_ms": 1.1},
        {"part": "residue", "makespan_ms": 1.0, "residue_ms": 1.0, "streams_ms": 1.0},
    ]
    summary = search.summary_of(rows)
    assert summary == {
        "rounds_2000_s": 0.3,
        "rounds_2000_plain_s": 3.0,
        "ours_0_5s_over_published": pytest.approx(1.0),
        "ours_2s_over_published": pytest.approx(3.0),
        "residue_loses_pct": 50.0,
        "residue_slower_than_streams_pct": 25.0,
    }
    without = [{key: value for key, value in row.items() if key != "compiled_s"} for row in rows]
    assert search.summary_of(without)["rounds_2000_s"] == 3.0
