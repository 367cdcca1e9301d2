"""The options of `cotenant profile` that measure groups of launches and fit their predictor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from cotenant.cli.campaigns import ProfileCampaign, ProfileRun
from cotenant.cli.options import LONGEST_S, a_number
from cotenant.cli.progress import progress

if TYPE_CHECKING:
    from rich.console import Console

    from cotenant.config import ServerConfig
    from cotenant.profiles.profile_file import Profile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.overlap.predict.overlap_errors import HeldOutErrors


@dataclass
class GroupCampaign(ProfileCampaign):
    """Measures groups, fits their predictor, and reports its error."""

    groups: Annotated[
        bool,
        typer.Option("--groups", help="Also measure groups of launches that start together, and fit their predictor."),
    ] = False
    groups_count: Annotated[int, typer.Option(min=20, max=1_000_000, help="Groups to measure.")] = 400
    groups_minutes: Annotated[
        float,
        typer.Option(min=0.0, max=LONGEST_S / 60, callback=a_number, help="Time limit for the measurement of groups."),
    ] = 10.0
    report: Annotated[
        bool,
        typer.Option("--report", help="Report the error of the predictor on groups that it was not fitted to."),
    ] = False
    fitted: dict[str, Any] | None = field(default=None, init=False)
    judged: Any = field(default=None, init=False)
    """HeldOutErrors, once they are known."""

    @override
    def chosen(self) -> dict[str, object]:
        return {"policy.name": "overlap"} if self.groups else {}

    @override
    def measure(self, run: ProfileRun) -> None:
        if self.groups:
            bounds = self.groups_count, self.groups_minutes
            self.fitted = _measure_groups(run.root, run.settings, run.profile, bounds, run.fresh, run.quiet, run.errors)
        if self.report:
            self.judged = _judge(run.root, run.profile, run.quiet)

    @override
    def found(self) -> dict[str, object]:
        return {"groups": self.fitted, "report": self.judged}

    @override
    def show(self, console: Console) -> None:
        if self.fitted:
            text = f"{self.fitted['groups']} groups measured; predictor saved to {self.fitted['predictor']}"
            console.print(text)
            console.print(slowdown_table(self.fitted["slowdown"]))
        if self.judged:
            console.print(errors_table(self.judged))


def _measure_groups(
    root: Path,
    settings: ServerConfig,
    profile: Profile,
    bounds: tuple[int, float],
    fresh: bool,
    quiet: bool,
    errors: dict[str, str],
) -> dict[str, Any]:
    """Measure groups and fit their predictor; adds skipped models and groups to `errors`."""
    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.repository import overlap_path
    from cotenant.techniques.overlap.measure.measured_groups import GroupEffort, fit_groups, measure_groups
    from cotenant.techniques.overlap.measure.overlap_models import pair_latencies

    effort = GroupEffort(count=bounds[0], budget_s=60 * bounds[1])
    with progress("measuring groups", quiet=quiet) as on_step:
        samples, found = measure_groups(root, settings, profile, effort, fresh=fresh, on_step=on_step)
    for name, text in found.items():
        errors.setdefault(name, text)
    with progress("measuring groups", quiet=quiet) as on_step:
        fitted = fit_groups(root, profile, on_step=lambda done, total: on_step(done, total, "fitting the predictor"))
    narrow = min(lane.size for lane in lanes_of(settings.device, device_cores(settings.device)))
    beside = {" + ".join(pair): found.slowdown for pair, found in pair_latencies(fitted, profile, narrow).items()}
    return {"groups": len(samples), "predictor": str(overlap_path(root)), "slowdown": beside}


def slowdown_table(slowdown: dict[str, float]) -> FittedTable:
    """Slowdown of pairs of models, the worst pairs first."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(title="Side by side on cores of their own: predicted latency over that of the slower one alone")
    table.add_column("pair")
    table.add_column("times", justify="right")
    for pair, factor in sorted(slowdown.items(), key=lambda entry: -entry[1]):
        table.add_row(pair, f"{factor:.2f}")
    return table


def _judge(root: Path, profile: Profile, quiet: bool) -> HeldOutErrors:
    from cotenant.repository import groups_path
    from cotenant.techniques.overlap.group_samples import load_samples
    from cotenant.techniques.overlap.measure.measured_groups import facts_of
    from cotenant.techniques.overlap.predict.overlap_errors import held_out_errors

    _, samples = load_samples(groups_path(root))
    known = [each for each in samples if all(member.work.tenant in profile.models for member in each.members)]
    with progress("measuring groups", quiet=quiet) as on_step:
        return held_out_errors(known, facts_of(profile), on_step=on_step)


def errors_table(errors: HeldOutErrors) -> FittedTable:
    """Errors by set of tenants, then coverage of the promised quantile."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(title=f"Predictor of groups: MAPE {errors.mape_pct:.1f} % (cross-validated)")
    table.add_column("groups of")
    table.add_column("groups", justify="right")
    table.add_column("MAPE", justify="right")
    for name, (count, mape_pct) in errors.by_tenants.items():
        table.add_row(name, str(count), f"{mape_pct:.1f} %")
    table.add_section()
    table.add_row(f"single runs below the {100 * errors.level:g} % quantile", "", f"{errors.coverage_pct:.1f} %")
    return table
