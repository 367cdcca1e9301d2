"""The optimised graph on disk: cached, repaired, and never fed from outside the model's directory."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_samples as samples
from cotenant.execute.contents import PATHS
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx import fitness
from cotenant.execute.onnx.segment_session import load_session, session_options
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy

EXTERNAL = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0}


def saved(model: onnx.ModelProto, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, **options)
    return path


def result(path: Path, cache: Path | None) -> dict[str, Any]:
    feeds = samples.feeds(samples.residual_cnn())
    with SegmentedModel.open(path, cache_dir=cache) as model:
        return to_numpy(model.run(3, model.unit_count, model.run(0, 3, feeds)))


def stamp(cache: Path) -> dict[str, tuple[int, int]]:
    files = sorted(file for file in cache.rglob("*") if file.is_file() and file.parent.name != PATHS)
    return {str(file.relative_to(cache)): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def folders(cache: Path) -> list[Path]:
    return sorted(entry for entry in cache.iterdir() if entry.name != PATHS)


def test_a_second_opening_reads_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = result(saved(samples.residual_cnn(), tmp_path / "a" / "m.onnx"), cache)
    before = stamp(cache)
    assert len(before) == 4
    again = result(saved(samples.residual_cnn(), tmp_path / "b" / "other.onnx"), cache)
    assert stamp(cache) == before
    np.testing.assert_array_equal(first["y"], again["y"])
    result_of_other = SegmentedModel.open(saved(samples.encoder(), tmp_path / "m.onnx"), cache_dir=cache)
    result_of_other.close()
    assert len(stamp(cache)) == 8


@pytest.mark.parametrize("damage", ["cut weights", "flip a bit", "lose the graph", "garble the manifest", "old format"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx")
    first = result(path, cache)
    (folder,) = folders(cache)
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
    assert folders(cache) == [folder]


def looping(model: str) -> onnx.ModelProto:
    """Graphs whose Loop, or If, alone reads what two Transposes give that undo each other, behind two such Casts."""
    s = samples.Sketch()
    cast = s.op("Cast", s.op("Cast", "x", to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
    s.op("Transpose", s.op("Transpose", cast, perm=[1, 0]), perm=[1, 0], out="same")
    s.op("Sub", cast, cast, out="none")
    dims = ["batch", 4]
    both = helper.make_node("Mul", ["same", "none"], ["both"])
    if model == "If":
        inner = [both, helper.make_node("Add", ["x", "both"], ["inner"])]
        branch = helper.make_graph(inner, "branch", [], [samples.info("inner", dims)])
        other = helper.make_graph(
            [helper.make_node("Relu", ["x"], ["other"])], "other", [], [samples.info("other", dims)]
        )
        made = s.op("If", "flag", then_branch=branch, else_branch=other)
    else:
        keep = [
            helper.make_node("Identity", ["go"], ["on"]),
            both,
            helper.make_node("Add", ["state", "both"], ["next"]),
        ]
        inputs = [samples.info("at", [], TensorProto.INT64), samples.info("go", [], TensorProto.BOOL)]
        inputs.append(samples.info("state", dims))
        outputs = [samples.info("on", [], TensorProto.BOOL), samples.info("next", dims)]
        body = helper.make_graph(keep, "body", inputs, outputs)
        count = "" if model == "endless Loop" else s.constant(np.array(2))
        made = s.op("Loop", count, "flag", "x", body=body)
    s.op("Relu", made, out="y")
    return s.model([samples.info("x", dims), samples.info("flag", [], TensorProto.BOOL)], [samples.info("y", dims)])


@pytest.mark.parametrize("model", ["Loop", "If", "endless Loop"])
def test_a_graph_that_the_optimiser_breaks_runs_as_it_was(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every opening, whole and cut, on any threads; and one that would never end does not keep an opening."""
    monkeypatch.setattr(fitness, "_PATIENCE_S", 0.2)
    path = saved(looping(model), tmp_path / "m.onnx")
    plain = load_session(path, path, session_options(1, optimise=False))
    optimised = load_session(path, path, session_options(1, optimise=True))
    for _ in range(2):
        with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as opened:
            assert opened.uncut_reason == "" or "endless" in model
            for flag in (False, True)[: 1 if "endless" in model else 2]:
                feeds = {"x": np.arange(-4, 4, dtype=np.float32).reshape(2, 4), "flag": np.array(flag)}
                (expected,) = plain.run(None, feeds)
                tensors: Any = feeds
                for at in range(opened.unit_count):
                    tensors = opened.run(at, at + 1, tensors)
                np.testing.assert_array_equal(to_numpy(tensors)["y"], expected)
                for threads in (1, 2):
                    whole = to_numpy(opened.run(0, opened.unit_count, feeds, threads))
                    np.testing.assert_array_equal(whole["y"], expected)
    if "endless" not in model:
        with pytest.raises(Exception, match="Missing Input"):
            optimised.run(None, feeds)  # once it does not, the optimiser is mended, and this can go


def test_an_optimiser_is_kept_where_it_breaks_nothing(tmp_path: Path) -> None:
    for name in ("branching", "residual_cnn"):
        path = saved(getattr(samples, name)(), tmp_path / f"{name}.onnx")
        with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as opened:
            assert opened._stored.is_optimised


