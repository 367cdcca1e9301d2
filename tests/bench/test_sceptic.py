"""Figures of the pages against kept results: the tree itself, and each way in which a claim can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as bench_main
from bench import _sceptic
from bench._claims import ROOT, Claim, Page, judge, pages_of
from bench._registry import FOLDER, BenchError

RESULT = {
    "name": "speed",
    "date": "2020-01-01T00:00:00+00:00",
    "command": "python -m bench speed --json",
    "summary": {"gain": 0.1234},
    "rows": [{"model": "a", "ms": 2.0}, {"model": "b", "ms": 3.5}],
}


def judged(folder: Path, page: str, claims: str) -> tuple[list[Claim], Page]:
    """The claims of a folder with one page and one result, and the page."""
    for name in ("docs", "results"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "docs" / "page.md").write_text(page, encoding="utf-8")
    (folder / "docs" / "claims.toml").write_text(claims, encoding="utf-8")
    (folder / "results" / "speed.json").write_text(json.dumps(RESULT), encoding="utf-8")
    pages = pages_of(folder)
    return judge(pages, folder, folder / "results"), pages["docs/page.md"]


def claim(text: str, result: str = "speed") -> str:
    return f"[[claim]]\npage = 'docs/page.md'\nresult = '{result}'\ntext = '''{text}'''\n"


def test_every_figure_of_the_tree_is_that_of_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    status = bench_main.main(["sceptic"])
    printed = capsys.readouterr().out
    assert "claims_that_differ 0, claims_without_row 0" in printed, printed[-3000:]
    assert status == 0


def test_the_finder_sees_the_figures_of_readme_and_benchmarks() -> None:
    pages = pages_of()
    assert len(list(pages["README.md"].free_figures())) >= 30
    assert len(list(pages["docs/benchmarks.md"].free_figures())) >= 150


def test_a_tied_figure_is_held_against_its_row(tmp_path: Path) -> None:
    text = 'It gains {100 * gain:.0f} % and takes {max(pick("ms")):.1f} ms, b {pick("ms", model="b")[0]:.2f} times.'
    (found,), page = judged(tmp_path, "# Page\n\nIt gains 12 % and\ntakes 3.5 ms, b 3.50 times.\n", claim(text))
    assert (found.fault, found.line) == ("", 3)
    assert [each.text for each in found.figures] == ["12", "3.5", "3.50"]
    assert list(page.free_figures()) == []


def test_another_figure_on_the_page_differs(tmp_path: Path) -> None:
    (found,), page = judged(tmp_path, "# Page\nIt gains 13 %.\n", claim("gains {100 * gain:.0f} %"))
    assert "line 2 has 'gains 13 %', the result gives 'gains 12 %'" in found.fault
    assert found.has_row
    assert [line for line, _ in page.free_figures()] == [2]
    (found,), _ = judged(tmp_path, "Nothing.\n", claim("gains {100 * gain:.0f} %"))
    assert "does not have" in found.fault


@pytest.mark.parametrize(("text", "result"), [("{lost:.0f} %", "speed"), ("{gain:.0f} %", "gone")])
def test_a_figure_without_a_field_or_a_result_has_no_row(tmp_path: Path, text: str, result: str) -> None:
    (found,), _ = judged(tmp_path, "0 %\n", claim(text, result))
    assert not found.has_row


def test_the_finder_leaves_code_conditions_and_what_is_declared(tmp_path: Path) -> None:
    text = (
        "It is 3 times as fast, 1.1, 1.2 and 1.3 times elsewhere, 0.88 of the best, `5 ms`, at 2 times the load.\n"
        "```\n7 ms\n```\nThe paper has 9 %.\n"
    )
    _, page = judged(tmp_path, text, "[[declared]]\npage = 'docs/page.md'\nkind = 'paper'\ntexts = ['has 9 %']\n")
    found = [text for _, text in page.free_figures()]
    assert len(found) == 3
    assert all(each in " ".join(found) for each in ("3 times", "1.1, 1.2 and 1.3 times", "0.88"))


def test_a_declared_text_that_is_gone_differs_and_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    declared = "[[declared]]\npage = 'docs/page.md'\nkind = 'paper'\ntexts = ['9 %']\n"
    (found,), _ = judged(tmp_path, "Nothing.\n", declared)
    assert "does not have this declared text" in found.fault
    with pytest.raises(BenchError, match="kind is 'rumour'"):
        judged(tmp_path, "9 %\n", declared.replace("paper", "rumour"))


def test_the_exit_status_is_1_where_a_page_says_more_than_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = judged(tmp_path, "It gains 99 %.\n", claim("gains {100 * gain:.0f} %"))
    monkeypatch.setattr(_sceptic, "pages_of", lambda: {"docs/page.md": made[1]})
    monkeypatch.setattr(_sceptic, "judge", lambda _: made[0])
    monkeypatch.setattr(_sceptic, "record_of", lambda _: RESULT)
    assert bench_main.main(["sceptic"]) == 1
    assert "claims_that_differ 1, claims_without_row 1" in capsys.readouterr().out


def test_what_a_benchmark_measures_is_what_it_imports() -> None:
    qps = _sceptic.measured_by(FOLDER / "papers" / "veltair" / "qps.py")
    assert {"bench/papers/veltair/qps.py", "src/cotenant/techniques/layer_blocks"} <= set(qps)
    assert "src/cotenant" not in qps
    assert "src/cotenant" in _sceptic.measured_by(FOLDER / "goodput.py")
    assert all((ROOT / each).exists() for each in qps)


def test_without_history_the_age_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sceptic, "_git", lambda *_: "")
    assert "not known" in _sceptic._Age().note("veltair-qps")
