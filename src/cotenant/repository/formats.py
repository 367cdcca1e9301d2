"""Formats of model files: which there are, by the suffix of the file, and who opens them.

A package of a user joins by `register`, or by an entry point of the group `GROUP` whose name is the suffix without its
dot; worker processes find it by the entry point alone.
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
    """How a model computes what it has in FP32: see `[model]` in `config`.

    `channels_last` None stands for yes in FP16 and BF16, and for no otherwise.
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
        """Name of the model's file in the directory of a version."""
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
    """Let a format be known. Raises InvalidValueError where another one has its suffix."""
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
