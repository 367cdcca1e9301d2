"""Tiny models, for measuring the overhead of a query, and a recommender."""

from __future__ import annotations

import math

import numpy as np

from cotenant.zoo.graph import GraphWriter

TABLES = 26
ROWS = 1000
DENSE = 13
_WIDTH = 16


def identity(_: np.random.Generator) -> GraphWriter:
    """One Identity node. Input `x`, output `y`: FP32 [batch, 16]."""
    graph = GraphWriter("identity")
    graph.output("y", ("batch", 16), graph.input("x", np.float32, ("batch", 16)))
    return graph


def tiny(rng: np.random.Generator) -> GraphWriter:
    """One Add of a seeded row, so that an answer depends on its input and the seed. FP32 [batch, 16] both ways."""
    graph = GraphWriter("tiny")
    row = graph.constant("row", rng.standard_normal((16,), np.float32))
    graph.output("y", ("batch", 16), graph.op("Add", [graph.input("x", np.float32, ("batch", 16)), row], "add"))
    return graph


def mlp_recommender(rng: np.random.Generator) -> GraphWriter:
    """A click predictor after DLRM (Naumov et al., 2019): embedding tables, pairwise products, two small MLPs.

    Inputs `dense`: FP32 [batch, 13]; `ids`: INT64 [batch, 26], each 0 <= id < 1000. Output `click`: FP32 [batch, 1].
    """
    graph = GraphWriter("mlp_recommender")

    def layer(value: str, name: str, taken: int, made: int, activation: str = "Relu") -> str:
        deviation = np.float32(math.sqrt(2.0 / taken if activation == "Relu" else 1.0 / taken))
        weight = graph.constant(f"{name}.weight", rng.standard_normal((taken, made), np.float32) * deviation)
        bias = graph.constant(f"{name}.bias", rng.standard_normal((made,), np.float32) * np.float32(0.02))
        return graph.op(activation, [graph.op("Gemm", [value, weight, bias], name)], f"{name}/act")

    value = layer(graph.input("dense", np.float32, ("batch", DENSE)), "bottom0", DENSE, 64)
    value = layer(value, "bottom1", 64, _WIDTH)
    ids = graph.input("ids", np.int64, ("batch", TABLES))
    offsets = graph.constant("offsets", np.arange(TABLES, dtype=np.int64) * ROWS)
    table = graph.constant("tables", rng.standard_normal((TABLES * ROWS, _WIDTH), np.float32))
    rows = graph.op("Gather", [table, graph.op("Add", [ids, offsets], "rows")], "lookup", axis=0)
    first = graph.op("Unsqueeze", [value, graph.int64(1)], "bottom/row")
    vectors = graph.op("Concat", [first, rows], "vectors", axis=1)
    products = graph.op("MatMul", [vectors, graph.op("Transpose", [vectors], "turned", perm=[0, 2, 1])], "products")
    products = graph.op("Mul", [products, graph.scalar(1.0 / math.sqrt(_WIDTH))], "scaled")
    features = graph.op("Concat", [value, graph.op("Flatten", [products], "pairs", axis=1)], "features", axis=1)
    value = layer(features, "top0", _WIDTH + (TABLES + 1) ** 2, 256)
    value = layer(value, "top1", 256, 64)
    graph.output("click", ("batch", 1), layer(value, "top2", 64, 1, "Sigmoid"))
    return graph
