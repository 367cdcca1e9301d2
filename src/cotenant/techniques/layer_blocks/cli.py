"""`cotenant compile`: make kernels for the layers of a repository's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cotenant.cli.options import LONGEST_S, AsJson, Lanes, Repository, a_number, chosen_of, print_json, settings_of
from cotenant.cli.profile import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.layer_blocks.measure.compile_campaign import CandidatesResult, CompiledResult


def compile_(
    repository: Repository,
    candidates: Annotated[int, typer.Option(min=1, max=100_000, help="Kernels to try for each layer.")] = 20,
    budget_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=LONGEST_S,
            callback=a_number,
            help="Seconds after which no further kernel is tried.",
            show_default="as long as it takes",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="What makes the kernels. `ckernel`: C, for models to run on. `tvm` (extra tvm): candidates to compare "
            "and select from, which no model runs."
        ),
    ] = "ckernel",
    pressure: Annotated[
        bool,
        typer.Option(
            "--pressure", help="Also measure kernels beside others who use the memory, and keep versions for that."
        ),
    ] = False,
    lanes: Lanes = None,
    as_json: AsJson = False,
) -> None:
    """Compile ONNX models for this machine: faster kernels where there are some. Interrupt it any time: it resumes."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out
    from cotenant.execute.layout import cores_alone
    from cotenant.measure.sweep import served_shares
    from cotenant.techniques.layer_blocks.measure.compile_campaign import (
        CompileEffort,
        backend_of,
        compile_repository,
        explore_repository,
    )

    settings = settings_of(repository, chosen_of(None, policy=None, lanes=lanes))
    cores_alone(settings.device, "models are compiled")  # not on a GPU
    effort = CompileEffort(candidates, float("inf") if budget_s is None else budget_s, pressure)
    maker = backend_of(backend)
    results: Mapping[str, CompiledResult] | Mapping[str, CandidatesResult]
    with progress_bar(quiet=as_json, what="compiling") as on_step:
        if maker.serves:
            results, errors = compile_repository(repository, served_shares(settings), effort, on_step)
        else:
            results, errors = explore_repository(repository, maker, effort, on_step)
    if as_json:
        print_json(msgspec.to_builtins({"models": results, "errors": errors}))
    else:
        console = make_console()
        console.print(results_table(results))
        print_left_out(console, errors)
    if errors:
        raise typer.Exit(1)


def results_table(results: Mapping[str, CompiledResult] | Mapping[str, CandidatesResult]) -> FittedTable:
    """A line a model: where it is faster, and where onnxruntime stays; or what candidates there are."""
    from cotenant.report.fitted_table import FittedTable
    from cotenant.techniques.layer_blocks.measure.compile_campaign import CandidatesResult

    if any(isinstance(each, CandidatesResult) for each in results.values()):
        table = FittedTable("model", "layers", "candidates", "versions", "fastest of each layer, us", "ckernel's")
        for name, each in results.items():
            assert isinstance(each, CandidatesResult)
            theirs = "" if each.ckernel_us is None else f"{each.ckernel_us:.0f}"
            table.add_row(name, str(each.layers), str(each.candidates), str(each.versions), f"{each.us:.0f}", theirs)
        return table
    table = FittedTable("model", "units compiled", "layers", "versions", "time over onnxruntime's", "runs on", "error")
    for name, each in results.items():
        assert not isinstance(each, CandidatesResult)
        ratios = ", ".join(f"{ratio:.2f} ({cores} core{'s' * (cores > 1)})" for cores, ratio in each.ratios.items())
        faster = [str(cores) for cores, ratio in each.ratios.items() if ratio <= 1]
        where = f"kernels at {', '.join(faster)}" if faster and each.units else "onnxruntime"
        units = f"{each.units} of {each.of_units}"
        error = "other answers" if each.error is None else f"{each.error:.0e}"
        table.add_row(name, units, str(each.layers), str(each.versions), ratios, where, error)
    return table
