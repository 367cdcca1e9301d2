"""Archives that want to run code, or hold what is not taken: refused or stripped, and nothing in them is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cotenant.execute.errors import ModelError
from cotenant.execute.runner import to_numpy
from cotenant.execute.torch.archive_check import UnsafeArchiveError, check_expression, check_name, check_target
from cotenant.execute.torch.model import TorchModel
from cotenant.execute.worker.channel import Open
from cotenant.execute.worker.worker import _open
from torch_samples import SAMPLES, exported

INPUTS = {"input": torch.ones(2, 4)}
Edit = Callable[[Any], None]


class Evil:
    """What, unpickled, makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.line(input) + self.shift * input.shape[0]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "small.pt2"
    batch = torch.export.Dim("batch", min=1, max=8)
    torch.export.save(torch.export.export(Small().eval(), (), INPUTS, dynamic_shapes={"input": {0: batch}}), path)
    return path


@pytest.mark.parametrize("way", ["overwritten", "cut short", "deleted"])
def test_a_model_stays_what_it_was_whatever_becomes_of_its_file(good: Path, tmp_path: Path, way: str) -> None:
    """What identifies it is of the bytes that were opened, and a worker that is started later opens the same."""
    path, other = tmp_path / "m.pt2", tmp_path / "other.pt2"
    shutil.copyfile(good, path)
    batch = torch.export.Dim("batch", min=1, max=8)
    torch.export.save(torch.export.export(Small().eval(), (), INPUTS, dynamic_shapes={"input": {0: batch}}), other)
    with TorchModel.open(path, cache_dir=tmp_path / "cache") as model:
        expected = to_numpy(model.run(0, model.unit_count, INPUTS))
        if way == "overwritten":
            path.write_bytes(other.read_bytes())
        elif way == "cut short":
            os.truncate(path, 100)
        else:
            path.unlink()
        folder = model.graph_path.parent
        message = Open("m", str(path), str(folder.parent), folder.name, (), 0)
        with _open(message) as again:
            np.testing.assert_equal(to_numpy(again.run(0, again.unit_count, INPUTS)), expected)
            assert again.graph_path == model.graph_path
        np.testing.assert_equal(to_numpy(model.run(0, model.unit_count, INPUTS, 2)), expected)
        with TorchModel.open(other, cache_dir=tmp_path / "cache") as changed:
            assert changed.graph_path.parent != folder
            assert changed.files != model.files
    shutil.rmtree(folder, ignore_errors=True)  # a deleted file's copy goes with its last user
    with pytest.raises(ModelError, match=re.escape(str(path))):
        _open(message)


