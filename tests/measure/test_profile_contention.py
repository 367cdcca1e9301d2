"""Finding out what models lose beside each other: the fit on made-up machines, the file, and a real calibration."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from build import CORE, ends, launch
from commands import Run
from cotenant.cli.profile import contention_table
from cotenant.config import DeviceSection, ServerConfig
from cotenant.errors import CotenantError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.measure import cache_counters, contention_profile
from cotenant.measure.antagonist import (
    Antagonist,
    Canary,
    CopiedMemory,
    Streamed,
    antagonists,
    measure_bandwidth,
    streaming,
)
from cotenant.measure.cache_counters import CacheCounters
from cotenant.measure.contention_profile import (
    FORMAT,
    ContentionProfile,
    ModelContention,
    Sensitivity,
    calibrate,
    fit_bandwidth,
    fit_contention,
    load_contention,
    measure_pressure,
    predicted_slowdown,
    save_contention,
    traffic_of,
)
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.predict.pressure import CacheReading, SlowdownScale
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.profile_file import ProfileError
from cotenant.repository import contention_path
from cotenant.world.contention import Contention, ContentionWorld, Phase, Traffic
from onnx_samples import residual_cnn
from repositories import config, write_good, write_model

GB, MS, MB = 10**9, 10**6, 10**6
SMALL = 1 << 20
TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
CORES = tuple(sorted(os.sched_getaffinity(0)))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="contention needs two cores")


# --- the fit, on machines that are made up ---------------------------------------------------------------------------


def test_a_memory_that_all_cores_cannot_saturate_has_no_bandwidth() -> None:
    assert fit_bandwidth((11 * GB, 22 * GB)) is None
    assert fit_bandwidth((11 * GB, 20 * GB)) is None
    assert fit_bandwidth((11 * GB, 15 * GB)) == 15 * GB
    assert fit_bandwidth((11 * GB, 16 * GB, 15 * GB)) == 16 * GB


def test_slowdown_by_hand() -> None:
    phases = [Phase(30 * MS, 8 * GB), Phase(70 * MS, 0)]
    assert predicted_slowdown(phases, [8 * GB], 16 * GB) == 1.0
    assert predicted_slowdown(phases, [8 * GB], 8 * GB) == pytest.approx(0.6 + 0.7)
    assert predicted_slowdown(phases, [8 * GB, 2 * GB], 8 * GB) == pytest.approx(0.3 * 8 / 3 + 0.7)


COUNTED = Traffic((40 * MB, 0, 10 * MB), ((30 * MB, 5 * MB, 90 * MB),))
WEIGHTS = (20.0, 60.0, 20.0)


LIGHT = Traffic((10 * MB, 0, 3 * MB), ((8 * MB, MB, 22 * MB),))


def measured_in_the_world(share: float, drawn: tuple[int, int], counted: Traffic = COUNTED) -> Sensitivity:
    """What the contention world itself says of a model beside an antagonist that never ends."""
    tables = TablePredictor(
        {
            "m": LatencyTable((LatencyRow(0, 1, 1, 20 * MS),), WEIGHTS),
            "a": LatencyTable((LatencyRow(0, 1, 1, 9000 * MS),)),
        }
    )
    traffic = {"m": replace(counted, memory_share=share), "a": Traffic((0,), ((9 * drawn[0],),))}
    world = ContentionWorld(tables, Contention(fit_bandwidth(drawn), drawn[0], traffic), grain_ns=1)
    found = ends(world, [(0, launch(0, "m", (0, 3))), (0, launch(1, "a", partition=CORE[1]))])
    return Sensitivity(20 * MS, found[0], (drawn[0],), 1)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.05, 3.5))
def test_the_fit_explains_what_the_world_does(share: float) -> None:
    drawn = (11 * GB, 14 * GB)
    sensitivity = measured_in_the_world(share, drawn)
    found, is_identified = fit_contention(drawn, COUNTED, WEIGHTS, sensitivity)
    again = measured_in_the_world(found.memory_share, drawn)
    assert again.slowdown == pytest.approx(sensitivity.slowdown, abs=0.021)
    assert is_identified or found.memory_share == 1.0


def test_the_fit_finds_the_share_and_says_when_it_cannot() -> None:
    drawn = (11 * GB, 14 * GB)
    for share, counted in ((0.35, COUNTED), (0.5, COUNTED), (1.3, LIGHT), (1.6, LIGHT)):
        sensitivity = measured_in_the_world(share, drawn, counted)
        found, is_identified = fit_contention(drawn, counted, WEIGHTS, sensitivity)
        assert is_identified
        assert found.memory_share == pytest.approx(share, rel=0.05)
    slow = Sensitivity(20 * MS, 26 * MS, (11 * GB,), 9)
    assert fit_contention((11 * GB, 22 * GB), COUNTED, WEIGHTS, slow) == (COUNTED, False)
    nothing = Sensitivity(20 * MS, 20 * MS, (11 * GB,), 9)
    found, is_identified = fit_contention(drawn, COUNTED, WEIGHTS, nothing)
    assert is_identified  # the counted bytes would have slowed it down: not all of them reach the memory
    assert found.memory_share < 0.6
    light = Traffic((0, 0, 0), ((MB, MB, MB),))
    assert fit_contention(drawn, light, WEIGHTS, nothing) == (light, False)


# --- the file --------------------------------------------------------------------------------------------------------


def profile_of(*drawn: int) -> ContentionProfile:
    model = ModelContention(COUNTED, True, Sensitivity(5, 7, (3,), 9))
    return ContentionProfile(this_device(), "today", drawn, fit_bandwidth(drawn), {"m": model})


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = contention_path(tmp_path)
    found = profile_of(11 * GB, 14 * GB)
    save_contention(path, found)
    assert load_contention(path) == found
    assert found.contention() == Contention(14 * GB, 11 * GB, {"m": COUNTED})
    assert profile_of(11 * GB, 22 * GB).contention().bandwidth_bytes_per_s is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"cannot be read .*profile REPO --contention"),
        ("{", "is not a cotenant-contention/1 file"),
        ("{}", "format is None, expected 'cotenant-contention/1'"),
        (f'"{FORMAT}"', FORMAT.replace("/1", "/9")),
        ('"memory_share": 1.0', "memory_share"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = contention_path(tmp_path)
    if content is not None:
        save_contention(path, profile_of(GB))
        text = path.read_text()
        if content.startswith('"'):
            assert content in text
            wrong = content.replace("/1", "/9") if FORMAT in content else content.replace("1.0", "-1.0")
            content = text.replace(content, wrong)
        path.write_text(content)
    with pytest.raises(ProfileError, match=said) as caught:
        load_contention(path)
    assert str(path) in str(caught.value)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_traffic_is_what_the_graph_counts(tmp_path: Path) -> None:
    write_model(tmp_path, "cnn", config(), {1: residual_cnn})
    with SegmentedModel.open(tmp_path / "cnn" / "1" / "model.onnx") as model:
        small, large = (model.dfg_at({"x": (rows, 3, 16, 16)}) for rows in (1, 4))
        traffic = traffic_of([small, large])
        assert len(traffic.weight_bytes) == model.unit_count
        assert traffic.weight_bytes == tuple(unit.weight_bytes for unit in model.dfg.units)
        first = small.units[0]
        assert traffic.row_bytes[0][0] == first.read_bytes + first.write_bytes > 0
        assert traffic.row_bytes[1][0] == 4 * traffic.row_bytes[0][0]


def test_an_antagonist_copies_while_it_is_told_to() -> None:
    with antagonists(CORES[-1:], SMALL) as (one,):
        for _ in range(2):
            with streaming([one]) as moved:
                assert moved == []
            assert len(moved) == 1
            assert moved[0].bytes % (2 * SMALL) == 0
            assert moved[0].cpu_ns > 0
    assert Streamed(4 * GB, 500 * MS).bytes_per_s == 8 * GB


def test_an_antagonist_that_died_is_named() -> None:
    with antagonists(CORES[:1], SMALL) as (one,):
        one._process.kill()
        one._process.join()
        with pytest.raises(CotenantError, match=f"antagonist on core {CORES[0]} has died"):
            one.start()


class MadeUpCounters:
    """Counters of a machine that misses as much as is copied."""

    def __init__(self, antagonists: Sequence[Antagonist], cores: Sequence[int]) -> None:
        self.cores, self.antagonists, self.reads = cores, antagonists, 0

    def read(self) -> CacheReading:
        self.reads += 1
        under_way = sum(each.is_under_way for each in self.antagonists)
        return CacheReading(1e9 + 1e8 * (self.reads % 5), 0.25 * under_way)

    def close(self) -> None:
        self.cores = ()


class MadeUpAntagonist:
    """Draws 3 GB/s, and nothing happens."""

    def __init__(self, core: int) -> None:
        self.core, self.is_under_way = core, False

    def start(self) -> None:
        self.is_under_way = True

    def stop(self) -> Streamed:
        self.is_under_way = False
        return Streamed(3 * GB, 1000 * MS)


def test_pressure_is_calibrated_against_antagonists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary whose time rises by half with each of them, and counters that miss a quarter more."""
    others: list[Any] = [MadeUpAntagonist(1), MadeUpAntagonist(2)]
    counters: list[MadeUpCounters] = []

    class MadeUpCanary:
        def ns(self) -> int:
            return 1000 + 500 * sum(each.is_under_way for each in others)

    def opened(cores: Sequence[int]) -> Any:
        counters.append(MadeUpCounters(others, cores))
        return counters[0]

    monkeypatch.setattr(contention_profile, "Canary", MadeUpCanary)
    affinity = os.sched_getaffinity(0)
    found = measure_pressure(0, others, 12 * GB, window_s=0.0, rounds=3, open_counters=opened)
    assert os.sched_getaffinity(0) == affinity
    assert found.canary_ns == 1000
    assert found.slowdowns == SlowdownScale(((1.0, 0.0), (1.5, 0.25), (2.0, 0.5)))
    assert found.counters is not None
    assert found.counters.pressure(CacheReading(1.1e9, 0.375)) == pytest.approx(0.375)
    assert not counters[0].cores, "they are closed"

    def refused(cores: Sequence[int]) -> Any:
        raise CotenantError("not here")

    without = measure_pressure(0, others, 12 * GB, window_s=0.0, rounds=1, open_counters=refused)
    assert (without.counters, without.no_counters) == (None, "not here")
    assert without.slowdowns == found.slowdowns


