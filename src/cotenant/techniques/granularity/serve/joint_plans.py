"""The joint plans that a server follows: those of its repository, and those of applications with parallel stages.

The server searches plans for stages that start together in the background.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from cotenant.core.snapshot import Policy
from cotenant.errors import CotenantError
from cotenant.execute.threads.lanes import left_s
from cotenant.measure.load_spec import VersionFacts
from cotenant.serve.models.served_application import ServedApplication
from cotenant.serve.models.served_models import ServedModel
from cotenant.serve.services import Host, Service
from cotenant.techniques.granularity.joint_plan import StoredJointPlan, cuts_of_all
from cotenant.techniques.granularity.plan.kept import read_joint_plans, usable, verdict, words_of
from cotenant.techniques.granularity.plan.lane_tables import table_of_latencies
from cotenant.techniques.granularity.plan.search_process import MemberRequest, SearchRequest
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.techniques.placement.measured_tasks import read_tasks
from cotenant.work import CPU, Share

SEARCH_S = 3.0
"""Time limit of the search for each set of stages, in s."""
HAND_OVER_NS = 100_000
"""Time from the end of a launch to the start of one that waits for it. Twice the launch cost that `simulate` charges,
which is measured (docs/benchmarks.md)."""
_LATE_S = 60.0
"""Time after which a search process is killed. The search is repeated behind the others with twice this time."""
_TRIES = 3
"""Attempts of a search."""
_log = logging.getLogger("cotenant.joint")


class JointPlanService(Service):
    """Follows joint plans, and searches them for stages that start together. The search runs on a background thread;
    after it the server applies the found plans."""

    def __init__(self, server: Host) -> None:
        super().__init__(server)
        self._root = server.root
        self._kept: tuple[StoredJointPlan, ...] = ()
        self._found: dict[object, StoredJointPlan | None] = {}
        self._reported: set[str] = set()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._limit_s = _LATE_S

    def start(self) -> None:
        """Read the plans of the repository; log a damaged file, and plans of older measurements."""
        try:
            self._kept = read_joint_plans(self._root)
            measured = read_tasks([self._root]) if self._kept else {}
        except CotenantError as error:
            _log.warning("no joint plan is followed: %s", error)
            return
        for plan in self._kept:
            if verdict(plan, measured)[1]:
                text = "joint plan %s is stale: made from another profile; run 'cotenant co-schedule'"
                _log.warning(text, words_of(plan))

    def cuts(self, opened: VersionFacts, policy: Policy, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The cuts, with those of the plans that the policy follows and that fit the model."""
        if not isinstance(policy.spec.cuts, JointSchedule):
            return cuts
        me = opened.found.tenant, opened.digest
        mine = [each.plan for each in self._kept if me in [(member.model, member.graph) for member in each.members]]
        return cuts_of_all(mine, opened.found.tenant, cuts)

    def followed(self, policy: Policy) -> Policy:
        """The policy with the plans that fit the served models; logs those that do not, once."""
        following = policy.spec.cuts
        if not isinstance(following, JointSchedule):
            return policy
        models = [versions[""] for versions in self.server.names.models.values()]
        graphs = {each.tenant.name: (each.facts.digest, each.tenant.unit_count) for each in models}
        lanes = [lane.size for lane in following.lanes]
        found = usable((*self._kept, *filter(None, self._found.values())), graphs, lanes)
        for plan in self._kept:
            for member in plan.members:
                known = graphs.get(member.model)
                if known is not None and known != (member.graph, member.units) and member.model not in self._reported:
                    self._reported.add(member.model)
                    _log.warning(
                        "joint plan with %r is stale, since the model changed; run 'cotenant co-schedule'",
                        member.model,
                    )
        if tuple(found) == following.joint_plans:
            return policy
        _log.info("%d joint plan(s) are followed", len(found))
        return replace(following, joint_plans=tuple(found))

    def settled(self) -> None:
        """Search plans for stages that start together and have none, at their present cuts, for several equal CPU
        lanes."""
        spec, applications = self.server.policy.spec, self.server.names.applications.values()
        lanes = spec.lanes
        kinds = {(lane.device, lane.size) for lane in lanes}
        if not isinstance(spec.cuts, JointSchedule) or len(lanes) < 2 or len(kinds) > 1 or lanes[0].device != CPU:
            return
        kept = [each.key for each in self._kept]
        request = {
            key: each
            for key, each in (_keyed(each) for app in applications for each in _sets(app, lanes))
            if key not in kept and key not in self._found
        }
        if request and self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._run, args=(request,), name="cotenant-together", daemon=True)
            self._thread.start()

    def close(self, until_s: float) -> None:
        """End the search; waits for it until `until_s` of the monotonic clock at most."""
        self._is_over = True
        if self._process is not None:
            self._process.kill()
        thread = self._thread
        if thread is not None:
            thread.join(left_s(until_s))

    def _run(self, request: dict[object, SearchRequest]) -> None:
        left = deque((key, each, 1) for key, each in request.items())
        while left and not self._is_over:
            key, each, tries = left.popleft()
            self._limit_s = _LATE_S * 2 ** (tries - 1)
            try:
                self._found[key] = self._search(each)
            except TimeoutError as error:
                is_last = tries == _TRIES
                _log.warning("%s; it is %s", error, "abandoned" if is_last else "repeated with twice the time")
                if is_last:
                    self._found[key] = None
                else:
                    left.append((key, each, tries + 1))
        self._thread = None
        if not self._is_over:
            self.server.settle()

    def _search(self, request: SearchRequest) -> StoredJointPlan | None:
        """The plan that a search process finds. Raises TimeoutError when it does not end in time."""
        names = " and ".join(member.model for member in request.members)
        command = [sys.executable, "-P", "-m", "cotenant.techniques.granularity.plan.search_process"]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            ) as self._process:
                if self._is_over:
                    self._process.kill()
                try:
                    out, _ = self._process.communicate(msgspec.json.encode(request), timeout=self._limit_s)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    raise
            found = msgspec.json.decode(out, type=StoredJointPlan | None)
        except subprocess.TimeoutExpired:
            text = f"the search for a joint plan of {names} did not end within {self._limit_s:g} s"
            raise TimeoutError(text) from None
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            if not self._is_over:
                _log.warning("the search for a joint plan of %s failed: %s", names, error)
            return None
        if found is None:
            _log.info("no joint plan of %s: without it they are as fast", names)
        else:
            _log.info(
                "joint plan of %s: %.3g ms instead of %.3g ms", names, found.makespan_ns / 1e6, found.streams_ns / 1e6
            )
        return found


