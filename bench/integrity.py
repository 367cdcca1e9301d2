"""Integrity: every answer is compared with its request, while clients disconnect, cancel, crash and reload.

The models return their input numbers (`bench/_carry.py`). One has many layers and is left at cuts all the time. Others
have rows of several widths, texts, or an output with a size of its own; one is a torch archive. Two of them form an
application. Beside them models of `bench/_mixing.py` run in turn. All have `max_batch` 8, and most have one name for
all first dimensions; in some of them rows of a batch act on each other. Each of their answers is compared with the
answer of the model to that query alone (`neighbour_dependent_answers`).

Clients run in a closed loop, over HTTP (binary and JSON), gRPC and gRPC streams. Three in ten leave before the answer,
a few bring time-outs of their own. Every configuration is a fresh server. In some of them models run by a technique
(`_by_technique`); the last one is a cluster of two nodes behind its gateway. A server has a front-end process, or none
(`--frontends 0`), or two that are killed.

SLOs are longer than clients wait, so that no client that stays may fail. `innocent_failures` counts those that did.
Failures by a kill or a reload of their configuration are `excused`, with the reason.
`left_at_a_cut` is read from traces: members that left a batch between two of its launches while others stayed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench import _by_technique, _carry, _mixing
from bench._askers import UNANSWERED, Askers, Tally, Target
from bench._by_technique import chunk_launches, placed_launches, prepare
from bench._campaign import digest_of, product_files, run_all
from bench._carry import (
    MOST_ROWS,
    ask_carry,
    ask_some,
    ask_wide,
    ask_words,
    carry,
    some,
    wide,
    words,
    write_chain,
    write_model,
    write_torch,
)
from bench._cluster_faults import kill_node
from bench._mixing import KINDS, Alone, drawn
from bench._registry import BenchError
from bench._server import FRONT_END, processes_of, serving, worker_pid
from bench._tenants import profiled
from bench.cluster import cluster
from cotenant.measure.solo import Effort
from cotenant.repository import SERVER_FILE, STATE_FOLDER, trace_path
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.sources import costs_of_repository
from cotenant.techniques.partitions.plan.types import DeviceType, Load, Plan
from cotenant.techniques.partitions.serve.plan_names import slos_of
from cotenant.trace import Record, read

ANSWERS, QUICK_ANSWERS = 9_000, 250
"""Answers that each configuration goes on to."""
CALLERS = 20
CLUSTER_PERIOD_S = 2.0
"""From one look at the plan to the next."""
SEED = 5
LOST_CONNECTION = (
    "the server closed the connection",
    "Connection reset",
    "Broken pipe",
    "Socket closed",
    "UNAVAILABLE",
)
"""Messages of clients' libraries when the process at the other end dies."""
_LEAST_DISTURBANCES = 2
_MOST_S, _QUICK_MOST_S = 40.0, 8.0
QUICK_KINDS = ("found rows", "dynamic quantisation", "tokens, mixed", "sliced")
_KINDS, _QUICK_KINDS = 8, 2
"""Drawn models in each configuration."""
_SHAPES = ["[[model.shapes]]\nx = [1, 4]\n", "[[model.shapes]]\nx = [1, 30]\n"]
_ONE_CORE = "[device]\ncores = [{core}]\n"
_EVERY_CUT = "preempt = true\nslack_share = 0.0\n"


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration: the server's, and its disturbance. Reasons with one of `excuse` in them count as excused."""

    name: str
    server: str
    options: tuple[str, ...] = ()
    disturb: str = ""
    excuse: tuple[str, ...] = ()
    planned: bool = False
    by: str = ""
    """The technique that models are made to run by: "kernels", "placement", "chunks" or "" (see `_by_technique`)."""
    callers: int = CALLERS
    """Clients at once. Few where models are to start together: merged batches have other rows than a plan."""
    period_s: float = 1.5
    """From one kill, or reload, to the next."""
    most: int = 100
    """Kills, or reloads, at most."""


@dataclass(slots=True)
class Row:
    """What one configuration came to."""

    configuration: str
    answers: int = 0
    foreign_answers: int = 0
    neighbour_dependent_answers: int = 0
    unanswered: int = 0
    innocent_failures: int = 0
    excused: int = 0
    left: int = 0
    left_at_a_cut: int = 0
    timed_out: int = 0
    disturbances: int = 0
    by_technique: int = 0
    """Launches of a whole model by a placement, launches of chunks; units on kernels of the models that have some."""
    reasons: dict[str, int] = field(default_factory=dict)


