"""An application of a server: fitted to the models that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cotenant.repository.application_form import ApplicationForm, form_of
from cotenant.repository.application_spec import ApplicationSpec
from cotenant.serve.models.served_models import ServedModel
from cotenant.wire.api import ServeError, Status

FindModel = Callable[[str], ServedModel]
"""The default version of a model that is served. Raises ServeError, with the reason, for one that is not."""


@dataclass(frozen=True, slots=True)
class ServedApplication(ApplicationForm):
    """An application whose models are all served and fit together."""

    models: tuple[ServedModel, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whom the stages are queries of."""
        return tuple(model.tenant.name for model in self.models)

    def still_served(self) -> ApplicationSpec:
        """What its queries have their name and SLO of. Its stages are looked up when they start."""
        return self.spec


def fit(spec: ApplicationSpec, find: FindModel, shares_ns: Mapping[str, int] | None = None) -> ServedApplication:
    """Fit an application to the models that are served. `shares_ns` is how a plan divides the SLO, by stage.

    Raises ServeError for a model that is not served, ConfigError, which names the key and what was expected, where
    tensors do not fit.
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
