"""The manifests under deploy/: reading them, and the rules that hold for one and between several."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

Document = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
VERSIONS = ("1.30", "1.37")
"""Kubernetes: the first version that knows every field in use, and the last one with schemas at hand."""
_KSERVE = {"ServingRuntime": "kserve-serving-runtime.json", "InferenceService": "kserve-inference-service.json"}
_OF_MODEL = ("modelFormat", "runtime", "protocolVersion", "storageUri")
"""Fields of an InferenceService's model; the others are those of a container."""
FRONT_ENDS_S = 2
"""For the two front-ends to stop, a second each: see `cotenant.cli.serve`."""


class ManifestError(AssertionError):
    """A manifest is wrong in itself, or does not fit another one."""


def manifests() -> dict[str, Document]:
    """Every manifest by its path below deploy/; each file holds one."""
    return {str(path.relative_to(DEPLOY)): read(path) for path in sorted(DEPLOY.rglob("*.yaml"))}


def read(path: Path) -> Document:
    [document] = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return dict(document)


def manifest(name: str) -> Document:
    return read(DEPLOY / name)


def validate(document: Document, versions: tuple[str, ...] = VERSIONS) -> None:
    """Against the schemas of Kubernetes, unknown fields refused, or ours of KServe. Raises ManifestError."""
    name = _KSERVE.get(document["kind"])
    try:
        if name is None:
            for version in versions:
                assert kubernetes_validate.validate(document, version, strict=True) == version
            return
        jsonschema.Draft202012Validator(_schema(name)).validate(document)
    except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        raise ManifestError(f"{document['kind']}: {error}") from None
    validate(_core_part(document), versions)


