"""The measure of the house itself: circles, names with two homes, and mutants that are made and judged."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench import house
from bench._mutants import AREAS, ROOT, Verdict, changes_of, killed_pct, run_sample, sample
from bench._registry import BenchError, benchmarks
from cotenant.config import ModelConfig


def test_circles_are_found_over_any_number_of_packages() -> None:
    tree = ast.parse("import cotenant.a\nfrom cotenant.b.x import y\ndef f():\n    from cotenant import c\nimport os")
    assert list(house.imports_of("m", tree)) == ["a", "b", "c"]
    known = {
        "cotenant.a": {"b"},
        "cotenant.b.x": {"c"},
        "cotenant.c": {"a", "d"},
        "cotenant.d": {"d"},
        "cotenant": {"a"},
    }
    assert house.circles_of(known) == [["a", "b", "c"]]
    assert house.circles_of({**known, "cotenant.c": {"d"}}) == []
    with pytest.raises(BenchError, match=r"m has a relative import, line 1: expected none"):
        list(house.imports_of("m", ast.parse("from . import x")))


def test_names_and_keys_are_counted() -> None:
    assert house.twice(iter("abcab")) == {"a": 2, "b": 2}
    assert house.keys_of(ModelConfig) == 20
    assert "house" in benchmarks()


def test_the_tests_that_answer_for_an_area_are_there() -> None:
    for area, tests in [*AREAS.items(), *house.QUICK_AREAS.items()]:
        assert list((house.PACKAGE / area).glob("*.py")), area
        assert [name for name in tests if not (ROOT / name.partition("::")[0]).exists()] == []


CODE = """
LIMIT = 4

def grown(x: int, out: list[int]) -> int:
    if x < LIMIT:
        out.append(x)
    return x + 1
"""
TEST = """
from cotenant.core.code import grown

def test_grown():
    out = []
    assert grown(3, out) == 4
    assert grown(5, out) == 6
    assert out == [3]
"""


def test_every_change_is_small_and_inside_a_function() -> None:
    pytest.importorskip("mutmut", reason="mutants are made with mutmut")
    texts = [change() for change in changes_of(CODE)]
    assert len(set(texts)) == len(texts)
    assert {after.strip() for text in texts for after in text.splitlines() if after not in CODE.splitlines()} == {
        *("if x <= LIMIT:", "if not (x < LIMIT):", "pass", "return x - 1", "return x + 2"),
    }


def test_a_sample_is_judged_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mutmut", reason="mutants are made with mutmut")
    for name, text in {
        "src/cotenant/__init__.py": "",
        "src/cotenant/core/__init__.py": "",
        "src/cotenant/core/code.py": CODE,
        "tests/test_code.py": TEST,
        "tests/conftest.py": "from hypothesis import settings\nsettings.register_profile('mutants')\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("bench._mutants.COPIED", ("src", "tests", "pyproject.toml"))
    mutants = sample(5, 1, ["core"], tmp_path)
    assert sample(5, 1, ["core"], tmp_path) == mutants
    assert len(mutants) == 5
    told: list[Verdict] = []
    tests = {"core": ("tests",)}
    verdicts = run_sample(mutants, tests, told.append, workers=1, root=tmp_path)
    assert told == verdicts
    survived = [each.mutant for each in verdicts if each.outcome == "survived"]
    assert ["<= LIMIT" in mutant.text for mutant in survived] == [True]
    assert killed_pct(verdicts) == 80.0
    assert (tmp_path / "src/cotenant/core/code.py").read_text() == CODE
    (tmp_path / "tests/test_code.py").write_text(TEST + "    assert False\n", encoding="utf-8")
    with pytest.raises(BenchError, match="the tests of core fail without any change"):
        run_sample(mutants, tests, told.append, workers=1, root=tmp_path)
