"""Construction of the quick-start model repository from installed packages and builders."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant.files import write_whole
from cotenant.zoo import QUICK_START, builders, carriers, catalogue
from cotenant.zoo.errors import ZooError

LABELS = "labels.txt"
"""File next to `config.toml` with the names of the classes of a classifier, one per line, in order."""

STAMP = ".zoo.json"
"""File next to `config.toml` with the origin of the files, so that a later run can keep them."""

RECIPE = 1
"""Version of the builders: increase it when their output changes, so that older repositories are renewed."""


def build_repository(
    root: Path,
    *,
    models: Sequence[str] | None = None,
    slos_ms: Mapping[str, int] = MappingProxyType({}),
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Write the repository, as `cotenant.zoo.build_repository`."""
    chosen = list(QUICK_START if models is None else models)
    for model in chosen:
        catalogue.entry(model)  # raises for an unknown name before anything is written
    made = []
    for model in chosen:
        renewed = _make(model, root / model, slos_ms.get(model))
        if renewed:
            made.append(model)
        if progress is not None:
            progress(f"{model}: {'written' if renewed else 'up to date'}")
    return made


def _make(model: str, directory: Path, slo_ms: int | None) -> bool:
    spec = catalogue.entry(model)
    stamp = _read_stamp(directory / STAMP)
    slo_ms = slo_ms or stamp.get("slo_ms") or spec.slo_ms
    origin = {"recipe": RECIPE, "weights": spec.carrier.requirement if spec.carrier else "seeded, seed 0"}
    model_file, labels_file, config_file = directory / "1" / "model.onnx", directory / LABELS, directory / "config.toml"
    same_model = (
        {key: stamp.get(key) for key in origin} == origin
        and model_file.is_file()
        and model_file.stat().st_size == stamp.get("model_bytes")
        and (labels_file.is_file() or not spec.labelled)
    )
    # Only an unedited config.toml is renewed; an edited one belongs to the user.
    config = catalogue.config_text(model, slo_ms).encode("utf-8")
    current = _digest(config_file.read_bytes()) if config_file.is_file() else None
    ours = current is None or current == stamp.get("config")
    if same_model and (current == _digest(config) or not ours):
        return False
    directory.mkdir(parents=True, exist_ok=True)
    if not same_model:
        model_file.parent.mkdir(parents=True, exist_ok=True)
        _write_model(model, model_file)
        if spec.labelled:
            write_whole(labels_file, "".join(f"{label}\n" for label in _labels(model)).encode("utf-8"))
    if ours:
        write_whole(config_file, config)
    written = {"model_bytes": model_file.stat().st_size, "config": _digest(config) if ours else stamp.get("config")}
    written |= {} if slo_ms == spec.slo_ms else {"slo_ms": slo_ms}
    write_whole(directory / STAMP, (json.dumps(origin | written, indent=1) + "\n").encode("utf-8"))
    return True


def _write_model(model: str, path: Path) -> None:
    spec = catalogue.entry(model)
    if spec.carrier is not None and spec.file is not None:
        write_whole(path, carriers.locate(spec.carrier, spec.file).read_bytes())
        return
    if spec.carrier is not None:
        # `build` would use seeded weights without the package, but this repository has trained ones.
        carriers.locate(spec.carrier, builders.MINILM_WEIGHTS)
    builders.build(model, path)


def _labels(model: str) -> list[str]:
    if model == "ocr_orientation":
        return ["0", "180"]  # degrees
    if model == "magika":
        source = carriers.locate(carriers.MAGIKA, "magika/models/standard_v3_3/config.min.json")
        return [str(label) for label in json.loads(source.read_text(encoding="utf-8"))["target_labels_space"]]
    if model == "ocr_recognition":
        import onnx

        source = carriers.locate(carriers.RAPIDOCR, catalogue.ENTRIES[model].file or "")
        properties = {p.key: p.value for p in onnx.load(os.fspath(source)).metadata_props}
        if "character" not in properties:
            raise ZooError(f"{source.name}: expected a metadata entry 'character', found {sorted(properties)}")
        # Class 0 is the blank of CTC and the last class is the space; the entry lists the others.
        return ["blank", *properties["character"].split("\n"), " "]
    raise ZooError(f"{model}: no source is known for the names of its classes")


def _read_stamp(path: Path) -> dict[str, Any]:
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
