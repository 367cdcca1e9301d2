"""What a workload is: tenants, their arrival processes, a duration and a seed. Pure data and arithmetic on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cotenant.errors import InvalidValueError
from cotenant.types import DEFAULT_PRIORITY

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
PROTOCOLS = ("http", "grpc")


def _positive(where: str, field: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidValueError(where, field, value, "a positive finite number")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps with mean 1 / `rate` (queries per second)."""

    rate: float

    def __post_init__(self) -> None:
        _positive("poisson arrivals", "rate", self.rate)

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Poisson:
        """Return the same process with `factor` times the rate."""
        return replace(self, rate=self.rate * factor)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Constant gaps of 1 / `rate` seconds, from a seeded random phase so that tenants do not march in step."""

    rate: float

    def __post_init__(self) -> None:
        _positive("uniform arrivals", "rate", self.rate)

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Uniform:
        """Return the same process with `factor` times the rate."""
        return replace(self, rate=self.rate * factor)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps with mean 1 / `rate` and coefficient of variation `cv`; 1 is Poisson, above is bursty."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _positive("gamma arrivals", "rate", self.rate)
        _positive("gamma arrivals", "cv", self.cv)

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Gamma:
        """Return the same process with `factor` times the rate and an unchanged `cv`."""
        return replace(self, rate=self.rate * factor)


@dataclass(frozen=True, slots=True)
class Mmpp:
    """Markov-modulated Poisson process whose states are visited in turn.

    State i sends Poisson arrivals at `rates[i]` and lasts an exponential time with mean `mean_dwell_s[i]`. The first
    state is drawn from the stationary distribution, so that the mean rate holds from the first second.
    """

    rates: tuple[float, ...]
    mean_dwell_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = "mmpp arrivals"
        if len(self.rates) < 2:
            raise InvalidValueError(where, "rates", list(self.rates), "at least two rates")
        if any(not 0 <= rate < math.inf for rate in self.rates) or not any(self.rates):
            raise InvalidValueError(where, "rates", list(self.rates), "numbers from 0, at least one above 0")
        if len(self.mean_dwell_s) != len(self.rates):
            raise InvalidValueError(
                where, "mean_dwell_s", list(self.mean_dwell_s), f"one number per rate, here {len(self.rates)}"
            )
        for dwell_s in self.mean_dwell_s:
            _positive(where, "mean_dwell_s", dwell_s)

    @property
    def mean_rate(self) -> float:
        """Mean queries per second: the rates weighted by how long their states last."""
        return sum(r * d for r, d in zip(self.rates, self.mean_dwell_s, strict=True)) / sum(self.mean_dwell_s)

    def scaled(self, factor: float) -> Mmpp:
        """Return the same process with `factor` times the rates and unchanged dwell times."""
        return replace(self, rates=tuple(rate * factor for rate in self.rates))


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded arrivals, replayed `scale` times as fast: an arrival recorded at t is sent at t / `scale`.

    `times_ns` are the recorded times since the start of the trace, ascending; `file` says where they came from.
    """

    times_ns: tuple[int, ...]
    scale: float = 1.0
    file: str = ""

    def __post_init__(self) -> None:
        where = "trace arrivals"
        _positive(where, "scale", self.scale)
        if not self.times_ns or self.times_ns[0] < 0:
            raise InvalidValueError(where, "times_ns", self.times_ns[:3], "at least one time, none negative")
        if any(a > b for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)):
            raise InvalidValueError(where, "times_ns", "not sorted", "ascending times")

    @property
    def mean_rate(self) -> float:
        """Mean queries per second until the last recorded arrival."""
        return len(self.times_ns) * self.scale * NS_PER_S / max(1, self.times_ns[-1])

    def scaled(self, factor: float) -> Trace:
        """Return the same trace replayed `factor` times as fast again."""
        return replace(self, scale=self.scale * factor)