def test_without_a_cache_directory_nothing_is_left(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    TorchModel.open(good).close()
    with pytest.raises(ModelError, match="does not exist"):
        TorchModel.open(tmp_path / "none.pt2")
    assert list(tmp_path.iterdir()) == []


def edited(
    good: Path, target: Path, parts: dict[str, Edit | bytes | None], more: dict[str, bytes] | None = None
) -> Path:
    """A copy of an archive with some members replaced, left out (None) or, if they are JSON, edited; and more."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for info in old.infolist():
            name, content = info.filename.partition("/")[2], old.read(info)
            if name in parts:
                change = parts[name]
                if change is None:
                    continue
                if isinstance(change, bytes):
                    content = change
                else:
                    document = json.loads(content)
                    change(document)
                    content = json.dumps(document).encode()
            new.writestr(f"{root}/{name}", content)
        for name, content in (more or {}).items():
            new.writestr(f"{root}/{name}", content)
    return target


MODEL, WEIGHTS, CONSTANTS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)


def evil_weight(document: Any) -> None:
    next(iter(document["config"].values()))["use_pickle"] = True


def evil_constant(document: Any) -> None:
    document["config"]["shift"].update(path_name="opaque_obj_0", use_pickle=True, tensor_meta=None)


def nodes_of(document: Any) -> list[Any]:
    return document["graph_module"]["graph"]["nodes"]  # type: ignore[no-any-return]


def everywhere(document: Any, key: str, change: Callable[[Any], Any]) -> None:
    """Change every value under a key."""
    if isinstance(document, dict):
        for each, value in document.items():
            document[each] = change(value) if each == key else value
            everywhere(document[each], key, change)
    elif isinstance(document, list):
        for value in document:
            everywhere(value, key, change)


def evil_size(mark: Path) -> Edit:
    code = f"__import__('os').mkdir({str(mark)!r}) or Integer(2)"
    return lambda document: everywhere(document, "expr_str", lambda _: code)


def evil_name(mark: Path) -> Edit:
    """A name of a value that closes the line of source code it ends up in."""
    code = f"x = 1; __import__('os').mkdir({str(mark)!r}); y"

    def change(document: Any) -> None:
        text = json.dumps(document).replace('"linear"', json.dumps(code))
        document.clear()
        document.update(json.loads(text))

    return change


def evil_target(mark: Path) -> Edit:
    def change(document: Any) -> None:
        nodes_of(document)[-1]["target"] = "torch.os.mkdir"

    return change


def reads_files(document: Any) -> None:
    nodes_of(document)[-1]["target"] = "torch.ops.aten.from_file.default"


def evil_guard(mark: Path) -> Edit:
    return lambda document: document.update(guards_code=[f"__import__('os').mkdir({str(mark)!r})"])


def evil_container(document: Any) -> None:
    """A dict whose default is looked up in a module that is imported for it."""
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    context = json.dumps({"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []})
    spec = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    signature["out_spec"] = json.dumps([1, spec])


def with_notes(document: Any) -> None:
    for node in nodes_of(document):
        node["metadata"] = {"custom": "{}", "source_fn_stack": "evil,torch.os.mkdir", "from_node": "[]"}


def test_pickled_sample_inputs_are_never_read(good: Path, tmp_path: Path) -> None:
    marks = [tmp_path / "by_us", tmp_path / "by_torch"]
    for mark in marks:
        buffer = io.BytesIO()
        torch.save((Evil(mark),), buffer)
        edited(good, tmp_path / f"{mark.name}.pt2", {"data/sample_inputs/model.pt": buffer.getvalue()})
    with TorchModel.open(tmp_path / "by_us.pt2") as model:
        model.run(0, model.unit_count, INPUTS)
    assert not marks[0].exists()
    with pytest.raises(Exception, match=r".*"):  # torch's own loader is caught by it: the archive is evil indeed
        torch.export.load(tmp_path / "by_torch.pt2")
    assert marks[1].exists()


def test_sizes_are_code_to_torch(good: Path, tmp_path: Path) -> None:
    """The archive that is refused below is evil indeed."""
    edited(good, tmp_path / "evil.pt2", {MODEL: evil_size(tmp_path / "mark")})
    with pytest.raises(Exception, match=r".*"):
        torch.export.load(tmp_path / "evil.pt2")
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        (lambda mark: {WEIGHTS: evil_weight}, {}, "weight 'line.* is pickled, which could run any code"),
        (
            lambda mark: {CONSTANTS: evil_constant},
            {"data/constants/opaque_obj_0": "evil"},
            "weight 'shift' is pickled",
        ),
        (lambda mark: {WEIGHTS: None}, {"data/weights/model.pt": "evil"}, "pickled, as older versions of torch did"),
        (lambda mark: {MODEL: evil_size(mark)}, {}, "no plain arithmetic|unknown word"),
        (lambda mark: {MODEL: evil_name(mark)}, {}, "name that is no identifier"),
        (lambda mark: {MODEL: evil_target(mark)}, {}, r"operator that is not allowed: 'torch.os.mkdir'"),
        (lambda mark: {MODEL: reads_files}, {}, "operator that is not allowed: .*from_file"),
        (lambda mark: {}, {"data/aotinductor/model/code.so": "evil"}, "compiled code"),
    ],
)
def test_what_could_run_code_is_refused(
    good: Path, tmp_path: Path, parts: Any, more: dict[str, str], words: str
) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Evil(mark))
    path = edited(good, tmp_path / "evil.pt2", parts(mark), dict.fromkeys(more, evil))
    with pytest.raises(ModelError, match=words):
        TorchModel.open(path)
    assert not mark.exists()


@pytest.mark.parametrize("make", [evil_guard, lambda _: evil_container, lambda _: with_notes])
def test_what_is_not_needed_is_left_out(good: Path, tmp_path: Path, make: Callable[[Path], Edit]) -> None:
    mark = tmp_path / "mark"
    path = edited(good, tmp_path / "strange.pt2", {MODEL: make(mark)})
    with TorchModel.open(good) as plain, TorchModel.open(path) as model:
        found = model.run(0, model.unit_count, INPUTS)
        assert torch.equal(found["output"], plain.run(0, plain.unit_count, INPUTS)["output"])
    assert not mark.exists()


def grown(document: Any) -> None:
    document["config"]["line.weight"]["tensor_meta"]["sizes"] = [{"as_int": 4000}, {"as_int": 4000}]


def elsewhere(document: Any) -> None:
    document["config"]["line.weight"]["path_name"] = "../../../../etc/passwd"


def negative(document: Any) -> None:
    document["config"]["line.weight"]["tensor_meta"]["storage_offset"] = {"as_int": -4}


def quantised(document: Any) -> None:
    document["config"]["line.weight"]["tensor_meta"]["dtype"] = 14


def another_schema(document: Any) -> None:
    document["schema_version"]["major"] += 1
    document["torch_version"] = "9.9"


def no_graph(document: Any) -> None:
    del document["graph_module"]["graph"]["nodes"]


def unknown_operator(document: Any) -> None:
    nodes_of(document)[-1]["target"] = "torch.ops.aten.no_such_operator.default"


def takes_a_number(document: Any) -> None:
    specs = document["graph_module"]["signature"]["input_specs"]
    specs[-1]["user_input"]["arg"] = {"as_int": 3}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"archive_version": b"7"}, "archive version '7', expected '0'. Export it again with torch"),
        ({"archive_format": b"other"}, "archive of another kind"),
        ({"archive_format": None}, "no torch.export archive"),
        ({"byteorder": b"big"}, "big-endian"),
        ({MODEL: another_schema}, "torch 9.9 wrote it in schema 9, this torch reads schema 8"),
        ({MODEL: b"{"}, "description is not one that torch writes"),
        ({MODEL: no_graph}, "description is not one that torch writes"),
        ({MODEL: unknown_operator}, "cannot load it"),
        ({MODEL: takes_a_number}, "takes an input that is no tensor"),
        ({MODEL: None}, "expected one called 'model'"),
        ({WEIGHTS: grown}, "'line.weight' exceeds its bytes"),
        ({WEIGHTS: negative}, "'line.weight' exceeds its bytes"),
        ({WEIGHTS: quantised}, "'line.weight' has an unsupported type"),
        ({WEIGHTS: elsewhere}, "'line.weight' is missing"),
        ({"data/weights/weight_0": None}, "is missing .* Copy it again"),
        ({WEIGHTS: None}, "cannot load it"),
    ],
)
def test_archives_that_do_not_fit_say_why(good: Path, tmp_path: Path, parts: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        TorchModel.open(edited(good, tmp_path / "odd.pt2", parts))


def test_older_formats_and_compressed_ones_are_named(good: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as file:
        file.writestr("version", "8.20")
        file.writestr("serialized_exported_program.json", "{}")
    with pytest.raises(ModelError, match="a format that torch dropped"):
        TorchModel.open(tmp_path / "old.pt2")
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "flat.pt2", "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info), zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelError, match="compressed"):
        TorchModel.open(tmp_path / "flat.pt2")


@pytest.mark.parametrize("name", SAMPLES)
def test_everything_that_torch_writes_of_our_samples_passes(tmp_path: Path, name: str) -> None:
    program = exported(name)[1]
    program.example_inputs = None
    torch.export.save(program, tmp_path / "m.pt2")
    TorchModel.open(tmp_path / "m.pt2").close()


def test_lists_of_what_is_allowed() -> None:
    for text in (
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))",
        "FloorDiv(Add(Symbol('s1', integer=True), Integer(1)), Integer(2))",
        "s77",
        "Float('0.5', precision=53)",
    ):
        check_expression(text)
    for text in ("", "print(1)", "().__class__", "'os'", "s0.real", "s0; s1", "lambda: 0", "[1]", "x" * 5000, 3, None):
        with pytest.raises(UnsafeArchiveError):
            check_expression(text)
    for target in ("torch.ops.aten.conv2d.default", "_operator.getitem", "torch.sym_max", "torch.ops.aten.relu_"):
        check_target(target)
    for target in (
        *("torch.load", "torch.ops.load_library", "torch.ops.aten.__class__.mro", "_operator.methodcaller", "os.mkdir"),
        *("torch.ops.higher_order.triton_kernel_wrapper_mutation", "#evil", "math.__loader__", None, "torch.ops.aten"),
    ):
        with pytest.raises(UnsafeArchiveError):
            check_target(target)
    for name in ("a b", "", "1a", "a\n", "lambda", "a.b", None):
        with pytest.raises(UnsafeArchiveError):
            check_name(name)
