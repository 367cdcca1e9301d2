"""The command lines of the manifests for Kubernetes and KServe, for real."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotenant.cli.serve
from cotenant.config import load_server_config
from cotenant.repository import (
    MEASURED,
    coruns_path,
    find_versions,
    graphs_path,
    groups_path,
    model_names,
    overlap_path,
    placement_path,
    profile_path,
    tasks_path,
    together_path,
)
from cotenant.techniques.partitions.plan.file import parse_plan
from cotenant.wire.client import infer_once
from deploy_checks import (
    DEPLOY,
    Document,
    container_of,
    containerfile,
    flags,
    kserve,
    manifest,
    pod_of,
    probes,
    server_config,
)
from repositories import SLO_MS, config, scaled, write_good, write_model

WAIT_S = 30.0
SCRIPT = DEPLOY / "serve-mounted"
BIN = Path(sys.executable).parent
X = {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}
DEPLOYMENTS = ("kubernetes", "kubernetes/planned")
SERVICES = ("kserve/inference-service.yaml", "kserve/inference-service-grpc.yaml")


# --- the script that starts the server -------------------------------------------------------------------------------


def start(*arguments: str, cpus: int | None = None, path: Path = BIN, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}:{BIN}:{os.environ['PATH']}", **more}
    environment.update({} if cpus is None else {"COTENANT_CPUS": str(cpus)})
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a `cotenant` that only says how it was called."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "cotenant").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    (folder / "cotenant").chmod(0o755)
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_a_repository_is_linked_and_its_profile_taken_along(tmp_path: Path, fake: Path, state: Path) -> None:
    mount = write_good(tmp_path / "mount", "two", "cnn")
    (mount / ".cotenant" / "graphs").mkdir(parents=True)
    profile_path(mount).write_text("measured", encoding="utf-8")
    placement = placement_path(graphs_path(mount), "graph", 2)
    placement.parent.mkdir()
    kept = [
        tasks_path(mount),
        together_path(mount),
        groups_path(mount),
        overlap_path(mount),
        coruns_path(mount),
        placement,
    ]
    for path in kept:
        path.write_text(path.name, encoding="utf-8")
    (graphs_path(mount) / "optimised").touch()
    (mount / "cotenant.toml").write_text("[server]\ndrain_s = 3\n", encoding="utf-8")
    done = start(str(mount), str(state), "ignored", "--http-port=1", "--lanes", "0,1/2", path=fake)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["serve", str(state), "--http-port=1", "--lanes", "0,1/2"]
    assert model_names(state) == ("cnn", "two")
    assert [each.version for each in find_versions(state, "two")] == [1, 2]
    assert profile_path(state).read_text(encoding="utf-8") == "measured"
    assert not profile_path(state).is_symlink()
    taken = {path.relative_to(state) for path in (state / ".cotenant").rglob("*") if path.is_file()}
    assert taken == {path.relative_to(mount) for path in (*kept, profile_path(mount))}
    assert taken > {path_of(Path()) for path_of in MEASURED if path_of is not graphs_path}  # all that a server reads
    assert load_server_config(state / "cotenant.toml").server.drain_s == 3

    settings = tmp_path / "other.toml"  # a container that is started again, when models have come and gone
    settings.write_text("[server]\ndrain_s = 4\n", encoding="utf-8")
    (state / ".cotenant" / "trace.jsonl").touch()
    os.rename(mount / "cnn", mount / "renamed")
    assert start(str(mount), str(state), "ignored", path=fake, COTENANT_CONFIG=str(settings)).returncode == 0
    assert model_names(state) == ("renamed", "two")
    assert load_server_config(state / "cotenant.toml").server.drain_s == 4
    assert (state / ".cotenant" / "trace.jsonl").exists()


def test_one_model_gets_the_name_that_it_is_asked_by(tmp_path: Path, fake: Path, state: Path) -> None:
    write_model(tmp_path, "mount", config(), {1: lambda: scaled(1.0), 3: lambda: scaled(3.0)})
    for _ in range(2):
        assert start(str(tmp_path / "mount"), str(state), "vision", path=fake).returncode == 0
        assert model_names(state) == ("vision",)
        assert [(each.tenant, each.version) for each in find_versions(state, "vision")] == [
            ("vision:1", 1),
            ("vision", 3),
        ]


@pytest.mark.parametrize("file", ["model.onnx", "model.pt2"])
def test_a_bare_file_needs_a_latency_target(file: str, tmp_path: Path, fake: Path, state: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / file).write_bytes(b"model")
    refused = start(str(mount), str(state), "vision", path=fake)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "expected COTENANT_SLO_MS" in refused.stderr
    for _ in range(2):
        assert start(str(mount), str(state), "vision", path=fake, COTENANT_SLO_MS="12.5").returncode == 0
        [version] = find_versions(state, "vision")
        assert (version.tenant, version.path.name, version.config.tenant.slo_ms) == ("vision", file, 12.5)


def test_it_refuses_to_serve_without_cores_of_its_own(tmp_path: Path, fake: Path, state: Path) -> None:
    mount, cores = write_good(tmp_path / "mount", "two"), len(os.sched_getaffinity(0))
    assert start(str(mount), str(state), "x", cpus=cores, path=fake).returncode == 0
    refused = start(str(mount), str(state), "x", cpus=cores + 1, path=fake)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"may run on {cores} cores, expected the {cores + 1}" in refused.stderr
    assert "static" in refused.stderr


def test_it_says_what_is_wrong_with_its_arguments(tmp_path: Path, fake: Path, state: Path) -> None:
    assert "expected MOUNT REPOSITORY NAME" in start(str(tmp_path), path=fake).stderr
    missing = start(str(tmp_path / "none"), str(state), "x", path=fake)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "is not a directory" in missing.stderr


# --- the command lines, for real -------------------------------------------------------------------------------------


def test_every_flag_is_one_of_the_server() -> None:
    known = {name.replace("_", "-") for name in inspect.signature(cotenant.cli.serve.serve).parameters}
    for name in (*(f"{folder}/deployment.yaml" for folder in DEPLOYMENTS), "kserve/serving-runtime.yaml"):
        document = manifest(name)
        [container] = (pod_of(document) if "template" in document["spec"] else document["spec"])["containers"]
        assert flags(container).keys() <= known, name


def moved_to(places: Mapping[str, Path], text: str) -> str:
    """An argument with the paths in it moved."""
    known = "|".join(map(re.escape, places))
    return re.sub(rf"(?<![^=])({known})(?=/|$)", lambda found: str(places[found[1]]), text)


def image_environment(moved: Callable[[str], str]) -> dict[str, str]:
    """What the image sets, with programs taken from here."""
    pairs = (pair.partition("=") for pair in dict(containerfile())["ENV"].split())
    return {name: moved(value) for name, _, value in pairs} | {"PATH": f"{BIN}:{os.environ['PATH']}"}


class Pod:
    """A container's command line as a process: paths are moved below a folder, ports are free ones."""

    def __init__(self, container: Document, places: Mapping[str, Path]) -> None:
        def moved(text: str) -> str:
            return re.sub(r"^(--\w+-port)=\d+$", r"\1=0", moved_to(places, text))

        environment = {each["name"]: moved(each["value"]) for each in container["env"] if "value" in each}
        # What the downward API fills in: here as many as there are.
        filled = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
        assert filled == {"COTENANT_CPUS": {"resourceFieldRef": {"resource": "limits.cpu"}}}
        environment["COTENANT_CPUS"] = str(len(os.sched_getaffinity(0)))
        [command] = container["command"]
        self.log = places["/tmp"] / "stderr"
        with self.log.open("w", encoding="utf-8") as stderr:
            self.popen = subprocess.Popen(
                [str(DEPLOY / command), *map(moved, container["args"]), "--json"],
                env={**image_environment(moved), **environment},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd="/",
            )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text(encoding="utf-8")
        self.ready: dict[str, Any] = json.loads(line)
        self.url = f"http://127.0.0.1:{self.ready['http_port']}"
        self.admin_url = f"http://127.0.0.1:{self.ready['admin_port']}"


