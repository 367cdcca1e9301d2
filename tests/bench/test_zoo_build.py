"""`python -m bench.zoo`: the repository it makes, what a second run does, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.zoo import NAMES, make
from bench.zoo.__main__ import main
from bench.zoo.repository import build_repository, config_text
from commands import Run
from cotenant.config import load_model_config
from cotenant.repository import find_versions
from cotenant.zoo import ZooError


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `python -m bench.zoo` in this process: status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([str(each) for each in arguments])
        return status, *capfd.readouterr()

    return call


def files(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files are told of instead of translated: what torch makes of them is another test's."""
    calls: list[str] = []

    def save(model: Any, path: Path, program: object) -> None:
        calls.append(f"{model.name} {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(next(model.module.parameters()).numpy().tobytes())

    monkeypatch.setattr("bench.zoo.export.exported", lambda model: None)
    monkeypatch.setattr("bench.zoo.export.save_onnx", save)
    monkeypatch.setattr("bench.zoo.export.save_pt2", save)
    return calls


def test_it_makes_a_repository_that_can_be_served(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "models"
    status, out, err = run("lenet", root)
    assert (status, err) == (0, "")
    assert "lenet: written" in out
    (version,) = find_versions(root, "lenet")
    assert version.path == root / "lenet" / "1" / "model.onnx"
    assert version.config.model.max_batch == 8
    assert version.config.tenant.slo_ms == make("lenet").slo_ms
    assert [dict(shapes) for shapes in version.config.model.shapes] == [{"input": (1, 1, 28, 28)}]
    before = files(root)
    status, out, err = run("lenet", root, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"models": ["lenet"], "written": [], "repositories": {"onnx": str(root)}}
    assert files(root) == before


@pytest.mark.parametrize(
    "given", [("lenet,mnasnet",), ("lenet", "mnasnet"), ("lenet, mnasnet",), ("lenet,", "mnasnet,lenet")]
)
def test_names_are_separated_by_commas_or_spaces(
    run: Run, tmp_path: Path, saved: list[str], given: tuple[str, ...]
) -> None:
    assert run(*given, tmp_path, "--format", "pt2")[0] == 0
    assert saved == ["lenet model.pt2", "mnasnet model.pt2"]


def test_all_is_the_whole_zoo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "bench.zoo.__main__.build_repository",
        lambda *args, **options: asked.append((args, options)) or [],
    )
    assert run("all", tmp_path, "--seed", 7)[0] == 0
    ((roots, names), options) = asked[0]
    assert (roots, names, options["seed"]) == ({"onnx": tmp_path}, list(NAMES), 7)


def test_both_formats_make_two_repositories_of_equal_models(run: Run, tmp_path: Path, saved: list[str]) -> None:
    assert run("lenet", tmp_path, "--format", "both")[0] == 0
    assert saved == ["lenet model.onnx", "lenet model.pt2"]
    first, second = tmp_path / "onnx" / "lenet", tmp_path / "pt2" / "lenet"
    assert (first / "1" / "model.onnx").read_bytes() == (second / "1" / "model.pt2").read_bytes()
    assert (first / "config.toml").read_bytes() == (second / "config.toml").read_bytes()


def test_another_seed_renews_the_model_and_an_edited_config_stays(run: Run, tmp_path: Path, saved: list[str]) -> None:
    model, config = tmp_path / "lenet" / "1" / "model.onnx", tmp_path / "lenet" / "config.toml"
    run("lenet", tmp_path)
    first = model.read_bytes()
    config.write_text("# mine\n" + config.read_text(encoding="utf-8"), encoding="utf-8")
    assert "lenet: written" in run("lenet", tmp_path, "--seed", 1)[1]
    assert model.read_bytes() != first
    assert config.read_text(encoding="utf-8").startswith("# mine")
    assert "lenet: up to date" in run("lenet", tmp_path, "--seed", 1)[1]
    assert "lenet: written" in run("lenet", tmp_path)[1]
    assert model.read_bytes() == first
    assert config.read_text(encoding="utf-8").startswith("# mine")
    model.write_bytes(first[:-1])
    assert "lenet: written" in run("lenet", tmp_path)[1]
    assert model.read_bytes() == first


def test_another_format_takes_the_place_of_the_first(run: Run, tmp_path: Path, saved: list[str]) -> None:
    run("lenet", tmp_path)
    run("lenet", tmp_path, "--format", "pt2")
    assert [path.name for path in (tmp_path / "lenet" / "1").iterdir()] == ["model.pt2"]


def test_a_model_that_the_zoo_did_not_write_stays(run: Run, tmp_path: Path, saved: list[str]) -> None:
    theirs = tmp_path / "lenet" / "1" / "model.onnx"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"precious")
    for form in ("onnx", "pt2"):
        status, _, err = run("lenet", tmp_path, "--format", form)
        assert status == 2
        assert f"{theirs}: was not written by the zoo" in err
    assert theirs.read_bytes() == b"precious"
    assert saved == []


