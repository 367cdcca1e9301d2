"""Which node gets the next query of a tenant: smooth weighted turns. No clock, no chance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_TIE = 1e-9


class Balancer:
    """Turns between nodes in proportion of their weights, spread as evenly as can be.

    At each choice every node's credit grows by its weight; the one with most credit is taken and pays the sum of all.
    Equal credit goes to the node with the fewest queries under way, then to the first.
    """

    def __init__(self, shares: Sequence[tuple[str, float]]) -> None:
        self._weights = dict(shares)
        self._credit = dict.fromkeys(self._weights, 0.0)

    def choose(self, outstanding: Mapping[str, int], without: Collection[str] = ()) -> str | None:
        """The node to send to, leaving out those in `without`; None when no node is left."""
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
