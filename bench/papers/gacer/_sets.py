"""Sets of models that start together: the paper's five, those of the measured kernels, and what options name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench._data import read_rows
from bench._registry import BenchError
from bench.papers.gacer._gpus import V100, Gpu
from bench.papers.gacer._kernels_csv import Measured, measured_table, read_kernels
from bench.papers.gacer._models import model_table
from bench.papers.gacer._worlds import Drawn
from bench.papers.gacer._zoo_kernels import PAPER_NAMES
from cotenant.techniques.granularity.kernel_table import KernelTable

BATCHES = {"LSTM": "batch size language model", "BST": "batch size recommendation model"}
_VISION = "batch size vision models"
V100_SETS = (
    (("resnet50", 4), ("mobilenet_v2", 4)),
    (("resnet50", 4), ("resnet101", 4)),
    (("resnet50", 4), ("resnet101", 4), ("mobilenet_v2", 4)),
    (("resnet101", 4), ("bert", 2)),
    (("resnet50", 4), ("mobilenet_v2", 4), ("bert", 2)),
)
"""Of the models with a known card; the pairs are of those that the source runs together."""
_MOST_BATCH = 256


@dataclass(frozen=True, slots=True)
class JointSet:
    """Models with batches, on a card. `source` is empty for models of our zoo, else the file of their kernels."""

    name: str
    models: tuple[tuple[str, int], ...]
    gpu: Gpu
    source: str = ""

    def tables(self, drawn: Drawn) -> list[KernelTable]:
        """What they take alone in a world."""
        if self.source:
            known = _kernels(Path(self.source))
            return [measured_table(known, model, batch, self.gpu, drawn) for model, batch in self.models]
        return [model_table(model, batch, self.gpu, drawn) for model, batch in self.models]


@cache
def _kernels(path: Path) -> Measured:
    return read_kernels(path)


def paper_sets(data_dir: Path, gpu: Gpu) -> list[JointSet]:
    """The sets of Table 2, with the batches of section 5.4."""
    values = {row["item"]: row["value"] for row in read_rows(data_dir / "gacer" / "settings.csv", "item", "value")}
    names = dict.fromkeys(row["models"] for row in read_rows(data_dir / "gacer" / "table2_latency.csv", "models"))
    made = []
    for name in names:
        models = [(PAPER_NAMES[short], int(values[BATCHES.get(short, _VISION)])) for short in name.split("+")]
        made.append(JointSet(name, tuple(models), gpu))
    return made


def v100_sets(data_dir: Path) -> list[JointSet]:
    """Those of the measured kernels."""
    source = str(data_dir / "orion" / "kernels.csv")
    return [JointSet(_named(models), models, V100, source) for models in V100_SETS]


def given_sets(texts: Sequence[str], kernels: Path | None, gpus: Sequence[Gpu]) -> list[JointSet]:
    """The sets of options `--set`, on each card, of the models of a file or of the paper's ten.

    Without any, all models of the file at their largest batches are one. Raises BenchError for what names no set.
    """
    known = _kernels(kernels) if kernels is not None else None
    names = list(known) if known is not None else list(PAPER_NAMES)
    if not texts and known is not None:
        texts = [",".join(f"{model}:{max(known[model])}" for model in known)]
    found = []
    for text in texts:
        models = []
        for part in text.split(","):
            model, _, batch = part.strip().rpartition(":")
            model = PAPER_NAMES.get(model, model) if known is None else model
            fits = batch.isascii() and batch.isdigit() and 1 <= int(batch) <= _MOST_BATCH
            if model not in (known if known is not None else PAPER_NAMES.values()) or not fits:
                raise BenchError(
                    f"--set {text!r}: {part.strip()!r} is no model and batch, expected NAME:BATCH,NAME:BATCH with "
                    f"names of {', '.join(names)} and batches up to {_MOST_BATCH}"
                )
            models.append((model, int(batch)))
        found += [JointSet(_named(models), tuple(models), gpu, str(kernels or "")) for gpu in gpus]
    return found


def _named(models: Sequence[tuple[str, int]]) -> str:
    return "+".join(f"{model}:{batch}" for model, batch in models)
