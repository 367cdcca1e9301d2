"""The repository on disk: which directories are models, which versions they have, and names that lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.errors import ConfigError
from cotenant.repository import (
    UnknownModelError,
    default_version,
    find_versions,
    load_order,
    model_names,
    profile_path,
    readable_versions,
    trace_path,
    within,
)
from repositories import config, fixed, write_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    write_model(made, "b", config(), {2: fixed, 10: fixed, 1: fixed})
    write_model(made, "a", config("owner"), {3: fixed})
    (made / ".cotenant").mkdir()
    (made / "README.md").write_text("no model", encoding="utf-8")
    return made


def test_models_are_the_directories_in_order_but_hidden_ones(root: Path) -> None:
    assert model_names(root) == ("a", "b")


def test_models_are_loaded_by_priority_then_by_size_and_what_is_wrong_last(root: Path) -> None:
    for name, priority in (("urgent", 1), ("less", 2), ("large", 2)):
        write_model(root, name, config(more=f"priority = {priority}"), {1: fixed})
    (root / "large" / "1" / "weights").write_bytes(bytes(10_000))
    (root / "broken").mkdir()
    write_model(root, "twin", config("owner", more="priority = 1"), {1: fixed})
    first, rest = load_order(root, model_names(root))
    assert (first[:3], first[-1]) == (["urgent", "less", "large"], "broken")
    assert rest == ["twin"]


def test_versions_are_ordered_by_number_and_the_highest_is_the_default(root: Path) -> None:
    (root / "b" / "notes").mkdir()
    found = find_versions(root, "b")
    assert [(each.version, each.is_default, each.tenant) for each in found] == [
        (1, False, "b:1"),
        (2, False, "b:2"),
        (10, True, "b"),
    ]
    assert found[2].path == root / "b" / "10" / "model.onnx"
    [only] = find_versions(root, "a")
    assert (only.version, only.is_default, only.tenant) == (3, True, "owner")


def test_a_version_is_its_number_and_has_one_directory(root: Path) -> None:
    write_model(root, "c", config(), {"007": fixed, "12": fixed})
    assert [(each.version, each.path.parent.name) for each in find_versions(root, "c")] == [(7, "007"), (12, "12")]
    write_model(root, "c", config(), {"7": fixed})
    with pytest.raises(ConfigError, match=r"c: the directories '007' and '7' are both version 7, expected one of them"):
        find_versions(root, "c")
    write_model(root, "d", config(), {1: fixed, "9" * 200: fixed})
    with pytest.raises(ConfigError, match=r"9: is not a version, expected a number of at most 18 digits"):
        find_versions(root, "d")
    found = {(each.model, each.version) for each in readable_versions(root)}
    assert {(model, version) for model, version in found if model in "cd"} == {("c", 12), ("d", 1)}
    wrong: dict[str, str] = {}
    assert [(each.version, each.is_default) for each in find_versions(root, "c", wrong)] == [(12, True)]
    assert wrong.keys() == {"7", "007"}
    assert default_version(root, "d").version == 1


def test_clients_are_told_paths_from_the_repository_on(root: Path) -> None:
    assert within(root, f"{root / 'a' / '1'}: or {root}/b; {root}: is bad") == "a/1: or b; models: is bad"


@pytest.mark.parametrize(
    "name", ["zzz", "", ".", "..", "a/3", "./a", "../models/a", "/", ".cotenant", "README.md", "a" * 300]
)
def test_names_that_are_no_model_are_unknown(root: Path, name: str) -> None:
    (root.parent / "config.toml").write_text(config(), encoding="utf-8")  # '..' would find one
    with pytest.raises(UnknownModelError, match="no such directory in the repository"):
        find_versions(root, name)


def test_what_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: is not a directory, expected a model repository"):
        model_names(tmp_path / "nowhere")
    (root / "a" / "4").mkdir()
    with pytest.raises(ConfigError, match=r"4/model.onnx: is missing; put the model's file there"):
        find_versions(root, "a")
    (root / "c").mkdir()
    with pytest.raises(ConfigError, match=r"c/config.toml: is missing; 'cotenant init"):
        find_versions(root, "c")
    write_model(root, "d", config(), {})
    with pytest.raises(ConfigError, match=r"d: has no version, expected a directory '1'"):
        find_versions(root, "d")


def test_state_lies_beside_the_models(root: Path) -> None:
    assert profile_path(root).parent == trace_path(root).parent == root / ".cotenant"
