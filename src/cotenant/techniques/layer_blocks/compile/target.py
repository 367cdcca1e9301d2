"""The processor that kernels are made for: width of its vectors, number of its registers, flags of the compiler."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from msgspec import Struct

from cotenant.files import processor_facts


class Target(Struct, frozen=True):
    """`lanes` are FP32 numbers in a vector, `registers` those that hold vectors. `flags` are for gcc and clang.

    They are spelled out: a compiler older than the processor takes it for another one.
    """

    name: str
    lanes: int
    registers: int
    flags: tuple[str, ...] = ()


AVX512 = Target(
    "avx512",
    16,
    32,
    ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
)
AVX2 = Target("avx2", 8, 16, ("-mavx2", "-mfma"))
NEON = Target("neon", 4, 32)
PORTABLE = Target("portable", 4, 16)


def this_target() -> Target:
    """What the processor of this machine reports."""
    if platform.machine() in ("aarch64", "arm64"):
        return NEON
    flags = set(processor_facts().get("flags", "").split())
    if {"avx512f", "avx512vl", "avx512dq", "avx512bw", "fma"} <= flags:
        return AVX512
    return AVX2 if {"avx2", "fma"} <= flags else PORTABLE


def this_maker() -> str:
    """The machine that libraries made here belong to: its processor, and the number that the system gave it."""
    try:
        number = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except OSError:
        number = ""
    facts = processor_facts()
    told = facts.get("model name", ""), facts.get("flags", "")
    text = "\0".join((platform.machine(), platform.processor(), *told, number))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
