"""Figures of a run: goodput, attainment and percentiles, as pure functions of the outcomes of its queries.

`docs/metrics.md` defines each figure. The load generator and the simulator both fill an `OutcomeLog`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from cotenant.errors import InvalidValueError
from cotenant.tabular import Tabular
from cotenant.types import Outcome

OUTCOMES: tuple[Outcome, ...] = tuple(Outcome)
"""Position = code in the columns of an `OutcomeLog`."""
_CODES: Mapping[Outcome, int] = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_ANSWERED, _LATE = _CODES[Outcome.ANSWERED], _CODES[Outcome.LATE]


_NEARLY = 0.95
"""Part of the SLO from which a client's time-out counts as the SLO: transport takes some of a gRPC deadline."""


def is_impatient(limit_ns: int | None, slo_ns: int) -> bool:
    """Whether a client's time-out `limit_ns` is below the SLO."""
    return limit_ns is not None and limit_ns < _NEARLY * slo_ns


def is_excluded(outcome: Outcome, latency_ns: int, slo_ns: int, limit_ns: int | None = None) -> bool:
    """Whether a query is excluded from the attainment of its tenant.

    That holds if its client set a time-out (`limit_ns`) below the SLO, or cancelled it within the SLO. Whether it would
    have been answered in time is unknown.
    """
    if outcome is Outcome.CANCELLED and latency_ns <= slo_ns:
        return True
    return limit_ns is not None and is_impatient(limit_ns, slo_ns)


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """Outcome of one query. Times are nanoseconds from the start of the run.

    `scheduled_ns` is the time at which it was due to be sent (in the simulator, its arrival), even if it was sent late.
    """

    tenant: str
    scheduled_ns: int
    ended_ns: int
    outcome: Outcome

    @property
    def latency_ns(self) -> int:
        """Time from due to ended."""
        return self.ended_ns - self.scheduled_ns


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The queries of one tenant, in the order in which they ended: int64 nanoseconds, and codes into `OUTCOMES`."""

    scheduled_ns: npt.NDArray[np.int64]
    ended_ns: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.uint8]

    @property
    def latency_ns(self) -> npt.NDArray[np.int64]:
        """Time from due to ended, per query."""
        return self.ended_ns - self.scheduled_ns

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Whether the query got an answer, in time or late."""
        return np.isin(self.outcome, (_ANSWERED, _LATE))

    def of(self, outcome: Outcome) -> npt.NDArray[np.bool_]:
        """Whether the query had this outcome."""
        return np.equal(self.outcome, _CODES[outcome])

    def excluded(self, slo_ns: int | None, limit_ns: int | None = None) -> npt.NDArray[np.bool_]:
        """Whether each query is excluded from attainment (`is_excluded`); none without a known SLO."""
        if slo_ns is None:
            return np.zeros(len(self.outcome), np.bool_)
        if is_impatient(limit_ns, slo_ns):
            return np.ones(len(self.outcome), np.bool_)
        return self.of(Outcome.CANCELLED) & (self.latency_ns <= slo_ns)

    def window(self, start_ns: int, end_ns: int) -> Columns:
        """The queries due in [start, end)."""
        keep = (self.scheduled_ns >= start_ns) & (self.scheduled_ns < end_ns)
        return self if keep.all() else Columns(self.scheduled_ns[keep], self.ended_ns[keep], self.outcome[keep])


