"""An application with the models of its stages: checked tensors, and its metadata for clients. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cotenant.config import NS_PER_MS
from cotenant.core.events import ApplicationEnded
from cotenant.errors import ConfigError
from cotenant.repository.application_spec import ApplicationSpec, Source
from cotenant.types import ANSWERS, Outcome
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
from cotenant.wire.codec import validate
from cotenant.wire.config_keys import config_tensor

PLATFORM = "ensemble"
VERSION = "1"


class StageModel(Protocol):
    """The part of a model that its applications use."""

    @property
    def metadata(self) -> ModelMetadata:
        """Metadata with its tensors."""

    @property
    def shapes(self) -> Sequence[Mapping[str, Sequence[int]]]:
        """Declared shapes, each by input."""


@dataclass(frozen=True, slots=True)
class ApplicationForm:
    """An application with checked tensors. `models` are those of its stages, in their order."""

    spec: ApplicationSpec
    metadata: ModelMetadata
    models: tuple[StageModel, ...]

    @property
    def version(self) -> str:
        """Its only version, as on the wire."""
        return VERSION

    @property
    def counted_as(self) -> str:
        """Name under which its queries are counted."""
        return self.spec.name

    def check(self, request: InferRequest) -> int:
        """Check a request; return its rows, 1 if queries have no batch axis. Raises ServeError (INVALID_ARGUMENT)."""
        validate(request, self.metadata)
        if not self.metadata.max_batch_size:
            return 1
        rows = {name: len(array) for name, array in request.inputs.items()}
        if len(dict.fromkeys(rows.values())) > 1:
            text = ", ".join(f"{name!r} has {count}" for name, count in rows.items())
            raise ServeError(
                Status.INVALID_ARGUMENT,
                f"model {self.spec.name!r}: inputs differ in their number of rows: {text}; expected one batch",
            )
        return next(iter(rows.values()))

    def wanted(self, outputs: tuple[str, ...]) -> dict[str, tuple[int, str]]:
        """Sources of the requested outputs, as stage and output of the stage; of all outputs if none is named."""
        chosen = outputs or tuple(self.spec.outputs)
        sources = {name: self.spec.outputs[name] for name in chosen}
        return {name: (each.stage, each.tensor) for name, each in sources.items() if each.stage is not None}

    def stage_inputs(
        self, number: int, given: Mapping[str, Array], outputs: Mapping[int, Mapping[str, Array]]
    ) -> dict[str, Array]:
        """The inputs of a stage from those of the application and the outputs of the stages that it needs."""
        inputs: dict[str, Array] = {}
        for name, source in self.spec.stages[number].inputs.items():
            inputs[name] = (given if source.stage is None else outputs[source.stage])[source.tensor]
        return inputs

    def config(self) -> dict[str, Any]:
        """Configuration in the format of the protocol's model configuration extension, as an ensemble."""
        meta = self.metadata
        batched = meta.max_batch_size > 0
        return {
            "name": meta.name,
            "platform": PLATFORM,
            "backend": "",
            "max_batch_size": meta.max_batch_size,
            "version_policy": {"latest": {"num_versions": 1}},
            "input": [config_tensor(spec, batched=batched) for spec in meta.inputs],
            "output": [config_tensor(spec, batched=batched) for spec in meta.outputs],
            "ensemble_scheduling": {"step": self._steps()},
            "parameters": {
                "slo_ms": {"string_value": f"{self.spec.slo_ns / NS_PER_MS:g}"},
                "tenant": {"string_value": meta.name},
                "stages": {"string_value": json.dumps([stage.name for stage in self.spec.stages])},
                "shapes": {"string_value": json.dumps(self._shapes())},
            },
        }

    def _steps(self) -> list[dict[str, Any]]:
        """Stages. A tensor between them has the name `STAGE.OUTPUT`, or that of the application's output."""
        tensors: dict[tuple[int | None, str], str] = {}
        for name, each in self.spec.outputs.items():
            tensors.setdefault((each.stage, each.tensor), name)

        def name_of(source: Source) -> str:
            if source.stage is None:
                return source.tensor
            stage = self.spec.stages[source.stage].name
            return tensors.get((source.stage, source.tensor), f"{stage}.{source.tensor}")

        return [
            {
                "model_name": stage.model,
                "model_version": -1,
                "input_map": {taken: name_of(source) for taken, source in stage.inputs.items()},
                "output_map": {
                    spec.name: name_of(Source(number, spec.name)) for spec in self.models[number].metadata.outputs
                },
            }
            for number, stage in enumerate(self.spec.stages)
        ]

    def _shapes(self) -> list[dict[str, list[int]]]:
        """Declared shapes of the inputs: those of a first stage with all inputs, else the first shape of each stage."""
        for number, stage in enumerate(self.spec.stages):
            taken = {source.tensor: name for name, source in stage.inputs.items() if source.stage is None}
            if len(taken) == len(self.metadata.inputs) and not self.spec.graph.after[number]:
                return [{name: list(shape[own]) for name, own in taken.items()} for shape in self.models[number].shapes]
        chosen: dict[str, list[int]] = {}
        for number, stage in enumerate(self.spec.stages):
            for name, source in stage.inputs.items():
                if source.stage is None:
                    chosen.setdefault(source.tensor, list(self.models[number].shapes[0][name]))
        return [chosen]


