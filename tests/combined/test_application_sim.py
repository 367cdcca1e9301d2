"""Applications in the simulator: as in the server, by hand, and byte for byte the same trace each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from application_samples import CHAIN, fan, write_application, write_models
from application_world import CHAIN as CHAIN_STAGES
from application_world import DIAMOND, World, X, application, with_plans
from cotenant.config import PolicySection
from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import ApplicationArrived, Event
from cotenant.core.probes import SLOWER
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError
from cotenant.metrics import OutcomeLog
from cotenant.policies import policy_names
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.online import OnlineModel
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.sim.applications import SimulatedApplication, StagedEngine
from cotenant.sim.driver import simulate
from cotenant.sim.scenario import Assumptions, run_scenario, scenario_of
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan
from cotenant.trace import TraceWriter, header, read, replay
from cotenant.trace.explain import explain
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from cotenant.workload import TenantLoad, Trace, Workload
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, ONE_LANE, TWO_LANES, tables


def simulated(
    after: Sequence[Sequence[int]],
    times_ms: Sequence[float],
    arrivals_ms: Sequence[float],
    *,
    slo_ms: float,
    real_ms: Sequence[float] = (),
    drop: DropRule = DropRule.HOPELESS,
    lanes: tuple[Share, ...] = ONE_LANE,
    max_batch: int = 1,
    policy: str = "edf",
    plain: Sequence[bool] = (),
    trace: Path | None = None,
) -> list[tuple[float, int, Outcome, str]]:
    """What becomes of queries that arrive at these times: when, which one, how and why.

    `plain` says which of them are of the first stage's model alone; by default none is.
    """
    spec = application(slo_ms, after)
    tenants = [Tenant(f"m{at}", 10_000 * MS, max_batch=max_batch, splits=((0, 1),)) for at in range(len(times_ms))]
    believed = tables({f"m{at}": round(time * MS) for at, time in enumerate(times_ms)})
    real = tables({f"m{at}": round(time * MS) for at, time in enumerate(real_ms or times_ms)})
    made = with_plans(policy, lanes, drop)
    writer = (
        None
        if trace is None
        else TraceWriter(trace.open("wb"), header(made, believed, tenants, Machine.cpu(CORES), created=""))
    )
    engine = StagedEngine(
        Engine(tenants, made, believed, Machine.cpu(CORES)),
        {"app": SimulatedApplication(spec.graph, tuple(tenants))},
        writer,
    )
    ended: list[tuple[float, int, Outcome, str]] = []

    def on_respond(respond: Respond, now: int) -> None:
        ended.append((now / MS, respond.query, respond.outcome, respond.reason))

    arrivals = [round(time * MS) for time in arrivals_ms]
    names = ["m0" if is_plain else "app" for is_plain in plain or [False] * len(arrivals)]
    queries = [Query(number, names[number], at, at + spec.slo_ns) for number, at in enumerate(arrivals)]
    simulate(engine, TableWorld(real), queries, on_respond)
    assert engine.live == 0
    assert engine._stages == {}
    if writer is not None:
        writer.close()
    return ended


def test_a_diamond_by_hand() -> None:
    assert simulated(DIAMOND, [10, 5, 20, 7], [0, 3], slo_ms=100, lanes=TWO_LANES) == [
        (40, 0, Outcome.ANSWERED, ""),  # its long side waits 3 ms for the first stage of the other query
        (47, 1, Outcome.ANSWERED, ""),
    ]


def test_what_cannot_be_in_time_is_rejected_at_arrival() -> None:
    reason = "stage 's0': 10.0 ms of work do not fit into 0.0 ms"
    assert simulated(CHAIN_STAGES, [10, 20, 30], [4], slo_ms=50) == [(4, 0, Outcome.REJECTED, reason)]


@given(
    seed=st.integers(0, 10_000),
    after=st.sampled_from([CHAIN_STAGES, DIAMOND, [[], [], [0, 1]], [[]], [[], [], []]]),
    drop=st.sampled_from(list(DropRule)),
    lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
    policy=st.sampled_from([name for name in policy_names() if name != "overlap"]),
)
@example(seed=8851, after=DIAMOND, drop=DropRule.NONE, lanes=TWO_LANES, policy="joint").via("a batch in parts")
def test_the_simulator_does_what_the_server_does(
    seed: int, after: Sequence[Sequence[int]], drop: DropRule, lanes: tuple[Share, ...], policy: str
) -> None:
    """The same queries through the server's driver in virtual time: every end is the same, to the nanosecond."""
    random = Random(seed)
    times = [random.randrange(1, 20) + random.random() for _ in after]
    real = [time * random.uniform(0.5, 2) for time in times]
    arrivals = sorted(random.uniform(0, 100) for _ in range(random.randrange(1, 12)))
    slo_ms, max_batch = random.uniform(20, 150), random.choice([1, 4])
    plain = [random.random() < 0.4 for _ in arrivals]
    options = {"real_ms": real, "drop": drop, "lanes": lanes, "max_batch": max_batch, "policy": policy}
    world = World(application(slo_ms, after), times, **options)
    numbers: list[int] = []
    ended: list[tuple[float, int, Outcome]] = []

    def ask_model() -> int:
        """A query of the first stage's model that is none of the application."""
        return world.driver.submit(
            lambda number, now: Query(number, "m0", now, now + world.app.spec.slo_ns),
            X,
            lambda respond, _: ended.append((world.clock.now_ns() / MS, respond.query, respond.outcome)),
        )

    for at, is_plain in zip(arrivals, plain, strict=True):
        world.at(at, lambda ask=ask_model if is_plain else world.ask: numbers.append(ask()))
    world.run()
    order = {number: position for position, number in enumerate(numbers)}
    ended += [(now / MS, result.query, result.outcome) for now, result in world.results]
    served = [(now, order[number], outcome) for now, number, outcome in ended]
    told = simulated(after, times, arrivals, slo_ms=slo_ms, plain=plain, **options)
    assert sorted((now, number, outcome) for now, number, outcome, _ in told) == sorted(served)


