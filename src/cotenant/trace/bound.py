"""Bounds of a recorded run: its result beside the upper bounds of `workload.bound`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import convert

from cotenant.core.fair_queues import FairQueues
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.trace.trace_log import Header, Record, TraceError, in_lines, work_of
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Work
from cotenant.workload.bound import TimedQuery, largest_least_share, most_answers, most_answers_with_shares, most_value

_WHOLE = 1e-6
"""Rounding error of bounds that are whole numbers."""


@dataclass(frozen=True, slots=True)
class TenantBound:
    """A tenant of a run: its offered queries, those answered in time, and the mean of the least slot time of a query.

    `pace` is the time of its launches over that of the profile and the measured cost of launches. `alone` is the number
    of queries that it could answer in time alone on its share of the device; `share` is from 0 to 1.
    """

    tenant: str
    weight: float
    offered: int
    in_time: int
    slot_ns: float
    pace: float
    share: float
    alone: float

    @property
    def attainment(self) -> float:
        """Part of the offered queries that was answered in time; 1 without queries."""
        return self.in_time / self.offered if self.offered else 1.0


@dataclass(frozen=True, slots=True)
class RunBound:
    """Result of a run, and the upper bounds of any schedule.

    `most` bounds the queries answered in time. `shares` does so where each tenant keeps its `alone`. `weighted` bounds
    their value by the tenants' weights, `fair` the least attainment, which the tenants in `limited_by` limit.
    """

    tenants: tuple[TenantBound, ...]
    slots: int
    most: float
    shares: float
    weighted: float
    fair: float
    limited_by: tuple[str, ...]

    @property
    def in_time(self) -> int:
        """Queries answered in time."""
        return sum(each.in_time for each in self.tenants)

    @property
    def value(self) -> float:
        """Sum of the weights of queries answered in time."""
        return sum(each.in_time * each.weight for each in self.tenants)

    @property
    def least(self) -> float:
        """The least attainment of the tenants with queries."""
        return min((each.attainment for each in self.tenants if each.offered), default=1.0)

    @property
    def short(self) -> TenantBound | None:
        """The tenant with the least part of its `alone`; None if each has all of it."""
        below = [each for each in self.tenants if each.in_time < int(each.alone + _WHOLE)]
        return min(below, key=lambda each: each.in_time / each.alone, default=None)


def bound_of(head: Header, records: Iterable[Record]) -> RunBound:
    """The bounds of a recorded run.

    Cancelled queries are left out, and those that had not ended at the end or at a gap. The stages of an application
    are queries of their models. The least slot time of a query is that of its rows in the cheapest batch and share. It
    is the latency of the profile times the measured pace. The pace is by kind of launch (shape, rows, size of the
    share). A kind without launches has the best pace of its tenant.
    Raises TraceError for a trace of several devices, or without a query.
    """
    with in_lines(records) as lines:
        return _bound_of(head, lines)


def _bound_of(head: Header, records: Iterable[Record]) -> RunBound:
    if len(head.machine) != 1:
        raise TraceError(f"the trace is of the devices {', '.join(head.machine)}, expected one: slots differ")
    tables, tenants = dict(head.tables), {each.name: each for each in head.tenants}
    offered: dict[int, Query] = {}
    ended: list[tuple[Query, str]] = []
    running: dict[int, tuple[int, Work, int]] = {}
    took: dict[tuple[Work, int], tuple[int, int]] = {}
    """Number and total time of launches, by kind."""
    for record in records:
        event = record.event
        if record.kind == "EventsMissing":
            offered.clear()
            running.clear()
        elif record.kind == "QueryArrived":
            query = convert(event["query"], Query)
            offered[query.id] = query
        elif record.kind in ("TenantAdded", "TenantChanged"):
            tenants[event["tenant"]["name"]] = convert(event["tenant"], Tenant)
        elif record.kind == "PredictorChanged" and not tables.keys() >= event["predictor"]["tables"].keys():
            tables = convert(event["predictor"]["tables"], dict[str, LatencyTable]) | tables
        elif record.kind == "LaunchExpanded":
            running.pop(event["launch"], None)  # its time is of several sizes
        elif record.kind == "LaunchEnded" and event["launch"] in running:
            start_ns, work, size = running.pop(event["launch"])
            if event["error"] is None:
                count, total_ns = took.get((work, size), (0, 0))
                took[work, size] = count + 1, total_ns + record.time_ns - start_ns
        for kind, action in record.actions:
            if kind == "Launch":
                running[action["id"]] = record.time_ns, work_of(action), len(action["share"]["cores"])
            elif kind == "Respond" and action["query"] in offered:
                ended.append((offered.pop(action["query"]), action["outcome"]))
    known = {name: each for name, each in tenants.items() if name in tables}
    ended = [each for each in ended if each[0].tenant in known and each[1] != Outcome.CANCELLED]
    if not ended:
        raise TraceError("the trace has no query that ended and was of a model with a profile")
    predictor = TablePredictor(tables, head.scales)
    kinds = _pace_by_kind(predictor, known, took)
    counts = Counter[str]()
    for (work, _), (count, _) in took.items():
        counts[work.tenant] += count
    pace = {
        name: real_ns / (profile_ns + counts[name] * head.launch_ns)
        for name, (real_ns, profile_ns) in _summed(kinds).items()
    }
    slots = len(next(iter(head.machine.values())))
    sizes = _sizes(head, slots)
    cost: dict[tuple[str, int], float] = {}
    demands = []
    for query, _ in ended:
        key = query.tenant, query.shape
        if key not in cost:
            cost[key] = _row_ns(predictor, known[query.tenant], query.shape, sizes, kinds.get(query.tenant, {}))
        demands.append(TimedQuery(query.tenant, query.arrival_ns, query.deadline_ns, query.items * cost[key]))
    row_ns = {name: _row_ns(predictor, each, 0, sizes, kinds.get(name, {})) for name, each in known.items()}
    return _bound(known, demands, [outcome for _, outcome in ended], pace, row_ns, slots)


def _bound(
    known: Mapping[str, Tenant],
    demands: list[TimedQuery],
    outcomes: list[str],
    pace: Mapping[str, float],
    row_ns: Mapping[str, float],
    slots: int,
) -> RunBound:
    accounts, slot_ns = FairQueues(), dict[str, float]()
    accounts.set_quotas(known.values(), slots, lambda tenant: row_ns[tenant.name], 0)
    for name in accounts.known:
        mine = [each.slot_ns for each in demands if each.tenant == name]
        slot_ns[name] = sum(mine) / len(mine) if mine else 0.0
    share = {name: each.quota / slots for name, each in accounts.known.items()}
    shares, alone = most_answers_with_shares(demands, slots, share)
    made = []
    for name, tenant in known.items():
        ends = [outcome for each, outcome in zip(demands, outcomes, strict=True) if each.tenant == name]
        made.append(
            TenantBound(
                name,
                tenant.weight,
                len(ends),
                ends.count(Outcome.ANSWERED),
                slot_ns[name],
                pace.get(name, 1.0),
                share[name],
                alone.get(name, 0.0),
            )
        )
    weights = {each.tenant: each.weight for each in made}
    fair, limited_by = largest_least_share(demands, slots)
    most, weighted = most_answers(demands, slots), most_value(demands, slots, weights)
    return RunBound(tuple(made), slots, most, shares, weighted, fair, limited_by)


_Kinds = Mapping[tuple[int, int, int], tuple[int, int]]
"""Total time of launches, measured and by the profile, by shape, rows and size of the share."""


def _pace_by_kind(
    predictor: TablePredictor, known: Mapping[str, Tenant], took: Mapping[tuple[Work, int], tuple[int, int]]
) -> dict[str, _Kinds]:
    """Times of the launches of each tenant, by kind."""
    found: dict[str, dict[tuple[int, int, int], tuple[int, int]]] = {}
    for (work, size), (count, total_ns) in took.items():
        if work.tenant in known:
            kinds, kind = found.setdefault(work.tenant, {}), (work.shape, work.items, size)
            real_ns, profile_ns = kinds.get(kind, (0, 0))
            plain = Work(work.tenant, work.shape, work.items, work.start, work.end)
            kinds[kind] = real_ns + total_ns, profile_ns + count * predictor.latency_ns(plain, size)
    return dict(found)


def _summed(kinds: Mapping[str, _Kinds]) -> dict[str, tuple[int, int]]:
    """Times of all launches of each tenant."""
    return {
        name: (sum([real for real, _ in each.values()]), sum([profiled for _, profiled in each.values()]))
        for name, each in kinds.items()
    }


def _sizes(head: Header, slots: int) -> list[int]:
    """Sizes of the shares that the policy can give a launch."""
    return sorted({slots, *(len(lane["cores"]) for lane in head.policy_options.get("lanes", ()))})


def _row_ns(predictor: TablePredictor, tenant: Tenant, shape: int, sizes: list[int], kinds: _Kinds) -> float:
    """Least slot time of a row over batches and shares."""
    pace = {kind: real_ns / profile_ns for kind, (real_ns, profile_ns) in kinds.items()}
    quickest = min(pace.values(), default=1.0)
    return min(
        size * predictor.latency_ns(tenant.work(shape, rows), size) * pace.get((shape, rows, size), quickest) / rows
        for size in sizes
        for rows in range(1, tenant.max_batch + 1)
    )