@contextmanager
def running(container: Document, places: Mapping[str, Path]) -> Iterator[Pod]:
    """A server that is asked what Kubernetes asks, whose mount stays as it was, and that SIGTERM ends well."""
    mount = next(place for path, place in places.items() if path.endswith("/models"))
    before = {path: path.stat().st_mtime_ns for path in mount.rglob("*")}
    pod = Pod(container, places)
    try:
        assert pod.ready["host"] == "0.0.0.0"
        for kind, probe in probes(container).items():
            with urllib.request.urlopen(f"{pod.url}{probe['path']}", timeout=WAIT_S) as answer:
                assert answer.status == 200, kind
        yield pod
        pod.popen.send_signal(signal.SIGTERM)
        assert pod.popen.wait(WAIT_S) == 0
    finally:
        if pod.popen.poll() is None:
            pod.popen.kill()
            pod.popen.wait(WAIT_S)
        assert pod.popen.stdout is not None
        pod.popen.stdout.close()
    assert {path: path.stat().st_mtime_ns for path in mount.rglob("*")} == before


def places_of(tmp_path: Path, models: str) -> dict[str, Path]:
    places = {models: tmp_path / "mount", "/var/lib/cotenant": tmp_path / "state", "/tmp": tmp_path / "tmp"}
    for place in places.values():
        place.mkdir()
    return places


