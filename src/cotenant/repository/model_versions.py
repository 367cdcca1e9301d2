"""The model repository on disk: directories with `config.toml` and `VERSION/model.onnx`, or `model.pt2`.

A directory whose `config.toml` has `[application]` holds no model: it says which models work together.

Finds models, opens none.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cotenant.config import ModelConfig, load_model_config
from cotenant.errors import ConfigError, CotenantError
from cotenant.files import MOST_TOML_BYTES, read_bytes
from cotenant.repository.foreign import foreign_words
from cotenant.repository.formats import formats
from cotenant.repository.paths import CONFIG_FILE
from cotenant.types import priority_rank

_log = logging.getLogger("cotenant.repository")
_told: set[tuple[Path, str]] = set()
"""Directories that were left out with a warning."""
_MOST_DIGITS = 18
"""Of a version's number, which is a 64-bit integer on the wire."""


class UnknownModelError(ConfigError):
    """The repository has no directory of that name."""


class UnknownApplicationError(UnknownModelError):
    """The repository has no application of that name."""


_APPLICATION = re.compile(r"^\s*\[\[?\s*application\s*[].]", re.MULTILINE)
"""Told by its text, so that an application whose file is no valid TOML is called one in the error."""


def within(root: Path, text: object) -> str:
    """A sentence for clients, whom the place of the repository on this machine is none of: paths from there on."""
    return str(text).replace(f"{root}{os.sep}", "").replace(str(root), root.name)


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
    return tuple(name for name in _folders(root) if not _declares_one(root / name))


def application_names(root: Path) -> tuple[str, ...]:
    """The directories that are, or are meant to be, applications. Raises ConfigError when `root` is not a directory."""
    return tuple(name for name in _folders(root) if _declares_one(root / name))


def is_application(root: Path, name: str) -> bool:
    """Whether the repository has a directory of this name that declares an application, rightly or not."""
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
    """Whether the name of a directory is UTF-8, as names on the wire are; another one is told to the log, once."""
    try:
        name.encode()
    except UnicodeEncodeError:
        if (root, name) not in _told:
            _told.add((root, name))
            text = "%s: the directory %s is left out, as its name is not UTF-8; give it another name"
            _log.warning(text, root, ascii(name))
        return False
    return True


def readable_versions(root: Path) -> Iterator[ModelVersion]:
    """The versions of all models, without directories that are wrong."""
    for name in model_names(root):
        try:
            yield from find_versions(root, name, {})
        except CotenantError:
            continue


def default_version(root: Path, model: str) -> ModelVersion:
    """The newest version of a model whose directory is right. Raises ConfigError when there is none."""
    return find_versions(root, model, {})[-1]


def find_versions(root: Path, model: str, errors: dict[str, str] | None = None) -> tuple[ModelVersion, ...]:
    """All versions of a model, the oldest first; the highest number is the default one.

    The number is what counts: `1` and `01` are one version, of which a model has one. `errors` gets the reasons why
    directories of versions are left out, by name. Raises ConfigError when no version is left, and without `errors` for
    the first directory that is wrong.
    """
    if model not in _folders(root):  # a path from a client, '..' say, must not lead out of the repository
        raise UnknownModelError(f"model {model!r}: there is no such directory in the repository")
    if _declares_one(root / model):
        raise ConfigError(f"{root / model}: is an application, expected a model; its stages have models of their own")
    folder = root / model
    if not (folder / CONFIG_FILE).exists():
        foreign = "" if any(map(_is_version, folder.iterdir())) else foreign_words(folder)
        write = f"'cotenant init {root}' measures the model and writes it; by hand: [tenant], and below it slo_ms = 100"
        raise ConfigError(f"{folder / CONFIG_FILE}: is missing; {foreign or write}")
    config = load_model_config(folder / CONFIG_FILE)
    entries = sorted(entry for entry in folder.iterdir() if _is_version(entry))
    if not entries:
        raise ConfigError(f"{folder}: has no version, expected a directory '1' with a file such as model.onnx in it")
    found: dict[int, Path] = {}
    wrong: dict[str, ConfigError] = {}
    for entry in entries:
        try:
            found[int(entry.name)] = _model_file(entry, entries)
        except ConfigError as error:
            wrong[entry.name] = error
    if wrong and (errors is None or not found):
        raise wrong[max(wrong, key=int)]
    if errors is not None:
        errors |= {name: str(error) for name, error in wrong.items()}
    latest = max(found)
    return tuple(ModelVersion(model, number, number == latest, found[number], config) for number in sorted(found))


def _is_version(entry: Path) -> bool:
    return entry.is_dir() and entry.name.isascii() and entry.name.isdigit()


def _model_file(folder: Path, versions: Iterable[Path]) -> Path:
    """The one model file of a version: two formats might not answer alike, so none of them wins.

    Raises ConfigError when the directory is wrong, by itself or beside those of the other `versions`.
    """
    if len(folder.name) > _MOST_DIGITS:
        raise ConfigError(f"{folder}: is no version, expected a number of at most {_MOST_DIGITS} digits")
    same = [repr(each.name) for each in versions if int(each.name) == int(folder.name)]
    if len(same) > 1:
        raise ConfigError(
            f"{folder.parent}: the directories {' and '.join(same)} are both version {int(folder.name)}, expected one "
            "of them; remove the other"
        )
    names = [each.file for each in formats().values()]
    found = [name for name in names if (folder / name).is_file()]
    if len(found) > 1:
        raise ConfigError(f"{folder}: holds {' and '.join(found)}, expected one of them; remove the other")
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
    """Models in the order in which a server loads them: by priority, then the smallest first, then what is wrong.

    The first ones may be loaded side by side. The others come when these are loaded: a model before them by name has
    the same tenant, which owns one model.
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
    """See to it that a tenant owns one model. `owners` gives the model by tenant. Raises ConfigError."""
    for each in found:
        owned = owners.get(each.tenant, each.model)
        if owned != each.model:
            raise ConfigError(
                f"model {each.model!r}: tenant {each.tenant!r} owns model {owned!r} already, and a tenant owns "
                "one model: give tenant.name another value in its config.toml"
            )
