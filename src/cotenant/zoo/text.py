"""BERT encoders in operator patterns that onnxruntime fuses on load: LayerNormalization, BiasGelu, scaled FusedMatMul.

Its fusions Attention and SkipLayerNormalization do not apply online. The first one matches only Unsqueeze of opset 12
and older; the second one needs a fixed sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cotenant.zoo.bert import MASKED, BertShape
from cotenant.zoo.graph import Array, GraphWriter

Weights = Callable[[str, tuple[int, ...]], Array]
"""(parameter name as in transformers' BertModel, its shape there) -> FP32 array."""


def seeded_weights(rng: np.random.Generator) -> Weights:
    """Weights drawn on demand: Glorot matrices, normal embeddings, layer norms with scale 1 and shift 0."""

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        if "LayerNorm" in name:
            return np.full(shape, 1.0 if name.endswith("weight") else 0.0, np.float32)
        if "embeddings" in name or len(shape) == 1:
            return rng.standard_normal(shape, np.float32) * np.float32(0.02)
        return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2.0 / sum(shape)))

    return draw


class _Encoder:
    def __init__(self, graph: GraphWriter, shape: BertShape, weights: Weights) -> None:
        self.graph = graph
        self.shape = shape
        self.weights = weights

    def linear(self, value: str, name: str, taken: int, made: int) -> str:
        """Append `value @ W.T + b` as MatMul and Add; the stored W is already transposed."""
        graph = self.graph
        weight = np.ascontiguousarray(self.weights(f"{name}.weight", (made, taken)).T)
        bias = self.weights(f"{name}.bias", (made,))
        product = graph.op("MatMul", [value, graph.constant(f"{name}.weight", weight)], f"{name}/matmul")
        return graph.op("Add", [product, graph.constant(f"{name}.bias", bias)], f"{name}/add")

    def layer_norm(self, value: str, name: str) -> str:
        graph, hidden = self.graph, self.shape.hidden
        scale = graph.constant(f"{name}.weight", self.weights(f"{name}.weight", (hidden,)))
        shift = graph.constant(f"{name}.bias", self.weights(f"{name}.bias", (hidden,)))
        return graph.op("LayerNormalization", [value, scale, shift], f"{name}/norm", axis=-1, epsilon=1e-12)

    def embed(self, input_ids: str) -> str:
        """Append word + position embeddings; the positions include the row of segment 0, the only one."""
        graph, shape = self.graph, self.shape
        prefix = "embeddings"
        words = self.weights(f"{prefix}.word_embeddings.weight", (shape.vocabulary, shape.hidden))
        positions = self.weights(f"{prefix}.position_embeddings.weight", (shape.positions, shape.hidden))
        segments = self.weights(f"{prefix}.token_type_embeddings.weight", (2, shape.hidden))
        table = graph.constant(f"{prefix}.words", words)
        token = graph.op("Gather", [table, input_ids], f"{prefix}/words", axis=0)
        length = graph.op("Gather", [graph.op("Shape", [input_ids], f"{prefix}/shape"), graph.int64(1)], "length")
        table = graph.constant(f"{prefix}.positions", positions + segments[0])
        position = graph.op("Slice", [table, graph.int64(0), length, graph.int64(0)], f"{prefix}/positions")
        return self.layer_norm(graph.op("Add", [token, position], f"{prefix}/add"), f"{prefix}.LayerNorm")

    def attention_bias(self, attention_mask: str) -> str:
        """Append [batch, sequence] of 1 and 0 -> [batch, 1, 1, sequence] of 0 and `MASKED`."""
        graph = self.graph
        value = graph.op("Unsqueeze", [attention_mask, graph.int64(1)], "mask/heads")
        value = graph.op("Unsqueeze", [value, graph.int64(2)], "mask/queries")
        value = graph.op("Cast", [value], "mask/cast", to=1)
        value = graph.op("Sub", [graph.scalar(1.0), value], "mask/inverse")
        return graph.op("Mul", [value, graph.scalar(MASKED)], "mask/bias")

    def layer(self, value: str, bias: str, index: int) -> str:
        """Append one post-norm transformer layer."""
        graph, shape = self.graph, self.shape
        prefix = f"encoder.layer.{index}"
        head = shape.hidden // shape.heads

        def heads(which: str, perm: list[int]) -> str:
            part = self.linear(value, f"{prefix}.attention.self.{which}", shape.hidden, shape.hidden)
            part = graph.op("Reshape", [part, graph.int64(0, 0, shape.heads, head)], f"{prefix}/{which}/split")
            return graph.op("Transpose", [part], f"{prefix}/{which}/heads", perm=perm)

        queries = heads("query", [0, 2, 1, 3])
        keys = heads("key", [0, 2, 3, 1])
        values = heads("value", [0, 2, 1, 3])
        scores = graph.op("MatMul", [queries, keys], f"{prefix}/scores")
        scores = graph.op("Div", [scores, graph.scalar(math.sqrt(head))], f"{prefix}/scaled")
        scores = graph.op("Add", [scores, bias], f"{prefix}/masked")
        context = graph.op(
            "MatMul", [graph.op("Softmax", [scores], f"{prefix}/softmax", axis=-1), values], f"{prefix}/mix"
        )
        context = graph.op("Transpose", [context], f"{prefix}/mix/heads", perm=[0, 2, 1, 3])
        context = graph.op("Reshape", [context, graph.int64(0, 0, shape.hidden)], f"{prefix}/mix/join")
        context = self.linear(context, f"{prefix}.attention.output.dense", shape.hidden, shape.hidden)
        value = graph.op("Add", [context, value], f"{prefix}/attention/add")
        value = self.layer_norm(value, f"{prefix}.attention.output.LayerNorm")
        inner = self.gelu(self.linear(value, f"{prefix}.intermediate.dense", shape.hidden, shape.intermediate))
        inner = self.linear(inner, f"{prefix}.output.dense", shape.intermediate, shape.hidden)
        return self.layer_norm(
            graph.op("Add", [inner, value], f"{prefix}/feed_forward/add"), f"{prefix}.output.LayerNorm"
        )

    def gelu(self, value: str) -> str:
        """Append the exact Gelu, x * (1 + erf(x / sqrt 2)) * 0.5, which becomes one fused operator."""
        graph = self.graph
        inner = graph.op(
            "Erf", [graph.op("Div", [value, graph.scalar(math.sqrt(2.0))], f"{value}/div")], f"{value}/erf"
        )
        inner = graph.op("Add", [inner, graph.scalar(1.0)], f"{value}/plus")
        return graph.op("Mul", [graph.op("Mul", [value, inner], f"{value}/mul"), graph.scalar(0.5)], f"{value}/gelu")

    def run(self) -> tuple[str, str]:
        """Append the whole encoder; return the names of its last hidden state and of the mask input."""
        tokens = ("batch", "sequence")
        input_ids = self.graph.input("input_ids", np.int64, tokens)
        mask = self.graph.input("attention_mask", np.int64, tokens)
        value = self.embed(input_ids)
        bias = self.attention_bias(mask)
        for index in range(self.shape.layers):
            value = self.layer(value, bias, index)
        return value, mask


