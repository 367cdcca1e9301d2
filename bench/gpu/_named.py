"""Whether there is a GPU to measure, and running a few of the steps on it."""

from __future__ import annotations

import json

from bench._server import cache_folder
from bench.gpu.__main__ import parse
from bench.gpu._journal import Budget, Journal, MeasureError
from bench.gpu._profile import DEVICE
from bench.gpu._session import JOURNAL, measure

_BUDGET_S, _QUICK_BUDGET_S = 400.0, 40.0


def why_not() -> str:
    """Why nothing can be measured on a GPU here; "" when something can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install 'cotenant[torch]')"
    if not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "finds no GPU that it can use"
        return f"torch {torch.__version__} {built}"
    return ""


def measured(steps: str, quick: bool) -> tuple[Journal, dict[str, str]] | None:
    """Run steps on the first GPU: the journal, and what the GPU and its software are.

    With `quick` tiny models, for 40 s at most. None, after a line that says why, where there is no GPU.
    """
    reason = why_not()
    if reason:
        print(f"there is no GPU to measure: {reason}")
        return None
    options = ["--steps", steps, "--models", str(cache_folder() / "gpu-models")]
    options += ["--quick", "--fresh", "--out", str(cache_folder() / "gpu-quick")] if quick else []
    try:
        folder, is_complete = measure(parse(options), Budget(_QUICK_BUDGET_S if quick else _BUDGET_S), print)
    except MeasureError as error:
        print(f"the GPU cannot be measured: {error}")
        return None
    if quick:
        print("quick: tiny models, few runs; the figures say nothing of real models")
    elif not is_complete:
        print("not everything is measured yet: run it again, it goes on where it stopped")
    device = json.loads((folder / DEVICE).read_text(encoding="utf-8"))["device"]
    versions = {key: device[key] for key in ("torch", "cuda", "driver")}
    return Journal(folder / JOURNAL), {"gpu": device["name"], **versions}
