"""Runs the queries of applications: their stages are ordinary queries of the driver, steered by `core.flow`.

Nothing here has a thread of its own. A stage starts on the thread that brought the answer before it, outside of the
driver's lock. Arrays go from stage to stage as they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.events import ApplicationArrived, ApplicationEnded, PredictorChanged, QueryWithdrawn
from cotenant.core.flow import Finish, Flow, StageGraph, StartStage, Step, WithdrawStage
from cotenant.execute.protocol import Tensors
from cotenant.predict.online import OnlineModel
from cotenant.repository.application_form import result_of
from cotenant.serve.engine.clock import Clock
from cotenant.serve.engine.counters import Counters
from cotenant.serve.engine.driver import Asked, Driver
from cotenant.serve.engine.merge_check import Watch
from cotenant.serve.engine.queries import arrival_of
from cotenant.serve.models.served_application import FindModel, ServedApplication
from cotenant.serve.models.served_models import QueryForm
from cotenant.types import Outcome, StageQuery, priority_rank
from cotenant.wire.api import InferRequest, InferResult, ServeError, Status

Done = Callable[[InferResult], None]
_INTERNAL = "internal error; the server's log has the details"
_log = logging.getLogger("cotenant.flows")


@dataclass(slots=True)
class _Run:
    """One query under way. `lock` guards the flow, the tensors and the numbers; no other lock is taken below it."""

    application: ServedApplication
    request: InferRequest
    done: Done
    number: int
    arrival_ns: int
    deadline_ns: int
    expiry_ns: int | None
    flow: Flow
    deadlines_ns: Sequence[int]
    items: int
    wanted: dict[str, tuple[int, str]]
    forms: dict[int, QueryForm]
    takers: list[int]
    """Per stage, how many have yet to take what it gives: stages, and the client."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    outputs: dict[int, Tensors] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    withdrawn: dict[int, str] = field(default_factory=dict)


