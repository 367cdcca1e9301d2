"""Builds the task graph of a model from its profile of tasks."""

from __future__ import annotations

from cotenant.techniques.placement.plan.task_graph import (
    DeviceLink,
    GraphTask,
    TaskDevice,
    TaskGraph,
    TransferMode,
)
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.techniques.placement.unit_placement import GPU_LANE, lane_name, whole_name

SPACE = "host"
"""Memory space of all cores."""
ON_GPU = "gpu"
"""Memory space of a GPU."""


def graph_of(tasks: ModelTasks) -> TaskGraph:
    """A task for every unit, a lane for every core of the share, and a moldable device of all cores.

    Consecutive units on one device are one call, so a task has no launch cost. A task that reads from another device
    begins a new call: a hand-over costs a call and waking the lane.

    With a GPU, the cores are lanes only, and tensors are copied by one engine in each direction. Calls on the GPU are
    submitted ahead at no cost; a hand-over costs waking a lane.
    """
    lanes = tuple(map(lane_name, range(tasks.cores)))
    whole = GPU_LANE if tasks.sms else whole_name(tasks.cores)
    all_lanes, space = ((), ON_GPU) if tasks.sms else (lanes, SPACE)
    devices = (TaskDevice(whole, all_lanes, space), *(TaskDevice(name, (name,), SPACE) for name in lanes))
    ways = ((ON_GPU, SPACE, tasks.down), (SPACE, ON_GPU, tasks.up))
    times = zip(tasks.units, tasks.core.unit_ns, tasks.whole.unit_ns, strict=True)
    return TaskGraph(
        devices,
        tuple(GraphTask(name, {whole: all_ns, **dict.fromkeys(lanes, one_ns)}) for name, one_ns, all_ns in times),
        tasks.tensors,
        tuple(DeviceLink(a, b, each.bytes_per_s, each.latency_ns) for a, b, each in ways if each is not None),
        hand_over_ns=tasks.hand_over_ns + (0 if tasks.sms else max(tasks.core.launch_ns, tasks.whole.launch_ns)),
        transfers=TransferMode.ENGINE if tasks.sms else TransferMode.DELAY,
    )
