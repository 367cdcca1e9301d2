"""Trial runs of joint plans: a set of models runs on the device with the components of the server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from cotenant.config import ServerConfig
from cotenant.core.actions import Action, Enqueue, Launch, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event, PolicyChanged
from cotenant.core.snapshot import DropRule, Policy
from cotenant.errors import CotenantError
from cotenant.execute.batches import are_alike
from cotenant.execute.protocol import Tensors, Timing
from cotenant.execute.registry import layout_of, open_executor
from cotenant.measure.inputs import make_inputs
from cotenant.measure.load_spec import VersionFacts, facts_of
from cotenant.measure.loader import stored_or_measured
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.repository import default_version
from cotenant.serve.engine.clock import RealClock
from cotenant.serve.engine.driver import Driver
from cotenant.serve.engine.reorganise import spec_of
from cotenant.serve.models.served_models import ServedModel, serve_model
from cotenant.techniques.granularity.joint_plan import JointPlan, cuts_of_all
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.types import ANSWERS, Query
from cotenant.work import Share

_LONG_NS = 10**12
"""Deadline of the queries of a trial run: none is late."""
_WAIT_S = 120.0
"""Longest wait for a set; a set that takes longer has failed."""
EFFORT = Effort(budget_s=6.0, min_runs=7, max_runs=200, warm_up=2)
"""Time limit and number of runs of a trial run."""


class TrialRunError(CotenantError):
    """A set failed, or gave other answers with a plan than without."""


@dataclass(frozen=True, slots=True)
class TrialRunTimes:
    """Median times from the arrival of a set to its last answer, in ns, of interleaved runs. `plans_ns` is None for a
    plan that the policy did not follow."""

    sequential_ns: int
    streams_ns: int
    plans_ns: tuple[int | None, ...]


class TrialRun:
    """A set of models of a repository, loaded as a server loads them, with the cuts of these plans. To be closed.
    `batches` are the rows of each model. Raises what loading the models raises."""

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        batches: Mapping[str, int],
        lanes: tuple[Share, ...],
        plans: Sequence[JointPlan],
    ) -> None:
        self._plans, self._lanes = plans, lanes
        self._whole = Share(tuple(core for lane in lanes for core in lane.cores), lanes[0].device)
        shares = (*lanes, self._whole) if self._whole.size > lanes[0].size else lanes
        self._executor = open_executor(settings.device, shares)
        self._open = contextlib.ExitStack()
        self._open.callback(self._executor.close)
        self._clock = RealClock()
        self._open.callback(self._clock.close)
        self._inputs: dict[str, tuple[int, Tensors]] = {}
        self._count = 0
        try:
            served = [self._load(root, model, rows, shares) for model, rows in batches.items()]
        except BaseException:
            self._open.close()
            raise
        believed = TablePredictor({each.tenant.name: each.profile.table("p50") for each in served})
        machine = layout_of(settings.device).machine(lanes, self._whole.cores)
        engine = Engine([each.tenant for each in served], self._streams(), believed, machine)
        self._driver = Driver(engine, self._executor, self._clock, (self._note,))
        self._executor.on_event = self._driver.post
        for each in served:
            self._executor.announce(each.tenant.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, effort: Effort = EFFORT) -> TrialRunTimes:
        """Run the set sequentially on all cores, all at once, and by each plan, in turns.

        Raises TrialRunError when a run fails, or a plan gives other answers than no plan.
        """
        ways: list[Policy] = [Edf((self._whole,), DropRule.NONE, preempt=False), self._streams()]
        ways += [JointSchedule(self._lanes, DropRule.NONE, preempt=False, joint_plans=(plan,)) for plan in self._plans]
        expected = self._once(ways[0])[1]
        followed = []
        for number, policy in enumerate(ways):
            _, answers, launches = self._once(policy)
            check_answers(expected, answers)
            followed.append(number < 2 or launches > len(self._inputs) or _is_plain(self._plans[number - 2]))
        samples: list[list[int]] = [[] for _ in ways]
        began = time.perf_counter()
        while len(samples[0]) < effort.min_runs + effort.warm_up or (
            time.perf_counter() - began < effort.budget_s and len(samples[0]) < effort.max_runs
        ):
            for way, policy in enumerate(ways):
                samples[way].append(self._once(policy)[0])
        medians = [round(median(each[effort.warm_up :])) for each in samples]
        plans = (ns if is_followed else None for ns, is_followed in zip(medians[2:], followed[2:], strict=True))
        return TrialRunTimes(medians[0], medians[1], tuple(plans))

    def _load(self, root: Path, model: str, rows: int, shares: tuple[Share, ...]) -> ServedModel:
        found = default_version(root, model)
        opened = open_version(root, found, self._executor.target, shares)
        self._open.callback(opened.runner.close)
        profile = stored_or_measured(root, opened, shares, self._executor.target)

        def cuts_of(facts: VersionFacts, cuts: tuple[int, ...]) -> tuple[int, ...]:
            return cuts_of_all(self._plans, facts.found.tenant, cuts)

        served = serve_model(facts_of(opened, opened.splits), profile, preempt=False, cuts_of=cuts_of)
        served.loaded = self._executor.load(served.tenant.name, opened.runner, spec_of(served, shares))
        self._open.callback(served.loaded.close)
        self._executor.add_model(served.tenant.name, served.loaded)
        shape = opened.sweep(shares, EFFORT).largest_shape
        inputs = make_inputs(opened.runner.inputs, shape, rows, found.config.model.max_batch > 1, opened.samples)
        self._inputs[served.tenant.name] = rows, inputs
        return served

    def _streams(self) -> Policy:
        return Edf(self._lanes, DropRule.NONE, preempt=False)

    def _note(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        self._count += sum(
            isinstance(each, Enqueue) or (isinstance(each, Launch) and not each.after) for each in actions
        )

    def _once(self, policy: Policy) -> tuple[int, dict[str, Tensors], int]:
        """One run: its time in ns, the answers, and the number of launches."""
        self._driver.post(PolicyChanged(policy))
        answers: dict[str, Tensors] = {}
        left, ended = len(self._inputs), threading.Event()
        lock, fault = threading.Lock(), ""
        self._count, end_ns = 0, 0

        def done(tenant: str, respond: Respond, outputs: Tensors | None) -> None:
            nonlocal left, end_ns, fault
            with lock:
                left -= 1
                if outputs is None or respond.outcome not in ANSWERS:
                    fault = f"{tenant}: {respond.outcome}, {respond.reason}"
                else:
                    answers[tenant] = outputs
                end_ns = time.perf_counter_ns()
                if not left:
                    ended.set()

        def made(tenant: str, rows: int, number: int, now_ns: int) -> Query:
            return Query(number, tenant, now_ns, now_ns + _LONG_NS, items=rows)

        request = [
            (partial(made, tenant, rows), inputs, partial(done, tenant))
            for tenant, (rows, inputs) in self._inputs.items()
        ]
        began_ns = time.perf_counter_ns()
        self._driver.submit_together(request)
        if not ended.wait(_WAIT_S):
            raise TrialRunError(f"the set did not end within {_WAIT_S:g} s; run again on a quiet machine")
        if fault:
            raise TrialRunError(f"the set cannot be run: {fault}")
        self._driver.wait_idle(_WAIT_S)
        return end_ns - began_ns, answers, self._count


def _is_plain(plan: JointPlan) -> bool:
    """Whether a plan is one launch for each member, with ranks alone."""
    return not (plan.barriers or plan.waits or plan.chunks)


def check_answers(expected: Mapping[str, Tensors], answers: Mapping[str, Tensors]) -> None:
    """Raise TrialRunError if an output differs from the expected one by more than rounding."""
    for tenant, outputs in expected.items():
        for name, array in outputs.items():
            if not are_alike(array, answers[tenant][name], rtol=1e-3):
                raise TrialRunError(f"{tenant}: output {name!r} differs between a joint plan and no plan")
