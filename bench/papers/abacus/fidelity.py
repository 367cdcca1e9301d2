"""Fidelity of the simulator: the same arrivals through a real server and through the simulator, side by side.

Four quick-start tenants over HTTP, open loop, at 0.8, 1.2 and 2 times the measured capacity. The simulator runs the
same core and policy. It predicts as the server does, from a profile of this machine that observations correct. Its
world is the contention world as calibrated here. A server costs time besides its models: launches, front-ends, the
wire, slowness and noise in service. That is measured in runs of their own with other arrivals and at other loads,
before and after each compared run. It is not fitted to those. Each run is simulated several times with other noise, and
the outcomes are taken together: a simulator predicts a distribution. Below capacity the 99th percentile rests on few
slow queries, so those runs are longer. Errors are of the attainment (points) and of the 99th percentile of all answered
queries (%). In hindsight means with the costs of the compared run itself. That leaves out the drift of the machine, and
the remaining error is that of the simulator.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import goodput
from bench._server import cache_folder, serving
from bench._tenants import Inputs, ours, prepare, sample_all, saturation, warm_up, workload
from bench.papers.abacus._service import Meter, Service, between, model_ns, read_service
from cotenant.config import PolicySection, ServerConfig, load_server_config
from cotenant.execute.layout import device_cores, lanes_of
from cotenant.load import LoadResult, run_load_process
from cotenant.measure.contention_profile import ContentionProfile, calibrate
from cotenant.measure.solo import Effort
from cotenant.metrics import OutcomeLog, Summary, TenantSummary, summarise
from cotenant.predict.table import TablePredictor
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import SERVER_FILE, profile_path, trace_path
from cotenant.sim.scenario import Scenario, run_scenario, scenario_of
from cotenant.workload import Workload, for_capacity

NAME = "fidelity"
_SERVER = '[device]\nlanes = "single"\nisolation = "thread"\n'
"""All models in the server's process: the cost of a command to another process is one that `dispatch` measures."""
POLICIES: dict[str, dict[str, bool]] = {
    "edf": {},
    "shares": {},
    "most": {},
    "fair": {},
    "edf_plain": {"tail_aware": False},
    "overlap": {"barrier": False},
}
"""The compared policies, by the first part of these names, and their options."""
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
FACTORS, QUICK_FACTORS = {0.8: 0.7, 1.2: 1.4, 2.0: 2.4}, {1.2: 1.4}
"""The loads that are compared, each with the one at which its costs are measured. That is on the same side of capacity:
below it lanes fall idle now and then, models find colder caches and take longer. And it is not far away: a query that
is refused costs the front-ends less than one that is answered."""
CALIBRATION_SEEDS = 100
"""Added to the seed of the runs that a calibration is for; twice that for the next one, and so on."""
NOISES = 10
"""Simulations of one run, each with noise of its own."""
_NOISE_STEP = 1000
"""Between the seeds of their noise."""
BELOW_CAPACITY_SECONDS = 60.0
METRICS = (
    "attainment_error_points",
    "p99_error_pct",
    "attainment_error_in_hindsight_points",
    "p99_error_in_hindsight_pct",
)
_TICK_S = 0.5


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models are kept in the user's cache folder."""
    console = Console()
    root, service_ns = prepare(cache_folder() / "fidelity", goodput.MODELS, _SERVER, quick)
    settings = load_server_config(root / SERVER_FILE)
    profile = load_profile(profile_path(root))
    if quick:
        contention = calibrate(root, settings, Effort(budget_s=0.1, min_runs=3), window_s=0.1, rounds=2)
    else:
        contention = calibrate(root, settings, Effort())
    console.print(_contention_text(contention), highlight=False)
    inputs = sample_all(root, goodput.MODELS)
    share = for_capacity(service_ns, 1, 1.0)
    mix = {model: rate / sum(share.values()) for model, rate in share.items()}
    capacity = saturation(ours("fcfs", root, "--policy", "fcfs", "--drop", "none"), mix, inputs, quick)
    console.print(f"capacity: {capacity:.1f} queries/s", highlight=False)
    bench = _Bench(root, settings, profile, contention, mix, inputs, capacity, quick)
    rows = [row for policy in (list(POLICIES)[:1] if quick else POLICIES) for row in bench.compare(policy, console)]
    summary = _summary(rows)
    _show(console, rows, summary)
    if quick:
        console.print("quick: edf alone, one seed, one load, runs of 5 s, coarser profile and calibration")
    summary["capacity_per_s"] = capacity
    return {"summary": summary, "rows": rows, "seeds": QUICK_SEEDS if quick else SEEDS}


