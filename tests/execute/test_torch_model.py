"""Running torch.export archives unit by unit, and refusing those that are broken."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import cotenant.execute.open_model as open_module
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.open_model import open_model
from cotenant.execute.runner import to_numpy
from cotenant.execute.torch import model as torch_model
from cotenant.execute.torch import threads as torch_threads
from cotenant.execute.torch.arrays import tensor_of
from cotenant.execute.torch.model import TorchModel
from cotenant.graph.errors import GraphError
from cotenant.repository import find_versions
from torch_samples import SAMPLES, answers, exported, saved

MODULES: dict[str, nn.Module] = {}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TorchModel]]:
    folder = tmp_path_factory.mktemp("archives")
    opened = {}
    for name in SAMPLES:
        MODULES[name], program = exported(name)
        torch.export.save(program, folder / f"{name}.pt2")
        opened[name] = TorchModel.open(folder / f"{name}.pt2")
    yield opened
    for model in opened.values():
        model.close()


def along(model: TorchModel, cuts: Sequence[int], tensors: Mapping[str, Any], threads: Any = 1) -> dict[str, Any]:
    """Run a model segment by segment."""
    values: Any = tensors
    for start, end in pairwise([0, *cuts, model.unit_count]):
        values = model.run(start, end, values, threads)
    return dict(values)


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_whole_answers_as_the_module_does(models: dict[str, TorchModel], name: str, size: int) -> None:
    inputs = SAMPLES[name].inputs(size)
    found = models[name].run(0, models[name].unit_count, inputs)
    for got, expected in zip(found.values(), answers(MODULES[name], inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_segments_equal_the_whole(models: dict[str, TorchModel], name: str, data: st.DataObject) -> None:
    model = models[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, model.unit_count - 1)))) if model.unit_count > 1 else []
    inputs = SAMPLES[name].inputs(data.draw(st.integers(1, 4)))
    assert_equal(along(model, cuts, inputs), model.run(0, model.unit_count, inputs))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_unit_alone_and_exact_boundaries(models: dict[str, TorchModel], name: str) -> None:
    model = models[name]
    values: Mapping[str, Any] = SAMPLES[name].inputs(3)
    whole = model.run(0, model.unit_count, values)
    for start in range(model.unit_count):
        before = {key: value.clone() for key, value in values.items()}
        made = model.run(start, start + 1, values)
        assert_equal(dict(values), before)  # what was handed in can be used again
        values = made
        expected = model.dfg.live(start + 1) if start + 1 < model.unit_count else tuple(whole)
        assert tuple(values) == expected
    assert_equal(dict(values), whole)


def test_inputs_are_never_written(models: dict[str, TorchModel]) -> None:
    for name in SAMPLES:
        inputs = SAMPLES[name].inputs(2)
        before = {key: value.clone() for key, value in inputs.items()}
        models[name].run(0, models[name].unit_count, inputs)
        assert_equal(inputs, before)


def test_several_threads_share_a_model(models: dict[str, TorchModel]) -> None:
    model = models["residual"]
    inputs = [SAMPLES["residual"].inputs(1 + seed % 3) for seed in range(8)]
    expected = [model.run(0, model.unit_count, each) for each in inputs]
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(30)
        for turn in range(12):
            cuts = [1 + (seed + turn) % (model.unit_count - 1)]
            assert_equal(along(model, cuts, inputs[(seed + turn) % 8]), expected[(seed + turn) % 8])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result(60)


def test_numpy_goes_in_and_comes_out(models: dict[str, TorchModel]) -> None:
    model = models["residual"]
    inputs = {name: value.numpy() for name, value in SAMPLES["residual"].inputs(2).items()}
    inputs["picture"].flags.writeable = False
    turned = {"picture": np.asfortranarray(inputs["picture"])}
    found, again = (to_numpy(model.run(0, model.unit_count, each)) for each in (inputs, turned))
    for name, array in found.items():
        assert isinstance(array, np.ndarray)
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, again[name])


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_brain_floats_go_in_and_come_out_by_their_bits(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    tensor = tensor_of(numbers)
    assert tensor.dtype is torch.bfloat16
    assert tensor.tolist() == numbers.astype(np.float32).tolist()
    found = to_numpy({"x": tensor.T})["x"]
    assert (found.dtype, found.shape) == (numbers.dtype, shape[::-1])
    np.testing.assert_array_equal(found.T, numbers)


def test_inputs_and_outputs_are_described(models: dict[str, TorchModel]) -> None:
    model = models["residual"]
    assert [(t.name, t.dtype, t.shape) for t in model.inputs] == [("picture", "tensor(float)", (None, 3, 12, 12))]
    assert [(t.name, t.shape) for t in model.outputs] == [("logits", (None, 5)), ("features", (None, 8, 6, 6))]
    assert [t.name for t in models["encoder"].outputs] == ["output_0", "output_1"]
    assert [t.name for t in models["tiny"].outputs] == ["output"]
    assert [(t.name, t.dtype) for t in models["recurrent"].outputs] == [
        ("best", "tensor(float)"),
        ("where", "tensor(int64)"),
        ("state", "tensor(float)"),
    ]
    assert (model.device, model.uncut_reason) == ("cpu", "")


def test_weights_are_counted_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(40, 16)
            self.head = nn.Linear(16, 40, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids))

    module, inputs = Tied().eval(), {"ids": torch.arange(6).view(2, 3)}
    with TorchModel.open(saved(module, inputs, tmp_path / "tied.pt2")) as model:
        assert model.weight_bytes == 40 * 16 * 4
        torch.testing.assert_close(model.run(0, 2, inputs)["output"], answers(module, inputs)[0])


def test_wrong_tensors_are_named(models: dict[str, TorchModel]) -> None:
    model, inputs = models["sizes"], SAMPLES["sizes"].inputs(2)
    count = model.unit_count
    with pytest.raises(TensorError, match="input 'y' is missing; its inputs are x, y"):
        model.run(0, count, {"x": inputs["x"]})
    with pytest.raises(TensorError, match="has no input 'z'"):
        model.run(0, count, {**inputs, "z": inputs["x"]})
    with pytest.raises(TensorError, match=r"input 'y' is tensor\(double\), expected tensor\(float\)"):
        model.run(0, count, {**inputs, "y": np.zeros((2, 4))})
    with pytest.raises(TensorError, match="input 'x' is <U4, expected"):
        model.run(0, count, {**inputs, "x": np.full((2, 4, 4), "word")})
    with pytest.raises(TensorError, match=r"input 'x' has shape \(2, 4, 5\)"):
        model.run(0, count, {**inputs, "x": torch.zeros(2, 4, 5)})
    with pytest.raises(TensorError, match=r"input 'y' has shape \(3, 4\)"):  # the batch of x is 2
        model.run(0, count, {**inputs, "y": torch.zeros(3, 4)})
    with pytest.raises(TensorError, match="in 1 to 64"):
        model.run(0, count, {"x": torch.zeros(65, 4, 4), "y": torch.zeros(65, 4)})
    with pytest.raises(TensorError, match="is live before unit 1: pass it"):
        model.run(1, count, {"x": inputs["x"]})
    with pytest.raises(TensorError, match="no numeric array"):
        model.run(1, count, {name: np.array(["word"]) for name in model.dfg.live(1)})


def test_ranges_outside_are_refused(models: dict[str, TorchModel]) -> None:
    count = models["residual"].unit_count
    for start, end in ((0, count + 1), (-1, 2), (3, 3), (4, 2)):
        with pytest.raises(InvalidValueError, match=rf"expected 0 <= start < end <= {count}"):
            models["residual"].prepare([(start, end)])


def test_what_torch_raises_has_a_reason(tmp_path: Path) -> None:
    table = nn.Embedding(10, 4)
    path = saved(table, {"input": torch.arange(3)}, tmp_path / "table.pt2")
    with TorchModel.open(path) as model:
        (name,) = (tensor.name for tensor in model.inputs)
        with pytest.raises(ModelError, match="units 0 to 1 failed: index out of range") as caught:
            model.run(0, 1, {name: torch.tensor([3, 10, 1])})
        assert caught.value.__cause__ is not None


def test_a_closed_model_runs_no_more(tmp_path: Path) -> None:
    model = TorchModel.open(saved(nn.Linear(4, 4), {"input": torch.ones(1, 4)}, tmp_path / "line.pt2"))
    model.run(0, 1, {"input": torch.ones(1, 4)})
    model.close()
    with pytest.raises(ModelError, match="has been closed"):
        model.run(0, 1, {"input": torch.ones(1, 4)})


def test_the_table_of_segments_is_bounded(models: dict[str, TorchModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_model, "MOST_SEGMENTS", 3)
    inputs = SAMPLES["residual"].inputs(1)
    with TorchModel.open(models["residual"].path) as model:
        whole = model.run(0, model.unit_count, inputs)
        for cut in range(1, model.unit_count):
            assert_equal(along(model, [cut], inputs), whole)
        assert len(model._built) == 3
        model.prepare([(0, 2)])
        built = model._segment(0, 2)[0]
        model.prepare([(0, 2)])
        assert model._segment(0, 2)[0] is built


def test_threads_are_set_only_when_they_differ(models: dict[str, TorchModel], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    model, inputs = models["tiny"], SAMPLES["tiny"].inputs(1)

    def work() -> None:
        real = torch.get_num_threads()
        for count in (real, real, real + 1):
            model.run(0, 1, inputs, count)
        assert asked == [real + 1]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(30)


def test_cores_name_a_number_of_threads(models: dict[str, TorchModel]) -> None:
    model, inputs = models["residual"], SAMPLES["residual"].inputs(2)
    expected = model.run(0, model.unit_count, inputs)

    def work() -> None:
        assert_equal(along(model, [2], inputs, (0, 1)), expected)
        assert torch.get_num_threads() == 2
        assert_equal(along(model, [2], inputs, (100_000, 100_001)), expected)  # another machine's
        model.run(0, 1, inputs, 1)
        assert torch.get_num_threads() == 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)
    for wrong in (0, (), (1, 1), (-1, 0)):
        with pytest.raises(ValueError, match="threads is"):
            torch_threads.use_threads(wrong)


def test_a_missing_device_is_named(models: dict[str, TorchModel]) -> None:
    with pytest.raises(ModelError, match="cannot be taken to cuda:99"):
        TorchModel.open(models["residual"].path, device="cuda:99")


def test_costs_at_other_shapes(models: dict[str, TorchModel]) -> None:
    model = models["residual"]
    assert model.dfg_at({"picture": [4, 3, 12, 12]}).macs == 4 * model.dfg.macs
    with pytest.raises(GraphError, match="cannot have shape"):
        model.dfg_at({"picture": [4, 3, 12, 13]})


def test_units_are_timed(models: dict[str, TorchModel]) -> None:
    model = models["residual"]
    inputs = {name: value.numpy() for name, value in SAMPLES["residual"].inputs(2).items()}
    found = model.unit_ns(inputs)
    assert len(found) == model.unit_count
    assert min(found) > 0


def test_normalisations_are_folded_where_that_is_safe(tmp_path: Path) -> None:
    def net(variance: float) -> nn.Module:
        norm = nn.BatchNorm2d(4, eps=1e-14)
        nn.init.constant_(norm.running_var, variance)  # type: ignore[arg-type]
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()).eval()

    inputs = {"input": torch.randn(2, 3, 6, 6)}
    for variance, is_folded in ((0.3, True), (1e-14, False)):
        module = net(variance)
        with TorchModel.open(saved(module, inputs, tmp_path / f"{is_folded}.pt2")) as model:
            kinds = [operator.op_type for operator in model.dfg.operators]
            assert ("BatchNormalization" not in kinds) == is_folded
            torch.testing.assert_close(
                model.run(0, model.unit_count, inputs)["output"], answers(module, inputs)[0], rtol=1e-4, atol=1e-5
            )


# --- files that are no good ---------------------------------------------------------------------------------------


class Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1  # type: ignore[operator]
        return x + self.count


class GivesNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, x.shape[0]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Training().train(), "state|training mode|changes"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), "dropout is in training mode"),
        (Counting().eval(), "changes its"),
        (GivesNumber().eval(), "no tensor"),
    ],
)
def test_modules_that_cannot_be_served_are_refused(tmp_path: Path, module: nn.Module, words: str) -> None:
    name = "input" if isinstance(module, nn.Sequential) else "x"
    path = saved(module, {name: torch.randn(3, 4)}, tmp_path / "m.pt2", {name: {0: torch.export.Dim("n", min=2)}})
    with pytest.raises(ModelError, match=words):
        TorchModel.open(path)


def test_broken_files_say_what_to_do(tmp_path: Path) -> None:
    good = saved(nn.Linear(400, 40), {"input": torch.ones(1, 400)}, tmp_path / "good.pt2").read_bytes()
    for content in (b"", b"this is no model", good[:1000], good[: len(good) // 2]):
        path = tmp_path / "broken.pt2"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"no complete torch.export archive .* Export it again"):
            TorchModel.open(path)
    with pytest.raises(ModelError, match="does not exist"):
        TorchModel.open(tmp_path / "none.pt2")
    with pytest.raises(ModelError, match="cannot be read"):
        TorchModel.open(tmp_path)


def test_damaged_weights_are_noticed(tmp_path: Path) -> None:
    path = saved(nn.Linear(400, 40), {"input": torch.ones(1, 400)}, tmp_path / "m.pt2")
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 8):
        content[at] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ModelError, match="Bad CRC-32"):
        TorchModel.open(path)


def test_a_missing_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs torch, which is not installed. Run: pip install 'cotenant\[torch\]'"):
        open_model(tmp_path / "m.pt2")
    with pytest.raises(ModelError, match=r"no engine runs files that end in '.h5'"):
        open_model(tmp_path / "m.h5")


def test_a_version_holds_one_format(tmp_path: Path) -> None:
    folder = tmp_path / "line" / "1"
    path = saved(nn.Linear(4, 4), {"input": torch.ones(1, 4)}, folder / "model.pt2")
    (tmp_path / "line" / "config.toml").write_text("[tenant]\nslo_ms = 100\n", encoding="utf-8")
    assert find_versions(tmp_path, "line")[0].path == path
    (folder / "model.onnx").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"has model.onnx and model.pt2, expected one of them"):
        find_versions(tmp_path, "line")
