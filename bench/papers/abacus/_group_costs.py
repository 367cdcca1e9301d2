"""The costs of the simulated A100 for a planner: latencies alone and of groups of whole models, by the networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.papers.abacus._a100 import A100, BATCHES, NS_PER_MS, padded
from cotenant.core.predictor import Member
from cotenant.predict.latency import LatencyModel
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import CoRunner, DeviceType
from cotenant.work import Work

DEVICE = DeviceType("a100", ((100,),), 40 << 30)
"""Undivided: nothing was released of groups in partitions of it, but in slices (see `abacus-slices`)."""
MODEL_BYTES = 2 << 30
"""A round figure for one model with its buffers at batch 32; a device holds as many as a round has slots."""
MEAN_LENGTH = 2
"""The number of the sequence length that models have which have lengths: 32 of 8 to 64."""


class NetworkGroups:
    """Groups of distinct whole models, for which there is a network. Implements GroupTimes.

    The networks were fitted separately, to medians that are not monotone: a group counts as no quicker than any part of
    it. The members have parts of the device in name only: the measured models had all of it, in streams.
    """

    def __init__(self, world: A100, most: int) -> None:
        self.world = world
        self._most = most
        self._known: dict[tuple[tuple[str, int], ...], int | None] = {}

    def divisions(self, size: int, members: int) -> Sequence[tuple[int, ...]]:
        """See GroupTimes."""
        return ((size // members,) * members,) if members <= self._most else ()

    def group_ns(self, members: Sequence[CoRunner], size: int) -> int | None:
        """See GroupTimes. None for groups of models for which no network was fitted, or of one model twice."""
        key = tuple(sorted((model, padded(batch)) for model, batch, _ in members))
        if key not in self._known:
            self._known[key] = self._group_ns(key, size)
        return self._known[key]

    def _group_ns(self, key: tuple[tuple[str, int], ...], size: int) -> int | None:
        models = {model for model, _ in key}
        if len(models) < len(key) or not models <= self.world.network(len(key)).models:
            return None
        parts = [0]
        for at in range(len(key) if len(key) > 1 else 0):
            part = self.group_ns([(model, batch, 0) for model, batch in (*key[:at], *key[at + 1 :])], size)
            parts.append(part or 0)
        return max(math.ceil(latency_ns(self.world, key)), *parts)


class NetworkCosts(TableCosts):
    """Costs of the A100 for models of the world, in the batches that were measured. See Costs."""

    def __init__(self, world: A100, models: Sequence[str], most: int) -> None:
        alone = {
            model: LatencyModel.of_points(
                {DEVICE.whole: {batch: math.ceil(latency_ns(world, ((model, batch),))) for batch in BATCHES}}
            )
            for model in models
        }
        groups = {DEVICE.name: NetworkGroups(world, most)}
        super().__init__({DEVICE.name: alone}, dict.fromkeys(models, MODEL_BYTES), groups=groups)

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """See Costs: that of the next batch that was measured."""
        return super().latency_ns(Work(work.tenant, 0, padded(work.items)), size, device)

    def batches(self, model: str) -> Sequence[int]:
        """See Costs: only measured sizes, nothing between."""
        super().batches(model)
        return BATCHES


def latency_ns(world: A100, group: Sequence[tuple[str, int]]) -> float:
    """Latency of whole models with their batches, which start together."""
    known = {model.name: model for model in world.models}
    members = []
    for name, batch in group:
        shape = min(MEAN_LENGTH, max(0, len(known[name].lengths) - 1))
        members.append(Member(Work(name, shape, batch, 0, world.operators(name)), 1))
    return max(world.latency_ns(tuple(members)), 0.05 * NS_PER_MS)
