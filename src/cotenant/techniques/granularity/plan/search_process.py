"""The search for a joint plan as a process of its own: a server must not compute on its own cores.

Its input is a `SearchRequest` as JSON, its output a `StoredJointPlan`, or `null` if streams are as good.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from cotenant.linux import raise_nice
from cotenant.techniques.granularity.joint_plan import StoredJointPlan
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT, stored_plan_of
from cotenant.techniques.granularity.plan.lane_tables import lane_rules, lane_table

_NICE = 10
"""Niceness above that of models and front ends; at 19 a search does not end on a busy machine."""


class MemberRequest(Struct, frozen=True):
    """A model by its units: `duration_ns[unit][rows - 1]` on one lane, and boundaries of chunks (`splits`). `cuts` are
    the model's units at which these units start, and its end. `graph` is the digest of the graph."""

    model: str
    graph: str
    cuts: tuple[int, ...]
    duration_ns: Annotated[tuple[tuple[int, ...], ...], Meta(min_length=1)]
    splits: tuple[tuple[int, ...], ...] = ()


class SearchRequest(Struct, frozen=True):
    """A set on `lanes` lanes, and the limits of the search: seconds and evaluations, whichever ends first."""

    members: tuple[MemberRequest, ...]
    lanes: int
    lane_cores: int
    hand_over_ns: int
    seconds: float
    evaluations: int = 6000


def search(request: SearchRequest) -> StoredJointPlan | None:
    """The plan of a set, in units of its models; None if it is not predicted to gain enough."""
    tables = [
        lane_table(
            each.model,
            tuple(map(str, each.cuts[:-1])),
            np.array(each.duration_ns, np.float64),
            request.lanes,
            each.splits,
        )
        for each in request.members
    ]
    until = time.monotonic() + request.seconds
    rules = lane_rules(request.hand_over_ns)
    found = JointSearch(evaluations=request.evaluations).find(
        tables, rules, lambda evaluated, best_ns: time.monotonic() < until
    )
    if found.makespan_ns > found.streams_ns * (1 - LEAST_GAIN_PCT / 100):
        return None
    made = stored_plan_of(found, tables, [each.graph for each in request.members], request.lanes, request.lane_cores)
    return made.at_units([each.cuts for each in request.members])


def main() -> None:
    """Read the request from the standard input and write the plan to the standard output."""
    raise_nice(_NICE)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchRequest)
    sys.stdout.buffer.write(msgspec.json.encode(search(request)))


if __name__ == "__main__":
    main()
