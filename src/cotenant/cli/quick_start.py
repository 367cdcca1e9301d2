"""Steps of the quick start: models, profile, servers, load, a picture that is read, a report.

A user could do each step with the other commands; the servers are real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.profiles.profile_file import Profile
from cotenant.repository import STATE_FOLDER
from cotenant.serve.server_process import RunningServer, running
from cotenant.wire.api import Array
from cotenant.wire.encode import ClientError
from cotenant.workload import Poisson, TenantLoad, Workload, for_capacity, with_rates

Infer = Callable[[str, Mapping[str, Array]], dict[str, Array]]
"""Runs a served model on inputs."""
PICTURE_LINES = ("Planned, promised and enforced", "Total: 1,234.56 EUR", "98 % answered in time")
CLIENT_COST_NS = 2_000_000
"""Core time of one query outside its model, with the load generator on the same machine; sets the rates of the demo."""
MOST_RATE = 40.0
"""Largest rate of a tenant in queries/s: above it, tiny models would load the front ends, not the scheduler."""
MOST_TRIES = 10
"""Most tries of a query of the picture."""
SLO_TIMES = 5.0
"""SLO of a tenant over the latency of its model alone, on one core at its largest declared shape."""
LEAST_SLO_NS = 20_000_000
SLO_SEGMENTS = 2
"""Least SLO in units of the longest segment of any model, and in ns. A segment may run at the arrival of a query, and
front ends and other queries take as long again."""
SLO_TEXT = (
    f"The SLOs come from this profile: {SLO_TIMES:g} times what the model takes alone, on one core at its largest "
    f"declared shape, at least {LEAST_SLO_NS / 1e6:g} ms and {SLO_SEGMENTS} times the longest segment of any model."
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration of the server in the demo."""

    name: str
    policy: str
    drop: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `cotenant serve`."""
        return ("--policy", self.policy, "--drop", self.drop)


CONTENDERS = (
    Contender("fcfs", "fcfs", "none"),
    Contender("shares", "shares", "hopeless"),
)
"""First come, first served without drops is the default of other servers. `shares` guarantees each tenant its quota,
then maximises the number of queries answered in time."""


def latency_targets_ms(profile: Profile) -> dict[str, int]:
    """The SLO of each model, from its profile, in whole milliseconds with two significant digits."""
    alone = {
        name: max(point.p50_ns for point in model.points if (point.items, point.cores) == (1, 1))
        for name, model in profile.models.items()
    }
    segments_ns = [
        sum(model.unit_ns[start:end]) * model.segment_ratio
        for model in profile.models.values()
        for start, end in pairwise(model.cuts)
    ]
    least_ns = max(LEAST_SLO_NS, SLO_SEGMENTS * max(segments_ns, default=0))
    return {name: round(float(f"{max(least_ns, SLO_TIMES * ns) / 1e6:.2g}")) for name, ns in alone.items()}


def demo_workload(profile: Profile, models: tuple[str, ...], cores: int, load: float, seconds: float) -> Workload:
    """Workload of all models, at `load` times the capacity of the cores, with equal work for each model.

    Models alternate between HTTP and gRPC. A model that would need more than MOST_RATE gets that rate, and the others
    share the rest.
    """
    service = {model: _service_ns(profile, model) for model in models}
    rates: dict[str, float] = {}
    while True:
        open_models = {model: ns for model, ns in service.items() if model not in rates}
        used = sum(rate * service[model] / 1e9 for model, rate in rates.items())
        if not open_models or load * cores <= used:
            break
        wanted = for_capacity(open_models, cores, (load * cores - used) / cores)
        capped = [model for model, rate in wanted.items() if rate > MOST_RATE]
        if not capped:
            rates.update(wanted)
            break
        rates.update(dict.fromkeys(capped, MOST_RATE))
    tenants = tuple(
        TenantLoad(model, model, Poisson(1.0), protocol=("http", "grpc")[position % 2])
        for position, model in enumerate(models)
    )
    workload = Workload(tenants, round(seconds * 1e9), seed=1)
    return with_rates(workload, {model: rates.get(model, 0.1) for model in models})


def _service_ns(profile: Profile, model: str) -> float:
    """Core time of one query: the model alone on one core, and the costs around it."""
    points = profile.models[model].points
    return (
        min(point.p50_ns for point in points if (point.shape, point.items, point.cores) == (0, 1, 1)) + CLIENT_COST_NS
    )


def with_retries(infer: Infer) -> Infer:
    """Repeat refused queries: after an overload of the machine, predictions stay too slow until new launches run.

    Raises ClientError after MOST_TRIES tries.
    """

    def repeated(model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for _ in range(MOST_TRIES - 1):
            with suppress(ClientError):
                return infer(model, inputs)
        return infer(model, inputs)

    return repeated


@contextmanager
def running_server(repository: Path, contender: Contender) -> Iterator[RunningServer]:
    """A running server of a contender; its log is a file in the state folder of the repository.

    Raises CotenantError if it does not start or stop.
    """
    log = repository / STATE_FOLDER / f"server-{contender.name}.log"
    with running("serve", str(repository), *contender.arguments, log=log) as server:
        yield server
    if server.process.returncode != 0:
        raise CotenantError(f"the server did not stop cleanly (status {server.process.returncode}); its log is {log}")