class OutcomeLog:
    """Append-only columns of the outcomes of queries, 17 bytes for each.

    Tenants named at construction come first, and are listed even without queries.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self._columns: dict[str, tuple[array[int], array[int], bytearray]] = {}
        self.policy_faults = 0
        """Failed calls of the policy in the run (`core.faults`)."""
        for tenant in tenants:
            self._open(tenant)

    @classmethod
    def of(cls, records: Iterable[QueryRecord], tenants: Iterable[str] = ()) -> OutcomeLog:
        """Build a log of records."""
        log = cls(tenants)
        for record in records:
            log.add(record.tenant, record.scheduled_ns, record.ended_ns, record.outcome)
        return log

    def add(self, tenant: str, scheduled_ns: int, ended_ns: int, outcome: Outcome) -> None:
        """Append the outcome of a query."""
        scheduled, ended, codes = self._columns.get(tenant) or self._open(tenant)
        scheduled.append(scheduled_ns)
        ended.append(ended_ns)
        codes.append(_CODES[outcome])

    def extend(self, other: OutcomeLog) -> None:
        """Append all of another log, such as that of another run under the same conditions."""
        self.policy_faults += other.policy_faults
        for tenant, columns in other._columns.items():
            for mine, theirs in zip(self._columns.get(tenant) or self._open(tenant), columns, strict=True):
                mine.extend(theirs)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names, in the order given or of the first query."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return sum(len(codes) for _, _, codes in self._columns.values())

    def columns(self, tenant: str, last: int | None = None) -> Columns:
        """Copy of the queries of one tenant, or of the `last` that ended. Raises InvalidValueError if unknown."""
        if tenant not in self._columns:
            raise InvalidValueError("outcome log", "tenant", tenant, f"one of {', '.join(self._columns) or '(none)'}")
        scheduled, ended, codes = self._columns[tenant]
        start = 0 if last is None else max(0, len(codes) - last)
        return Columns(
            np.array(scheduled[start:], np.int64),
            np.array(ended[start:], np.int64),
            np.frombuffer(bytes(codes[start:]), np.uint8),
        )

    def records(self) -> Iterator[QueryRecord]:
        """Yield every query, tenant by tenant, in the order in which they ended."""
        for tenant, (scheduled, ended, codes) in self._columns.items():
            for scheduled_ns, ended_ns, code in zip(scheduled, ended, codes, strict=True):
                yield QueryRecord(tenant, scheduled_ns, ended_ns, OUTCOMES[code])

    def _open(self, tenant: str) -> tuple[array[int], array[int], bytearray]:
        return self._columns.setdefault(tenant, (array("q"), array("q"), bytearray()))


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """Figures of one tenant, or of all, over the counted window.

    `p50_ns` and `p99_ns` are over answered and late queries; None without any. `slo_ns` is None if unknown, and for
    the total. `excluded` counts the offered queries excluded from attainment, `excluded_answered` those answered.
    """

    tenant: str
    span_ns: int
    slo_ns: int | None
    answered: int
    late: int
    rejected: int
    dropped: int
    failed: int
    cancelled: int
    p50_ns: int | None
    p99_ns: int | None
    excluded: int = 0
    excluded_answered: int = 0

    @property
    def offered(self) -> int:
        """Queries due in the window, of any outcome."""
        return self.answered + self.late + self.rejected + self.dropped + self.failed + self.cancelled

    @property
    def attainment(self) -> float | None:
        """Share of the offered queries answered within the SLO, without the `excluded` ones; None without any."""
        counted = self.offered - self.excluded
        return (self.answered - self.excluded_answered) / counted if counted else None

    @property
    def goodput_per_s(self) -> float:
        """Queries answered within the SLO, per second of the window."""
        return self.answered * 1e9 / self.span_ns

    @property
    def offered_per_s(self) -> float:
        """Queries due, per second of the window."""
        return self.offered * 1e9 / self.span_ns

    @property
    def p50_ms(self) -> float | None:
        """Median latency in milliseconds."""
        return None if self.p50_ns is None else self.p50_ns / 1e6

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of latency in milliseconds."""
        return None if self.p99_ns is None else self.p99_ns / 1e6

    @property
    def slo_ms(self) -> float | None:
        """The SLO in milliseconds."""
        return None if self.slo_ns is None else self.slo_ns / 1e6


@dataclass(frozen=True, slots=True)
class Summary(Tabular):
    """Figures of a run: one line per tenant and one over all queries."""

    tenants: tuple[TenantSummary, ...]
    total: TenantSummary

    @property
    def worst_attainment(self) -> float | None:
        """The lowest attainment of a tenant with queries."""
        return min((a for t in self.tenants if (a := t.attainment) is not None), default=None)

    @property
    def mean_attainment(self) -> float | None:
        """Mean attainment of the tenants with queries, unweighted."""
        shares = [a for t in self.tenants if (a := t.attainment) is not None]
        return sum(shares) / len(shares) if shares else None

    @override
    def rows(self) -> list[dict[str, Any]]:
        """The figures of `to_json`, a row for each tenant, and with several tenants a row "total"."""
        lines = (*self.tenants, self.total) if len(self.tenants) > 1 else self.tenants
        return [{"tenant": line.tenant, **_figures(line)} for line in lines]

    def tenant(self, name: str) -> TenantSummary:
        """The line of one tenant. Raises InvalidValueError when there is none."""
        for summary in self.tenants:
            if summary.tenant == name:
                return summary
        raise InvalidValueError("summary", "tenant", name, f"one of {', '.join(t.tenant for t in self.tenants)}")


