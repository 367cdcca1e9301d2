"""Load balancing between nodes: smooth weighted round robin, deterministic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_TIE = 1e-9


class Balancer:
    """Smooth weighted round robin (as in nginx) between nodes.

    At each choice: `credit[n] += weight[n]` for all nodes, the node with the largest credit is chosen, and then
    `credit[chosen] -= sum(weight)`. Ties go to the node with the fewest outstanding queries, then to the first.
    """

    def __init__(self, shares: Sequence[tuple[str, float]]) -> None:
        self._weights = dict(shares)
        self._credit = dict.fromkeys(self._weights, 0.0)

    def choose(self, outstanding: Mapping[str, int], without: Collection[str] = ()) -> str | None:
        """Choose the node for the next query, except nodes in `without`; None if no node is left."""
        there = [node for node in self._weights if node not in without]
        if not there:
            return None
        total = sum(self._weights[node] for node in there)
        for node in there:
            self._credit[node] += self._weights[node]
        most = max(self._credit[node] for node in there) - _TIE * total
        best = min((node for node in there if self._credit[node] >= most), key=lambda node: outstanding.get(node, 0))
        self._credit[best] -= total
        return best
