"""Served application: an application matched with served models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cotenant.repository.application_form import ApplicationForm, form_of
from cotenant.repository.application_spec import ApplicationSpec
from cotenant.serve.models.served_models import ServedModel
from cotenant.wire.api import ServeError, Status

FindModel = Callable[[str], ServedModel]
"""Returns the default version of a served model. Raises ServeError with the reason for any other name."""


@dataclass(frozen=True, slots=True)
class ServedApplication(ApplicationForm):
    """An application of which all models are served and match."""

    models: tuple[ServedModel, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants of the stages."""
        return tuple(model.tenant.name for model in self.models)

    def still_served(self) -> ApplicationSpec:
        """Name and SLO of its queries. The model of a stage is looked up when the stage starts."""
        return self.spec


def fit(spec: ApplicationSpec, find: FindModel, shares_ns: Mapping[str, int] | None = None) -> ServedApplication:
    """Match an application with served models. `shares_ns`: stage budgets of a plan, by stage.

    Raises ServeError for a model that is not served, and ConfigError with the key for tensors that do not match.
    """
    models: list[ServedModel] = []
    for stage in spec.stages:
        try:
            models.append(find(stage.model))
        except ServeError as error:
            raise ServeError(
                Status.UNAVAILABLE, f"application {spec.name!r}: stage {stage.name!r}: {error.message}"
            ) from None
    form = form_of(spec, models, shares_ns)
    graph = replace(form.spec.graph, smallest=tuple(model.smallest_shape for model in models))
    return ServedApplication(replace(form.spec, graph=graph), form.metadata, tuple(models))