def percentile_ns(latencies_ns: npt.ArrayLike, pct: float) -> int | None:
    """Nearest-rank percentile: the smallest observed value that at least `pct` % of the values do not exceed.

    It is always a value that occurred. None when there are no values. Raises InvalidValueError unless 0 < pct <= 100.
    """
    if not 0 < pct <= 100:
        raise InvalidValueError("percentile", "pct", pct, "above 0, at most 100")
    values = np.asarray(latencies_ns, np.int64)
    if values.size == 0:
        return None
    # pct * n before the division: 99 % of 100 values is rank 99, which 0.99 * 100 misses in some cases by rounding up.
    rank = max(1, math.ceil(pct * values.size / 100))
    return int(np.partition(values, rank - 1)[rank - 1])


def summarise(
    queries: OutcomeLog | Iterable[QueryRecord],
    *,
    end_ns: int,
    start_ns: int = 0,
    slo_ns: Mapping[str, int] | None = None,
    limit_ns: Mapping[str, int] | None = None,
    tenants: Sequence[str] = (),
) -> Summary:
    """Summarise the queries due in [start_ns, end_ns), however late they ended.

    `limit_ns` is the clients' time-out, by tenant. `tenants` come first, and get a line even without queries.
    Raises InvalidValueError when the window is empty.
    """
    if end_ns <= start_ns:
        raise InvalidValueError("summary", "end_ns", end_ns, f"later than start_ns, which is {start_ns}")
    log = queries if isinstance(queries, OutcomeLog) else OutcomeLog.of(queries)
    names = [*tenants, *(name for name in log.tenants if name not in tenants)]
    logged = set(log.tenants)
    parts = [(log if name in logged else OutcomeLog([name])).columns(name).window(start_ns, end_ns) for name in names]
    slos, limits = slo_ns or {}, limit_ns or {}
    span_ns = end_ns - start_ns
    exclusions = [part.excluded(slos.get(name), limits.get(name)) for name, part in zip(names, parts, strict=True)]
    lines = tuple(
        _line(name, span_ns, slos.get(name), part, excluded)
        for name, part, excluded in zip(names, parts, exclusions, strict=True)
    )
    everything = Columns(
        np.concatenate([np.empty(0, np.int64), *(part.scheduled_ns for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.ended_ns for part in parts)]),
        np.concatenate([np.empty(0, np.uint8), *(part.outcome for part in parts)]),
    )
    excluded = np.concatenate([np.empty(0, np.bool_), *exclusions])
    return Summary(lines, _line("total", span_ns, None, everything, excluded))


def _line(
    name: str, span_ns: int, slo_ns: int | None, columns: Columns, excluded: npt.NDArray[np.bool_]
) -> TenantSummary:
    counts = np.bincount(columns.outcome, minlength=len(OUTCOMES))
    latencies = columns.latency_ns[columns.completed]
    return TenantSummary(
        tenant=name,
        span_ns=span_ns,
        slo_ns=slo_ns,
        **{outcome.value: int(counts[code]) for code, outcome in enumerate(OUTCOMES)},
        p50_ns=percentile_ns(latencies, 50),
        p99_ns=percentile_ns(latencies, 99),
        excluded=int(excluded.sum()),
        excluded_answered=int((excluded & columns.of(Outcome.ANSWERED)).sum()),
    )


def to_json(summary: Summary) -> dict[str, Any]:
    """Plain data of a summary, ready for `json.dumps`: `{"tenants": {name: figures}, "total": figures}`.

    Figures: `slo_ms`, `span_s`, the six counts, `offered`, `apart` (excluded), `p50_ms`, `p99_ms`, `goodput_per_s`,
    `offered_per_s`, `attainment` (0 to 1); null without a value.
    """
    return {
        "tenants": {line.tenant: _figures(line) for line in summary.tenants},
        "total": _figures(summary.total),
        "worst_attainment": summary.worst_attainment,
        "mean_attainment": summary.mean_attainment,
    }


def _figures(line: TenantSummary) -> dict[str, Any]:
    return {
        "slo_ms": line.slo_ms,
        "span_s": line.span_ns / 1e9,
        "offered": line.offered,
        "answered": line.answered,
        "late": line.late,
        "rejected": line.rejected,
        "dropped": line.dropped,
        "failed": line.failed,
        "cancelled": line.cancelled,
        "apart": line.excluded,
        "p50_ms": line.p50_ms,
        "p99_ms": line.p99_ms,
        "goodput_per_s": line.goodput_per_s,
        "offered_per_s": line.offered_per_s,
        "attainment": line.attainment,
    }