def bert(name: str, shape: BertShape, weights: Weights) -> GraphWriter:
    """BERT encoder with pooler (Devlin et al., NAACL 2019).

    Inputs `input_ids`, `attention_mask`: INT64 [batch, sequence], sequence at most `shape.positions`.
    Outputs `last_hidden_state`: FP32 [batch, sequence, hidden]; `pooler_output`: FP32 [batch, hidden].
    """
    graph = GraphWriter(name)
    encoder = _Encoder(graph, shape, weights)
    hidden, _ = encoder.run()
    graph.output("last_hidden_state", ("batch", "sequence", shape.hidden), hidden)
    first = graph.op("Gather", [hidden, graph.constant("first", np.array(0, np.int64))], "pooler/first", axis=1)
    pooled = graph.op("Tanh", [encoder.linear(first, "pooler.dense", shape.hidden, shape.hidden)], "pooler/tanh")
    graph.output("pooler_output", ("batch", shape.hidden), pooled)
    return graph


def sentence_encoder(name: str, shape: BertShape, weights: Weights) -> GraphWriter:
    """BERT encoder with mean pooling over the real tokens and L2 normalisation (Reimers & Gurevych, EMNLP 2019).

    Inputs as in `bert`. Output `sentence_embedding`: FP32 [batch, hidden], each row of norm 1.
    """
    graph = GraphWriter(name)
    hidden, mask = _Encoder(graph, shape, weights).run()
    weight = graph.op("Cast", [graph.op("Unsqueeze", [mask, graph.int64(2)], "pool/mask")], "pool/weight", to=1)
    total = graph.op(
        "ReduceSum", [graph.op("Mul", [hidden, weight], "pool/mul"), graph.int64(1)], "pool/sum", keepdims=0
    )
    count = graph.op("ReduceSum", [weight, graph.int64(1)], "pool/count", keepdims=0)
    mean = graph.op("Div", [total, graph.op("Max", [count, graph.scalar(1e-9)], "pool/max")], "pool/mean")
    norm = graph.op("ReduceL2", [mean], "norm/l2", axes=[1], keepdims=1)
    unit = graph.op("Div", [mean, graph.op("Max", [norm, graph.scalar(1e-12)], "norm/max")], "norm/div")
    graph.output("sentence_embedding", ("batch", shape.hidden), unit)
    return graph
