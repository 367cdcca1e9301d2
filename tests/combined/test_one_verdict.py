"""One verdict: `models`, `profile`, `serve` and `plan` name the same problems of every bad model, with remedies."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import cotenant
from client import started
from commands import Run
from cotenant import zoo
from cotenant.measure.loader_process import Loader
from cotenant.profiles.profile_file import load_profile, save_profile
from cotenant.repository import profile_path
from hostile_models import expanding_constant
from onnx_samples import info
from repositories import add_sub, config, external, fixed, open_shape, scaled, write_model

pytestmark = pytest.mark.usefixtures("measured_apart")
HIDING = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name == "torch" else find(name, *more))
"""
Make = Callable[[], onnx.ModelProto] | bytes
TENANTS = '[[device]]\nname = "cpu"\ncores = 2\n'


def strings_of_a_locale() -> onnx.ModelProto:
    """Needs a locale that no machine has."""
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="xx_XX.UTF-8")
    graph = helper.make_graph(
        [node], "g", [info("x", ["b"], TensorProto.STRING)], [info("y", ["c"], TensorProto.STRING)]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sequence() -> onnx.ModelProto:
    """Gives a sequence, which the protocol has no type for."""
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["b", 8]))
    graph = helper.make_graph([node], "g", [info("x", ["b", 8])], [helper.make_value_info("y", kind)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


BAD: Mapping[str, tuple[str, Mapping[int, Make], tuple[str, ...]]] = {
    "many": (
        "[tenant]\nslow_ms = 6\nweight = -1\n[model]\nmax_batch = 0\n",
        {1: open_shape},
        (
            "tenant.slo_ms is missing",
            "unknown field `slow_ms`",
            "tenant.weight: Expected `float` > 0.0",
            "model.max_batch: Expected `int` >= 1",
            "at the end of its config.toml, with the sizes that clients send:\n[[model.shapes]]\nx = [1, 128]",
        ),
    ),
    "types": (config(), {1: sequence}, ("cannot carry tensor 'y' of type seq(tensor(float)); convert it",)),
    "shapes": (config() + "[[model.shapes]]\nz = [1, 8]\n", {1: fixed}, ("names input 'z'; it has x: rename it",)),
    "batch": (
        config(max_batch=4),
        {1: fixed},
        ("dimension of input 'x' is fixed (shape [1, 8]): set max_batch = 1",),
    ),
    "weights": (config(), {1: lambda: external("weights.bin")}, ("'weights.bin' is missing. Copy it beside",)),
    "damaged": (config(), {1: b"this is no model"}, ("no readable ONNX model",)),
    "locale": (config(), {1: strings_of_a_locale}, ("name:xx_XX.UTF-8", "apt-get install locales-all")),
    "memory": (
        config(more="memory_limit_mib = 100"),
        {1: expanding_constant},
        ("100 MiB are allowed", "memory_limit_mib = "),
    ),
    "empty": (config(), {}, ("has no version, expected a directory '1'",)),
    "toml": ("[tenant\n", {1: fixed}, ("is not valid TOML",)),
    "package": (config(), {}, ("pip install 'cotenant[torch]'",)),
    "twin": (config("good"), {1: fixed}, ("tenant 'good' already owns model 'good'", "tenant.name")),
}
"""Configuration, versions, and parts of the problems."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_model(root, "good", config(max_batch=4), {1: add_sub})
    for name, (text, versions, _) in BAD.items():
        write_model(root, name, text, versions)
    archive = root / "package" / "1" / "model.pt2"
    archive.parent.mkdir()
    archive.write_bytes(b"it is not read without torch")
    return root


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides torch from the processes that load models, as if it were not installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING, "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


def without_figures(text: str) -> str:
    """A problem without what a run measures: memory is seen in steps of time."""
    return re.sub(r"version 1: (trying|measuring) .* took .*", "version 1 took too much memory", text)


@pytest.mark.usefixtures("without_torch")
def test_four_commands_have_one_verdict(run: Run, root: Path, tmp_path: Path) -> None:
    status, out, err = run("models", root, "--json")
    assert (status, err) == (1, "")
    rows = {row["model"]: row for row in json.loads(out)["models"]}
    problems = {name: without_figures(row["error"]) for name, row in rows.items() if row["error"]}
    assert problems.keys() == BAD.keys()
    for name, (_, _, parts) in BAD.items():
        assert all(part in rows[name]["error"] for part in parts), (name, rows[name]["error"])
    assert len(rows["many"]["problems"]) == len(BAD["many"][2])

    status, out, err = run("profile", root, "--budget", "0", "--json")
    assert (status, err) == (1, "")
    left_out = json.loads(out)["errors"]
    assert {name: without_figures(text) for name, text in left_out.items()} == problems

    (tmp_path / "tenants.toml").write_text(
        TENANTS + "".join(f'[[tenant]]\nname = "{name}"\nrate = 1\n' for name in ("good", *BAD, "nowhere")), "utf-8"
    )
    status, out, err = run("plan", tmp_path / "tenants.toml", "--profiles", root)
    assert status == 2
    assert "onnxruntime_src" not in err
    for name, text in problems.items():
        for line in text.split("\n"):
            assert line in without_figures(err), name
        assert f"tenant '{name}': " in err
    assert "tenant 'nowhere': model 'nowhere': the profiles do not have it" in err
    assert "tenant 'good'" not in err.replace("tenant 'good' already owns", "")

    loader = Loader(20.0)
    server = started(root, loader=loader)
    try:
        assert {entry.name for entry in server.index(ready_only=True)} == {"good"}
        reasons = {name: without_figures(server.names.get(name).reason) for name in BAD}
    finally:
        server.stop()
        loader.close()
    assert reasons == {name: text.replace(f"{root}/", "") for name, text in problems.items()}


def test_the_python_api_has_the_same_verdict(
    run: Run, root: Path, without_torch: None, caplog: pytest.LogCaptureFixture
) -> None:
    rows = json.loads(run("models", root, "--json")[1])["models"]
    problems = {row["model"]: row["problems"] for row in rows if row["error"]}
    caplog.clear()
    assert cotenant.profile(root, budget_s=0).models.keys() == {"good"}
    told = without_figures("\n".join(record.getMessage() for record in caplog.records))
    for name, sentences in problems.items():
        assert f"model {name!r} is not in the profile: " in told
        assert all(without_figures(each) in told for each in sentences), name
    shutil.rmtree(root / "good")
    shutil.rmtree(root / "twin")
    with pytest.raises(cotenant.CotenantError, match="no model could be measured") as caught:
        cotenant.profile(root, budget_s=0, fresh=True)
    found = {without_figures(each) for each in caught.value.problems}
    for name in problems.keys() - {"twin"}:
        assert {
            f"model {name!r}: {without_figures(line)}" for each in problems[name] for line in each.split("\n")
        } <= found


def test_the_demo_names_all_problems(run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "twin", "package"):
        shutil.rmtree(root / name)
    monkeypatch.setattr(zoo, "build_repository", lambda *_, **__: None)
    status, out, err = run("demo", "--dir", tmp_path)
    assert status == 2
    assert "no model could be measured" in err
    lines = [line for line in run("models", root)[1].splitlines() if ": problem: " in line]
    assert len(lines) > len(BAD) - 3
    for line in lines:
        assert without_figures(line.split(": problem: ")[1]) in without_figures(out)


def test_a_stale_profile_is_named_alike_and_mended(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "m", config(), {1: lambda: scaled(1.0)})
    assert run("profile", root, "--budget", "0", "--json")[0] == 0
    write_model(root, "m", config(max_batch=4), {})
    (tmp_path / "tenants.toml").write_text(TENANTS + '[[tenant]]\nname = "m"\nrate = 1\n')
    status, out, _ = run("models", root, "--json")
    assert status == 1
    [row] = json.loads(out)["models"]
    said = "'m': m/config.toml changed since it was measured"
    assert row["problems"] == [f"its profile is stale: {said}. Run 'cotenant profile {root}'"]
    status, _, err = run("plan", tmp_path / "tenants.toml", "--profiles", root)
    assert status == 2
    assert f"is stale: {said}. Run 'cotenant profile {root}'" in err
    with pytest.raises(cotenant.CotenantError, match=r"is stale: 'm': m/config\.toml changed"):
        cotenant.plan(tmp_path / "tenants.toml", root)
    assert run("profile", root, "--budget", "0", "--json")[0] == 0
    assert run("models", root, "--json")[0] == 0


def test_a_pasted_remedy_mends_an_open_shape(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "m", config(), {1: open_shape})
    status, out, _ = run("models", root)
    assert status == 1
    lines = out.splitlines()
    at = lines.index("[[model.shapes]]")
    (root / "m" / "config.toml").write_text(config() + "\n".join(lines[at : at + 2]) + "\n", "utf-8")
    assert run("models", root)[0] == 0


def test_an_slo_below_the_time_of_a_query_is_a_warning_with_both(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = tmp_path / "models"
    write_model(root, "m", config(slo_ms=0.000001), {1: lambda: scaled(1.0)})
    status, out, _ = run("profile", root, "--budget", "0")
    assert status == 0
    assert " !" in out
    assert "its SLO of 1e-06 ms is below the time of one query by its profile" in out
    assert "longer than the SLO" in " ".join(out.split())
    point = load_profile(profile_path(root)).models["m"].points[0]
    said = f"{point.p99_ns / 1e6:.3g} ms (longest of {point.runs} runs)"
    status, out, _ = run("models", root, "--json")
    assert status == 0
    warnings = json.loads(out)["models"][0]["warnings"]
    assert any("1e-06 ms" in each and said in each for each in warnings)
    status, out, _ = run("models", root)
    assert status == 0
    assert all(len(line) <= 80 for line in out.splitlines() if line[:1] in "┏┃┡│└")


def test_a_tenant_without_a_profile_is_told_the_command(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name in ("one", "two", "three"):
        write_model(root, name, config(), {1: lambda: scaled(1.0)})
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        TENANTS + "".join(f'[[tenant]]\nname = "{name}"\nrate = 1\n' for name in ("one", "two", "three"))
    )
    assert f"has no profile yet: run 'cotenant profile {root}'" in run("plan", tenants, "--profiles", root)[2]
    assert run("profile", root, "--budget", "0", "--json")[0] == 0
    profile = load_profile(profile_path(root))
    for name in ("one", "two"):
        del profile.models[name]
    save_profile(profile_path(root), profile)
    status, _, err = run("plan", tenants, "--profiles", root)
    assert status == 2
    for name in ("one", "two"):
        assert f"tenant '{name}': model '{name}' has no profile: run 'cotenant profile {root}'" in err
    assert "three" not in err


@pytest.mark.parametrize("kind", ["/dev/zero", "fifo", "folder", "sparse"])
def test_endless_inputs_are_refused_at_once(run: Run, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "models"
    write_model(root, "m", config(), {1: lambda: scaled(1.0)})
    assert run("profile", root, "--budget", "0", "--json")[0] == 0
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    lines: list[tuple[object, ...]] = [
        ("plan", path, "--profiles", root),
        ("plan", "--check", path, "--profiles", root),
    ]
    lines += [("simulate", path, root)]
    for line in lines:
        status, _, err = run(*line)
        assert (status, err.count("\n")) == (2, 1), line
        assert "cannot be read" in err
