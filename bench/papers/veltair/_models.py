"""The seven models of the paper as layers: their operations, their tensors, and their times alone over cores.

Only ResNet-50 was measured (profile_resnet50.csv; another file may be given). Times of the others are made from their
operations, at the efficiency of ResNet-50's layers of like kind. At each core count they are a line `t = o + macs / r`.
The overhead o and the rate r of 1 x 1 convolutions are fitted to those of ResNet-50 by least squares of relative
errors. The rate of larger kernels is their median once o is off. Two factors on that are free parameters of a world.
Depthwise layers have little to reuse and are slower per operation; matrix products have no halos and strides and are
faster.

BERT's rows are one encoder layer, of which BERT-large has 24. SSD is VGG16 at 300 x 300 (Liu et al., ECCV 2016, figure
2), written down here. Everything is at batch 1, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench._data import read_rows
from bench._registry import BenchError

BYTES = 4
BERT_LAYERS = 24
REFERENCE = "ResNet50"
SSD = "SSD"
TABLE_2 = {
    "ResNet-50": REFERENCE,
    "GoogLeNet": "GoogLeNet",
    "EfficientNet": "EfficientNet",
    "MobileNet-V2": "MobileNet",
    "SSD": SSD,
    "Tiny-YOLOV2": "tinyyolo",
    "Bert-Large": "Bert",
}
"""Names in models.csv, and those of the same models in layers.csv."""
CLASSES = ("light", "medium", "heavy", "mix")
_NS_PER_US = 1000

Profile = Mapping[int, float]
"""Time alone in us by number of cores."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer at batch 1: its multiply-accumulates, and the bytes of its weights, input and output."""

    macs: int
    weights: int
    inputs: int
    outputs: int
    is_pointwise: bool
    is_depthwise: bool
    is_product: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model of Table 2. `profiles` are measured times of its layers, empty where there are none."""

    name: str
    load: str
    qos_ns: int
    layers: tuple[Layer, ...]
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What made layers take, by core count: overhead in us, and multiply-accumulates a us by kind."""

    cores: tuple[int, ...]
    overhead_us: tuple[float, ...]
    pointwise: tuple[float, ...]
    larger: tuple[float, ...]

    def profile(self, layer: Layer, depthwise: float, product: float) -> Profile:
        """Times of a layer. An operation is so many times slower in depthwise layers, and faster in matrix products."""
        rates = self.pointwise if layer.is_pointwise else self.larger
        work = layer.macs * (depthwise if layer.is_depthwise else 1.0) / (product if layer.is_product else 1.0)
        return {c: o + work / r for c, o, r in zip(self.cores, self.overhead_us, rates, strict=True)}


def read_models(data_dir: Path, profile: Path | None = None) -> tuple[list[Model], Efficiency]:
    """The models of Table 2, and the efficiency of made ones.

    `profile` has measurements of one or more of them in the form of profile_resnet50.csv. They replace those of the
    data folder; core counts may be missing. Raises BenchError for files that cannot be used.
    """
    folder = data_dir / "veltair"
    layers = _layers(folder / "layers.csv")
    layers[SSD] = ssd_layers()
    layers["Bert"] = layers["Bert"] * BERT_LAYERS
    profiles = read_profiles(folder / "profile_resnet50.csv", layers)
    if profile is not None:
        profiles |= read_profiles(profile, layers)
    made = []
    for row in read_rows(folder / "models.csv", "model", "workload", "qos_ms"):
        name = row["model"]
        if name not in TABLE_2:
            raise BenchError(f"{folder / 'models.csv'}: has a model {name!r}, expected {', '.join(TABLE_2)}")
        known = TABLE_2[name]
        qos_ns = round(float(row["qos_ms"]) * 1e6)
        made.append(Model(name, row["workload"], qos_ns, tuple(layers[known]), tuple(profiles.get(known, ()))))
    return made, efficiency_of(layers[REFERENCE], profiles[REFERENCE])


