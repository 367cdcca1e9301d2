"""Text of the causes of lost queries: sentences, tables and plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.report.fitted_table import FittedTable
from cotenant.trace.lost import CAUSE_NAMES, Loss, LossAccount
from cotenant.types import LossCause

Lost = Mapping[str, Mapping[LossCause, int]]
"""Lost queries by tenant and cause."""

_SENTENCES: Mapping[LossCause, str] = {
    LossCause.OWN_RATE: "its tenant sends more than its quota, and it waited behind queries of its own tenant",
    LossCause.NEIGHBOUR: "it waited behind tenant {culprit!r}, or was dropped for it",
    LossCause.SLOW: "launches of its tenant took longer than the profile predicts",
    LossCause.STEAL_TIME: "other processes took time of its cores (steal time)",
    LossCause.SLO: "the profile predicts a latency above its SLO",
    LossCause.FRONT_END: "it left the front end late, or found no room there",
    LossCause.REPLY: "its response was ready in time and was written late",
    LossCause.RATE_LIMIT: "its tenant sent more queries a second than its max_rate",
    LossCause.CLIENT: "its client set a time-out below the SLO, or cancelled it",
    LossCause.FAILED: "a worker died, or the model raised an exception",
    LossCause.GONE: "the model was loaded, reloaded or unloaded, or the server started or stopped",
}


def loss_sentence(loss: Loss) -> str:
    """The cause of one loss, and the other delays of the query."""
    cause = f"Cause: {_SENTENCES[loss.cause].format(culprit=loss.culprit)}."
    if loss.delays is None:
        return cause
    waits = {name: ns + loss.delays.slow.get(name, 0) for name, ns in loss.delays.behind.items() if name != loss.tenant}
    parts = {
        "in the front end": loss.delays.front_end_ns,
        "behind queries of its own tenant": loss.delays.behind.get(loss.tenant, 0),
        **{f"behind tenant {name!r}": ns for name, ns in sorted(waits.items(), key=lambda each: -each[1])},
        "by slow launches of its tenant": loss.delays.slow.get(loss.tenant, 0),
        "of steal time": loss.delays.steal_ns,
        "without a worker": loss.delays.away_ns,
    }
    shown = ", ".join(f"{ns / 1e6:.1f} ms {name}" for name, ns in parts.items() if ns >= 50_000)
    return f"{cause} Delays: {shown}." if shown else cause


def rows(lost: Lost) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: a column for each cause that occurs and, with several tenants, a total."""
    causes = [cause for cause in LossCause if any(each.get(cause) for each in lost.values())]
    lines = [(name, lost[name]) for name in sorted(lost)]
    if len(lines) > 1:
        lines.append(("total", {cause: sum(each.get(cause, 0) for each in lost.values()) for cause in causes}))
    cells = [
        [name, str(sum(each.values())), *(str(each.get(cause, 0) or "") for cause in causes)] for name, each in lines
    ]
    return ["tenant", "lost", *(CAUSE_NAMES[cause] for cause in causes)], cells


def lost_table(lost: Lost) -> FittedTable:
    """Table of lost queries for the terminal."""
    heads, cells = rows(lost)
    table = FittedTable(title="lost queries by cause")
    for head in heads:
        table.add_column(head, justify="left" if head == "tenant" else "right")
    for row in cells:
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    return table


def neighbours(account: LossAccount) -> list[str]:
    """Sentences on the queries lost to other tenants, largest count first."""
    found = sorted(account.culprit.items(), key=lambda entry: (-entry[1], entry[0]))
    return [f"{tenant} lost {count} to {culprit}" for (tenant, culprit), count in found]


def missing_sentences(events: int) -> list[str]:
    """Warning about events missing in a trace; empty without any."""
    counted = f"{events} events are missing in the trace, since the server's disk was too slow: queries and launches"
    return [f"{counted} pending at that time are not counted."] if events else []


def lost_facts(account: LossAccount) -> dict[str, Any]:
    """Plain data: losses by tenant and cause, and losses to other tenants by tenant and culprit."""
    to: dict[str, dict[str, int]] = {}
    for (tenant, culprit), count in sorted(account.culprit.items()):
        to.setdefault(tenant, {})[culprit] = count
    lost = {name: {cause.value: count for cause, count in each.items()} for name, each in sorted(account.lost.items())}
    return {"lost": lost, "to_neighbours": to}


def html_rows(accounts: Mapping[str, LossAccount]) -> Sequence[tuple[str, list[str], list[list[str]], str]]:
    """For each run with lost queries: its name, the headings and rows of the table, and the culprits."""
    return [
        (name, *rows(account.lost), "; ".join(neighbours(account)))
        for name, account in accounts.items()
        if account.lost
    ]
