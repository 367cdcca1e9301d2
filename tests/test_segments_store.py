"""The optimised graph on disk: cached, repaired, and never fed from outside the model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_samples as samples
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy


def saved(model: onnx.ModelProto, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, **options)
    return path


def result(path: Path, cache: Path | None) -> dict[str, Any]:
    feeds = samples.feeds(samples.residual_cnn())
    with SegmentedModel.open(path, cache_dir=cache) as model:
        return to_numpy(model.run(3, model.unit_count, model.run(0, 3, feeds)))


def stamp(cache: Path) -> dict[str, tuple[int, int]]:
    files = sorted(file for file in cache.rglob("*") if file.is_file())
    return {str(file.relative_to(cache)): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def test_a_second_opening_reads_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = result(saved(samples.residual_cnn(), tmp_path / "a" / "m.onnx"), cache)
    before = stamp(cache)
    assert len(before) == 3
    again = result(saved(samples.residual_cnn(), tmp_path / "b" / "other.onnx"), cache)
    assert stamp(cache) == before
    np.testing.assert_array_equal(first["y"], again["y"])
    result_of_other = SegmentedModel.open(saved(samples.encoder(), tmp_path / "m.onnx"), cache_dir=cache)
    result_of_other.close()
    assert len(stamp(cache)) == 6


@pytest.mark.parametrize("damage", ["cut weights", "flip a bit", "lose the graph", "garble the manifest", "old format"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx")
    first = result(path, cache)
    (folder,) = cache.iterdir()
    graph, weights, manifest = folder / "graph.onnx", folder / "weights.bin", folder / "manifest.json"
    match damage:
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:100])
        case "flip a bit":
            data = bytearray(weights.read_bytes())
            data[len(data) // 2] ^= 1
            weights.write_bytes(data)
        case "lose the graph":
            graph.unlink()
        case "garble the manifest":
            manifest.write_text("{")
        case _:
            manifest.write_text(manifest.read_text().replace('"format": ', '"format": 1000'))
    np.testing.assert_array_equal(result(path, cache)["y"], first["y"])
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_without_a_cache_directory_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    result(saved(samples.residual_cnn(), tmp_path / "m.onnx"), None)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_external_weights_inside_the_directory_work(tmp_path: Path) -> None:
    plain = result(saved(samples.residual_cnn(), tmp_path / "plain" / "m.onnx"), tmp_path / "cache")
    options = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0}
    path = saved(samples.residual_cnn(), tmp_path / "split" / "m.onnx", **options)
    assert (path.parent / "w.data").stat().st_size > 1000
    np.testing.assert_allclose(result(path, tmp_path / "cache")["y"], plain["y"], atol=1e-5)
    (path.parent / "w.data").write_bytes(b"short")
    with pytest.raises(ModelError, match="ends before weight"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")
    (path.parent / "w.data").unlink()
    with pytest.raises(ModelError, match="is missing"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")


def test_changed_external_weights_are_noticed(tmp_path: Path) -> None:
    options = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0}
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx", **options)
    first = result(path, tmp_path / "cache")
    weights = path.parent / "w.data"
    values = np.frombuffer(weights.read_bytes(), np.uint8).copy()
    values[values == 62] = 63
    weights.write_bytes(values.tobytes())
    assert not np.allclose(result(path, tmp_path / "cache")["y"], first["y"])


def link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return path.name


@pytest.mark.parametrize("way", ["parent", "absolute", "symlink", "sub-graph"])
def test_weights_outside_the_directory_are_refused(tmp_path: Path, way: str) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(4096))
    home = tmp_path / "models"
    home.mkdir()
    location = {"absolute": str(secret), "symlink": "inner.bin"}.get(way, "../secret.bin")
    if way == "symlink":
        link(home / "inner.bin", secret)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    weight.external_data.add(key="length", value="256")
    if way == "sub-graph":
        proto = samples.branching(stateful=False)
        (choice,) = (node for node in proto.graph.node if node.op_type == "If")
        branch = next(a.g for a in choice.attribute if a.g.initializer)
        weight.name = branch.initializer[0].name
        branch.initializer[0].CopyFrom(weight)
    else:
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        graph = helper.make_graph([node], "g", [samples.info("x", [1, 8])], [samples.info("y", [1, 8])], [weight])
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = home / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's directory"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")


def test_broken_files_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(ModelError, match="does not exist"):
        SegmentedModel.open(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="no ONNX graph"):
        SegmentedModel.open(path)
    path.write_bytes(b"not a model at all" * 10)
    with pytest.raises(ModelError, match="ONNX"):
        SegmentedModel.open(path)
    path.write_bytes(samples.residual_cnn().SerializeToString()[:5000])
    with pytest.raises(ModelError, match=r"m\.onnx"):
        SegmentedModel.open(path)


def test_an_unsupported_operator_is_named_with_a_mend(tmp_path: Path) -> None:
    node = helper.make_node("Levitate", ["x"], ["y"])
    graph = helper.make_graph([node], "g", [samples.info("x", [1])], [samples.info("y", [1])])
    path = tmp_path / "m.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"m\.onnx.*Levitate.*[Ee]xport") as caught:
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")
    assert caught.value.path == path
    assert list((tmp_path / "cache").iterdir()) == []