def test_a_build_that_was_broken_off_is_taken_up_again(
    run: Run, tmp_path: Path, saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ZooError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("bench.zoo.repository.config_text", lambda model: "x")
        patch.setattr("bench.zoo.repository._digest", fail)
        status, _, err = run("lenet", tmp_path)
        assert (status, err) == (2, "bench.zoo: the disk is full\n")
    assert (tmp_path / "lenet" / "1" / "model.onnx").exists()
    assert "lenet: written" in run("lenet", tmp_path)[1]
    assert "lenet: up to date" in run("lenet", tmp_path)[1]


def test_an_unknown_name_stops_before_anything_is_written(run: Run, tmp_path: Path, saved: list[str]) -> None:
    status, out, err = run("lenet,yolo9000", tmp_path)
    assert (status, out) == (2, "")
    assert "'yolo9000' is not in the zoo; expected one of: alexnet, " in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert saved == []


def test_no_name_at_all_is_an_error(run: Run, tmp_path: Path) -> None:
    status, _, err = run(",", tmp_path)
    assert status == 2
    assert "no model is named" in err


def test_where_torch_is_missing_the_error_says_how_to_install_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = run("lenet", tmp_path)
    assert status == 2
    assert "pip install 'cotenant[torch]'" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_config_can_be_read_and_states_a_target(name: str, tmp_path: Path) -> None:
    import torch

    from bench.zoo import Model, define

    with torch.device("meta"):
        made = define(name)
    model = Model(name, made.module, made.inputs, made.outputs, made.batched, made.about, made.limits, made.slo_ms)
    path = tmp_path / "config.toml"
    path.write_text(config_text(model), encoding="utf-8")
    config = load_model_config(path)
    assert config.tenant.slo_ms == made.slo_ms > 0
    assert config.model.max_batch == (8 if made.batched else 1)
    assert [dict(shapes) for shapes in config.model.shapes] == [{key: shape for key, (_, shape) in made.inputs.items()}]
    assert made.about.endswith(".")


def test_the_library_call_needs_no_progress(tmp_path: Path, saved: list[str]) -> None:
    assert build_repository({"pt2": tmp_path}, ["lenet", "lenet"]) == ["lenet"]
    assert build_repository({"pt2": tmp_path}, ["lenet"]) == []


@pytest.mark.parametrize("names", [("all,nope",), ("lenet", "nope"), ("nope", "all")])
def test_an_unknown_name_is_refused_before_anything_is_built(
    run: Run, saved: list[str], tmp_path: Path, names: tuple[str, ...]
) -> None:
    status, out, err = run(*names, tmp_path / "models")
    assert (status, out, saved) == (2, "", [])
    assert "model 'nope' is not in the zoo; expected one of: " in err
    assert not (tmp_path / "models").exists()
