"""The proof of merging: a model whose rows act on each other is never merged, whatever its dimensions are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bench._mixing import KINDS, Alone, Drawn, drawn
from cotenant.execute.open_model import open_model
from cotenant.graph.dfg import Tensor
from cotenant.measure.merging_trial import TOLERANCE, is_same_answer, judge_merging
from cotenant.profiles.merging import Merging

SEEDS = 6
MAX_BATCH = 5


def verdict(tmp_path: Path, made: Drawn, batching: Any = "proven", max_batch: int = MAX_BATCH) -> Merging:
    path = tmp_path / "model.onnx"
    onnx.save(made.model, path)
    with open_model(path) as runner:
        return judge_merging(runner, [made.shape], max_batch, batching)


def depends_on_neighbours(made: Drawn, seed: int) -> bool:
    """Whether rows of drawn queries answer otherwise beside other queries, as onnxruntime itself runs them."""
    run = Alone(made).run
    rng = np.random.default_rng(seed)
    for _ in range(12):
        queries = [made.ask(rng, 1) for _ in range(MAX_BATCH)]
        whole = run({name: np.concatenate([each[name] for each in queries]) for name in queries[0]})
        for at, query in enumerate(queries):
            mine = {name: array[at : at + 1] for name, array in whole.items()}
            if not is_same_answer(run(query), mine):
                return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_only_models_that_keep_rows_apart_are_merged(tmp_path: Path, kind: str) -> None:
    for seed in range(SEEDS):
        made = drawn(kind, seed)
        found = verdict(tmp_path, made)
        assert depends_on_neighbours(made, seed) == made.is_mixing, "the oracle knows the kind"
        assert found.is_allowed is not made.is_mixing, (seed, found)
        assert found.reason


def test_drawn_models_reach_both_ways_of_knowing(tmp_path: Path) -> None:
    found = {kind: {verdict(tmp_path, drawn(kind, seed)).verdict for seed in range(SEEDS)} for kind in KINDS}
    assert found["apart"] == found["tokens, apart"] == {"proven"}
    assert found["sliced"] == {"tried"}


@pytest.mark.parametrize("kind", ["mean over rows", "found rows", "tokens, mixed"])
def test_trust_is_not_tried(tmp_path: Path, kind: str) -> None:
    found = verdict(tmp_path, drawn(kind, 0), "trust")
    assert (found.verdict, found.is_allowed) == ("trusted", True)


def test_one_row_at_most_needs_no_verdict(tmp_path: Path) -> None:
    assert verdict(tmp_path, drawn("mean over rows", 0), max_batch=1) == Merging("single")


def test_exact_merges_only_equal_bits(tmp_path: Path) -> None:
    assert verdict(tmp_path, drawn("integers, apart", 0), "exact").verdict == "tried"
    found = [verdict(tmp_path, drawn("apart", seed), "exact") for seed in range(8)]
    assert {each.verdict for each in found} <= {"tried", "refused"}, "the graph alone proves no bits"


def _answers(values: Any, dtype: Any = np.float32) -> dict[str, Any]:
    return {"y": np.asarray(values, dtype)}


def test_floats_may_differ_by_a_part_of_the_largest_number_of_their_row() -> None:
    alone = _answers([[1.0, 1000.0], [1.0, 2.0]])
    assert is_same_answer(alone, _answers([[1.9, 1000.0], [1.0, 2.0]]))
    assert not is_same_answer(alone, _answers([[1.0, 1000.0], [1.9, 2.0]])), "another row's numbers do not count"
    assert not is_same_answer(alone, _answers([[1.0, 1000.0 * (1 + 2 * TOLERANCE)], [1.0, 2.0]]))
    assert not is_same_answer(alone, _answers([[1.0, 1000.0001], [1.0, 2.0]]), is_exact=True)


def test_what_is_not_finite_stands_at_the_same_places() -> None:
    alone = _answers([[np.nan, np.inf, -np.inf, 1.0]])
    assert is_same_answer(alone, _answers([[np.nan, np.inf, -np.inf, 1.0]]))
    for values in ([[1.0, np.inf, -np.inf, 1.0]], [[np.nan, np.inf, np.inf, 1.0]], [[np.nan, 1.0, -np.inf, 1.0]]):
        assert not is_same_answer(alone, _answers(values))


def test_shapes_datatypes_integers_and_texts_are_equal() -> None:
    assert not is_same_answer(_answers([[1.0]]), _answers([1.0]))
    assert not is_same_answer(_answers([[1.0]]), _answers([[1.0]], np.float64))
    assert not is_same_answer(_answers([[1000]], np.int64), _answers([[1001]], np.int64))
    assert not is_same_answer(_answers([["a"]], np.object_), _answers([["b"]], np.object_))
    assert not is_same_answer(_answers([[1.0]]), {})


class TiedRunner:
    """Two units: scores that move by `drift` with the size of the batch, and the place of the largest one.

    The two scores of a row are closer than any drift, so that places alone and merged differ.
    """

    name, unit_count = "tied", 2
    inputs = (Tensor("x", "tensor(float)", (None, 2)),)
    outputs = (Tensor("place", "tensor(int64)", (None,)), Tensor("x", "tensor(float)", (None, 2)))

    def __init__(self, drift: float, mixes: bool) -> None:
        self.drift, self.mixes = drift, mixes

    def prepare(self, ranges: Any, threads: Any = 1) -> None:
        """Nothing to do."""

    def run(self, start: int, end: int, tensors: Any, threads: Any = 1, version: int = 0) -> dict[str, Any]:
        values = dict(tensors)
        if start == 0:
            x = values["x"]
            apart = np.array([1.0, 1.0 + self.drift * 0.5 - self.drift * (len(x) > 1)], np.float32)
            values = {"scores": np.ones_like(x) * apart, "x": x}
        if end == 2:
            scores = values.pop("scores")
            values["place"] = (scores[::-1] if self.mixes and len(scores) > 1 else scores).argmax(-1)
            if self.mixes and len(scores) > 1:
                values["place"][0] += 5
        return values


@pytest.mark.parametrize(
    ("drift", "mixes", "is_allowed"), [(1e-4, False, True), (1e-1, False, False), (1e-4, True, False)]
)
def test_integers_may_differ_where_their_scores_tie(drift: float, mixes: bool, is_allowed: bool) -> None:
    runner: Any = TiedRunner(drift, mixes)
    assert judge_merging(runner, [{"x": (1, 2)}], 4).is_allowed is is_allowed
    assert not judge_merging(runner, [{"x": (1, 2)}], 4, "exact").is_allowed


class DullRunner(TiedRunner):
    def run(self, start: int, end: int, tensors: Any, threads: Any = 1, version: int = 0) -> dict[str, Any]:
        return {"place": np.zeros(len(tensors["x"]), np.int64)}


def test_a_trial_that_shows_nothing_proves_nothing() -> None:
    runner: Any = DullRunner(0, False)
    found = judge_merging(runner, [{"x": (1, 2)}], 4)
    assert not found.is_allowed
    assert "proves nothing" in found.reason
