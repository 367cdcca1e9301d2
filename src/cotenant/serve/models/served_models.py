"""Served models: their protocol metadata, and how a request becomes a query."""

from __future__ import annotations

import itertools
import json
import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct

from cotenant.config import NS_PER_MS
from cotenant.execute.open_model import engine_of
from cotenant.execute.protocol import Loaded
from cotenant.measure.inputs import DeclaredShape
from cotenant.measure.load_spec import VersionFacts
from cotenant.measure.opened_model import remember_verdict
from cotenant.profiles.merging import SINGLE, Merging
from cotenant.profiles.profile_file import ModelProfile
from cotenant.types import Tenant
from cotenant.wire.api import Array, InferRequest, ModelMetadata, ServeError, Status
from cotenant.wire.codec import shown, validate
from cotenant.wire.config_keys import config_tensor
from cotenant.wire.model_limits import carried
from cotenant.work import CPU

_log = logging.getLogger("cotenant.merging")
_MOST_MERGE_KEYS = 4096
"""Maximum number of input shapes with a merge key per model: clients choose shapes, and memory must stay bounded."""

_NEXT_KEY = itertools.count()
"""Merge keys, unique over all models: a model and its successor never use one key for different shapes."""


class _NotLoaded:
    def close(self) -> None:
        """No resource to release."""


NOT_LOADED: Loaded = _NotLoaded()
"""Placeholder for a model that the executor has not loaded."""


class QueryForm(Struct, frozen=True, gc=False):
    """Scheduling attributes of a request: rows, index of the declared shape, and merge key."""

    items: int
    shape: int
    merge_key: int


@dataclass(slots=True)
class ServedModel:
    """A model version in service. `tenant`: its owner in the core. `loaded`: the executor's handle."""

    facts: VersionFacts
    profile: ModelProfile
    tenant: Tenant
    metadata: ModelMetadata
    loaded: Loaded
    _by_elements: tuple[tuple[int, int], ...]
    _texts: tuple[str, ...]
    """Inputs that the model's engine takes as text."""
    is_over: bool = False
    """No longer served, with or without a successor of the same name."""
    successor: ServedModel | None = None
    """Version that takes its queries once it is over, except the queries in `ending`."""
    ending: frozenset[int] = frozenset()
    """Queries in its last launches."""
    merging: Merging = SINGLE
    """Merging verdict: whether its queries are merged, and why."""
    _merge_keys: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)

    @property
    def merges(self) -> bool:
        """Whether its queries are merged into batches."""
        return self.merging.is_allowed

    @property
    def batching(self) -> str:
        """Configured requirement for merging (`model.batching`)."""
        return self.facts.found.config.model.batching

    def end_merging(self, reason: str) -> None:
        """Stop merging its queries until the process ends: each further query gets a unique merge key."""
        self.merging = Merging("refused", reason)
        remember_verdict(self.facts.digest, self.merging)
        _log.error("model %r: merging is off, its queries run alone from now on: %s", self.metadata.name, reason)

    @property
    def version(self) -> str:
        """Version on the wire."""
        return str(self.facts.found.version)

    @property
    def counted_as(self) -> str:
        """Name under which its queries are counted."""
        return self.tenant.name

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants of its queries: one."""
        return (self.tenant.name,)

    def takes_queries_of(self, other: ServedModel) -> bool:
        """Whether it can run queries that were checked for `other`: same tensors, batch limit and shapes."""
        mine, theirs = self.metadata, other.metadata
        same = mine.inputs == theirs.inputs and mine.outputs == theirs.outputs
        return same and mine.max_batch_size == theirs.max_batch_size and self.shapes == other.shapes

    def version_of(self, query: int) -> str:
        """Wire version of the model that ran a query: this version or a successor."""
        served = self
        while served.successor is not None and query not in served.ending:
            served = served.successor
        return served.version

    def still_served(self) -> Tenant:
        """Tenant for a query that is being submitted. Called under the driver's lock. Raises ServeError (UNAVAILABLE)
        if the version is over and has no successor."""
        if self.successor is not None:
            return self.successor.still_served()
        if self.is_over:
            sentence = f"model {self.metadata.name!r} was reloaded or unloaded meanwhile; send the request again"
            raise ServeError(Status.UNAVAILABLE, sentence)
        return self.tenant

    def form(self, request: InferRequest) -> QueryForm:
        """Validate a request and derive its scheduling attributes. Raises ServeError (INVALID_ARGUMENT)."""
        validate(request, self.metadata)
        batched = self.metadata.max_batch_size > 0
        arrays = [request.inputs[spec.name] for spec in self.metadata.inputs]
        items = len(arrays[0]) if batched else 1
        if batched and len(arrays) > 1 and any(len(array) != items for array in arrays):
            rows = ", ".join(
                f"{spec.name!r} has {len(array)}" for spec, array in zip(self.metadata.inputs, arrays, strict=True)
            )
            raise ServeError(
                Status.INVALID_ARGUMENT,
                f"model {self.metadata.name!r}: inputs differ in their number of rows: {rows}; expected equal numbers",
            )
        for name in self._texts:
            _check_text(self.metadata.name, name, request.inputs[name])
        row_shapes = tuple([array.shape[1:] if batched else array.shape for array in arrays])
        key = self._merge_keys.get(row_shapes)
        if not self.merging.is_allowed and batched:
            key = next(_NEXT_KEY)
        elif key is None:
            if len(self._merge_keys) >= _MOST_MERGE_KEYS:
                self._merge_keys.clear()  # the numbers are never reused, so a key never means two shapes
            key = self._merge_keys.setdefault(row_shapes, next(_NEXT_KEY))
        return QueryForm(items, self._nearest_shape(arrays, items), key)

    def _nearest_shape(self, arrays: list[Array], items: int) -> int:
        """Index of the smallest declared shape with at least as many elements per row; else of the largest."""
        if len(self._by_elements) == 1:
            return 0
        elements = sum([array.size for array in arrays]) // items
        at = bisect_left(self._by_elements, (elements, 0))
        return self._by_elements[min(at, len(self._by_elements) - 1)][1]

    @property
    def shapes(self) -> tuple[DeclaredShape, ...]:
        """Declared shapes, each by input."""
        return self.facts.shapes

    def config(self) -> dict[str, Any]:
        """Configuration in the form of the protocol's model configuration extension."""
        meta = self.metadata
        config: dict[str, Any] = {
            "name": meta.name,
            "platform": meta.platform,
            "backend": engine_of(self.facts.found.path).backend,
            "max_batch_size": meta.max_batch_size,
            "version_policy": {"latest": {"num_versions": len(meta.versions)}},
            "input": [config_tensor(spec, batched=meta.max_batch_size > 0) for spec in meta.inputs],
            "output": [config_tensor(spec, batched=meta.max_batch_size > 0) for spec in meta.outputs],
            "parameters": {
                "slo_ms": {"string_value": f"{self.tenant.slo_ns / NS_PER_MS:g}"},
                "tenant": {"string_value": self.tenant.name},
                "shapes": {"string_value": json.dumps([_plain(shape) for shape in self.shapes])},
                "segments": {"string_value": str(len(self.tenant.cuts) - 1)},
                "merging": {"string_value": self.merging.summary},
            },
        }
        kind = "cores" if self.facts.device == CPU else "sms"
        for name, ratios in self.facts.gains.items():
            for size, ratio in ratios.items():
                text = f"by {name}: {ratio:.2f} of the time of a sequential run"
                config["parameters"][f"on_{size}_{kind}"] = {"string_value": text}
        if meta.max_batch_size:
            config["dynamic_batching"] = {"max_queue_delay_microseconds": 0}
        return config

    @property
    def smallest_shape(self) -> int:
        """Index of the declared shape with the fewest elements: the smallest possible query."""
        return self._by_elements[0][1]


