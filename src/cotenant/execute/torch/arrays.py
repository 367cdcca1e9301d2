"""Conversion between numpy arrays and torch tensors without a copy; BF16, which numpy lacks, by its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def tensor_of(array: Any) -> torch.Tensor:
    """The tensor over an array's memory. Raises TypeError for an element type that torch lacks."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor, numpy: Callable[[torch.Tensor], Any] = torch.Tensor.numpy) -> Any:
    """The array over the memory of a tensor on the CPU, converted by `numpy`, for BF16 by its bits."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes  # defines the type; measuring a device does not need it

        return numpy(tensor.view(torch.uint16)).view(ml_dtypes.bfloat16)
    return numpy(tensor)


def to_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the results of `TorchModel.run` to numpy arrays; waits for a GPU."""
    return {
        name: array_of(value.detach().cpu().contiguous()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
