"""Model files outside of a repository: those that `cotenant init` takes over, and what to do with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cotenant.errors import ConfigError
from cotenant.repository.foreign import entries_of, files_of, foreign_words, remedy_of
from cotenant.repository.formats import formats
from cotenant.repository.model_versions import application_names, model_names
from cotenant.repository.paths import CONFIG_FILE

_GENERIC = ("model", "onnx", "")
"""Stems of files that say nothing of the model: the directory gives the name."""


@dataclass(frozen=True, slots=True)
class BareModel:
    """A model file and the name that the model gets. `is_placed`: it lies at NAME/VERSION/model.SUFFIX already."""

    name: str
    path: Path
    is_placed: bool = False


def sources_of(path: Path) -> list[BareModel]:
    """The models of a file or a directory, by name: bare files, and directories that lack only their configuration.

    A directory may hold bare files, `NAME/VERSION/model.onnx` as Triton has them, and `NAME/onnx/model.onnx` as exports
    for transformers have them. `NAME/FILE.onnx` counts where it is the only one. Raises ConfigError where there is no
    model; the error names files of other formats with what to do.
    """
    if path.is_dir():
        found = sorted(_of_directory(path), key=lambda source: source.name)
        if not found:
            raise ConfigError(f"{path}: has no model file to take over; {foreign_words(path) or _expected()}")
        return found
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory")
    if path.suffix not in formats():
        raise ConfigError(f"{path}: {remedy_of(path) or _expected()}")
    return [BareModel(_name(path), path)]


def barefiles_of(root: Path) -> list[Path]:
    """Model files right in a directory, where a repository has none."""
    return [path for path in files_of(root) if path.suffix in formats()]


def bare_words(root: Path) -> str:
    """What to do with model files that lie right in a repository; empty where there are none."""
    files = barefiles_of(root)
    if not files:
        return ""
    names = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
    have = "1 model file has" if len(files) == 1 else f"{len(files)} model files have"
    return f"{have} no directory of a model ({names}): run 'cotenant init {root}'"


def check_not_empty(root: Path) -> None:
    """Raise ConfigError where a repository has no model and no application, with what to do about it."""
    if model_names(root) or application_names(root):
        return
    words = bare_words(root) or foreign_words(root) or "run 'cotenant init FILE.onnx', or 'cotenant models --build'"
    raise ConfigError(f"{root}: has no models; {words}")


def _of_directory(root: Path) -> Iterator[BareModel]:
    if versions := list(_placed(root)):
        yield BareModel(root.name, versions[-1], is_placed=True)
        return
    for path in barefiles_of(root):
        yield BareModel(_name(path), path)
    for folder in entries_of(root):
        if not folder.is_dir() or folder.name.startswith(".") or (folder / CONFIG_FILE).exists():
            continue
        if versions := list(_placed(folder)):
            yield BareModel(folder.name, versions[-1], is_placed=True)
        elif len(inside := barefiles_of(folder) or barefiles_of(folder / "onnx")) == 1:
            yield BareModel(folder.name, inside[0])


def _placed(folder: Path) -> Iterator[Path]:
    """The model files of numbered versions in a directory, the newest last."""
    numbered = [entry for entry in entries_of(folder) if entry.name.isascii() and entry.name.isdigit()]
    for version in sorted(numbered, key=lambda entry: int(entry.name)):
        for each in formats().values():
            if (version / each.file).is_file():
                yield version / each.file


def _name(path: Path) -> str:
    """The file's stem; where that says nothing, the name of the first directory above that does."""
    for text in (path.stem, *(parent.name for parent in path.resolve().parents)):
        if text not in _GENERIC and not text.isdigit():
            return text
    return "model"


def _expected() -> str:
    return f"expected a file that ends in {' or '.join(formats())}, or a directory with such files"
