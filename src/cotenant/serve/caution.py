"""The safety margin that cautious policies count on, from what launches and answers are seen to take."""

from __future__ import annotations

import threading

from cotenant.predict.conformal import AdaptiveConformal
from cotenant.predict.margin import NO_MARGIN, SafetyMargin, Spread

_UNIT_NS = 1_000_000
"""Delays of answers are followed as multiples of this."""
_BOTH_WAYS = 2
"""A query waits for the same threads before it is read, unseen, as its answer does: believed to take as long."""
_WEIGHT = 0.05
"""Of a launch in the mean predicted latency of a tenant's launches."""


class Caution:
    """Follows, at a quantile, launches over what was predicted of them, by tenant, and delays of answers.

    Changes of less than a tenth of a spread, or a quarter of a delay, are not worth a new margin.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._factors: dict[str, AdaptiveConformal] = {}
        self._launch_ns: dict[str, float] = {}
        self._spreads: dict[str, Spread] = {}
        self._reply = AdaptiveConformal(quantile, tolerance=0.25, smallest=1 / 64, largest=256.0)
        self._reply_ns = 0
        self._lock = threading.Lock()
        """Answers go out on many threads."""
        self._margin = NO_MARGIN

    def launched(self, tenant: str, predicted_ns: int, observed_ns: int) -> None:
        """A launch has ended."""
        follower = self._factors.get(tenant)
        if follower is None:
            follower = AdaptiveConformal(self._quantile, step=0.02, tolerance=0.1, smallest=1.0)
            self._factors[tenant], self._launch_ns[tenant] = follower, predicted_ns
        self._launch_ns[tenant] += _WEIGHT * (predicted_ns - self._launch_ns[tenant])
        factor = follower.observe(predicted_ns, observed_ns, 1.0)
        if factor is not None:
            self._spreads[tenant] = Spread(factor, max(1, round(self._launch_ns[tenant])))

    def replied(self, delay_ns: int) -> None:
        """An answer leaves so long after its query ended; from any thread."""
        with self._lock:
            factor = self._reply.observe(_UNIT_NS, delay_ns, 1.0)
            if factor is not None:
                self._reply_ns = round(_BOTH_WAYS * factor * _UNIT_NS)

    def forget(self, tenant: str) -> None:
        """A tenant was replaced."""
        for known in (self._factors, self._launch_ns, self._spreads):
            known.pop(tenant, None)

    def margin(self) -> SafetyMargin:
        """What to count on; the same object until it changes."""
        if self._spreads != self._margin.spreads or self._reply_ns != self._margin.reply_ns:
            self._margin = SafetyMargin(dict(self._spreads), self._reply_ns)
        return self._margin
