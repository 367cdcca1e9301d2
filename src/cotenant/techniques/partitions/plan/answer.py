"""The answers of planning, for `cotenant plan` and the Python API: a plan with its assessment, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from cotenant.api.planning import PlanCheck, PlanOptions, PlanResult
from cotenant.errors import PlanError
from cotenant.measure.rates import rates_fault
from cotenant.plan_file import TENANTS, SectionCheck, read_sections, sections, sections_text
from cotenant.repository import model_names, readable_versions
from cotenant.repository.server_settings import settings_of
from cotenant.techniques.partitions.plan.advice import Advisor, Remedy, Unservable, all_loads
from cotenant.techniques.partitions.plan.assess import Assessment, assess, sequential_slot_notes, violations
from cotenant.techniques.partitions.plan.file import PlanFile, Request, read_plan, read_request
from cotenant.techniques.partitions.plan.planners import ForBursts, ForServers, is_blind, make_planner
from cotenant.techniques.partitions.plan.promise import SEARCHED_ROWS, SEED, Promising, missed, simulated
from cotenant.techniques.partitions.plan.scaling import least_devices
from cotenant.techniques.partitions.plan.sources import CostBasis, ProfileCosts, basis_of, read_profile_costs
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import Infeasible, Plan, Planner

DEFAULT_PLANNER = "ours"
DEFAULT_HEADROOM = 0.1
"""Share that is added to every rate."""
SEARCH_EFFORT = 0.2
"""Effort of the planner in searches, which plan many times."""


@dataclass(frozen=True, slots=True)
class PlanAnswer(PlanResult):
    """A plan that was checked. `contents` are the sections of its file, `facts` the answers of `cotenant plan`."""

    contents: Mapping[str, Any]
    view: Assessment
    facts: Mapping[str, Any]

    @property
    @override
    def fits(self) -> bool:
        return True

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each tenant: the fields of TenantView."""
        return [asdict(each) for each in self.view.tenants]

    @override
    def to_json(self) -> dict[str, Any]:
        view = self.view
        found: dict[str, Any] = msgspec.to_builtins(
            {**self.facts, "first": view.first.tenant, "devices": view.devices, "tenants": view.tenants}
        )
        return found

    @override
    def text(self) -> str:
        return sections_text(self.contents)

    @override
    def svg(self) -> str:
        from cotenant.techniques.partitions.report import plan_svg, summary_lines

        return plan_svg(self.view, next(iter(summary_lines(self.view, self.facts, ()))))


@dataclass(frozen=True, slots=True)
class NoPlan(PlanResult):
    """No plan was found: the broken constraint, and changes that make a plan possible."""

    planner: str
    broken: Infeasible
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]
    unservable: tuple[Unservable, ...] = ()
    """Tenants that cannot be served even alone."""

    @property
    @override
    def fits(self) -> bool:
        return False

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each change: the fields of Remedy."""
        return [asdict(each) for each in self.remedies]

    @override
    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(
            {
                "fits": False,
                "planner": self.planner,
                "broken": self.broken,
                "remedies": self.remedies,
                "unservable": self.unservable,
                "notes": self.notes,
            }
        )
        return found

    @override
    def text(self) -> str:
        raise PlanError(f"there is no plan: {self.broken.tenant!r} breaks: {self.broken.constraint}")

    @override
    def svg(self) -> str:
        return self.text()


def plan_tenants(
    tenants: Path, profiles: Mapping[str, Path], devices: int | Mapping[str, int] | None, options: PlanOptions
) -> PlanResult:
    """The function behind `cotenant.plan`. Raises PlanError."""
    tables = {name: profile_costs(path, options.quantile) for name, path in profiles.items()}
    request = request_of(tenants, tables)
    if devices is not None:
        if isinstance(devices, int):
            kinds = list(dict.fromkeys(device.name for device in request.devices))
            if len(kinds) != 1:
                raise PlanError(f"devices is {devices}, and the file has {len(kinds)} kinds of device, expected one")
            devices = {kinds[0]: devices}
        request = with_counts(request, devices)
    basis = basis_for(tables, request, stale=options.is_stale)
    request = replace(request, devices=basis.devices)
    is_poisson = options.is_poisson
    share = added_share(options.headroom, is_poisson)
    found = planned(
        pair_of_planners(options.planner or DEFAULT_PLANNER, share, is_poisson=is_poisson),
        *(request, basis),
        headroom=share,
        running=None if options.running is None else read_plan(options.running).plan,
        is_quick=options.is_quick,
        misses=options.misses,
    )
    if isinstance(found, NoPlan):
        return found
    file, answers = found
    return answer_of({TENANTS: file, **kept_sections(tables, request)}, basis, {**answers, "poisson": is_poisson})


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan file with tenants, its check, and the costs of its models."""

    contents: Mapping[str, Any]
    check: PlanCheck
    basis: CostBasis