def test_stages_that_start_together_follow_a_plan_in_server_and_simulator() -> None:
    """M2 waits for m1, and goes before m0: 5 + 10 on one lane, 20 on the other."""
    after: list[list[int]] = [[], [], []]
    told = simulated(after, [20, 5, 10], [0], slo_ms=100, lanes=TWO_LANES, policy="joint")
    world = World(application(100, after), [20, 5, 10], lanes=TWO_LANES, policy="joint")
    world.ask()
    world.run()
    assert [(now, outcome) for now, _, outcome, _ in told] == [(20, Outcome.ANSWERED)]
    launches = [(at / MS, each) for at, _, actions in world.seen for each in actions if isinstance(each, Launch)]
    assert [(at, each.work.tenant, each.after) for at, each in launches] == [
        (0, "m1", ()),
        (0, "m0", ()),
        (5, "m2", (0,)),
    ]


def test_a_trace_of_the_simulator_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    simulated(DIAMOND, [10, 5, 20, 7], range(0, 200, 9), slo_ms=70, lanes=TWO_LANES, trace=path)
    head, records = read(path)
    assert [line for _, line in replay(head, records, rebuild_policy)] == path.read_bytes().splitlines()[1:]


def test_a_probe_is_explained(tmp_path: Path) -> None:
    """The chain is believed to take 70 ms and takes 7."""
    path, times = tmp_path / "trace", [30, 20, 20]
    simulated(CHAIN_STAGES, times, (0, 100, 110), slo_ms=50, real_ms=[each / 10 for each in times], trace=path)
    numbers = [each.event["query"] for each in read(path)[1] if each.kind == "ApplicationArrived"]
    told = ["\n".join(explain(read(path)[1], each).sentences()) for each in numbers]
    probe = "It ran as a probe, though its predicted latency of 70.0 ms does not fit."
    assert [probe in each for each in told] == [False, True, False]
    assert ["was answered after 7.0 ms" in each for each in told] == [False, True, False]


def model_profile(latency_ms: float) -> ModelProfile:
    points = tuple(Point(0, rows, 1, 9, *(round(latency_ms * rows * MS),) * 4) for rows in (1, 4))
    return ModelProfile("", points, (1,), (0, 1), 1.0)


PROFILE = Profile(this_device(), "", "", {"twice": model_profile(10), "thrice": model_profile(20)})
TIGHT = {"chain": {"first": 5 * MS, "second": 60 * MS}}
"""A plan whose share for the first stage is shorter than that takes."""


@pytest.mark.parametrize("shares", [{}, TIGHT])
def test_a_workload_names_an_application_like_a_model(tmp_path: Path, shares: dict[str, dict[str, int]]) -> None:
    """Where a stage does not fit into its share, the second query is a probe in vain: the next one is long after."""
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN, slo_ms=100)
    loads = (
        TenantLoad("scan", "chain", Trace(tuple(range(0, 1000 * MS, 200 * MS)))),
        TenantLoad("alone", "twice", Trace((1100 * MS,))),
    )
    workload = Workload(loads, 1200 * MS)
    made = scenario_of(root, workload, PROFILE, ONE_LANE, "p50", shares)
    assert [tenant.name for tenant in made.tenants] == ["twice", "thrice"]
    assert made.slo_ns == {"scan": 100 * MS, "alone": 20_000 * MS}
    log = run_scenario(made, PolicySection(), Assumptions(), 1)
    scan = log.columns("scan")
    assert scan.latency_ns.tolist() == ([30 * MS] * 5 if not shares else [0, 30 * MS, 0, 0, 0])
    assert scan.of(Outcome.REJECTED).tolist() == [not each for each in scan.latency_ns]
    assert log.columns("alone").of(Outcome.ANSWERED).all()


BOTH = JointPlan((JointMember("twice", 1, 1), JointMember("thrice", 1, 1)), barriers=((0, 1),))


