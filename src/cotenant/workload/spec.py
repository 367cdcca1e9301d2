"""Workloads: tenants, their arrival processes, a duration and a seed. Pure data and arithmetic on it.

Fields and ranges are those of the workload file; there they have the names of `field(name=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import fields, replace

from cotenant.errors import InvalidValueError
from cotenant.files import Milliseconds, Seconds
from cotenant.types import DEFAULT_PRIORITY

NS_PER_S = 1_000_000_000
MOST_QUERIES = 100_000_000
"""Largest expected number of queries of a workload: half an hour of simulation."""

Name = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


def _positive(where: str, name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidValueError(where, name, value, "a positive finite number")


class _Checked(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all parts of a workload. Raises InvalidValueError for a value outside its range."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            try:
                msgspec.convert(value, each.type, dec_hook=_in_range)
            except msgspec.ValidationError as error:
                expected = str(error).partition(" - at `")[0].removeprefix("Expected ")
                raise InvalidValueError(type(self).__name__, each.name, value, expected) from None


def _in_range(kind: Any, value: object) -> object:
    """Accept a time that is already in nanoseconds, within its range."""
    if isinstance(value, int) and kind.least_ns <= value <= kind.most_ns:
        return value
    raise ValueError(f"Expected nanoseconds from {kind.least_ns} to {kind.most_ns}")


class _Process(_Checked, frozen=True, tag_field="arrivals"):
    """Arrival process of a tenant."""

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        raise NotImplementedError

    def expected(self, duration_s: float) -> float:
        """Expected number of queries in a run, or of other draws, if that is larger."""
        return self.mean_rate * duration_s


class Poisson(_Process, frozen=True, tag="poisson"):
    """Independent arrivals: exponential gaps with mean 1 / `rate` (queries per second)."""

    rate: Positive

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Poisson:
        """Return the same process with `factor` times the rate."""
        return replace(self, rate=self.rate * factor)


class Uniform(_Process, frozen=True, tag="uniform"):
    """Constant gaps of 1 / `rate` seconds, with a seeded random phase, so that tenants are not synchronous."""

    rate: Positive

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Uniform:
        """Return the same process with `factor` times the rate."""
        return replace(self, rate=self.rate * factor)


class Gamma(_Process, frozen=True, tag="gamma"):
    """Gamma-distributed gaps with mean 1 / `rate` and coefficient of variation `cv`; 1 is Poisson, above is bursty."""

    rate: Positive
    cv: Positive

    @property
    def mean_rate(self) -> float:
        """Mean queries per second."""
        return self.rate

    def scaled(self, factor: float) -> Gamma:
        """Return the same process with `factor` times the rate and an unchanged `cv`."""
        return replace(self, rate=self.rate * factor)

    def expected(self, duration_s: float) -> float:
        """Expected queries: the process begins with an arrival, which adds a burst of about cv^2 / 2 (Cox, 1962)."""
        return self.rate * duration_s + self.cv**2 / 2


class Mmpp(_Process, frozen=True, tag="mmpp"):
    """Markov-modulated Poisson process with cyclic states.

    State i has Poisson arrivals at `rates[i]` and an exponential duration with mean `mean_dwell_s[i]`. The first state
    is drawn from the stationary distribution, so that the mean rate holds from the start.
    """

    rates: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e12)], ...], Meta(min_length=2)]
    mean_dwell_s: tuple[Positive, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.rates):
            raise InvalidValueError("Mmpp", "rates", list(self.rates), "at least one above 0")
        if len(self.mean_dwell_s) != len(self.rates):
            dwells_s = list(self.mean_dwell_s)
            raise InvalidValueError("Mmpp", "mean_dwell_s", dwells_s, f"one number per rate, here {len(self.rates)}")

    @property
    def mean_rate(self) -> float:
        """Mean queries per second: the rates, weighted by the mean durations of their states."""
        return sum(r * d for r, d in zip(self.rates, self.mean_dwell_s, strict=True)) / sum(self.mean_dwell_s)

    def scaled(self, factor: float) -> Mmpp:
        """Return the same process with `factor` times the rates and unchanged dwell times."""
        return replace(self, rates=tuple(rate * factor for rate in self.rates))

    def expected(self, duration_s: float) -> float:
        """Expected number of queries or of states, the larger one."""
        return max(self.mean_rate * duration_s, duration_s * len(self.mean_dwell_s) / sum(self.mean_dwell_s))


class Trace(_Process, frozen=True, tag="trace"):
    """Recorded arrivals, replayed `scale` times as fast: an arrival recorded at t is sent at t / `scale`.

    `times_ns` are ascending times from the start of the trace, `file` is its file.
    """

    times_ns: Annotated[tuple[Natural, ...], Meta(min_length=1)]
    scale: Positive = 1.0
    file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(a > b for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)):
            raise InvalidValueError("Trace", "times_ns", "not sorted", "ascending times")

    @property
    def mean_rate(self) -> float:
        """Mean queries per second until the last recorded arrival."""
        return len(self.times_ns) * self.scale * NS_PER_S / max(1, self.times_ns[-1])

    def scaled(self, factor: float) -> Trace:
        """Return the same trace replayed `factor` times as fast again."""
        return replace(self, scale=self.scale * factor)

    def expected(self, duration_s: float) -> float:
        """Number of recorded arrivals."""
        return len(self.times_ns)


ArrivalProcess = Poisson | Uniform | Gamma | Mmpp | Trace


class TenantLoad(_Checked, frozen=True):
    """The queries of one tenant.

    `name` distinguishes two loads of one model. `slo_ns` None: that of the server or repository. `timeout_ns` and
    `priority` (0: unset) are sent with each query. `items` are rows of a query, `shape` is the number of the declared
    shape.

    Raises InvalidValueError when a value is out of its range.
    """

    name: Name
    model: Name
    process: ArrivalProcess
    protocol: Literal["http", "grpc"] = "http"
    slo_ns: Milliseconds | None = field(default=None, name="slo_ms")
    items: Count = 1
    shape: Natural = 0
    timeout_ns: Milliseconds | None = field(default=None, name="timeout_ms")
    priority: Natural = DEFAULT_PRIORITY

    def misfit(self, max_batch: int, shapes: int) -> str | None:
        """Reason for which a model with `max_batch` rows and this number of declared shapes refuses the queries.

        None if it accepts them. A model without declared shapes accepts any that its inputs allow, as shape 0.
        """
        if self.items > max(1, max_batch):
            return (
                f"tenant {self.name!r}: items is {self.items}, but model {self.model!r} takes at most "
                f"{max(1, max_batch)} rows"
            )
        if self.shape >= max(1, shapes):
            return (
                f"tenant {self.name!r}: shape is {self.shape}, but model {self.model!r} declares {shapes} shapes, "
                "numbered from 0"
            )
        return None


class Workload(_Checked, frozen=True):
    """Tenants with their arrivals over `duration_ns`.

    Queries scheduled before `warmup_ns` are sent, but not counted.

    Raises InvalidValueError when a value is out of its range, or more than MOST_QUERIES are expected.
    """

    tenants: Annotated[tuple[TenantLoad, ...], Meta(min_length=1)] = field(name="tenant")
    duration_ns: Seconds = field(name="duration_s")
    warmup_ns: Seconds = field(default=0, name="warmup_s")
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [tenant.name for tenant in self.tenants]
        if len(dict.fromkeys(names)) < len(names):
            raise InvalidValueError(
                "Workload", "tenant", names, "distinct names (set `name` where a model comes twice)"
            )
        if not self.warmup_ns < self.duration_ns:
            raise InvalidValueError("Workload", "warmup_ns", self.warmup_ns, "less than the duration")
        duration_s, total = self.duration_ns / NS_PER_S, 0.0
        for tenant in self.tenants:
            total += tenant.process.expected(duration_s)
            if total > MOST_QUERIES:
                place = f"the arrivals up to those of tenant {tenant.name!r} over {duration_s:g} s"
                most = f"at most {MOST_QUERIES:,}: lower rates, cv or duration_s"
                raise InvalidValueError(place, "number of queries", float(f"{total:.3g}"), most)

    @property
    def mean_rate(self) -> float:
        """Mean queries per second over all tenants."""
        return sum(tenant.process.mean_rate for tenant in self.tenants)

    @property
    def limit_ns(self) -> dict[str, int]:
        """Client time-outs by name of the load, for loads with one."""
        return {tenant.name: tenant.timeout_ns for tenant in self.tenants if tenant.timeout_ns is not None}


def scale(workload: Workload, factor: float) -> Workload:
    """Return the workload with every rate multiplied by `factor`; a trace is replayed that much faster.

    A workload of traces alone lasts shorter by that factor, as the replay of a trace does.
    """
    _positive("workload", "factor", factor)
    tenants = tuple(replace(tenant, process=tenant.process.scaled(factor)) for tenant in workload.tenants)
    if not all(isinstance(tenant.process, Trace) for tenant in tenants):
        return replace(workload, tenants=tenants)
    times = {"duration_ns": max(1, round(workload.duration_ns / factor)), "warmup_ns": int(workload.warmup_ns / factor)}
    return replace(workload, tenants=tenants, **times)


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
    """Rates (queries/s per model) with a demand of `load` times the capacity of `cores` cores, in equal shares of work.

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