def check_plan(plan: Path, profiles: Mapping[str, Path], *, quantile: str, is_stale: bool) -> PlanCheck:
    """The function behind `cotenant.check_plan`. Raises PlanError."""
    contents = read_sections(plan)
    if TENANTS not in contents:
        return check_sections(contents, [*profiles.values()], is_stale=is_stale)
    tables = {name: profile_costs(path, quantile) for name, path in profiles.items()}
    return checked_tenants(contents, tables, is_stale=is_stale).check


def check_sections(contents: Mapping[str, Any], roots: Sequence[Path], *, is_stale: bool) -> PlanCheck:
    """Check a plan file without tenants against its repositories."""
    faults, old = _check_sections(contents, roots, stale=is_stale)
    return PlanCheck(tuple(faults), tuple(old), not old)


def checked_tenants(contents: Mapping[str, Any], tables: Mapping[str, ProfileCosts], *, is_stale: bool) -> CheckedPlan:
    """Check a plan file with tenants. Raises as `basis_for`."""
    file: PlanFile = contents[TENANTS]
    basis = basis_for(tables, file.request, stale=is_stale)
    request = replace(file.request, devices=basis.devices)
    contents = {**contents, TENANTS: replace(file, request=request)}
    wrong = violations(file.plan, request.loads, request.devices, basis.costs, file.headroom, request.applications)
    broken = _broken_promises(contents[TENANTS], basis.costs)
    roots = [table.root for table in tables.values() if table.root is not None]
    faults, old = _check_sections(contents, roots, stale=None)
    is_same = file.profile == basis.fingerprint and not old
    return CheckedPlan(contents, PlanCheck((*wrong, *broken, *faults), tuple(old), is_same), basis)


