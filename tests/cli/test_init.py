"""From bare model files to an answer: `cotenant init`, `serve` and `infer`, without a file that is edited by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from commands import Run
from cotenant.cli.infer import inputs_of
from cotenant.cli.init import next_slo_ms
from cotenant.config import load_model_config
from cotenant.errors import ConfigError
from cotenant.repository import find_versions
from cotenant.repository.sources import sources_of
from onnx_samples import Sketch, info
from processes import WAIT_S, serving
from repositories import SLO_MS, config, external, scaled, write_model


def columns(count: int) -> onnx.ModelProto:
    """Its input is open, and it runs with this number of columns alone."""
    s = Sketch()
    s.op("MatMul", "x", s.constant(np.ones((count, 2), np.float32)), out="y")
    return s.model([info("x", ["batch", "columns"])], [info("y", ["batch", 2])])


def labelled() -> onnx.ModelProto:
    """An output is declared to have one row, as some converters write, and has as many as the input."""
    s = Sketch()
    s.op("ArgMax", "x", out="label", axis=1, keepdims=0)
    return s.model([info("x", ["batch", 3])], [info("label", [1], TensorProto.INT64)])


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def test_bare_files_become_models_that_answer(tmp_path: Path, run: Run) -> None:
    root = tmp_path / "models"
    save(scaled(3.0), root / "scaled.onnx")
    save(columns(64), root / "columns.onnx")
    save(labelled(), root / "labelled.onnx")
    save(scaled(2.0), root / "exported" / "onnx" / "model.onnx")
    save(scaled(4.0), root / "triton" / "3" / "model.onnx")
    status, out, _ = run("models", root)
    assert (status, "3 model files have no directory of a model" in " ".join(out.split())) == (1, True)
    status, out, err = run("init", root, "--json")
    assert (status, err) == (0, "")
    made = {each["model"]: each for each in json.loads(out)["models"]}
    assert set(made) == {"scaled", "columns", "labelled", "exported", "triton"}
    assert all(each["max_batch"] == 8 for each in made.values())
    assert not list(root.glob("*.onnx"))
    assert load_model_config(root / "columns" / "config.toml").model.shapes == ({"x": (1, 64)},)
    assert find_versions(root, "triton")[0].version == 3
    for name, each in made.items():  # a busy machine is to be in time, too
        path = root / name / "config.toml"
        text = path.read_text(encoding="utf-8")
        assert f"slo_ms = {each['slo_ms']}\n" in text
        path.write_text(re.sub("slo_ms = .*", f"slo_ms = {SLO_MS}", text), encoding="utf-8")
    status, out, _ = run("models", root, "--json")
    assert status == 0
    with serving(root) as server:
        (tmp_path / "x.json").write_text("[[1, 2, 3], [9, 4, 4]]", encoding="utf-8")
        where = ("--http", server.url, "-r", root)
        status, out, _ = run("infer", "labelled", f"@{tmp_path / 'x.json'}", *where, "--json")
        answer = json.loads(out)
        assert (status, answer["outputs"]["label"]["values"]) == (0, [2, 0])
        status, out, _ = run("infer", "columns", *where)
        assert status == 0
        assert "y  float32[1, 2]" in out
        assert "Made-up values: x." in out
        number = int(re.search(r"query (\d+)\.", out).group(1))  # type: ignore[union-attr]
        status, out, _ = run("infer", "scaled", "x=0.5", *where)
        assert (status, "y  float32[1, 8]" in out) == (0, True)
        status, _, err = run("infer", "scaled", "x=[1, 2]", *where)
        assert (status, "the value has the shape [1, 2], the model takes [-1, 8]" in err) == (2, True)
        server.popen.terminate()  # it writes the rest of its trace
        server.popen.wait(WAIT_S)
    status, out, err = run("explain", number, root)
    assert (status, f"Query {number} of 'columns' was answered" in out) == (0, True), (out, err)


def test_files_given_by_name_are_copied_with_their_weights(tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(external("net.onnx.data"), tmp_path / "net.onnx")
    (tmp_path / "net.onnx.data").write_bytes(bytes(1 << 16))
    status, _, err = run("init", path)
    assert (status, err) == (0, "")
    assert path.exists()
    assert (tmp_path / "models" / "net" / "1" / "net.onnx.data").stat().st_size == 1 << 16
    assert (tmp_path / "models" / "net" / "1" / "model.onnx").read_bytes() == path.read_bytes()
    status, out, _ = run("init", path)
    assert status == 1
    assert "config.toml: is there already" in " ".join(out.split())


def test_an_empty_repository_says_what_to_do(tmp_path: Path, run: Run) -> None:
    assert run("models", tmp_path)[2] == (
        f"cotenant: {tmp_path}: has no models; run 'cotenant init FILE.onnx', or 'cotenant models --build'\n"
    )
    save(scaled(1.0), tmp_path / "a.onnx")
    expected = f"has no models; 1 model file has no directory of a model (a.onnx): run 'cotenant init {tmp_path}'"
    for command in ("models", "profile"):
        status, _, err = run(command, tmp_path)
        assert (status, expected in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net.xml", "OpenVINO IR is not read"),
        ("net.tflite", "convert it with tf2onnx"),
        ("forest.joblib", "skl2onnx"),
        ("net.pt", "export it as ONNX, or as .pt2 with torch.export"),
        ("MLmodel", "an MLflow model is not read"),
        ("notes.txt", "expected a file that ends in .onnx or .pt2"),
    ],
)
def test_files_of_others_are_named_with_what_to_do(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "models" / name
    path.parent.mkdir()
    path.touch()
    for each in (path, path.parent):
        with pytest.raises(ConfigError, match=re.escape(words)):
            sources_of(each)


def test_a_model_without_configuration_is_told_how_to_get_one(tmp_path: Path) -> None:
    write_model(tmp_path, "a", config(), {1: lambda: scaled(1.0)})
    (tmp_path / "a" / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"config.toml: is missing; 'cotenant init .*' measures the model"):
        find_versions(tmp_path, "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "net.tflite").touch()
    with pytest.raises(ConfigError, match=r"config.toml: is missing; .*TensorFlow Lite is not read"):
        find_versions(tmp_path, "b")


@given(st.floats(0, 1e7))
def test_an_slo_is_the_next_round_number(least_ms: float) -> None:
    rounds = [step * 10**power for power in range(9) for step in (1, 2, 5)]
    assert next_slo_ms(least_ms) == min(each for each in rounds if each > least_ms and each >= 20)


X = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
TEXT = {"name": "text", "datatype": "BYTES", "shape": [-1, 1]}


@pytest.mark.parametrize(
    ("specs", "values", "expected"),
    [
        ([X], ["x=[[1, 2], [3, 4]]"], {"x": [[1, 2], [3, 4]]}),
        ([X], ["[1, 2]"], {"x": [[1, 2]]}),
        ([X], ["x=7"], {"x": [[7, 7]]}),
        ([TEXT], ["text=one, two = three"], {"text": [[b"one, two = three"]]}),
        ([X, TEXT], ["x=7"], {"x": [[7, 7]], "text": [[b"text"]]}),
    ],
)
def test_values_of_a_command_line(specs: list[Any], values: list[str], expected: dict[str, Any]) -> None:
    made, invented = inputs_of(specs, values, {})
    assert {name: array.tolist() for name, array in made.items()} == expected
    assert invented == [spec["name"] for spec in specs[len(values) :]]


@pytest.mark.parametrize(
    ("specs", "value", "words"),
    [
        ([X, TEXT], "7", "the model has 2 inputs, expected NAME=VALUE: x, text"),
        ([X], "y=7", "the model has no input 'y', it has x"),
        ([X], "x=[1, 2, 3]", "the value has the shape [1, 3], the model takes [-1, 2]"),
        ([X], "x=seven", "'seven' holds no FP32 values"),
        ([X], "x=@nowhere.npy", "nowhere.npy: cannot be read"),
        ([X], "x=@nowhere.jpg", "expected one or three channels for a picture"),
    ],
)
def test_values_that_do_not_fit(specs: list[Any], value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        inputs_of(specs, [value], {})


@pytest.mark.parametrize(
    ("datatype", "shape", "expected", "most"),
    [
        ("FP32", [-1, 3, 4, 6], (1, 3, 4, 6), 1.0),
        ("UINT8", [-1, 4, 6, 3], (1, 4, 6, 3), 255),
        ("UINT8", [-1, 3, -1, -1], (1, 3, 8, 12), 255),
    ],
)
def test_pictures_take_the_size_of_the_input(
    tmp_path: Path, datatype: str, shape: list[int], expected: tuple[int, ...], most: float
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (12, 8), (255, 0, 0)).save(tmp_path / "a.png")
    made, _ = inputs_of([{"name": "x", "datatype": datatype, "shape": shape}], [f"@{tmp_path / 'a.png'}"], {})
    assert (made["x"].shape, made["x"].max(), made["x"].min()) == (expected, most, 0)
