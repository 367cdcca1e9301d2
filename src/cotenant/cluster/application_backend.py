"""Applications in a cluster: the gateway sends each stage to a node of its model, and passes tensors between stages.

Front-ends use it as the backend of a server. The stages are queries of the forwarder, so the loss of a node is handled
as for any other query. All code runs on the gateway's event loop, except decoding and encoding by front-ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cotenant.cluster.forward import Forwarder
from cotenant.cluster.links import HttpReply, NodeLink
from cotenant.cluster.stages import StageEnd, ask_stage
from cotenant.cluster.types import COUNTED
from cotenant.core.events import ApplicationEnded
from cotenant.core.flow import Flow, StartStages, Step
from cotenant.errors import ConfigError
from cotenant.load.clients import model_path
from cotenant.repository.application_form import VERSION, ApplicationForm, form_of, result_of
from cotenant.types import Outcome, Query
from cotenant.wire.api import (
    Array,
    InferRequest,
    InferResult,
    ModelMetadata,
    ServeError,
    Status,
    TensorSpec,
    unanswered,
)

Done = Callable[[InferResult], None]
_log = logging.getLogger("cotenant.cluster")
NO_STATISTICS = "the gateway keeps no statistics of applications; use GET /v2/cotenant/cluster"
NOT_LOADED_HERE = "the cluster loads the models of its plan; change the tenants' file instead"


class _Model(NamedTuple):
    """Metadata and declared shapes of a stage's model, from a node."""

    metadata: ModelMetadata
    shapes: Sequence[Mapping[str, Sequence[int]]]