class Flows:
    """The queries of applications that are under way. Every method is thread-safe.

    `find` gives the model of a stage as it is served when the stage starts; `watched`: see MergeCheck.
    """

    def __init__(
        self,
        driver: Callable[[], Driver],
        clock: Clock,
        counters: Counters,
        beliefs: OnlineModel,
        find: FindModel,
        watched: Watch = lambda *each: each[-1],
    ) -> None:
        self._watched = watched
        self._driver = driver
        self._clock = clock
        self._counters = counters
        self._beliefs = beliefs
        self._find = find
        self._runs: dict[int, _Run] = {}
        self._changed = threading.Condition()
        self._refuses = False

    @property
    def under_way(self) -> int:
        """Queries of applications that have not ended."""
        return len(self._runs)

    def submit(self, application: ServedApplication, request: InferRequest, done: Done) -> int:
        """See Infer. Raises ServeError for a request that is wrong in itself."""
        if self._refuses:
            raise ServeError(Status.UNAVAILABLE, "the server is shutting down")
        items = application.check(request)
        spec = application.spec
        forms = {
            number: application.models[number].form(_stage_request(application, number, request, {}))
            for number, needed in enumerate(spec.graph.after)
            if not needed
        }
        wanted = application.wanted(request.outputs)
        needed = spec.graph.needed(stage for stage, _ in wanted.values())
        runs: list[_Run] = []

        def arrive(number: int, now_ns: int) -> ApplicationArrived:
            began_ns = arrival_of(request, now_ns)
            slo_ns = spec.slo_ns if request.timeout_ns is None else min(spec.slo_ns, request.timeout_ns)
            run = _Run(
                application,
                request,
                done,
                number,
                began_ns,
                began_ns + slo_ns,
                None if request.timeout_ns is None else began_ns + request.timeout_ns,
                Flow(spec.graph, began_ns + slo_ns, needed),
                self._deadlines(application, needed, forms, items, began_ns, began_ns + slo_ns),
                items,
                wanted,
                forms,
                _takers(spec.graph, needed, wanted),
            )
            runs.append(run)
            with self._changed:
                self._runs[number] = run
            self._counters.arrive(number, spec.name, began_ns, began_ns + slo_ns, items)
            if request.arrival_ns:
                self._counters.tell_later(number)
            return ApplicationArrived(number, spec.name, began_ns, began_ns + slo_ns)

        number = self._driver().begin(arrive)
        run = runs[0]
        with run.lock:
            steps = run.flow.begin()
        self._carry_out(run, steps)
        return number

    def cancel(self, number: int) -> bool:
        """Withdraw a query; False when it is none of an application that is under way."""
        run = self._runs.get(number)
        if run is None:
            return False
        self._end(run, Outcome.CANCELLED, "cancelled by the client")
        return True

    def fail(self, application: str, reason: str) -> None:
        """End all queries of an application, without an answer."""
        with self._changed:
            runs = [run for run in self._runs.values() if run.application.spec.name == application]
        for run in runs:
            self._end(run, Outcome.FAILED, reason)

    def refuse(self) -> None:
        """Let no query in any more; those inside go on."""
        self._refuses = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no query is inside; say whether that came to be within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout_s)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _carry_out(self, run: _Run, steps: Sequence[Step]) -> None:
        stages = [step.stage for step in steps if isinstance(step, StartStage)]
        if stages:
            self._start(run, stages)
        for step in steps:
            match step:
                case WithdrawStage():
                    self._withdraw(run, step.stage, step.reason)
                case Finish():
                    self._finish(run, step)

    def _start(self, run: _Run, stages: Sequence[int]) -> None:
        """Let the queries of stages arrive together; none of them where one cannot be made."""
        made = [(stage, asked) for stage in stages if (asked := self._asked(run, stage)) is not None]
        if len(made) < len(stages):
            return
        found = self._driver().submit_together([asked for _, asked in made])
        for (stage, _), number in zip(made, found, strict=True):
            if isinstance(number, ServeError):
                self._step(run, stage, Outcome.REJECTED, number.message)
                continue
            with run.lock:
                reason = run.withdrawn.pop(stage, None)
                run.numbers[stage] = number
            if reason is not None:
                self._driver().post(QueryWithdrawn(number, reason))

    def _asked(self, run: _Run, stage: int) -> Asked | None:
        """What a stage asks of the driver; None where its query cannot be made, which ends the whole, or has ended."""
        spec = run.application.spec.stages[stage]
        with run.lock:
            if run.flow.is_over:
                return None
            request = _stage_request(run.application, stage, run.request, run.outputs)
            for other in run.application.spec.graph.after[stage]:
                run.takers[other] -= 1
                if run.takers[other] == 0:
                    del run.outputs[other]
        try:
            model = self._find(spec.model)
            is_checked = stage in run.forms and model is run.application.models[stage]
            form = run.forms[stage] if is_checked else model.form(request)
        except Exception as error:
            if not isinstance(error, ServeError):
                _log.exception("stage %r of query %d could not be made", spec.name, run.number)
                error = ServeError(Status.INVALID_ARGUMENT, _INTERNAL)
            failed = error.status is Status.INVALID_ARGUMENT
            outcome = Outcome.FAILED if failed else Outcome.REJECTED
            self._step(run, stage, outcome, error.message)
            return None
        rank = priority_rank(run.request.priority or run.application.spec.priority)

        def make(number: int, now_ns: int) -> StageQuery:
            return StageQuery(
                number,
                model.still_served().name,
                now_ns,
                run.deadlines_ns[stage],
                rank,
                form.items,
                form.shape,
                form.merge_key,
                run.expiry_ns,
                run.number,
                spec.name,
            )

        done = partial(self._answered, run, stage)
        return make, request.inputs, self._watched(model, form, request.inputs, done)

    def _answered(self, run: _Run, stage: int, respond: Respond, outputs: Tensors | None) -> None:
        """See driver.Done."""
        try:
            if outputs is not None:
                with run.lock:
                    run.outputs[stage] = outputs
            elif respond.outcome is Outcome.REJECTED:
                self._doubt(run, stage)
            self._step(run, stage, respond.outcome, respond.reason)
        except Exception:  # whatever it is, the client gets its answer
            _log.exception("query %d could not go on", run.number)
            self._end(run, Outcome.FAILED, _INTERNAL)

    def _step(self, run: _Run, stage: int, outcome: Outcome, reason: str) -> None:
        with run.lock:
            steps = run.flow.stage_ended(stage, outcome, reason, self._clock.now_ns())
        self._carry_out(run, steps)

    def _end(self, run: _Run, outcome: Outcome, reason: str) -> None:
        with run.lock:
            steps = run.flow.end(outcome, reason)
        self._carry_out(run, steps)

    def _withdraw(self, run: _Run, stage: int, reason: str) -> None:
        reason = f"withdrawn: query {run.number} of {run.application.spec.name!r} has ended ({reason})"
        with run.lock:
            number = run.numbers.get(stage)
            if number is None:  # its query is just arriving, or never will
                run.withdrawn[stage] = reason
        if number is not None:
            self._driver().post(QueryWithdrawn(number, reason))

    def _finish(self, run: _Run, finish: Finish) -> None:
        result = result_of(run.number, finish, run.wanted, run.outputs)
        reason = result.reason or finish.reason
        self._driver().post(ApplicationEnded(run.number, result.outcome, reason, self._clock.now_ns()))
        try:
            run.done(result)
        except Exception:
            _log.exception("answering query %d failed", run.number)
        with self._changed:
            del self._runs[run.number]
            self._changed.notify_all()

    # --- beliefs --------------------------------------------------------------------------------------------------

    def _deadlines(
        self,
        application: ServedApplication,
        needed: Sequence[bool],
        forms: dict[int, QueryForm],
        items: int,
        arrival_ns: int,
        deadline_ns: int,
    ) -> list[int]:
        """When each stage has to end. Called under the driver's lock.

        Of a stage whose tensors are not there yet the smallest declared shape is believed: what is refused could not
        have been in time whatever came.
        """
        return application.spec.graph.deadlines_ns(
            arrival_ns, deadline_ns, application.ends_ns, lambda: self._times(application, needed, forms, items)
        )

    def _times(
        self, application: ServedApplication, needed: Sequence[bool], forms: dict[int, QueryForm], items: int
    ) -> list[int]:
        """The predicted latency of each stage alone; 0 of one that does not run."""
        times = []
        for number, model in enumerate(application.models):
            form = forms.get(number)
            shape, rows = (model.smallest_shape, items) if form is None else (form.shape, form.items)
            times.append(self._beliefs.alone_ns(model.tenant.name, shape, rows) if needed[number] else 0)
        return times

    def _doubt(self, run: _Run, stage: int) -> None:
        """A stage was refused: if it was the belief in slow models that did it, believe a little less of that."""
        application, needed = run.application, [True] * len(run.flow.states)
        graph = application.spec.graph

        def look(_: Engine) -> list[PredictorChanged]:
            times = self._times(application, needed, {}, run.items)
            is_slow = graph.is_too_long(stage, times, run.deadline_ns - run.arrival_ns, application.ends_ns)
            doubted = self._beliefs.doubt(application.tenants) if is_slow else None
            return [] if doubted is None else [doubted]

        self._driver().follow(look)


def _takers(graph: StageGraph, needed: Sequence[bool], wanted: dict[str, tuple[int, str]]) -> list[int]:
    takers = [0] * len(needed)
    for number, after in enumerate(graph.after):
        for other in after:
            takers[other] += needed[number]
    for stage in dict.fromkeys(stage for stage, _ in wanted.values()):
        takers[stage] += 1
    return takers


def _stage_request(
    application: ServedApplication, number: int, request: InferRequest, outputs: dict[int, Tensors]
) -> InferRequest:
    """The request of one stage, whose inputs are all there."""
    return InferRequest(
        application.spec.stages[number].model, application.stage_inputs(number, request.inputs, outputs)
    )
