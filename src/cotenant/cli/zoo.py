"""`cotenant zoo`: models of the papers with seeded weights, as ONNX files or as `torch.export` archives."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.options import AsJson, print_json
from cotenant.errors import ConfigError

zoo = typer.Typer(
    name="zoo", help="The networks of the papers with seeded weights (needs torch).", no_args_is_help=True
)

ALL = "all"


class Form(StrEnum):
    """What is written of each model."""

    onnx = "onnx"
    pt2 = "pt2"
    both = "both"


@zoo.command("build")
def build(
    names: Annotated[
        list[str], typer.Argument(metavar="NAMES...", help="Models, separated by spaces or commas, or 'all'.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The model repository to make or complete.")],
    form: Annotated[
        Form, typer.Option("--format", help="'both' makes two repositories, DIR/onnx and DIR/pt2.")
    ] = Form.onnx,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The weights belong to it.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write models of the zoo into a model repository. What is there and up to date is left alone."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cotenant.cli.console import console as make_console
    from cotenant.zoo import ZooError
    from cotenant.zoo.torch import NAMES
    from cotenant.zoo.torch.torch_repository import FORMATS, Format, build_repository

    asked = [name for text in names for name in text.replace(",", " ").split()]
    if not asked:
        raise ConfigError(f"no model is named, expected one of: {', '.join(NAMES)}, or {ALL!r}")
    unknown = [name for name in asked if name != ALL and name not in NAMES]
    if unknown:
        raise ConfigError(f"model {unknown[0]!r} is not in the zoo; expected one of: {', '.join(NAMES)}, or {ALL!r}")
    chosen = list(NAMES) if ALL in asked else list(dict.fromkeys(asked))
    roots: dict[Format, Path] = {one: directory / one for one in FORMATS}
    if form is not Form.both:
        roots = {"onnx" if form is Form.onnx else "pt2": directory}
    console = make_console(quiet=as_json)
    columns = (
        TextColumn("{task.description:20}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(chosen))

        def show(name: str, what: str) -> None:
            bar.update(task, description=name)
            if what != "building":
                bar.advance(task)
                bar.console.print(f"{name}: {what}", highlight=False)

        try:
            made = build_repository(roots, chosen, seed=seed, progress=show)
        except ZooError as error:
            raise ConfigError(str(error)) from None
    if as_json:
        print_json({"models": chosen, "written": made, "repositories": {k: str(v) for k, v in roots.items()}})
