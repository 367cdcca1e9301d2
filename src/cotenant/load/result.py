"""Results of the load generator, during and after a run, with JSON (schema in docs/metrics.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cotenant.errors import ConfigError
from cotenant.files import UNREADABLE, read_bytes, write_whole
from cotenant.measure.busy import disturbed_sentence
from cotenant.metrics import OUTCOMES, OutcomeLog, QueryRecord, Summary, is_impatient, percentile_ns, summarise, to_json
from cotenant.types import Outcome

SCHEMA = "cotenant.load/2"
LAG_LIMIT_NS = 5_000_000
"""99th percentile of the send lag above which a run has a warning: it distorts latencies of tens of ms."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Delay of sending after the scheduled time, caused by the generator or its processor."""

    p50_ns: int
    p99_ns: int
    max_ns: int

    @classmethod
    def of(cls, lags_ns: npt.ArrayLike) -> Lag:
        """Percentiles of the lags of all sent queries."""
        values = np.asarray(lags_ns, np.int64)
        return cls(percentile_ns(values, 50) or 0, percentile_ns(values, 99) or 0, int(values.max(initial=0)))


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """One tenant of a run. `reasons` counts texts of queries without a result, by outcome, with numbers masked as N.

    `wrong_answers` counts responses that differ from those to the same inputs alone; 0 without a check. `timeout_ns` is
    the client time-out of its queries.
    """

    name: str
    model: str
    protocol: str
    slo_ns: int
    mean_rate: float
    items: int = 1
    shape: int = 0
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    wrong_answers: int = 0
    timeout_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TenantLive:
    """Figures of one tenant of a running load. Percentiles are over its last 2000 queries."""

    name: str
    slo_ns: int
    sent: int
    in_flight: int
    counts: Mapping[Outcome, int]
    p50_ns: int | None
    p99_ns: int | None
    goodput_per_s: float
    timeout_ns: int | None = None

    @property
    def attainment(self) -> float | None:
        """Attainment as in a summary, without all cancelled queries."""
        counted = sum(self.counts.values()) - self.counts[Outcome.CANCELLED]
        if is_impatient(self.timeout_ns, self.slo_ns) or not counted:
            return None
        return self.counts[Outcome.ANSWERED] / counted


@dataclass(frozen=True, slots=True)
class LiveStats:
    """Figures of a running load, without the warm-up."""

    elapsed_ns: int
    duration_ns: int
    tenants: tuple[TenantLive, ...]
    lag_p99_ns: int
    sending: bool
    """False once all queries are sent and only responses are pending."""


@dataclass(frozen=True)
class LoadResult:
    """A finished run. Times count from its start; `started_at` is its wall-clock time, ISO 8601 in UTC.

    `sent_until_ns` is the end of sending: the duration, or less when the run was stopped early. `others_share` is the
    part (0 to 1) of the server's cores that other processes took; None where the server does not tell it.
    """

    tenants: tuple[TenantInfo, ...]
    log: OutcomeLog
    duration_ns: int
    warmup_ns: int
    sent_until_ns: int
    seed: int
    started_at: str
    lag: Lag
    servers: tuple[str, ...] = ()
    others_share: float | None = None

    @property
    def stopped_early(self) -> bool:
        """Whether sending ended before the planned duration."""
        return self.sent_until_ns < self.duration_ns

    @property
    def wrong_answers(self) -> int:
        """Wrong responses of all tenants."""
        return sum(tenant.wrong_answers for tenant in self.tenants)

    @property
    def slo_ns(self) -> dict[str, int]:
        """SLO by tenant."""
        return {tenant.name: tenant.slo_ns for tenant in self.tenants}

    @property
    def records(self) -> Iterator[QueryRecord]:
        """All sent queries, warm-up included."""
        return self.log.records()

    @cached_property
    def summary(self) -> Summary:
        """Figures of the queries due after the warm-up; of all queries if sending ended within it."""
        start_ns = self.warmup_ns if self.warmup_ns < self.sent_until_ns else 0
        return summarise(
            self.log,
            start_ns=start_ns,
            end_ns=max(self.sent_until_ns, 1),
            slo_ns=self.slo_ns,
            limit_ns={each.name: each.timeout_ns for each in self.tenants if each.timeout_ns is not None},
            tenants=[tenant.name for tenant in self.tenants],
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on possible errors of the figures; empty without any."""
        found = disturbed_sentence(self.others_share)
        if self.lag.p99_ns > LAG_LIMIT_NS:
            found.append(
                f"1 % of the queries were sent {self.lag.p99_ns / 1e6:.1f} ms late or more, since the load generator "
                "lacked processor time. Latencies include this; give it its own core or lower the rate."
            )
        for tenant in self.tenants:
            failed = self.summary.tenant(tenant.name).failed
            if failed:
                said = next(iter(tenant.reasons.get(Outcome.FAILED, ())), "no reason")
                found.append(f"{failed} queries of {tenant.name} failed, most often with: {said}")
        if self.stopped_early:
            found.append(
                f"stopped after {self.sent_until_ns / 1e9:.1f} s of {self.duration_ns / 1e9:.1f} s; "
                "the figures cover that time"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, which `from_json` reads. Its `summary` is for other readers."""
        queries = {}
        for name in self.log.tenants:
            columns = self.log.columns(name)
            queries[name] = {
                "scheduled_ns": columns.scheduled_ns.tolist(),
                "ended_ns": columns.ended_ns.tolist(),
                "outcome": [OUTCOMES[code].value for code in columns.outcome],
            }
        return {
            "schema": SCHEMA,
            "started_at": self.started_at,
            "servers": list(self.servers),
            "seed": self.seed,
            "duration_ns": self.duration_ns,
            "warmup_ns": self.warmup_ns,
            "sent_until_ns": self.sent_until_ns,
            "lag": asdict(self.lag),
            "others_share": self.others_share,
            "tenants": [asdict(tenant) for tenant in self.tenants],
            "queries": queries,
            "summary": to_json(self.summary),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "load result") -> LoadResult:
        """Read the data of `to_json`. Raises ConfigError for other data; `source` names it in the error."""
        if data.get("schema") != SCHEMA:
            raise ConfigError(f"{source}: schema is {data.get('schema')!r}, expected {SCHEMA!r}")
        try:
            log = OutcomeLog(tenant["name"] for tenant in data["tenants"])
            for name, columns in data["queries"].items():
                rows = zip(columns["scheduled_ns"], columns["ended_ns"], columns["outcome"], strict=True)
                for scheduled_ns, ended_ns, outcome in rows:
                    log.add(name, scheduled_ns, ended_ns, Outcome(outcome))
            return cls(
                tenants=tuple(TenantInfo(**tenant) for tenant in data["tenants"]),
                log=log,
                duration_ns=data["duration_ns"],
                warmup_ns=data["warmup_ns"],
                sent_until_ns=data["sent_until_ns"],
                seed=data["seed"],
                started_at=data["started_at"],
                lag=Lag(**data["lag"]),
                servers=tuple(data["servers"]),
                others_share=data.get("others_share"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: not a load result as docs/metrics.md describes it: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write the JSON to a file."""
        write_whole(path, json.dumps(self.to_json()).encode())

    @classmethod
    def load(cls, path: Path) -> LoadResult:
        """Read the JSON from a file. Raises ConfigError for other content."""
        try:
            data = json.loads(read_bytes(path, ConfigError))
        except UNREADABLE as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({error}), expected a load result") from error
        return cls.from_json(data, str(path))
