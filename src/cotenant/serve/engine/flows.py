"""Queries of applications: each stage is an ordinary query of the driver; `core.flow` decides when it starts.

There is no extra thread: a stage starts on the thread that delivers its predecessor's answer, outside of the driver's
lock. Arrays pass from stage to stage without a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.events import ApplicationArrived, ApplicationEnded, QueryWithdrawn
from cotenant.core.flow import Flow, FlowProbes, StartStages, Step
from cotenant.execute.protocol import Tensors
from cotenant.predict.online import OnlineModel
from cotenant.repository.application_form import result_of
from cotenant.serve.engine.clock import Clock
from cotenant.serve.engine.counters import Counters
from cotenant.serve.engine.driver import Driver, Submission
from cotenant.serve.engine.merge_check import Watch
from cotenant.serve.engine.queries import Done, query_of
from cotenant.serve.models.served_application import FindModel, ServedApplication
from cotenant.serve.models.served_models import QueryForm
from cotenant.types import Outcome, StageQuery
from cotenant.wire.api import InferRequest, ServeError, Status

_INTERNAL = "internal error; the server's log has the details"
_log = logging.getLogger("cotenant.flows")


@dataclass(slots=True)
class _Run:
    """A running query of an application. `lock` guards flow and tensors; no other lock is taken while it is held."""

    flow: Flow
    application: ServedApplication
    request: InferRequest
    done: Done
    wanted: Mapping[str, tuple[int, str]]
    """Stage and output of a stage, by requested output."""
    kept: frozenset[int]
    """Stages with requested outputs."""
    forms: Mapping[int, QueryForm]
    """Query forms of the first stages, checked at arrival."""
    outputs: dict[int, Tensors] = field(default_factory=dict)
    """Outputs by stage, kept until no later stage and no client needs them."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Flows:
    """Running queries of applications. Every method is thread-safe. `find` returns the served model of a stage when the
    stage starts. `watched` wraps callbacks for merge checks."""

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
        self._probes = FlowProbes()
        """Used under the driver's lock."""
        self._runs: dict[int, _Run] = {}
        self._changed = threading.Condition()
        self._refuses = False

    @property
    def under_way(self) -> int:
        """Number of queries that have not ended."""
        return len(self._runs)

    def submit(self, application: ServedApplication, request: InferRequest, done: Done) -> int:
        """Submit a query of an application and return its number; `done` is called exactly once. Raises ServeError for
        an invalid request, and while the server stops."""
        if self._refuses:
            raise ServeError(Status.UNAVAILABLE, "the server is shutting down; send the request to another server")
        items, spec = application.check(request), application.spec
        request = structs.replace(request, priority=request.priority or spec.priority)
        forms = {
            stage: application.models[stage].form(_stage_request(application, stage, request, {}))
            for stage, needed in enumerate(spec.graph.after)
            if not needed
        }
        known = {stage: (form.shape, form.items) for stage, form in forms.items()}
        wanted = application.wanted(request.outputs)
        kept = frozenset([stage for stage, _ in wanted.values()])
        runs: list[_Run] = []

        def arrive(number: int, now_ns: int) -> ApplicationArrived:
            query = query_of(application, QueryForm(items, 0, 0), request, self._counters, number, now_ns)
            flow = Flow(spec.graph, query, partial(self._alone_ns, application), known, kept)
            self._probes.admit(flow, partial(self._alone_ns, application), now_ns)
            runs.append(_Run(flow, application, request, done, wanted, kept, forms))
            with self._changed:
                self._runs[number] = runs[0]
            self._counters.arrive(query)
            return flow.arrived

        number = self._driver().begin(arrive)
        self._advance(runs[0], runs[0].flow.begin)
        return number

    def cancel(self, number: int) -> bool:
        """Withdraw a query. Returns False if no running application query has this number."""
        run = self._runs.get(number)
        if run is None:
            return False
        self._end(run, Outcome.CANCELLED, "cancelled by the client")
        return True

    def fail(self, application: str, reason: str) -> None:
        """Fail all queries of an application with a reason."""
        with self._changed:
            runs = [run for run in self._runs.values() if run.application.spec.name == application]
        for run in runs:
            self._end(run, Outcome.FAILED, reason)
        self._driver().read(lambda _: self._probes.forget(application))

    def refuse(self) -> None:
        """Refuse new queries; running queries continue."""
        self._refuses = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no query runs. Returns False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout_s)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _advance(self, run: _Run, move: Callable[[], list[Step]]) -> None:
        """Advance a flow by `move` and carry out its steps."""
        with run.lock:
            steps = move()
            stages = [stage for step in steps if isinstance(step, StartStages) for stage in step.stages]
            requests = {stage: _stage_request(run.application, stage, run.request, run.outputs) for stage in stages}
            for stage in run.outputs.keys() - run.kept - run.flow.awaited if requests else ():
                del run.outputs[stage]
        if requests:
            self._start(run, requests)
        elif steps:
            self._finish(run, steps)

    def _stage_ended(self, run: _Run, stage: int, outcome: Outcome, reason: str) -> None:
        self._advance(run, partial(run.flow.stage_ended, stage, outcome, reason, self._clock.now_ns()))

    def _end(self, run: _Run, outcome: Outcome, reason: str) -> None:
        self._advance(run, partial(run.flow.end, outcome, reason, self._clock.now_ns()))

    def _start(self, run: _Run, requests: Mapping[int, InferRequest]) -> None:
        """Submit the queries of several stages together; none of them if one cannot be built."""
        made: list[Submission] = []
        for stage, request in requests.items():
            try:
                made.append(self._submission(run, stage, request))
            except Exception as error:
                if not isinstance(error, ServeError):
                    name = run.application.spec.stages[stage].name
                    _log.exception("query %d: its stage %r could not be submitted", run.flow.query.id, name)
                    error = ServeError(Status.INVALID_ARGUMENT, _INTERNAL)
                failed = error.status is Status.INVALID_ARGUMENT
                self._stage_ended(run, stage, Outcome.FAILED if failed else Outcome.REJECTED, error.message)
                return
        for stage, found in zip(requests, self._driver().submit_together(made), strict=True):
            if isinstance(found, ServeError):
                self._stage_ended(run, stage, Outcome.REJECTED, found.message)

    def _submission(self, run: _Run, stage: int, request: InferRequest) -> Submission:
        """Build the submission of a stage. Raises ServeError if its model is not served or its tensors do not fit."""
        model = self._find(request.model)
        is_checked = stage in run.forms and model is run.application.models[stage]
        form = run.forms[stage] if is_checked else model.form(request)

        def make(number: int, now_ns: int) -> StageQuery:
            tenant = model.still_served().name
            with run.lock:
                if run.flow.is_over:
                    raise ServeError(Status.CANCELLED, "the application's query has ended")
                return run.flow.stage_query(stage, number, tenant, now_ns, form.items, form.shape, form.merge_key)

        done = partial(self._answered, run, stage)
        return make, request.inputs, self._watched(model, form, request.inputs, done)

    def _answered(self, run: _Run, stage: int, respond: Respond, outputs: Tensors | None) -> None:
        """Handle the end of a stage's query, as `driver.Done`."""
        try:
            if outputs is not None:
                with run.lock:
                    run.outputs[stage] = outputs
            elif respond.outcome is Outcome.REJECTED:
                self._driver().read(lambda _: self._probes.refused(run.flow))
            self._stage_ended(run, stage, respond.outcome, respond.reason)
        except Exception:  # the client still gets an answer
            _log.exception("query %d failed between two stages", run.flow.query.id)
            self._end(run, Outcome.FAILED, _INTERNAL)

    def _finish(self, run: _Run, steps: Sequence[Step]) -> None:
        """Answer the client; `steps` are the end of the query and withdrawals of its stages."""
        first, *withdrawn = [step for step in steps if not isinstance(step, StartStages)]
        assert isinstance(first, ApplicationEnded)
        result = result_of(first, run.wanted, run.outputs)
        ended = ApplicationEnded(first.query, result.outcome, result.reason or first.reason, first.ended_ns)

        def end(_: Engine) -> list[ApplicationEnded | QueryWithdrawn]:
            self._probes.ended(run.flow, ended.outcome, ended.ended_ns)
            return [ended, *withdrawn]

        self._driver().post_from(end)
        try:
            run.done(result)
        except Exception:
            _log.exception("query %d: its answer could not be delivered", ended.query)
        with self._changed:
            del self._runs[ended.query]
            self._changed.notify_all()

    # --- estimates ------------------------------------------------------------------------------------------------

    def _alone_ns(self, application: ServedApplication, stage: int, shape: int, items: int) -> int:
        """Predicted solo latency of a stage in ns. Called under the driver's lock."""
        return self._beliefs.alone_ns(application.models[stage].tenant.name, shape, items)


def _stage_request(
    application: ServedApplication, number: int, request: InferRequest, outputs: dict[int, Tensors]
) -> InferRequest:
    """Build the request of a stage from the client's inputs and the outputs of earlier stages."""
    return InferRequest(
        application.spec.stages[number].model, application.stage_inputs(number, request.inputs, outputs)
    )
