"""Golden table: from settings to the policy, as `cotenant serve` and `cotenant simulate` each make it.

Where the two differ the table says so, so that no difference comes unseen. Nothing is served or simulated for it: each
command is followed up to where its policy is made. `pytest --bless` writes it anew: read the difference first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import pytest
from msgspec import UNSET
from typer.main import get_command

from bench._clockwork import Clockwork
from bench.papers.veltair import _baselines  # noqa: F401 - registers four policies of the table
from commands import Run
from cotenant.cli.app import app
from cotenant.core.engine import Engine
from cotenant.core.predictor import Group
from cotenant.core.snapshot import Policy
from cotenant.execute.gpu.sm_ladder import SmGrid
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.measure.load_spec import facts_of
from cotenant.measure.opened_model import open_version
from cotenant.policies import policy_names
from cotenant.policies.registry import policy_text
from cotenant.predict.grouped import FittedGroups
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.repository import SERVER_FILE, find_versions
from cotenant.serve.models.served_models import serve_model
from cotenant.serve.server import Server
from cotenant.techniques.overlap.predict.overlap_file import OverlapFileError
from cotenant.types import Tenant
from cotenant.work import CPU, Round, Share
from golden_files import GOLDEN, agree
from profile_files import save_current
from repositories import scaled, write_model

MS = 1_000_000
TABLE = GOLDEN / "policies.txt"
PLAN = GOLDEN / "plans" / "shared.toml"

MODELS = {
    "clicks": "slo_ms = 60\npriority = 1\n\n[model]\nmax_batch = 8\n",
    "search": "slo_ms = 150\nweight = 2.0\n\n[segments]\nmax_ms = 4\n",
    "photos": "slo_ms = 300\nmax_queue = 16\n\n[model]\nmax_batch = 2\n",
    "papers": "slo_ms = 400\n",
}
"""With and without merging; those that the golden plan has slots of."""
WORKLOAD = "duration_s = 0.1\n" + "".join(f'[[tenant]]\nmodel = "{name}"\nrate = 1\n' for name in MODELS)
GRID = SmGrid(total=80, granularity=8)


NAMES = (
    *("shares", "most", "fair", "weighted", "fcfs", "sjf", "edf", Clockwork.name, "overlap", "duty_cycle", "joint"),
    *("model_wise", "layer_wise", "fixed_blocks", "prema", "layer_block", "slack_blocks"),
)
"""In the order of the table; `clockwork` and `model_wise` to `prema` are policies of the benchmarks."""
OVERLAP = ("overlap",)


@dataclass(frozen=True)
class Case:
    """A repository's settings, and what is said on the command line. `slowed` is what measured groups take over the
    slowest of their launches; None stands for a repository in which no groups were measured."""

    settings: str = ""
    options: Sequence[str | Path] = ()
    slowed: float | None = None
    slow: Sequence[str] = tuple(MODELS)
    """Whose groups do, when all members are of these."""
    names: Sequence[str] = NAMES
    """Policies that the command line asks for; an empty name for none."""


CASES = {
    "nothing is set": Case(names=("", *NAMES)),
    "the file names a policy": Case('[policy]\nname = "overlap"\ndrop = "expired"\n', names=("", "sjf")),
    "one lane, late answers are given": Case('[device]\nlanes = "all"\n\n[policy]\ndrop = "none"\n'),
    "lanes of two sizes on three cores": Case("[device]\ncores = [0, 1, 3]\nlanes = [[3], [0, 1]]\n"),
    "every option of the file": Case(
        '[device]\nisolation = "thread"\n\n[policy]\nname = "overlap"\ndrop = "expired"\npreempt = true\n'
        "slack_share = 0.5\nways = 2\nmembers = 3\nrepeat = false\nbarrier = true\nenqueue_ms = 2.5\n"
        "tail_aware = true\n"
    ),
    "an option of another policy": Case('[policy]\nname = "edf"\nbackfill = false\n', names=("",)),
    "the command line over the file": Case(
        '[device]\nlanes = "all"\n\n[policy]\ndrop = "expired"\npreempt = true\ntail_aware = true\n',
        ("--lanes", "0,1/2,3", "--drop", "none", "--no-preempt", "--no-tail-aware"),
    ),
    "a plan": Case(options=("--plan", PLAN), names=("", *NAMES)),
    "a plan in the file, and the policy of no plan": Case(
        f'[policy]\nname = "edf"\nslack_share = 0.2\n\n[plan]\nfile = "{PLAN}"\n', names=("", "edf")
    ),
    "shares of a GPU": Case('[device]\nkind = "cuda"\nindex = 1\nshares = [25, 75]\n'),
    "groups that slow each other down": Case(slowed=2.0, names=OVERLAP),
    "one model that slows itself down": Case(slowed=3.0, slow=("photos",), names=OVERLAP),
    "one model that slows itself down on a GPU": Case(
        '[device]\nkind = "cuda"\nshares = [25, 75]\n', slowed=3.0, slow=("photos",), names=OVERLAP
    ),
    "groups that hardly slow each other down": Case(slowed=1.25, names=OVERLAP),
    "groups that slow each other down, in one lane": Case('[device]\nlanes = "all"\n', slowed=2.0, names=OVERLAP),
    "groups that slow each other down, without a barrier": Case(
        '[policy]\nname = "overlap"\nbarrier = false\n', slowed=2.0, names=OVERLAP
    ),
    "groups that slow each other down, and a plan": Case(
        '[device]\nlanes = "all"\n', ("--plan", PLAN), slowed=2.0, names=OVERLAP
    ),
    "more members than lanes": Case('[policy]\nname = "overlap"\nmembers = 5\n', names=OVERLAP),
    "cores that are not there": Case("[device]\ncores = [9]\n", names=("edf",)),
}


class Slowed(FittedGroups):
    """A fitted predictor of groups: as much longer than the longest member as it was told."""

    key = "slowed"
    quantile = 0.5

    def __init__(self, table: TablePredictor, by: float, slow: Sequence[str]) -> None:
        self._table = table
        self._by = by
        self._slow = slow

    def at(self, quantile: float) -> Slowed:
        return self

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        factors = [self._by if all(member.work.tenant in self._slow for member in group) else 1.0 for group in groups]
        return [round(by * longest) for by, longest in zip(factors, self._table.group_ns(groups), strict=True)]


class MadeError(BaseException):
    """Ends `serve` where its server is made."""

    def __init__(self, server: Server) -> None:
        super().__init__("the server is made")
        self.server = server


PROFILE = Profile(
    this_device(),
    "",
    "",
    {
        name: ModelProfile("", (Point(0, 1, 1, 9, *(5 * MS,) * 4),), (1, 1), (0, 1, 2), 1.0, splits=splits)
        for name in MODELS
        for splits in [((0, 1, 2),) if name in ("clicks", "photos") else UNSET]
    },
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profiled repository on a machine of four cores and a GPU of 80 SMs."""
    root = tmp_path / "models"
    for name, text in MODELS.items():
        write_model(root, name, f"[tenant]\n{text}", {1: lambda: scaled(2.0)})
    save_current(root, PROFILE)
    (tmp_path / "workload.toml").write_text(WORKLOAD, encoding="utf-8")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr("cotenant.execute.gpu.configured._ask_driver", lambda section, where: GRID)
    return root


