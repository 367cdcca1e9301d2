"""Placements in the terminal and as SVG: to scale, readable without colour, within their width."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem
from cotenant.techniques.placement.plan.overflow import OverflowSearch
from cotenant.techniques.placement.plan.overview import PlacementOverview, overview
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.report import placement_lines, placement_picture, placement_svg
from cotenant.techniques.placement.task_profile import ModelTasks
from golden_files import GOLDEN, agree
from task_profiles import linear_tasks, some_tasks, tasks_of, wide_tasks


def viewed(tasks: ModelTasks, steps: int = 200) -> PlacementOverview:
    problem = PlacementProblem(graph_of(tasks), PLAIN)
    return overview("net", problem, OverflowSearch(steps=steps).solve(problem))


def printed(view: PlacementOverview, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(placement_picture(view, width))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_the_picture_of_a_wide_model(bless: bool) -> None:
    view = viewed(wide_tasks(branches=14, body_us=3000), 1000)
    text = "\n\n".join((printed(view, 80), *placement_lines(view)))
    agree(GOLDEN / "placement.txt", text.encode(), bless)


@given(some_tasks(), st.integers(60, 130))
@settings(max_examples=8)
def test_pictures_are_to_scale_and_within_their_width(tasks: ModelTasks, width: int) -> None:
    view = viewed(tasks, 100)
    lines = printed(view, width).splitlines()
    assert all(len(line) <= min(width, 110) for line in lines)
    bars = [line.partition("│")[2].partition("│")[0] for line in lines if "│" in line]
    assert len(bars) == 2 * tasks.cores
    for bar, (stretches, busy) in zip(
        bars,
        [
            (each, sum(one.end_ns - one.start_ns for one in each))
            for chart in (view.before, view.after)
            for each in map(chart.on, chart.lanes)
        ],
        strict=True,
    ):
        whole = max(view.sequential_ns, 1)
        drawn = sum(cell != "·" for cell in bar) / len(bar)
        assert abs(drawn - busy / whole) <= (len(stretches) + 1) / len(bar)


def test_the_svg_needs_nothing_beside_it_and_says_the_same() -> None:
    svg = placement_svg(viewed(wide_tasks(branches=14)), "a title & more")
    root = ElementTree.fromstring(svg)
    words = "".join(root.itertext()).replace("\xa0", " ")
    assert "a title & more" in words
    assert "Sequential" in words
    assert re.search(r"\d+ on cpu:0, \d+ on cpu:1", words)
    assert "url(http" not in svg
    assert "@font-face" not in svg


def test_a_stretch_that_several_devices_run_says_how_much_each_does() -> None:
    view = viewed(linear_tasks())
    [stage] = view.stages
    assert printed(view, 80).splitlines()[-1].endswith(" cpu:0-1")
    mixed = replace(stage, placed_ns={"cpu:0": 390, "cpu:0-1": 600, "cpu:1": 10})
    line = printed(replace(view, stages=(mixed,)), 110).splitlines()[-1]
    assert line.endswith("60 % on cpu:0-1, 39 % on cpu:0")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (linear_tasks(), "net: no placement can gain 3 %. Sequential 2.5 ms; the lower bound is 2.5 ms."),
        (
            tasks_of([100, 100], [98, 98], {}),
            "net: 0.196 ms sequential, 0.1 ms placed, 49.0 % less; the placement is optimal.",
        ),
        (
            tasks_of([100, 50, 51], [66, 45, 45], {0: (1, 2)}, 60),
            "net: no placement gains 3 %, the least measurable gain. Sequential 0.156 ms",
        ),
    ],
)
def test_what_is_gained_is_said_plainly(tasks: ModelTasks, words: str) -> None:
    assert any(words in line for line in placement_lines(viewed(tasks))), list(placement_lines(viewed(tasks)))