def _keyed(request: SearchRequest) -> tuple[object, SearchRequest]:
    members = tuple(sorted((each.model, len(each.duration_ns[0])) for each in request.members))
    return (members, request.lanes, request.lane_cores), request


def _sets(application: ServedApplication, lanes: Sequence[Share]) -> Iterator[SearchRequest]:
    """The sets of stages that start together, with one row each, and with the most rows that all accept."""
    after = application.spec.graph.after
    for needed in dict.fromkeys(after):
        models = {
            model.tenant.name: model for model, other in zip(application.models, after, strict=True) if other == needed
        }
        if len(models) < 2:
            continue
        most = min(model.tenant.max_batch for model in models.values())
        for rows in dict.fromkeys((1, most)):
            members = tuple(_member(model, rows, lanes) for model in models.values())
            yield SearchRequest(members, len(lanes), lanes[0].size, HAND_OVER_NS, SEARCH_S)


def _member(model: ServedModel, rows: int, lanes: Sequence[Share]) -> MemberRequest:
    """A model with its predicted times between its cuts, from its profile."""
    tenant = model.tenant
    believed = model.profile.table("p50")
    table = table_of_latencies(tenant.name, believed, rows, len(lanes), lanes[0].size, tenant.cuts, tenant.splits or ())
    duration = tuple(tuple(max(1, round(ns)) for ns in each) for each in table.duration_ns.tolist())
    return MemberRequest(tenant.name, model.facts.digest, tenant.cuts, duration, table.splits)
