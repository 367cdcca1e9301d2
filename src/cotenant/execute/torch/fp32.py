"""Whether FP32 products on GPUs use TF32: torch has one setting for a process, so its models must agree."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakKeyDictionary

import torch


class Claimant(Protocol):
    """A model that claims the setting; `name` is its name in messages."""

    name: str


_claims: WeakKeyDictionary[Claimant, str] = WeakKeyDictionary()
_lock = threading.Lock()


def claim_fp32(model: Claimant, precision: str) -> str:
    """Set FP32 products to "fp32" or "tf32" until the model is released; other precisions need no setting.

    Returns "", or the name of a model that claims the other value; then nothing changes.
    """
    if precision not in ("fp32", "tf32"):
        return ""
    with _lock:
        for each, claimed in _claims.items():
            if each is not model and claimed != precision:
                return each.name
        _claims[model] = precision
        # torch's older interface: torch 2.11 to 2.13 can then read the setting by both interfaces.
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        return ""


def release_fp32(model: Claimant) -> None:
    """Release the claim of a model."""
    with _lock:
        _claims.pop(model, None)