@pytest.fixture
def made(root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(root, run, monkeypatch)


class Made:
    """What commands have made when they are about to serve or to simulate, as lines of text."""

    def __init__(self, root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._run = run
        self._patch = monkeypatch
        self._engine: Engine | None = None
        monkeypatch.setattr("cotenant.serve.server.open_executor", lambda *_: ProcessExecutor())
        monkeypatch.setattr("cotenant.serve.child.prepare_process", lambda: None)  # which sets what the process keeps
        monkeypatch.setattr("cotenant.serve.frontend.front_ends.HttpServer", self._serve)
        monkeypatch.setattr("cotenant.sim.scenario.simulate", self._simulate)
        monkeypatch.setattr(
            "cotenant.techniques.overlap.predict.overlap_file.keep_overlap", lambda folder, fitted: None
        )
        monkeypatch.setattr("cotenant.cli.app.app", get_command(app))  # made once: it takes longer than all the rest

    def use(self, case: Case) -> None:
        """Let the repository be that of a case."""
        (self._root / SERVER_FILE).write_text(case.settings, encoding="utf-8")

        def load_overlap(root: Path, profile: Profile, *, quantile: float = 0.5) -> Slowed:
            if case.slowed is None:
                raise OverlapFileError("no groups were measured")
            return Slowed(TablePredictor(profile.tables()), case.slowed, case.slow)

        for module in (
            "cotenant.techniques.overlap.measure.measured_groups",
            "cotenant.techniques.overlap.measure.overlap_models",
        ):
            self._patch.setattr(f"{module}.load_overlap", load_overlap)

    def served(self, name: str, options: Sequence[str | Path]) -> tuple[Policy, str] | str:
        """The policy of `serve` and what is to be said of it, or its error."""
        try:
            _, _, err = self._run(
                "serve", self._root, "--frontends", "0", *(("--policy", name) if name else ()), *options
            )
        except MadeError as end:
            server = end.server
            server.stop()
            believed = type(server.beliefs.predictor).__name__
            return server.policy, f"{policy_text(server.policy)}, believes {believed}"
        return self._shown(err)

    def simulated(self, name: str, options: Sequence[str | Path]) -> tuple[Policy, str] | str:
        """The same of `simulate`."""
        self._engine = None
        workload = self._root.parent / "workload.toml"
        named = ("--policy", name) if name else ()
        _, out, err = self._run("simulate", workload, self._root, *named, *options, "--json")
        if self._engine is None:
            return self._shown(err)
        told = json.loads(out)["runs"][0]
        tail_aware = ", tail-aware" if told["tail_aware"] else ""
        believed = type(self._engine.predictor).__name__
        text = f"{told['policy']} (drop: {told['drop']}{tail_aware}), believes {believed}"
        return cast(Policy, self._engine.policy), text

    def tenants(self, name: str) -> tuple[tuple[Tenant, ...], tuple[Tenant, ...]]:
        """The tenants that a server serves under a policy, and those of a simulation."""
        made = self.served(name, ())
        self.simulated(name, ())
        assert not isinstance(made, str)
        assert self._engine is not None
        served = []
        for model in MODELS:
            opened = open_version(self._root, find_versions(self._root, model)[-1])
            facts = facts_of(opened, opened.splits)
            served.append(serve_model(facts, PROFILE.models[model], preempt=made[0].preempt).tenant)
            opened.runner.close()
        return tuple(served), self._engine.tenants

    def _serve(self, server: Server, *_: object) -> None:
        raise MadeError(server)

    def _simulate(self, engine: Engine, *_: object, **__: object) -> int:
        self._engine = engine
        return 0

    def _shown(self, error: str) -> str:
        """The command's sentence alone: libraries may write to standard error, too."""
        told = [line for line in error.splitlines() if line.startswith("cotenant: ")]
        assert len(told) == 1, error
        return told[0].replace(str(self._root), "models")


def lanes_text(lanes: Sequence[Share]) -> str:
    """Cores with "+" between them, slots of a GPU by the first and the last."""
    found = []
    for lane in lanes:
        cores = lane.cores
        assert lane.device == CPU or cores == tuple(range(cores[0], cores[-1] + 1))
        found.append("+".join(map(str, cores)) if lane.device == CPU else f"{lane.device} {cores[0]}-{cores[-1]}")
    return " | ".join(found)


def rounds_text(rounds: Sequence[Round]) -> str:
    each = [
        f"{made.duty_ns} ns: {', '.join(f'{s.tenant} {s.rate_per_s!r}/s by {s.batch}' for s in made.slots)}"
        if made.slots
        else "nothing"
        for made in rounds
    ]
    return " | ".join(each) or "none"


def policy_lines(found: tuple[Policy, str] | str) -> list[str]:
    """Everything that a policy was made with."""
    if isinstance(found, str):
        return found.splitlines()
    policy, text = found
    options = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    lines = [text, f"lanes: {lanes_text(options.pop('lanes'))}"]
    if "rounds" in options:
        lines.append(f"rounds: {rounds_text(options.pop('rounds'))}")
    return [*lines, ", ".join(f"{name} {value}" for name, value in options.items())]


def case_lines(title: str, case: Case, made: Made) -> list[str]:
    made.use(case)
    lines = [f"== {title}"]
    for name in case.names:
        served, simulated = (policy_lines(make(name, case.options)) for make in (made.served, made.simulated))
        lines += [f"{name or '(no name)'}:", *told(served, simulated)]
    return [*lines, ""]


def tenant_lines(made: Made) -> list[str]:
    """Models as tenants of the core, under a policy that cuts them and one that does not."""
    made.use(Case())
    lines = ["== tenants"]
    for name in ("edf", "fcfs"):
        lines.append(f"{name}:")
        for served, simulated in zip(*made.tenants(name), strict=True):
            lines += told([tenant_text(served)], [tenant_text(simulated)])
    return lines


def tenant_text(tenant: Tenant) -> str:
    return ", ".join(f"{field.name} {getattr(tenant, field.name)}" for field in fields(tenant))


def told(served: Sequence[str], simulated: Sequence[str]) -> list[str]:
    """What one command and the other have made; once where they agree."""
    if served == simulated:
        return [f"    both      {line}" for line in served]
    return [*(f"    serve     {line}" for line in served), *(f"    simulate  {line}" for line in simulated)]


def test_settings_make_the_policies_of_the_golden_table(made: Made, bless: bool) -> None:
    assert set(NAMES) == set(policy_names())
    lines = [line for title, case in CASES.items() for line in case_lines(title, case, made)]
    lines += tenant_lines(made)
    agree(TABLE, "".join(f"{line}\n" for line in lines).encode(), bless)
