"""The plans that a server follows for models that are there together: those of its repository, and of applications
whose stages start together, which are sought in the background while it serves."""

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
from cotenant.techniques.granularity.joint_plan import TogetherPlan, cuts_of_all
from cotenant.techniques.granularity.plan.kept import read_together, usable, verdict, words_of
from cotenant.techniques.granularity.plan.lane_tables import table_of_latencies
from cotenant.techniques.granularity.plan.search_process import Asked, AskedMember
from cotenant.techniques.granularity.policy.clustered import Clustered
from cotenant.techniques.placement.measured_tasks import read_tasks
from cotenant.work import CPU, Share

SEARCH_S = 3.0
"""For each set of stages."""
HAND_OVER_NS = 100_000
"""From the end of a launch to the beginning of one that waits for it: chosen by hand, twice what `simulate` charges a
launch, which is from measurements (docs/benchmarks.md)."""
_LATE_S = 60.0
"""After which a search is ended; it is tried again, with twice the time, behind the others."""
_TRIES = 3
_log = logging.getLogger("cotenant.together")


class TogetherPlans(Service):
    """Follows joint plans, and seeks them for stages that start together: on a thread of its own, which has the server
    settle when there is more to follow."""

    def __init__(self, server: Host) -> None:
        super().__init__(server)
        self._root = server.root
        self._kept: tuple[TogetherPlan, ...] = ()
        self._found: dict[object, TogetherPlan | None] = {}
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._limit_s = _LATE_S

    def start(self) -> None:
        """Read what the repository keeps; a broken file, and plans that rest on old figures, are told to the log."""
        try:
            self._kept = read_together(self._root)
            measured = read_tasks([self._root]) if self._kept else {}
        except CotenantError as error:
            _log.warning("no plans of models together are followed: %s", error)
            return
        for plan in self._kept:
            if verdict(plan, measured)[1]:
                text = "%s: is stale, as it was made from another profile; 'cotenant co-schedule' makes another one"
                _log.warning(text, words_of(plan))

    def cuts(self, opened: VersionFacts, policy: Policy, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """With those of plans that the policy follows and the model is a member of as it is."""
        if not isinstance(policy.spec.cuts, Clustered):
            return cuts
        me = opened.found.tenant, opened.digest
        mine = [each.plan for each in self._kept if me in [(member.model, member.graph) for member in each.members]]
        return cuts_of_all(mine, opened.found.tenant, cuts)

    def followed(self, policy: Policy) -> Policy:
        """The policy with the plans that hold for the models; those that do not are told to the log, once."""
        following = policy.spec.cuts
        if not isinstance(following, Clustered):
            return policy
        models = [versions[""] for versions in self.server.names.models.values()]
        graphs = {each.tenant.name: (each.facts.digest, each.tenant.unit_count) for each in models}
        lanes = [lane.size for lane in following.lanes]
        found = usable((*self._kept, *filter(None, self._found.values())), graphs, lanes)
        for plan in self._kept:
            for member in plan.members:
                known = graphs.get(member.model)
                if known is not None and known != (member.graph, member.units) and member.model not in self._told:
                    self._told.add(member.model)
                    _log.warning(
                        "the plan for %r beside others is stale, since the model or its configuration changed: "
                        "'cotenant co-schedule' makes another one",
                        member.model,
                    )
        if tuple(found) == following.joint_plans:
            return policy
        _log.info("models that are there together: %d plan(s) are followed", len(found))
        return replace(following, joint_plans=tuple(found))

    def settled(self) -> None:
        """Seek plans for stages that start together and have none, in the background; at the cuts that there are, on
        several equal lanes of a CPU."""
        spec, applications = self.server.policy.spec, self.server.names.applications.values()
        lanes = spec.lanes
        kinds = {(lane.device, lane.size) for lane in lanes}
        if not isinstance(spec.cuts, Clustered) or len(lanes) < 2 or len(kinds) > 1 or lanes[0].device != CPU:
            return
        kept = [each.key for each in self._kept]
        asked = {
            key: each
            for key, each in (_keyed(each) for app in applications for each in _sets(app, lanes))
            if key not in kept and key not in self._found
        }
        if asked and self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._run, args=(asked,), name="cotenant-together", daemon=True)
            self._thread.start()

    def close(self, until_s: float) -> None:
        """End what is sought; it is not waited for beyond `until_s` of the monotonic clock."""
        self._is_over = True
        if self._process is not None:
            self._process.kill()
        thread = self._thread
        if thread is not None:
            thread.join(left_s(until_s))

    def _run(self, asked: dict[object, Asked]) -> None:
        left = deque((key, each, 1) for key, each in asked.items())
        while left and not self._is_over:
            key, each, tries = left.popleft()
            self._limit_s = _LATE_S * 2 ** (tries - 1)
            try:
                self._found[key] = self._search(each)
            except TimeoutError as error:
                is_last = tries == _TRIES
                _log.warning("%s; it is %s", error, "given up" if is_last else "tried again with twice the time")
                if is_last:
                    self._found[key] = None
                else:
                    left.append((key, each, tries + 1))
        self._thread = None
        if not self._is_over:
            self.server.settle()

    def _search(self, asked: Asked) -> TogetherPlan | None:
        """What a process of its own finds. Raises TimeoutError when that does not end in time."""
        names = " and ".join(member.model for member in asked.members)
        command = [sys.executable, "-P", "-m", "cotenant.techniques.granularity.plan.search_process"]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            ) as self._process:
                if self._is_over:
                    self._process.kill()
                try:
                    out, _ = self._process.communicate(msgspec.json.encode(asked), timeout=self._limit_s)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    raise
            found = msgspec.json.decode(out, type=TogetherPlan | None)
        except subprocess.TimeoutExpired:
            text = f"the search of a plan for {names} together did not end within {self._limit_s:g} s"
            raise TimeoutError(text) from None
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            if not self._is_over:
                _log.warning("no plan for %s together could be sought: %s", names, error)
            return None
        if found is None:
            _log.info("%s together: streams are as good", names)
        else:
            _log.info(
                "%s together: %.3g ms by a plan instead of %.3g", names, found.makespan_ns / 1e6, found.streams_ns / 1e6
            )
        return found


def _keyed(asked: Asked) -> tuple[object, Asked]:
    members = tuple(sorted((each.model, len(each.duration_ns[0])) for each in asked.members))
    return (members, asked.lanes, asked.lane_cores), asked


def _sets(application: ServedApplication, lanes: Sequence[Share]) -> Iterator[Asked]:
    """The stages that start together, with one row each, and with as many as all of them take."""
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
            yield Asked(members, len(lanes), lanes[0].size, HAND_OVER_NS, SEARCH_S)


def _member(model: ServedModel, rows: int, lanes: Sequence[Share]) -> AskedMember:
    """What a model takes by its profile, between the cuts at which it is left."""
    tenant = model.tenant
    believed = model.profile.table("p50")
    table = table_of_latencies(tenant.name, believed, rows, len(lanes), lanes[0].size, tenant.cuts, tenant.splits or ())
    duration = tuple(tuple(max(1, round(ns)) for ns in each) for each in table.duration_ns.tolist())
    return AskedMember(tenant.name, model.facts.digest, tenant.cuts, duration, table.splits)