def test_counters_count_or_say_why_not() -> None:
    """Real ones, where this machine has them: copying memory is seen."""
    try:
        counters = CacheCounters(CORES[:1])
    except CotenantError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert reason.startswith("counters of the cache cannot be read: ")
        return
    memory = CopiedMemory(64 << 20)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES[:1])
    counters.read()
    for _ in range(32):
        memory.copy()
    reading = counters.read()
    os.sched_setaffinity(0, before)
    counters.close()
    assert reading.accesses_per_s > 0
    assert 0.0 <= reading.miss_rate <= 1.0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EACCES, "perf_event_paranoid is .*CAP_PERFMON"),
        (errno.ENOENT, "virtual machines"),
        (errno.EMFILE, "open"),
    ],
)
def test_the_reason_why_counters_cannot_be_read_is_told(error: int, said: str) -> None:
    assert re.search(said, cache_counters._reason(OSError(error, os.strerror(error))))


def test_a_canary_takes_time() -> None:
    assert Canary(SMALL).ns() > 0


@two_cores
def test_a_repository_is_calibrated(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "encoder", "two")
    settings = ServerConfig()
    with pytest.raises(ProfileError, match="cotenant profile"):
        calibrate(root, settings, TINY, window_s=0.0, rounds=1, array_bytes=SMALL)
    profile, _ = profile_repository(root, settings, TINY, fresh=False, on_step=lambda *_: None)
    affinity = os.sched_getaffinity(0)
    found = calibrate(root, settings, TINY, window_s=0.0, rounds=1, array_bytes=SMALL)
    assert os.sched_getaffinity(0) == affinity
    assert load_contention(contention_path(root)) == found
    assert len(found.drawn_bytes_per_s) == len(CORES)
    assert min(found.drawn_bytes_per_s) > 0
    assert sorted(found.models) == ["Owner of two", "encoder"]
    for name, model in found.models.items():
        assert model.sensitivity is not None
        assert min(model.sensitivity.solo_ns, model.sensitivity.beside_ns) > 0
        assert model.sensitivity.runs == 3
        assert len(model.sensitivity.antagonist_bytes_per_s) == len(CORES) - 1
        assert len(model.traffic.weight_bytes) == len(profile.models[name].unit_ns)
    assert len(found.models["encoder"].traffic.row_bytes) == 2  # it has two declared shapes
    assert found.pressure is not None
    assert found.pressure.canary_ns > 0
    assert (found.pressure.counters is None) == bool(found.pressure.no_counters)
    ContentionWorld(TablePredictor(profile.tables()), found.contention())  # fits the profile