@pytest.mark.parametrize("preempt", [False, True])
def test_a_scenario_plays_the_plans_that_it_has(tmp_path: Path, preempt: bool) -> None:
    """Twice takes 10 ms and waits for thrice, which takes 20."""
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "fan", fan("twice", "thrice"), slo_ms=100)
    workload = Workload((TenantLoad("fan", "fan", Trace((0, 200 * MS))),), 500 * MS)
    made = scenario_of(root, workload, PROFILE, TWO_LANES, "p50")
    policy = PolicySection("joint", {"preempt": preempt})
    for plans, latency in (((), 20 * MS), ((BOTH,), 30 * MS)):
        log = run_scenario(replace(made, plans={"joint_plans": plans}), policy, Assumptions(), 1)
        assert log.columns("fan").latency_ns.tolist() == [latency] * 2


def test_an_application_of_models_without_a_profile_is_refused(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice", "half", "join")
    write_application(root, "chain", CHAIN.replace('"thrice"', '"half"'))
    workload = Workload((TenantLoad("chain", "chain", Trace((0,))),), 100 * MS)
    with pytest.raises(ConfigError, match="model 'half' has no profile"):
        scenario_of(root, workload, PROFILE, ONE_LANE, "p50")


def probed(
    tmp_path: Path, inflation: dict[str, float], *, slo_ms: int = 200, twice_ms: int = 10, thrice_ms: int = 100
) -> tuple[OutcomeLog, list[int]]:
    """A chain of two models, and a load of a third one. Gives outcomes, and arrivals of probes in ns."""
    root = write_models(tmp_path / "models", "twice", "thrice", "half")
    write_application(root, "chain", CHAIN, slo_ms=slo_ms)
    scan = TenantLoad("scan", "chain", Trace(tuple(range(0, 100_000 * MS, 250 * MS))))
    other = TenantLoad("other", "half", Trace(tuple(range(0, 100_000 * MS, 100 * MS))), slo_ns=60 * MS)
    took = {"twice": twice_ms, "thrice": thrice_ms, "Owner of half": 10}
    profile = Profile(this_device(), "", "", {name: model_profile(each) for name, each in took.items()})
    made = scenario_of(root, Workload((scan, other), 100_000 * MS), profile, ONE_LANE, "p50")
    probes = list[int]()

    def log(now_ns: int, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, ApplicationArrived) and event.predicted_ns is not UNSET:
            assert event.predicted_ns > slo_ms * MS
            probes.append(now_ns)

    beliefs = OnlineModel.under(made.policy(PolicySection("edf", {"drop": DropRule.HOPELESS})))
    for name, table in made.tables.items():
        beliefs.add(name, table)
    section = PolicySection("edf", {"drop": DropRule.HOPELESS})
    return run_scenario(made, section, Assumptions(inflation=inflation), 1, log, follower=beliefs), probes


@pytest.mark.parametrize("slow", ["twice", "thrice"])
def test_a_wrong_profile_of_a_stage_is_corrected_by_probes(tmp_path: Path, slow: str) -> None:
    """One model has a profile that is 25 times too slow: it takes 10 ms, and the other one as much."""
    times = {"twice": 10, "thrice": 10} | {slow: 250}
    found, probes = probed(tmp_path, {slow: 1 / 25}, twice_ms=times["twice"], thrice_ms=times["thrice"])
    scan = found.columns("scan")
    assert not scan.of(Outcome.ANSWERED)[0]
    assert scan.of(Outcome.ANSWERED)[len(scan.outcome) // 4 :].all()
    assert 1 <= len(probes) <= 20
    assert found.columns("other").of(Outcome.ANSWERED).all()


def test_probes_of_an_application_that_is_truly_too_slow_cost_others_next_to_nothing(tmp_path: Path) -> None:
    found, probes = probed(tmp_path, {}, thrice_ms=300)
    assert not found.columns("scan").of(Outcome.ANSWERED).any()
    assert 1 <= len(probes) <= 3
    assert all(later - earlier >= SLOWER * 200 * MS for earlier, later in pairwise(probes))
    assert found.columns("other").of(Outcome.ANSWERED).mean() > 0.99


def test_later_stages_are_believed_to_be_of_the_smallest_shape(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    shapes = "[[model.shapes]]\nx = [1, 64]\n[[model.shapes]]\nx = [1, 8]\n[[model.shapes]]\nx = [1, 16]\n"
    for name in ("twice", "thrice"):
        with (root / name / "config.toml").open("a") as file:
            file.write(shapes)
    write_application(root, "chain", CHAIN, slo_ms=100)
    workload = Workload((TenantLoad("scan", "chain", Trace((0,)), shape=2),), 500 * MS)
    made = scenario_of(root, workload, PROFILE, ONE_LANE, "p50")
    found = list[tuple[str, int]]()

    def log(now_ns: int, event: Event, actions: Sequence[Action]) -> None:
        found.extend((each.work.tenant, each.work.shape) for each in actions if isinstance(each, Launch))

    run_scenario(made, PolicySection(), Assumptions(), 1, log)
    assert found == [("twice", 2), ("thrice", 1)]
