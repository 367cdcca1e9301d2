"""Applications as users meet them: listed, served by a process, explained from its trace."""

from __future__ import annotations

import json
import signal
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
    assert errors["diamond"] == "stage 'right': model 'half' is missing or cannot be served"
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