def test_the_deployment_serves_what_the_job_has_measured(tmp_path: Path) -> None:
    deployment = manifest("kubernetes/deployment.yaml")
    places = places_of(tmp_path, "/models") | {"/etc/cotenant": server_config("kubernetes", tmp_path / "etc").parent}
    write_good(places["/models"], "two")
    job = container_of(manifest("kubernetes/profile/job.yaml"))
    command = [str(BIN / job["command"][0]), *(moved_to(places, each) for each in job["args"]), "--budget=0.01"]
    measured = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert json.loads(measured.stdout)["errors"] == {}
    with running(container_of(deployment), places) as pod:
        assert pod.ready["models"] == {"two": "READY"}
        assert "has no valid profile" not in pod.log.read_text(encoding="utf-8")
        assert infer_once(pod.url, "two", X)["y"].shape == (1, 8)
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        with urllib.request.urlopen(f"{pod.admin_url}{annotations['prometheus.io/path']}", timeout=WAIT_S) as answer:
            assert b"cotenant_" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as refused:  # clients of the Service are no operators
            urllib.request.urlopen(f"{pod.url}/v2/repository/models/two/unload", b"{}", timeout=WAIT_S)
        assert refused.value.code == 403
    trace = (places["/var/lib/cotenant"] / ".cotenant" / "trace.jsonl").stat()
    assert trace.st_size > 0
    assert trace.st_mode & 0o077 == 0  # it tells of all tenants
    left = [path.name for path in places["/tmp"].rglob("*")]
    assert left == ["stderr"]  # above all no database of events that a library wants to report


def test_kserve_reaches_the_models_of_a_repository_by_their_names(tmp_path: Path) -> None:
    places = places_of(tmp_path, "/mnt/models")
    write_good(places["/mnt/models"], "two", "add_sub")
    with running(container_of(kserve("kserve/inference-service.yaml")), places) as pod:
        assert pod.ready["models"] == {"two": "READY", "add_sub": "READY"}
        assert "has no valid profile" in pod.log.read_text(encoding="utf-8")  # none was mounted
        rows = {"a": np.full((2, 4), 5, np.int32), "b": np.full((2, 4), 3, np.int32)}
        assert infer_once(pod.url, "add_sub", rows)["difference"].tolist() == [[2] * 4] * 2
        assert infer_once(pod.url, "two", X)["y"].shape == (1, 8)


def test_kserve_reaches_one_model_over_grpc_by_the_name_of_its_service(tmp_path: Path) -> None:
    import tritonclient.grpc as client

    service = manifest("kserve/inference-service-grpc.yaml")
    name = service["metadata"]["name"]
    places = places_of(tmp_path, "/mnt/models")
    (places["/mnt/models"] / "model.onnx").write_bytes(scaled(3.0).SerializeToString())
    container = container_of(kserve("kserve/inference-service-grpc.yaml"))
    long = [{**each, "value": "20000"} if each["name"] == "COTENANT_SLO_MS" else each for each in container["env"]]
    with running({**container, "env": long}, places) as pod:
        assert pod.ready["models"] == {name: "READY"}
        with client.InferenceServerClient(f"127.0.0.1:{pod.ready['grpc_port']}") as asking:
            assert asking.is_server_ready()
            assert asking.is_model_ready(name)
            x = client.InferInput("x", [1, 8], "FP32")
            x.set_data_from_numpy(X["x"])
            y = asking.infer(name, [x]).as_numpy("y")
    assert np.allclose(y, 3.0 * X["x"] / (1 + np.abs(X["x"])))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the example's plan takes two cores")
def test_the_planned_deployment_serves_its_plan_and_the_next_one(tmp_path: Path) -> None:
    places = places_of(tmp_path, "/models")
    places["/etc/cotenant"] = server_config("kubernetes/planned", tmp_path / "etc").parent
    file = parse_plan(manifest("kubernetes/planned/config.yaml")["data"]["plan.toml"], "plan.toml")
    plan = places["/etc/cotenant"] / "plan.toml"
    patient = re.sub(r"slo_ms = [0-9.]+", f"slo_ms = {SLO_MS}", plan.read_text(encoding="utf-8"))
    plan.write_text(patient, encoding="utf-8")  # so long that a busy machine makes no query late
    for load in file.request.loads:
        write_model(places["/models"], load.model, config(max_batch=8), {1: lambda: scaled(2.0)})
    with running(container_of(manifest("kubernetes/planned/deployment.yaml")), places) as pod:
        assert pod.ready["policy"].startswith("duty_cycle")
        for load in file.request.loads:
            assert infer_once(pod.url, load.model, X)["y"].shape == (1, 8)
        [first, *_] = file.plan.devices[0].partitions
        assert shown_plan(pod)["plan"]["partitions"][0]["slots"][0]["batch"] == first.slots[0].batch == 2

        text = (places["/etc/cotenant"] / "plan.toml").read_text(encoding="utf-8")  # as a changed ConfigMap does it
        following = tmp_path / "plan.toml"
        following.write_text(text.replace("batch = 2", "batch = 3"), encoding="utf-8")
        os.replace(following, places["/etc/cotenant"] / "plan.toml")
        pod.popen.send_signal(signal.SIGHUP)
        until = time.monotonic() + WAIT_S
        while (shown := shown_plan(pod))["version"] == 1:
            assert time.monotonic() < until, pod.log.read_text(encoding="utf-8")
        assert shown["plan"]["partitions"][0]["slots"][0]["batch"] == 3
        for load in file.request.loads:
            assert infer_once(pod.url, load.model, X)["y"].shape == (1, 8)


def shown_plan(pod: Pod) -> dict[str, Any]:
    with urllib.request.urlopen(f"{pod.admin_url}/v2/cotenant/plan", timeout=WAIT_S) as answer:
        return dict(json.load(answer))
