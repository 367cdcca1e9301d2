"""Manifests for Kubernetes and KServe: against schemas, against each other, and their command lines for real."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.config import load_server_config
from cotenant.techniques.partitions.plan.file import parse_plan
from deploy_checks import (
    DEPLOY,
    ROOT,
    Document,
    ManifestError,
    check_cores,
    check_grace,
    check_ports,
    check_selected,
    check_written,
    container_of,
    containerfile,
    flags,
    kserve,
    manifest,
    manifests,
    pod_of,
    server_config,
    validate,
)

WAIT_S = 30.0
SCRIPT = DEPLOY / "serve-mounted"
BIN = Path(sys.executable).parent
X = {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}
DEPLOYMENTS = ("kubernetes", "kubernetes/planned")
SERVICES = ("kserve/inference-service.yaml", "kserve/inference-service-grpc.yaml")


def changed(document: Document, path: str, value: object) -> Document:
    """A copy with the value at a path like 'spec.containers.0.name'; None takes it away."""
    result = copy.deepcopy(document)
    *way, last = path.split(".")
    at: Any = result
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    if value is None:
        del at[int(last) if isinstance(at, list) else last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return result


# --- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(manifests()))
def test_every_manifest_is_valid(name: str) -> None:
    validate(manifest(name))


@pytest.mark.parametrize("name", SERVICES)
def test_what_kserve_makes_of_runtime_and_service_is_a_valid_pod(name: str) -> None:
    validate(kserve(name))


CONTAINER = "spec.template.spec.containers.0"
WRONG = [
    ("kubernetes/deployment.yaml", "spec.replicas", "two"),
    ("kubernetes/deployment.yaml", "spec.selector", None),
    ("kubernetes/deployment.yaml", "spec.template.spec.terminationGracePeriodSecond", 30),
    ("kubernetes/deployment.yaml", f"{CONTAINER}.livenessprobe", {}),
    ("kubernetes/deployment.yaml", f"{CONTAINER}.ports.0.containerPort", "http"),
    ("kubernetes/deployment.yaml", f"{CONTAINER}.readinessProbe.httpGet.port", None),
    ("kubernetes/deployment.yaml", f"{CONTAINER}.resources.limit", {"cpu": "4"}),
    ("kubernetes/planned/deployment.yaml", f"{CONTAINER}.args", "--plan"),
    ("kubernetes/config.yaml", "data", ["cotenant.toml"]),
    ("kubernetes/service.yaml", "spec.ports.0.port", None),
    ("kubernetes/network-policy.yaml", "spec.ingress.0.from", {}),
    ("kubernetes/disruption-budget.yaml", "spec.maxUnavailble", 1),
    ("kubernetes/models.yaml", "spec.accessModes", "ReadWriteMany"),
    ("kubernetes/profile/job.yaml", "spec.template", None),
    ("kserve/serving-runtime.yaml", "spec.supportedModelFormat", []),
    ("kserve/serving-runtime.yaml", "spec.supportedModelFormats.0.name", None),
    ("kserve/serving-runtime.yaml", "spec.supportedModelFormats.0.autoSelect", "yes"),
    ("kserve/serving-runtime.yaml", "spec.protocolVersions.0", "v3"),
    ("kserve/serving-runtime.yaml", "spec.containers.0.name", "server"),
    ("kserve/serving-runtime.yaml", "spec.containers.0.arg", []),
    ("kserve/serving-runtime.yaml", "spec.containers.0.lifecycle.preStop.sleep.seconds", "5"),
    ("kserve/serving-runtime.yaml", "spec.volumes.0.emptyDirectory", {}),
    ("kserve/serving-runtime.yaml", "spec.initContainers", []),
    ("kserve/inference-service.yaml", "apiVersion", "serving.kserve.io/v1alpha1"),
    ("kserve/inference-service.yaml", "spec.predictor.model.modelFormat", None),
    ("kserve/inference-service.yaml", "spec.predictor.model.storageUri", "/models"),
    ("kserve/inference-service.yaml", "spec.predictor.model.storageURI", "pvc://models"),
    ("kserve/inference-service-grpc.yaml", "spec.predictor.model.protocolVersion", "grpc"),
    ("kserve/inference-service-grpc.yaml", "spec.predictor.model.ports.0.containerPort", "9000"),
]


@pytest.mark.parametrize(("name", "path", "value"), WRONG)
def test_a_wrong_manifest_is_not_valid(name: str, path: str, value: object) -> None:
    with pytest.raises(ManifestError):
        validate(changed(manifest(name), path, value), ("1.37",))


# --- what has to hold between manifests ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", DEPLOYMENTS)
def test_a_deployment_fits_its_service_and_its_settings(folder: str, tmp_path: Path) -> None:
    deployment, service = manifest(f"{folder}/deployment.yaml"), manifest(f"{folder}/service.yaml")
    check_ports(deployment, service)
    check_selected(deployment, service, manifest("kubernetes/network-policy.yaml"))
    check_cores(deployment)
    check_written(deployment)
    settings = load_server_config(server_config(folder, tmp_path))
    check_grace(deployment, settings.server.drain_s)
    mounted = {each["mountPath"]: each["name"] for each in container_of(deployment)["volumeMounts"]}
    volumes = {each["name"]: each for each in pod_of(deployment)["volumes"]}
    claimed = manifest(f"{folder}/config.yaml")["metadata"]["name"]
    assert volumes[mounted["/etc/cotenant"]]["configMap"]["name"] == claimed
    claim = volumes[mounted["/models"]]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("kubernetes/models.yaml")["metadata"]["name"]


def test_the_budget_and_the_policy_are_about_the_deployment() -> None:
    deployment, policy = manifest("kubernetes/deployment.yaml"), manifest("kubernetes/network-policy.yaml")
    check_selected(deployment, manifest("kubernetes/disruption-budget.yaml"))
    assert deployment["spec"]["replicas"] > manifest("kubernetes/disruption-budget.yaml")["spec"]["maxUnavailable"]
    named = {each["name"] for each in container_of(deployment)["ports"]}
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert opened == named
    planned = manifest("kubernetes/planned/deployment.yaml")
    with pytest.raises(ManifestError):  # a budget counts the pods of one Deployment
        check_selected(planned, manifest("kubernetes/disruption-budget.yaml"))


@pytest.mark.parametrize("name", SERVICES)
def test_the_pod_of_kserve_is_sound(name: str) -> None:
    pod = kserve(name)
    check_ports(pod)
    check_cores(pod)
    check_written(pod)
    check_grace(pod, load_server_config(Path("there is none")).server.drain_s)
    said = flags(container_of(pod))
    assert said["http-port"] == "8080"  # where KServe leads to when a container names no port
    if manifest(name)["spec"]["predictor"]["model"]["protocolVersion"] == "grpc-v2":
        assert [(each["name"], each["containerPort"]) for each in container_of(pod)["ports"]] == [
            ("h2c", int(said["grpc-port"]))
        ]
    annotations = manifest("kserve/serving-runtime.yaml")["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == said["admin-port"]


def test_the_profile_is_measured_on_as_many_cores_as_serve() -> None:
    job, deployment = manifest("kubernetes/profile/job.yaml"), manifest("kubernetes/deployment.yaml")
    check_cores(job)
    assert container_of(job)["resources"] == container_of(deployment)["resources"]
    assert container_of(job)["image"] == container_of(deployment)["image"]
    [models] = [each for each in container_of(job)["volumeMounts"] if each["mountPath"] == "/models"]
    assert "readOnly" not in models  # its profile goes there
    [served] = [each for each in container_of(deployment)["volumeMounts"] if each["mountPath"] == "/models"]
    assert models["subPath"] == served["subPath"]


def test_the_plan_of_the_example_is_one_that_the_pod_can_run() -> None:
    file = parse_plan(manifest("kubernetes/planned/config.yaml")["data"]["plan.toml"], "plan.toml")
    container = container_of(manifest("kubernetes/planned/deployment.yaml"))
    device = file.plan.devices[int(flags(container)["device-number"])]
    cores = int(container["resources"]["limits"]["cpu"])
    assert sum(each.size for each in device.partitions) == cores == file.request.devices[0].whole
    assert {slot.tenant for each in device.partitions for slot in each.slots} == {
        load.tenant for load in file.request.loads
    }


Check = Callable[[Document], None]


def _ports(document: Document) -> None:
    check_ports(document, manifest("kubernetes/service.yaml"))


def _grace(document: Document) -> None:
    check_grace(document, 10.0)


def _selected(document: Document) -> None:
    check_selected(document, manifest("kubernetes/service.yaml"))


UNFIT: list[tuple[Check, str, object]] = [
    (_ports, f"{CONTAINER}.args.4", "--http-port=8080"),
    (_ports, f"{CONTAINER}.args.3", "--host=127.0.0.1"),
    (_ports, f"{CONTAINER}.ports.1.containerPort", 9000),
    (_ports, f"{CONTAINER}.ports.0.name", "web"),
    (_ports, f"{CONTAINER}.livenessProbe.httpGet.port", "grpc"),
    (_ports, "spec.template.metadata.annotations", {"prometheus.io/port": "8001"}),
    (_grace, "spec.template.spec.terminationGracePeriodSeconds", 17),
    (_grace, f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 33),
    (_selected, "spec.template.metadata.labels", {"app.kubernetes.io/name": "cotenant"}),
    (check_cores, f"{CONTAINER}.resources.limits.cpu", "8"),
    (check_cores, f"{CONTAINER}.resources", {key: {"cpu": "1500m", "memory": "1Gi"} for key in ("requests", "limits")}),
    (check_cores, "spec.template.spec.initContainers", [{"name": "load", "resources": {"limits": {"cpu": "1"}}}]),
    (check_written, f"{CONTAINER}.securityContext.readOnlyRootFilesystem", False),
    (check_written, "spec.template.spec.securityContext.runAsUser", 0),
    (check_written, f"{CONTAINER}.args.1", "/models"),
    (check_written, f"{CONTAINER}.volumeMounts.0.readOnly", False),
    (check_written, f"{CONTAINER}.volumeMounts.3", None),
]


@pytest.mark.parametrize(("check", "path", "value"), UNFIT)
def test_an_unfit_manifest_is_noticed(check: Check, path: str, value: object) -> None:
    document = changed(manifest("kubernetes/deployment.yaml"), path, value)
    validate(document, ("1.37",))  # no schema says so
    with pytest.raises(ManifestError):
        check(document)


# --- the image -------------------------------------------------------------------------------------------------------


def test_the_image_is_made_of_files_that_are_here() -> None:
    for instruction, rest in containerfile():
        if instruction == "COPY" and "--from" not in rest:
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
    assert os.access(SCRIPT, os.X_OK)
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert [rest.split()[0] for instruction, rest in containerfile() if instruction == "FROM"] == [
        "python:3.11-slim",
        "python:3.11-slim",
    ]
    for locked in re.findall(r"-r ([\w/.]+)", text):
        assert f"{locked} " in text  # copied before it is read
        assert (ROOT / locked).exists()


def test_the_lock_of_the_image_holds_all_that_the_server_needs_with_hashes() -> None:
    text = (ROOT / "requirements" / "run.lock").read_text(encoding="utf-8")
    entries = re.findall(r"^([\w.-]+)==(?:[^\n]*\\\n)+[^\n]*$", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^\S+==", text, re.MULTILINE))  # each has hashes
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    names = {re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in needed}
    assert names <= set(entries)
    assert project["project"]["scripts"].keys() == {"cotenant"}


def test_the_image_runs_as_the_manifests_say() -> None:
    last = dict(containerfile())
    assert json.loads(last["ENTRYPOINT"])[0] == "cotenant"
    user = int(last["USER"].partition(":")[0])
    deployment = manifest("kubernetes/deployment.yaml")
    assert pod_of(deployment)["securityContext"]["runAsUser"] == user
    assert {str(each["containerPort"]) for each in container_of(deployment)["ports"]} == set(last["EXPOSE"].split())
    copied = [rest.split() for instruction, rest in containerfile() if instruction == "COPY"]
    [script] = [words for words in copied if words[-1].endswith("/serve-mounted")]
    assert script[-1] == "/usr/local/bin/serve-mounted"
    images = set()
    for document in manifests().values():
        images |= set(re.findall(r"'image': '([^']*)'", str(document)))
    assert images == {"cotenant:0.1.0"}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert images == {f"cotenant:{version}"}
