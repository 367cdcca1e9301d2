"""Models of a repository on disk: directories with `config.toml` and `VERSION/model.onnx` or `model.pt2`.

A directory with `[application]` in its `config.toml` is an application of several models. This module loads no model.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cotenant.config import NO_CONFIG, ModelConfig, load_model_config
from cotenant.errors import ConfigError, CotenantError
from cotenant.files import MOST_TOML_BYTES, read_bytes
from cotenant.repository.foreign import foreign_words
from cotenant.repository.formats import formats
from cotenant.repository.paths import CONFIG_FILE
from cotenant.types import priority_rank

_log = logging.getLogger("cotenant.repository")
_reported: set[tuple[Path, str]] = set()
"""Directories with a logged warning that they are left out."""
_MOST_DIGITS = 18
"""Most digits of the number of a version, which is a 64-bit integer on the wire."""


class UnknownModelError(ConfigError):
    """The repository has no directory with this name."""


class UnknownApplicationError(UnknownModelError):
    """The repository has no application with this name."""


_APPLICATION = re.compile(r"^\s*\[\[?\s*application\s*[].]", re.MULTILINE)
"""Recognises an application by the text of its file, even if that is not valid TOML."""


def within(root: Path, text: object) -> str:
    """A sentence for clients, with paths relative to the repository: its place on this machine stays private."""
    return str(text).replace(f"{root}{os.sep}", "").replace(str(root), root.name)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model on disk, not loaded."""

    model: str
    version: int
    is_default: bool
    path: Path
    config: ModelConfig

    @property
    def tenant(self) -> str:
        """Name in the core, in profiles, tables and metrics; an older version has its number in it."""
        name = self.config.tenant.name or self.model
        return name if self.is_default else f"{name}:{self.version}"


def model_names(root: Path) -> tuple[str, ...]:
    """Names of the directories of models, valid or not. Raises ConfigError when `root` is not a directory."""
    return tuple(name for name in _folders(root) if not _declares_one(root / name))


def application_names(root: Path) -> tuple[str, ...]:
    """Names of the directories of applications, valid or not. Raises ConfigError when `root` is not a directory."""
    return tuple(name for name in _folders(root) if _declares_one(root / name))


def is_application(root: Path, name: str) -> bool:
    """Whether the repository has a directory of this name with an application, valid or not."""
    return name in _folders(root) and _declares_one(root / name)


def _declares_one(folder: Path) -> bool:
    try:
        text = read_bytes(folder / CONFIG_FILE, ConfigError, most_bytes=MOST_TOML_BYTES).decode(errors="replace")
    except ConfigError:
        return False
    return _APPLICATION.search(text) is not None


