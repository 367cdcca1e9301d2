"""`cotenant.sweep`: one simulation for each value of a setting, of a policy, of the rates or of an assumption."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from cotenant.api.assumed import AssumedModel
from cotenant.api.simulation import SimulatedRun, Simulation, SimulationOptions, workload_of
from cotenant.errors import ConfigError
from cotenant.measure.campaign import OnStep
from cotenant.report.svg import Chart
from cotenant.tabular import Tabular
from cotenant.workload import Workload

RATE, POLICY, NOISE, DECISION_US = "rate", "policy", "noise", "decision_us"
PLAIN_KEYS = (RATE, POLICY, NOISE, DECISION_US)
"""Keys besides those of `cotenant.toml` and of tenants: factor on all rates, name of a policy, two assumptions."""
MOST_VALUES, MOST_NOISE = 100, 10.0
_log = logging.getLogger("cotenant.simulate")


@dataclass(frozen=True, slots=True)
class SweepResult(Tabular):
    """Runs by value of a key. The sequences are equally long; interrupted sweeps have the values that were done."""

    key: str
    values: Sequence[object]
    runs: Sequence[SimulatedRun]

    @property
    def tenants(self) -> list[str]:
        """Names of the loads."""
        return [each.tenant for each in self.runs[0].summary.tenants] if self.runs else []

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each value: the attainment of each tenant (0 to 1), the least of them, and goodput per second.

        Keys: value, attainment.TENANT, least_attainment, goodput_per_s.
        """
        found = []
        for value, run in zip(self.values, self.runs, strict=True):
            by_tenant = {each.tenant: each.attainment for each in run.summary.tenants}
            known = [each for each in by_tenant.values() if each is not None]
            goodput = sum(each.goodput_per_s for each in run.summary.tenants)
            shares = {f"attainment.{name}": share for name, share in by_tenant.items()}
            least = min(known, default=None)
            found.append({"value": value, **shares, "least_attainment": least, "goodput_per_s": goodput})
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data: the key, and for each value the run as `SimulatedRun.to_json`."""
        runs = [{"value": value, **run.to_json()} for value, run in zip(self.values, self.runs, strict=True)]
        return {"simulated": True, "key": self.key, "runs": runs}

    def svg(self) -> str:
        """A picture of attainment against the value, as a self-contained SVG. Values that are no numbers are placed
        side by side."""
        numbers = [value for value in self.values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        places = [float(each) for each in (numbers if len(numbers) == len(self.values) else range(len(self.values)))]
        low, high = min(places, default=0.0), max(places, default=1.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        label = self.key if numbers else f"{self.key}: {', '.join(map(str, self.values))}"
        chart = Chart(
            760, 380, title="SLO attainment", x=(low, high), y=(0.0, 1.0), x_label=label, y_format=lambda y: f"{y:.0%}"
        )
        for series, tenant in enumerate(self.tenants):
            found = [run.summary.tenant(tenant).attainment for run in self.runs]
            points = [(place, share) for place, share in zip(places, found, strict=True) if share is not None]
            chart.line(points, f"s{series}")
            chart.marks(points, "dot", f"s{series}")
            if points:
                chart.label(chart.x.end - 4, chart.y(0.0) - 8 - 16 * series, tenant, f"c{series} end")
        return chart.file()


def sweep(
    workload: str | os.PathLike[str] | Workload | Mapping[str, Any],
    repository: str | os.PathLike[str] | Mapping[str, AssumedModel],
    key: str,
    values: Sequence[object],
    *,
    policy: str | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    noise: float = 0.05,
) -> SweepResult:
    """Simulate a workload once for each value of a key, as `cotenant sweep` does.

    `key` is a key of `cotenant.toml` or of a tenant as in the settings of `simulate` ("tenant.resnet.slo_ms"), or
    "rate" (a factor on all rates), "policy", "noise" or "decision_us". The other arguments are those of `simulate`.

    >>> import cotenant
    >>> workload = {"duration_s": 10.0, "seed": 1, "tenant": [{"model": "vision", "rate": 20.0}]}
    >>> models = {"vision": cotenant.AssumedModel(slo_ms=200, latency_ms=50)}
    >>> found = cotenant.sweep(workload, models, "rate", [0.25, 2.0], settings={"device.cores": [0]})
    >>> [row["least_attainment"] > 0.9 for row in found.rows()]
    [True, False]

    Raises CotenantError for files, keys and values that are wrong.
    """
    models = dict(repository) if isinstance(repository, Mapping) else Path(repository)
    spec = workload_of(workload, models)
    policies = () if policy is None else (policy,)
    steps = swept(spec, models, key, values, policies, settings, SimulationOptions(noise=noise))
    return SweepResult(key, tuple(values), tuple(run for _, run in steps))


def swept(
    workload: Workload,
    repository: Path | Mapping[str, AssumedModel],
    key: str,
    values: Sequence[object],
    policies: Sequence[str],
    settings: Mapping[str, object],
    options: SimulationOptions,
    on_step: OnStep = lambda done, total, text: None,
) -> Iterator[tuple[object, SimulatedRun]]:
    """Each value with its run, one after the other. All values are checked before the first run. Raises as `sweep`."""
    if not 1 <= len(values) <= MOST_VALUES:
        raise ConfigError(f"{key}: {len(values)} values, expected from 1 to {MOST_VALUES}")
    if key not in PLAIN_KEYS and "." not in key:
        raise ConfigError(
            f"the key is {key!r}, expected SECTION.KEY, tenant.NAME.KEY or one of {', '.join(PLAIN_KEYS)}"
        )
    made = [_simulation(workload, repository, key, value, policies, settings, options) for value in values]
    for number, (value, simulation) in enumerate(zip(values, made, strict=True)):
        on_step(number, len(values), f"{key} = {value}")
        [run] = simulation.runs([workload.seed])
        yield value, run


def _simulation(
    workload: Workload,
    repository: Path | Mapping[str, AssumedModel],
    key: str,
    value: object,
    policies: Sequence[str],
    settings: Mapping[str, object],
    options: SimulationOptions,
) -> Simulation:
    if key == POLICY:
        return Simulation(workload, repository, settings, (str(value),), options, _log.warning)
    if key in PLAIN_KEYS:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
            raise ConfigError(f"{key} is {value!r}, expected a number from 0")
        if key == RATE and value == 0:
            raise ConfigError("rate is 0, expected a positive factor")
        if key == NOISE and value > MOST_NOISE:
            raise ConfigError(f"noise is {value:g}, expected a number up to {MOST_NOISE:g}")
        field = "factor" if key == RATE else key
        options = replace(options, **{field: float(value)})  # type: ignore[arg-type]  # fields of numbers
        return Simulation(workload, repository, settings, policies, options, _log.warning)
    return Simulation(workload, repository, {**settings, key: value}, policies, options, _log.warning)
