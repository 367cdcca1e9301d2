"""All commands, with those of techniques and other packages, in the order in which a new user needs them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cotenant import __version__, registry
from cotenant.cli import (
    bound,
    demo,
    devices,
    doctor,
    explain,
    infer,
    init,
    load,
    models,
    profile,
    replay,
    serve,
    simulate,
    sweep,
)
from cotenant.cli.campaigns import with_campaigns

app = typer.Typer(
    name="cotenant",
    help="Serve many models of many tenants from few devices, each tenant with an enforced latency target.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cotenant {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of all commands."""


OWN = {
    "demo": demo.demo,
    "devices": devices.devices,
    "doctor": doctor.doctor,
    "init": init.init,
    "models": models.models,
    "profile": with_campaigns(profile.profile),
    "serve": serve.serve,
    "infer": infer.infer,
    "load": load.load,
    "simulate": simulate.simulate,
    "sweep": sweep.sweep,
    "explain": explain.explain,
    "bound": bound.bound,
    "replay": replay.replay,
}
ORDER = (
    *(
        "demo",
        "doctor",
        "devices",
        "init",
        "models",
        "profile",
        "serve",
        "infer",
        "load",
        "explain",
        "plan",
        "simulate",
        "sweep",
    ),
    *("bound", "replay", "compile", "place", "co-schedule"),
)
"""Commands in the order of the help; others follow."""


def _join(commands: dict[str, Any]) -> None:
    for name in dict.fromkeys((*(each for each in ORDER if each in commands), *commands)):
        if isinstance(commands[name], typer.Typer):
            app.add_typer(commands[name], name=name)
        else:
            app.command(name)(commands[name])


_join(registry.load_all(registry.COMMANDS) | OWN)
