"""A model repository of the zoo's torch models, as ONNX files or as `torch.export` archives."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.zoo import Model, check_name, make, require_torch
from cotenant.zoo import catalogue
from cotenant.zoo.errors import ZooError

Format = Literal["onnx", "pt2"]
FORMATS: tuple[Format, ...] = ("onnx", "pt2")

STAMP = ".zoo.json"
"""Beside `config.toml`: what the files were made from, so that a second run can leave them alone."""

RECIPE = 1
"""Raise it when a definition changes what it computes or declares, so that repositories made before are renewed."""


def build_repository(
    roots: dict[Format, Path],
    names: Sequence[str],
    *,
    seed: int = 0,
    progress: Callable[[str, str], None] | None = None,
) -> list[str]:
    """Make `root/<name>/config.toml` and `root/<name>/1/model.<format>` in the root of each format.

    Files that are up to date are left alone, and so is a `config.toml` that was edited. `progress` gets a model's name
    and the step. Returns the names of the models of which something was written.

    Raises:
        ZooError: an unknown name (before anything is written). Also where torch or onnxscript is not installed, or a
            folder holds a model file that the zoo did not write.
    """
    for name in names:
        check_name(name)
    require_torch()
    tell = progress or (lambda name, what: None)
    made: list[str] = []
    for name in dict.fromkeys(names):
        folders = {form: root / name for form, root in roots.items()}
        stale = {form: folder for form, folder in folders.items() if not _current(folder, form, seed)}
        if not stale:
            tell(name, "up to date")
            continue
        for form, folder in stale.items():
            _claim(folder, form, seed)
        tell(name, "building")
        _write_model(make(name, seed), stale, seed)
        made.append(name)
        tell(name, "written")
    return made


def config_text(model: Model) -> str:
    """Return the `config.toml` of a model: its example shapes declared, its batch and its latency target."""
    spec = catalogue.Entry(
        about=f"{model.about} Seeded weights: the work of the network, not its answers.",
        slo_ms=model.slo_ms,
        max_batch=model.max_batch if model.batched else 1,
        batch_note="" if model.batched else "its shapes are fixed",
        shapes=({name: shape for name, (_, shape) in model.inputs.items()},),
        carrier=None,
    )
    return catalogue.entry_text(model.name, spec)


def _model_file(folder: Path, form: Format) -> Path:
    return folder / "1" / f"model.{form}"


def _origin(form: Format, seed: int) -> dict[str, Any]:
    # Another torch may trace another graph, and may not read the archives of this one.
    return {"recipe": f"torch {RECIPE}", "seed": seed, "format": form, "torch": importlib.metadata.version("torch")}


def _current(folder: Path, form: Format, seed: int) -> bool:
    stamp, file, wanted = _read_stamp(folder), _model_file(folder, form), _origin(form, seed)
    return (
        {key: stamp.get(key) for key in wanted} == wanted
        and file.is_file()
        and file.stat().st_size == stamp.get("model_bytes")
        and (folder / "config.toml").is_file()
    )


def _claim(folder: Path, form: Format, seed: int) -> None:
    """See to it that the folder has no model but one of the zoo's; one in another format makes way.

    The stamp is laid down first, so that a build which was broken off is known as the zoo's by the next one.
    """
    stamp = _read_stamp(folder)
    for other in FORMATS:
        file = _model_file(folder, other)
        if not file.exists():
            continue
        if not stamp:
            raise ZooError(
                f"{file}: was not written by the zoo, so it is not replaced; remove it or choose another DIR"
            )
        if other != form:
            file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    _write_stamp(folder, _origin(form, seed) | {"config": stamp.get("config")})


def _write_model(model: Model, folders: dict[Format, Path], seed: int) -> None:
    from bench.zoo import export

    program = export.exported(model)
    savers = {"onnx": export.save_onnx, "pt2": export.save_pt2}
    config = config_text(model).encode("utf-8")
    for form, folder in folders.items():
        stamp, file, config_file = _read_stamp(folder), _model_file(folder, form), folder / "config.toml"
        savers[form](model, file, program)
        # A config.toml is ours to renew only while it is what we wrote; after an edit it belongs to the user.
        found = _digest(config_file.read_bytes()) if config_file.is_file() else None
        ours = found is None or found == stamp.get("config")
        if ours:
            config_file.write_bytes(config)
        written = {"model_bytes": file.stat().st_size, "config": _digest(config) if ours else stamp.get("config")}
        _write_stamp(folder, _origin(form, seed) | written)


def _read_stamp(folder: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    (folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