def read_profiles(path: Path, layers: Mapping[str, Sequence[Layer]]) -> dict[str, list[Profile]]:
    """Measured times by model and layer. Raises BenchError where a layer is missing or a figure cannot be read."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for row in read_rows(path, "model", "layer", "cores", "latency_us"):
        try:
            layer, cores, latency = int(row["layer"]), int(row["cores"]), float(row["latency_us"])
        except (TypeError, ValueError):
            raise BenchError(f"{path}: has a row {row}, expected numbers for layer, cores and latency_us") from None
        if row["model"] not in layers:
            raise BenchError(f"{path}: has a model {row['model']!r}, expected one of {', '.join(sorted(layers))}")
        if cores < 1 or not 0 < latency < float("inf"):
            raise BenchError(f"{path}: has a row {row}, expected at least 1 core and a positive latency")
        found.setdefault(row["model"], {}).setdefault(layer, {})[cores] = latency
    for name, by_layer in found.items():
        single = layers[name][: len(layers[name]) // BERT_LAYERS] if name == "Bert" else layers[name]
        if sorted(by_layer) != list(range(len(single))):
            raise BenchError(
                f"{path}: has {len(by_layer)} layers of {name}, expected 0 to {len(single) - 1}, each once"
            )
    repeats = {name: BERT_LAYERS if name == "Bert" else 1 for name in found}
    return {
        name: [dict(sorted(by_layer[at].items())) for at in sorted(by_layer)] * repeats[name]
        for name, by_layer in found.items()
    }


def efficiency_of(layers: Sequence[Layer], profiles: Sequence[Profile]) -> Efficiency:
    """The lines of the module's text, at the core counts at which layers of both kinds were measured."""
    counts, overheads, pointwise, larger = [], [], [], []
    for cores in sorted({c for profile in profiles for c in profile}):
        known = [(layer, p[cores]) for layer, p in zip(layers, profiles, strict=True) if cores in p]
        small = [(each.macs, us) for each, us in known if each.is_pointwise]
        large = [(each.macs, us) for each, us in known if not each.is_pointwise and not each.is_depthwise]
        if len({macs for macs, _ in small}) < 2 or not large:
            continue
        macs, us = np.array(small, float).T
        (overhead, slope), *_ = np.linalg.lstsq(np.stack([1 / us, macs / us], 1), np.ones(len(us)), rcond=None)
        if overhead < 0 or slope <= 0:
            overhead, slope = 0.0, float(np.median(us / macs))
        counts.append(cores)
        overheads.append(float(overhead))
        pointwise.append(1 / float(slope))
        larger.append(float(np.median([m / max(u - overhead, u / 2) for m, u in large])))
    if not counts:
        raise BenchError("no core count has times of 1 x 1 convolutions of two sizes and of larger ones: expected one")
    return Efficiency(tuple(counts), tuple(overheads), tuple(pointwise), tuple(larger))


def _layers(path: Path) -> dict[str, list[Layer]]:
    """All layers by model."""
    sizes = ("h_in", "w_in", "c_in", "c_out", "k_h", "k_w", "groups", "h_out", "w_out")
    found: dict[str, list[Layer]] = {}
    for row in read_rows(path, "model", "layer", "kind", "macs", "gemm_m", "gemm_n", "gemm_k", *sizes):
        macs = int(row["macs"])
        if row["kind"] == "gemm":
            m, n, k = (int(row[f"gemm_{axis}"]) for axis in "mnk")
            made = Layer(macs, m * n * BYTES, n * k * BYTES, m * k * BYTES, False, False, True)
        else:
            made = _conv(macs, *(int(row[size]) for size in sizes))
        found.setdefault(row["model"], []).append(made)
    return found


def _conv(
    macs: int, h_in: int, w_in: int, c_in: int, c_out: int, k_h: int, k_w: int, groups: int, h_out: int, w_out: int
) -> Layer:
    weights = k_h * k_w * (c_in // groups) * c_out * BYTES
    inputs, outputs = h_in * w_in * c_in * BYTES, h_out * w_out * c_out * BYTES
    return Layer(macs, weights, inputs, outputs, k_h * k_w == 1, groups > 1)


def ssd_layers(classes: int = 21) -> list[Layer]:
    """SSD300 on VGG16: the trunk, the extra layers, and at each of six sizes one convolution for boxes and classes."""

    def conv(size: int, c_in: int, c_out: int, kernel: int, stride: int = 1) -> Layer:
        out = -(-size // stride) if stride > 1 or kernel == 1 or size > 3 else size
        return _conv(out * out * kernel * kernel * c_in * c_out, size, size, c_in, c_out, kernel, kernel, 1, out, out)

    made = [conv(300, 3, 64, 3), conv(300, 64, 64, 3), conv(150, 64, 128, 3), conv(150, 128, 128, 3)]
    made += [conv(75, 128, 256, 3), conv(75, 256, 256, 3), conv(75, 256, 256, 3)]
    made += [conv(38, 256, 512, 3), conv(38, 512, 512, 3), conv(38, 512, 512, 3)]
    made += [conv(19, 512, 512, 3)] * 3 + [conv(19, 512, 1024, 3), conv(19, 1024, 1024, 1)]
    made += [conv(19, 1024, 256, 1), conv(19, 256, 512, 3, 2), conv(10, 512, 128, 1), conv(10, 128, 256, 3, 2)]
    made += [conv(5, 256, 128, 1), _valid(5, 128, 256), conv(3, 256, 128, 1), _valid(3, 128, 256)]
    heads = ((38, 512, 4), (19, 1024, 6), (10, 512, 6), (5, 256, 6), (3, 256, 4), (1, 256, 4))
    return made + [conv(size, channels, boxes * (4 + classes), 3) for size, channels, boxes in heads]


def _valid(size: int, c_in: int, c_out: int) -> Layer:
    """A 3 x 3 convolution without padding."""
    out = size - 2
    return _conv(out * out * 9 * c_in * c_out, size, size, c_in, c_out, 3, 3, 1, out, out)


def of_class(models: Sequence[Model], load: str) -> list[Model]:
    """The models of a load class; all of them in the mix."""
    return [model for model in models if load in ("mix", model.load)]


def rates_of(models: Sequence[Model]) -> list[float]:
    """Their parts of the queries: inversely proportional to their QoS (section 5.1 of the paper)."""
    weights = [1.0 / model.qos_ns for model in models]
    return [weight / sum(weights) for weight in weights]
