"""Evidence for predictions of groups: the number of measured groups near each predicted one.

It is computed after the run, from the fitted predictor of the run, at no cost for decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.core.actions import Action, GroupBasis, Launch, group_of
from cotenant.core.events import Event
from cotenant.core.predictor import Group, Member
from cotenant.core.snapshot import Policy
from cotenant.errors import CotenantError
from cotenant.predict.grouped import FittedGroups
from cotenant.trace.trace_log import FindGroups, Header, MakePolicy, Record


@dataclass(slots=True)
class GroupEvidence:
    """Counts of started groups of one size: without a measured group near them, and of a size never measured."""

    members: int
    started: int = 0
    nothing_near: int = 0
    unmeasured: int = 0

    def __str__(self) -> str:
        known = f"{self.nothing_near} with no measured group near"
        if self.unmeasured:
            known = f"{self.unmeasured} of a size never measured, in time even one after another"
        return f"{self.started} of {self.members} member{'' if self.members == 1 else 's'} ({known})"


class GroupTally:
    """Counts the groups of a run: an observer of events and actions, which it passes on to `then`.

    It counts none without `fitted`, or if the policy does not decide on groups.
    """

    def __init__(
        self,
        policy: Policy,
        fitted: FittedGroups | None,
        then: Callable[[int, Event, list[Action]], None] | None = None,
    ) -> None:
        self._least = _least_members(policy)
        self._fitted = fitted if self._least else None
        self._then = then
        self._known: dict[Group, int] = {}
        self._found: dict[int, GroupEvidence] = {}

    def __call__(self, time_ns: int, event: Event, actions: list[Action]) -> None:
        """Observe an event and its actions."""
        if self._fitted is not None:
            groups: dict[int, list[Launch]] = {}
            for action in actions:
                if isinstance(action, Launch):
                    groups.setdefault(group_of(action), []).append(action)
            for launches in groups.values():
                if len(launches) >= self._least:
                    self._count(self._fitted, launches)
        if self._then is not None:
            self._then(time_ns, event, actions)

    def _count(self, fitted: FittedGroups, launches: Sequence[Launch]) -> None:
        group = tuple([Member(each.work, each.share.size) for each in launches])
        near = self._known.get(group)
        if near is None:
            near = self._known[group] = fitted.near(group)
        found, basis = self._found.setdefault(len(group), GroupEvidence(len(group))), launches[0].basis
        found.started += 1
        found.nothing_near += near == 0
        found.unmeasured += isinstance(basis, GroupBasis) and basis.longest_ns > 0

    @property
    def found(self) -> Sequence[GroupEvidence]:
        """Evidence by group size; empty if no prediction came from measured groups."""
        return [self._found[size] for size in sorted(self._found)]


class GroupFits:
    """The fitted predictor of groups at each point of a trace; `see` takes the records in their order.

    `make_policy` and `find_groups` are as for `trace_log.replay`.
    """

    def __init__(self, head: Header, make_policy: MakePolicy, find_groups: FindGroups) -> None:
        self._make_policy, self._find_groups = make_policy, find_groups
        self._policy: tuple[str, dict[str, Any]] = head.policy, head.policy_options
        self._fit: tuple[str | None, float] = head.groups, head.quantile
        self._least: int | None = None
        """Least size of a group that is predicted as a whole; None until it is needed."""
        self._fitted: dict[tuple[str | None, float], FittedGroups | None] = {}

    def see(self, record: Record) -> None:
        """Note a change of policy or predictor."""
        if record.kind == "PolicyChanged":
            self._policy, self._least = (record.event["policy"], record.event["policy_options"]), None
        elif record.kind == "PredictorChanged":
            plain = record.event["predictor"]
            self._fit = plain.get("groups"), plain.get("quantile", 0.5)

    def near(self, group: Group) -> int | None:
        """Number of measured groups near one that starts now.

        None if it was not predicted from measured groups, -1 if the fitted predictor is not available here.
        """
        if self._least is None:
            self._least = _least_members(self._make_policy(*self._policy))
        key, quantile = self._fit
        if key is None or not 0 < self._least <= len(group):
            return None
        if self._fit not in self._fitted:
            try:
                self._fitted[self._fit] = self._find_groups(key, quantile)
            except CotenantError:
                self._fitted[self._fit] = None
        fitted = self._fitted[self._fit]
        return -1 if fitted is None else fitted.near(group)


def _least_members(policy: Policy) -> int:
    """Least number of launches of one decision that are predicted as a group; 0 for a policy without groups."""
    return 1 if policy.spec.grouped else 2 if policy.spec.groups is not None else 0
