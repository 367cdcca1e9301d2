"""Sizes of BERT encoders (Devlin et al., NAACL 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

MASKED = -10000.0
"""Value added to the attention score of a padding token, as in the original code of BERT."""


@dataclass(frozen=True, slots=True)
class BertShape:
    """Sizes of a BERT encoder."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int = 30522
    positions: int = 512


BERT_BASE = BertShape(layers=12, hidden=768, heads=12, intermediate=3072)
BERT_LARGE = BertShape(layers=24, hidden=1024, heads=16, intermediate=4096)
MINILM_L6 = BertShape(layers=6, hidden=384, heads=12, intermediate=1536)
