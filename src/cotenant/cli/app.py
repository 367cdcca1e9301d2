"""All commands, in the order in which a newcomer needs them."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant import __version__
from cotenant.cli import bound, demo, devices, explain, load, models, profile, replay, serve, simulate, zoo
from cotenant.cluster import cli as cluster
from cotenant.techniques.layer_blocks import cli as compiling
from cotenant.techniques.partitions.cli import plan

app = typer.Typer(
    name="cotenant",
    help="Serve many models of many tenants from few devices, each tenant with an enforced latency target.",
    no_args_is_help=True,
    add_completion=False,
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


app.command("demo")(demo.demo)
app.command("devices")(devices.devices)
app.command("models")(models.models)
app.command("profile")(profile.profile)
app.command("compile")(compiling.compile_)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.command("load")(load.load)
app.command("simulate")(simulate.simulate)
app.command("explain")(explain.explain)
app.command("bound")(bound.bound)
app.command("replay")(replay.replay)
app.add_typer(cluster.cluster)
app.add_typer(zoo.zoo)
