"""The processor that kernels are compiled for: vector width, number of registers, compiler flags."""

from __future__ import annotations

import hashlib
import platform

from msgspec import Struct

from cotenant.linux import machine_id, processor_facts


class Target(Struct, frozen=True):
    """`lanes` are FP32 numbers in a vector, `registers` are vector registers, `flags` are for gcc and clang.

    The flags are explicit: a compiler older than the processor does not recognise it.
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
    """The target of this machine's processor."""
    if platform.machine() in ("aarch64", "arm64"):
        return NEON
    flags = set(processor_facts().get("flags", "").split())
    if {"avx512f", "avx512vl", "avx512dq", "avx512bw", "fma"} <= flags:
        return AVX512
    return AVX2 if {"avx2", "fma"} <= flags else PORTABLE


def this_maker() -> str:
    """Identity of this machine for its libraries: a digest of its processor and machine id."""
    facts = processor_facts()
    known = facts.get("model name", ""), facts.get("flags", "")
    text = "\0".join((platform.machine(), platform.processor(), *known, machine_id()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
