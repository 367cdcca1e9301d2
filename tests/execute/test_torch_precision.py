"""Torch models in FP16 and BF16: near FP32, equal cut or whole, with what needs FP32 left in it; and refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.zoo import examples, make, save_pt2
from cotenant.config import load_model_config
from cotenant.errors import ConfigError
from cotenant.execute.errors import ModelError
from cotenant.execute.open_model import open_model
from cotenant.execute.torch import recurrent
from cotenant.execute.torch.fp32 import claim_fp32, release_fp32
from cotenant.execute.torch.model import TorchModel
from cotenant.execute.worker.channel import Open
from cotenant.execute.worker.worker import _open
from cotenant.graph.torch_lower import aten_name, lower
from cotenant.measure.opened_model import open_version
from cotenant.repository import find_versions
from cotenant.repository.formats import Arithmetic
from repositories import config, scaled, write_model
from torch_samples import BATCH, SAMPLES, answers, exported, saved

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3}
"""How far an output may be from FP32, of its largest number."""


def opened(path: Path, precision: str, channels_last: bool | None = None) -> TorchModel:
    return TorchModel.open(path, arithmetic=Arithmetic(precision, channels_last))


def run(model: TorchModel, inputs: Mapping[str, Any], cuts: int = 1) -> dict[str, torch.Tensor]:
    """What a model answers, by segments of so many units; all at once for 0."""
    values: Any = inputs
    places = range(0, model.unit_count, cuts) if cuts else [0]
    for start, end in pairwise([*places, model.unit_count]):
        values = model.run(start, end, values)
    return dict(values)


def assert_near(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype is value.dtype, name
        if value.is_floating_point():
            largest = float(value.detach().abs().max())
            torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance * largest)


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("chooses", "recurrent")])
def test_samples_answer_as_in_fp32_cut_or_whole(name: str, precision: str, tmp_path: Path) -> None:
    module, program = exported(name)
    torch.export.save(program, tmp_path / "m.pt2")
    inputs = SAMPLES[name].inputs(3)
    with opened(tmp_path / "m.pt2", precision) as model, TorchModel.open(tmp_path / "m.pt2") as plain:
        assert (model.inputs, model.outputs) == (plain.inputs, plain.outputs)
        found = run(model, inputs, 0)
        expected = dict(zip(found, answers(module, inputs), strict=True))
        assert_near(found, expected, TOLERANCE[precision])
        for cuts in (1, 2):
            assert_equal(run(model, inputs, cuts), found)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "bf16") for name in ("resnet18", "mobilenet_v2", "lstm_classifier", "ssd_mobilenet")),
        *((name, "fp16") for name in ("resnet18", "lstm_classifier")),
    ],
)
def test_networks_answer_as_in_fp32_with_half_the_weights(name: str, precision: str, tmp_path: Path) -> None:
    made = make(name)
    save_pt2(made, tmp_path / "m.pt2")
    inputs = examples(made, 2)
    with TorchModel.open(tmp_path / "m.pt2") as plain, opened(tmp_path / "m.pt2", precision) as model:
        expected, found = run(plain, inputs, 0), run(model, inputs, 0)
        assert_near(found, expected, TOLERANCE[precision])
        assert not any(torch.equal(found[name], expected[name]) for name in found)
        assert_equal(run(model, inputs), found)
        assert model.weight_bytes <= 0.51 * plain.weight_bytes
        kernels = [weight for weight in model._weights.values() if weight.ndim == 4 and weight.shape[1] > 1]
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)
        crossing = [model.dfg.tensors[text].dtype for text in model.dfg.live(model.unit_count // 2)]
        assert "tensor(float)" not in crossing


class Sharp(nn.Module):
    """Squares beyond FP16, places beyond what BF16 counts to, a mask as far as FP32 goes, and a small epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("rates", 10.0 ** -torch.arange(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.line(x) * 900
        rms = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-12)
        places = torch.arange(x.shape[1]).unsqueeze(-1) * self.rates
        hidden = (1.0 - mask.to(torch.float32))[:, None] * torch.finfo(torch.float32).min
        scores = rms @ rms.transpose(1, 2)
        attended = functional.scaled_dot_product_attention(rms, rms, rms, attn_mask=hidden)
        return {
            "turned": torch.cat([places.sin(), places.cos()], -1) + 0 * rms,
            "soft": torch.softmax(scores + hidden, -1),
            "filled": torch.softmax(scores.masked_fill(~mask[:, None], -1e9), -1),
            "attended": attended,
        }


@pytest.mark.parametrize("precision", TOLERANCE)
def test_what_needs_fp32_stays_in_it(precision: str, tmp_path: Path) -> None:
    module = Sharp().eval()
    inputs = {"x": torch.randn(2, 1200, 8), "mask": torch.arange(1200).expand(2, 1200) < 1000}
    dynamic = {"x": {0: BATCH}, "mask": {0: BATCH}}
    with opened(saved(module, inputs, tmp_path / "m.pt2", dynamic), precision) as model:
        found = run(model, inputs)
        expected = dict(zip(found, answers(module, inputs), strict=True))
        assert all(bool(value.isfinite().all()) for value in found.values())
        torch.testing.assert_close(found.pop("turned"), expected.pop("turned"), rtol=0, atol=1e-5)
        assert float(found["soft"][..., 1000:].max()) == float(found["filled"][..., 1000:].max()) == 0.0
        assert_near(found, expected, 10 * TOLERANCE[precision])  # of scores near 8, in an exponent


class Chooses(nn.Module):
    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 3), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.conv(x))