def _check_sections(contents: Mapping[str, Any], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
    """Faults of all sections of a plan file (`FileSection.check`)."""
    found = [sections()[name].check(content, roots, stale=stale) for name, content in contents.items()]
    return SectionCheck([each for one in found for each in one.faults], [each for one in found for each in one.stale])


def profile_costs(path: str | Path, quantile: str) -> ProfileCosts:
    """The costs of a repository or a profile file.

    Raises PlanError where the repository guarantees rates above its lanes, and as `read_profile_costs`.
    """
    found = read_profile_costs(Path(path), quantile)
    if (fault := rates_fault(Path(path))) is not None:
        raise PlanError(f"{path}: {fault}")
    return found


def request_of(tenants: Path, tables: Mapping[str, ProfileCosts]) -> Request:
    """Read a file of tenants; SLOs and stages that it leaves out are those of the repositories.

    Raises PlanError, with all tenants of models without a profile, and what is wrong with each.
    """
    known = {name: each for table in tables.values() for name, each in table.known.items()}
    applications = {name: each for table in tables.values() for name, each in table.applications.items()}
    return read_request(tenants, known, applications, lambda models: _unmeasured(models, tables))


def _unmeasured(models: Mapping[str, str], tables: Mapping[str, ProfileCosts]) -> list[str]:
    """A sentence for each problem of each tenant of a model without a profile. `models` are by tenant."""
    measured = sorted({name for table in tables.values() for name in table.latencies})
    lacking = {tenant: model for tenant, model in models.items() if model not in measured}
    if not lacking:
        return []
    why: dict[str, tuple[str, ...]] = {}
    for root in dict.fromkeys(table.root for table in tables.values() if table.root is not None):
        why |= _problems_in(root, {*lacking.values()})
    unknown = (f"the profiles do not have it, they have {', '.join(measured)}",)
    return [
        f"tenant {tenant!r}: {problem if model in why else f'model {model!r}: {problem}'}"
        for tenant, model in lacking.items()
        for problem in why.get(model, unknown)
    ]


def _problems_in(root: Path, models: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Why models of a repository have no profile, by name of the model or of its tenant."""
    from cotenant.measure.verdict import judge_repository

    versions = [*readable_versions(root)]
    folders = {each.tenant: each.model for each in versions} | {name: name for name in model_names(root)}
    wanted = {name: folders[name] for name in models if name in folders}
    tenants = {each.tenant for each in versions if each.model in wanted.values()}
    judged = {*wanted.values(), *(each.model for each in versions if each.tenant in tenants)}
    verdicts = {each.model: each.problems for each in judge_repository(root, settings_of(root), judged)}
    return {
        name: verdicts[model] or (f"model {model!r} has no profile: run 'cotenant profile {root}'",)
        for name, model in wanted.items()
    }


def with_counts(request: Request, counts: Mapping[str, int]) -> Request:
    """The request with other numbers of devices, by name of the type. Raises PlanError for an unknown type."""
    kinds = {device.name: device for device in request.devices}
    if unknown := [name for name in counts if name not in kinds]:
        raise PlanError(f"device {unknown[0]!r} is not in the file, which has {', '.join(kinds)}")
    there = {name: sum(device.name == name for device in request.devices) for name in kinds}
    return replace(request, devices=tuple(kinds[name] for name in kinds for _ in range(counts.get(name, there[name]))))


def basis_for(tables: Mapping[str, ProfileCosts], request: Request, *, stale: bool = False) -> CostBasis:
    """The costs of a plan for a request. Raises as `plan.sources.basis_of`."""
    models = [load.model for load in request.loads]
    models += [stage.model for application in request.applications for stage in application.stages]
    return basis_of(dict(tables), request.devices, models, stale=stale)


def added_share(headroom: float | None, is_poisson: bool) -> float:
    """Share added to every rate: `headroom`, else none for a planner for Poisson arrivals, else the default."""
    return headroom if headroom is not None else 0.0 if is_poisson else DEFAULT_HEADROOM


def pair_of_planners(name: str, headroom: float, *, is_poisson: bool = False) -> tuple[Planner, Planner]:
    """The planner, and the same with less effort, for searches; `is_poisson` plans for bursts. Raises PlanError."""
    made = make_planner(name, headroom), make_planner(name, headroom, SEARCH_EFFORT)
    return (ForBursts(made[0]), ForBursts(made[1])) if is_poisson else made


def kept_sections(tables: Mapping[str, ProfileCosts], request: Request) -> dict[str, Any]:
    """The contents of other sections of the plan file that the repositories keep of these models."""
    roots = [table.root for table in tables.values() if table.root is not None]
    models = {load.model for load in request.loads}
    found = {name: [section.kept(root, models) for root in roots] for name, section in sections().items()}
    return {name: tuple(chain(*each)) for name, each in found.items() if any(each)}


def words_of(contents: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each part of a plan file in a few words, with the name of its section."""
    return [(name, words) for name, content in contents.items() for words in sections()[name].words(content)]


def planned(
    planners: tuple[Planner, Planner],
    request: Request,
    basis: CostBasis,
    *,
    headroom: float,
    running: Plan | None = None,
    is_quick: bool = False,
    misses: float | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[PlanFile, dict[str, Any]] | NoPlan:
    """A plan that was checked, with the least number of devices and the growth of rates; or NoPlan.

    `planners` are those of `pair_of_planners`. `misses`: share of misses that the plan promises. `on_step` is called
    with the name of each step. Raises PlanError for a plan that does not hold.
    """
    later = {app.tenant(stage) for app in request.applications for stage in app.stages if stage.after}
    if misses is not None:
        first, second = planners
        planners = (
            Promising(first, misses, request.applications),
            Promising(second, misses, request.applications, SEARCHED_ROWS),
        )
    planner, searching = (ForServers(each, basis.overload, later, 1.0 + headroom) for each in planners)
    advisor = Advisor(searching, request, basis.costs)
    loads = all_loads(request, request.devices, basis.costs)
    found = planner.plan(loads, request.devices, basis.costs, running)
    if isinstance(found, Infeasible):
        on_step("searching changes that would make it fit")
        return NoPlan(planner.name, found, advisor.remedies(found), basis.notes, advisor.unservable())
    wrong = violations(found, loads, request.devices, basis.costs, headroom, request.applications)
    if wrong:
        blind = "it is blind to interference: plan with elastic_int or ours" if is_blind(planner.name) else "a fault"
        raise PlanError(f"planner {planner.name!r} made a plan that does not hold ({blind}): {wrong[0]}")
    on_step("searching the least number of devices")
    least = least_devices(planner, loads, request.devices, basis.costs, found)
    on_step("searching how far rates may grow")
    growth = None if is_quick else advisor.growth()
    file = PlanFile(replace(request, loads=loads), found, headroom, basis.fingerprint, misses)
    return file, {"fits": True, "least_devices": least.devices, "growth": growth}


def answer_of(contents: Mapping[str, Any], basis: CostBasis, answers: Mapping[str, Any]) -> PlanAnswer:
    """Assess the plan of a plan file. `answers` are facts that are known already, and come first."""
    file: PlanFile = contents[TENANTS]
    request, made = file.request, file.plan
    view = assess(made, request.loads, request.devices, basis.costs, basis.tail)
    notes = (
        *basis.notes,
        *sequential_slot_notes(made, request.loads, basis.costs),
        *(f"{name}: {words}" for name, words in words_of(contents)),
    )
    facts: dict[str, Any] = {
        **answers,
        "checked": True,
        "planner": made.planner,
        "headroom": file.headroom,
        "fingerprint": basis.fingerprint,
        "notes": notes,
        "devices_there": len(request.devices),
        "devices_used": len(made.devices),
        "simulated": _simulated(file, basis),
        **({} if file.misses is None else {"misses": file.misses}),
    }
    return PlanAnswer(contents, view, facts)


def _simulated(file: PlanFile, basis: CostBasis) -> dict[str, Any]:
    """The outcomes of queries with Poisson arrivals at the rates of the request."""
    request = file.request
    done, seconds = simulated(file.plan, request.loads, request.applications, basis.costs, file.misses)
    shares = missed(done)
    outcomes = [
        {
            "name": each.tenant,
            "offered": each.offered,
            "in_slo": each.answered,
            "late": each.late,
            "dropped": each.offered - each.answered - each.late,
            "p50_ns": each.p50_ns or 0,
            "p99_ns": each.p99_ns or 0,
            "violation_share": shares[each.tenant],
        }
        for each in done.tenants
    ]
    return {"arrivals": "poisson", "seconds": seconds, "seed": SEED, "outcomes": outcomes}


def _broken_promises(file: PlanFile, costs: TableCosts) -> list[str]:
    """Tenants that miss more SLOs in a simulation than the plan promises, a sentence for each."""
    if file.misses is None:
        return []
    request = file.request
    shares = missed(simulated(file.plan, request.loads, request.applications, costs, file.misses)[0])
    return [
        f"{name!r} misses {share:.2%} of its SLOs with Poisson arrivals, and {file.misses:.2%} are promised"
        for name, share in shares.items()
        if share > file.misses
    ]
