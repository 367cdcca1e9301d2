"""Datatypes of tensors: onnxruntime's names and the numpy types."""

from __future__ import annotations

from typing import Any

import numpy as np

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({k}{b})": np.dtype(f"{k}{b}") for k in ("int", "uint") for b in (8, 16, 32, 64)},
}
"""Types of which onnxruntime accepts and returns numpy arrays."""


def numpy_type(dtype: str) -> np.dtype[Any] | None:
    """The numpy type of `dtype`, for example `tensor(float)`; None when there is none.

    onnxruntime takes text as arrays of objects. Only torch takes BF16.
    """
    if dtype == "tensor(bfloat16)":
        import ml_dtypes  # defines the type; measuring a device does not need it

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(np.str_) if dtype == "tensor(string)" else NUMPY_TYPES.get(dtype)
