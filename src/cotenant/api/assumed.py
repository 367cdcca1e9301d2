"""`cotenant.AssumedModel` and `cotenant.engine`: simulations and decisions for models that are not there yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cotenant.config import NS_PER_MS
from cotenant.core.engine import Engine
from cotenant.policies.registry import make_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Tenant
from cotenant.work import Machine, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedModel:
    """A model with an assumed latency, in place of a measured one of a repository. Its tenant has the model's name.

    `latency_ms` is that of one row on one core. The model can be left after each of `units` parts of equal length. A
    run in parts takes `segment_ratio` times as long as a whole one. Queries are not merged into batches.

    >>> import cotenant
    >>> cotenant.AssumedModel(slo_ms=100, latency_ms=20).units
    1

    `Tenant` and `LatencyTable` raise InvalidValueError for values out of range.
    """

    slo_ms: float
    latency_ms: float
    units: int = 1
    segment_ratio: float = 1.0
    weight: float = 1.0
    priority: int = 1
    share: float = 0.0

    def tenant(self, name: str) -> Tenant:
        """The tenant of the model."""
        slo_ns, cuts = round(self.slo_ms * NS_PER_MS), tuple(range(self.units + 1))
        return Tenant(name, slo_ns, cuts, weight=self.weight, priority=self.priority, share=self.share)

    def table(self) -> LatencyTable:
        """Its latencies, as a profile has them."""
        row = LatencyRow(shape=0, items=1, cores=1, latency_ns=round(self.latency_ms * NS_PER_MS))
        return LatencyTable((row,), (1.0,) * self.units, self.segment_ratio)


def engine(
    models: Mapping[str, AssumedModel],
    policy: str,
    *,
    cores: Sequence[int] = (0,),
    options: Mapping[str, object] = MappingProxyType({}),
) -> Engine:
    """The decisions of a server by hand: `handle(event, time_ns)` takes an event and returns actions. No model runs.

    Each of the `cores` is a lane. `options` are those of the policy, as in `[policy]` of `cotenant.toml`.

    >>> import cotenant
    >>> models = {"vision": cotenant.AssumedModel(slo_ms=200, latency_ms=80)}
    >>> engine = cotenant.engine(models, "edf")
    >>> query = cotenant.Query(0, "vision", arrival_ns=0, deadline_ns=200_000_000)
    >>> [type(action).__name__ for action in engine.handle(cotenant.QueryArrived(query), 0)]
    ['Launch']

    Raises ConfigError for an unknown policy or option.
    """
    lanes = tuple(Share((core,)) for core in cores)
    tenants = tuple(model.tenant(name) for name, model in models.items())
    beliefs = TablePredictor({name: model.table() for name, model in models.items()})
    return Engine(tenants, make_policy(policy, options, lanes), beliefs, Machine.cpu(tuple(cores)))