@cache
def _schema(name: str) -> Any:
    schema = json.loads((ROOT / "tests" / "data" / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def _core_part(document: Document) -> Document:
    """A pod of those parts of a KServe object that are taken from Kubernetes as they are."""
    if document["kind"] == "ServingRuntime":
        spec = {key: document["spec"][key] for key in ("containers", "volumes") if key in document["spec"]}
    else:
        predictor = document["spec"]["predictor"]
        spec = {key: value for key, value in predictor.items() if key not in ("model", "minReplicas", "maxReplicas")}
        container = {key: value for key, value in predictor["model"].items() if key not in _OF_MODEL}
        spec["containers"] = [{"name": "kserve-container", **container}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "part"}, "spec": spec}


def kserve_pod(runtime: Document, service: Document) -> Document:
    """The pod that KServe makes of both, as far as its documentation says; a claim is mounted without a download."""
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    offered = [(each["name"], each.get("version")) for each in runtime["spec"]["supportedModelFormats"]]
    wanted = (model["modelFormat"]["name"], model["modelFormat"].get("version"))
    if model["runtime"] != runtime["metadata"]["name"] or wanted not in offered:
        raise ManifestError(f"{service['metadata']['name']}: wants {model['runtime']} {wanted}, offered are {offered}")
    if model["protocolVersion"] not in runtime["spec"]["protocolVersions"]:
        raise ManifestError(f"{service['metadata']['name']}: protocol {model['protocolVersion']} is not offered")
    spec = copy.deepcopy(_core_part(runtime)["spec"])
    [container] = spec["containers"]
    container["args"] = [each.replace("{{.Name}}", service["metadata"]["name"]) for each in container["args"]]
    container["env"] = container["env"] + model.get("env", [])
    container.update({key: model[key] for key in ("ports", "resources") if key in model})
    claim, _, folder = model["storageUri"].removeprefix("pvc://").partition("/")
    mount = {"name": "kserve-pvc-source", "mountPath": "/mnt/models", "subPath": folder, "readOnly": True}
    container["volumeMounts"].append(mount)
    volume = {"name": "kserve-pvc-source", "persistentVolumeClaim": {"claimName": claim}}
    spec["volumes"].append(volume)
    for key in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken"):
        spec[key] = predictor[key]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": service["metadata"]["name"]}, "spec": spec}


def kserve(name: str) -> Document:
    """The pod of an InferenceService of ours."""
    return kserve_pod(manifest("kserve/serving-runtime.yaml"), manifest(name))


def pod_of(document: Document) -> Document:
    return dict(document["spec"]["template"]["spec"] if document["kind"] != "Pod" else document["spec"])


def container_of(document: Document) -> Document:
    [container] = pod_of(document)["containers"]
    return dict(container)


def flags(container: Document) -> dict[str, str]:
    return dict(each.removeprefix("--").split("=", 1) for each in container["args"] if each.startswith("--"))


def probes(container: Document) -> dict[str, Document]:
    return {kind: container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}


def check_ports(document: Document, service: Document | None = None) -> None:
    """The command line, the container's ports, the probes, the annotations and the Service name the same ports."""
    container = container_of(document)
    said = flags(container)
    listening = {"http": int(said["http-port"]), "grpc": int(said["grpc-port"])}
    named = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    admin = int(said["admin-port"])
    if service is not None and named != {**listening, "admin": admin}:
        raise ManifestError(f"containerPort: {named}, but the server is told {listening}")
    if not set(named.values()) <= {*listening.values(), admin} or said["host"] != "0.0.0.0":
        raise ManifestError(f"containerPort: {named}, but the server is told {listening} on {said['host']}")
    for kind, probe in probes(container).items():
        if named.get(probe["port"], probe["port"]) != listening["http"]:
            raise ManifestError(f"{kind}: port {probe['port']!r}, but HTTP is at {listening['http']}")
    if service is None:
        return
    annotations = document["spec"]["template"]["metadata"]["annotations"]
    if annotations["prometheus.io/port"] != str(admin):
        raise ManifestError(f"prometheus.io/port: {annotations['prometheus.io/port']}, expected {admin}")
    served = {each["name"]: named.get(each["targetPort"]) for each in service["spec"]["ports"]}
    outside = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    if served != listening or outside != listening:
        raise ManifestError(f"Service: ports {outside} lead to {served}, expected {listening}")


def check_selected(document: Document, *selecting: Document) -> None:
    """Everything that selects pods selects those of the Deployment."""
    labels = document["spec"]["template"]["metadata"]["labels"]
    for each in (document, *selecting):
        spec = each["spec"]
        selector = spec.get("podSelector", spec.get("selector"))
        wanted = selector.get("matchLabels", selector)
        if not wanted or any(labels.get(key) != value for key, value in wanted.items()):
            raise ManifestError(f"{each['kind']}: selects {wanted}, the pods are {labels}")


def check_grace(document: Document, drain_s: float) -> None:
    """Kubernetes waits longer than the server may take to stop: `drain_s` and as long as all else takes."""
    needed = container_of(document)["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s + FRONT_ENDS_S
    given = pod_of(document)["terminationGracePeriodSeconds"]
    if given <= needed:
        raise ManifestError(f"terminationGracePeriodSeconds: {given}, expected more than {needed:g}")


def check_cores(document: Document) -> None:
    """What the CPU manager policy "static" asks for: Guaranteed, and whole CPUs, in every container."""
    pod = pod_of(document)
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        requests, limits = container["resources"].get("requests"), container["resources"].get("limits")
        if requests != limits or set(limits or {}) < {"cpu", "memory"}:
            raise ManifestError(f"resources: requests {requests} and limits {limits}, expected the same cpu and memory")
        if not str(limits["cpu"]).isdigit():
            raise ManifestError(f"resources: cpu {limits['cpu']!r}, expected a whole number")


def check_written(document: Document) -> None:
    """The root and the models cannot be written; cotenant's own files and temporary ones can."""
    container = container_of(document)
    safe = {**pod_of(document).get("securityContext", {}), **container["securityContext"]}
    if not (safe.get("runAsNonRoot") and safe.get("readOnlyRootFilesystem") and safe.get("runAsUser", 0) > 0):
        raise ManifestError(f"securityContext: {safe}, expected no root and a read-only root")
    volumes = {each["name"]: each for each in pod_of(document)["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    models, repository = container["args"][:2]
    for path in (repository, "/tmp"):
        if path not in mounts or mounts[path].get("readOnly") or "emptyDir" not in volumes[mounts[path]["name"]]:
            raise ManifestError(f"volumeMounts: {path} is not an emptyDir that can be written")
    if not mounts[models].get("readOnly") or "persistentVolumeClaim" not in volumes[mounts[models]["name"]]:
        raise ManifestError(f"volumeMounts: {models} is not a claim that is only read")


def server_config(folder: str, to: Path) -> Path:
    """Write a ConfigMap's files where its volume would show them."""
    to.mkdir(exist_ok=True)
    for name, text in manifest(f"{folder}/config.yaml")["data"].items():
        (to / name).write_text(text, encoding="utf-8")
    return to / "cotenant.toml"


def containerfile() -> list[tuple[str, str]]:
    """Instructions of the Containerfile and their arguments."""
    lines = (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(first, rest) for first, rest in pairs]
