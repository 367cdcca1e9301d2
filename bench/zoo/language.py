"""BERT encoders (Devlin et al., NAACL 2019, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import Definition
from cotenant.zoo.bert import BERT_BASE, BERT_LARGE, MASKED, BertShape


class BertLayer(nn.Module):
    """One post-norm transformer layer: [batch, length, hidden] -> the same; `bias` is added to the scores."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)
        self.mix = nn.Linear(shape.hidden, shape.hidden)
        self.mix_norm = nn.LayerNorm(shape.hidden, eps=1e-12)
        self.inner = nn.Linear(shape.hidden, shape.intermediate)
        self.outer = nn.Linear(shape.intermediate, shape.hidden)
        self.outer_norm = nn.LayerNorm(shape.hidden, eps=1e-12)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend to the other tokens, then transform each alone."""

        def split(part: Tensor) -> Tensor:
            return torch.unflatten(part, 2, (self.heads, -1)).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), attn_mask=bias
        )
        x = self.mix_norm(x + self.mix(mixed.transpose(1, 2).flatten(2)))
        y: Tensor = self.outer_norm(x + self.outer(functional.gelu(self.inner(x))))
        return y


class Bert(nn.Module):
    """Encoder with pooler for texts of one segment.

    Input: `input_ids` and `attention_mask` (1 for a token, 0 for padding), INT64 [batch, length].
    Output: last hidden state [batch, length, hidden] and the pooled first token [batch, hidden].
    """

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.segments = nn.Embedding(2, shape.hidden)
        self.embedding_norm = nn.LayerNorm(shape.hidden, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(shape) for _ in range(shape.layers))
        self.pooler = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of texts."""
        place = self.positions.weight[: input_ids.shape[1]] + self.segments.weight[0]
        x = self.embedding_norm(self.words(input_ids) + place)
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * MASKED
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pooler(x[:, 0]))


def definition(shape: BertShape, about: str, slo_ms: int, length: int = 128) -> Definition:
    """Return the encoder of this shape for texts of `length` tokens; its batch is open, its length is not."""
    return Definition(
        Bert(shape),
        {"input_ids": ("int64", (1, length)), "attention_mask": ("int64", (1, length))},
        ("last_hidden_state", "pooler_output"),
        about,
        limits={"input_ids": shape.vocabulary},
        slo_ms=slo_ms,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "bert_base": lambda: definition(BERT_BASE, "BERT-base, a text encoder.", 1000),
    "bert_large": lambda: definition(BERT_LARGE, "BERT-large, a text encoder.", 3500),
}
