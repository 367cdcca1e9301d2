from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.errors import ConfigError, InvalidValueError
from cotenant.workload import Gamma, Mmpp, Poisson, TenantLoad, Trace, Uniform, Workload, load_workload, to_toml

FULL = """
seed = 7
duration_s = 30
warmup_s = 1.5
[[tenant]]
model = "resnet50"
rate = 20
slo_ms = 250
timeout_ms = 0.5
priority = 2
[[tenant]]
model = "minilm"
arrivals = "gamma"
rate = 5.5
cv = 2
protocol = "grpc"
items = 4
shape = 1
[[tenant]]
model = "vad"
arrivals = "mmpp"
rates = [5, 50]
mean_dwell_s = [4, 1]
[[tenant]]
name = "vad again"
model = "vad"
arrivals = "uniform"
rate = 3
[[tenant]]
model = "magika"
arrivals = "trace"
file = "arrivals.csv"
scale = 2.0
"""
TRACE = "time_s,model\n0.5,magika\n0.25,magika\n1.0,other\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "arrivals.csv").write_text(TRACE)
    (tmp_path / "column.csv").write_text("time_s\n0\n1\n")
    (tmp_path / "nocolumn.csv").write_text("seconds\n0\n")
    (tmp_path / "badcell.csv").write_text("time_s\n0\nsoon\n")
    return tmp_path


def read(folder: Path, text: str) -> Workload:
    file = folder / "load.toml"
    file.write_text(text)
    return load_workload(file)


def test_every_key_is_read(folder: Path) -> None:
    load = read(folder, FULL)
    assert (load.seed, load.duration_ns, load.warmup_ns) == (7, 30_000_000_000, 1_500_000_000)
    resnet, minilm, vad, again, magika = load.tenants
    assert resnet == TenantLoad(
        "resnet50", "resnet50", Poisson(20.0), slo_ns=250_000_000, timeout_ns=500_000, priority=2
    )
    assert minilm == TenantLoad("minilm", "minilm", Gamma(5.5, 2.0), protocol="grpc", items=4, shape=1)
    assert vad.process == Mmpp((5.0, 50.0), (4.0, 1.0))
    assert (again.name, again.model, again.process) == ("vad again", "vad", Uniform(3.0))
    assert magika.process == Trace((250_000_000, 500_000_000), 2.0, str(folder / "arrivals.csv"))


def test_written_and_read_again(folder: Path) -> None:
    load = read(folder, FULL)
    assert read(folder, to_toml(load)) == load


TENANT = 'duration_s = 1\n[[tenant]]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("duration_s = ", "not valid TOML"),
        ("duration_s = 1", "missing required field `tenant`"),
        (TENANT + "rate = 1\ncolour = 3", r"tenant\[0\]: .*unknown field `colour`"),
        ("durations = 1\n" + TENANT + "rate = 1", "unknown field `durations`, expected one of tenant, duration_s"),
        (TENANT, r"tenant\[0\]: .*missing required field `rate`"),
        (TENANT + "rate = -1", r"tenant\[0\]\.rate: Expected `float` > 0"),
        (TENANT + "rate = true", r"tenant\[0\]\.rate: Expected `float`, got `bool`"),
        (TENANT + "rate = inf", r"tenant\[0\]\.rate: Expected `float` <= 1"),
        (
            TENANT + 'arrivals = "often"',
            r"tenant\[0\]\.arrivals: .*'often', expected one of poisson, uniform, gamma, mmpp, trace",
        ),
        (TENANT + "rate = 1\ncv = 2", r"tenant\[0\]: .*unknown field `cv`"),
        (TENANT + 'arrivals = "gamma"\nrate = 1', r"tenant\[0\]: .*missing required field `cv`"),
        (TENANT + 'arrivals = "mmpp"\nrates = [1, 2]\nmean_dwell_s = [1]', "mean_dwell_s is .*one number per rate"),
        (
            TENANT + 'arrivals = "mmpp"\nrates = [1, "x"]\nmean_dwell_s = [1, 1]',
            r"tenant\[0\]\.rates\[1\]: Expected `float`, got `str`",
        ),
        (TENANT + "rate = 1\nitems = 0", r"tenant\[0\]\.items: Expected `int` >= 1"),
        (TENANT + "rate = 1\nprotocol = 'ftp'", r"tenant\[0\]\.protocol: .*'ftp', expected one of grpc, http"),
        (TENANT + "rate = 1\nslo_ms = 0", r"tenant\[0\]\.slo_ms: Expected milliseconds from a nanosecond .*got 0"),
        (TENANT + "rate = 1\nprocess = 1", "unknown field `process`"),
        (TENANT + 'arrivals = "trace"', r"tenant\[0\]: .*missing required field `file`"),
        ("duration_s = 1\ntenant = [1]", r"tenant\[0\]: Expected `object`, got `int`"),
        (TENANT + "rate = 1\n[[tenant]]\nmodel = 'm'\nrate = 1", "distinct names"),
        ("warmup_s = 1\n" + TENANT + "rate = 1", "warmup_ns"),
        (TENANT + 'arrivals = "trace"\nfile = "none.csv"', "none.csv: cannot be read"),
        (TENANT + 'arrivals = "trace"\nfile = "nocolumn.csv"', "expected one called time_s"),
        (TENANT + 'arrivals = "trace"\nfile = "badcell.csv"', "line 3: time_s is 'soon'"),
        (TENANT + 'arrivals = "trace"\nfile = "arrivals.csv"', "has no arrival of 'm'"),
    ],
)
def test_an_error_names_file_key_and_what_was_expected(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(folder, text)
    assert "load.toml" in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        load_workload(tmp_path / "nowhere.toml")


def test_trace_of_one_column_needs_no_model(folder: Path) -> None:
    load = read(folder, TENANT + 'arrivals = "trace"\nfile = "column.csv"')
    assert load.tenants[0].process == Trace((0, 1_000_000_000), 1.0, str(folder / "column.csv"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(-1.0), "Poisson: rate is -1.0, expected `float` > 0"),
        (lambda: Gamma(1.0, 0.0), "Gamma: cv is 0.0"),
        (lambda: Mmpp((0.0, 0.0), (1.0, 1.0)), "Mmpp: rates .*at least one above 0"),
        (lambda: Trace((2, 1)), "Trace: times_ns .*ascending"),
        (lambda: TenantLoad("", "m", Poisson(1.0)), "TenantLoad: name is ''"),
        (lambda: TenantLoad("a", "m", Poisson(1.0), slo_ns=0), "slo_ns is 0, expected nanoseconds from 1 to"),
        (lambda: Workload((), 1), "Workload: tenants is"),
        (lambda: Workload((TenantLoad("a", "m", Poisson(1.0)),), 1, warmup_ns=1), "warmup_ns is 1, expected less than"),
    ],
)
def test_ranges_hold_for_workloads_that_come_from_no_file(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()
