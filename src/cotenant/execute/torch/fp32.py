"""Whether FP32 products of GPUs run in TF32: torch has one setting for a process, so the models in it must agree."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakKeyDictionary

import torch


class Claimant(Protocol):
    """A model that claims the setting, by its name in messages."""

    name: str


_claims: WeakKeyDictionary[Claimant, str] = WeakKeyDictionary()
_lock = threading.Lock()


def claim_fp32(model: Claimant, precision: str) -> str:
    """Have FP32 products run in "fp32" or "tf32" until the model lets go; other precisions need nothing.

    Gives the name of a model that holds the setting at the other value, then nothing is changed, or "".
    """
    if precision not in ("fp32", "tf32"):
        return ""
    with _lock:
        for each, claimed in _claims.items():
            if each is not model and claimed != precision:
                return each.name
        _claims[model] = precision
        # The older of torch's two interfaces: reading by either still works then, in 2.11 to 2.13.
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        return ""


def release_fp32(model: Claimant) -> None:
    """The model runs no more."""
    with _lock:
        _claims.pop(model, None)
