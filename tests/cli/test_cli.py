"""The command line: help, one JSON object each, one sentence for what is wrong, and no traceback ever."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import Run
from cotenant import __version__
from cotenant.cli.app import ORDER, OWN, app
from cotenant.config import ServerConfig
from cotenant.measure.contention_profile import ContentionProfile, ModelContention, save_contention
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import load_profile
from cotenant.repository import contention_path, profile_path
from cotenant.trace.lost import CAUSE_NAMES
from cotenant.types import LossCause
from cotenant.world.contention import Traffic
from installed import known
from repositories import BAD, config, scaled, write_bad, write_good, write_model

COMMANDS = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
"""Those of techniques that are installed, too."""
WORKLOAD = """
seed = 3
duration_s = 3.0

[[tenant]]
model = "add_sub"
rate = 80.0

[[tenant]]
model = "two"
arrivals = "uniform"
rate = 30.0
timeout_ms = 40.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("cli") / "models", "add_sub", "two")
    profile_repository(root, ServerConfig(), Effort(0.0, 3, 3, 1), fresh=False, on_step=lambda *_: None)
    return root


@pytest.fixture(scope="module")
def workload(root: Path) -> Path:
    path = root.parent / "workload.toml"
    path.write_text(WORKLOAD, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trace(root: Path, workload: Path) -> Path:
    path = root.parent / "trace.jsonl"
    command = [sys.executable, "-m", "cotenant", "simulate", str(workload), str(root), "--trace", str(path), "--json"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert made.stderr == ""
    return path


def test_help_and_version(run: Run) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert tuple(re.findall(r"^│ (\S+)", out.partition("Commands")[2], re.MULTILINE)) == COMMANDS
    assert set(OWN) <= set(COMMANDS)
    assert [each for each in COMMANDS if each in ORDER] == [each for each in ORDER if each in COMMANDS]
    assert run("--version") == (0, f"cotenant {__version__}\n", "")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "cluster"])
