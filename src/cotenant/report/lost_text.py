"""Why queries of a run were lost, in words, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.report.fitted_table import FittedTable
from cotenant.trace.lost import Loss, LossAccount
from cotenant.types import LossCause

Lost = Mapping[str, Mapping[LossCause, int]]
"""Lost queries by tenant and cause."""

_WORDS: Mapping[LossCause, str] = {
    LossCause.OWN_RATE: "its tenant asks for more than its share, and it waited behind its own",
    LossCause.NEIGHBOUR: "it waited behind {whom!r}, or was given up for it",
    LossCause.SLOW: "launches of its tenant ran longer than the profile says",
    LossCause.STOLEN: "launches were kept off their cores by something else",
    LossCause.SLO: "the profile says that it takes longer than its SLO",
    LossCause.DOOR: "it came to the core late, from a front-end, or found no room there",
    LossCause.REPLY: "its answer was there in time, and was written late",
    LossCause.RATE_LIMIT: "its tenant sent more queries a second than its max_rate",
    LossCause.CLIENT: "its client allowed less time than the SLO, or withdrew it",
    LossCause.FAILED: "a worker died, or the model raised",
    LossCause.GONE: "the model was unloaded or reloaded, or the server started or stopped",
}


def loss_sentence(loss: Loss) -> str:
    """The cause of one loss, and what else delayed the query."""
    told = f"Lost by {loss.cause.value}: {_WORDS[loss.cause].format(whom=loss.whom)}."
    if loss.delays is None:
        return told
    waits = {name: ns + loss.delays.slow.get(name, 0) for name, ns in loss.delays.behind.items() if name != loss.tenant}
    parts = {
        "at the door": loss.delays.door_ns,
        "behind its own": loss.delays.behind.get(loss.tenant, 0),
        **{f"behind {name!r}": ns for name, ns in sorted(waits.items(), key=lambda each: -each[1])},
        "by launches of its tenant that took longer than the profile says": loss.delays.slow.get(loss.tenant, 0),
        "off the processor": loss.delays.stolen_ns,
        "without a worker": loss.delays.away_ns,
    }
    shown = ", ".join(f"{ns / 1e6:.1f} ms {name}" for name, ns in parts.items() if ns >= 50_000)
    return f"{told} Delayed {shown}." if shown else told


def rows(lost: Lost) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table: a column for each cause that there is, and where there are several tenants a total."""
    causes = [cause for cause in LossCause if any(each.get(cause) for each in lost.values())]
    lines = [(name, lost[name]) for name in sorted(lost)]
    if len(lines) > 1:
        lines.append(("total", {cause: sum(each.get(cause, 0) for each in lost.values()) for cause in causes}))
    cells = [
        [name, str(sum(each.values())), *(str(each.get(cause, 0) or "") for cause in causes)] for name, each in lines
    ]
    return ["tenant", "lost", *(cause.value for cause in causes)], cells


def lost_table(lost: Lost) -> FittedTable:
    """For the terminal."""
    heads, cells = rows(lost)
    table = FittedTable(title="lost queries by cause")
    for head in heads:
        table.add_column(head, justify="left" if head == "tenant" else "right")
    for row in cells:
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    return table


def neighbours(account: LossAccount) -> list[str]:
    """To whom tenants lost queries, most first."""
    found = sorted(account.whom.items(), key=lambda entry: (-entry[1], entry[0]))
    return [f"{tenant} lost {count} to {whom}" for (tenant, whom), count in found]


def missing_sentences(events: int) -> list[str]:
    """What events that are missing in a trace mean for the figures of the run."""
    counted = f"{events} events are missing in the trace, the server's disk was too slow for them: queries and launches"
    return [f"{counted} that were under way there are not counted."] if events else []


def lost_facts(account: LossAccount) -> dict[str, Any]:
    """Plain data: losses by tenant and cause, and those to a neighbour by tenant and neighbour."""
    to: dict[str, dict[str, int]] = {}
    for (tenant, whom), count in sorted(account.whom.items()):
        to.setdefault(tenant, {})[whom] = count
    lost = {name: {cause.value: count for cause, count in each.items()} for name, each in sorted(account.lost.items())}
    return {"lost": lost, "to_neighbours": to}


def html_rows(accounts: Mapping[str, LossAccount]) -> Sequence[tuple[str, list[str], list[list[str]], str]]:
    """Per run that lost something: its name, the table, and to whom."""
    return [
        (name, *rows(account.lost), "; ".join(neighbours(account)))
        for name, account in accounts.items()
        if account.lost
    ]
