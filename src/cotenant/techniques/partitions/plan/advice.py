"""Sensitivity analysis of a request by planning again: how far rates may grow, and which changes make it feasible.

For every reported figure the planner found a plan. The bisections assume that smaller loads are easier; for a planner
that is not monotone, better figures may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from cotenant.techniques.partitions.plan.application import Application, stage_loads
from cotenant.techniques.partitions.plan.file import Request
from cotenant.techniques.partitions.plan.types import NS_PER_MS, Costs, DeviceType, Infeasible, Load, Plan, Planner

MOST_GROWTH = 1024.0
MOST_DEVICES = 64
"""Most devices that are added."""
MOST_LOOSER = 16.0
"""Largest factor on an SLO that is tried."""
MOST_LOWER = 1024.0
"""Largest divisor of a rate that is tried."""
MOST_OWNERS = 16
BEST = 2
STEPS = 7
"""Steps of a bisection over an interval [x, 2x]: within 1 % of the result."""


@dataclass(frozen=True, slots=True)
class GrowthLimit:
    """All rates together may grow by `factor`; at `until` times the rates, `breaks` is the broken constraint.

    `until` and `breaks` are None when no limit was found up to MOST_GROWTH.
    """

    factor: float
    until: float | None
    breaks: Infeasible | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that makes a request feasible, with all else unchanged.

    `kind` is one of

    - "devices": `value` more devices of the type `name`
    - "slo", "rate": `value` ns, or rows/s, for the tenant or application `name`
    - "slos", "rates": all of them times `value`

    `text`: the change in words.
    """

    kind: str
    name: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Unservable:
    """A tenant or application that cannot be served alone, and changes of its SLO or rate that make it possible."""

    name: str
    broken: Infeasible
    remedies: tuple[Remedy, ...]


def all_loads(request: Request, devices: Sequence[DeviceType], costs: Costs) -> tuple[Load, ...]:
    """The loads of tenants, and one per stage of every application. Raises what `stage_loads` raises."""
    stages = [load for each in request.applications for load in stage_loads(each, devices, costs)]
    return (*request.loads, *stages)


class Advisor:
    """Plans variants of one request. Deterministic if the planner is; raises what the planner raises."""

    def __init__(self, planner: Planner, request: Request, costs: Costs) -> None:
        self._planner = planner
        self._request = request
        self._costs = costs

    def plan(self, running: Plan | None = None) -> Plan | Infeasible:
        """The plan of the unchanged request."""
        return self._planned(self._request, running)

    def growth(self) -> GrowthLimit:
        """The limit to which all rates may grow together, for a feasible request."""
        low, high = 1.0, 2.0
        breaks: Infeasible | None = None
        while high <= MOST_GROWTH:
            tried = self._planned(_scaled(self._request, high))
            if isinstance(tried, Infeasible):
                breaks = tried
                break
            low, high = high, 2 * high
        if breaks is None:
            return GrowthLimit(low, None, None)
        for _ in range(STEPS):
            middle = (low + high) / 2
            tried = self._planned(_scaled(self._request, middle))
            if isinstance(tried, Infeasible):
                high, breaks = middle, tried
            else:
                low = middle
        return GrowthLimit(low, high, breaks)

    def remedies(self, broken: Infeasible) -> tuple[Remedy, ...]:
        """Changes each of which alone makes an infeasible request feasible; empty if none was found.

        SLOs and rates are changed for up to MOST_OWNERS tenants and applications, first for the one that breaks first.
        The BEST smallest changes of each kind are reported.
        """
        found = [self._more(kind) for kind in dict.fromkeys(self._request.devices)]
        owners = dict.fromkeys([self._owner(broken.tenant), *_names(self._request)])
        names = list(owners)[:MOST_OWNERS]
        slos = [remedy for name in names for remedy in self._looser(name)]
        rates = [remedy for name in names for remedy in self._lower(name)]
        found += [remedy for _, remedy in sorted(slos, key=lambda each: each[0])[:BEST]]
        found += [remedy for _, remedy in sorted(rates, key=lambda each: each[0])[:BEST]]
        found += [self._looser_all(), self._lower_all()]
        return tuple(remedy for remedy in found if remedy is not None)

    def unservable(self) -> tuple[Unservable, ...]:
        """Tenants and applications that cannot be served even without the others, each with its own remedies."""
        found = []
        for name in _names(self._request):
            own = Advisor(self._planner, _only(self._request, name), self._costs)
            broken = own.plan()
            if isinstance(broken, Infeasible):
                remedies = tuple(remedy for change in (own._looser, own._lower) for _, remedy in change(name))
                found.append(Unservable(name, broken, remedies))
        return tuple(found)

    def _planned(self, request: Request, running: Plan | None = None) -> Plan | Infeasible:
        loads = all_loads(request, request.devices, self._costs)
        return self._planner.plan(loads, request.devices, self._costs, running)

    def _holds(self, request: Request) -> bool:
        return isinstance(self._planned(request), Plan)

    def _more(self, kind: DeviceType) -> Remedy | None:
        def extended(count: int) -> Request:
            return replace(self._request, devices=(*self._request.devices, *(kind,) * count))

        low, high = 0, 1
        while not self._holds(extended(high)):
            low, high = high, 2 * high
            if high > MOST_DEVICES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(extended(middle)) else (middle, high)
        return Remedy("devices", kind.name, high, f"{high} more {kind.name!r}, {_count(extended(high), kind)} in all")

    def _looser(self, name: str) -> Iterator[tuple[float, Remedy]]:
        """The smallest increase of one SLO that makes the request feasible, with its factor; nothing if none does."""
        slo_ns = next(each.slo_ns for each in _owners(self._request, name))

        def looser_ns(factor: float) -> int:
            return round(_tidy(slo_ns * factor / NS_PER_MS) * NS_PER_MS)

        factor = _edge(lambda factor: self._holds(_changed(self._request, name, slo_ns=looser_ns(factor))), MOST_LOOSER)
        if factor is not None:
            ns = looser_ns(factor)
            text = f"an SLO of {ns / NS_PER_MS:.4g} ms for {name!r} instead of {slo_ns / NS_PER_MS:.4g} ms"
            yield factor, Remedy("slo", name, ns, text)

    def _lower(self, name: str) -> Iterator[tuple[float, Remedy]]:
        """The largest lower rate that makes the request feasible, with its divisor; nothing if none does."""
        rate = next(each.rate_per_s for each in _owners(self._request, name))

        def holds(divisor: float) -> bool:
            return self._holds(_changed(self._request, name, rate_per_s=_tidy(rate / divisor)))

        divisor = _edge(holds, MOST_LOWER)
        if divisor is not None:
            lower = _tidy(rate / divisor)
            yield divisor, Remedy("rate", name, lower, f"{lower:.4g} rows/s for {name!r} instead of {rate:.4g}")

    def _looser_all(self) -> Remedy | None:
        factor = _edge(lambda factor: self._holds(_loosened(self._request, _tidy(factor))), MOST_LOOSER)
        if factor is None:
            return None
        return Remedy("slos", "", _tidy(factor), f"all SLOs {_tidy(factor):.4g} times as long")

    def _lower_all(self) -> Remedy | None:
        divisor = _edge(lambda divisor: self._holds(_scaled(self._request, _tidy(1 / divisor))), MOST_LOWER)
        if divisor is None:
            return None
        share = _tidy(1 / divisor)
        return Remedy("rates", "", share, f"all rates at {100 * share:.4g} % of what they are")

    def _owner(self, tenant: str) -> str:
        """The application of a stage's load, or the tenant itself."""
        for application in self._request.applications:
            if tenant in [application.tenant(stage) for stage in application.stages]:
                return application.name
        return tenant