class ApplicationBackend:
    """Applications of the forwarder's table. Implements Infer for their names. Call `prepare` before every other call
    for an application, and `admit` before a query."""

    def __init__(self, forwarder: Forwarder, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._forwarder = forwarder
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._forms: dict[str, tuple[int, ApplicationForm]] = {}
        """Table version and form by application."""
        self._numbers = itertools.count(1)
        self._runs: dict[int, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._forwarder.applications

    @property
    def served(self) -> dict[str, bool]:
        """Whether each stage has a node, by application."""
        return {name: self._is_served(name) for name in self._forwarder.applications}

    async def prepare(self, name: str) -> None:
        """Match an application with its models, as nodes describe them; once per version of the table. Raises
        ServeError if a model has no node or its tensors do not match."""
        planned, version = self._forwarder.applications[name], self._forwarder.version
        known = self._forms.get(name)
        if known is not None and known[0] == version:
            return
        spec = planned.spec
        models = {}
        for stage in spec.stages:
            if stage.model in models:
                continue
            try:
                models[stage.model] = await self._described(stage.model)
            except ServeError as error:
                sentence = f"application {name!r}: stage {stage.name!r}: {error.message}"
                raise ServeError(Status.UNAVAILABLE, sentence) from None
        try:
            form = form_of(spec, [models[stage.model] for stage in spec.stages], planned.shares_ns)
        except ConfigError as error:
            raise ServeError(Status.INVALID_ARGUMENT, str(error)) from None
        self._forms[name] = version, form

    async def admit(self, name: str) -> None:
        """Prepare an application for a query. Raises ServeError as `prepare`, and counts the refused query."""
        try:
            await self.prepare(name)
        except ServeError as error:
            self._refused(name, error)
            raise

    async def infer(self, request: InferRequest) -> InferResult:
        """Run a query to its end; a cancellation withdraws it. Raises ServeError as `admit` and `submit` do."""
        await self.admit(request.model)
        result: asyncio.Future[InferResult] = self._loop.create_future()

        def done(found: InferResult) -> None:
            if not result.done():
                result.set_result(found)

        number = self.submit(request, done)
        try:
            return await result
        except asyncio.CancelledError:
            self.cancel(number)
            raise

    async def close(self) -> None:
        """Cancel all running queries."""
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    # --- Infer ----------------------------------------------------------------------------------------------------

    def refusal(self, model: str, version: str) -> ServeError | None:
        """None, since `admit` has already refused the query if necessary."""
        return None

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        """Count a query that a front-end refused."""
        self._refused(model, error)

    def ready(self) -> bool:
        """Whether all applications are served."""
        return all(self.served.values())

    def model_ready(self, model: str, version: str) -> bool:
        """Whether each stage of an application has a node."""
        self._form(model, version)
        return self._is_served(model)

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """Metadata of an application."""
        return self._form(model, version).metadata

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """Configuration of an application."""
        return self._form(model, version).config()

    def submit(self, request: InferRequest, done: Done) -> int:
        """Submit a query and return its number; `done` is called once. A refused query is counted. Raises ServeError
        for an invalid request."""
        try:
            form = self._form(request.model, request.version)
            form.check(request)
        except ServeError as error:
            self._refused(request.model, error)
            raise
        number = next(self._numbers)
        self._loop.call_soon_threadsafe(self._begin, number, form, request, done)
        return number

    def cancel(self, query: int) -> None:
        """Withdraw a query."""
        self._loop.call_soon_threadsafe(self._withdraw, query)

    # --- one query ------------------------------------------------------------------------------------------------

    def _refused(self, name: str, error: ServeError) -> None:
        """Count a query that was refused."""
        self._forwarder.count(name, "offered")
        self._forwarder.count(name, COUNTED[error.ending.outcome])

    def _begin(self, number: int, form: ApplicationForm, request: InferRequest, done: Done) -> None:
        run = self._loop.create_task(self._run(number, form, request, done))
        self._runs[number] = run
        run.add_done_callback(lambda _: self._runs.pop(number, None))

    def _withdraw(self, number: int) -> None:
        run = self._runs.get(number)
        if run is not None:
            run.cancel()

    async def _run(self, number: int, form: ApplicationForm, request: InferRequest, done: Done) -> None:
        name = form.spec.name
        self._forwarder.count(name, "offered")
        try:
            result = await self._steered(number, form, request)
        except asyncio.CancelledError:
            result = unanswered(Outcome.CANCELLED, number, VERSION, "cancelled by the client")
        except Exception:
            _log.exception("a query of application %r failed", name)
            reason = "internal error; the gateway's log has the details"
            result = unanswered(Outcome.FAILED, number, VERSION, reason)
        self._forwarder.count(name, COUNTED[result.outcome])
        done(result)

    async def _steered(self, number: int, form: ApplicationForm, request: InferRequest) -> InferResult:
        """Run a query by its flow, which decides on starts of stages and on the outcome."""
        spec, now_ns = form.spec, self._now_ns()
        slo_ns = spec.slo_ns if request.timeout_ns is None else min(spec.slo_ns, request.timeout_ns)
        wanted = form.wanted(request.outputs)
        whole = Query(number, spec.name, now_ns, now_ns + slo_ns)
        # The gateway has no latency predictions: without a plan every stage has the whole SLO as budget.
        flow = Flow(spec.graph, whole, lambda *_: 0, wanted=[stage for stage, _ in wanted.values()])
        outputs: dict[int, Mapping[str, Array]] = {}
        running: dict[asyncio.Task[StageEnd], int] = {}
        steps: list[Step] = flow.begin()
        try:
            while True:
                for step in steps:
                    if isinstance(step, ApplicationEnded):  # tasks of running stages are cancelled below
                        return result_of(step, wanted, outputs)
                    for stage in step.stages if isinstance(step, StartStages) else ():
                        inputs = form.stage_inputs(stage, request.inputs, outputs)
                        end = self._stage(form, stage, inputs, flow.deadlines_ns[stage], request.priority)
                        running[self._loop.create_task(end)] = stage
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                steps = []
                for task in ended:
                    stage, found = running.pop(task), task.result()
                    outputs[stage] = found.outputs
                    steps += flow.stage_ended(stage, found.outcome, found.reason, self._now_ns())
        finally:
            for task in running:
                task.cancel()

    async def _stage(
        self, form: ApplicationForm, stage: int, inputs: Mapping[str, Array], end_ns: int, priority: int
    ) -> StageEnd:
        """Run a stage on a node. Its time-out is the stage's deadline: a later answer is late for the application."""
        spec = form.spec
        parameters = {"timeout": max(1, (end_ns - self._now_ns()) // 1000)}
        if priority or spec.priority:
            parameters["priority"] = priority or spec.priority
        return await ask_stage(self._forwarder, spec.stages[stage].model, inputs, parameters)

    # --- models ---------------------------------------------------------------------------------------------------

    def _form(self, name: str, version: str) -> ApplicationForm:
        if version not in ("", VERSION):
            raise ServeError(Status.NOT_FOUND, f"model {name!r} has no version {version!r}; it has {VERSION}")
        return self._forms[name][1]

    def _is_served(self, name: str) -> bool:
        models = self._forwarder.models
        return all(models.get(stage.model, False) for stage in self._forwarder.applications[name].spec.stages)

    async def _described(self, model: str) -> _Model:
        """Description of a model by a node. Raises ServeError."""
        metadata = await self._ask_node(model, "")
        config = await self._ask_node(model, "/config")
        text = config.get("parameters", {}).get("shapes", {}).get("string_value", "[]")
        return _Model(
            ModelMetadata(
                metadata["name"],
                tuple(metadata["versions"]),
                metadata["platform"],
                _specs(metadata["inputs"]),
                _specs(metadata["outputs"]),
                config["max_batch_size"],
            ),
            msgspec.json.decode(text),
        )

    async def _ask_node(self, model: str, what: str) -> Any:
        async def attempt(link: NodeLink, _: int) -> HttpReply:
            return await link.http("GET", f"{model_path(model)}{what}", [], b"")

        reply: HttpReply = await self._forwarder.ask(model, attempt)
        if reply.status != 200:
            raise ServeError(
                Status.UNAVAILABLE,
                f"node {reply.node!r} does not describe model {model!r} (status {reply.status})",
            )
        return msgspec.json.decode(reply.body)


def _specs(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(each["name"], each["datatype"], tuple(each["shape"])) for each in tensors)
