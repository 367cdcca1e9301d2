"""Base classes of policies: common options, validation of options, and the default order by deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import structs

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import DropRule, PolicySpec
from cotenant.errors import InvalidValueError
from cotenant.policies.decision_context import Key
from cotenant.types import Query, Tenant
from cotenant.work import Share


class CheckedOptions:
    """Validates the options of a policy and builds its spec. Subclasses have the field `spec`."""

    __slots__ = ()

    name: ClassVar[str]
    spec: PolicySpec

    def specify(self, **facts: object) -> None:
        """Set fields of the policy's PolicySpec by name; for `__post_init__`."""
        object.__setattr__(self, "spec", structs.replace(self.spec, **facts))

    def check(self, option: str, is_good: bool, expected: str) -> None:
        """Raises InvalidValueError for an invalid option."""
        if not is_good:
            raise InvalidValueError(f"policy {self.name!r}", option, getattr(self, option), expected)


@dataclass(frozen=True, slots=True)
class BasePolicy(CheckedOptions):
    """A policy that launches in its lanes; subclasses add `name` and `decide`, and extend the spec by `specify`.

    Raises InvalidValueError when there is no lane or `drop` is not a DropRule.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    preempt: bool = False
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Sizes in cores of the lanes, each once."""
    spec: PolicySpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check("lanes", bool(self.lanes), "at least one partition")
        self.check("drop", isinstance(self.drop, DropRule), "a DropRule")
        object.__setattr__(self, "sizes", tuple(dict.fromkeys(lane.size for lane in self.lanes)))
        spec = PolicySpec(name=self.name, lanes=self.lanes, shares=self.lanes, drop=self.drop, preempt=self.preempt)
        object.__setattr__(self, "spec", spec)

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """Sort key of a waiting query: (priority of its tenant, deadline, number)."""
        return (self.rank_of(tenant), query.deadline_ns, query.id)

    def rank_of(self, tenant: Tenant) -> int:
        """Priority of a tenant, which goes before deadlines; smallest first."""
        return tenant.rank