def _edge(holds: Callable[[float], bool], most: float) -> float | None:
    """A factor above 1 that holds, just above factors that do not (bisection); None if `most` does not hold."""
    if not holds(most):
        return None
    low, high = 1.0, 2.0
    while high < most and not holds(high):
        low, high = high, 2 * high
    high = min(high, most)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _tidy(value: float) -> float:
    """The value with four significant digits, so that the shown figure is the tried one."""
    return float(f"{value:.4g}")


def _names(request: Request) -> list[str]:
    return [*[load.tenant for load in request.loads], *[each.name for each in request.applications]]


def _only(request: Request, name: str) -> Request:
    """The request of one tenant or application."""
    applications = tuple(each for each in request.applications if each.name == name)
    return replace(
        request, loads=tuple(load for load in request.loads if load.tenant == name), applications=applications
    )


def _owners(request: Request, name: str) -> list[Load | Application]:
    applications = [each for each in request.applications if each.name == name]
    return [*[load for load in request.loads if load.tenant == name], *applications]


def _scaled(request: Request, factor: float) -> Request:
    loads = tuple(structs.replace(load, rate_per_s=load.rate_per_s * factor) for load in request.loads)
    applications = tuple(structs.replace(each, rate_per_s=each.rate_per_s * factor) for each in request.applications)
    return replace(request, loads=loads, applications=applications)


def _loosened(request: Request, factor: float) -> Request:
    loads = tuple(structs.replace(load, slo_ns=round(load.slo_ns * factor)) for load in request.loads)
    applications = tuple(structs.replace(each, slo_ns=round(each.slo_ns * factor)) for each in request.applications)
    return replace(request, loads=loads, applications=applications)


def _changed(request: Request, name: str, *, slo_ns: int | None = None, rate_per_s: float | None = None) -> Request:
    """The request with another SLO or rate of one tenant or application."""
    changes = {"slo_ns": slo_ns, "rate_per_s": rate_per_s}
    given = {key: value for key, value in changes.items() if value is not None}
    loads = tuple(structs.replace(load, **given) if load.tenant == name else load for load in request.loads)
    applications = tuple(structs.replace(each, **given) if each.name == name else each for each in request.applications)
    return replace(request, loads=loads, applications=applications)


def _count(request: Request, kind: DeviceType) -> int:
    return sum(device.name == kind.name for device in request.devices)
