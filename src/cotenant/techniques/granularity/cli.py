"""`cotenant co-schedule`: how models that are there together run beside each other on the lanes of a server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    chosen_of,
    print_json,
    settings_of,
)
from cotenant.cli.records import with_records
from cotenant.errors import ConfigError
from cotenant.files import write_whole
from cotenant.plan_file import sections_text

if TYPE_CHECKING:
    from cotenant.config import ServerConfig
    from cotenant.techniques.granularity.joint_plan import JointPlan, TogetherPlan
    from cotenant.techniques.granularity.kernel_table import KernelTable
    from cotenant.techniques.granularity.plan.joint_overview import JointOverview
    from cotenant.techniques.granularity.plan.planner import FoundJointPlan
    from cotenant.techniques.granularity.predict.rules import Occupancy
    from cotenant.techniques.granularity.serve.rehearsal import Rehearsed
    from cotenant.work import Share

_REHEARSED = 4
"""Plans that are run on the device, the best by belief first."""
_EXPLAINED = 1.25
"""Up to so many times what is believed, a run on the device is explained by it."""


@dataclass(frozen=True, slots=True)
class TogetherAsked:
    """A set to plan: models of a repository with their rows, in the order given."""

    root: Path
    batches: Mapping[str, int]
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Set:
    """What is known of a set: tables of its members on the lanes, what their profiles are of, and the time of one after
    another on all cores."""

    tables: tuple[KernelTable, ...]
    digests: tuple[str, ...]
    rules: Occupancy
    sequential_ns: int


def asked_batches(names: Sequence[str], batches: str | None) -> dict[str, int]:
    """Models by name, with the rows of each: 1 where nothing is said. Raises BadParameter for what is none of them."""
    found = dict.fromkeys(names, 1)
    if len(found) != len(names) or not all(names):
        raise typer.BadParameter(f"{' '.join(names)!r}, expected different models", param_hint="models")
    for part in batches.split(",") if batches else ():
        name, _, rows = (each.strip() for each in part.partition("="))
        if name not in found or not re.fullmatch(r"[1-9][0-9]{0,5}", rows):
            known = ", ".join(found)
            raise typer.BadParameter(f"{part!r}, expected MODEL=ROWS of one of {known}", param_hint="--batch")
        found[name] = int(rows)
    return found


@with_records
def co_schedule(
    repository: Repository,
    models: Annotated[list[str], typer.Argument(help="Models of which queries come together.", show_default=False)],
    *,
    batch: Annotated[
        str | None, typer.Option(metavar="MODEL=ROWS,...", help="Rows of each query.", show_default="1 each")
    ] = None,
    budget_s: SearchTime = SEARCH_S,
    fresh: Fresh = False,
    lanes: Lanes = None,
    output: PlanOutput,
) -> None:
    """Plan how several models run beside each other on the lanes of a server when queries of them come together.

    Measures the units of the models, searches where models wait for each other
    and which are cut along the batch, and runs the best plans on the device. A
    plan that gains 3 % at least is kept in the repository for the policy
    'clustered'; else none is. Ctrl-C ends the search with the best plan so far.
    """
    from cotenant.techniques.granularity.plan.joint_overview import overview
    from cotenant.techniques.granularity.plan.kept import keep_together, together_of
    from cotenant.techniques.granularity.plan_section import TOGETHER
    from cotenant.techniques.placement.measure.placed import KEPT_UP_TO

    asked = TogetherAsked(repository, asked_batches(models, batch), fresh)
    settings = settings_of(repository, chosen_of(None, lanes=lanes))
    shares = _lanes(settings)
    known = _measured(asked, shares, as_json=output.as_json)
    found = _searched(known, budget_s, as_json=output.as_json)
    view = overview(known.tables, known.rules, found, known.sequential_ns)
    made = together_of(found, known.tables, known.digests, len(shares), shares[0].size)
    rehearsed, kept = None, None
    if view.gains:
        candidates = [each for each in found.alternatives if not each.is_streams][:_REHEARSED]
        rehearsed = _rehearsed(asked, settings, shares, candidates)
        best = (
            min((ns, number) for number, ns in enumerate(rehearsed.plans_ns) if ns) if any(rehearsed.plans_ns) else None
        )
        if best is not None and best[0] <= KEPT_UP_TO * min(rehearsed.streams_ns, rehearsed.sequential_ns):
            kept = _as_measured(made, candidates[best[1]], rehearsed, best[0])
    keep_together(repository, kept, made.key)
    written = [] if kept is None else [_together_path(repository)]
    if output.out is not None and kept is not None:
        write_whole(output.out, sections_text({TOGETHER: (kept,)}).encode())
        written.append(output.out)
    notes = _doubts(view, rehearsed) + (_use(settings) if kept is not None else [])
    _show(view, rehearsed, kept, notes, written, output)


def _lanes(settings: ServerConfig) -> tuple[Share, ...]:
    """The lanes of the server. Raises ConfigError for a GPU, for one lane, and for lanes of several sizes."""
    from cotenant.execute.layout import cores_alone, lanes_of

    lanes = lanes_of(settings.device, cores_alone(settings.device, "models are planned together"))
    sizes = {lane.size for lane in lanes}
    if len(lanes) < 2 or len(sizes) > 1:
        text = f"{len(lanes)} of {', '.join(map(str, sorted(sizes)))} cores"
        raise ConfigError(f"a plan of models together needs two lanes at least, all of one size; there are {text}")
    return lanes


def _measured(asked: TogetherAsked, lanes: Sequence[Share], *, as_json: bool) -> _Set:
    from cotenant.cli.profile import progress_bar
    from cotenant.repository import default_version
    from cotenant.techniques.granularity.plan.lane_tables import hand_over_ns, lane_rules, table_of_tasks
    from cotenant.techniques.placement.measure.tasks import TASK_EFFORT, measure_tasks
    from cotenant.work import Share

    if lanes[0].size > 1:
        raise ConfigError(
            "models are planned together on lanes of one core each: set lanes = 'single', or give --lanes"
        )
    share = Share(tuple(core for lane in lanes for core in lane.cores))
    tables, tasks = [], []
    for model, rows in asked.batches.items():
        config = default_version(asked.root, model).config.model
        if rows > config.max_batch:
            raise ConfigError(f"model {model!r}: {rows} rows are asked for, and its max_batch is {config.max_batch}")
        with progress_bar(quiet=as_json, what=f"measuring {model}") as on_step:
            tenant, taken = measure_tasks(
                asked.root, model, share, TASK_EFFORT, fresh=asked.fresh, on_step=on_step, rows=rows, in_a_row=True
            )
        tables.append(table_of_tasks(tenant, taken, rows, len(lanes)))
        tasks.append((taken, rows))
    whole = [taken.batches[rows].whole if rows > 1 else taken.whole for taken, rows in tasks]
    core = [taken.batches[rows].core if rows > 1 else taken.core for taken, rows in tasks]
    sequential = sum(min(one.whole_ns, other.whole_ns) for one, other in zip(whole, core, strict=True))
    rules = lane_rules(hand_over_ns([taken for taken, _ in tasks]))
    return _Set(tuple(tables), tuple(taken.digest for taken, _ in tasks), rules, sequential)


def _searched(known: _Set, budget_s: float, *, as_json: bool) -> FoundJointPlan:
    from cotenant.cli.console import console as make_console
    from cotenant.inner_loop import has_compiler
    from cotenant.techniques.granularity.plan.joint_search import JointSearch

    console = make_console(stderr=True, quiet=as_json)
    if not has_compiler():
        console.print("the search is much slower without numba: pip install 'cotenant[solver]'")
    until = time.monotonic() + budget_s
    with console.status("searching a plan; Ctrl-C ends it with the best so far") as status:

        def progress(evaluated: int, best_ns: float) -> bool:
            status.update(f"{evaluated:,} plans, {best_ns / 1e6:.4g} ms; Ctrl-C ends it with the best so far")
            return time.monotonic() < until

        return JointSearch().find(known.tables, known.rules, progress)


def _rehearsed(
    asked: TogetherAsked, settings: ServerConfig, lanes: tuple[Share, ...], plans: Sequence[JointPlan]
) -> Rehearsed:
    """What the best plans take on the device, beside all at once and one after another."""
    from cotenant.techniques.granularity.serve.rehearsal import Rehearsal

    with Rehearsal(asked.root, settings, asked.batches, lanes, plans) as rehearsal:
        return rehearsal.run()


def _as_measured(made: TogetherPlan, plan: JointPlan, rehearsed: Rehearsed, makespan_ns: int) -> TogetherPlan:
    """The plan that was quickest on the device, with what was measured there."""
    import msgspec

    members = tuple(
        msgspec.structs.replace(member, graph=known.graph)
        for member, known in zip(plan.members, made.members, strict=True)
    )
    return msgspec.structs.replace(
        made,
        members=members,
        barriers=plan.barriers,
        waits=plan.waits,
        chunks=plan.chunks,
        makespan_ns=makespan_ns,
        streams_ns=rehearsed.streams_ns,
        sequential_ns=rehearsed.sequential_ns,
        is_measured=True,
    )


def _doubts(view: JointOverview, rehearsed: Rehearsed | None) -> list[str]:
    """What speaks against the measurement."""
    over = 0.0 if rehearsed is None else rehearsed.streams_ns / max(1, view.before.end_ns)
    if over <= _EXPLAINED:
        return []
    return [
        f"On the device all at once takes {over:.2f} times what the units add up to: the machine was busy with other "
        "work, or the models slow each other down. Plan again when it is quiet."
    ]


def _use(settings: ServerConfig) -> list[str]:
    """What is to be done for the server to follow a plan."""
    from cotenant.techniques.granularity.policy.clustered import Clustered

    if settings.policy.name == Clustered.name:
        return []
    return [f"For it to be followed, set name = '{Clustered.name}' under [policy] in cotenant.toml."]


def _together_path(root: Path) -> Path:
    from cotenant.repository import together_path

    return together_path(root)


def _show(
    view: JointOverview,
    rehearsed: Rehearsed | None,
    kept: TogetherPlan | None,
    notes: list[str],
    written: list[Path],
    output: PlanOutput,
) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.granularity.report import together_lines, together_picture, together_svg

    if output.svg is not None:
        write_whole(output.svg, together_svg(view, " and ".join(view.members)).encode())
        written = [*written, output.svg]
    if output.as_json:
        print_json(_facts(view, rehearsed, kept, notes, written))
        return
    console = make_console()

    def lines() -> Iterator[str]:
        yield from together_lines(view)
        if rehearsed is not None:
            plans = " and ".join("not followed" if ns is None else f"{ns / 1e6:.3g} ms" for ns in rehearsed.plans_ns)
            verdict = "" if kept is not None else ": none is quicker by 3 %, and none is kept for serving"
            yield (
                f"Measured in turns, one after the other takes {rehearsed.sequential_ns / 1e6:.3g} ms, all at once "
                f"{rehearsed.streams_ns / 1e6:.3g} ms, by the best plans {plans}{verdict}."
            )
        yield from notes
        yield from (f"Written: {path}" for path in written)

    console.print(together_picture(view, console.width))
    console.print()
    for line in lines():
        console.print(line, highlight=False)


def _facts(
    view: JointOverview,
    rehearsed: Rehearsed | None,
    kept: TogetherPlan | None,
    notes: list[str],
    written: list[Path],
) -> dict[str, Any]:
    import msgspec

    return {
        "members": view.members,
        "gains": view.gains,
        "gain_pct": view.gain_pct,
        "gap_pct": view.gap_pct,
        "makespan_ns": view.after.end_ns,
        "streams_ns": view.before.end_ns,
        **msgspec.to_builtins(view),
        "measured": None if rehearsed is None else msgspec.to_builtins(rehearsed),
        "kept": None if kept is None else msgspec.to_builtins(kept),
        "notes": notes,
        "written": [str(path) for path in written],
    }
