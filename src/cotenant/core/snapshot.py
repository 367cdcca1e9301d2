"""What a policy sees. Views are read-only by contract (and by type): a policy that writes into one is wrong.

The sequences are the live ones of the core, not copies, so a snapshot is valid only during the call of `decide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from cotenant.core.actions import Launch
from cotenant.core.lifecycle import StrandState
from cotenant.core.predictor import Group, Predictor
from cotenant.errors import InvalidValueError
from cotenant.types import LossCause, Query, Tenant
from cotenant.work import Machine, Share, Work


class QueueView(Protocol):
    """The waiting queries of one tenant, most urgent first: by the rank of their requests, then by the policy's key.

    Across tenants the keys alone count, so that no request goes before queries of another tenant by its rank.
    """

    @property
    def tenant(self) -> Tenant:
        """Whose queue it is."""

    @property
    def queries(self) -> Sequence[Query]:
        """Waiting queries in their order."""

    @property
    def keys(self) -> Sequence[tuple[int, ...]]:
        """The keys that `Policy.queue_key` gave, by position."""

    @property
    def has_ranks(self) -> bool:
        """Whether requests may have different ranks. Where not, the keys ascend."""

    @property
    def are_alike(self) -> bool:
        """Whether all of them have the same rows, shape, merge key and rank; may say no where others have just left."""

    @property
    def edition(self) -> object:
        """Another object whenever a query has come or gone: what was made of the queries before holds no more."""


class BatchView(Protocol):
    """A batch that has begun: queries that go through the model together."""

    @property
    def id(self) -> int:
        """Number of the batch."""

    @property
    def tenant(self) -> Tenant:
        """Whose queries they are."""

    @property
    def queries(self) -> Sequence[Query]:
        """The queries in it that have not ended."""

    @property
    def items(self) -> int:
        """Rows along the batch dimension."""

    @property
    def shape(self) -> int:
        """Number of the declared shape that predicts it."""

    @property
    def next_unit(self) -> int:
        """First unit that has not run."""

    @property
    def share(self) -> Share | None:
        """Where its launch ran that ended last: what of it is free may still hold its data. None before that."""


class AccountView(Protocol):
    """What a tenant has had so far, and its quota."""

    @property
    def attainment(self) -> float:
        """Share of its queries of late that were answered in time; 1 for one that has had none."""

    @property
    def kept(self) -> float:
        """Answers in time of late, over its queries in quota: what a flood beyond the quota does not lower."""

    @property
    def quota(self) -> float:
        """Lanes that it is guaranteed."""

    @property
    def asked(self) -> float:
        """Lanes that what it asked for of late would keep busy."""

    @property
    def due_ns(self) -> Mapping[int, int]:
        """When those of its live queries are due that are in quota, by number."""

    @property
    def even_due_ns(self) -> Mapping[int, int]:
        """The same were device time dealt in proportion to what each tenant asks for."""


class DropRule(StrEnum):
    """When a waiting query is given up. A client's own time-out holds under every rule."""

    NONE = "none"
    """Never: late answers are given late."""
    EXPIRED = "expired"
    """At its deadline."""
    HOPELESS = "hopeless"
    """At its deadline, and before it as soon as a decision finds that it cannot be met any more."""


class Running(Struct, frozen=True, gc=False):
    """A launch under way."""

    launch: Launch
    batch: BatchView
    started_ns: int
    state: StrandState = StrandState.RUNNING


class Snapshot(Struct, frozen=True, gc=False):
    """Everything a decision may depend on."""

    now_ns: int
    queues: Mapping[str, QueueView]
    paused: Sequence[BatchView]
    """Batches at a segment boundary, in the order in which they stopped."""
    running: Mapping[int, Running]
    """Launches under way by their number."""
    free_mask: int
    """Cores that no launch holds, as bits."""
    predictor: Predictor
    weights_differ: bool = False
    """Whether the tenants, waiting or not, have different weights."""
    waiting: Mapping[int, Launch] = {}
    """Launches that are decided and wait for others, by their number."""
    next_launch: int = 0
    """The number that the first start of a decision gets; those after it count up."""
    accounts: Mapping[str, AccountView] = {}
    """What every tenant has had, by name."""


class Start(Struct, frozen=True, gc=False):
    """Launch work in a share: of a new batch made of `queries`, or of the paused batch `batch`.

    Several starts of one decision may be of one batch, which they name alike: each runs a part of its rows, of its
    units or of both, and together they run each unit up to some cut, for each row, once. There the batch stops, when
    the last of them has ended. Which of them needs the tensors of another one, the policy has to know.
    `after` are numbers of launches, under way, waiting or starts before this one, that have to end before it starts.
    It may have slots that they hold now. With `grows` the launch can take in slots at the cuts that it passes. `basis`
    is a record (a Struct) that the launch carries for the policy's technique; see Launch.
    """

    work: Work
    queries: tuple[Query, ...]
    share: Share
    predicted_ns: int
    batch: int | None = None
    after: tuple[int, ...] = ()
    grows: bool = False
    basis: object = None


