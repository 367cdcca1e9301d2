"""The zoo's torch models: published sizes, seeded weights, and two files of one definition that answer alike."""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bench
from bench.zoo import NAMES, Definition, Model, define, examples, export, make, save_onnx, save_pt2
from bench.zoo.densenet import DenseLayer
from bench.zoo.inception import Branches, Fork
from bench.zoo.layers import ConvNorm, PooledClassifier
from bench.zoo.mobile import Inverted, InvertedResidual
from bench.zoo.resnet import Block
from bench.zoo.seeding import gained, seed_weights
from cotenant.zoo import ZooError

# As published with the frameworks' reference models; LeNet-5 by hand: (25 + 1) 6 + (150 + 1) 16 + 48120 + 10164 + 850.
PARAMETERS = {
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "efficientnet_b0": 5_288_548,
    "googlenet": 6_624_904,
    "inception_v3": 23_834_568,
    "lenet": 61_706,
    "mnasnet": 4_383_312,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}

# Billions of multiply-adds of one picture, as published with the same reference models, two digits behind the point.
GIGA_MACS = {
    "alexnet": 0.71,
    "densenet121": 2.83,
    "densenet161": 7.73,
    "efficientnet_b0": 0.39,
    "googlenet": 1.50,
    "inception_v3": 5.71,
    "lenet": 0.0,
    "mnasnet": 0.31,
    "mobilenet_v2": 0.30,
    "mobilenet_v3_large": 0.22,
    "resnet18": 1.81,
    "resnet34": 3.66,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vgg16": 15.47,
    "vgg19": 19.63,
}
STACK = (b"site-packages", b".py", b", line ")
"""What the exporters' notes on call stacks would contain."""


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def model_of(name: str, module: nn.Module, made: Definition) -> Model:
    seed_weights(module, 5)
    return Model(name, module.eval(), made.inputs, made.outputs, made.batched, limits=made.limits)


def mixture() -> Model:
    """One block of every family of classifiers, small."""
    inverted = Inverted(16, 24, 16, 5, 1, 8, nn.Hardswish, nn.Hardsigmoid)
    features = nn.Sequential(
        ConvNorm(3, 8, 3, 2, activation=nn.ReLU6),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        DenseLayer(8, 4),
        Branches((ConvNorm(12, 8, (1, 7)), Fork(ConvNorm(12, 4), ends=(nn.MaxPool2d(3, 1, 1), ConvNorm(4, 4, 3))))),
        InvertedResidual(inverted),
        InvertedResidual(Inverted(16, 32, 16, 3, 2, 4, nn.SiLU, nn.Sigmoid, nn.SiLU)),
        Block(16, 8, 2, bottleneck=True),
    )
    module = PooledClassifier(features, 32, nn.Linear(32, 10))
    return model_of("mixture", module, Definition(module, {"input": ("float32", (1, 3, 34, 34))}, ("logits",), ""))


