"""The paper's GPUs, by their makers' data sheets and, for peak operations, by the paper (section 5.4, settings.csv)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: its SMs, peak operations and bytes a second. An SM of all of them has room for 2,048 threads."""

    name: str
    sms: int
    tflops: float
    gbps: float


GPUS = (
    Gpu("Titan V", 80, 14.9, 652.8),
    Gpu("P6000", 30, 12.6, 432.0),
    Gpu("1080Ti", 28, 10.4, 484.0),
)
V100 = Gpu("V100", 80, 15.7, 900.0)
"""Of the measured kernels (Orion): a V100 of 16 GB, of which its artifact speaks."""
