"""Options, measurement and tables of co-runs in `cotenant profile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cotenant.cli.campaigns import ProfileCampaign, ProfileRun
from cotenant.cli.options import LONGEST_S, a_number
from cotenant.cli.progress import progress
from cotenant.errors import ConfigError
from cotenant.linux import require
from cotenant.work import CPU, Share

if TYPE_CHECKING:
    from rich.console import Console

    from cotenant.config import ServerConfig
    from cotenant.profiles.profile_file import Profile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.partitions.coruns import CoRunRow

_SHOWN = 12


@dataclass
class CoRunCampaign(ProfileCampaign):
    """Measures latencies in the partitions of splits, and the slowdown of models beside each other."""

    partitions: Annotated[
        list[str] | None,
        typer.Option(
            "--partitions",
            help="Split to profile, like '1,1' (cores) or '50,50' (percent of a GPU). Repeatable.",
            show_default=False,
        ),
    ] = None
    corun: Annotated[
        bool, typer.Option("--corun", help="Also measure how models slow each other down in partitions.")
    ] = False
    budget_s: Annotated[
        float, typer.Option(min=1.0, max=LONGEST_S, callback=a_number, help="Seconds to spend on co-runs.")
    ] = 120.0
    splits: list[tuple[int, ...]] = field(default_factory=list, init=False)
    coruns: dict[str, Any] | None = field(default=None, init=False)

    def prepare(self, settings: ServerConfig) -> tuple[ServerConfig, tuple[Share, ...]]:
        """Settings with the splits, and the partitions to profile."""
        if self.corun:
            require("cotenant profile --corun")
        settings, self.splits, parts = divided(settings, self.partitions or (), self.corun)
        return settings, parts

    def measure(self, run: ProfileRun) -> None:
        """Measure co-runs, with --corun."""
        if self.corun:
            with progress("measuring co-runs", quiet=run.quiet) as on_step:
                arguments = self.splits, self.budget_s, run.fresh, on_step, run.errors
                self.coruns = measure(run.root, run.settings, run.profile, *arguments)

    def found(self) -> dict[str, object]:
        """Measured co-runs, effects of antagonists, and prediction errors on held-out co-runs."""
        return {"coruns": self.coruns}

    def show(self, console: Console) -> None:
        """Print the table of slowdowns."""
        if self.coruns:
            show(console, self.coruns)


def parse_split(text: str) -> tuple[int, ...]:
    """Sizes of a split, separated by ','. Raises ConfigError."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--partitions is {text!r}, expected sizes from 1 with ',' between them, like '1,1'")
    return sizes


def divided(
    settings: ServerConfig, texts: Sequence[str], corun: bool
) -> tuple[ServerConfig, list[tuple[int, ...]], tuple[Share, ...]]:
    """Settings to profile with, the splits, and their partitions. By default co-runs use the lanes as a split.

    A GPU has one split at a time, which becomes the shares of the settings. Raises ConfigError for a split that the
    device cannot have, and for co-runs on a GPU.
    """
    from cotenant.execute.layout import cores_alone, device_cores, lanes_of
    from cotenant.techniques.partitions.measure.corun_measure import partitions_of

    splits = [parse_split(text) for text in texts]
    if corun:
        cores_alone(settings.device, "co-runs are measured", "--corun")
    if settings.device.kind != CPU:
        if len(splits) > 1:
            raise ConfigError("--partitions: a GPU is divided in one way at a time, expected the option once")
        if splits:
            device = msgspec.structs.replace(settings.device, lanes="single", shares=tuple(map(float, splits[0])))
            settings = msgspec.structs.replace(settings, device=device)
        return settings, splits, ()
    if corun and not splits:
        splits = [tuple(lane.size for lane in lanes_of(settings.device, device_cores(settings.device)))]
    if corun and all(len(split) < 2 for split in splits):
        raise ConfigError("--corun: a co-run needs two partitions or more, as in --partitions 1,1")
    return settings, splits, partitions_of(settings.device, splits) if splits else ()


def measure(
    root: Path,
    settings: ServerConfig,
    profile: Profile,
    splits: Sequence[tuple[int, ...]],
    budget_s: float,
    fresh: bool,
    on_step: Callable[[int, int, str], None],
    errors: dict[str, str],
) -> dict[str, Any]:
    """Measure co-runs and return their JSON; adds the errors of skipped co-runs to `errors`."""
    from cotenant.repository import coruns_path
    from cotenant.techniques.partitions.coruns import runs_of
    from cotenant.techniques.partitions.measure.corun_interference import antagonist_features
    from cotenant.techniques.partitions.measure.corun_judge import judge_random
    from cotenant.techniques.partitions.measure.corun_measure import CoRunEffort, measure_coruns

    effort = CoRunEffort(budget_s=budget_s)
    made, found = measure_coruns(root, settings, profile, splits, effort, fresh=fresh, on_step=on_step)
    for name, text in found.items():
        errors.setdefault(name, text)
    return {
        "measurements": len(runs_of(made.rows)),
        "file": str(coruns_path(root)),
        "rows": msgspec.to_builtins(made.rows),
        "antagonist": {_name(key): msgspec.to_builtins(each) for key, each in antagonist_features(made.rows).items()},
        "held_out": judge_random(made.rows),
    }


def show(console: Console, coruns: dict[str, Any]) -> None:
    """Print the largest slowdowns, the effects of antagonists, and prediction errors on held-out co-runs."""
    from cotenant.techniques.partitions.coruns import CoRunRow

    rows = msgspec.convert(coruns["rows"], list[CoRunRow])
    console.print(factor_table(rows))
    for name, each in coruns["antagonist"].items():
        console.print(
            f"{name}: {each['suffered']:.2f} times slower beside antagonists, which are {each['caused']:.2f} times "
            "slower beside it."
        )
    held = coruns["held_out"]
    console.print(f"{coruns['measurements']} co-runs saved to {coruns['file']}")
    if held:
        console.print(
            f"Prediction error on {held['tests']} held-out random co-runs: median {held['median_error_pct']:.1f} %, "
            f"90th percentile {held['p90_error_pct']:.1f} %."
        )


def factor_table(rows: Sequence[CoRunRow]) -> FittedTable:
    """Table of the largest slowdowns, beside antagonists and other models."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable(title="Slowdown: latency beside co-runners over latency alone")
    heads, cells = factor_cells(rows)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right")
    for line in cells[:_SHOWN]:
        table.add_row(*line)
    if len(cells) > _SHOWN:
        table.caption = f"The {_SHOWN} largest of {len(cells)} slowdowns."
    return table


def factor_cells(rows: Sequence[CoRunRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of that table, the largest slowdown first."""
    heads = ["target", "beside", "alone p50", "beside p50", "slowdown p50", "slowdown p95", "launches"]
    cells = []
    for row in sorted(rows, key=lambda each: -each.corun().factor):
        alone, beside = row.alone, row.beside
        times = [f"{row.corun(quantile).factor:.2f}" for quantile in ("p50", "p95")]
        medians = [f"{timed.p50_ns / 1e6:.2f} ms" for timed in (alone, beside)]
        cells.append([_name(row.target), ", ".join(map(_name, row.others)), *medians, *times, str(beside.runs)])
    return heads, cells


def _name(key: tuple[str, int, int]) -> str:
    return f"{key[0]} x{key[1]} on {key[2]}"
