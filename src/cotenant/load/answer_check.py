"""Check of responses against the responses to the same inputs alone: no query may get data of another one."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.execute.batches import are_alike
from cotenant.wire.api import Array


class AnswerCheck:
    """Compares each response to a prepared request with the first response to it."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping[str, Array]] = {}

    def fault(self, request: int, outputs: Mapping[str, Array]) -> str:
        """Difference of a response to a prepared request from the first one; empty if there is none."""
        known = self._known.setdefault(request, outputs)
        if known is outputs:
            return ""
        if known.keys() != outputs.keys():
            return f"wrong answer: outputs {', '.join(outputs)}, expected {', '.join(known)}"
        for name, array in outputs.items():
            if array.shape != known[name].shape:
                return f"wrong answer: output {name!r} has shape {array.shape}, expected {known[name].shape}"
            if not are_alike(known[name], array):
                return f"wrong answer: output {name!r} differs from that of the request alone"
        return ""
