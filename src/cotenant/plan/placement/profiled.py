"""The task graph of a model from its profile of tasks: the one place where measured times become a graph."""

from __future__ import annotations

from cotenant.plan.placement.task_graph import GraphTask, TaskDevice, TaskGraph, TaskTensor
from cotenant.profile.task_profile import ModelTasks
from cotenant.profile.unit_placement import lane_name, whole_name

SPACE = "host"
"""The memory that all cores share."""


def graph_of(tasks: ModelTasks) -> TaskGraph:
    """A task for every unit, a lane for every core of the share, and a moldable device of all of them.

    Units in a row on one device are one call: a task costs no call of its own. Where a task reads from another device
    the call before it ends, so that a hand-over costs a call and what waking the lane takes.
    """
    lanes = tuple(map(lane_name, range(tasks.cores)))
    whole = whole_name(tasks.cores)
    devices = (TaskDevice(whole, lanes, SPACE), *(TaskDevice(name, (name,), SPACE) for name in lanes))
    times = zip(tasks.units, tasks.core.unit_ns, tasks.whole.unit_ns, strict=True)
    return TaskGraph(
        devices,
        tuple(GraphTask(name, {whole: all_ns, **dict.fromkeys(lanes, one_ns)}) for name, one_ns, all_ns in times),
        tuple(
            TaskTensor(
                tensor.name,
                tasks.units[tensor.producer],
                tuple(tasks.units[reader] for reader in tensor.readers),
                tensor.size_bytes,
            )
            for tensor in tasks.tensors
        ),
        hand_over_ns=tasks.hand_over_ns + max(tasks.core.launch_ns, tasks.whole.launch_ns),
    )
