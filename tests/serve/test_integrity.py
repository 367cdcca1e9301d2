"""Whole servers, with clients that leave and workers that die: everybody gets what he asked for, or his own reason."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench._askers import Tally, Target
from bench._by_technique import prepare
from bench._carry import MOST_ROWS, ask_carry, numbers, picky, write_model
from bench._server import serving
from bench.integrity import QUICK_KINDS, SETTINGS, build, left_at_a_cut, link, measure
from cotenant.config import NS_PER_MS
from cotenant.load.http import HttpPool
from cotenant.profiles.profile_file import Point, load_profile, save_profile
from cotenant.repository import profile_path
from cotenant.trace import Record
from cotenant.wire.decode import http_outputs
from cotenant.wire.encode import http_request
from processes import cotenant

ANSWERS = 200
MOST_S = 60.0
BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_nobody_gets_somebody_elses_answer(tmp_path: Path) -> None:
    """The short form of `python -m bench integrity`."""
    root, counted = tmp_path / "models", itertools.count(1)
    targets = build(root, QUICK_KINDS)
    for name in ("edf, one core", "edf in threads", "edf, workers killed"):
        # Two kills in a row: after more of them the next worker would be waited for, and longer each time.
        row = measure(root, replace(BY_NAME[name], period_s=0.7, most=2), targets, counted, ANSWERS, MOST_S)
        assert (row.foreign_answers, row.unanswered, row.innocent_failures) == (0, 0, 0), row
        assert row.neighbour_dependent_answers == 0, row
        assert row.answers >= ANSWERS
        assert row.left > ANSWERS // 10
        assert (row.disturbances >= 2) == ("killed" in name)


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["compiled", "placed", "chunked"])
def test_nobody_gets_somebody_elses_answer_by_a_technique(tmp_path: Path, name: str) -> None:
    """And models do run by it, also where onnxruntime is faster."""
    targets = build(tmp_path / "models", QUICK_KINDS[:1])
    asked = link(tmp_path / "models", tmp_path / "part", targets, {"kind0"})
    asked, units = prepare(tmp_path / "part", BY_NAME[name].by, asked)
    row = measure(tmp_path / "part", BY_NAME[name], asked, itertools.count(1), ANSWERS, MOST_S)
    assert (row.foreign_answers, row.unanswered, row.innocent_failures) == (0, 0, 0), row
    assert row.neighbour_dependent_answers == 0, row
    assert row.answers >= ANSWERS
    assert units + row.by_technique > 0


def test_answers_of_others_are_seen() -> None:
    """What checks has to be able to fail."""
    mine, foreign = numbers(7, 2), numbers(8, 2)
    tally = Tally()
    own, alone = Target("m", ask_carry), Target("m", ask_carry, is_alone=True)
    tally.check(own, {"y": mine}, mine)
    assert (tally.answers, tally.foreign) == (1, 0)
    for wrong in ({"y": foreign}, {"y": mine[:1]}, {"y": np.concatenate([mine, foreign])}, {}):
        tally.check(own, wrong, mine)
        tally.check(alone, wrong, mine)
    tally.check(alone, {"y": mine * np.float32(1.0001)}, mine)
    assert (tally.answers, tally.foreign, tally.dependent) == (2, 4, 4)
    assert (
        tally.examples[0]
        == "m: expected [2, 16] [56.0, 56.03125, 56.0625, 56.09375], got [2, 16] [64.0, 64.03125, 64.0625, 64.09375]"
    )


def test_who_leaves_at_a_cut_is_counted() -> None:
    def launch(batch: int, *queries: int) -> Record:
        return Record(0, "TimerFired", {}, [("Launch", {"batch": batch, "queries": list(queries)})])

    records = [launch(1, 1, 2, 3), launch(2, 4), launch(1, 1, 3), launch(3, 5, 6), launch(1, 3), launch(3, 5, 6)]
    assert left_at_a_cut(records) == 2


async def ask(url: str, marks: list[int]) -> list[tuple[int, Any]]:
    """All at once; the status of each, and its outputs or what it was told."""
    pool = HttpPool(url)

    async def one(query: int, mark: int) -> tuple[int, Any]:
        body, headers = http_request({"x": numbers(query, 1), "mark": np.array([mark])}, {})
        status, payload, _ = await pool.request(pool.prepare("POST", "/v2/models/picky/infer", headers, body), 60.0)
        return status, http_outputs(payload)["y"] if status == 200 else json.loads(payload)["error"]

    try:
        return await asyncio.gather(*(one(query, mark) for query, mark in enumerate(marks)))
    finally:
        pool.close()


def test_queries_that_make_the_model_raise_cost_nobody_else_his_answer(tmp_path: Path) -> None:
    """One in eight, merged with the others: each of these fails by itself, with its own reason."""
    root = tmp_path / "models"
    write_model(root, "picky", picky(), MOST_ROWS)
    (root / "cotenant.toml").write_text('[device]\nlanes = "all"\n')
    assert cotenant("profile", str(root), "--no-server").returncode == 0
    path, alike = profile_path(root), [NS_PER_MS] * 4
    profile = load_profile(path)
    [model] = profile.models.values()  # whatever a busy machine measured: rows cost nothing more, so that merging pays
    points = tuple(Point(point.shape, point.items, point.cores, 9, *alike) for point in model.points)
    save_profile(path, replace(profile, models={"picky": replace(model, points=points)}))
    marks = [60 + query if query % 8 == 3 else query % 4 for query in range(64)]
    reruns = 0.0
    with serving(root) as server:
        for _ in range(100):  # on a busy machine queries may come so far apart that none are merged
            answers = asyncio.run(ask(server.http_url, marks))
            for query, (mark, (status, got)) in enumerate(zip(marks, answers, strict=True)):
                if mark < 4:
                    assert status == 200, got
                    assert got.tolist() == numbers(query, 1).tolist()
                else:
                    assert status == 500
                    assert f"idx={mark}" in got, "somebody else's reason"
            with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
            [reruns] = [float(line.split()[1]) for line in lines if line.startswith("cotenant_query_reruns_total{")]
            if reruns:
                break
    assert reruns > 0, "nothing was merged, so nothing was tried"
