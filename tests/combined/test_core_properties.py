"""Random histories against the engine: what must hold after every single event, for every policy."""

from __future__ import annotations

from collections import Counter
from random import Random
from zlib import crc32

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from bench.papers.veltair import _baselines  # noqa: F401 - registers the policies of SHORT and CONTINUING
from cotenant.policies import policy_names
from cotenant.techniques.layer_blocks.policy.published import Variant
from machines import WALKS, EngineMachine, walk

ENQUEUED = {"overlap, enqueued": 1000.0, "overlap, enqueued late": 5e-6}
"""Of how many milliseconds before the end; here launches take nanoseconds."""
SHORT = {
    "slack_blocks": {"quantum_ms": 5e-6},
    "prema": {"quantum_ms": 5e-6},
    "fixed_blocks": {"units": 1},
    "layer_block": {"variant": Variant.AC},
}
"""Options by which policies of blocks often stop at the cuts of these models; with `whole` they are as they are."""
CONTINUING = ("fixed_blocks", "layer_block", "layer_wise")
"""Policies under which a batch goes on at once at a cut, on its own lanes, and so hardly ever stays paused."""
UNCUT = ("duty_cycle", "model_wise")
"""Policies that stop at no cut: duty_cycle in lanes without a round."""
FLOORS = {
    "answered": 1000,
    "left, queued": 20,
    "left, running": 50,
    "left others of a batch, running": 20,
    "a merged batch failed": 40,
    "answered after its batch had failed": 10,
    "expired, queued": 20,
    "expired, running": 3,
    "nobody was left when it ended": 20,
    "another one was as urgent": 100,
    "a model changed": 50,
    "a probe": 10,
    "answered at its deadline": 1,
}
"""What the histories of every machine must reach, so that they mean something."""
FLOORS_OF_CUTS = {
    "left, paused": 10,
    "left others of a batch, paused": 2,
    "answered after others had left": 5,
    "expired, paused": 1,
    "paused when the worker died": 1,
    "ended just before the worker died": 1,
    "nobody was left when it ended, at a cut": 10,
    "failed between cuts": 20,
    "several went on at a cut": 40,
    "running when the model changed": 3,
}
"""What those of machines that stop at cuts must reach besides."""
FLOORS_OF_ENQUEUED = {
    "enqueued, and ran": 200,
    "enqueued, and never ran": 20,
    "enqueued, and put back": 5,
    "left, enqueued": 10,
    "left others of a batch, enqueued": 2,
}
"""What those must reach that start groups behind the one that runs."""


@pytest.mark.parametrize("preempt", [False, True], ids=["whole", "preempt"])
@pytest.mark.parametrize("policy", [*policy_names(), *ENQUEUED])
def test_every_history_keeps_the_contract(policy: str, preempt: bool) -> None:
    seen: Counter[str] = Counter()
    enqueued = ENQUEUED.get(policy)
    name = "overlap" if enqueued else policy
    members: dict[str, object] = {"policy_name": name, "preempt": preempt, "seen": seen}
    if preempt and policy in SHORT:
        members |= {"options": SHORT[policy]}
    if enqueued:
        members |= {"options": {"enqueue_ms": enqueued}, "places": [*EngineMachine.places, "enqueued"]}
    machine = type("Machine", (EngineMachine,), members)
    number = crc32(f"{policy}-{preempt}".encode())  # or all machines would go through the same histories
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(max_examples=30, stateful_step_count=40, deadline=None, database=None),
    )
    for history in range(2 * WALKS if enqueued else WALKS):
        walk(machine(), Random(number + history))
    floors = FLOORS | (FLOORS_OF_CUTS if preempt and policy not in UNCUT else {})
    if policy in CONTINUING:
        floors = {name: floor for name, floor in floors.items() if "paused" not in name and floor > 1}
    if enqueued:
        floors |= FLOORS_OF_ENQUEUED
    short = {name: seen[name] for name, floor in floors.items() if seen[name] < floor}
    assert not short, f"histories that reach too little: {short} of {dict(seen)}"
