"""`cotenant place`: places the branches of a wide model on several cores, or on a GPU and cores."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import (
    SEARCH_S,
    Fresh,
    Lanes,
    PlanOutput,
    Repository,
    SearchTime,
    a_number,
    chosen_of,
    print_json,
    settings_of,
)
from cotenant.cli.records import with_records
from cotenant.errors import ConfigError
from cotenant.files import write_whole
from cotenant.plan_file import sections_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cotenant.config import ServerConfig
    from cotenant.execute.protocol import TargetDevice
    from cotenant.techniques.placement.plan.flat import PlacementProblem
    from cotenant.techniques.placement.plan.overflow import FoundPlacement, PlacementGoal
    from cotenant.techniques.placement.plan.overview import PlacementOverview
    from cotenant.techniques.placement.task_profile import ModelTasks
    from cotenant.techniques.placement.unit_placement import UnitPlacement
    from cotenant.work import Share

_EXACT_SHARE = 0.3
"""Share of the time budget for the exact solver, if the graph is small enough."""
_MOST_NOISE = 0.3
_STEPS = 1 << 40
"""Moves of the search at each level: unlimited, as it ends by time."""
_EXPLAINED = (0.9, 1.1)
"""Accepted ratios of the sum of the units' times to the measured whole."""


class Aim(StrEnum):
    """Objective of a placement."""

    latency = "latency"
    throughput = "throughput"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A model to place, and the objective."""

    root: Path
    model: str
    aim: Aim
    latency_bound_ms: float | None

    def goal(self) -> PlacementGoal:
        """The goal of the search. Raises ConfigError for a latency bound with the objective latency."""
        from cotenant.techniques.placement.plan.overflow import Goal, PlacementGoal

        if self.aim is Aim.latency:
            if self.latency_bound_ms is not None:
                raise ConfigError("--latency-bound-ms needs --goal throughput: --goal latency minimises the latency")
            return PlacementGoal()
        bound = None if self.latency_bound_ms is None else round(self.latency_bound_ms * 1e6)
        return PlacementGoal(Goal.PERIOD, latency_bound_ns=bound)


@with_records
def place(
    repository: Repository,
    model: Annotated[str, typer.Argument(help="Model to place.", show_default=False)],
    *,
    goal: Annotated[Aim, typer.Option(help="Objective of the placement.")] = Aim.latency,
    latency_bound_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=3_600_000,
            callback=a_number,
            help="Latency limit in ms, with --goal throughput.",
            show_default=False,
        ),
    ] = None,
    budget_s: SearchTime = SEARCH_S,
    fresh: Fresh = False,
    lanes: Lanes = None,
    output: PlanOutput,
) -> None:
    """Place the branches of one wide model on the cores of a share, or on a GPU and cores beside it.

    Measures the units of the model, searches a placement, and measures it. A
    placement that is at least 3 % faster is kept in the repository for models
    with placement = "auto".
    """
    from cotenant.cli.progress import progress
    from cotenant.repository import graphs_path, placement_path
    from cotenant.techniques.placement.measure.placed import KEPT_UP_TO
    from cotenant.techniques.placement.measure.tasks import TASK_EFFORT, measure_tasks
    from cotenant.techniques.placement.plan.flat import PlacementProblem
    from cotenant.techniques.placement.plan.overview import overview
    from cotenant.techniques.placement.plan.placed_units import placement_of
    from cotenant.techniques.placement.plan.profiled import graph_of
    from cotenant.techniques.placement.plan_section import PLACEMENT
    from cotenant.techniques.placement.unit_placement import save_placement

    request = PlacementRequest(repository, model, goal, latency_bound_ms)
    sought = request.goal()
    settings = settings_of(repository, chosen_of(None, lanes=lanes))
    share, is_served = _share(settings)
    with _opened(settings, share) as where, progress("measuring", quiet=output.as_json) as on_step:
        tenant, tasks = measure_tasks(repository, model, share, TASK_EFFORT, fresh=fresh, on_step=on_step, target=where)
    notes = _doubts(tasks)
    problem = PlacementProblem(graph_of(tasks))
    found = _searched(problem, sought, tasks, budget_s, as_json=output.as_json)
    view = overview(tenant, problem, found)
    ratio, written = None, []
    graphs = graphs_path(repository)
    path = placement_path(graphs, tasks.graph, tasks.cores, tasks.sms)
    path.unlink(missing_ok=True)
    if view.gains:
        placement = placement_of(
            tenant, tasks.graph, problem, found.plan, view.sequential_ns, found.bound_ns, tasks.sms
        )
        with _opened(settings, share) as where:
            ratio = measured_ratio(request, placement, share, where)
        if ratio <= KEPT_UP_TO:
            save_placement(path, placement)
            written = [path]
            notes += _use(request, is_served=is_served)
        if output.out is not None:
            write_whole(output.out, sections_text({PLACEMENT: (placement,)}).encode())
            written.append(output.out)
    _show(request, view, tasks, ratio, notes, written, output)


def _share(settings: ServerConfig) -> tuple[Share, bool]:
    """The largest share of the server's launches, if it has several cores or is of a GPU, else all cores.

    Also returns whether launches get it. Raises ConfigError for a device of one core.
    """
    from cotenant.execute.layout import device_cores
    from cotenant.measure.sweep import served_shares
    from cotenant.work import CPU, Share

    cores = device_cores(settings.device)
    if len(cores) < 2:
        raise ConfigError(f"a placement needs at least two cores, the device has {len(cores)}: see --cores")
    share = max(served_shares(settings), key=lambda each: each.size)
    return (share, True) if share.size > 1 or share.device != CPU else (Share(cores), False)


@contextmanager
def _opened(settings: ServerConfig, share: Share) -> Iterator[TargetDevice]:
    """The target device for measuring a share. A GPU is held within the context only. Raises ConfigError."""
    from cotenant.execute.registry import open_executor
    from cotenant.measure.solo import CORES
    from cotenant.work import CPU

    if share.device == CPU:
        yield CORES
        return
    with closing(open_executor(settings.device, (share,))) as executor:
        yield executor.target


def _use(request: PlacementRequest, *, is_served: bool) -> list[str]:
    """Settings that the user must change for the server to use a placement."""
    from cotenant.repository import default_version

    notes = []
    if default_version(request.root, request.model).config.model.placement == "none":
        notes.append(f"For it to be used, set placement = 'auto' under [model] in {request.model}/config.toml.")
    if not is_served:
        notes.append(
            "Launches of this server get one core each. For it to be used, set lanes = 'all', or lists of cores, under "
            "[device] in cotenant.toml."
        )
    return notes


def measured_ratio(
    request: PlacementRequest, placement: UnitPlacement, share: Share, where: TargetDevice | None = None
) -> float:
    """Time of runs by a placement over that of sequential runs, measured alternately now; kept for the server.

    `where`: target device of the share, by default the cores of this machine.
    """
    from cotenant.execute.strategy import VersionTrial
    from cotenant.measure.inputs import make_inputs
    from cotenant.measure.opened_model import open_version
    from cotenant.measure.solo import CORES
    from cotenant.repository import default_version, graphs_path
    from cotenant.techniques.placement.execute.placeable import Placeable
    from cotenant.techniques.placement.measure.placed import check_path, placed_ratio

    found = default_version(request.root, request.model)
    opened = open_version(request.root, found, where or CORES, placed=False)
    with opened.runner as model:
        assert isinstance(model, Placeable)  # only these have a profile of tasks
        model.place(placement)
        path = check_path(graphs_path(request.root), placement)
        path.unlink(missing_ok=True)
        is_batched = found.config.model.max_batch > 1
        trial = VersionTrial(
            found,
            graphs_path(request.root),
            opened.shapes,
            where or CORES,
            (),
            lambda shape, rows: make_inputs(opened.runner.inputs, shape, rows, is_batched),
        )
        return placed_ratio(path, model, share, trial)


def _doubts(tasks: ModelTasks) -> list[str]:
    """Doubts about the measurement, as sentences."""
    notes = []
    for name, times in (("one core", tasks.core), ("the GPU" if tasks.sms else tasks.where, tasks.whole)):
        if not _EXPLAINED[0] <= times.added_up <= _EXPLAINED[1]:
            notes.append(
                f"On {name} the times of the units add up to {times.added_up:.2f} of the measured whole, "
                f"{times.whole_ns / 1e6:.3g} ms: expect such an error, or measure again with --fresh."
            )
    if tasks.is_disturbed:
        notes.append(
            f"Other processes used the cores during the measurement (wall time {tasks.disturbance:.2f} of CPU time). "
            "The next call measures again: repeat the command on an idle machine."
        )
    return notes


def _searched(
    problem: PlacementProblem, goal: PlacementGoal, tasks: ModelTasks, budget_s: float, *, as_json: bool
) -> FoundPlacement:
    from cotenant.cli.console import console as make_console
    from cotenant.cli.progress import progress, spent_of
    from cotenant.inner_loop import has_compiler
    from cotenant.techniques.placement.plan.overflow import OverflowSearch

    console = make_console(stderr=True, quiet=as_json)
    if not has_compiler():
        console.print("without numba the search is 100 times slower: pip install 'cotenant[solver]'")
    until = time.monotonic() + budget_s
    with progress("searching a placement", quiet=as_json) as on_step:

        def on_plans(evaluated: int, best_ns: int, bound_ns: int) -> bool:
            text = f"{evaluated:,} plans, best {best_ns / 1e6:.4g} ms, lower bound {bound_ns / 1e6:.4g} ms"
            on_step(*spent_of(budget_s, until), text)
            return True

        search = OverflowSearch(
            goal,
            _STEPS,
            budget_s,
            noise=min(_MOST_NOISE, tasks.variation),
            exact_seconds=_EXACT_SHARE * budget_s,
            progress=on_plans,
        )
        return search.solve(problem)


def _show(
    request: PlacementRequest,
    view: PlacementOverview,
    tasks: ModelTasks,
    ratio: float | None,
    notes: list[str],
    written: list[Path],
    output: PlanOutput,
) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.placement.measure.placed import KEPT_UP_TO
    from cotenant.techniques.placement.report import placement_lines, placement_picture, placement_svg

    is_kept = ratio is not None and ratio <= KEPT_UP_TO
    if output.svg is not None:
        write_whole(output.svg, placement_svg(view, f"{view.model} on {tasks.where}").encode())
        written = [*written, output.svg]
    if output.as_json:
        print_json(_facts(request, view, tasks, ratio, notes, written))
        return
    console = make_console()

    def lines() -> Iterator[str]:
        yield from placement_lines(view)
        if request.aim is Aim.throughput:
            yield f"The busiest core is busy for {view.period_ns / 1e6:.3g} ms a query."
        if ratio is not None:
            verdict = "" if is_kept else ": it gains less than 3 %, so it is not kept for serving"
            whole = f"a sequential run on {f'{tasks.sms} SMs' if tasks.sms else tasks.where}"
            yield f"Measured, the placement takes {ratio:.2f} of the time of {whole}{verdict}."
        yield from notes
        yield from (f"Written: {path}" for path in written)

    console.print(placement_picture(view, console.width))
    console.print()
    for line in lines():
        console.print(line, highlight=False)


def _facts(
    request: PlacementRequest,
    view: PlacementOverview,
    tasks: ModelTasks,
    ratio: float | None,
    notes: list[str],
    written: list[Path],
) -> dict[str, Any]:
    import msgspec

    return {
        "model": view.model,
        "cores": tasks.cores,
        "sms": tasks.sms,
        "goal": request.aim,
        "gains": view.gains,
        "gain_pct": view.gain_pct,
        "measured_ratio": ratio,
        "sequential_measured_ns": tasks.sequential_ns,
        "added_up": {"core": tasks.core.added_up, "whole": tasks.whole.added_up},
        "launch_ns": {"core": tasks.core.launch_ns, "whole": tasks.whole.launch_ns},
        "hand_over_ns": tasks.hand_over_ns,
        "disturbance": tasks.disturbance,
        **msgspec.to_builtins(view),
        "notes": notes,
        "written": [str(path) for path in written],
    }
