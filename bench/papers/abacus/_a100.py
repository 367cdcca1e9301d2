"""The A100 as a released network of weights knows it: latencies of groups of segments of the paper's models.

The network was fitted by the authors of Abacus to measurements of pairs of seven models on one A100. It is a world to
simulate, not the truth: see the README beside the data for what it gets wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench._data import read_rows
from bench._registry import BenchError
from bench._weights import find_weights
from cotenant.core.predictor import Group

NS_PER_MS = 1_000_000
BATCHES = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """One model of the experiments: its place in the network's input, its operators and its sequence lengths."""

    name: str
    index: int
    operators: int
    lengths: tuple[int, ...]


class A100:
    """Group latencies by the network. A tenant is a model, its shape numbers the sequence length, items are the batch.

    Raises BenchError when the files are not there or do not fit each other.
    """

    def __init__(self, data: Path, weights: Path | None = None, count: int | None = None) -> None:
        self.models = _read_models(data / "abacus" / "models.csv")[:count]
        self._by_name = {model.name: model for model in self.models}
        path = weights or find_weights(data)
        try:
            stored = np.load(path)
            layers = [(stored[f"W{n}"].astype(float), stored[f"b{n}"].astype(float)) for n in range(1, 5)]
        except (OSError, KeyError, ValueError) as error:
            raise BenchError(f"{path}: is no predictor of the form W1 b1 .. W4 b4 ({error})") from None
        self._layers = [(matrix.T, bias.ravel()) for matrix, bias in layers]
        width = layers[0][0].shape[1]
        known = len(self.models)
        if width <= known or (width - known) % 4:
            raise BenchError(f"{path}: takes {width} inputs, expected {known} + 4 k for k models a group")
        self.slots = (width - known) // 4
        made_for = re.search(r"_(\d+)in(\d+)$", path.stem)  # the width alone may mean fewer models, more at once
        if made_for and (self.slots, known) != tuple(map(int, made_for.groups())):
            at_once, of = made_for.groups()
            raise BenchError(f"{path}: are weights for {at_once} at once of {of} models, expected of {known}")
        self._width = width
        self._known: dict[Group, float] = {}

    def operators(self, model: str) -> int:
        """Number of operators of a model."""
        return self._by_name[model].operators

    def latency_ns(self, group: Group) -> float:
        """Latency of a group in ns; batches are padded to the next one that was measured."""
        key = tuple(sorted(group))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = float(self.latencies_ms([key])[0]) * NS_PER_MS
        return found

    def latencies_ms(self, groups: list[Group]) -> npt.NDArray[np.float64]:
        """Latencies of many groups in ms, shape (groups,)."""
        x = np.zeros((len(groups), self._width))
        for row, group in enumerate(groups):
            members = sorted(group, key=lambda member: self._by_name[member.work.tenant].index)
            if len(members) > self.slots:
                raise BenchError(f"a group of {len(members)} models: the network was made for {self.slots}")
            for slot, member in enumerate(members):
                model = self._by_name[member.work.tenant]
                x[row, model.index] = 1.0
                at = len(self.models) + 4 * slot
                length = model.lengths[member.work.shape] if model.lengths else 0
                x[row, at : at + 4] = member.work.start, member.work.end, padded(member.work.items), length
        for number, (matrix, bias) in enumerate(self._layers):
            x = x @ matrix + bias
            if number < len(self._layers) - 1:
                x = np.maximum(x, 0.0)
        # The network was never told that a short group takes time: some answers for one operator are not positive.
        return np.maximum(x[:, 0], 0.05)


def padded(items: int) -> int:
    """The batch that the device runs for that many rows."""
    return next((batch for batch in BATCHES if batch >= items), BATCHES[-1])


def targets_ms(data: Path, experiment: str) -> dict[tuple[str, ...], float]:
    """The QoS targets of an experiment by combination of models."""
    rows = read_rows(data / "abacus" / "qos_targets.csv", "experiment", "combination", "qos_ms")
    return {
        tuple(row["combination"].split("+")): float(row["qos_ms"]) for row in rows if row["experiment"] == experiment
    }


def _read_models(path: Path) -> tuple[PaperModel, ...]:
    rows = read_rows(path, "model", "bitmap_index", "operators", "sequence_lengths")
    return tuple(
        PaperModel(
            row["model"],
            int(row["bitmap_index"]),
            int(row["operators"]),
            tuple(int(length) for length in row["sequence_lengths"].split()),
        )
        for row in sorted(rows, key=lambda row: int(row["bitmap_index"]))
    )
