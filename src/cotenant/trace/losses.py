"""Lost queries of a recorded run: feeds the records of a trace to `lost.LossAccount`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import ValidationError, convert

from cotenant.core.actions import Action, Launch, Respond
from cotenant.predict.scales import Scales
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.trace.lost import Loss, LossAccount
from cotenant.trace.trace_log import Header, Record, TraceError, decode_event, in_lines
from cotenant.work import Share

_ACTIONS: Mapping[str, type[Action]] = {"Launch": Launch, "Respond": Respond}
_SKIPPED = (
    *("LogFull", "LaunchExpanded", "TimerFired", "LookAheadDue"),
    *("DrainStarted", "QueryCancelled", "QueryWithdrawn", "OthersTook"),
)
"""Kinds of records of which only the actions matter for lost queries."""


def losses_of(head: Header, records: Iterable[Record]) -> tuple[LossAccount, list[Loss]]:
    """The account of a trace, and its lost queries in the order of their ends.

    Queries that are pending at a gap are left out, since their ends are not known.
    Raises TraceError when the trace names no lanes, or a record has wrong fields.
    """
    with in_lines(records) as lines:
        return _losses_of(head, lines)


def _losses_of(head: Header, records: Iterable[Record]) -> tuple[LossAccount, list[Loss]]:
    losses: list[Loss] = []
    tables = dict(head.tables)
    account = LossAccount(TablePredictor(tables, head.scales), _lanes(head.policy_options), head.tenants, losses.append)
    for record in records:
        event = record.event
        if record.kind == "EventsMissing":
            account.forget()
            continue
        if record.kind == "PolicyChanged":
            account.use_lanes(_lanes(event["policy_options"]))
        elif record.kind == "PredictorChanged":
            plain = event["predictor"]
            if not tables.keys() >= plain["tables"].keys():
                tables |= convert(plain["tables"], dict[str, LatencyTable])
            account.use_predictor(TablePredictor(tables, convert(plain["scales"], Scales, str_keys=True)))
        known = record.kind in (*_SKIPPED, "PolicyChanged", "PredictorChanged")
        seen = None if known else decode_event(record.kind, event)
        account(
            record.time_ns, seen, [convert(each, _ACTIONS[kind]) for kind, each in record.actions if kind in _ACTIONS]
        )
    return account, losses


def _lanes(options: Mapping[str, Any]) -> tuple[Share, ...]:
    lanes = options.get("lanes")
    if not lanes:
        raise TraceError("the trace names no lanes of its policy, expected some in 'policy_options'")
    try:
        return convert(lanes, tuple[Share, ...])
    except ValidationError as error:
        raise TraceError(f"line 1 or a later one: 'policy_options' has wrong lanes ({error})") from None