class Growth(Struct, frozen=True, gc=False):
    """Let a launch under way take in free slots of its device: it had a part of `share`.

    `predicted_ns` is what it is believed to take now, from its start to its end.
    """

    launch: int
    share: Share
    predicted_ns: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Give a query up. `reason` is told to the client; `cause` and `culprit` as in Respond."""

    query: int
    reason: str
    cause: LossCause | UnsetType = UNSET
    culprit: str | UnsetType = UNSET


class Decision(Struct, frozen=True, gc=False):
    """What a policy wants now. Drops are carried out first, growths last. `memory` is handed to the next decision.

    The starts of one decision begin together. A policy is asked again at `again_ns`, a later time, if something waits
    then and a lane is free; one of groups, if no group waits behind the one that runs.
    """

    starts: tuple[Start, ...] = ()
    drops: tuple[Drop, ...] = ()
    memory: object = None
    grows: tuple[Growth, ...] = ()
    again_ns: int = 0


class Moment(Enum):
    """What an event is to a policy."""

    ARRIVAL = auto()
    """A query has come: of those that came together, the last one."""
    LOOK_AHEAD = auto()
    """The launches before a LookAhead are on their way."""
    OTHER = auto()


class Ask(Enum):
    """What the engine asks a policy for, and when."""

    START = auto()
    """Launches for free lanes: if something waits, is paused or could grow, and one of the lanes is free."""
    SELECT = auto()
    """Launches, and drops of what cannot be in time: if something waits, even while no lane is free."""
    GROUP = auto()
    """A group: if none runs and something waits. While one runs: not before `Decision.again_ns`."""
    GROUP_ANEW = auto()
    """A group: if none runs and something waits. While one runs, the engine sends a LookAhead first."""
    NEXT_GROUP = auto()
    """A group, also while one runs."""


WHEN_FREE: Mapping[Moment, Ask] = MappingProxyType(dict.fromkeys(Moment, Ask.START))
"""For policies that fill free lanes."""
AT_ARRIVALS: Mapping[Moment, Ask] = MappingProxyType({**WHEN_FREE, Moment.ARRIVAL: Ask.SELECT})
"""For policies that tell a client at once that its query cannot be in time."""
IN_GROUPS: Mapping[Moment, Ask] = MappingProxyType(
    {Moment.ARRIVAL: Ask.GROUP_ANEW, Moment.LOOK_AHEAD: Ask.NEXT_GROUP, Moment.OTHER: Ask.GROUP}
)
"""For policies that launch groups: a group starts only when the last launch of the one before has ended.

A member of a group may get several lanes, the only one gets all of them. While a group runs (`Snapshot.running` is not
empty then) such a policy may drop queries, and put its choice for the time after the group into its memory. Or it
starts that choice at once behind the group, with every launch under way in `after` of each start. Then it is asked no
more until these launches run.
"""


class GroupSource(Protocol):
    """Knows the groups that a policy is likely to ask a GroupPredictor for."""

    def likely_groups(self, tenants: Sequence[Tenant]) -> Iterator[Group]:
        """The groups that decisions are likely to ask for, so that they can be predicted before."""


class CutSource(Protocol):
    """Needs models to be left at units of its own choice."""

    def cuts_of(self, tenant: str, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The units at which a tenant's model may be left, from those that it has anyway."""


class PolicySpec(Struct, frozen=True, kw_only=True):
    """What a policy is, as data: it never changes while the policy serves.

    `name`: as it stands in configuration, traces and tables. `lanes`: the shares that it launches in; never empty.
    `shares`: all shares that launches may get: the lanes, and unions of them where it makes some. A policy that
    launches in any union of many lanes names the lanes and the union of all, and may use those between.
    `drop`: when waiting queries are given up. `asked`: what the engine asks for at which moment; one of the tables
    WHEN_FREE, AT_ARRIVALS and IN_GROUPS. `preempt`: whether launches may end at cuts inside models; else models run
    whole, without the cost of cuts. `cautious`: whether it looks at the margin of latencies, which is then learnt.
    `groups`: set where it asks the predictor for groups, which is a GroupPredictor then. `cuts`: set where it needs
    cuts of its own.
    """

    name: str
    lanes: tuple[Share, ...]
    shares: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    asked: Mapping[Moment, Ask] = WHEN_FREE
    preempt: bool = False
    cautious: bool = False
    groups: GroupSource | None = None
    cuts: CutSource | None = None

    @property
    def grouped(self) -> bool:
        """Whether it launches groups one after the other."""
        return self.asked[Moment.OTHER] is Ask.GROUP

    @property
    def goes_by_margin(self) -> bool:
        """Whether a margin is learnt for it, and it looks at that."""
        return self.cautious and not self.grouped

    def check(self, machine: Machine) -> None:
        """Raises InvalidValueError for the spec of a policy that cannot decide on this machine."""
        for share in (*self.lanes, *self.shares):
            if share not in machine:
                raise InvalidValueError(f"policy {self.name!r}", "lane", share, "a share of the machine")
        if self.asked not in (WHEN_FREE, AT_ARRIVALS, IN_GROUPS):
            expected = "WHEN_FREE, AT_ARRIVALS or IN_GROUPS"
            raise InvalidValueError(f"policy {self.name!r}", "asked", dict(self.asked), expected)


class Policy(Protocol):
    """Decides what runs next. Pure: equal arguments give equal decisions."""

    @property
    def spec(self) -> PolicySpec:
        """What it is, as data."""

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        """Order of a query among those of all tenants, smallest first; unique, as it ends with the query's id.

        Must not depend on the query's rank: the core orders the queries of one tenant by it."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Decide. Called after an event as the table `PolicySpec.asked` says."""