ArrivalProcess = Poisson | Uniform | Gamma | Mmpp | Trace


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """The queries of one tenant.

    `name` tells two loads of one model apart. `slo_ns` None means: as the server or repository says. `timeout_ns` and
    `priority` (0 unset) are sent along with every query. `items` are rows per query, `shape` numbers the declared
    shape.

    Raises InvalidValueError when a value is out of its range.
    """

    name: str
    model: str
    process: ArrivalProcess
    protocol: str = "http"
    slo_ns: int | None = None
    items: int = 1
    shape: int = 0
    timeout_ns: int | None = None
    priority: int = DEFAULT_PRIORITY

    def __post_init__(self) -> None:
        where = f"tenant {self.name!r}"
        if not self.name or not self.model:
            raise InvalidValueError(where, "model", self.model, "the name of a model")
        if self.protocol not in PROTOCOLS:
            raise InvalidValueError(where, "protocol", self.protocol, f"one of {', '.join(PROTOCOLS)}")
        if self.slo_ns is not None and self.slo_ns <= 0:
            raise InvalidValueError(where, "slo_ns", self.slo_ns, "a positive latency target")
        if self.timeout_ns is not None and self.timeout_ns <= 0:
            raise InvalidValueError(where, "timeout_ns", self.timeout_ns, "a positive time")
        if self.items < 1:
            raise InvalidValueError(where, "items", self.items, "at least 1")
        if self.shape < 0:
            raise InvalidValueError(where, "shape", self.shape, "the number of a declared shape, from 0")
        if self.priority < 0:
            raise InvalidValueError(where, "priority", self.priority, "0 (unset) or a level from 1 (most urgent)")


@dataclass(frozen=True, slots=True)
class Workload:
    """Tenants with their arrivals over `duration_ns`.

    Queries scheduled before `warmup_ns` are sent, not counted.

    Raises InvalidValueError when a value is out of its range.
    """

    tenants: tuple[TenantLoad, ...]
    duration_ns: int
    warmup_ns: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        if not names:
            raise InvalidValueError("workload", "tenant", names, "at least one tenant")
        if len(set(names)) != len(names):
            raise InvalidValueError(
                "workload", "tenant", names, "distinct names (set `name` where a model comes twice)"
            )
        if self.duration_ns <= 0:
            raise InvalidValueError("workload", "duration_ns", self.duration_ns, "a positive duration")
        if not 0 <= self.warmup_ns < self.duration_ns:
            raise InvalidValueError("workload", "warmup_ns", self.warmup_ns, "from 0 to less than the duration")
        if self.seed < 0:
            raise InvalidValueError("workload", "seed", self.seed, "an integer from 0")

    @property
    def mean_rate(self) -> float:
        """Mean queries per second over all tenants."""
        return sum(tenant.process.mean_rate for tenant in self.tenants)


def scale(workload: Workload, factor: float) -> Workload:
    """Return the workload with every rate multiplied by `factor`; a trace is replayed that much faster."""
    _positive("workload", "factor", factor)
    return replace(
        workload, tenants=tuple(replace(tenant, process=tenant.process.scaled(factor)) for tenant in workload.tenants)
    )


def with_rates(workload: Workload, rates: Mapping[str, float]) -> Workload:
    """Return the workload with the mean rate of each model in `rates` (queries/s) set; burstiness stays as it is.

    Loads of one model share its rate in their old proportion.
    """
    old: dict[str, float] = {}
    for tenant in workload.tenants:
        old[tenant.model] = old.get(tenant.model, 0.0) + tenant.process.mean_rate
    unknown = [model for model in rates if model not in old]
    if unknown:
        raise InvalidValueError("workload", "rates", unknown, f"models of the workload: {', '.join(old)}")
    for model, rate in rates.items():
        _positive(f"model {model!r}", "rate", rate)
    return replace(
        workload,
        tenants=tuple(
            replace(tenant, process=tenant.process.scaled(rates[tenant.model] / old[tenant.model]))
            if tenant.model in rates
            else tenant
            for tenant in workload.tenants
        ),
    )


def for_capacity(service_ns: Mapping[str, float], cores: int, load: float) -> dict[str, float]:
    """Rates (queries/s per model) that ask for `load` times what `cores` cores can do, in equal shares of work.

    `service_ns` is the mean core time of one query of each model: its latency on k cores times k. Model m of n gets
    `load * cores / n` cores' worth of work, that is the rate `load * cores / (n * service_s[m])`; 1.0 is saturation.

    Raises InvalidValueError when a value is out of its range.
    """
    if not service_ns:
        raise InvalidValueError("capacity", "service_ns", {}, "the mean core time of at least one model")
    if cores < 1:
        raise InvalidValueError("capacity", "cores", cores, "at least 1")
    _positive("capacity", "load", load)
    for model, time_ns in service_ns.items():
        _positive(f"capacity of model {model!r}", "service_ns", time_ns)
    return {model: load * cores * NS_PER_S / (len(service_ns) * time_ns) for model, time_ns in service_ns.items()}