SETTINGS = (
    Setting("edf, one core", _ONE_CORE + f'[policy]\nname = "edf"\n{_EVERY_CUT}'),
    Setting("edf, both cores together", f'[device]\nlanes = "all"\n[policy]\nname = "edf"\n{_EVERY_CUT}'),
    Setting("fcfs", f'[policy]\nname = "fcfs"\n{_EVERY_CUT}'),
    Setting("overlap", '[policy]\nname = "overlap"\nbarrier = true\nslack_share = 0.0\n'),
    Setting("duty cycle", f'[policy]\nname = "duty_cycle"\n{_EVERY_CUT}', planned=True),
    Setting("edf in threads", _ONE_CORE + f'[policy]\nname = "edf"\n{_EVERY_CUT}', ("--isolation", "thread")),
    Setting(
        "overlap in threads",
        '[policy]\nname = "overlap"\nbarrier = false\nslack_share = 0.0\n',
        ("--isolation", "thread"),
    ),
    Setting(
        "edf, workers killed",
        f'[policy]\nname = "edf"\n{_EVERY_CUT}',
        disturb="kill",
        excuse=("the worker of",),
        period_s=7.0,  # a worker that is lost sooner counts as one that cannot live, and the next one waits longer
    ),
    Setting(
        "edf, models reloaded",
        f'[policy]\nname = "edf"\n{_EVERY_CUT}',
        disturb="reload",
        excuse=("reloaded",),
    ),
    Setting("edf, front-end in the engine", f'[policy]\nname = "edf"\n{_EVERY_CUT}', ("--frontends", "0")),
    Setting(
        "edf, front-ends killed",
        f'[policy]\nname = "edf"\n{_EVERY_CUT}',
        ("--frontends", "2"),
        disturb="frontend",
        excuse=LOST_CONNECTION,
        period_s=3.0,
        most=6,  # after more of them the next one would be waited for
    ),
    Setting("compiled", _ONE_CORE + f'[policy]\nname = "edf"\n{_EVERY_CUT}', by="kernels"),
    Setting(
        "compiled, in threads on both cores",
        f'[device]\nlanes = "all"\n[policy]\nname = "edf"\n{_EVERY_CUT}',
        ("--isolation", "thread"),
        by="kernels",
    ),
    Setting("placed", '[device]\nlanes = "all"\n[policy]\nname = "fcfs"\npreempt = false\n', by="placement"),
    Setting("chunked", '[policy]\nname = "joint"\ndrop = "none"\n', by="chunks", callers=3),
    Setting(
        "chunked, in threads",
        '[policy]\nname = "joint"\ndrop = "none"\n',
        ("--isolation", "thread"),
        by="chunks",
        callers=3,
    ),
    Setting(
        "two nodes, one killed",
        "",
        disturb="node",
        excuse=("no node serves model", "the node was lost while the query ran"),
        period_s=12.0,
    ),
)
_BY = frozenset(each.name for each in SETTINGS if each.by)
QUICK = (
    "edf, one core",
    "overlap",
    "edf in threads",
    "edf, workers killed",
    "edf, front-end in the engine",
    "edf, front-ends killed",
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. A row is kept under the digest of the product's code: a run that was interrupted goes on there."""
    settings = [each for each in SETTINGS if not quick or each.name in QUICK]
    kinds = QUICK_KINDS if quick else KINDS
    count, limits = (_QUICK_KINDS, (QUICK_ANSWERS, _QUICK_MOST_S)) if quick else (_KINDS, (ANSWERS, _MOST_S))
    with tempfile.TemporaryDirectory(prefix="cotenant-integrity-") as name:

        @cache
        def built() -> list[Target]:
            return build(Path(name) / "models", kinds)

        def row_of(number: int) -> list[dict[str, Any]]:
            targets, part, setting = built(), Path(name) / f"part{number}", settings[number]
            chosen = {f"kind{(number * count + at) % len(kinds)}" for at in range(count)}
            asked = link(Path(name) / "models", part, targets, chosen)
            asked, units = prepare(part, setting.by, asked) if setting.by else (asked, 0)
            row = measure(part, setting, asked, itertools.count(1), *limits)
            row.by_technique += units
            return [asdict(row)]

        key = f"{digest_of([_by_technique, _carry, _mixing], [Path(__file__), *product_files()])}-{limits}"
        tasks = list(range(len(settings)))
        made = run_all("integrity", key, tasks, row_of, lambda rows: str(rows[0]["configuration"]), 1)
    rows = [Row(**each) for each in made]
    summary = summarise(rows)
    _show(rows, summary)
    if quick:
        left_out = f"{len(QUICK)} of {len(SETTINGS)} configurations, {QUICK_ANSWERS} answers in each, not {ANSWERS}"
        print(f"quick: {left_out}")
    return {"summary": summary, "rows": made, "seeds": [SEED]}


def build(root: Path, kinds: Sequence[str] = KINDS) -> list[Target]:
    """The models in a repository, with drawn ones of these kinds, profiled; which to query, and how often."""
    write_model(root, "carry", carry(), MOST_ROWS)
    write_model(root, "other", carry(1), MOST_ROWS)
    write_model(root, "wide", wide(), MOST_ROWS, _SHAPES)
    write_model(root, "words", words(), MOST_ROWS)
    write_model(root, "some", some(), 1)
    targets = [
        Target("carry", ask_carry, 6.0),
        Target("other", ask_carry, 1.0, 2),
        Target("wide", ask_wide),
        Target("words", ask_words),
        Target("some", ask_some, 1.0, 1),
        Target("chain", ask_carry),
    ]
    if write_torch(root, "archive"):
        targets.append(Target("archive", ask_carry, 2.0))
    write_chain(root, "chain", "carry", "wide", "y")
    for number, kind in enumerate(kinds):
        made = drawn(kind, SEED)
        shape = "[[model.shapes]]\n" + "".join(f"{name} = {list(dims)}\n" for name, dims in made.shape.items())
        write_model(root, f"kind{number}", made.model, MOST_ROWS, [shape])
        targets.append(Target(f"kind{number}", Alone(made).ask, 1.0, is_alone=True))
    profiled(root, Effort(budget_s=0.03, min_runs=2))
    return targets


def link(root: Path, part: Path, targets: list[Target], kinds: set[str]) -> list[Target]:
    """A repository of some of the models: all but the drawn ones, and these `kinds`; which models to query there."""
    asked = [each for each in targets if not each.is_alone or each.model in kinds]
    part.mkdir()
    for entry in (*(each.model for each in asked), STATE_FOLDER):
        (part / entry).symlink_to(root / entry)
    return asked


def measure(
    root: Path, setting: Setting, targets: list[Target], numbers: Iterable[int], answers: int, most_s: float
) -> Row:
    """Serve and ask until there are so many answers, or so much time has passed."""
    core = sorted(os.sched_getaffinity(0))[0]
    (root / SERVER_FILE).write_text(setting.server.format(core=core), encoding="utf-8")
    options = list(setting.options)
    if setting.planned:
        plan = root.parent / "plan.toml"
        plan.write_text(_plan(root), encoding="utf-8")
        options += ["--plan", str(plan)]
    try:
        with _start(root, setting, targets, options) as served:
            tally, disturbances = uvloop.run(_ask(served, setting, targets, numbers, answers, most_s))
            placed = placed_launches(served.http_url) if setting.by == "placement" else 0
    finally:
        (root / SERVER_FILE).unlink()
    records = [] if setting.disturb == "node" else list(read(trace_path(root))[1])
    excused = {why: count for why, count in tally.reasons.items() if any(each in why for each in setting.excuse)}
    unanswered = sum(count for why, count in excused.items() if why.startswith(UNANSWERED))
    row = Row(setting.name, tally.answers, tally.foreign, tally.dependent, tally.unanswered - unanswered)
    row.excused = sum(excused.values())
    row.innocent_failures = tally.failed - (row.excused - unanswered)
    row.left, row.timed_out, row.disturbances = tally.left, tally.timed_out, disturbances
    row.left_at_a_cut = left_at_a_cut(records)
    row.by_technique = chunk_launches(records) if setting.by == "chunks" else placed
    row.reasons = dict(tally.reasons.most_common(8))
    for example in tally.examples:
        print(f"{setting.name}: WRONG {example}")
    return row


def left_at_a_cut(records: Iterable[Record]) -> int:
    """Queries that left a batch between two of its launches while others stayed in it."""
    left, members = 0, dict[int, int]()
    for record in records:
        for kind, action in record.actions:
            if kind == "Launch":
                count = len(action["queries"])
                left += max(0, members.get(action["batch"], count) - count)
                members[action["batch"]] = count
    return left


def summarise(rows: Iterable[Row]) -> dict[str, int]:
    """The sums."""
    rows = list(rows)
    names = (
        "answers",
        "foreign_answers",
        "neighbour_dependent_answers",
        "unanswered",
        "innocent_failures",
        "excused",
        "left",
        "left_at_a_cut",
        "timed_out",
    )
    made = {name: sum(getattr(row, name) for row in rows) for name in names} | {"configurations": len(rows)}
    return made | {"least_by_technique": min((row.by_technique for row in rows if row.configuration in _BY), default=0)}


@dataclass(frozen=True, slots=True)
class Served:
    """The addresses, and the ways to disturb the server; `disturb` gets the number of the turn."""

    http_url: str
    grpc_url: str
    disturb: Callable[[int], None]


@contextmanager
def _start(root: Path, setting: Setting, targets: list[Target], options: list[str]) -> Iterator[Served]:
    """A server, or a cluster of two nodes, until the block ends."""
    if setting.disturb == "node":
        rates = {target.model: 5.0 for target in targets if target.model != "chain"}
        with cluster(root, rates, CLUSTER_PERIOD_S) as up:
            yield Served(up.url, up.grpc, partial(kill_node, up))
        return
    with serving(root, *options) as server:
        acts: dict[str, Callable[[int], None]] = {
            "": lambda _: None,
            "kill": lambda _: os.kill(worker_pid(server, "carry"), signal.SIGKILL),
            "frontend": lambda number: os.kill(_one_of(processes_of(server, FRONT_END), number), signal.SIGKILL),
            "reload": lambda _: _post(f"{server.http_url}/v2/repository/models/carry/load"),
        }
        yield Served(server.http_url, f"{server.host}:{server.grpc_port}", acts[setting.disturb])


def _one_of(pids: Sequence[int], number: int) -> int:
    """One of some processes, in turn. Raises ZeroDivisionError where there is none."""
    return pids[number % len(pids)]


async def _ask(
    served: Served, setting: Setting, targets: list[Target], numbers: Iterable[int], answers: int, most_s: float
) -> tuple[Tally, int]:
    asked = [target for target in targets if setting.disturb != "node" or target.model != "chain"]
    askers = Askers(served.http_url, served.grpc_url, asked, seed=SEED, numbers=iter(numbers))
    end = asyncio.get_running_loop().time() + most_s
    moments: list[float] = []
    disturber = asyncio.ensure_future(_disturb(served, setting, moments))

    def is_over(tally: Tally) -> bool:
        is_disturbed = not setting.disturb or len(moments) >= _LEAST_DISTURBANCES
        return (tally.answers >= answers and is_disturbed) or asyncio.get_running_loop().time() >= end

    try:
        tally = await askers.run(setting.callers, is_over)
    finally:
        disturber.cancel()
        with suppress(asyncio.CancelledError):
            await disturber
    return tally, len(moments)


async def _disturb(served: Served, setting: Setting, moments: list[float]) -> None:
    """Kill a worker, a front-end or a node, or reload a model, again and again, and note when."""
    while setting.disturb and len(moments) < setting.most:
        await asyncio.sleep(setting.period_s)
        with suppress(BenchError, ZeroDivisionError, ProcessLookupError):  # it has not come back yet
            await asyncio.to_thread(served.disturb, len(moments))
            moments.append(asyncio.get_running_loop().time())


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=60) as answer:
        answer.read()


