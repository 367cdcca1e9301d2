"""What tests of the base ask about packages that may not be there."""

from __future__ import annotations

from cotenant.policies.registry import policy_names


def known(*policies: str) -> list[str]:
    """Those of these policies that are there: a package without its folder brings none."""
    there = set(policy_names())
    return [name for name in policies if name in there]
