"""Weights drawn by parameter name and seed: the same wherever the module is built, and no file of weights anywhere."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cotenant.zoo.errors import ZooError

if TYPE_CHECKING:
    from bench.zoo import Model

_GAIN = "seed_gain"
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SMALL = 0.02  # deviation of biases

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Array = NDArray[np.float32]


def gained(module: AnyModule, gain: float) -> AnyModule:
    """Return the module, marked to draw its own weight (not those of its children) `gain` times as large as usual.

    For the last layer of a residual branch, say: dozens of them at gain 1 would blow the signal up.
    """
    setattr(module, _GAIN, gain)
    return module


def seed_weights(module: nn.Module, seed: int) -> None:
    """Overwrite all parameters, and the statistics of batch normalisations; other buffers stay.

    Convolutions get variance 2 / fan-in, for the rectifier behind them (He et al., ICCV 2015, section 2.2). Other
    matrices get 1 / fan-in, embeddings 1, normalisations weights near 1; all times the square of `gained`'s factor.
    Biases are small and not zero, so that an engine that forgets one gives other outputs.
    """
    with torch.no_grad():
        for prefix, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                _draw(part, name, parameter, _generator(seed, f"{prefix}.{name}"))
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                rng = _generator(seed, f"{prefix}.statistics")
                assert part.running_mean is not None
                assert part.running_var is not None
                _fill(part.running_mean, 0.05 * _normal(rng, part.running_mean))
                _fill(part.running_var, rng.uniform(0.9, 1.1, tuple(part.running_var.shape)).astype(np.float32))


def examples(model: Model, batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Seeded inputs; see `bench.zoo.examples`."""
    if batch != 1 and not model.batched:
        raise ZooError(f"model {model.name!r}: its shapes are fixed, so batch is {batch}, expected 1")
    made: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in model.inputs.items():
        rng = _generator(seed, name)
        full = (batch, *shape[1:]) if model.batched else shape
        if np.issubdtype(np.dtype(dtype), np.floating):
            values: NDArray[Any] = rng.standard_normal(full, np.float32)
        else:
            values = rng.integers(0, model.limits.get(name, 2), full)
        made[name] = torch.from_numpy(np.ascontiguousarray(values.astype(dtype)))
    return made


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def _draw(part: nn.Module, name: str, parameter: torch.Tensor, rng: np.random.Generator) -> None:
    gain = float(getattr(part, _GAIN, 1.0))
    shape = tuple(parameter.shape)
    if isinstance(part, _NORMS) and name == "weight":
        _fill(parameter, gain * rng.uniform(0.9, 1.1, shape).astype(np.float32))
    elif isinstance(part, nn.Embedding):
        _fill(parameter, gain * _normal(rng, parameter))
    elif len(shape) < 2:
        _fill(parameter, _SMALL * _normal(rng, parameter))
    elif isinstance(part, _CONVOLUTIONS):
        _fill(parameter, gain * math.sqrt(2.0 / math.prod(shape[1:])) * _normal(rng, parameter))
    elif isinstance(part, _TRANSPOSED):
        # Every output sees kernel / stride of the kernel's positions, and [in, out / groups, ...] is the weight.
        fan_in = shape[0] // part.groups * math.prod(shape[2:]) / math.prod(part.stride)
        _fill(parameter, gain * math.sqrt(2.0 / fan_in) * _normal(rng, parameter))
    else:
        _fill(parameter, gain / math.sqrt(math.prod(shape[1:])) * _normal(rng, parameter))


def _normal(rng: np.random.Generator, like: torch.Tensor) -> Array:
    return rng.standard_normal(tuple(like.shape), np.float32)


def _fill(parameter: torch.Tensor, values: Array) -> None:
    parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