def test_without_a_cache_directory_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    result(saved(samples.residual_cnn(), tmp_path / "m.onnx"), None)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_external_weights_inside_the_directory_work(tmp_path: Path) -> None:
    plain = result(saved(samples.residual_cnn(), tmp_path / "plain" / "m.onnx"), tmp_path / "cache")
    path = saved(samples.residual_cnn(), tmp_path / "split" / "m.onnx", **EXTERNAL)
    assert (path.parent / "w.data").stat().st_size > 1000
    np.testing.assert_allclose(result(path, tmp_path / "cache")["y"], plain["y"], atol=1e-5)
    (path.parent / "w.data").write_bytes(b"short")
    with pytest.raises(ModelError, match="ends before weight"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")
    (path.parent / "w.data").unlink()
    with pytest.raises(ModelError, match="is missing"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")


def test_changed_external_weights_are_noticed(tmp_path: Path) -> None:
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx", **EXTERNAL)
    first = result(path, tmp_path / "cache")
    weights = path.parent / "w.data"
    values = np.frombuffer(weights.read_bytes(), np.uint8).copy()
    values[values == 62] = 63
    weights.write_bytes(values.tobytes())
    assert not np.allclose(result(path, tmp_path / "cache")["y"], first["y"])


def reweighted(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with other weights: a file of the same size."""
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if values.dtype == np.float32:
            weight.CopyFrom(numpy_helper.from_array(values[..., ::-1] * np.float32(1.5), weight.name))
    return model


WAYS = ("overwritten", "cut short", "deleted", "replaced")


def spoil(path: Path, way: str, content: bytes) -> None:
    """Do to a file what people do to the files of models that are served."""
    match way:
        case "overwritten":
            assert path.stat().st_size == len(content)
            with path.open("r+b") as file:
                file.write(content)
        case "cut short":
            os.truncate(path, 10)
        case "deleted":
            path.unlink()
        case _:
            fresh = path.with_name("fresh")
            fresh.write_bytes(content)
            fresh.rename(path)


@pytest.mark.parametrize("options", [{}, EXTERNAL], ids=["one file", "weights beside it"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_stays_what_it_was_whatever_becomes_of_its_files(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    """Sessions for further cores are made long after a model was opened, and workers open it again."""
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx", **options)
    other = saved(reweighted(samples.residual_cnn()), tmp_path / "other" / "m.onnx", **options).parent
    feeds = samples.feeds(samples.residual_cnn())
    with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as model:
        expected = to_numpy(model.run(0, model.unit_count, feeds))["y"]
        for file in other.iterdir():
            spoil(tmp_path / file.name, way, file.read_bytes())
        for threads in (1, 2, (0, 1)):
            whole = to_numpy(model.run(0, model.unit_count, feeds, threads))["y"]
            cut = to_numpy(model.run(3, model.unit_count, model.run(0, 3, feeds, threads), threads))["y"]
            np.testing.assert_allclose(whole, expected, atol=1e-5)
            np.testing.assert_allclose(cut, expected, atol=1e-5)
        content = model.graph_path.parent.name
        with SegmentedModel.open(path, cache_dir=tmp_path / "cache", content=content) as again:
            np.testing.assert_array_equal(to_numpy(again.run(0, again.unit_count, feeds))["y"], expected)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelError, match=re.escape(str(path))):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache", content=content)


def test_a_file_that_changes_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx")
    other = saved(reweighted(samples.residual_cnn()), tmp_path / "other.onnx")
    copyfile = shutil.copyfile
    monkeypatch.setattr("shutil.copyfile", lambda _, target: copyfile(other, target))
    with pytest.raises(ModelError, match="changed while it was opened"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_copies_that_cannot_be_written_are_an_error_of_the_model(tmp_path: Path) -> None:
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx")
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot be copied into .*cache"):
        SegmentedModel.open(path, cache_dir=tmp_path / "cache")


def test_a_cache_that_was_taken_away_is_named(tmp_path: Path) -> None:
    path = saved(samples.residual_cnn(), tmp_path / "m.onnx")
    with SegmentedModel.open(path, cache_dir=tmp_path / "cache") as model:
        shutil.rmtree(tmp_path / "cache")
        for start, end in ((0, 3), (0, model.unit_count)):
            with pytest.raises(ModelError, match="cache"):
                model.prepare([(start, end)])


def test_old_content_goes_when_nobody_runs_it_any_more(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path, twin = (saved(samples.residual_cnn(), tmp_path / name) for name in ("m.onnx", "twin.onnx"))
    for file in (path, twin):
        SegmentedModel.open(file, cache_dir=cache).close()
    first = folders(cache)
    assert len(first) == 1
    old = SegmentedModel.open(twin, cache_dir=cache)
    for file in (path, twin):
        saved(reweighted(samples.residual_cnn()), file)
        new = SegmentedModel.open(file, cache_dir=cache)
        assert len(folders(cache)) == 2
        new.close()
    assert len(folders(cache)) == 2  # the old one is run, and the newest of a file is for its next opening
    old.close()
    (newest,) = folders(cache)
    assert newest not in first
    twin.unlink()
    SegmentedModel.open(path, cache_dir=cache).close()
    assert folders(cache) == [newest]
    path.unlink()
    third = saved(samples.encoder(), tmp_path / "third.onnx")
    SegmentedModel.open(third, cache_dir=cache).close()
    assert newest not in folders(cache)
    assert len(folders(cache)) == 1


def test_what_an_interrupted_opening_left_goes_and_what_others_put_there_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept = ["notes", ".git", "0123-ort", "a" * 32]
    left = [f".{'a' * 32}-k3j_2x", f"{'b' * 32}-ort1.0.0-{'c' * 12}"]
    for name in (*kept, *left):
        (cache / name / "inner").mkdir(parents=True)
    result(saved(samples.residual_cnn(), tmp_path / "m.onnx"), cache)
    assert sorted({entry.name for entry in folders(cache)} & {*kept, *left}) == sorted(kept)


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
    assert folders(tmp_path / "cache") == []
