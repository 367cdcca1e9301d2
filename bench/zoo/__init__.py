"""The networks of the papers as torch modules with seeded weights; one definition gives both `.pt2` and `.onnx`.

Importing this package is cheap: torch is loaded by the function that needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.zoo.errors import ZooError

if TYPE_CHECKING:
    import torch

__all__ = ["NAMES", "Definition", "Model", "define", "examples", "make", "save_onnx", "save_pt2"]

Inputs = Mapping[str, tuple[str, tuple[int, ...]]]
"""By input: numpy's name of the element type and the full shape at batch 1, the batch first."""

_MODULES: dict[str, str] = {
    "alexnet": "plain",
    "bert_base": "language",
    "bert_large": "language",
    "bst": "recommender",
    "densenet121": "densenet",
    "densenet161": "densenet",
    "efficientnet_b0": "mobile",
    "ensemble": "ensemble",
    "faster_rcnn": "rcnn",
    "faster_rcnn_by_class": "rcnn",
    "googlenet": "inception",
    "inception_v3": "inception",
    "lenet": "plain",
    "lstm_classifier": "recurrent",
    "mask_rcnn": "rcnn",
    "mask_rcnn_by_class": "rcnn",
    "mnasnet": "mobile",
    "mobilenet_v2": "mobile",
    "mobilenet_v3_large": "mobile",
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "resnet152": "resnet",
    "ssd_mobilenet": "detection",
    "ssd_mobilenet_by_class": "detection",
    "ssd_resnet34": "detection",
    "ssd_resnet34_by_class": "detection",
    "ssd_vgg16": "detection",
    "tiny_yolov2": "yolo",
    "vgg16": "plain",
    "vgg19": "plain",
}
"""By name of the model: the module of this package with it in its `DEFINITIONS`."""

NAMES: tuple[str, ...] = tuple(_MODULES)
"""What `make` accepts."""


@dataclass(frozen=True, slots=True)
class Definition:
    """What a family says of one of its models. The module's own initial weights are replaced by seeded ones.

    `module`: its `forward` takes the inputs by name and returns a tensor, a tuple or a dict of them: the outputs.
    `limits`: by integer input, the lowest number that it must not hold (2 where nothing is said).
    `batched`: the first dimension of every input and output is open. `slo_ms` is about five times the latency alone
    on one core.
    """

    module: torch.nn.Module
    inputs: Inputs
    outputs: tuple[str, ...]
    about: str
    batched: bool = True
    limits: Mapping[str, int] = field(default_factory=dict)
    slo_ms: int = 100
    max_batch: int = 8


@dataclass(frozen=True, slots=True)
class Model:
    """A module in evaluation mode with seeded weights; `Definition` says what the other fields mean."""

    name: str
    module: torch.nn.Module
    inputs: Inputs
    outputs: tuple[str, ...]
    batched: bool
    about: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    slo_ms: int = 100
    max_batch: int = 8


def define(name: str) -> Definition:
    """Return the definition of `name`, its weights whatever torch gives them.

    Under `torch.device("meta")` this allocates nothing.

    Raises:
        ZooError: `name` is not one of `NAMES`, or torch is not installed.
    """
    check_name(name)
    require_torch()
    family = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    definitions: Mapping[str, Callable[[], Definition]] = family.DEFINITIONS
    return definitions[name]()


def make(name: str, seed: int = 0) -> Model:
    """Return the model `name` with the weights that belong to `seed`, on the CPU; torch's own generator stays as it is.

    Raises:
        ZooError: `name` is not one of `NAMES`, or torch is not installed.
    """
    check_name(name)
    require_torch()
    import torch

    from bench.zoo.seeding import seed_weights

    with torch.random.fork_rng(devices=[]):
        made = define(name)
    seed_weights(made.module, seed)
    made.module.eval().requires_grad_(False)
    return Model(
        name,
        made.module,
        made.inputs,
        made.outputs,
        made.batched,
        about=made.about,
        limits=made.limits,
        slo_ms=made.slo_ms,
        max_batch=made.max_batch,
    )


def examples(model: Model, batch: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return seeded inputs by name: floats are standard normal, integers uniform below the model's limits.

    Raises:
        ZooError: `batch` is not 1 and the model is not batched.
    """
    from bench.zoo import seeding

    return seeding.examples(model, batch, seed)


def save_pt2(model: Model, path: Path) -> None:
    """Write the model as a `torch.export` archive; see `bench.zoo.export.save_pt2`."""
    from bench.zoo import export

    export.save_pt2(model, Path(path))


def save_onnx(model: Model, path: Path) -> None:
    """Write the model as an ONNX file; see `bench.zoo.export.save_onnx`."""
    from bench.zoo import export

    export.save_onnx(model, Path(path))


def check_name(name: str) -> None:
    """Raise ZooError, with the list of names, where `name` is not one of `NAMES`."""
    if name not in _MODULES:
        raise ZooError(f"model {name!r} is not in the zoo; expected one of: {', '.join(NAMES)}")


def require_torch() -> None:
    """Raise ZooError, with the command to install it, where torch is missing."""
    try:
        importlib.import_module("torch")
    except ImportError:
        raise ZooError(
            "the zoo's torch models need torch, which is missing; run: pip install 'cotenant[torch]'"
        ) from None
