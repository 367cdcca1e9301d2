"""Scheduling policies: pure functions from a snapshot to a decision."""

from __future__ import annotations

from cotenant.policies.registry import policy_class, policy_names

__all__ = ["policy_class", "policy_names"]
