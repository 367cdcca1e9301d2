"""What the results of the experiments in drawn worlds hang on."""

from __future__ import annotations

from pathlib import Path

from bench._campaign import digest_of
from bench.papers import veltair
from cotenant import fair_share
from cotenant.profiles import version_table
from cotenant.techniques.layer_blocks import policy as layer_block
from cotenant.techniques.layer_blocks.world import many_core_rules


def key_of(data_dir: Path, profile: Path | None) -> str:
    """A digest of our own sources and of the files that the models are read from."""
    files = [*sorted((data_dir / "veltair").glob("*.csv")), *([profile] if profile else [])]
    return digest_of((veltair, layer_block, version_table, many_core_rules, fair_share), files)
