"""Model files as users bring them: thirteen kinds, each with an input and the outputs that its framework gives.

Each builder writes bare files into a folder, as the exporters write them by default. Detectors, OCR and audio nets are
the released files where their package is installed, else nets of the same form with drawn weights.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench._registry import BenchError

SEED = 1
ROWS = 3
"""Rows of the query of a tabular or text model."""
_OPSET = 17


@dataclass(frozen=True, slots=True)
class Case:
    """A query: inputs by name and the expected outputs, in the order of the model's outputs.

    `source` is "scripted" or the name of the package that ships the file.
    """

    inputs: Mapping[str, Any]
    outputs: Sequence[Any]
    source: str = "scripted"

    def arguments(self, folder: Path) -> list[str]:
        """The inputs as arguments of `cotenant infer`; arrays are files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        words = []
        for number, (name, array) in enumerate(self.inputs.items()):
            if array.dtype.kind in "OU":
                path = folder / f"{number}.json"
                path.write_text(json.dumps(array.tolist()), encoding="utf-8")
            else:
                path = folder / f"{number}.npy"
                np.save(path, array)
            words.append(f"{name}=@{path}")
        return words


# --- tables and texts -------------------------------------------------------------------------------------------------


def iris_pipeline(path: Path, zipmap: bool = True) -> Case:
    """A scaler and a logistic regression on iris. With `zipmap` the file is skl2onnx's default export."""
    from skl2onnx import to_onnx
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data, labels = load_iris(return_X_y=True)
    data = data.astype(np.float32)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(data, labels)
    options = None if zipmap else {id(model): {"zipmap": False}}
    onnx.save(to_onnx(model, data[:1], options=options), path)
    rows = data[:: len(data) // ROWS][:ROWS]
    return Case({"X": rows}, (model.predict(rows), model.predict_proba(rows)))


def iris_pipeline_plain(path: Path) -> Case:
    """The same with `zipmap=False`."""
    return iris_pipeline(path, zipmap=False)


def forest_of_texts(path: Path) -> Case:
    """A random forest that answers with names of species."""
    from skl2onnx import to_onnx
    from sklearn.datasets import load_iris
    from sklearn.ensemble import RandomForestClassifier

    iris = load_iris()
    data = iris.data.astype(np.float32)
    model = RandomForestClassifier(20, random_state=SEED).fit(data, iris.target_names[iris.target])
    onnx.save(to_onnx(model, data[:1]), path)
    rows = data[:: len(data) // ROWS][:ROWS]
    return Case({"X": rows}, (model.predict(rows), model.predict_proba(rows)))


def lightgbm_classifier(path: Path, zipmap: bool = True) -> Case:
    """A LightGBM classifier of three classes, by onnxmltools."""
    import onnxmltools
    from lightgbm import LGBMClassifier
    from onnxmltools.convert.common.data_types import FloatTensorType
    from sklearn.datasets import load_iris

    data, labels = load_iris(return_X_y=True)
    model = LGBMClassifier(n_estimators=20, verbose=-1, n_jobs=1, random_state=SEED).fit(data, labels)
    types = [("input", FloatTensorType([None, data.shape[1]]))]
    made = onnxmltools.convert_lightgbm(model, initial_types=types, zipmap=zipmap, target_opset=15)
    path.write_bytes(made.SerializeToString())
    rows = data[:: len(data) // ROWS][:ROWS].astype(np.float32)
    return Case({"input": rows}, (model.predict(rows), model.predict_proba(rows)))


def lightgbm_classifier_plain(path: Path) -> Case:
    """The same with `zipmap=False`."""
    return lightgbm_classifier(path, zipmap=False)


def tfidf_texts(path: Path) -> Case:
    """A text classifier: tf-idf of words in lower case, then a logistic regression."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = ["the pump leaks oil", "Pump is loud", "invoice was paid twice", "please send the invoice again"] * 5
    topics = ["machine", "machine", "billing", "billing"] * 5
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, topics)
    onnx.save(to_onnx(model, initial_types=[("text", StringTensorType([None, 1]))], target_opset=_OPSET), path)
    asked = ["The PUMP leaks", "Ünpaid INVOICE twice", "nothing known"]
    inputs = {"text": np.array(asked, object)[:, None]}
    return Case(inputs, (model.predict(asked), model.predict_proba(asked)))


def ordinal_table(path: Path) -> Case:
    """A table with columns of texts and of numbers: an ordinal encoder, a scaler and a logistic regression."""
    import pandas
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder, StandardScaler

    rng = np.random.default_rng(SEED)
    colours, sizes = ["red", "green", "blue"], ["small", "large"]
    table = pandas.DataFrame(
        {
            "colour": rng.choice(colours, 120),
            "size": rng.choice(sizes, 120),
            "weight": rng.random(120).astype(np.float32),
            "price": rng.random(120).astype(np.float32),
        }
    )
    label = ((table["colour"] == "red") ^ (table["weight"] > 0.5)).astype(int)
    parts = ColumnTransformer(
        [("texts", OrdinalEncoder(), ["colour", "size"]), ("numbers", StandardScaler(), ["weight", "price"])]
    )
    model = make_pipeline(parts, LogisticRegression()).fit(table, label)
    kinds = {"colour": StringTensorType, "size": StringTensorType, "weight": FloatTensorType, "price": FloatTensorType}
    made = to_onnx(model, initial_types=[(name, kind([None, 1])) for name, kind in kinds.items()])
    onnx.save(made, path)
    asked = table.iloc[:ROWS]
    inputs = {
        name: asked[[name]].to_numpy(object if kind is StringTensorType else None) for name, kind in kinds.items()
    }
    return Case(inputs, (model.predict(asked), model.predict_proba(asked)))


# --- nets of torch ----------------------------------------------------------------------------------------------------


def _small_cnn() -> tuple[Any, Any, Any]:
    """A net with an input of 3x32x32, the input of two rows, and its output."""
    import torch

    torch.manual_seed(SEED)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 10),
    ).eval()
    value = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        return net, value, net(value)


def small_cnn_onnx(path: Path) -> Case:
    """A small CNN by torch's exporter, with its weights in a file beside it."""
    import torch

    net, value, answer = _small_cnn()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    made = torch.onnx.export(net, (value,), dynamo=True, dynamic_shapes=dynamic, input_names=["image"], verbose=False)
    assert made is not None
    made.save(path, external_data=True)
    return Case({"image": value.numpy()}, (answer.numpy(),))


def small_cnn_pt2(path: Path) -> Case:
    """The same net as an archive of `torch.export`."""
    import torch

    net, value, answer = _small_cnn()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(net, (value,), dynamic_shapes=dynamic), path)
    return Case({"input": value.numpy()}, (answer.numpy(),))


# --- nets of images and sound -----------------------------------------------------------------------------------------


def body_detector(path: Path) -> Case:
    """nudenet's `320n`, or a net of its form: 320x320 pixels in, boxes and scores of 18 classes in 2,100 places out."""
    if (case := _released("nudenet", "320n.onnx", path, {"images": (1, 3, 320, 320)})) is not None:
        return case
    graph = _Graph()
    at, heads = graph.conv("images", 3, 16, 3, 2), []
    for width, count in ((32, 1), (64, 2), (128, 2), (256, 2)):
        at = graph.conv(at, width // 2, width, 3, 2)
        for _ in range(count):
            half = graph.conv(at, width, width // 2, 1)
            at = graph.node("Add", [at, graph.conv(half, width // 2, width, 3)])
        if width >= 64:
            feature = graph.conv(graph.conv(at, width, 128, 3), 128, 128, 3)
            head = graph.conv(feature, 128, 22, 1, is_linear=True)
            heads.append(graph.node("Reshape", [head, graph.ints([0, 22, -1])]))
    whole = graph.node("Concat", heads, axis=2)
    boxes, scores = graph.nodes("Split", [whole, graph.ints([4, 18])], 2, axis=1)
    graph.node("Concat", [boxes, graph.node("Sigmoid", [scores])], to="output0", axis=1)
    graph.save(path, {"images": ["batch", 3, 320, 320]}, {"output0": ["batch", 22, 2100]})
    return _by_onnxruntime(path, {"images": (2, 3, 320, 320)})


def text_reader(path: Path) -> Case:
    """ddddocr's `common_old`, or a net of its form: grey lines of any width in, scores by time, row and letter out."""
    if (case := _released("ddddocr", "common_old.onnx", path, {"input1": (1, 1, 64, 160)})) is not None:
        return case
    graph = _Graph()
    at = "input1"
    for inner, outer, strides in ((1, 32, 2), (32, 64, 2), (64, 128, [2, 1]), (128, 128, [2, 1]), (128, 128, [4, 1])):
        at = graph.conv(at, inner, outer, 3, strides)
    at = graph.node("Squeeze", [at, graph.ints([2])])
    at = graph.node("Transpose", [at], perm=[2, 0, 1])
    for width in (128, 256):
        weights = [graph.weight(2, 4 * 128, width), graph.weight(2, 4 * 128, 128), graph.weight(2, 8 * 128)]
        both = graph.node("LSTM", [at, *weights], hidden_size=128, direction="bidirectional")
        swapped = graph.node("Transpose", [both], perm=[0, 2, 1, 3])
        at = graph.node("Reshape", [swapped, graph.ints([0, 0, -1])])
    graph.node("MatMul", [at, graph.weight(256, 2000)], to="387")
    graph.save(path, {"input1": ["batch", 1, 64, "width"]}, {"387": ["time", "batch", 2000]})
    return _by_onnxruntime(path, {"input1": (1, 1, 64, 160)})


def text_detector(path: Path) -> Case:
    """ddddocr's `common_det`, or a net of its form: one picture of 416x416 pixels in, boxes in 3,549 places out."""
    if (case := _released("ddddocr", "common_det.onnx", path, {"images": (1, 3, 416, 416)})) is not None:
        return case
    graph = _Graph()
    halves = [
        graph.node(
            "Slice", ["images", graph.ints([y, x]), graph.ints([416, 416]), graph.ints([2, 3]), graph.ints([2, 2])]
        )
        for y in (0, 1)
        for x in (0, 1)
    ]
    at, heads = graph.conv(graph.node("Concat", halves, axis=1), 12, 24, 3), []
    for width in (48, 96, 192, 384):
        at = graph.conv(at, width // 2, width, 3, 2)
        if width >= 96:
            feature = graph.conv(graph.conv(at, width, 96, 1), 96, 96, 3)
            head = graph.conv(feature, 96, 6, 1, is_linear=True)
            heads.append(graph.node("Reshape", [head, graph.ints([0, 6, -1])]))
    graph.node("Transpose", [graph.node("Concat", heads, axis=2)], to="output", perm=[0, 2, 1])
    graph.save(path, {"images": [1, 3, 416, 416]}, {"output": [1, 3549, 6]})
    return _by_onnxruntime(path, {"images": (1, 3, 416, 416)})


def pitch_finder(path: Path) -> Case:
    """basic-pitch's `nmp`, or a net of its form: two seconds of sound in, notes and contours out.

    Names of inputs and outputs are those that tf2onnx writes, with a colon.
    """
    name = "serving_default_input_2:0"
    if (case := _released("basic_pitch", "nmp.onnx", path, {name: (1, 43844, 1)})) is not None:
        return case
    graph = _Graph()
    samples = graph.node("Transpose", [name], perm=[0, 2, 1])
    time = np.arange(1024) / 22050
    pitches = 32.7 * 2 ** (np.arange(264)[:, None] / 36)
    window = np.hanning(1024)
    parts = []
    for wave in (np.cos, np.sin):
        kernel = graph.constant((wave(2 * np.pi * pitches * time) * window / 256)[:, None].astype(np.float32))
        sound = graph.node("Conv", [samples, kernel], strides=[256], pads=[512, 512], kernel_shape=[1024])
        parts.append(graph.node("Mul", [sound, sound]))
    power = graph.node("Add", parts)
    level = graph.node("Log", [graph.node("Add", [power, graph.constant(np.array(1e-6, np.float32))])])
    picture = graph.node("Unsqueeze", [graph.node("Transpose", [level], perm=[0, 2, 1]), graph.ints([1])])
    at = graph.conv(graph.conv(picture, 1, 8, 3), 8, 8, 5)
    outputs = {}
    for number, (strides, count) in enumerate((((1, 3), 88), ((1, 1), 264), ((1, 3), 88))):
        head = graph.conv(at, 8, 1, 3, list(strides), is_linear=True)
        to = f"StatefulPartitionedCall:{number}"
        graph.node("Sigmoid", [graph.node("Squeeze", [head, graph.ints([1])])], to=to)
        outputs[to] = ["unk__1", 172, count]
    graph.save(path, {name: ["unk__1", 43844, 1]}, outputs)
    return _by_onnxruntime(path, {name: (2, 43844, 1)})


class _Graph:
    """Nodes and drawn weights of an ONNX file."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[TensorProto] = []
        self._rng = np.random.default_rng(SEED)

    def nodes(self, kind: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        names = [f"{kind.lower()}_{len(self._nodes)}_{at}" for at in range(count)]
        self._nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def node(self, kind: str, inputs: Sequence[str], to: str = "", **attributes: Any) -> str:
        name = to or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, array: Any) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, np.int64))

    def weight(self, *dims: int) -> str:
        scale = 1 / np.sqrt(np.prod(dims[1:]))
        return self.constant(self._rng.normal(0, scale, dims).astype(np.float32))

    def conv(
        self, at: str, inner: int, outer: int, side: int, stride: int | list[int] = 1, *, is_linear: bool = False
    ) -> str:
        """A convolution with a bias and, unless `is_linear`, x * sigmoid(x)."""
        strides = stride if isinstance(stride, list) else [stride, stride]
        weights = [self.weight(outer, inner, side, side), self.weight(outer)]
        made = self.node("Conv", [at, *weights], kernel_shape=[side, side], strides=strides, pads=[side // 2] * 4)
        return made if is_linear else self.node("Mul", [made, self.node("Sigmoid", [made])])

    def save(self, path: Path, inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> None:
        given, made = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in infos.items()]
            for infos in (inputs, outputs)
        )
        graph = helper.make_graph(self._nodes, path.stem, given, made, self._weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8), path)


def _released(package: str, file: str, path: Path, shapes: Mapping[str, Sequence[int]]) -> Case | None:
    """The query of a released file, copied to `path`; None where its package is not installed."""
    spec = importlib.util.find_spec(package)
    found = [
        each for root in (spec.submodule_search_locations or () if spec else ()) for each in Path(root).rglob(file)
    ]
    if not found:
        return None
    path.write_bytes(found[0].read_bytes())
    case = _by_onnxruntime(path, shapes)
    return Case(case.inputs, case.outputs, package)


def _by_onnxruntime(path: Path, shapes: Mapping[str, Sequence[int]]) -> Case:
    """A drawn query, with the outputs of onnxruntime without optimisation."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(SEED)
    names = [each.name for each in session.get_inputs()]
    values = [rng.random(dims, np.float32) for dims in shapes.values()]
    inputs = dict(zip(names, values, strict=True))
    return Case(inputs, session.run(None, inputs))


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the thirteen: the suffix of its file, its builder, and the packages that the builder needs."""

    build: Callable[[Path], Case]
    needs: Sequence[str] = ()
    suffix: str = ".onnx"

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def make(self, name: str, folder: Path) -> Case:
        """Write the file as NAME in `folder`. Raises BenchError where the net cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return self.build(folder / f"{name}{self.suffix}")
        except Exception as error:  # an exporter of another project
            raise BenchError(f"{name}: its file cannot be made: {type(error).__name__}: {error}") from error


_SKL, _LIGHTGBM, _TORCH = ("sklearn", "skl2onnx"), ("sklearn", "lightgbm", "onnxmltools"), ("torch", "onnxscript")
KINDS = {
    "iris": Kind(iris_pipeline, _SKL),
    "iris_plain": Kind(iris_pipeline_plain, _SKL),
    "forest": Kind(forest_of_texts, _SKL),
    "lightgbm": Kind(lightgbm_classifier, _LIGHTGBM),
    "lightgbm_plain": Kind(lightgbm_classifier_plain, _LIGHTGBM),
    "tfidf": Kind(tfidf_texts, _SKL),
    "table": Kind(ordinal_table, (*_SKL, "pandas")),
    "cnn": Kind(small_cnn_onnx, _TORCH),
    "cnn_pt2": Kind(small_cnn_pt2, _TORCH[:1], ".pt2"),
    "body_detector": Kind(body_detector),
    "text_reader": Kind(text_reader),
    "text_detector": Kind(text_detector),
    "pitch_finder": Kind(pitch_finder),
}
"""The kinds of models that a review of first users tried, by the name that the file gets."""
