"""What each tenant of a run lost, and why, in words, as a table and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cotenant.trace.lost import Loss, LossAccount
from cotenant.types import LossCause

MEANING = {
    LossCause.OWN_RATE: "waited behind its own tenant's queries",
    LossCause.NEIGHBOUR: "waited behind another tenant's, or was given up for them",
    LossCause.SLOW: "ran longer than the profile says",
    LossCause.STOLEN: "lost its cores to something else meanwhile",
    LossCause.SLO: "takes longer by the profile than its SLO",
    LossCause.DOOR: "was read, decoded or queued for too long before it came in",
    LossCause.REPLY: "was answered in time, and the answer written late",
    LossCause.CLIENT: "was withdrawn, or its client allowed less time than the SLO",
    LossCause.FAILED: "failed: a worker died, or the model raised",
    LossCause.GONE: "its model was unloaded or reloaded, or the server was not serving",
}


def sentences(account: LossAccount) -> list[str]:
    """A line a tenant that lost queries, who lost most first: how many to which cause, and to whom."""
    lines = []
    for tenant, causes in _by_count(account):
        parts = []
        for cause, count in causes.most_common():
            named = f" ({', '.join(f'{name} {lost}' for name, lost in _whom(account, tenant))})"
            parts.append(f"{cause} {count}{named if cause is LossCause.NEIGHBOUR else ''}")
        lines.append(f"{tenant} lost {causes.total()}: {', '.join(parts)}")
    return lines


def loss_sentence(loss: Loss) -> str:
    """The cause of one loss, and what delayed the query."""
    whom = f" ({loss.whom})" if loss.whom else ""
    told = f"Lost by {loss.cause.value}{whom}: it {MEANING[loss.cause]}."
    if loss.delays is None:
        return told
    own, delays = loss.tenant, loss.delays
    others = {name: ns + delays.slow.get(name, 0) for name, ns in delays.behind.items() if name != own}
    parts = {
        "at the door": delays.door_ns,
        "behind its own": delays.behind.get(own, 0),
        **{f"behind {name}": ns for name, ns in sorted(others.items(), key=lambda entry: -entry[1])},
        "as launches of its tenant took longer than the profile says": delays.slow.get(own, 0),
        "as launches were off the processor": delays.stolen_ns,
        "without a worker": delays.away_ns,
    }
    shown = ", ".join(f"{ns / 1e6:.1f} ms {name}" for name, ns in parts.items() if ns >= 50_000)
    return f"{told} Delayed {shown}." if shown else told


def columns(account: LossAccount) -> list[str]:
    """The heads of a table of losses: the causes that there were."""
    return ["tenant", "lost", *found_causes(account), "neighbours"]


def rows(account: LossAccount) -> list[Sequence[str]]:
    """The cells below `columns`, a row a tenant that lost queries, who lost most first."""
    causes = found_causes(account)
    return [
        (
            tenant,
            str(lost.total()),
            *(str(lost[cause]) for cause in causes),
            ", ".join(f"{name} {count}" for name, count in _whom(account, tenant)),
        )
        for tenant, lost in _by_count(account)
    ]


def found_causes(account: LossAccount) -> list[LossCause]:
    """The causes of a run's losses."""
    return [cause for cause in LossCause if any(lost[cause] for lost in account.lost.values())]


def facts(account: LossAccount) -> dict[str, Any]:
    """Plain data, ready for `json.dumps`: by tenant how many to which cause, and to which neighbour."""
    return {
        tenant: {**{cause.value: lost[cause] for cause in found_causes(account)}, "to": dict(_whom(account, tenant))}
        for tenant, lost in _by_count(account)
    }


def _by_count(account: LossAccount) -> list[tuple[str, Counter[LossCause]]]:
    return sorted(account.lost.items(), key=lambda entry: (-entry[1].total(), entry[0]))


def _whom(account: LossAccount, tenant: str) -> list[tuple[str, int]]:
    """The neighbours that it lost queries to, and how many."""
    return [(name, count) for (loser, name), count in account.whom.most_common() if loser == tenant]
