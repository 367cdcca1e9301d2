"""What the tests of the core share: short ways to say tenants, queries and latencies, and a recorded simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import Event
from cotenant.core.snapshot import DropRule, Policy
from cotenant.policies import policy_class
from cotenant.policies.registry import options_of
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld, World
from strict_engine import StrictEngine as Engine

MS = 1_000_000
ONE_LANE = (Share((0, 1)),)
TWO_LANES = (Share((0,)), Share((1,)))
CORES = (0, 1)


def tables(latencies_ns: Mapping[str, int], units: int = 1, batch_slope: float | None = None) -> TablePredictor:
    """One latency a tenant on any cores; with `batch_slope`, each further row adds that share of it, else all."""
    made = {}
    for name, latency in latencies_ns.items():
        points = [(1, latency)]
        if batch_slope is not None:
            points.append((2, round(latency * (1 + batch_slope))))
        rows = [LatencyRow(0, items, cores, ns) for items, ns in points for cores in (1, 2)]
        made[name] = LatencyTable(tuple(rows), (1.0,) * units)
    return TablePredictor(made)


def policy_of(name: str, lanes: tuple[Share, ...], drop: DropRule, preempt: bool, slack_share: float) -> Policy:
    """Any policy from those of the options that it has which most have in common."""
    known = options_of(policy_class(name))
    given = {"preempt": preempt, "slack_share": slack_share}
    return policy_class(name)(lanes, drop, **{option: value for option, value in given.items() if option in known})  # type: ignore[no-any-return]


@dataclass
class Recording:
    """What happened in a simulation."""

    end_ns: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    ended_ns: dict[int, int] = field(default_factory=dict)
    launches: list[tuple[int, Launch]] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)

    @property
    def order(self) -> list[tuple[int, ...]]:
        """Queries of the launches in the order in which they began."""
        return [launch.queries for _, launch in self.launches]


def play(
    policy: Policy,
    tenants: Iterable[Tenant],
    predictor: TablePredictor,
    queries: Iterable[Query],
    world: World | None = None,
    decision_ns: int = 0,
    log: Callable[[int, Event, list[Action]], None] | None = None,
    cores: Iterable[int] = CORES,
) -> Recording:
    """Simulate queries (sorted by arrival) and record everything; checks that each gets exactly one outcome."""
    engine = Engine(tenants, policy, predictor, Machine.cpu(tuple(cores)))
    made = Recording()

    def on_respond(respond: Respond, now_ns: int) -> None:
        assert respond.query not in made.outcomes, f"query {respond.query} was answered twice"
        made.outcomes[respond.query] = respond.outcome
        made.reasons[respond.query] = respond.reason
        made.ended_ns[respond.query] = now_ns

    def note(now_ns: int, event: Event, actions: list[Action]) -> None:
        if log is not None:
            log(now_ns, event, actions)
        made.events.append((now_ns, event))
        made.launches.extend((now_ns, action) for action in actions if isinstance(action, Launch))

    ordered = sorted(queries, key=lambda query: (query.arrival_ns, query.id))
    world = world or TableWorld(predictor)
    made.end_ns = simulate(engine, world, ordered, on_respond, decision_ns=decision_ns, log=note)
    assert sorted(made.outcomes) == sorted(query.id for query in ordered)
    return made