def test_what_cannot_be_cast_or_laid_out_is_refused_by_its_operator(tmp_path: Path) -> None:
    _, program = exported("chooses")
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(ModelError, match=r"its operator 'cond' cannot be cast; leave its precision at 'tf32'"):
        opened(tmp_path / "m.pt2", "bf16")
    picture = {"x": torch.randn(2, 3, 8, 8)}
    strided = Chooses(lambda y: y.as_strided((2, 3), (1, 2)))
    path = saved(strided, picture, tmp_path / "s" / "m.pt2")
    with pytest.raises(ModelError, match="its operator 'as_strided' needs the exported memory layout of tensors"):
        opened(path, "tf32", True)
    with opened(path, "bf16", False) as model:
        assert_near(run(model, picture), {"output": answers(strided, picture)[0]}, TOLERANCE["bf16"])


def test_pictures_are_laid_out_where_asked_for_and_nothing_else_changes(tmp_path: Path) -> None:
    module = Chooses(lambda y: y.view(y.shape[0], -1).cumsum(1)).eval()
    picture = {"x": torch.randn(2, 3, 8, 8)}
    path = saved(module, picture, tmp_path / "m.pt2", {"x": {0: BATCH}})
    expected = {"output": answers(module, picture)[0]}
    for arithmetic, is_laid_out in (
        (Arithmetic(), False),
        (Arithmetic("fp32", True), True),
        (Arithmetic("bf16"), True),
        (Arithmetic("bf16", False), False),
    ):
        with TorchModel.open(path, arithmetic=arithmetic) as model:
            (kernel,) = (each for each in model._weights.values() if each.ndim == 4)
            assert kernel.is_contiguous(memory_format=torch.channels_last) == is_laid_out
            assert_near(run(model, picture), expected, 1e-5 if kernel.dtype is torch.float32 else 3e-2)
            assert [aten_name(node) for node in model._graph.nodes].count("reshape") == is_laid_out


def test_statistics_of_a_normalisation_that_stands_alone_stay_in_fp32(tmp_path: Path) -> None:
    norm = nn.BatchNorm2d(4).eval()
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    module = Chooses(lambda y: norm(y.relu())).eval()
    module.norm = norm
    picture = {"x": torch.randn(2, 3, 8, 8)}
    with opened(saved(module, picture, tmp_path / "m.pt2"), "bf16") as model:
        types = {name: weight.dtype for name, weight in model._weights.items()}
        assert {each for name, each in types.items() if "norm" in name} == {torch.float32}
        assert {each for name, each in types.items() if "norm" not in name} == {torch.bfloat16}
        assert_near(run(model, picture), {"output": answers(module, picture)[0]}, TOLERANCE["bf16"])


def test_onnx_models_run_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(scaled(2.0).SerializeToString())
    for wrong, text in (
        (Arithmetic("bf16"), "precision is 'bf16'"),
        (Arithmetic("tf32", True), "channels_last is true"),
    ):
        with pytest.raises(ModelError, match=rf"{text}, which onnxruntime cannot change\. .* export it as \.pt2"):
            open_model(path, arithmetic=wrong)
    open_model(path, arithmetic=Arithmetic("fp32", False)).close()


