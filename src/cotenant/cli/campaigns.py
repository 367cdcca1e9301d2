"""Campaigns: what packages add to `cotenant profile`, each with options of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant import registry
from cotenant.cli.records import with_records

if TYPE_CHECKING:
    from rich.console import Console

    from cotenant.config import ServerConfig
    from cotenant.profile.profile_file import Profile
    from cotenant.work import Share


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A run of `cotenant profile`, once the models are profiled. `errors` gets what is left out, by model."""

    root: Path
    settings: ServerConfig
    profile: Profile
    fresh: bool
    quiet: bool
    errors: dict[str, str]


class ProfileCampaign:
    """Base of campaigns: a dataclass. Its fields are options of `cotenant profile`, annotated as typer's.

    One object stands for one run of the command. A package joins by an entry point of the group `registry.CAMPAIGNS`
    that names the subclass.
    """

    def chosen(self) -> dict[str, object]:
        """Keys of `cotenant.toml` that the options choose; see `options.chosen_of`."""
        return {}

    def prepare(self, settings: ServerConfig) -> tuple[ServerConfig, tuple[Share, ...]]:
        """Settings to profile with, and partitions to measure latency in, too. Raises ConfigError."""
        return settings, ()

    def measure(self, run: ProfileRun) -> None:
        """Measure what the options ask for, and keep it in the repository."""

    def found(self) -> dict[str, object]:
        """What was measured, for `--json`: None by key where nothing was asked for."""
        return {}

    def show(self, console: Console) -> None:
        """Print what was measured."""


def with_campaigns(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of all registered campaigns; it takes the campaigns of a run as `campaigns`."""
    return with_records(command, campaigns=tuple(registry.load_all(registry.CAMPAIGNS).values()))
