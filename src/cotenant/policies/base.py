"""What policies have in common: their first options, how bad options are refused, and the order of deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import DropRule
from cotenant.errors import InvalidValueError
from cotenant.policies.desk import Key
from cotenant.types import Query, Tenant
from cotenant.work import Share


class CheckedOptions:
    """What refuses bad options of a policy, which launches no groups unless it says so."""

    __slots__ = ()

    name: ClassVar[str]

    @property
    def grouped(self) -> bool:
        """See Policy."""
        return False

    @property
    def selects(self) -> bool:
        """See Policy."""
        return False

    @property
    def asks_groups(self) -> bool:
        """See Policy."""
        return self.grouped

    def check(self, option: str, is_good: bool, expected: str) -> None:
        """Raises InvalidValueError for an option that is not good."""
        if not is_good:
            raise InvalidValueError(f"policy {self.name!r}", option, getattr(self, option), expected)


@dataclass(frozen=True, slots=True)
class BasePolicy(CheckedOptions):
    """A policy without `name`, `cautious` and `decide`: `core.snapshot.Policy` says what they are.

    Raises InvalidValueError when there is no lane or `drop` is not a DropRule.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    preempt: bool = False
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Sizes in cores of the lanes, each once."""

    def __post_init__(self) -> None:
        self.check("lanes", bool(self.lanes), "at least one partition")
        self.check("drop", isinstance(self.drop, DropRule), "a DropRule")
        object.__setattr__(self, "sizes", tuple(dict.fromkeys(lane.size for lane in self.lanes)))

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares that launches may get: the lanes."""
        return self.lanes

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """Order of a waiting query, smallest first, unique: (priority of its tenant, deadline, arrival)."""
        return (self.rank_of(tenant), query.deadline_ns, query.id)

    def rank_of(self, tenant: Tenant) -> int:
        """Order of a tenant's queries before all deadlines, smallest first: the priority that it is configured with."""
        return tenant.rank
