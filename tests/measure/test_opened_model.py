"""Which models may have their queries merged: those that give a row of its own for every row that they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from msgspec import UNSET
from onnx import TensorProto
from torch import nn

from cotenant.config import load_server_config
from cotenant.errors import ConfigError
from cotenant.measure import opened_model
from cotenant.measure.opened_model import OpenedModel, open_version
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.merging import SINGLE
from cotenant.repository import find_versions
from cotenant.work import Share
from onnx_samples import Sketch, info
from repositories import config, fixed, write_model


def some(out: str | None = "found") -> onnx.ModelProto:
    """The rows whose first number is above 0: as many as there are."""
    s = Sketch()
    first = s.op("Gather", "x", s.constant(np.array(0)), axis=1)
    chosen = s.op("Greater", first, s.constant(np.array(0.0, np.float32)))
    s.op("Compress", "x", chosen, out="y", axis=0)
    return s.model([info("x", ["batch", 4])], [info("y", [out, 4])])


def different(out: str | None = "unique") -> onnx.ModelProto:
    """The different numbers of all rows, in order: of random rows as many as there are rows."""
    s = Sketch()
    flat = s.op("Gather", "x", s.constant(np.array(0)), axis=1)
    s.op("Unique", flat, out="y", sorted=1)
    return s.model([info("x", ["batch", 4])], [info("y", [out])])


def places() -> onnx.ModelProto:
    """Where numbers above 0 are: an output that begins with something else than the batch."""
    s = Sketch()
    above = s.op("Greater", "x", s.constant(np.array(0.0, np.float32)))
    s.op("Transpose", s.op("NonZero", above), out="y", perm=[1, 0])
    return s.model([info("x", ["batch", 4])], [info("y", [None, 2], TensorProto.INT64)])


def shared() -> onnx.ModelProto:
    """Rows less the mean of all rows: each depends on who is beside it."""
    s = Sketch()
    mean = s.op("ReduceMean", "x", axes=[0], keepdims=1)
    s.op("Sub", "x", mean, out="y")
    return s.model([info("x", ["batch", 4])], [info("y", ["rows", 4])])


def square() -> onnx.ModelProto:
    """As many copies of each row as there are rows: an inner dimension of the batch."""
    s = Sketch()
    rows = s.op("Gather", s.op("Shape", "x"), s.constant(np.array([0])), axis=0)
    shape = s.op("Concat", rows, rows, s.constant(np.array([4])), axis=0)
    s.op("Expand", s.op("Unsqueeze", "x", s.constant(np.array([1]))), shape, out="y")
    return s.model([info("x", ["batch", 4])], [info("y", ["rows", None, 4])])


def plain(first: str | None, last: str | None) -> onnx.ModelProto:
    """Rows, each for itself, whatever their first dimension is called."""
    s = Sketch()
    s.op("Softmax", s.op("MatMul", "x", s.weight(4, 4)), out="y", axis=1)
    return s.model([info("x", [first, 4])], [info("y", [last, 4])])


def opened(tmp_path: Path, model: Callable[[], onnx.ModelProto], max_batch: int, more: str = "") -> OpenedModel:
    root = tmp_path / "models"
    write_model(root, "m", config(max_batch=max_batch) + more, {1: model})
    made = open_version(root, find_versions(root, "m")[0])
    made.runner.close()
    return made


@pytest.mark.parametrize("model", [some, different, places, shared, square, lambda: different(None)])
def test_a_model_whose_outputs_are_not_of_its_rows_is_never_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Callable[[], onnx.ModelProto]
) -> None:
    assert opened(tmp_path, model, 1).merging == SINGLE
    with caplog.at_level("WARNING"):
        made = opened(tmp_path, model, 4)
    assert made.merging.verdict == "refused"
    assert made.found.config.model.max_batch == 1
    assert made.sweep((Share((0,)),), Effort()).batches == (1,)
    assert f"model 'm': its queries run alone (max_batch = 1, where config.toml has 4): {made.merging.reason}" in (
        caplog.text
    )
    assert opened(tmp_path, model, 4, 'batching = "trust"\n').found.config.model.max_batch == 4


@pytest.mark.parametrize(("first", "last"), [("batch", "batch"), ("batch", "rows"), ("batch", None), (None, None)])
def test_a_model_is_merged_whatever_its_batch_is_called(tmp_path: Path, first: str | None, last: str | None) -> None:
    assert opened(tmp_path, lambda: plain(first, last), 4).found.config.model.max_batch == 4


def test_a_fixed_first_dimension_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'm': max_batch is 4, but the first dimension of input 'x' is fixed"):
        opened(tmp_path, fixed, 4)


def test_a_verdict_is_kept_in_the_profile_and_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid profile has it: opening the model again tries nothing."""
    root = tmp_path / "models"
    write_model(root, "m", config(max_batch=4), {1: shared})
    write_model(root, "good", config(max_batch=4), {1: lambda: plain("batch", "batch")})
    settings = load_server_config(root / "cotenant.toml")
    made, _ = profile_repository(root, settings, Effort(budget_s=0, min_runs=1), fresh=False, on_step=lambda *_: None)
    assert {point.items for point in made.models["m"].points} == {1}
    assert {point.items for point in made.models["good"].points} == {1, 2, 4}
    assert made.models["m"].merged_rows(4) == 1
    assert made.models["good"].merged_rows(4) == 4
    opened_model._verdicts.clear()
    monkeypatch.setattr(opened_model, "judge_merging", lambda *_: pytest.fail("tried again"))
    for name in ("m", "good"):
        again = open_version(root, find_versions(root, name)[0])
        assert again.merging == made.models[name].merging
        again.runner.close()


