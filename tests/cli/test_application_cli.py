"""Applications as users meet them: listed, served by a process, explained from its trace."""

from __future__ import annotations

import json
import signal
import tomllib
import urllib.request
from pathlib import Path

import numpy as np

from application_samples import CHAIN, DIAMOND, chain, write_application, write_models, x_of
from commands import Run
from cotenant.report.timeline import write_timeline
from cotenant.repository import trace_path
from cotenant.trace import read
from cotenant.wire.client import infer_once
from cotenant.wire.oip import QUERY_KEY
from processes import WAIT_S, cotenant, serving


def test_models_lists_applications_and_what_is_wrong_with_them(tmp_path: Path, run: Run) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    status, out, _ = run("models", root, "--json")
    assert status == 0
    [row] = [row for row in json.loads(out)["models"] if row["model"] == "chain"]
    assert (row["slo_ms"], row["stages"], row["error"]) == (20_000, ["first", "second"], "")
    status, out, _ = run("models", root)
    assert "first -> second" in " ".join(out.split())
    write_application(root, "diamond", DIAMOND)
    write_application(root, "wrong", CHAIN.replace("first.y", "nobody.y"))
    status, out, _ = run("models", root, "--json")
    assert status == 1
    errors = {row["model"]: row["error"] for row in json.loads(out)["models"]}
    assert errors["diamond"] == "stage 'right': model 'half' is not there, or cannot be served"
    assert "unknown stage 'nobody'" in errors["wrong"]
    assert errors["chain"] == ""


def test_a_served_application_leaves_a_trace_that_is_explained_and_replays(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    with serving(root) as process:
        assert process.ready["models"] == {"chain": "READY", "thrice": "READY", "twice": "READY"}
        for seed in range(5):
            outputs = infer_once(process.url, "chain", {"x": x_of(seed)})
            np.testing.assert_allclose(outputs["y"], chain(x_of(seed))[0], rtol=1e-5)
        data = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}]}
        call = urllib.request.Request(f"{process.url}/v2/models/chain/infer", json.dumps(data).encode())
        with urllib.request.urlopen(call, timeout=WAIT_S) as answer:
            number = answer.headers[QUERY_KEY]
        assert process.end(signal.SIGTERM) == 0
        assert "application 'chain' is served: slo 20000 ms, stages first -> second" in {
            entry["message"] for entry in process.logs
        }
    told = cotenant("explain", number, str(root))
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith(f"Query {number} of the application 'chain' was answered after ")
    assert [line.split("stage ")[1].split()[0] for line in lines[1:3]] == ["'first'", "'second'"]
    stage = json.loads(cotenant("explain", str(int(number) + 1), str(root), "--json").stdout)
    assert (stage["stage"], stage["part_of"]) == ("first", int(number))
    replayed = cotenant("replay", str(root), "--json")
    assert json.loads(replayed.stdout)["same"] is True
    timeline = tmp_path / "timeline.json"
    write_timeline(timeline, read(trace_path(root))[1])
    events = json.loads(timeline.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["args"].get("query") == int(number)]
    assert [event["name"] for event in spans] == [f"answered #{number}"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "applications" in names


TENANTS = """
[[device]]
name = "cpu"
cores = 1

[[application]]
name = "chain"
rate = 2
"""


def test_an_application_is_planned_and_served_by_its_plan(tmp_path: Path, run: Run) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    plan = tmp_path / "plan.toml"
    done, _, err = run("profile", root, "--budget", "0.05")
    assert done == 0, err
    done, _, err = run("plan", tmp_path / "tenants.toml", "--profiles", root, "--quick", "-o", plan)
    assert done == 0, err
    with serving(root, "--plan", str(plan), "--cores", "0") as process:
        for seed in range(3):
            outputs = infer_once(process.url, "chain", {"x": x_of(seed)})
            np.testing.assert_allclose(outputs["y"], chain(x_of(seed))[0], rtol=1e-5)
        with urllib.request.urlopen(f"{process.url}/v2/cotenant/plan", timeout=WAIT_S) as answer:
            status = json.load(answer)
        assert process.end(signal.SIGTERM) == 0
        assert not [entry for entry in process.logs if "not served here" in entry["message"]]
    slots = [slot["tenant"] for part in status["plan"]["partitions"] for slot in part["slots"]]
    assert sorted(slots) == ["thrice", "twice"]
    assert status["attainment"]["chain"] == 1.0
    shares = {each["name"]: each["slo_ms"] for each in tomllib.loads(plan.read_text())["tenant"]}
    records = list(read(trace_path(root))[1])
    whole = next(record.event for record in records if record.kind == "ApplicationArrived")
    first = next(record.event["query"] for record in records if record.kind == "QueryArrived")
    assert first["deadline_ns"] - whole["arrival_ns"] == round(shares["chain.first"] * 1e6)
    workload = tmp_path / "workload.toml"
    workload.write_text('duration_s = 2.0\n[[tenant]]\nmodel = "chain"\nrate = 5.0\n')
    done, out, err = run("simulate", workload, root, "--plan", plan, "--cores", "0", "--json")
    assert done == 0, err
    [simulated] = json.loads(out)["runs"]
    assert simulated["tenants"]["chain"]["attainment"] == 1.0