def _plan(root: Path) -> str:
    """A plan of two models on a core each, as `cotenant plan` would write it; the others are backfilled."""
    kind = DeviceType("cpu", ((2,), (1, 1)), 1 << 40)
    slos = slos_of(root)  # others than these are refused
    loads = tuple(Load(name, name, 20.0, slos[name]) for name in ("carry", "wide"))
    basis = costs_of_repository(root, (kind,))
    plan = Elastic(headroom=0.1).plan(loads, basis.devices, basis.costs)
    if not isinstance(plan, Plan):
        raise BenchError(f"no plan for {[load.tenant for load in loads]}: {plan}")
    return plan_text(PlanFile(Request(loads, (kind,)), plan, 0.1))


def _show(rows: list[Row], summary: dict[str, int]) -> None:
    console = Console(width=140)
    table = Table(box=None)
    for name in (
        "configuration",
        "answers",
        "foreign",
        "depend",
        "none",
        "innocent",
        "excused",
        "left",
        "at cuts",
        "hurried",
        "hits",
        "by it",
    ):
        table.add_column(name, no_wrap=True)
    table.title = "Answers compared with their requests"
    for row in rows:
        table.add_row(*(str(value) for key, value in asdict(row).items() if key != "reasons"))
    console.print(table)
    for row in rows:
        for reason, count in row.reasons.items():
            console.print(f"{row.configuration}: {count} x {reason}", highlight=False)
    for key, value in summary.items():
        console.print(f"{key}: {value}")
