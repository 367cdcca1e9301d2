"""The model repository on disk: directories with `config.toml` and `VERSION/model.onnx`, or `model.pt2`.

Finds models, opens none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cotenant.config import ModelConfig, load_model_config
from cotenant.errors import ConfigError

MODEL_FILE = "model.onnx"
TORCH_FILE = "model.pt2"
CONFIG_FILE = "config.toml"
STATE_FOLDER = ".cotenant"
"""Beside the models: the profile, optimised graphs and the trace. May be removed at any time."""
SERVER_FILE = "cotenant.toml"


class UnknownModelError(ConfigError):
    """The repository has no directory of that name."""


def profile_path(root: Path) -> Path:
    """Where the profile of a repository lies."""
    return root / STATE_FOLDER / "profile.json"


def trace_path(root: Path) -> Path:
    """Where the server that serves a repository writes its trace."""
    return root / STATE_FOLDER / "trace.jsonl"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of one model, found on disk and not yet opened."""

    model: str
    version: int
    is_default: bool
    path: Path
    config: ModelConfig

    @property
    def tenant(self) -> str:
        """The name in the core, in profiles, tables and metrics: older versions carry their number."""
        name = self.config.tenant.name or self.model
        return name if self.is_default else f"{name}:{self.version}"


def model_names(root: Path) -> tuple[str, ...]:
    """The directories that are, or are meant to be, models; none in an empty repository.

    Raises ConfigError when `root` is not a directory.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: is not a directory, expected a model repository with MODEL/{CONFIG_FILE} in it")
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def find_versions(root: Path, model: str) -> tuple[ModelVersion, ...]:
    """All versions of a model, the oldest first; the highest number is the default one. Raises ConfigError."""
    if model not in model_names(root):  # a path from a client, '..' say, must not lead out of the repository
        raise UnknownModelError(f"model {model!r}: there is no such directory in the repository")
    folder = root / model
    config = load_model_config(folder / CONFIG_FILE)
    numbers = sorted(
        int(entry.name)
        for entry in folder.iterdir()
        if entry.is_dir() and entry.name.isascii() and entry.name.isdigit()
    )
    if not numbers:
        raise ConfigError(f"{folder}: has no version, expected a directory '1' with {MODEL_FILE} in it")
    versions = []
    for number in numbers:
        path = _model_file(folder / str(number))
        versions.append(ModelVersion(model, number, number == numbers[-1], path, config))
    return tuple(versions)


def _model_file(folder: Path) -> Path:
    """The one model file of a version: two formats might not answer alike, so none of them wins."""
    onnx, torch = folder / MODEL_FILE, folder / TORCH_FILE
    if onnx.is_file() and torch.is_file():
        raise ConfigError(f"{folder}: holds {MODEL_FILE} and {TORCH_FILE}, expected one of them; remove the other")
    if torch.is_file():
        return torch
    if not onnx.is_file():
        raise ConfigError(
            f"{onnx}: is missing; put the ONNX file there, or a torch.export archive as {TORCH_FILE}, or remove the "
            "directory"
        )
    return onnx


def check_owners(found: Iterable[ModelVersion], owners: Mapping[str, str]) -> None:
    """See to it that a tenant owns one model. `owners` gives the model by tenant. Raises ConfigError."""
    for each in found:
        owned = owners.get(each.tenant, each.model)
        if owned != each.model:
            raise ConfigError(
                f"model {each.model!r}: tenant {each.tenant!r} owns model {owned!r} already, and a tenant owns "
                "one model: give tenant.name another value in its config.toml"
            )
