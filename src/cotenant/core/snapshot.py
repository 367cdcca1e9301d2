"""The interface of policies: snapshots of the state, decisions, and the description of a policy.

Views are read-only by contract and by type. Their sequences are those of the core, not copies: a snapshot is valid only
during the call of `decide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from cotenant.core.actions import Launch
from cotenant.core.lifecycle import TaskState
from cotenant.core.predictor import Group, Predictor
from cotenant.errors import InvalidValueError
from cotenant.types import LossCause, Query, Tenant
from cotenant.work import Machine, Share, Work


class QueueView(Protocol):
    """The waiting queries of one tenant, sorted by (rank of the request, policy's key).

    Across tenants the keys alone count: the rank of a request never overtakes queries of another tenant.
    """

    @property
    def tenant(self) -> Tenant:
        """The tenant of the queue."""

    @property
    def queries(self) -> Sequence[Query]:
        """Waiting queries, most urgent first."""

    @property
    def keys(self) -> Sequence[tuple[int, ...]]:
        """The results of `Policy.queue_key`, by position."""

    @property
    def has_ranks(self) -> bool:
        """Whether requests may have different ranks. If not, the keys ascend."""

    @property
    def are_alike(self) -> bool:
        """Whether all queries have the same rows, shape, merge key and rank. May be False after others have left."""

    @property
    def edition(self) -> object:
        """Identity of the queue's content: a new object after each change. Key for caches of derived data."""


class BatchView(Protocol):
    """A begun batch: queries that go through the model together."""

    @property
    def id(self) -> int:
        """Number of the batch."""

    @property
    def tenant(self) -> Tenant:
        """The tenant of its queries."""

    @property
    def queries(self) -> Sequence[Query]:
        """Its queries that have not ended."""

    @property
    def items(self) -> int:
        """Rows along the batch dimension."""

    @property
    def shape(self) -> int:
        """Number of the declared shape for predictions."""

    @property
    def next_unit(self) -> int:
        """First unit that has not run."""

    @property
    def share(self) -> Share | None:
        """Share of its last ended launch, the caches of which may still hold its data. None before that."""


class FairQueueView(Protocol):
    """Quota, virtual deadlines, attainment and demand of a tenant; see `core.fair_queues`."""

    @property
    def attainment(self) -> float:
        """Share of its recent queries that were answered in time; 1 without queries."""

    @property
    def quota_attainment(self) -> float:
        """Recent answers in time over queries in quota; overload out of quota does not lower it."""

    @property
    def quota(self) -> float:
        """Guaranteed lanes."""

    @property
    def demand(self) -> float:
        """Recent offered load in lanes."""

    @property
    def deadlines_ns(self) -> Mapping[int, int]:
        """Virtual deadlines in ns of its live queries in quota, by number."""

    @property
    def even_deadlines_ns(self) -> Mapping[int, int]:
        """As `deadlines_ns`, for quotas in proportion to the demand of tenants."""


class DropRule(StrEnum):
    """When a waiting query is dropped. A client's own time-out applies under every rule."""

    NONE = "none"
    """Never: late queries are answered late."""
    EXPIRED = "expired"
    """At its deadline."""
    HOPELESS = "hopeless"
    """At its deadline, or as soon as a decision finds that it cannot be met."""


class Running(Struct, frozen=True, gc=False):
    """A running launch."""

    launch: Launch
    batch: BatchView
    started_ns: int
    state: TaskState = TaskState.RUNNING


class Snapshot(Struct, frozen=True, gc=False):
    """The state that a decision may depend on."""

    now_ns: int
    queues: Mapping[str, QueueView]
    paused: Sequence[BatchView]
    """Batches at a segment boundary, in the order in which they stopped."""
    running: Mapping[int, Running]
    """Running launches by number."""
    free_mask: int
    """Free slots, as bits."""
    predictor: Predictor
    weights_differ: bool = False
    """Whether the tenants, waiting or not, have different weights."""
    waiting: Mapping[int, Launch] = {}
    """Launches that are decided and wait for others, by number."""
    next_launch: int = 0
    """The number of a decision's first start; further starts count up."""
    fair_queues: Mapping[str, FairQueueView] = {}
    """The fair queues of all tenants, by name."""


class Start(Struct, frozen=True, gc=False):
    """Launch work in a share: of a new batch made of `queries`, or of the paused batch `batch`.

    Several starts of one decision may name the same batch. Each then runs a part of its rows, its units or both.
    Together they run each unit up to one cut exactly once for each row. The batch pauses there when the last of them
    has ended. The policy is responsible for the dependencies of tensors between them.

    `after` are numbers of launches that have to end first: running, waiting, or earlier starts of this decision. The
    start may use slots that they hold. With `is_expandable` the launch can get more slots at the cuts that it passes.
    `basis` is a record (a Struct) that the launch carries for the policy's technique; see Launch.
    """

    work: Work
    queries: tuple[Query, ...]
    share: Share
    predicted_ns: int
    batch: int | None = None
    after: tuple[int, ...] = ()
    is_expandable: bool = False
    basis: object = None


class Expansion(Struct, frozen=True, gc=False):
    """Let a running launch use more slots of its device: `share` has its present slots and free ones.

    `predicted_ns` is the new prediction of its latency, from its start to its end.
    """

    launch: int
    share: Share
    predicted_ns: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Shed a query. The client gets `reason`; `cause` and `culprit` are those of Respond."""

    query: int
    reason: str
    cause: LossCause | UnsetType = UNSET
    culprit: str | UnsetType = UNSET


class Decision(Struct, frozen=True, gc=False):
    """The result of a policy's decision. Drops are carried out first, expansions last.

    `memory` is passed to the next decision. The starts of one decision begin together. At `again_ns`, a later time, the
    engine calls the policy again if queries wait and a lane is free. A policy of groups is called if no group waits.
    """

    starts: tuple[Start, ...] = ()
    drops: tuple[Drop, ...] = ()
    memory: object = None
    expansions: tuple[Expansion, ...] = ()
    again_ns: int = 0


class Moment(Enum):
    """Kind of an event, for a policy."""

    ARRIVAL = auto()
    """A query arrived; of queries that arrived together, the last one."""
    LOOK_AHEAD = auto()
    """The launches before a LookAhead have been submitted."""
    OTHER = auto()


class Ask(Enum):
    """What the engine requests from a policy, and under which condition."""

    START = auto()
    """Launches: if a lane is free, and a query waits, a batch is paused or a launch can expand."""
    SELECT = auto()
    """Launches and drops: if a query waits, even while no lane is free."""
    GROUP = auto()
    """A group: if none runs and a query waits. While a group runs: not before `Decision.again_ns`."""
    GROUP_ANEW = auto()
    """A group: if none runs and a query waits. While a group runs, the engine sends a LookAhead first."""
    NEXT_GROUP = auto()
    """A group, also while another one runs."""


WHEN_FREE: Mapping[Moment, Ask] = MappingProxyType(dict.fromkeys(Moment, Ask.START))
"""For policies that fill free lanes."""
AT_ARRIVALS: Mapping[Moment, Ask] = MappingProxyType({**WHEN_FREE, Moment.ARRIVAL: Ask.SELECT})
"""For policies that shed load at arrivals, so that clients can retry at once."""
IN_GROUPS: Mapping[Moment, Ask] = MappingProxyType(
    {Moment.ARRIVAL: Ask.GROUP_ANEW, Moment.LOOK_AHEAD: Ask.NEXT_GROUP, Moment.OTHER: Ask.GROUP}
)
"""For policies that launch groups: a group starts when the last launch of the group before it has ended.

A member of a group may get several lanes; a single member gets all lanes. While a group runs (`Snapshot.running` is not
empty), the policy may drop queries and keep its next group in its memory. Or it starts the next group at once, with all
running launches in `after` of each start. The engine then calls the policy again when those launches run.
"""


class GroupSource(Protocol):
    """Lists the groups that a policy is likely to request from a GroupPredictor."""

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """Groups that decisions are likely to need, so that they can be predicted in advance."""


class CutSource(Protocol):
    """Chooses the units at which models can be left."""

    def cuts_of(self, tenant: str, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The units at which a tenant's model can be left, given its default cuts."""


class PolicySpec(Struct, frozen=True, kw_only=True):
    """Description of a policy as data; constant while the policy serves.

    - `name`: in configuration, traces and tables.
    - `lanes`: the shares of its launches; never empty.
    - `shares`: all shares that launches may get: the lanes and unions of them. A policy that launches in any union
      names the lanes and the union of all.
    - `drop`: when waiting queries are dropped.
    - `requests`: what the engine requests at which moment: WHEN_FREE, AT_ARRIVALS or IN_GROUPS.
    - `preempt`: whether launches may end at cuts inside models; else models run whole, without the cost of cuts.
    - `tail_aware`: whether it uses the learned margin of latencies.
    - `groups`: set if it requests groups from the predictor, which is a GroupPredictor then.
    - `cuts`: set if it needs cuts of its own.
    """

    name: str
    lanes: tuple[Share, ...]
    shares: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    requests: Mapping[Moment, Ask] = WHEN_FREE
    preempt: bool = False
    tail_aware: bool = False
    groups: GroupSource | None = None
    cuts: CutSource | None = None

    @property
    def grouped(self) -> bool:
        """Whether the policy launches groups, one after the other."""
        return self.requests[Moment.OTHER] is Ask.GROUP

    @property
    def goes_by_margin(self) -> bool:
        """Whether the policy uses the safety margin, which is learned for it."""
        return self.tail_aware and not self.grouped

    def check(self, machine: Machine) -> None:
        """Raises InvalidValueError if a share is not one of the machine, or `requests` is none of the tables."""
        for share in (*self.lanes, *self.shares):
            if share not in machine:
                raise InvalidValueError(f"policy {self.name!r}", "lane", share, "a share of the machine")
        if self.requests not in (WHEN_FREE, AT_ARRIVALS, IN_GROUPS):
            expected = "WHEN_FREE, AT_ARRIVALS or IN_GROUPS"
            raise InvalidValueError(f"policy {self.name!r}", "requests", dict(self.requests), expected)


class Policy(Protocol):
    """A scheduling policy. Pure: equal arguments give equal decisions."""

    @property
    def spec(self) -> PolicySpec:
        """The description of the policy."""

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        """Sort key of a query among the queries of all tenants, smallest first; ends with the query's id.

        Must not depend on the query's rank: the core sorts the queries of one tenant by it.
        """

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Decide after an event, as the table `PolicySpec.requests` says. `memory` is that of the last decision."""
