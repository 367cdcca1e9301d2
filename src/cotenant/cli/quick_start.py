"""The quick start from one end to the other: models, profile, servers, load, a picture read, a report.

Everything is what a user would do by hand with the other commands; the servers are real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.profile.profile_file import Profile
from cotenant.repository import STATE_FOLDER
from cotenant.serve.server_process import RunningServer, running
from cotenant.wire.api import Array
from cotenant.wire.encode import ClientError
from cotenant.workload import Poisson, TenantLoad, Workload, for_capacity, with_rates

Ask = Callable[[str, Mapping[str, Array]], dict[str, Array]]
"""Runs a served model on inputs."""
PICTURE_LINES = ("Planned, promised and enforced", "Total: 1,234.56 EUR", "98 % answered in time")
CLIENT_COST_NS = 2_000_000
"""Core time of one query outside its model when load generator and server share the machine: a round figure, measured
on two cores with all protocols mixed; it only sets the rates of the demo."""
MOST_RATE = 40.0
"""Queries/s of one tenant at most: beyond, tiny models would measure the front-ends and not the scheduling."""
ASKED = 10
"""Times that a query of the picture is asked at most."""
SLO_TIMES = 5.0
"""SLO of a tenant over the latency of its model alone, on one core at its largest declared shape."""
LEAST_SLO_NS = 20_000_000
STRETCHES = 2
"""An SLO is never less than this, nor than so many of the longest stretches for which any model keeps a core: one may
be under way when a query comes, and reading, answering and the others' queries take as long again."""
SLO_TEXT = (
    f"The SLOs come from this profile: {SLO_TIMES:g} times what the model takes alone, on one core at its largest "
    f"declared shape, at least {LEAST_SLO_NS / 1e6:g} ms and {STRETCHES} of the longest stretches for which a model "
    "keeps a core."
)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of serving that the demo shows."""

    name: str
    policy: str
    drop: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """For `cotenant serve`."""
        return ("--policy", self.policy, "--drop", self.drop)


CONTENDERS = (
    Contender("fcfs", "fcfs", "none"),
    Contender("shares", "shares", "hopeless"),
)
"""First come, first served without drops is what servers do unless told otherwise; shares gives everybody what it is
entitled to, then answers as many as it can."""


def latency_targets_ms(profile: Profile) -> dict[str, int]:
    """The SLO of each model in whole milliseconds, with two digits that count: what the machine can do says it."""
    alone = {
        name: max(point.p50_ns for point in model.points if (point.items, point.cores) == (1, 1))
        for name, model in profile.models.items()
    }
    stretches = [
        sum(model.unit_ns[start:end]) * model.segment_ratio
        for model in profile.models.values()
        for start, end in pairwise(model.cuts)
    ]
    least_ns = max(LEAST_SLO_NS, STRETCHES * max(stretches, default=0))
    return {name: round(float(f"{max(least_ns, SLO_TIMES * ns) / 1e6:.2g}")) for name, ns in alone.items()}


def demo_workload(profile: Profile, models: tuple[str, ...], cores: int, load: float, seconds: float) -> Workload:
    """All models at once, at `load` times what the cores can do, the work shared equally where rates allow.

    Models alternate between HTTP and gRPC. A model whose share would need more than MOST_RATE gets that rate, and the
    others share the rest.
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
    """Core time of one query: the model alone on one core, and what surrounds it."""
    points = profile.models[model].points
    return (
        min(point.p50_ns for point in points if (point.shape, point.items, point.cores) == (0, 1, 1)) + CLIENT_COST_NS
    )


def patiently(ask: Ask) -> Ask:
    """Ask again what is refused: after an overload that others on the machine took part in, a server believes its
    models to be slower than they are, until it has tried them. Raises ClientError after ASKED times."""

    def asked(model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for _ in range(ASKED - 1):
            with suppress(ClientError):
                return ask(model, inputs)
        return ask(model, inputs)

    return asked


@contextmanager
def running_server(repository: Path, contender: Contender) -> Iterator[RunningServer]:
    """A server of a contender until the block ends; its log goes to a file in the repository's state folder.

    Raises CotenantError when it does not start or stop.
    """
    log = repository / STATE_FOLDER / f"server-{contender.name}.log"
    with running("serve", str(repository), *contender.arguments, log=log) as server:
        yield server
    if server.process.returncode != 0:
        raise CotenantError(f"the server did not stop cleanly (status {server.process.returncode}); its log is {log}")
