"""Formats of model files, by suffix, and the packages that load them.

An external package adds a format by `register`, or by an entry point of the group `GROUP`, named after the suffix
without its dot. Worker processes find only entry points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cotenant import registry
from cotenant.errors import InvalidValueError

GROUP = "cotenant.formats"
STEM = "model"
"""Name of the file of a version, without its suffix."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic of the FP32 parts of a model (section `[model]` of its configuration).

    `channels_last` None: yes in FP16 and BF16, else no.
    """

    precision: str = "tf32"
    channels_last: bool | None = None

    @property
    def lays_out(self) -> bool:
        """Whether convolutions run channels last."""
        return self.precision in ("fp16", "bf16") if self.channels_last is None else self.channels_last


@dataclass(frozen=True, slots=True)
class Format:
    """Files that end in `suffix` are run by `package`, which `install` installs where it is missing.

    `factory` ("MODULE:ATTRIBUTE") opens a model; `execute.open_model.open_model` calls it. `platform` and `backend` are
    the names of the engine in the protocol's metadata. `devices` are the kinds of device that the package runs on.
    `has_arithmetic`: `factory` takes an `Arithmetic` as the argument `arithmetic`.
    """

    suffix: str
    package: str
    factory: str
    platform: str
    backend: str
    install: str = ""
    devices: tuple[str, ...] = ("cpu",)
    has_arithmetic: bool = False

    @property
    def file(self) -> str:
        """Name of the model file in the directory of a version."""
        return f"{STEM}{self.suffix}"


FORMATS: dict[str, Format] = {
    each.suffix: each
    for each in (
        Format(
            ".onnx",
            "onnxruntime",
            "cotenant.execute.onnx.segments:SegmentedModel.open",
            "onnxruntime_onnx",
            "onnxruntime",
            "pip install onnxruntime",
        ),
        Format(
            ".pt2",
            "torch",
            "cotenant.execute.torch.model:TorchModel.open",
            "pytorch_libtorch",
            "pytorch",
            "pip install 'cotenant[torch]'",
            ("cpu", "cuda"),
            has_arithmetic=True,
        ),
    )
}
"""By the suffix of the model's file."""


def register(new: Format) -> None:
    """Add a format. Raises InvalidValueError if another format has its suffix."""
    if FORMATS.setdefault(new.suffix, new) != new:
        raise InvalidValueError(f"format of {new.factory}", "suffix", new.suffix, "one that no other format has")


@cache
def _join() -> None:
    for found in registry.load_all(GROUP).values():
        register(found)


def formats() -> dict[str, Format]:
    """All formats, those of other packages included, by suffix."""
    _join()
    return FORMATS
