"""The line of the GPU-let paper, the files of co-runs that others measured, and the benchmark of both models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.papers.gpulet._interference_csv import (
    InterferenceFileError,
    read_constants,
    read_coruns,
    read_solo,
    read_utilisation,
)
from bench.papers.gpulet._interference_page import ErrorCurve, write_interference_report
from bench.papers.gpulet._linear import WHOLE, LinearConstants, LinearInterference, Utilisation, fit_linear
from corun_world import BATCHES, MODELS, SIZES, fitted, measure, median_error, pairs
from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun
from cotenant.techniques.partitions.predict.interference_fit import fit_pressure

CONSTANTS = LinearConstants(0.3, 0.7, 0.2, 0.5, 0.95)
UTILISATION = Utilisation.of(
    {
        (model, batch, size): (0.1 + 0.05 * at * batch**0.25, size / 100 * (0.5 - 0.03 * at * batch**0.5))
        for at, model in enumerate(MODELS)
        for batch in BATCHES
        for size in SIZES
    }
)


def test_the_fit_finds_the_constants_of_a_linear_world() -> None:
    truth = LinearInterference(CONSTANTS, UTILISATION)
    model = fit_linear([CoRun(t, (o,), truth.factor(*t, [o])) for t, o in pairs()], UTILISATION)
    assert min(truth.factor(*t, [o]) for t, o in pairs()) > 1.0
    for field in ("l2_self", "l2_other", "dram_self", "dram_other", "constant"):
        assert getattr(model.constants, field) == pytest.approx(getattr(CONSTANTS, field))
    assert model.factor_at(0.95, "b", 4, 50, [("c", 1, 50)]) == pytest.approx(model.factor("b", 4, 50, [("c", 1, 50)]))


def test_too_few_co_runs_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least ten"):
        fit_linear([CoRun(("a", 1, 50), (("b", 1, 50),), 1.2)] * 9, UTILISATION)


def test_the_line_by_hand() -> None:
    table = Utilisation.of({("a", 1, WHOLE): (0.4, 0.6), ("b", 1, WHOLE): (0.5, 0.2)})
    model = LinearInterference(CONSTANTS, table)
    expected = 0.3 * 0.4 * 0.2 + 0.7 * 0.5 * 0.8 + 0.2 * 0.6 * 0.2 + 0.5 * 0.2 * 0.8 + 0.95
    assert model.factor("a", 1, 20, [("b", 1, 80)]) == pytest.approx(expected)
    assert model.factor("a", 1, 20, ()) == 1.0
    assert LinearInterference(LinearConstants(0, 0, 0, 0, 0.5), table).factor("a", 1, 20, [("b", 1, 80)]) == 1.0
    added = model.factor("a", 1, 20, [("b", 1, 40), ("b", 1, 40)])
    assert added == pytest.approx(expected)


def test_the_quantile_of_a_line_covers_fresh_runs() -> None:
    model = fit_linear(measure(20, share=0.7), UTILISATION)
    fresh = measure(21)
    assert np.mean([c.factor <= model.factor_at(0.95, *c.target, c.others) for c in fresh]) > 0.92
    assert median_error(model, fresh) > 2 * median_error(fitted(), fresh)


def test_constants_alone_have_no_quantile_and_unknown_models_no_factor() -> None:
    model = LinearInterference(CONSTANTS, UTILISATION)
    with pytest.raises(InvalidValueError, match="a fit to measurements"):
        model.factor_at(0.95, "a", 1, 50, [("b", 1, 50)])
    with pytest.raises(InvalidValueError, match=r"'new'.*one of a, b, c, d"):
        model.factor("a", 1, 50, [("new", 1, 50)])


def test_utilisation_must_be_of_partitions_or_of_the_whole() -> None:
    with pytest.raises(InvalidValueError, match="shares from 0"):
        Utilisation.of({("a", 1, 50): (-0.1, 0.2)})
    with pytest.raises(InvalidValueError, match="sizes"):
        Utilisation.of({("a", 1, 50): (0.1, 0.2), ("a", 1, WHOLE): (0.1, 0.2)})


# --- files -----------------------------------------------------------------------------------------------------------

SOLO = "model,batch,partition_pct,latency_ms\na,1,40,2.0\nb,2,60,5\n"
CORUNS = "model,batch,partition_pct,other_model,other_batch,latency_ms\na,1,40,b,2,3.0\n"


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_co_runs_are_read(tmp_path: Path) -> None:
    solo = read_solo(put(tmp_path, "solo.csv", SOLO))
    assert read_coruns(put(tmp_path, "pairs.csv", CORUNS), solo) == [CoRun(("a", 1, 40), (("b", 2, 60),), 1.5)]
    text = "model,batch,partition_pct,other_model,other_batch,other_pct,latency_ms\na,1,40,b+a,2+1,30+20,2.5\n"
    (three,) = read_coruns(put(tmp_path, "three.csv", text), solo)
    assert three == CoRun(("a", 1, 40), (("a", 1, 20), ("b", 2, 30)), 1.25)


def test_utilisation_and_constants_are_read(tmp_path: Path) -> None:
    whole = read_utilisation(put(tmp_path, "w.csv", "model,batch,l2_util_pct,dram_util_pct\na,1,40,10\n"))
    assert whole.at("a", 1, 50) == pytest.approx((0.2, 0.05))
    parts = read_utilisation(
        put(tmp_path, "p.csv", "model,batch,partition_pct,dram_util_pct,l2_util_pct\na,1,50,10,40\n")
    )
    assert parts.at("a", 1, 50) == pytest.approx((0.4, 0.1))
    constants = read_constants(
        put(tmp_path, "c.csv", "gpu,c1_l2_self,c2_l2_other,c3_x,c4_y,c5_constant\nx,1,2,3,4,5\n")
    )
    assert constants == LinearConstants(1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model,batch\n", "no column 'partition_pct'"),
        (CORUNS.splitlines()[0], "no lines below its head"),
        (CORUNS.replace("a,1,40", "a,3,40"), "line 2: model is 'a', expected a latency alone of a at batch 3"),
        (CORUNS.replace("3.0", "fast"), "line 2: latency_ms is 'fast', expected a number"),
        (CORUNS.replace("3.0", "0"), "latency_ms is '0', expected a positive number"),
        (CORUNS.replace("b,2", "b,half"), "other_batch is 'half', expected a whole number from 1"),
        (CORUNS.replace("b,2", "b+c,2"), "other_batch is '2', expected 2 whole numbers"),
        (CORUNS.replace("b,2", "b+c,2+2"), "other_model is 'b\\+c', expected one model, or a column other_pct"),
        (CORUNS.replace("b,2", ",2"), "other_model is '', expected a name"),
    ],
)
def test_a_bad_file_of_co_runs_is_named(tmp_path: Path, text: str, says: str) -> None:
    solo = read_solo(put(tmp_path, "solo.csv", SOLO))
    with pytest.raises(InterferenceFileError, match=f"pairs.csv.*{says}"):
        read_coruns(put(tmp_path, "pairs.csv", text), solo)


def test_a_whole_device_leaves_nothing_for_others(tmp_path: Path) -> None:
    solo = {("a", 1, 100): 1.0}
    with pytest.raises(InterferenceFileError, match="less than 100"):
        read_coruns(put(tmp_path, "pairs.csv", CORUNS.replace("40", "100")), solo)


def test_other_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InterferenceFileError, match=r"none\.csv: cannot be read"):
        read_solo(tmp_path / "none.csv")
    with pytest.raises(InterferenceFileError, match="no column c5"):
        read_constants(put(tmp_path, "c.csv", "c1,c2,c3,c4\n1,2,3,4\n"))
    with pytest.raises(InterferenceFileError, match="a percentage from 0"):
        read_utilisation(put(tmp_path, "u.csv", "model,batch,l2_util_pct,dram_util_pct\na,1,-4,10\n"))
    (tmp_path / "binary.csv").write_bytes(b"model,batch\xff\xfe\n")
    with pytest.raises(InterferenceFileError, match="not a CSV file"):
        read_solo(tmp_path / "binary.csv")


# --- report, measured data -------------------------------------------------------------------------------------------


def test_the_page_shows_every_curve(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    curves = [ErrorCurve("ours <1>", (0.5, 1.0, 2.0)), ErrorCurve("linear", tuple(float(e) for e in range(40)))]
    write_interference_report(path, "Errors", "Half within 1 %.", curves, ("model", "median"), [("linear", "19.5 %")])
    page = path.read_text(encoding="utf-8")
    assert page.count('class="line s0"') == page.count('class="line s1"') == 2
    assert "ours &lt;1&gt;" in page
    assert "<td>19.5 %</td>" in page


def test_measured_co_runs_of_a_gpu_reach_the_goal(papers_data: Path) -> None:
    """Median within 5 %, nine of ten within 12 %, and 95 % below the 95 % quantile, on pairs that no fit has seen."""
    folder = papers_data / "mps_measured"
    coruns = read_coruns(folder / "corun_latency_train.csv", read_solo(folder / "solo_latency.csv"))
    held = np.random.default_rng(1).random(len(coruns)) < 0.3
    model = fit_pressure([c for c, is_test in zip(coruns, held, strict=True) if not is_test])
    tests = [c for c, is_test in zip(coruns, held, strict=True) if is_test]
    found = np.abs([model.factor(*c.target, c.others) / c.factor - 1 for c in tests])
    assert np.median(found) < 0.05
    assert np.quantile(found, 0.9) < 0.12
    assert np.mean([c.factor <= model.factor_at(0.95, *c.target, c.others) for c in tests]) >= 0.95


def test_the_benchmark_judges_a_file_of_other_co_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.papers.gpulet import interference as benchmark

    def lines(coruns: Sequence[CoRun]) -> str:
        head = "model,batch,partition_pct,other_model,other_batch,latency_ms\n"
        return head + "".join(
            f"{c.target[0]},{c.target[1]},{c.target[2]},{c.others[0][0]},{c.others[0][1]},{2.0 * c.factor}\n"
            for c in coruns
        )

    keys = [(model, batch, size) for model in MODELS for batch in BATCHES for size in SIZES]
    for folder in ("mps_measured", "glet"):
        (tmp_path / folder).mkdir()
    measured = tmp_path / "mps_measured"
    put(measured, "solo_latency.csv", "model,batch,partition_pct,latency_ms\n" + _csv((*key, 2.0) for key in keys))
    shares = ((*key, *(100 * share for share in UTILISATION.at(*key))) for key in keys)
    head = "model,batch,partition_pct,l2_util_pct,dram_util_pct\n"
    put(measured, "utilisation.csv", head + _csv(shares))
    put(measured, "corun_latency_train.csv", lines(measure(30, share=0.7)))
    put(tmp_path / "glet", "interference_constants_2080ti.csv", "c1,c2,c3,c4,c5\n0.1,0.7,0.3,0.1,0.9\n")
    monkeypatch.setattr(benchmark, "PAGE", tmp_path / "page.html")
    found = benchmark.run(True, tmp_path, test=put(tmp_path, "test.csv", lines(measure(31))))
    summary = found["summary"]
    assert isinstance(summary, dict)
    assert summary["ours_median_error_pct"] < 1.5 < summary["linear_median_error_pct"]
    assert summary["ours_p90_error_pct"] < 4.0
    assert summary["ours_coverage_p95"] > 92.0
    assert "tested on test.csv" in (tmp_path / "page.html").read_text(encoding="utf-8")


def _csv(rows: Iterable[tuple[object, ...]]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)
