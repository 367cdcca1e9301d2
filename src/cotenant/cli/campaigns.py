"""Measurement campaigns: extensions of `cotenant profile` by packages, each with its own options."""

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
    from cotenant.profiles.profile_file import Profile
    from cotenant.work import Share


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A run of `cotenant profile` after the models are profiled. `errors` gets the reasons for skipped models."""

    root: Path
    settings: ServerConfig
    profile: Profile
    fresh: bool
    quiet: bool
    errors: dict[str, str]


class ProfileCampaign:
    """Base class of campaigns: dataclasses with fields that are options of `cotenant profile`, annotated for typer.

    One object serves one run of the command. A package adds its subclass by an entry point of the group
    `registry.CAMPAIGNS`.
    """

    def chosen(self) -> dict[str, object]:
        """Keys of `cotenant.toml` set by the options, as in `options.chosen_of`."""
        return {}

    def prepare(self, settings: ServerConfig) -> tuple[ServerConfig, tuple[Share, ...]]:
        """Settings of the profile, and further partitions in which to measure latency. Raises ConfigError."""
        return settings, ()

    def measure(self, run: ProfileRun) -> None:
        """Measure what the options ask for, and keep it in the repository."""

    def found(self) -> dict[str, object]:
        """Measurements by key for `--json`; None for a measurement that was not requested."""
        return {}

    def show(self, console: Console) -> None:
        """Print the measurements."""


def with_campaigns(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all registered campaigns to a command, which takes the campaigns as `campaigns`."""
    return with_records(command, campaigns=tuple(registry.load_all(registry.CAMPAIGNS).values()))
