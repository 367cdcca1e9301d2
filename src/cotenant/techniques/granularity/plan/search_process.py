"""A search for a plan of models that are there together, in a process of its own: for servers, which compute on all
cores and answer at once.

Its input is an `Asked` as JSON, its output a `TogetherPlan`, or `null` where streams are as good.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from cotenant.techniques.granularity.joint_plan import TogetherPlan
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT, together_of
from cotenant.techniques.granularity.plan.lane_tables import lane_rules, lane_table

_NICE = 10
"""Above that of models and front-ends; at 19 a search does not end on a machine that is busy."""


class AskedMember(Struct, frozen=True):
    """A model by its units: what each takes on a lane with 1, 2, ... rows, and at which chunks may begin and end.

    `cuts` are the units of the model at which these begin, and its end; `graph` says what the times are of."""

    model: str
    graph: str
    cuts: tuple[int, ...]
    duration_ns: Annotated[tuple[tuple[int, ...], ...], Meta(min_length=1)]
    splits: tuple[tuple[int, ...], ...] = ()


class Asked(Struct, frozen=True):
    """A set on so many lanes, and how long to search: so many seconds or evaluations, whichever ends first."""

    members: tuple[AskedMember, ...]
    lanes: int
    lane_cores: int
    hand_over_ns: int
    seconds: float
    evaluations: int = 6000


def search(asked: Asked) -> TogetherPlan | None:
    """The plan of a set, at units of its models; None where it is not believed to gain."""
    tables = [
        lane_table(
            each.model,
            tuple(map(str, each.cuts[:-1])),
            np.array(each.duration_ns, np.float64),
            asked.lanes,
            each.splits,
        )
        for each in asked.members
    ]
    until = time.monotonic() + asked.seconds
    rules = lane_rules(asked.hand_over_ns)
    found = JointSearch(evaluations=asked.evaluations).find(
        tables, rules, lambda evaluated, best_ns: time.monotonic() < until
    )
    if found.makespan_ns > found.streams_ns * (1 - LEAST_GAIN_PCT / 100):
        return None
    made = together_of(found, tables, [each.graph for each in asked.members], asked.lanes, asked.lane_cores)
    return made.at_units([each.cuts for each in asked.members])


def main() -> None:
    """Answer what stands on the standard input."""
    os.nice(_NICE)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    sys.stdout.buffer.write(msgspec.json.encode(search(asked)))


if __name__ == "__main__":
    main()
