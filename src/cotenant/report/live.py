"""Live table of a run of the load generator, for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cotenant.load.result import LAG_LIMIT_NS, LiveStats, TenantLive
from cotenant.report.fitted_table import FittedTable
from cotenant.report.tables import LOSSES, attainment_style, milliseconds, percent
from cotenant.types import Outcome


def live_table(stats: LiveStats) -> RenderableType:
    """One line for each tenant, a progress bar and the generator's send lag; for `rich.live.Live.update`."""
    table = FittedTable(optional=LOSSES)
    table.add_column("tenant")
    for column in (
        *("SLO ms", "offered", "in flight", "answered", "late", "dropped", "rejected", "failed"),
        *("p50 ms", "p99 ms", "goodput/s", "attainment"),
    ):
        table.add_column(column, justify="right")
    for tenant in stats.tenants:
        table.add_row(*_cells(tenant))
    elapsed_s, duration_s = min(stats.elapsed_ns, stats.duration_ns) / 1e9, stats.duration_ns / 1e9
    head = Table.grid(padding=(0, 1))
    head.add_row(
        ProgressBar(total=duration_s, completed=elapsed_s, width=40),
        f"{elapsed_s:.0f} of {duration_s:.0f} s" if stats.sending else "all sent, waiting for the last responses",
        Text(
            f"send lag p99 {milliseconds(stats.lag_p99_ns / 1e6)} ms",
            style="yellow" if stats.lag_p99_ns > LAG_LIMIT_NS else "dim",
        ),
    )
    return Group(head, table)


def _cells(tenant: TenantLive) -> list[Text | str]:
    counts, share = tenant.counts, tenant.attainment
    return [
        Text(tenant.name),
        milliseconds(tenant.slo_ns / 1e6),
        str(tenant.sent),
        str(tenant.in_flight),
        *(
            Text(str(counts[outcome]), style="dim" if not counts[outcome] else "")
            for outcome in (Outcome.ANSWERED, Outcome.LATE, Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED)
        ),
        milliseconds(None if tenant.p50_ns is None else tenant.p50_ns / 1e6),
        milliseconds(None if tenant.p99_ns is None else tenant.p99_ns / 1e6),
        f"{tenant.goodput_per_s:.1f}",
        Text(percent(share), style=attainment_style(share)),
    ]