def test_settings_of_a_model_make_its_profile_another_one(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "m", config(), {1: lambda: scaled(2.0)})
    file = root / "m" / "config.toml"
    (root / "m" / "1" / "model.onnx").unlink()
    _, program = exported("tiny")
    torch.export.save(program, root / "m" / "1" / "model.pt2")
    before = file.read_text(encoding="utf-8")
    assert "[model]" in before
    digests = {}
    for line in ("", "precision = 'tf32'", "precision = 'bf16'", "precision = 'bf16'\nchannels_last = false"):
        file.write_text(before.replace("[model]", f"[model]\n{line}"), encoding="utf-8")
        (found,) = find_versions(root, "m")
        each = open_version(root, found)
        each.runner.close()
        digests[line] = each.digest
    assert len(set(digests.values())) == 3
    assert digests[""] == digests["precision = 'tf32'"]
    file.write_text(before.replace("[model]", "[model]\nprecision = 'int8'"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.precision: Invalid enum value 'int8', expected one of bf16, fp16"):
        load_model_config(file)


def test_a_worker_opens_what_the_server_opened(tmp_path: Path) -> None:
    _, program = exported("residual")
    torch.export.save(program, tmp_path / "m.pt2")
    with TorchModel.open(tmp_path / "m.pt2", cache_dir=tmp_path / "c", arithmetic=Arithmetic("bf16")) as model:
        folder = model.graph_path.parent
        message = Open("m", str(model.path), str(folder.parent), folder.name, (), 0, model.arithmetic)
        inputs = SAMPLES["residual"].inputs(2)
        with _open(message) as again:
            assert_equal(again.run(0, again.unit_count, inputs), run(model, inputs))


def test_weights_of_recurrent_layers_are_handed_to_cudnn_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(recurrent, "_flatten", lambda *given: calls.append(given))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    module, program = exported("recurrent")
    lowered = lower(program)
    placed = dict(program.state_dict)
    recurrent.flatten(lowered, placed)
    ((layer, *rest),) = calls
    lstm = module.lstm
    assert rest == [4, lstm.input_size, 2, lstm.hidden_size, lstm.proj_size, lstm.num_layers, True, True]
    assert [each.data_ptr() for each in layer] == [each.data_ptr() for each in lstm._flat_weights]
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
    recurrent.flatten(lowered, placed)
    assert len(calls) == 1


@pytest.mark.device
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.usefixtures("fp32_of_gpus")
def test_recurrent_layers_run_on_a_real_gpu_without_copies_of_their_weights(precision: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    module, program = exported("recurrent")
    torch.export.save(program, tmp_path / "m.pt2")
    inputs = SAMPLES["recurrent"].inputs(2)
    with TorchModel.open(tmp_path / "m.pt2", device="cuda:0", arithmetic=Arithmetic(precision)) as model:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns where it copies
                found = {name: value.cpu() for name, value in run(model, inputs, 0).items()}
            expected = dict(zip(found, answers(module, inputs), strict=True))
            assert_near({"state": found["state"]}, {"state": expected["state"]}, TOLERANCE.get(precision, 2e-3))
            model.move("cpu")
            model.move("cuda:0")


@pytest.fixture
def fp32_of_gpus() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("fp32_of_gpus")
def test_models_of_a_process_agree_on_what_gpus_make_of_fp32(tmp_path: Path) -> None:
    _, program = exported("tiny")
    torch.export.save(program, tmp_path / "m.pt2")
    first, second, third = (TorchModel.open(tmp_path / "m.pt2", name=name) for name in ("first", "second", "third"))
    for precision, is_tf32 in (("tf32", True), ("fp32", False)):
        assert claim_fp32(first, precision) == ""
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == is_tf32
        assert claim_fp32(second, precision) == ""
        assert claim_fp32(third, "bf16") == ""
        assert claim_fp32(third, "fp32" if is_tf32 else "tf32") == "first"
        assert torch.backends.cuda.matmul.allow_tf32 == is_tf32
        first.close()  # lets go
        release_fp32(second)
    assert claim_fp32(third, "tf32") == ""
    second.close()
    third.close()
