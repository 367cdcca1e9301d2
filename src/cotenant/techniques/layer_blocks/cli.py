"""`cotenant compile`: compiles kernels for the layers of a repository's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cotenant.cli.options import LONGEST_S, AsJson, Lanes, Repository, a_number, chosen_of, print_json, settings_of
from cotenant.cli.progress import progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.layer_blocks.measure.compile_campaign import CompiledResult


def compile_(
    repository: Repository,
    candidates: Annotated[int, typer.Option(min=1, max=100_000, help="Kernels to try for each layer.")] = 20,
    budget_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=LONGEST_S,
            callback=a_number,
            help="Time in seconds after which no further kernel is tried.",
            show_default="as long as it takes",
        ),
    ] = None,
    pressure: Annotated[
        bool,
        typer.Option("--pressure", help="Also measure kernels under memory contention, and keep versions for that."),
    ] = False,
    lanes: Lanes = None,
    as_json: AsJson = False,
) -> None:
    """Compile kernels for ONNX models on this machine, where they are faster than onnxruntime. Resumes if
    interrupted."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out
    from cotenant.execute.layout import cores_alone
    from cotenant.linux import require
    from cotenant.measure.sweep import served_shares
    from cotenant.techniques.layer_blocks.measure.compile_campaign import (
        CompileEffort,
        compile_repository,
    )

    require("cotenant compile")
    settings = settings_of(repository, chosen_of(None, lanes=lanes))
    cores_alone(settings.device, "models are compiled")  # not on a GPU
    effort = CompileEffort(candidates, float("inf") if budget_s is None else budget_s, pressure)
    with progress("compiling", quiet=as_json) as on_step:
        results, errors = compile_repository(repository, served_shares(settings), effort, on_step)
    if as_json:
        print_json(msgspec.to_builtins({"models": results, "errors": errors}))
    else:
        console = make_console()
        console.print(results_table(results))
        print_left_out(console, errors)
    if errors:
        raise typer.Exit(1)


def results_table(results: Mapping[str, CompiledResult]) -> FittedTable:
    """One line per model: its kernels, or that onnxruntime runs it."""
    from cotenant.report.fitted_table import FittedTable

    table = FittedTable("model", "units compiled", "layers", "versions", "time over onnxruntime's", "runs on", "error")
    for name, each in results.items():
        ratios = ", ".join(f"{ratio:.2f} ({cores} core{'s' * (cores > 1)})" for cores, ratio in each.ratios.items())
        faster = [str(cores) for cores, ratio in each.ratios.items() if ratio <= 1]
        where = f"kernels at {', '.join(faster)}" if faster and each.units else "onnxruntime"
        units = f"{each.units} of {each.of_units}"
        error = "other answers" if each.error is None else f"{each.error:.0e}"
        table.add_row(name, units, str(each.layers), str(each.versions), ratios, where, error)
    return table