class Pair(nn.Module):
    """Two inputs of two types and two outputs, of which one is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        looked = self.words(ids).sum(1) * scale
        return looked, looked.argmax(1)


def pair() -> Model:
    module = Pair()
    inputs = {"ids": ("int64", (1, 6)), "scale": ("float32", (1, 4))}
    return model_of(
        "pair", module, Definition(module, inputs, ("looked", "best"), "", batched=False, limits={"ids": 50})
    )


# --- definitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_as_many_as_published(name: str, count: int) -> None:
    with torch.device("meta"):
        module = define(name).module
    assert sum(parameter.numel() for parameter in module.parameters()) == count


@pytest.mark.parametrize(("name", "giga_macs"), GIGA_MACS.items())
def test_shapes_fit_the_module_and_its_work_is_as_published(name: str, giga_macs: float) -> None:
    with torch.device("meta"), torch.no_grad():
        made = define(name)
        (shape,) = [shape for _, shape in made.inputs.values()]
        with FlopCounterMode(display=False) as counted:
            out = made.module.eval()(torch.empty(2, *shape[1:]))
    assert out.shape == (2, 10 if name == "lenet" else 1000)
    assert counted.get_total_flops() / 4e9 == pytest.approx(giga_macs, abs=0.005)
    assert made.batched
    assert made.outputs == ("logits",)


def test_an_unknown_name_is_answered_with_the_list() -> None:
    with pytest.raises(ZooError, match=r"'yolo9000' is not in the zoo; .*alexnet.*vgg19"):
        make("yolo9000")


def test_where_torch_is_missing_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ZooError, match=r"pip install 'cotenant\[torch\]'"):
        make("lenet")


def test_the_names_are_known_without_torch() -> None:
    code = "import sys, bench.zoo as zoo; print('torch' in sys.modules, 'numpy' in sys.modules, zoo.NAMES[0])"
    root = Path(bench.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", NAMES[0]]


# --- weights --------------------------------------------------------------------------------------------------------


def test_weights_belong_to_the_seed_and_to_nothing_else() -> None:
    torch.manual_seed(1)
    first = make("lenet", 3).module.state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1)), "torch's own generator was used up"
    again, other = make("lenet", 3).module.state_dict(), make("lenet", 4).module.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_every_parameter_and_statistic_is_drawn() -> None:
    module = nn.Sequential(
        *(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.LayerNorm(64), nn.Linear(512, 256)),
        *(nn.ConvTranspose2d(64, 64, 4, 2), nn.Embedding(100, 64), nn.LSTM(16, 16), gained(nn.Linear(512, 256), 0.1)),
    )
    for value in (*module.parameters(), *module.buffers()):
        value.data.fill_(1)
    seed_weights(module, 0)
    drawn = [value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")]
    assert len(drawn) == 19
    assert all(value.std() > 0 for value in drawn)
    state = module.state_dict()
    for name, deviation in {
        "0.weight": math.sqrt(2 / (64 * 9)),
        "3.weight": math.sqrt(1 / 512),
        "4.weight": math.sqrt(2 / (64 * 16 / 4)),
        "5.weight": 1.0,
        "7.weight": 0.1 * math.sqrt(1 / 512),
    }.items():
        assert float(state[name].std()) == pytest.approx(deviation, rel=0.05), name
    assert float(state["1.running_var"].min()) > 0.5


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large", "efficientnet_b0", "googlenet"])
def test_answers_are_finite_and_well_scaled_and_depend_on_the_input(name: str) -> None:
    model = make(name)
    with torch.inference_mode():
        first, second = model.module(examples(model, 2)["input"])
    assert float(first.abs().max()) < 100
    assert float(first.std()) > 0.05
    assert float((first - second).abs().max()) > 1e-3


# --- examples -------------------------------------------------------------------------------------------------------


def test_examples_have_the_shapes_types_and_limits_of_the_model() -> None:
    made = examples(pair(), seed=1)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in made.items()} == {
        "ids": (torch.int64, (1, 6)),
        "scale": (torch.float32, (1, 4)),
    }
    assert 2 <= int(made["ids"].max()) < 50
    assert all(torch.equal(value, examples(pair(), seed=1)[name]) for name, value in made.items())
    assert not torch.equal(made["scale"], examples(pair(), seed=2)["scale"])
    assert examples(mixture(), 3)["input"].shape == (3, 3, 34, 34)
    with pytest.raises(ZooError, match="'pair': its shapes are fixed"):
        examples(pair(), 2)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mixture", "pair", "lenet"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path, Path]:
    """A model, its archive and its ONNX file, written into a folder that was not there."""
    made = {"mixture": mixture, "pair": pair, "lenet": lambda: make("lenet")}
    model: Model = made[request.param]()
    folder = tmp_path_factory.mktemp("saved") / "deep"
    program = export.exported(model)
    export.save_pt2(model, folder / "model.pt2", program)
    export.save_onnx(model, folder / "model.onnx", program)
    return model, folder / "model.pt2", folder / "model.onnx"


def test_both_files_answer_as_the_module_does(saved: tuple[Model, Path, Path]) -> None:
    model, archive, file = saved
    assert sorted(path.name for path in archive.parent.iterdir()) == ["model.onnx", "model.pt2"]
    loaded = torch.export.load(archive)
    served = session(file)
    assert [value.name for value in served.get_inputs()] == list(model.inputs)
    assert [value.name for value in served.get_outputs()] == list(model.outputs)
    for batch in (1, 3) if model.batched else (1,):
        inputs = examples(model, batch, seed=batch)
        with torch.inference_mode():
            known = model.module(**inputs)
            found = loaded.module()(**inputs)
        answers = served.run(None, {name: value.numpy() for name, value in inputs.items()})
        assert list(found) == list(model.outputs)
        for name, value, answer in zip(
            model.outputs, known if isinstance(known, tuple) else (known,), answers, strict=True
        ):
            assert answer.shape == (batch, *value.shape[1:])
            np.testing.assert_allclose(found[name].numpy(), value.numpy(), rtol=0, atol=1e-5)
            np.testing.assert_allclose(answer, value.numpy(), rtol=0, atol=1e-3)


def test_the_archive_holds_no_pickled_sample_and_the_onnx_file_no_call_stack(saved: tuple[Model, Path, Path]) -> None:
    model, path, file = saved
    with zipfile.ZipFile(path) as archive:
        samples = [entry for entry in archive.infolist() if "sample_inputs" in entry.filename]
        assert [entry.file_size for entry in samples] == [0]
        for entry in archive.infolist():
            content = archive.read(entry)
            assert not content.startswith(b"PK"), f"{entry.filename} is a file of torch.save"
            assert not any(word in content for word in STACK), f"{entry.filename} tells where it was made"
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == export.OPSET
    for value in (*proto.graph.input, *proto.graph.output):
        assert (value.type.tensor_type.shape.dim[0].dim_param == "batch") is model.batched
    written = file.read_bytes()
    assert not any(word in written for word in STACK)


class Choosy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    module = Choosy()
    model = model_of("choosy", module, Definition(module, {"x": ("float32", (1, 4))}, ("y",), ""))
    with pytest.raises(ZooError, match="model 'choosy': cannot be exported"):
        save_pt2(model, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_where_onnxscript_is_missing_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ZooError, match=r"onnxscript, which is missing; run: pip install 'cotenant\[torch\]'"):
        save_onnx(pair(), tmp_path / "model.onnx")
