"""The benchmark `fidelity` reads from a served run what the simulator must assume: shown on runs of known truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench._registry import BenchError
from bench.papers.abacus import _service, fidelity
from bench.papers.abacus._service import Meter, Service, front_end_cpu_ns, read_service
from cotenant.config import PolicySection
from cotenant.core.actions import Action, Launch
from cotenant.core.events import Event, LaunchEnded
from cotenant.load import Lag, LiveStats, LoadResult
from cotenant.metrics import summarise
from cotenant.policies import policy_class
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.sim.scenario import Assumptions, Scenario, run_scenario, scenario_of
from cotenant.trace import TraceWriter, header
from cotenant.workload import parse_workload
from onnx_samples import residual_cnn
from repositories import add_sub, config, write_model
from scenario import MS, TWO_LANES

WORKLOAD = {
    "seed": 4,
    "duration_s": 20.0,
    "tenant": [{"model": "add_sub", "rate": 60.0}, {"model": "cnn", "rate": 30.0}],
}


def model_profile(latency_ns: int, units: int) -> ModelProfile:
    point = Point(0, 1, 1, 9, *(latency_ns,) * 4)
    return ModelProfile("", (point,), (1,) * units, tuple(range(units + 1)), 1.1)


PROFILE = Profile(this_device(), "", "", {"add_sub": model_profile(5 * MS, 1), "cnn": model_profile(50 * MS, 4)})
TABLE = TablePredictor(PROFILE.tables())
TRUTH = Assumptions(
    noise=0.1,
    decision_ns=300_000,
    front_end_share=0.1,
    request_ns=400_000,
    response_ns=1_200_000,
    response_noise=0.3,
    inflation={"add_sub": 1.3, "cnn": 1.05},
)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    write_model(tmp_path, "add_sub", config(slo_ms=60), {1: add_sub})
    write_model(tmp_path, "cnn", config(slo_ms=250), {1: residual_cnn})
    return scenario_of(tmp_path, parse_workload(WORKLOAD), PROFILE, TWO_LANES, "p50")


def served(path: Path, scenario: Scenario, truth: Assumptions, seed: int) -> tuple[LoadResult, dict[str, int]]:
    """A run whose every cost is known, as a server and a client would have reported it."""
    head = header(policy_class("edf")(TWO_LANES), TABLE, scenario.tenants, scenario.machine, created="")
    writer = TraceWriter(path.open("wb"), head)
    ran: dict[str, int] = {}
    began: dict[int, tuple[Launch, int]] = {}

    def log(now: int, event: Event, actions: list[Action]) -> None:
        writer(now, event, actions)
        if isinstance(event, LaunchEnded):
            launch, at = began.pop(event.launch)
            ran[launch.work.tenant] = ran.get(launch.work.tenant, 0) + (now - at - truth.decision_ns) * len(
                launch.queries
            )
        began.update({action.id: (action, now) for action in actions if isinstance(action, Launch)})

    outcomes = run_scenario(scenario, PolicySection(), truth, seed, log)
    writer.close()
    load = scenario.workload
    return LoadResult((), outcomes, load.duration_ns, 0, load.duration_ns, seed, "", Lag(0, 0, 0)), ran


def test_what_a_run_cost_is_read_from_its_trace(tmp_path: Path, scenario: Scenario) -> None:
    result, ran = served(tmp_path / "trace", scenario, TRUTH, seed=5)
    found = read_service(tmp_path / "trace", TABLE, result, ran, 2_500_000.0, 2)
    assert found.launch_ns == pytest.approx(TRUTH.decision_ns, rel=0.01)
    assert found.noise == pytest.approx(TRUTH.noise, rel=0.1)
    assert found.wire_ns == pytest.approx(TRUTH.request_ns + TRUTH.response_ns, rel=0.05)
    assert found.shortest_wire_ns < found.wire_ns
    assert found.slowness["add_sub"] == pytest.approx(1.3 / 0.9, rel=0.03)
    assert found.slowness["cnn"] == pytest.approx(1.05 / 0.9, rel=0.03)
    assert 0.9 < found.busy_share <= 1.01
    assumed = found.assumptions(90.0, 2, own_share=0.1)
    assert assumed.front_end_share == pytest.approx(90.0 * 0.0025 / 2)
    assert assumed.request_ns + assumed.response_ns == round(found.wire_ns)
    assert assumed.inflation["cnn"] == pytest.approx(1.05, rel=0.03)
    assert assumed.decision_ns == round(found.launch_ns)


def test_a_run_that_was_read_can_be_simulated_again(tmp_path: Path, scenario: Scenario) -> None:
    """From one seed to another: attainment and tail come out as in the run that was never looked at."""
    result, ran = served(tmp_path / "trace", scenario, TRUTH, seed=5)
    found = read_service(tmp_path / "trace", TABLE, result, ran, 2_500_000.0, 2)
    truth, guess, naive = (
        summarise(run_scenario(scenario, PolicySection(), each, 6), end_ns=scenario.workload.duration_ns).total
        for each in (TRUTH, found.assumptions(90.0, 2, own_share=0.1), Assumptions())
    )
    assert None not in (truth.attainment, guess.attainment, naive.attainment, truth.p99_ns, guess.p99_ns)
    assert guess.attainment == pytest.approx(truth.attainment, abs=0.02)
    assert guess.p99_ns == pytest.approx(truth.p99_ns, rel=0.05)
    assert naive.attainment > truth.attainment + 0.05  # what was read is what makes the difference


def test_a_trace_that_lacks_queries_is_refused(tmp_path: Path, scenario: Scenario) -> None:
    result, ran = served(tmp_path / "trace", scenario, TRUTH, seed=5)
    lines = (tmp_path / "trace").read_bytes().splitlines(keepends=True)
    (tmp_path / "trace").write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(BenchError, match="arrivals of"):
        read_service(tmp_path / "trace", TABLE, result, ran, 1.0, 2)


def stats(elapsed_ns: int, sending: bool = True) -> LiveStats:
    return LiveStats(elapsed_ns, 10**10, (), 0, sending)


def test_front_ends_cost_what_their_threads_spend(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([5 * MS, 30 * MS, 45 * MS])
    monkeypatch.setattr(_service, "front_end_cpu_ns", lambda pid: next(spent))
    meter = Meter(1)
    for elapsed in (100 * MS, 150 * MS, 300 * MS):
        meter.tick(stats(elapsed))
    meter.tick(stats(900 * MS, sending=False))
    # 40 ms were spent from 100 to 300 ms, when four of the queries were due.
    assert meter.per_query_ns([0, 100 * MS, 120 * MS, 200 * MS, 299 * MS, 300 * MS]) == 10 * MS
    with pytest.raises(BenchError, match="too short"):
        Meter(1).per_query_ns([])


def test_threads_of_a_process_are_counted() -> None:
    import os

    before = front_end_cpu_ns(os.getpid())
    total = 0
    while front_end_cpu_ns(os.getpid()) == before and total < 10**9:
        total += 1
    assert front_end_cpu_ns(os.getpid()) > before


def test_summary_takes_the_worst_load_of_medians_over_seeds() -> None:
    errors = {(0.8, 1): (1.0, 20.0), (0.8, 2): (-3.0, 0.0), (0.8, 3): (2.0, -4.0), (2.0, 1): (-2.5, 1.0)}
    rows = [
        {
            "policy": "edf",
            "what": "run",
            "load": load,
            "seed": seed,
            "attainment_error_points": points,
            "p99_error_pct": pct,
            "attainment_error_in_hindsight_points": points / 2,
            "p99_error_in_hindsight_pct": 0.0,
        }
        for (load, seed), (points, pct) in errors.items()
    ]
    summary = fidelity._summary([{"policy": "edf", "what": "calibration"}, *rows])
    assert summary["attainment_error_points"] == 2.5
    assert summary["p99_error_pct"] == 4.0
    assert summary["attainment_error_in_hindsight_points"] == 1.25
    assert summary["attainment_error_points_edf_0_8x"] == 2.0
    assert summary["p99_error_pct_mean"] == pytest.approx(25 / 4)


def test_a_service_is_plain_data() -> None:
    made = Service(1.0, 2.0, 3.0, 2.0, 0.1, {"m": 1.5}, 0.2, 0.9)
    assert made.assumptions(10**9, 1, 0.0).front_end_share == 0.9  # however much it would be
    assert TablePredictor({}, made.assumptions(1.0, 1, 0.5).inflation).scales == {"m": 0.75}
