"""The A100 as released networks of weights know it: latencies of groups of segments of the paper's models.

The networks were fitted by the authors of Abacus to measurements of groups of one size each, on one A100 or a slice of
it. They are a world to simulate, not the truth: see the README beside the data for what they get wrong. A network is
asked only for groups of the size, and of the models, that it was fitted for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench._data import read_rows
from bench._registry import BenchError
from bench._weights import MIG2G, MIG4G, PAIRS, TRIPLES, digest_of, find_weights, released_as
from cotenant.core.predictor import Group

NS_PER_MS = 1_000_000
BATCHES = (4, 8, 16, 32)
FOUR = ("resnet101", "resnet152", "vgg19", "bert")
"""The models of sections 7.4 to 7.6, for which all networks but that for pairs of seven were fitted."""
DEVICES: Mapping[str, Mapping[int, str]] = {
    "a100": {2: PAIRS, 3: TRIPLES},
    "mig2g": {2: MIG2G},
    "mig4g": {4: MIG4G},
}
"""The released networks: by size of group, of the whole device (none for four) and of its slices."""


@dataclass(frozen=True, slots=True)
class PaperModel:
    """One model of the experiments: its place in the network's input, its operators and its sequence lengths."""

    name: str
    index: int
    operators: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """Weights for groups of `size` of some models; `layers` are (inputs, outputs) matrices with their biases."""

    path: Path
    size: int
    models: frozenset[str]
    layers: tuple[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], ...]

    def latencies_ms(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Latencies in ms, shape (groups,), of inputs of shape (groups, width)."""
        for number, (matrix, bias) in enumerate(self.layers):
            x = x @ matrix + bias
            if number < len(self.layers) - 1:
                x = np.maximum(x, 0.0)
        # The network never learnt that a short group takes time: some answers for one operator are not positive.
        return np.maximum(x[:, 0], 0.05)


class A100:
    """Group latencies of a device by its networks, one for each size of group; that of pairs answers groups of one too.

    A tenant is a model, its shape numbers the sequence length, items are the batch. `files` are networks by size of
    group, instead of those that were released for `device` (see DEVICES) or beside them. `count` keeps the first models
    of the data; for these nothing was released but the contents of `files`. The networks were fitted separately and do
    not agree with each other; `ordered` lets no group be quicker than any part of it.

    Raises BenchError when files are not there or do not fit, and for a group that no network was fitted for.
    """

    def __init__(
        self,
        data: Path,
        files: Mapping[int, Path] | None = None,
        count: int | None = None,
        device: str = "a100",
        ordered: bool = False,
    ) -> None:
        known = _read_models(data / "abacus" / "models.csv")
        if count is not None and not 1 <= count <= len(known):
            raise BenchError(f"{count} models: expected 1 to {len(known)}, those of the data")
        self.models = known[:count]
        self._by_name = {model.name: model for model in self.models}
        self._data, self._ordered = data, ordered
        self._files: dict[int, Path | str] = {} if len(self.models) < len(known) else dict(DEVICES[device])
        self._files |= files or {}
        if not self._files:
            raise BenchError(f"{count} models: the released networks know {len(known)}; give K=FILE for groups of K")
        self._networks: dict[int, Network] = {}
        self._known: dict[Group, float] = {}
        for size in files or ():  # requested networks have to fit; released ones are looked for when needed
            self.network(size)

    def network(self, size: int) -> Network:
        """The network for groups of that size. Raises BenchError where there is none, or its file does not fit."""
        found = self._networks.get(size)
        if found is None:
            kept = self._size_of(size)
            if kept is None:
                there = ", ".join(map(str, sorted(self._files)))
                raise BenchError(f"no network for groups of {size}: there are those for {there}; give {size}=FILE")
            file = self._files[kept]
            path = find_weights(self._data, file) if isinstance(file, str) else file
            found = self._networks[size] = self._read(path, kept)
        return found

    def most(self, models: Collection[str]) -> int:
        """The largest size up to which there are networks for all groups of these models.

        Raises BenchError where not even one of them alone is known, or a network was not fitted for one of them.
        """
        found = 1
        self._require(self.network(found), models)
        while found < len(models) and self._size_of(found + 1) is not None:
            found += 1
            self._require(self.network(found), models)
        return found

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

    def latencies_ms(self, groups: Sequence[Group]) -> npt.NDArray[np.float64]:
        """Latencies of many groups in ms, shape (groups,)."""
        found = np.zeros(len(groups))
        sizes = np.array([len(group) for group in groups])
        for size in sorted(set(sizes.tolist())):
            network = self.network(size)
            at = np.flatnonzero(sizes == size)
            self._require(network, {member.work.tenant for row in at for member in groups[row]})
            found[at] = network.latencies_ms(self._inputs([groups[row] for row in at], network.size))
            for out in range(size) if self._ordered and size > 1 else ():
                part = self.latencies_ms([groups[row][:out] + groups[row][out + 1 :] for row in at])
                found[at] = np.maximum(found[at], part)
        return found

    def _size_of(self, size: int) -> int | None:
        """The size of the network that is asked for groups of this size; None where there is none."""
        return next((kept for kept in ((1, 2) if size == 1 else (size,)) if kept in self._files), None)

    def _require(self, network: Network, models: Iterable[str]) -> None:
        unknown = sorted(set(models) - network.models)
        if unknown:
            fitted = ", ".join(model.name for model in self.models if model.name in network.models)
            raise BenchError(
                f"{network.path}: was not fitted for {unknown[0]}: its groups of {network.size} are of {fitted}"
            )

    def _inputs(self, groups: Sequence[Group], size: int) -> npt.NDArray[np.float64]:
        x = np.zeros((len(groups), len(self.models) + 4 * size))
        for row, group in enumerate(groups):
            members = sorted(group, key=lambda member: self._by_name[member.work.tenant].index)
            for slot, member in enumerate(members):
                model = self._by_name[member.work.tenant]
                if x[row, model.index]:
                    raise BenchError(f"a group with {model.name} twice: the networks were fitted to distinct models")
                x[row, model.index] = 1.0
                at = len(self.models) + 4 * slot
                length = model.lengths[member.work.shape] if model.lengths else 0
                x[row, at : at + 4] = member.work.start, member.work.end, padded(member.work.items), length
        return x

    def _read(self, path: Path, size: int) -> Network:
        try:
            with np.load(path) as stored:
                arrays = {f"{kind}{n}": stored[f"{kind}{n}"] for n in range(1, 5) for kind in "Wb"}
            layers = [(arrays[f"W{n}"].astype(float).T, arrays[f"b{n}"].astype(float).ravel()) for n in range(1, 5)]
        except (OSError, KeyError, ValueError) as error:
            raise BenchError(f"{path}: is no predictor of the form W1 b1 .. W4 b4 ({error})") from None
        inner = [(before[0].shape[1], after[0].shape[0]) for before, after in pairwise(layers)]
        biases = [(matrix.shape[1], bias.size) for matrix, bias in layers]
        if any(outs != ins for outs, ins in [*inner, *biases]) or layers[-1][0].shape[1] != 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise BenchError(f"{path}: layers do not fit each other, with one output at the end ({shapes})")
        width, known = layers[0][0].shape[0], len(self.models)
        if width != known + 4 * size:
            raise BenchError(
                f"{path}: takes {width} inputs, expected {known + 4 * size}: a bit for each of {known} models and "
                f"four numbers for each of {size} members"
            )
        # The width alone may mean fewer models, more at once; and networks for a part of them have a bit for all.
        made_for = re.search(r"_(\d+)in(\d+)$", Path(released_as(digest_of(arrays)) or path.name).stem)
        names = frozenset(self._by_name)
        if made_for:
            at_once, of = map(int, made_for.groups())
            if of == len(FOUR) < known:
                names &= frozenset(FOUR)
            if (at_once, of) != (size, len(names)):
                raise BenchError(
                    f"{path}: are weights for {at_once} at once of {of} models, expected {size} of {known}"
                )
        return Network(path, size, names, tuple(layers))


def files_of(given: Sequence[str] | None) -> dict[int, Path]:
    """Networks by size of group, from texts K=FILE; FILE alone is for pairs. Raises BenchError for anything else."""
    found: dict[int, Path] = {}
    for text in given or ():
        head, equals, tail = text.partition("=")
        size, file = (head, tail) if equals and "/" not in head else ("2", text)
        if not size.isdecimal() or int(size) < 1 or not file:
            raise BenchError(f"{text}: expected K=FILE, a network for groups of K, or FILE for pairs")
        if int(size) in found:
            raise BenchError(f"{text}: there is a network for groups of {size} already, {found[int(size)]}")
        found[int(size)] = Path(file)
    return found


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