def centred() -> onnx.ModelProto:
    """A product, less its mean over the rows, and products again."""
    s = Sketch()
    t = s.op("MatMul", "x", s.weight(4, 4))
    less = s.op("Sub", t, s.op("ReduceMean", t, axes=[0], keepdims=1))
    s.op("MatMul", s.op("MatMul", less, s.weight(4, 4)), s.weight(4, 4), out="y")
    return s.model([info("x", ["batch", 4])], [info("y", ["batch", 4])])


def test_which_units_may_have_a_part_of_the_rows_is_told_at_opening(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for number, (model, max_batch) in enumerate(
        [(lambda: plain("batch", "batch"), 4), (lambda: plain("batch", "batch"), 1), (centred, 4)]
    ):
        write_model(root, f"m{number}", config(max_batch=max_batch) + 'batching = "trust"\n', {1: model})
    fine, alone, mixing = (open_version(root, find_versions(root, f"m{number}")[0]) for number in range(3))
    count = fine.runner.unit_count
    assert fine.splits == (tuple(range(count + 1)),)
    assert fine.sweep((Share((0,)),), Effort()).splits == fine.splits, "profiles have it too"
    assert alone.splits is UNSET
    names = mixing.runner.dfg.unit_names
    mean = next(at for at, name in enumerate(names) if "Reduce" in name or "Sub" in name)
    assert mixing.splits is not UNSET
    assert mixing.splits
    assert all(not (run[0] <= mean < run[-1]) for run in mixing.splits)
    for each in (fine, alone, mixing):
        each.runner.close()


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Doubled(nn.Module):
    """Two rows for each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), 0)


@pytest.mark.parametrize(("module", "is_merged"), [(Rows, True), (Doubled, False)])
def test_archives_are_held_to_the_same(tmp_path: Path, module: type[nn.Module], is_merged: bool) -> None:
    root = tmp_path / "models"
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module(), (torch.zeros(2, 4),), dynamic_shapes={"x": {0: batch}})
    (root / "m" / "1").mkdir(parents=True)
    torch.export.save(program, root / "m" / "1" / "model.pt2")
    (root / "m" / "config.toml").write_text(config(max_batch=4))
    [found] = find_versions(root, "m")
    made = open_version(root, found)
    made.runner.close()
    assert made.merging.is_allowed == is_merged
    assert "has 2 rows for 1 row" in made.merging.reason or is_merged