class _Bench:
    """One repository and mix, measured and simulated."""

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        profile: Profile,
        contention: ContentionProfile,
        mix: Mapping[str, float],
        inputs: Inputs,
        capacity: float,
        quick: bool,
    ) -> None:
        self.root = root
        self.settings = settings
        self.profile = profile
        self.contention = contention
        self.mix = mix
        self.inputs = inputs
        self.capacity = capacity
        self.quick = quick
        self.lanes = lanes_of(settings.device, device_cores(settings.device))
        self.cores = sum(lane.size for lane in self.lanes)

    def compare(self, policy: str, console: Console) -> list[dict[str, Any]]:
        """For each seed and load calibrate before and after the run of a policy. One row a run."""
        rows: list[dict[str, Any]] = []
        factors = QUICK_FACTORS if self.quick else FACTORS
        for seed, (factor, near) in product(QUICK_SEEDS if self.quick else SEEDS, factors.items()):
            before = self.calibrate(policy, near, seed, 0, rows, console)
            real, service = self.measure(policy, factor, seed)
            after = self.calibrate(policy, near, seed, 1, rows, console)
            base = between(before, after)
            own_share = self.capacity * near * base.front_end_ns / 1e9 / self.cores
            simulated = self.simulate(policy, factor, seed, base, own_share)
            row = _row(policy, factor, seed, real.summary, simulated, service, real.lag.p99_ns)
            rows.append({**row, **self._hindsight(policy, factor, seed, real.summary, service)})
        return rows

    def section(self, policy: str) -> PolicySection:
        """The configuration of one compared policy."""
        return self.settings.policy.over(policy.split("_")[0], POLICIES[policy], NAME)

    def calibrate(
        self, policy: str, factor: float, seed: int, turn: int, rows: list[dict[str, Any]], console: Console
    ) -> Service:
        """Measure what serving costs in a run of its own, and note it."""
        number = CALIBRATION_SEEDS * (1 + turn) + seed
        _, found = self.measure(policy, factor, number)
        console.print(f"{policy} at {factor:g} x: {_service_text(found)}", highlight=False)
        rows.append({"policy": policy, "what": "calibration", "seed": number, "load": factor, **asdict(found)})
        return found

    def workload(self, factor: float, seed: int) -> Workload:
        """The arrivals of one run."""
        rates = {model: self.capacity * factor * part for model, part in self.mix.items()}
        if self.quick:
            spans = (goodput.QUICK_SECONDS, goodput.QUICK_WARM_UP_S)
        else:
            spans = (BELOW_CAPACITY_SECONDS if factor < 1 else goodput.SECONDS, goodput.WARM_UP_S)
        return workload(self.root, "", rates, seed, *spans)

    def measure(self, policy: str, factor: float, seed: int) -> tuple[LoadResult, Service]:
        """A real server and a real client."""
        section = self.section(policy)
        given = [("--set", f"policy.{key}={str(value).lower()}") for key, value in section.options.items()]
        options = ("--policy", section.name, "--drop", "hopeless", *chain.from_iterable(given))
        with serving(self.root, *options) as server:
            url = server.http_url
            asyncio.run(warm_up(url, "", self.inputs, strict=False))
            before = model_ns(url)
            meter = Meter(server.process.pid)
            result = run_load_process(
                self.workload(factor, seed), http_url=url, inputs=self.inputs, on_tick=meter.tick, tick_s=_TICK_S
            )
            ran = {name: ns - before[name] for name, ns in model_ns(url).items()}
        scheduled = [record.scheduled_ns for record in result.records]
        front_end_ns = meter.per_query_ns(scheduled)
        table = TablePredictor(self.profile.tables(self.settings.predict.quantile))
        service = read_service(trace_path(self.root), table, result, ran, front_end_ns, self.cores)
        return result, service

    def simulate(self, policy: str, factor: float, seed: int, base: Service, own_share: float) -> Summary:
        """The same arrivals in the simulator, under several draws of its noise taken together."""
        scenario = self.scenario(factor, seed)
        section = self.section(policy)
        made = scenario.policy(section)
        assumptions = base.assumptions(self.capacity * factor, self.cores, own_share)
        contention = self.contention.contention()
        outcomes = OutcomeLog(scenario.slo_ns)
        for draw in range(NOISES):
            drawn = run_scenario(
                *(scenario, section, assumptions, seed),
                contention=contention,
                follower=scenario.online_model(made),
                noise_seed=seed + _NOISE_STEP * draw,
            )
            outcomes.extend(drawn)
        load = scenario.workload
        return summarise(
            outcomes,
            start_ns=load.warmup_ns,
            end_ns=load.duration_ns,
            slo_ns=scenario.slo_ns,
            tenants=list(scenario.slo_ns),
        )

    def _hindsight(
        self, policy: str, factor: float, seed: int, real: Summary, service: Service
    ) -> dict[str, float | None]:
        """With what this very run has shown of its service: what is left is not the drift of the machine."""
        own_share = self.capacity * factor * service.front_end_ns / 1e9 / self.cores
        total = self.simulate(policy, factor, seed, service, own_share).total
        points, pct = _errors(real.total, total)
        return {
            "attainment_in_hindsight": total.attainment,
            "p99_in_hindsight_ms": total.p99_ms,
            "attainment_error_in_hindsight_points": points,
            "p99_error_in_hindsight_pct": pct,
        }

    def scenario(self, factor: float, seed: int) -> Scenario:
        """Tenants, tables and lanes as the server has them."""
        load = self.workload(factor, seed)
        return scenario_of(self.root, load, self.profile, self.lanes, self.settings.predict.quantile)


