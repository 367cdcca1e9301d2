"""Counts of a gateway, and the queries of which client and gateway do not agree on one outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from cotenant.cluster.types import Counts

_POLL_S = 0.05
FIELDS = {
    "cotenant_gateway_offered_total": "offered",
    "cotenant_gateway_retries_total": "retried",
    "cotenant_gateway_repeats_total": "repeated",
}
"""The field of `Counts` for each counter without outcomes."""


def read_counts(page: str) -> dict[str, Counts]:
    """The counts of a gateway by tenant, from its page for Prometheus."""
    found: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                field = sample.labels.get("outcome") or FIELDS[sample.name]
                found.setdefault(sample.labels["tenant"], {})[field] = round(sample.value)
    return {tenant: Counts(**fields) for tenant, fields in found.items()}


def settled(look: Callable[[], Mapping[str, Counts]], sent: Mapping[str, int], limit_s: float) -> Mapping[str, Counts]:
    """The counts once every query that was sent has come and has ended, or those at the end of `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        counts = look()
        if not lost_queries(sent, counts) or time.monotonic() > deadline:
            return counts
        time.sleep(_POLL_S)


def lost_queries(sent: Mapping[str, int], counts: Mapping[str, Counts]) -> int:
    """Queries that were sent and did not come, or came and did not end, and those that did so twice."""
    found = {tenant: counts.get(tenant, Counts()) for tenant in sent}
    return sum(abs(sent[name] - each.offered) + abs(each.offered - each.ended) for name, each in found.items())