def _plain(shape: DeclaredShape) -> dict[str, list[int]]:
    return {name: list(dims) for name, dims in shape.items()}


CutsOf = Callable[[VersionFacts, tuple[int, ...]], tuple[int, ...]]
"""Returns the cuts (unit indices) of a model, from the cuts of its profile."""


def serve_model(
    facts: VersionFacts,
    profile: ModelProfile,
    *,
    preempt: bool,
    cuts_of: CutsOf | None = None,
) -> ServedModel:
    """Create the served version of a profiled model. `cuts_of` may change the cuts of the profile.

    Raises ConfigError if the protocol cannot carry its tensors, or a request with all of its inputs.
    """
    config = facts.found.config
    batched = config.model.max_batch > 1
    name = facts.found.model
    cuts = profile.cuts if preempt else (0, facts.unit_count)
    if cuts_of is not None:
        cuts = cuts_of(facts, cuts)
    tenant = Tenant(
        name=facts.found.tenant,
        slo_ns=round(config.tenant.slo_ms * NS_PER_MS),
        cuts=cuts,
        max_batch=config.model.max_batch,
        weight=config.tenant.weight,
        share=config.tenant.share or 0.0,
        rate=config.tenant.rate or UNSET,
        max_rate=config.tenant.max_rate or UNSET,
        priority=config.tenant.priority,
        max_queue=config.tenant.max_queue,
        splits=facts.splits if profile.splits is UNSET else profile.splits,
    )
    inputs, outputs = carried(name, facts.inputs, facts.outputs, facts.shapes)
    metadata = ModelMetadata(
        name=name,
        versions=(str(facts.found.version),),
        platform=engine_of(facts.found.path).platform,
        inputs=inputs,
        outputs=outputs,
        max_batch_size=config.model.max_batch if batched else 0,
    )
    by_elements = sorted(
        (sum(math.prod(dims[1:] if batched else dims) for dims in shape.values()), index)
        for index, shape in enumerate(facts.shapes)
    )
    texts = tuple(spec.name for spec in metadata.inputs if spec.datatype == "BYTES")
    forms = tuple(by_elements), texts
    return ServedModel(facts, profile, tenant, metadata, NOT_LOADED, *forms, merging=facts.merging)


def _check_text(model: str, name: str, array: Array) -> None:
    """Check that each element is UTF-8, before it is merged with other queries. Raises ServeError."""
    items = array.ravel().tolist()
    try:
        b"\0".join(items).decode()  # in one call: no UTF-8 sequence continues after a zero byte
    except UnicodeDecodeError:
        at = next(at for at, item in enumerate(items) if not _is_text(item))
        raise ServeError(
            Status.INVALID_ARGUMENT,
            f"model {model!r}: input {name!r} has {shown(items[at])} as element {at}, expected UTF-8 text",
        ) from None


def _is_text(item: bytes) -> bool:
    try:
        item.decode()
    except UnicodeDecodeError:
        return False
    return True
