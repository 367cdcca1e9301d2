"""A text classifier of LSTM layers (Hochreiter & Schmidhuber, Neural Computation 1997)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from bench.zoo import Definition


class LstmClassifier(nn.Module):
    """Tokens INT64 [batch, length] -> logits [batch, classes], from the last state of the last layer.

    Each layer is a module of its own, so that the graph can be left between them.
    """

    def __init__(
        self, vocabulary: int = 20000, embedding: int = 256, hidden: int = 512, layers: int = 2, classes: int = 2
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, embedding)
        taken = (embedding, *[hidden] * (layers - 1))
        self.layers = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True) for width in taken)
        self.head = nn.Linear(hidden, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the recurrence over the whole length."""
        x = self.words(input_ids)
        for layer in self.layers:
            x, _ = layer(x)
        logits: Tensor = self.head(x[:, -1])
        return logits


def definition(
    vocabulary: int = 20000,
    embedding: int = 256,
    hidden: int = 512,
    layers: int = 2,
    classes: int = 2,
    length: int = 64,
) -> Definition:
    """Return the classifier for texts of `length` tokens."""
    return Definition(
        LstmClassifier(vocabulary, embedding, hidden, layers, classes),
        {"input_ids": ("int64", (1, length))},
        ("logits",),
        "Two LSTM layers, a text classifier.",
        limits={"input_ids": vocabulary},
        slo_ms=110,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"lstm_classifier": definition}
