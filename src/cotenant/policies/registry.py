"""From a name and options to a policy: the one place that does, for serving, simulating, replaying and profiling.

A policy is a frozen dataclass whose first field is `lanes`; the other fields are its options, with their types, ranges
and defaults, but for `rounds` and `joint_plans`, which plans give. What can be derived from measurements it derives in
a class method `resolve(options, facts)`. A package of a user joins by `register`, or by an entry point of the group
`GROUP`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.policies.facts import LayoutFacts
from cotenant.policies.ordered.clockwork import Clockwork
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.selective import Fair, Most, Shares, Weighted
from cotenant.policies.ordered.sjf import Sjf
from cotenant.techniques.granularity.joint_plan import JointPlan
from cotenant.techniques.granularity.policy.clustered import Clustered
from cotenant.techniques.layer_blocks.policy.published import FixedBlocks, LayerBlock, LayerWise, ModelWise, Prema
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.techniques.overlap.policy.control import Overlap
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.work import Round, Share

GROUP = "cotenant.policies"
"""Entry points of other packages: the name of a policy, and where its class is."""
_GIVEN = ("lanes", "rounds", "joint_plans")
"""Fields that come from the device and the plan."""

_BLOCKS = (ModelWise, LayerWise, FixedBlocks, Prema, LayerBlock, SlackBlocks)
POLICIES: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (Shares, Most, Fair, Weighted, Fcfs, Sjf, Edf, Clockwork, Overlap, DutyCycle, Clustered, *_BLOCKS)
}
"""Policies by the name that configuration and the command line use."""


def register(kind: type[Any]) -> None:
    """Let a policy be known by its `name`. Raises InvalidValueError where another one has that name."""
    if POLICIES.setdefault(kind.name, kind) is not kind:
        raise InvalidValueError(f"policy {kind.__qualname__}", "name", kind.name, "one that no other policy has")


def policy_class(name: str, where: str = "[policy]") -> type[Any]:
    """The class of a policy, of this package or another one. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        from importlib.metadata import entry_points

        for found in entry_points(group=GROUP, name=name):
            register(found.load())
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(f"{where}: name is {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return kind


def options_of(kind: type[Any]) -> dict[str, Any]:
    """The options of a policy, with the type of each, ranges included."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind) if field.init and field.name not in _GIVEN}


def typed_options(name: str, options: Mapping[str, object], where: str = "policy") -> dict[str, Any]:
    """Options as the policy's own types. Raises ConfigError for one that it does not have, or a value out of range."""
    known = options_of(policy_class(name, where))
    made: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            expected = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{where}.{key}: policy {name!r} has no such option, expected one of {expected}")
        try:
            made[key] = msgspec.convert(value, known[key], strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}.{key}: {error}") from None
    return made


def resolve_options(name: str, options: Mapping[str, Any], facts: LayoutFacts) -> dict[str, Any]:
    """The options with those that were left open as the policy derives them from what was measured."""
    resolve = getattr(policy_class(name), "resolve", None)
    return dict(options if resolve is None else resolve(options, facts))


def takes_rounds(name: str) -> bool:
    """Whether a policy runs the rounds of a plan. Raises ConfigError for an unknown name."""
    return "rounds" in [field.name for field in fields(policy_class(name, "policy"))]


def make_policy(
    name: str,
    options: Mapping[str, object],
    lanes: tuple[Share, ...],
    rounds: tuple[Round, ...] = (),
    where: str = "policy",
    joint_plans: tuple[JointPlan, ...] = (),
) -> Policy:
    """Build a policy; `rounds` are those of a plan, one a lane, `joint_plans` those of models that start together: for
    policies that take them.

    Raises ConfigError for an unknown name or option, or a value that the lanes do not allow.
    """
    kind = policy_class(name, f"[{where}]")
    taken = [field.name for field in fields(kind)]
    given = {name: each for name, each in (("rounds", rounds), ("joint_plans", joint_plans)) if name in taken}
    try:
        made: Policy = kind(lanes, **given, **typed_options(name, options, where))
    except InvalidValueError as error:
        raise ConfigError(f"[{where}]: {error}") from None
    return made


def rebuild_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """Build the policy that a trace describes, for a replay. Raises ConfigError for what no trace says."""
    where = "trace header"
    try:
        lanes = msgspec.convert(options["lanes"], tuple[Share, ...])
        rounds = msgspec.convert(options.get("rounds", ()), tuple[Round, ...])
        joint_plans = msgspec.convert(options.get("joint_plans", ()), tuple[JointPlan, ...])
        own = {key: value for key, value in options.items() if key not in _GIVEN}
        own = typed_options(name, own, where)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        if name not in POLICIES:
            raise
        raise ConfigError(f"{where}: policy_options cannot be used ({error}): was the file changed?") from None
    return make_policy(name, own, lanes, rounds, where, joint_plans)
