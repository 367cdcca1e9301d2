"""Registry of policies: builds a policy from its name and options, for serving, simulating, replaying and profiling.

A policy is a frozen dataclass with `lanes` as its first field. The other fields are its options, with types, ranges and
defaults. The class attribute `of_plans` names the fields that plans give. The class method `resolve(options, facts)`
derives options from measurements. A package joins by `register`, or by an entry point of the group `registry.POLICIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from cotenant import registry
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.policies.facts import LayoutFacts
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.selective import Fair, Most, Shares, Weighted
from cotenant.policies.ordered.sjf import Sjf
from cotenant.work import Share

_KNOWN: dict[str, type[Any]] = {kind.name: kind for kind in (Shares, Most, Fair, Weighted, Fcfs, Sjf, Edf)}
"""Policies of the base, and others once they were loaded."""
RENAMED_OPTIONS = MappingProxyType({"cautious": "tail_aware", "stretch": "slack_share", "lend": "backfill"})
"""Options by the name that they had in version 0.1; read until 0.3."""


def register(kind: type[Any]) -> None:
    """Register a policy by its `name`. Raises InvalidValueError if another policy has that name."""
    if _KNOWN.setdefault(kind.name, kind) is not kind:
        raise InvalidValueError(f"policy {kind.__qualname__}", "name", kind.name, "one that no other policy has")


def policy_names() -> list[str]:
    """All policy names in order, including those of other packages."""
    return sorted({*_KNOWN, *registry.registered(registry.POLICIES)})


def policy_class(name: str, where: str = "[policy]") -> type[Any]:
    """The class of a policy, of this package or another one. Raises ConfigError for an unknown name."""
    name = registry.FORMER_NAMES[registry.POLICIES].get(name, name)
    if name not in _KNOWN and (found := registry.load(registry.POLICIES, name)) is not None:
        register(found)
    kind = _KNOWN.get(name)
    if kind is None:
        raise ConfigError(f"{where}: name is {name!r}, expected one of {', '.join(policy_names())}")
    return kind


def options_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a policy's options, including ranges, by option."""
    hints = get_type_hints(kind, include_extras=True)
    given = ("lanes", *_of_plans(kind))
    return {field.name: hints[field.name] for field in fields(kind) if field.init and field.name not in given}


def typed_options(name: str, options: Mapping[str, object], where: str = "policy") -> dict[str, Any]:
    """Options as the policy's own types, under their current names.

    Raises ConfigError for an option that the policy does not have, or a value out of range.
    """
    known = options_of(policy_class(name, where))
    made: dict[str, Any] = {}
    for given, value in options.items():
        key = given if given in known else RENAMED_OPTIONS.get(given, given)
        if key not in known:
            expected = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{where}.{key}: policy {name!r} has no such option, expected one of {expected}")
        try:
            made[key] = msgspec.convert(value, known[key], strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}.{key}: {error}") from None
    return made


def resolve_options(name: str, options: Mapping[str, Any], facts: LayoutFacts) -> dict[str, Any]:
    """The options, completed by those that the policy derives from measurements."""
    resolve = getattr(policy_class(name), "resolve", None)
    return dict(options if resolve is None else resolve(options, facts))


def takes_rounds(name: str) -> bool:
    """Whether a policy runs the rounds of a plan. Raises ConfigError for an unknown name."""
    return "rounds" in _of_plans(policy_class(name, "policy"))


def _of_plans(kind: type[Any]) -> tuple[str, ...]:
    """Fields of a policy that plans set."""
    found: tuple[str, ...] = getattr(kind, "of_plans", ())
    return found


def make_policy(
    name: str,
    options: Mapping[str, object],
    lanes: tuple[Share, ...],
    plans: Mapping[str, object] = MappingProxyType({}),
    where: str = "policy",
) -> Policy:
    """Build a policy. `plans` has values of plans by field, for example `rounds`, one for each lane.

    Values for fields that the policy lacks are ignored. Raises ConfigError for an unknown name or option, or a value
    that the lanes do not allow.
    """
    kind = policy_class(name, f"[{where}]")
    given = {name: value for name, value in plans.items() if name in _of_plans(kind)}
    try:
        made: Policy = kind(lanes, **given, **typed_options(name, options, where))
    except InvalidValueError as error:
        raise ConfigError(f"[{where}]: {error}") from None
    return made


def rebuild_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """Build the policy that a trace describes, for a replay. Raises ConfigError for an invalid description."""
    where = "trace header"
    kind = policy_class(name, f"[{where}]")
    hints = get_type_hints(kind)
    try:
        lanes = msgspec.convert(options["lanes"], tuple[Share, ...])
        plans = {each: msgspec.convert(options.get(each, ()), hints[each]) for each in _of_plans(kind)}
        own = {key: value for key, value in options.items() if key not in ("lanes", *plans)}
        own = typed_options(name, own, where)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"{where}: policy_options cannot be used ({error}): was the file changed?") from None
    return make_policy(name, own, lanes, plans, where)


def policy_text(policy: Policy) -> str:
    """Name and drop rule of a policy, for tables."""
    spec = policy.spec
    return f"{spec.name} (drop: {spec.drop.value}{', tail-aware' if spec.goes_by_margin else ''})"