def test_every_command_has_help(run: Run, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert "Usage" in out
    assert "--json" in out
    assert run(command, "-h")[1] == out


# --- JSON -------------------------------------------------------------------------------------------------------------


def one_object(out: str) -> dict[str, Any]:
    assert out.count("\n") == 1
    value = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(value, dict)
    return value


def test_models_as_json(run: Run, root: Path) -> None:
    status, out, err = run("models", root, "--json")
    assert (status, err) == (0, "")
    rows = one_object(out)["models"]
    assert [(row["model"], row["version"], row["tenant"], row["profile"]) for row in rows] == [
        ("add_sub", "1", "add_sub", "yes"),
        ("two", "1", "Owner of two:1", "yes"),
        ("two", "2", "Owner of two", "yes"),
    ]
    assert all(row["units"] >= 1 and not row["error"] for row in rows)


def test_models_lists_what_is_wrong_and_fails(run: Run, tmp_path: Path) -> None:
    write_bad(tmp_path / "models")
    status, out, _ = run("models", tmp_path / "models", "--json")
    assert status == 1
    errors = {row["model"]: row["error"] for row in one_object(out)["models"]}
    for name, (_, _, texts) in BAD.items():
        if name != "twin":  # found beside its twin
            assert all(text in errors[name] for text in texts), name
    write_good(tmp_path / "models", "chooser", "two")
    write_model(tmp_path / "models", "owner", config("Owner of two"), {1: lambda: scaled(1.0)})
    errors = {
        row["model"]: row["error"] for row in one_object(run("models", tmp_path / "models", "--json")[1])["models"]
    }
    assert all(text in errors["twin"] for text in BAD["twin"][2])
    assert errors["chooser"] == errors["owner"] == ""
    assert "model 'two': tenant 'Owner of two' already owns model 'owner'" in errors["two"]
    status, out, _ = run("models", tmp_path / "models")
    assert status == 1
    assert "no_slo" in out


def test_profile_as_json(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "two", config(), {1: lambda: scaled(1.0)})
    status, out, err = run("profile", root, "--budget", "0", "--json")
    assert (status, err) == (0, "")
    result = one_object(out)
    assert result["errors"] == {}
    assert result["profile"] == json.loads(profile_path(root).read_text(encoding="utf-8"))
    status, out, _ = run("profile", root)
    assert status == 0
    assert "1x1" in out
    assert "SLO" in out
    write_model(root, "bad", "", {})
    status, out, _ = run("profile", root, "--json")
    assert status == 1
    assert "slo_ms is missing" in one_object(out)["errors"]["bad"]


def test_simulate_prints_a_table_and_equal_seeds_give_equal_json(run: Run, root: Path, workload: Path) -> None:
    status, out, err = run("simulate", workload, root, "--policy", "edf", "--policy", "fcfs", "--drop", "expired")
    assert (status, err) == (0, "")
    assert "edf (drop: expired, tail-aware), seed 3" in out
    assert "fcfs (drop: expired), seed 3" in out
    assert "add_sub" in out
    arguments = ("simulate", workload, root, "--json", "--seeds", "2", "--noise", "0.3")
    first, second = run(*arguments), run(*arguments)
    assert first == second
    result = one_object(first[1])
    assert result["simulated"] is True
    assert [(each["policy"], each["seed"]) for each in result["runs"]] == [("shares", 3), ("shares", 4)]
    assert result["runs"][0] != {**result["runs"][1], "seed": 3}
    assert run(*arguments[:-1], "0.0")[1] != first[1]


OF_OVERLAP = [
    ("[policy]\nname = 'overlap'\nbarrier = true", "overlap", "--tail-aware", False),
    ("[policy]\nname = 'overlap'\nbarrier = false", "overlap", None, True),
    ("[policy]\nname = 'overlap'\nbarrier = false", "overlap", "--no-tail-aware", False),
]


@pytest.mark.parametrize(
    ("settings", "policy", "wish", "is_tail_aware"),
    [
        ("", "edf", None, True),
        ("", "edf", "--no-tail-aware", False),
        ("", "sjf", None, False),
        ("", "fcfs", "--tail-aware", True),
        ("[policy]\ntail_aware = true", "sjf", None, True),
        *(OF_OVERLAP if known("overlap") else ()),
    ],
)
def test_simulate_says_tail_aware_where_a_margin_is_learnt_and_decisions_go_by_it(
    run: Run,
    root: Path,
    workload: Path,
    tmp_path: Path,
    settings: str,
    policy: str,
    wish: str | None,
    is_tail_aware: bool,
) -> None:
    path = tmp_path / "trace.jsonl"
    arguments = ["simulate", workload, root, "--policy", policy, "--noise", 0.5, "--trace", path]
    arguments += [wish] if wish else []
    file = root / "cotenant.toml"
    file.write_text(settings, encoding="utf-8")
    try:
        title = run(*arguments)[1].splitlines()[0]
        [made] = one_object(run(*arguments, "--json")[1])["runs"]
    finally:
        file.unlink()
    assert ("tail-aware" in title) is is_tail_aware
    assert made["tail_aware"] is is_tail_aware
    assert (b'"spreads":{"' in path.read_bytes()) is is_tail_aware
    assert one_object(run("replay", path, "--json")[1])["same"] is True


def test_simulate_in_a_contended_world_once_it_is_calibrated(run: Run, root: Path, workload: Path) -> None:
    path = contention_path(root)
    arguments = ("simulate", workload, root, "--world", "contention", "--json")
    path.unlink(missing_ok=True)
    status, _, err = run(*arguments)
    assert status == 2
    assert "cotenant profile REPO --contention" in err
    assert str(path) in err
    profile = load_profile(profile_path(root))
    models = {
        name: ModelContention(Traffic((10**9,) * len(model.unit_ns), ((0,) * len(model.unit_ns),)), True)
        for name, model in profile.models.items()
    }
    save_contention(path, ContentionProfile(profile.device, "", (10**9, 10**9), 10**9, models))
    traces = []
    for world in ("contention", "table"):  # at 20 times the rate launches overlap, and both draw all that there is
        traces.append(root.parent / f"{world}.jsonl")
        more = ("--world", world, "--json", "--factor", 20, "--trace", traces[-1])
        status, out, err = run("simulate", workload, root, *more)
        assert (status, err) == (0, "")
        assert one_object(out)["world"] == world
    contended, free = (path.read_bytes() for path in traces)
    assert contended != free
    assert contended.count(b"QueryArrived") == free.count(b"QueryArrived") > 1000


def test_explain_and_replay_a_simulated_trace(run: Run, trace: Path) -> None:
    status, out, err = run("explain", 5, trace)
    assert (status, err) == (0, "")
    assert out.startswith("Query 5 of '")
    story = one_object(run("explain", 5, trace, "--json")[1])
    assert story["query"] == 5
    assert story["sentences"] == out.splitlines()
    status, out, err = run("replay", trace)
    assert (status, err) == (0, "")
    assert "every action is the same" in out
    result = one_object(run("replay", trace, "--json")[1])
    assert result["same"] is True
    assert result["first_difference_ns"] is None
    assert result["events"] > 300


def test_why_queries_were_lost(run: Run, root: Path, workload: Path, tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "crowded.jsonl"
    crowded = ("simulate", workload, root, "--decision-us", "50000", "--trace", path)
    shown = run(*crowded)[1]
    [made] = one_object(run(*crowded, "--json")[1])["runs"]
    lost = sum(sum(causes.values()) for causes in made["lost"].values())
    assert lost > 50
    assert "lost queries by cause" in shown
    status, out, err = run("explain", "--lost", path)
    assert (status, err) == (0, "")
    told = one_object(run("explain", "--lost", path, "--json")[1])
    assert (told["lost"], told["to_neighbours"]) == (made["lost"], made["to_neighbours"])
    assert len(told["losses"]) == lost
    assert told["bound"] | {"missing_events": 0, "others_share": None} == one_object(run("bound", path, "--json")[1])
    assert "could be answered in time" in out
    assert all(CAUSE_NAMES[LossCause(cause)] in out for causes in told["lost"].values() for cause in causes)
    loss = told["losses"][-1]
    story = run("explain", loss["query"], path)[1].splitlines()
    assert story[-1].startswith("Cause: ")
    assert run("explain", "--lost", trace)[1] == "No query was lost: all were answered in time.\n"


def test_what_a_run_could_have_been(run: Run, trace: Path) -> None:
    status, out, err = run("bound", trace)
    assert (status, err) == (0, "")
    facts = one_object(run("bound", trace, "--json")[1])
    assert f"of {facts['asked']} queries could be answered in time, {facts['in_time']} were" in out
    assert facts["in_time"] <= facts["most"] <= facts["asked"] == sum(each["asked"] for each in facts["tenants"])
    assert facts["least_attainment"] <= facts["fair"] <= 1
    assert all(each["tenant"] in out for each in facts["tenants"])


def test_simulate_says_how_far_each_run_was_from_the_best(run: Run, root: Path, workload: Path, tmp_path: Path) -> None:
    path = tmp_path / "t"
    arguments = ("simulate", workload, root, "--policy", "fcfs", "--policy", "edf", "--bound")
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    assert out.count("could be answered in time") == out.count("fair: the least attainment") == 2
    first, last = (each["bound"] for each in one_object(run(*arguments, "--json")[1])["runs"])
    assert one_object(run(*arguments, "--trace", path, "--json")[1])["runs"][1]["bound"] == last
    assert one_object(run("bound", path, "--json")[1]) == last | {"missing_events": 0, "others_share": None}
    assert first["asked"] == last["asked"]
    lost = one_object(run(*arguments, "--json")[1])["runs"][0]["lost"]
    for each in first["tenants"]:
        assert sum(lost.get(each["tenant"], {}).values()) == each["asked"] - each["in_time"]
    assert first["in_time"] <= first["most"]
    assert "bound" not in one_object(run(*arguments[:-1], "--json")[1])["runs"][0]


def test_a_trace_that_was_tampered_with_differs(run: Run, trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text(encoding="utf-8").splitlines()
    changed = tmp_path / "changed.jsonl"
    at = next(number for number, line in enumerate(lines) if number > 20 and '"Launch"' in line)
    record = json.loads(lines[at])
    next(action for kind, action in record[3] if kind == "Launch")["predicted_ns"] += 1
    changed.write_text("\n".join([*lines[:at], json.dumps(record), *lines[at + 1 :]]) + "\n", encoding="utf-8")
    status, out, _ = run("replay", changed, "--json")
    assert status == 1
    assert one_object(out)["first_difference_ns"] == record[0]
    status, out, _ = run("replay", changed)
    assert status == 1
    assert f"differ from {record[0]} ns on" in out


def test_every_policy_replays_to_itself(run: Run, root: Path, workload: Path, tmp_path: Path) -> None:
    for policy in ("fcfs", "sjf", "edf"):
        for cut in ("--preempt", "--no-preempt"):
            path = tmp_path / "trace.jsonl"
            assert run("simulate", workload, root, "--policy", policy, cut, "--trace", path, "--json")[0] == 0
            assert one_object(run("replay", path, "--json")[1])["same"] is True


# --- what is wrong ----------------------------------------------------------------------------------------------------


def damaged(trace: Path, folder: Path, number: int, text: str) -> Path:
    lines = trace.read_text(encoding="utf-8").splitlines()
    lines[number] = text
    path = folder / "damaged.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


WRONG: dict[str, tuple[Callable[[Path, Path, Path, Path], tuple[object, ...]], str]] = {
    "models nowhere": (lambda r, w, t, f: ("models", f / "nowhere"), "is not a directory"),
    "models file": (lambda r, w, t, f: ("models", w), "is not a directory"),
    "profile nowhere": (lambda r, w, t, f: ("profile", f / "nowhere"), "is not a directory"),
    "profile lanes": (lambda r, w, t, f: ("profile", r, "--lanes", "800"), "expected disjoint lists"),
    "simulate policy": (lambda r, w, t, f: ("simulate", w, r, "--policy", "zzz"), "name is 'zzz', expected one of"),
    "simulate workload": (lambda r, w, t, f: ("simulate", f / "w.toml", r), "cannot be read"),
    "simulate unprofiled": (lambda r, w, t, f: ("simulate", w, write_good(f / "m", "two")), "cotenant profile"),
    "simulate trace": (lambda r, w, t, f: ("simulate", w, r, "--trace", f / "no" / "x"), "No such file or directory"),
    "simulate lanes": (lambda r, w, t, f: ("simulate", w, r, "--lanes", "zzz"), "lanes is 'zzz', expected 'single'"),
    "explain nowhere": (lambda r, w, t, f: ("explain", 1, f / "nowhere"), "cannot be read"),
    "explain folder": (lambda r, w, t, f: ("explain", 1, f), "cannot be read"),
    "explain number": (lambda r, w, t, f: ("explain", 10**9, t), "is not in this trace"),
    "explain no trace": (lambda r, w, t, f: ("explain", 1, w), "is not a cotenant-trace/3 file"),
    "bound nowhere": (lambda r, w, t, f: ("bound", f / "nowhere"), "cannot be read"),
    "bound nothing": (lambda r, w, t, f: ("bound", damaged(t, f, 1, "[")), "line 2 is not a record"),
    "replay nowhere": (lambda r, w, t, f: ("replay", f / "nowhere"), "cannot be read"),
    "replay damage": (lambda r, w, t, f: ("replay", damaged(t, f, 5, "[1, 2")), "line 6 is not a record"),
    "replay event": (lambda r, w, t, f: ("replay", damaged(t, f, 5, '[1,"QueryArrived",{"x":1},[]]')), "QueryArrived"),
    "replay kind": (lambda r, w, t, f: ("replay", damaged(t, f, 5, '[1,"Zzz",{},[]]')), "unknown kind 'Zzz'"),
    "replay perfetto": (lambda r, w, t, f: ("replay", t, "--perfetto", f / "no" / "x"), "does not exist, make it"),
    "load nowhere": (lambda r, w, t, f: ("load", f / "w.toml"), "cannot be read"),
    "load no server": (lambda r, w, t, f: ("load", w, "--http", "http://127.0.0.1:9", "--grpc", "127.0.0.1:9"), "9"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_what_is_wrong_is_one_sentence(
    run: Run, root: Path, workload: Path, trace: Path, tmp_path: Path, case: str
) -> None:
    arguments, sentence = WRONG[case]
    status, out, err = run(*arguments(root, workload, trace, tmp_path))
    assert status == 2
    assert "Traceback" not in out + err
    [line] = err.splitlines()
    assert line.startswith("cotenant: ")
    assert sentence in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("zzz",),
        ("simulate",),
        ("explain", "x", "y"),
        ("explain", "1"),
        ("explain", "--lost", "1", "x"),
        ("serve", ".", "--drop", "zzz"),
        ("models", "--zzz"),
    ],
)
def test_wrong_usage_has_status_two(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "Usage" in err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(root: Path) -> None:
    command = f"{sys.executable} -m cotenant models {root} --json | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr


def test_importing_the_command_line_is_quick_in_what_it_loads() -> None:
    """`--help` must not load an engine, a front-end or a solver."""
    code = "import sys, cotenant.cli.app; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"onnxruntime", "onnx", "grpc", "uvloop", "numpy", "torch", "prometheus_client"}
    assert heavy.isdisjoint(loaded.stdout.split())


def test_shells_complete_commands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_COTENANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cotenant in")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run()[1].split() == ["init", "infer"]
