"""Scheduling policies: pure functions from a snapshot to a decision."""

from __future__ import annotations

from cotenant.policies.registry import POLICIES

__all__ = ["POLICIES"]
