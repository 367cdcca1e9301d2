"""Following what is observed: factors that turn the profile's latencies into those of the machine as it is now."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log


@dataclass(slots=True)
class Calibration:
    """Exponentially weighted mean, per tenant, of log(observed / believed) latency.

    `weight` is that of a new observation, `tolerance` the relative change that is worth a new predictor, `relaxation`
    what a refusal leaves of the logarithm of a factor; `smallest` and `largest` bound the factors. Neighbours,
    front-ends and clock rates all end up in the factor.
    """

    weight: float = 0.05
    tolerance: float = 0.05
    smallest: float = 0.25
    largest: float = 8.0
    warm_up: int = 8
    relaxation: float = 0.8
    _logs: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _used: dict[str, float] = field(default_factory=dict)

    def observe(
        self, tenant: str, believed_ns: int, observed_ns: int, factor: float | None = None
    ) -> dict[str, float] | None:
        """Take one launch; give the factors of all tenants when they should be used from now on, else None.

        `believed_ns` was predicted with `factor`, by default the one in use now, which is taken out of it first.
        """
        used = self.factor(tenant)
        ratio = max(observed_ns, 1) * (used if factor is None else factor) / max(believed_ns, 1)
        sample = log(min(max(ratio, self.smallest), self.largest))
        count = self._counts.get(tenant, 0) + 1
        self._counts[tenant] = count
        before = self._logs.get(tenant, 0.0)
        step = max(self.weight, 1.0 / count)
        now = before + step * (sample - before)
        self._logs[tenant] = now
        if count < self.warm_up or abs(exp(now) / used - 1.0) <= self.tolerance:
            return None
        self._used = {name: exp(value) for name, value in self._logs.items() if self._counts[name] >= self.warm_up}
        return dict(self._used)

    def relax(self, tenant: str) -> dict[str, float] | None:
        """A query was refused because its tenant is believed to be too slow; believe a little less of that.

        Nothing is launched while everything is refused, so nothing would ever correct a factor that has become too
        large. Gives factors as `observe` does.
        """
        if self._logs.get(tenant, 0.0) <= 0.0:
            return None
        self._logs[tenant] *= self.relaxation
        self._used[tenant] = exp(self._logs[tenant])
        return dict(self._used)

    def forget(self, tenant: str) -> None:
        """A tenant was replaced: what was observed of it says nothing of the new one."""
        for known in (self._logs, self._counts, self._used):
            known.pop(tenant, None)

    def factor(self, tenant: str) -> float:
        """The factor in use for a tenant."""
        return self._used.get(tenant, 1.0)

    @property
    def scales(self) -> dict[str, float]:
        """The factors in use."""
        return dict(self._used)
