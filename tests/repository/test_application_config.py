"""Files of applications: what is read, and that a mistake is named with its file, its key and what was expected."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from application_samples import CHAIN, DIAMOND, FAILING, WORDS, write_application, write_models
from cotenant.errors import ConfigError, CotenantError
from cotenant.repository import (
    UnknownApplicationError,
    application_names,
    find_versions,
    is_application,
    model_names,
)
from cotenant.repository.application_spec import Source, read_application
from cotenant.serve.models.served_application import fit
from cotenant.wire.api import ModelMetadata, ServeError, Status, TensorSpec
from repositories import config, scaled, write_model

TEXTS = [text.format(slo_ms=100) for text in (CHAIN, DIAMOND, FAILING, WORDS)]


def written(tmp_path: Path, text: str) -> Path:
    write_application(tmp_path, "app", text)
    return tmp_path


def test_an_application_is_read_in_the_order_in_which_its_stages_run(tmp_path: Path) -> None:
    spec = read_application(written(tmp_path, DIAMOND.format(slo_ms=12.5)), "app")
    assert (spec.name, spec.slo_ns, spec.priority) == ("app", 12_500_000, 2)
    assert [stage.name for stage in spec.stages] == ["start", "left", "right", "sum"]
    assert spec.graph.after == ((), (0,), (0,), (1, 2))
    assert spec.stages[3].inputs == {"left": Source(1, "y"), "right": Source(2, "y")}
    assert spec.outputs == {"total": Source(3, "total")}
    assert spec.inputs == ("x",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(CHAIN, "first -> second"), (DIAMOND, "start, left (after start), right (after start), sum (after left, right)")],
)
def test_stages_are_told_in_their_order_and_side_by_side(tmp_path: Path, text: str, expected: str) -> None:
    assert read_application(written(tmp_path, text.format(slo_ms=9)), "app").stages_text == expected


def test_an_output_with_a_dot_in_its_name(tmp_path: Path) -> None:
    spec = read_application(written(tmp_path, CHAIN.format(slo_ms=1).replace("first.y", "first.a.b")), "app")
    assert spec.stages[1].inputs == {"x": Source(0, "a.b")}


def test_applications_are_no_models(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice")
    write_application(root, "app", CHAIN)
    write_application(root, "broken", "[application\n]]")
    write_application(root, "empty", "")
    assert model_names(root) == ("empty", "twice")
    assert application_names(root) == ("app", "broken")
    assert is_application(root, "app")
    with pytest.raises(ConfigError, match="is an application, expected a model"):
        find_versions(root, "app")
    with pytest.raises(UnknownApplicationError, match="'twice'"):
        read_application(root, "twice")
    with pytest.raises(UnknownApplicationError):
        read_application(root, "../models/app")


def stage(more: str = "", **keys: str) -> str:
    """A stage of the chain with other keys."""
    table = {"name": '"third"', "model": '"twice"', "inputs": '{ x = "x" }', **keys}
    return "\n[[application.stage]]\n" + "\n".join(f"{key} = {value}" for key, value in table.items()) + more + "\n"


GOOD = CHAIN.format(slo_ms=100)
MISTAKES = {
    "no slo": (GOOD.replace("slo_ms = 100", ""), "application.slo_ms is missing", "slo_ms = 500"),
    "slo 0": (GOOD.replace("100", "0"), "application.slo_ms", "> 0"),
    "no stage": ("[application]\nslo_ms = 1\n[application.outputs]\ny = 'a.y'\n", "application", "stage"),
    "no outputs": (GOOD.split("[application.outputs]")[0], "application", "outputs"),
    "empty outputs": (GOOD.split("y = ")[0], "application.outputs", "length >= 1"),
    "unknown key": (GOOD.replace("slo_ms", "slow_ms = 3\nslo_ms"), "application", "slow_ms"),
    "unknown section": (GOOD + "\n[tenant]\nslo_ms = 3\n", "tenant"),
    "no inputs": (GOOD.replace('inputs = { x = "x" }', "inputs = {}"), "application.stage[0].inputs", "length >= 1"),
    "priority": (GOOD.replace("slo_ms", "priority = -1\nslo_ms"), "application.priority", ">= 0"),
    "not toml": (GOOD + "\n[", "not valid TOML"),
    "stage twice": (GOOD + stage(name='"first"'), "application.stage[2].name", "'first' occurs twice"),
    "dot in name": (GOOD.replace('"first"', '"fi.rst"'), "application.stage[0].name", "has a dot"),
    "unknown stage": (GOOD.replace("first.y", "frist.y"), "unknown stage 'frist'", "'first', 'second'", "no dot"),
    "stage without output": (GOOD.replace('"first.y" }', '"first" }'), "inputs.x", "first.OUTPUT"),
    "empty output": (GOOD.replace('"first.y" }', '"first." }'), "inputs.x", "expected first.OUTPUT"),
    "output of no stage": (GOOD.replace('"second.y"', '"x"'), "application.outputs.y", "STAGE.OUTPUT"),
    "output of unknown stage": (GOOD.replace('"second.y"', '"zzz.y"'), "application.outputs.y", "unknown stage 'zzz'"),
    "unused stage": (GOOD.replace("y = ", "# ", 1) + stage(), "stage", "is used"),
    "itself": (GOOD.replace('{ x = "x" }', '{ x = "first.y" }'), "cycle: first -> first"),
    "circle": (GOOD.replace('{ x = "x" }', '{ x = "second.y" }'), "cycle: "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, name: str) -> None:
    text, *expected = MISTAKES[name]
    root = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_application(root, "app")
    assert str(root / "app" / "config.toml") in str(caught.value)
    for part in expected:
        assert part in str(caught.value)


def test_a_model_beside_an_application(tmp_path: Path) -> None:
    write_model(tmp_path, "app", config(), {1: lambda: scaled(1.0)})
    write_application(tmp_path, "app", CHAIN)
    with pytest.raises(ConfigError, match="also has the version '1' of a model"):
        read_application(tmp_path, "app")


@given(text=st.sampled_from(TEXTS), seed=st.integers(0, 1_000_000))
def test_damaged_files_are_read_or_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: str, seed: int
) -> None:
    """Lines lost, doubled and swapped, words replaced by others of the file, characters changed."""
    rng = random.Random(seed)
    root = tmp_path_factory.mktemp("damaged", numbered=True)
    lines = text.splitlines()
    words = re.findall(r"[\w.\"]+", text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2:
                found = re.findall(r"[\w.\"]+", lines[at])
                if found:
                    lines[at] = lines[at].replace(rng.choice(found), rng.choice(words), 1)
            case _:
                if lines[at]:
                    place = rng.randrange(len(lines[at]))
                    lines[at] = lines[at][:place] + rng.choice('x."=[]{}\0\u00e9 1') + lines[at][place + 1 :]
        lines = lines or [""]
    (root / "app").mkdir()
    (root / "app" / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    try:
        spec = read_application(root, "app")
    except CotenantError:
        return
    names = [each.name for each in spec.stages]
    assert len(names) == len(set(names))
    for number, needed in enumerate(spec.graph.after):
        assert all(other < number for other in needed)


# --- fitting tensors --------------------------------------------------------------------------------------------------


class Model:
    """As much of a served model as fitting looks at."""

    smallest_shape = 0

    def __init__(self, inputs: list[TensorSpec], outputs: list[TensorSpec], max_batch: int = 0) -> None:
        self.metadata = ModelMetadata("m", ("1",), "fake", tuple(inputs), tuple(outputs), max_batch)


def find_among(**models: Model):  # type: ignore[no-untyped-def]
    def find(name: str) -> Model:
        if name not in models:
            raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: it is away")
        return models[name]

    return find


def tensor(name: str, *shape: int, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, shape)


TWICE = Model([tensor("x", -1, 8)], [tensor("y", -1, 8)], 4)


@pytest.mark.parametrize(
    ("thrice", "expected"),
    [
        (Model([tensor("x", -1, 9)], [tensor("y", -1, 8)], 4), r"inputs.x: 'first.y' has shape \[-1, 8\], expected"),
        (Model([tensor("x", 8)], [tensor("y", 8)]), r"expected \[8\] \(-1 is any size\)"),
        (Model([tensor("x", -1, 8, datatype="INT64")], [tensor("y", 8)]), "has datatype FP32, expected INT64"),
        (Model([tensor("z", -1, 8)], [tensor("y", 8)]), "inputs.x: model 'thrice' has no input 'x', expected 'z'"),
        (Model([tensor("x", -1, 8), tensor("z", 3)], [tensor("y", 8)]), "input 'z' of model 'thrice' has no source"),
        (Model([tensor("x", -1, 8)], [tensor("out", 8)]), "has no output 'y', expected one of 'out'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, thrice: Model, expected: str) -> None:
    spec = read_application(written(tmp_path, GOOD), "app")
    with pytest.raises(ConfigError, match=expected) as caught:
        fit(spec, find_among(twice=TWICE, thrice=thrice))
    assert str(spec.path) in str(caught.value)


def test_an_input_that_two_stages_take_must_suit_both(tmp_path: Path) -> None:
    text = GOOD.replace('x = "first.y"', 'x = "x"')
    spec = read_application(written(tmp_path, text), "app")
    wide = Model([tensor("x", 2, -1)], [tensor("y", -1, 8)])
    assert fit(spec, find_among(twice=TWICE, thrice=wide)).metadata.inputs == (tensor("x", 2, 8),)
    with pytest.raises(ConfigError, match=r"'x' has shape \[-1, 8\], expected \[-1, 9\]"):
        fit(spec, find_among(twice=TWICE, thrice=Model([tensor("x", -1, 9)], [tensor("y", -1)])))


def test_rows_are_a_batch_only_where_every_stage_takes_one(tmp_path: Path) -> None:
    spec = read_application(written(tmp_path, GOOD), "app")
    alone = Model([tensor("x", 1, 8)], [tensor("y", 1, 8)])
    assert fit(spec, find_among(twice=TWICE, thrice=TWICE)).metadata.max_batch_size == 4
    assert fit(spec, find_among(twice=TWICE, thrice=alone)).metadata.max_batch_size == 0


def test_a_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    spec = read_application(written(tmp_path, GOOD), "app")
    with pytest.raises(ServeError, match="application 'app': stage 'second': model 'thrice' is not served: it is away"):
        fit(spec, find_among(twice=TWICE))


def test_shares_of_a_plan_end_one_after_the_other(tmp_path: Path) -> None:
    spec = read_application(written(tmp_path, GOOD), "app")
    served = fit(spec, find_among(twice=TWICE, thrice=TWICE), {"first": 30, "second": 50})
    assert served.spec.graph.share_ends_ns == (30, 80)