@two_cores
def test_the_command_calibrates(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "__kwdefaults__", {"window_s": 0.0, "rounds": 1, "array_bytes": SMALL})
    root = write_good(tmp_path / "models", "encoder")
    status, out, _ = run("profile", root, "--budget", 0, "--contention", "--json")
    assert status == 0
    made = load_contention(contention_path(root))
    assert msgspec.convert(json.loads(out)["contention"], ContentionProfile) == made
    console = Console(record=True, width=140)
    console.print(contention_table(made))
    assert "encoder" in console.export_text()
    (root / "cotenant.toml").write_text(f"[device]\ncores = [{CORES[0]}]\n")
    status, _, err = run("profile", root, "--fresh", "--contention")
    assert (status, "two cores" in err) == (2, True)


def test_one_core_has_no_neighbours(tmp_path: Path) -> None:
    alone = ServerConfig(device=DeviceSection(cores=CORES[:1]))
    with pytest.raises(CotenantError, match="two cores"):
        calibrate(tmp_path, alone, TINY)


@two_cores
def test_bandwidth_is_measured_for_each_number_of_cores() -> None:
    drawn = measure_bandwidth(CORES[:2], window_s=0.0, rounds=1, array_bytes=SMALL)
    assert len(drawn) == 2
    assert min(drawn) > 0
