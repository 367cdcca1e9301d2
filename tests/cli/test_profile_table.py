"""The table of `cotenant profile`: what its numbers rest on, and which of them were disturbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.cli.profile import profile_table
from cotenant.measure.verdict import slow_words
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile

MS = 1_000_000
POINT = Point(0, 1, 1, 200, 5 * MS, 6 * MS, 7 * MS, 8 * MS, cpu_ns=4 * MS)


def cells(*points: Point, slo_ms: float = 100.0) -> dict[str, str]:
    """The row of a model with these points, by heading."""
    model = ModelProfile("digest", points, (MS,), (0, 1), 1.0)
    table = profile_table(Profile(this_device(), "", "", {"net": model}), {"net": slo_ms})
    return {str(column.header): next(iter(column.cells)) for column in table.columns}


def test_processor_time_stands_beside_the_latency() -> None:
    row = cells(POINT)
    assert (row["SLO"], row["p99 alone"], row["CPU"], row["1x1"]) == ("100", "8.00", "4.00", "5.00")
    assert cells(replace(POINT, cpu_ns=0))["CPU"] == "", "an older profile"


def test_the_longest_run_in_place_of_a_p99_has_its_number_of_runs() -> None:
    few = replace(POINT, runs=30)
    assert cells(few)["p99 alone"] == "8.00 (30 runs)"
    assert cells(few, slo_ms=7.0)["p99 alone"] == "8.00 (30 runs) !"


def test_disturbed_points_are_marked() -> None:
    row = cells(POINT, replace(POINT, items=4, is_disturbed=True))
    assert (row["1x1"], row["4x1"]) == ("5.00", "5.00 ~")


@pytest.mark.parametrize(("runs", "origin"), [(200, "p99 of 200 runs"), (99, "longest of 99 runs"), (0, "assumed")])
def test_an_slo_that_cannot_be_met_is_judged_by_what_the_runs_support(runs: int, origin: str) -> None:
    model = ModelProfile("digest", (replace(POINT, runs=runs),), (MS,), (0, 1), 1.0)
    assert f"8 ms ({origin}): set slo_ms to more than 8" in slow_words(model, 7.5)
    assert slow_words(model, 8.0) == ""