def _folders(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        raise ConfigError(f"{root}: is not a directory, expected a model repository with MODEL/{CONFIG_FILE} in it")
    found = [entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return tuple(sorted(name for name in found if _is_text(root, name)))


def _is_text(root: Path, name: str) -> bool:
    """Whether the name of a directory is UTF-8, as names on the wire are; logs one warning if it is not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        if (root, name) not in _reported:
            _reported.add((root, name))
            text = "%s: the directory %s is left out, as its name is not UTF-8; give it another name"
            _log.warning(text, root, ascii(name))
        return False
    return True


def readable_versions(root: Path) -> Iterator[ModelVersion]:
    """The versions of all models, without invalid directories."""
    for name in model_names(root):
        try:
            yield from find_versions(root, name, {})
        except CotenantError:
            continue


def default_version(root: Path, model: str) -> ModelVersion:
    """The newest valid version of a model. Raises ConfigError if there is none."""
    return find_versions(root, model, {})[-1]


def find_versions(root: Path, model: str, errors: dict[str, str] | None = None) -> tuple[ModelVersion, ...]:
    """All versions of a model, oldest first; the highest number is the default.

    `1` and `01` are the same version, which a model may have once. `errors` gets the reasons for invalid directories,
    by name. Raises ConfigError with all problems when no version is left, or when `config.toml` has a problem; without
    `errors`, for the first invalid directory as well.
    """
    wrong: dict[str, str] = {}
    faults: list[str] = []
    found = examine(root, model, wrong, faults)
    if faults or not found or (wrong and errors is None):
        raise ConfigError(*dict.fromkeys((*faults, *wrong.values())))
    if errors is not None:
        errors |= wrong
    return found


def examine(root: Path, model: str, errors: dict[str, str], faults: list[str]) -> tuple[ModelVersion, ...]:
    """As `find_versions`, without an end at the first problem: `faults` gets those of the model and its `config.toml`.

    Versions have the valid keys of the configuration. Raises UnknownModelError, and ConfigError for an application.
    """
    if model not in _folders(root):  # a path from a client, such as '..', must not leave the repository
        raise UnknownModelError(f"model {model!r}: there is no such directory in the repository")
    if _declares_one(root / model):
        raise ConfigError(f"{root / model}: is an application, expected a model; its stages have their own models")
    folder, config = root / model, NO_CONFIG
    if not (folder / CONFIG_FILE).exists():
        foreign = "" if any(map(_is_version, folder.iterdir())) else foreign_words(folder)
        write = f"'cotenant init {root}' measures the model and writes it; by hand: [tenant], and below it slo_ms = 100"
        faults.append(f"{folder / CONFIG_FILE}: is missing; {foreign or write}")
    else:
        try:
            config = load_model_config(folder / CONFIG_FILE, faults)
        except ConfigError as error:
            faults += error.problems
    entries = sorted(entry for entry in folder.iterdir() if _is_version(entry))
    if not entries and (folder / CONFIG_FILE).exists():
        faults.append(f"{folder}: has no version, expected a directory '1' with a file such as model.onnx in it")
    found: dict[int, Path] = {}
    for entry in entries:
        try:
            found[int(entry.name)] = _model_file(entry, entries)
        except ConfigError as error:
            errors[entry.name] = str(error)
    latest = max(found, default=0)
    return tuple(ModelVersion(model, number, number == latest, found[number], config) for number in sorted(found))


def _is_version(entry: Path) -> bool:
    return entry.is_dir() and entry.name.isascii() and entry.name.isdigit()


def _model_file(folder: Path, versions: Iterable[Path]) -> Path:
    """The model file of a version. Several formats are refused, since their results may differ.

    Raises ConfigError for an invalid directory, or one with the number of another of `versions`.
    """
    if len(folder.name) > _MOST_DIGITS:
        raise ConfigError(f"{folder}: is not a version, expected a number of at most {_MOST_DIGITS} digits")
    same = [repr(each.name) for each in versions if int(each.name) == int(folder.name)]
    if len(same) > 1:
        raise ConfigError(
            f"{folder.parent}: the directories {' and '.join(same)} are both version {int(folder.name)}, expected one "
            "of them; remove the other"
        )
    names = [each.file for each in formats().values()]
    found = [name for name in names if (folder / name).is_file()]
    if len(found) > 1:
        raise ConfigError(f"{folder}: has {' and '.join(found)}, expected one of them; remove the other")
    if odd := [name for name in names if not found and (folder / name).exists()]:
        raise ConfigError(
            f"{folder / odd[0]}: is a directory, a device, a FIFO or a socket, expected a regular file; remove it"
        )
    if not found:
        others = ", ".join(names[1:])
        words = foreign_words(folder) or f"put the model's file there, or one of {others}, or remove the directory"
        raise ConfigError(f"{folder / names[0]}: is missing; {words}")
    return folder / found[0]


def load_order(root: Path, models: Iterable[str]) -> tuple[list[str], list[str]]:
    """Models in the order in which a server loads them, as two lists.

    The first list is by priority, then by size, then invalid models; these may load concurrently. The second list loads
    afterwards: each has the tenant of an earlier model by name, and a tenant owns one model.
    """
    owners: dict[str, str] = {}
    rest: list[str] = []
    keys: dict[str, tuple[bool, int, int]] = {}
    for name in sorted(models):
        try:
            newest = default_version(root, name)
            size = sum([file.stat().st_size for file in newest.path.parent.iterdir()])
            keys[name] = False, priority_rank(newest.config.tenant.priority), size
            if owners.setdefault(newest.tenant, name) != name:
                rest.append(name)
        except (CotenantError, OSError):
            keys[name] = True, 0, 0
    return sorted(keys.keys() - set(rest), key=lambda name: (*keys[name], name)), rest


def check_owners(found: Iterable[ModelVersion], owners: Mapping[str, str]) -> None:
    """Raise ConfigError if a tenant owns several models. `owners` is the model by tenant."""
    for each in found:
        owned = owners.get(each.tenant, each.model)
        if owned != each.model:
            raise ConfigError(
                f"model {each.model!r}: tenant {each.tenant!r} already owns model {owned!r}, and a tenant owns "
                "one model: set tenant.name to another value in its config.toml"
            )
