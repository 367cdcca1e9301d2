"""Campaigns: what packages add to `cotenant profile`, each with options of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from cotenant import registry

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
    """The command with the options of all registered campaigns before its last one. It takes the campaigns of a run as
    the argument `campaigns`."""
    kinds: Sequence[type[Any]] = tuple(registry.load_all(registry.CAMPAIGNS).values())
    options = [[each for each in fields(kind) if each.init] for kind in kinds]
    hints = get_type_hints(command, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(command).parameters.values()
        if each.name != "campaigns"
    ]
    added = []
    for kind, of_fields in zip(kinds, options, strict=True):
        of_kind = get_type_hints(kind, include_extras=True)
        added += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=of_kind[each.name]
            )
            for each in of_fields
        ]

    @wraps(command)
    def called(**values: Any) -> None:
        taken = [{each.name: values.pop(each.name) for each in of_fields} for of_fields in options]
        command(**values, campaigns=[kind(**given) for kind, given in zip(kinds, taken, strict=True)])

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    made = inspect.Signature([*keyword_only[:-1], *added, keyword_only[-1]])
    called.__signature__ = made  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in made.parameters.values()}
    return called
