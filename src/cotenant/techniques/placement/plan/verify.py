"""Independent checker of plans: violated constraints in words, by other code than the evaluator's."""

from __future__ import annotations

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan, Timeline


def violations(problem: PlacementProblem, plan: TaskPlan, line: Timeline) -> list[str]:
    """Violations of a plan with the times of `line`, empty if it holds.

    Checked: overlapping tasks on a lane, tasks that start before an input is available, memory limits, and the
    makespan.
    """
    found = []
    names = [task.name for task in problem.graph.tasks]
    for lane, lane_name in enumerate(problem.lane_names):
        held = sorted(
            (line.start_ns[i], line.end_ns[i], i) for i in range(problem.size) if lane in problem.lanes[plan.place[i]]
        )
        latest = (0, -1)
        for start, end, i in held:
            if start < latest[0] and end > start:
                found.append(f"{names[i]} starts on {lane_name} before {names[latest[1]]} has ended")
            latest = max(latest, (end, i))
    for i, tensors in enumerate(problem.inputs):
        time = problem.service[i][plan.place[i]]
        if time < 0 or line.end_ns[i] - line.start_ns[i] < time:
            found.append(f"{names[i]} takes less than its time on {problem.device_names[plan.place[i]]}")
        for tensor in tensors:
            j = problem.producer[tensor]
            spaces = problem.space[plan.place[j]], problem.space[plan.place[i]]
            cost = problem.copy_ns(tensor, *spaces)
            if cost < 0:
                found.append(f"{names[i]} reads from {names[j]}, and no link joins their devices")
            elif line.start_ns[i] < line.end_ns[j] + cost:
                found.append(f"{names[i]} starts before what it reads from {names[j]} is there")
    for space, limit in enumerate(problem.limits):
        used = sum(problem.memory[i][d] for i, d in enumerate(plan.place) if problem.space[d] == space)
        if 0 <= limit < used:
            found.append(f"{problem.space_names[space]} takes {used} bytes, the limit is {limit}")
    if line.makespan_ns != max(line.end_ns):
        found.append("the makespan is not the end of the last task")
    return found