# --- results ----------------------------------------------------------------------------------------------------------


def _errors(real: TenantSummary, simulated: TenantSummary) -> tuple[float, float]:
    """Simulated less measured attainment in points, and p99 in percent of the measured one; nan without answers."""
    points = 100 * ((simulated.attainment or 0.0) - (real.attainment or 0.0))
    return points, 100 * ((simulated.p99_ns or math.nan) / (real.p99_ns or math.nan) - 1)


def _row(
    policy: str, factor: float, seed: int, real: Summary, simulated: Summary, service: Service, lag_p99_ns: int
) -> dict[str, Any]:
    measured, guessed = real.total, simulated.total
    points, pct = _errors(measured, guessed)
    row: dict[str, Any] = {
        "policy": policy,
        "what": "run",
        "load": factor,
        "seed": seed,
        "offered": measured.offered,
        "offered_simulated": guessed.offered // NOISES,
        "attainment": measured.attainment,
        "attainment_simulated": guessed.attainment,
        "attainment_error_points": points,
        "p99_ms": measured.p99_ms,
        "p99_simulated_ms": guessed.p99_ms,
        "p99_error_pct": pct,
        "p50_ms": measured.p50_ms,
        "p50_simulated_ms": guessed.p50_ms,
        "send_lag_p99_ms": lag_p99_ns / 1e6,
    }
    for line in real.tenants:
        other = simulated.tenant(line.tenant)
        row[f"attainment_{line.tenant}"] = line.attainment
        row[f"attainment_simulated_{line.tenant}"] = other.attainment
        row[f"p99_ms_{line.tenant}"] = line.p99_ms
        row[f"p99_simulated_ms_{line.tenant}"] = other.p99_ms
    return {**row, **{f"service_{name}": value for name, value in asdict(service).items()}}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each error at its worst load, over the medians of its absolute value over the seeds; and means over all runs."""
    runs = [row for row in rows if row["what"] == "run"]
    summary = {}
    for metric in METRICS:
        medians: dict[tuple[str, float], float] = {}
        for key in dict.fromkeys((row["policy"], row["load"]) for row in runs):
            errors = [abs(row[metric]) for row in runs if (row["policy"], row["load"]) == key]
            medians[key] = statistics.median(errors)
            summary[f"{metric}_{key[0]}_{key[1]:g}x".replace(".", "_")] = medians[key]
        summary[metric] = max(medians.values())
        summary[f"{metric}_mean"] = statistics.fmean(abs(row[metric]) for row in runs)
    return summary


_SHOWN = (
    *("attainment", "attainment_simulated", "attainment_error_points", "attainment_error_in_hindsight_points"),
    *("p99_ms", "p99_simulated_ms", "p99_error_pct", "p99_error_in_hindsight_pct"),
)
_TEXTS = ("{:.3f}", "{:.3f}", "{:+.1f}", "{:+.1f}", "{:.0f}", "{:.0f}", "{:+.1f}", "{:+.1f}")


def _show(console: Console, rows: Sequence[dict[str, Any]], summary: Mapping[str, float]) -> None:
    table = Table(
        "load", "seed", "attained", "simulated", "points", "hindsight", "p99 ms", "simulated", "%", "hindsight"
    )
    table.title = "The same arrivals, served and simulated"
    for row in rows:
        if row["what"] == "run":
            values = [row[key] for key in _SHOWN]
            cells = [
                text.format(math.nan if value is None else value) for text, value in zip(_TEXTS, values, strict=True)
            ]
            table.add_row(f"{row['policy']} {row['load']:g} x", str(row["seed"]), *cells)
    console.print(table)
    console.print(
        f"worst load, median over the seeds: {summary['attainment_error_points']:.1f} points, "
        f"{summary['p99_error_pct']:.1f} % of p99; in hindsight {summary['attainment_error_in_hindsight_points']:.1f} "
        f"points, {summary['p99_error_in_hindsight_pct']:.1f} %",
        highlight=False,
    )


def _contention_text(found: ContentionProfile) -> str:
    drawn = ", ".join(f"{each / 1e9:.1f}" for each in found.drawn_bytes_per_s)
    state = "not saturated" if found.bandwidth_bytes_per_s is None else "saturated"
    slow = ", ".join(
        f"{name} {model.sensitivity.slowdown:.2f}" for name, model in found.models.items() if model.sensitivity
    )
    return f"memory: one core and more draw {drawn} GB/s ({state}); slowdown beside antagonists: {slow}"


def _service_text(service: Service) -> str:
    slow = ", ".join(f"{name} {value:.2f}" for name, value in service.slowness.items())
    return (
        f"{service.launch_ns / 1e3:.0f} us a launch, {service.front_end_ns / 1e3:.0f} us of front-ends a query, "
        f"{service.wire_ns / 1e3:.0f} us on the wire, slowness {slow}, noise {service.noise:.2f}, "
        f"busy {service.busy_share:.2f}"
    )
