"""Answers held against what the same inputs were answered alone: nobody may get somebody else's, or half of one."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.execute.batches import are_alike
from cotenant.wire.api import Array


class AnswerCheck:
    """What each prepared request of a tenant was answered first, and whether later answers are the same."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping[str, Array]] = {}

    def fault(self, request: int, outputs: Mapping[str, Array]) -> str:
        """What is wrong with an answer to a prepared request, "" if nothing is. The first is the one to go by."""
        known = self._known.setdefault(request, outputs)
        if known is outputs:
            return ""
        if known.keys() != outputs.keys():
            return f"wrong answer: outputs {', '.join(outputs)}, expected {', '.join(known)}"
        for name, array in outputs.items():
            if array.shape != known[name].shape:
                return f"wrong answer: output {name!r} has shape {array.shape}, expected {known[name].shape}"
            if not are_alike(known[name], array):
                return f"wrong answer: output {name!r} has other values than when it was asked alone"
        return ""