def form_of(
    spec: ApplicationSpec, models: Sequence[StageModel], shares_ns: Mapping[str, int] | None = None
) -> ApplicationForm:
    """Combine an application with the models of its stages. `shares_ns` is the division of its SLO by a plan.

    Raises ConfigError, with the key and the expected value, for tensors that do not fit.
    """
    batched = all(model.metadata.max_batch_size for model in models)
    inputs: dict[str, TensorSpec] = {}
    for number, stage in enumerate(spec.stages):
        where = f"{spec.path}: application: stage {stage.name!r}"
        taken = {each.name: each for each in models[number].metadata.inputs}
        _same_names(stage.inputs, taken, f"{where}: inputs", stage.model)
        for name, source in stage.inputs.items():
            key = f"{where}: inputs.{name}"
            if source.stage is None:
                known = inputs.get(source.tensor)
                inputs[source.tensor] = _merged(source.tensor, known, taken[name], key)
            else:
                given = _output(spec, models, source, key)
                _check_fit(given, taken[name], f"{spec.stages[source.stage].name}.{source.tensor}", key)
    outputs = []
    for name, source in spec.outputs.items():
        given = _output(spec, models, source, f"{spec.path}: application.outputs.{name}")
        outputs.append(replace(given, name=name))
    metadata = ModelMetadata(
        name=spec.name,
        versions=(VERSION,),
        platform=PLATFORM,
        inputs=tuple(inputs[name] for name in spec.inputs),
        outputs=tuple(outputs),
        max_batch_size=min(model.metadata.max_batch_size for model in models) if batched else 0,
    )
    return ApplicationForm(replace(spec, graph=spec.graph.divided(shares_ns or {})), metadata, tuple(models))


def result_of(
    ended: ApplicationEnded, wanted: Mapping[str, tuple[int, str]], outputs: Mapping[int, Mapping[str, Array]]
) -> InferResult:
    """Result for the client of an application. `wanted` has the source of each output, `outputs` those of stages."""
    query, outcome, reason = ended.query, ended.outcome, ended.reason
    if outcome in ANSWERS:
        try:
            chosen = {name: outputs[stage][tensor] for name, (stage, tensor) in wanted.items()}
        except KeyError as error:
            outcome, reason = Outcome.FAILED, f"a model did not give its output {error}"
        else:
            return InferResult(outcome, query, VERSION, chosen)
    return unanswered(outcome, query, VERSION, reason)


def _same_names(given: Mapping[str, Source], taken: Mapping[str, TensorSpec], where: str, model: str) -> None:
    wanted = ", ".join(map(repr, taken))
    for name in given:
        if name not in taken:
            raise ConfigError(f"{where}.{name}: model {model!r} has no input {name!r}, expected {wanted}")
    for name in taken:
        if name not in given:
            raise ConfigError(
                f"{where}: input {name!r} of model {model!r} has no source, expected one for each of {wanted}"
            )


def _output(spec: ApplicationSpec, models: Sequence[StageModel], source: Source, key: str) -> TensorSpec:
    assert source.stage is not None
    stage = spec.stages[source.stage]
    for made in models[source.stage].metadata.outputs:
        if made.name == source.tensor:
            return made
    known = ", ".join(repr(made.name) for made in models[source.stage].metadata.outputs)
    raise ConfigError(
        f"{key}: model {stage.model!r} of stage {stage.name!r} has no output {source.tensor!r}, expected one of {known}"
    )


def _check_fit(given: TensorSpec, taken: TensorSpec, name: str, key: str) -> None:
    """Raise ConfigError unless tensors fit. An open dimension or rank fits any; queries are checked at run time."""
    if given.datatype != taken.datatype:
        raise ConfigError(f"{key}: {name!r} has datatype {given.datatype}, expected {taken.datatype}")
    is_ranked = given.is_ranked and taken.is_ranked
    fits = not is_ranked or (
        (len(given.shape) == len(taken.shape))
        and all(-1 in pair or pair[0] == pair[1] for pair in zip(given.shape, taken.shape, strict=True))
    )
    if not fits:
        raise ConfigError(
            f"{key}: {name!r} has shape {list(given.shape)}, expected {list(taken.shape)} (-1 is any size)"
        )


def _merged(name: str, known: TensorSpec | None, taken: TensorSpec, key: str) -> TensorSpec:
    """Specification of an input of the application after one more stage takes it."""
    if known is None:
        return replace(taken, name=name)
    _check_fit(known, taken, name, key)
    if not (known.is_ranked and taken.is_ranked):
        return replace(taken, name=name) if taken.is_ranked else known
    return TensorSpec(name, taken.datatype, tuple(map(max, known.shape, taken.shape)))
