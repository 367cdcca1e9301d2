"""Networks by size of group: each is asked only for what it was fitted for, and anything else is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from abacus_networks import folder, group, sums
from bench import _weights
from bench.__main__ import main
from bench._registry import BenchError
from bench._weights import MIG4G, PAIRS, TRIPLES, Network, digest_of
from bench.papers.abacus._a100 import A100, FOUR, files_of


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with made networks by the names of the released ones; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder(tmp_path / "data")


def test_every_size_has_its_own_network(data: Path) -> None:
    world = A100(data)
    groups = [group("bert", "vgg19"), group(*FOUR[:3]), group("resnet50"), group("vgg19", "bert"), group("vgg16")]
    with_bert = 2 * 6 + 8
    assert world.latencies_ms(groups).tolist() == [2000 + with_bert, 3018, 2006, 2000 + with_bert, 2006]
    assert world.latency_ns(group(*FOUR[:3])) == world.latency_ns(group(*reversed(FOUR[:3]))) == 3018e6
    assert [world.most(FOUR[:count]) for count in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert A100(data, {4: data / "abacus" / MIG4G}).most(FOUR) == 4
    assert A100(data, {1: sums(data / "one.npz", 1)}).latencies_ms([group("vgg19")]).tolist() == [1006]


def test_a_size_without_a_network_is_an_error(data: Path) -> None:
    with pytest.raises(BenchError, match=r"no network for groups of 4: there are those for 2, 3; give 4=FILE"):
        A100(data).latency_ns(group(*FOUR))
    slices = A100(data, device="mig4g")
    assert slices.latencies_ms([group(*FOUR)]).tolist() == [4032]
    for size in (1, 2, 3):
        with pytest.raises(BenchError, match=rf"no network for groups of {size}: there are those for 4"):
            slices.latency_ns(group(*FOUR[:size]))
    with pytest.raises(BenchError, match="no network for groups of 1"):
        slices.most(FOUR)
    (data / "abacus" / TRIPLES).unlink()
    world = A100(data)  # what nobody asks for need not be there
    assert world.most(FOUR[:2]) == 2
    with pytest.raises(BenchError, match=rf"{TRIPLES}: get them with"):
        world.most(FOUR[:3])


def test_models_that_a_network_was_not_fitted_for_are_an_error(data: Path) -> None:
    world = A100(data)
    with pytest.raises(
        BenchError, match=r"3in4\.npz: was not fitted for resnet50: its groups of 3 are of resnet101, re"
    ):
        world.latency_ns(group("resnet50", "vgg19", "bert"))
    with pytest.raises(BenchError, match="was not fitted for vgg16"):
        world.most(("vgg16", "vgg19", "bert"))
    with pytest.raises(BenchError, match="a group with bert twice"):
        world.latency_ns(group("bert", "bert"))


def test_weights_for_another_size_are_an_error(data: Path) -> None:
    four, pairs = data / "abacus" / MIG4G, data / "abacus" / PAIRS
    with pytest.raises(BenchError, match=r"takes 23 inputs, expected 15: a bit for each of 7 models and four numbers"):
        A100(data, {2: four})
    with pytest.raises(BenchError, match=r"takes 15 inputs, expected 19"):
        A100(data, {3: pairs})
    # 7 + 4 x 2 inputs are 3 + 4 x 3 inputs as well: the name tells them from each other ...
    with pytest.raises(BenchError, match=r"are weights for 2 at once of 7 models, expected 3 of 3"):
        A100(data, {3: pairs}, count=3)
    world = A100(data, {3: sums(data / "three.npz", 3, known=3)}, count=3)
    assert world.latencies_ms([group("resnet50", "resnet101", "resnet152")]).tolist() == [3018]
    with pytest.raises(BenchError, match=r"layers do not fit each other"):
        A100(data, {2: sums(data / "two.npz", 2, outputs=2)})
    (data / "torn.npz").write_bytes(b"PK")
    with pytest.raises(BenchError, match=r"torn\.npz: is no predictor of the form"):
        A100(data, {2: data / "torn.npz"})


def test_released_weights_are_known_by_their_digest(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sums(data / "other.npz", 2)
    with np.load(other) as stored:
        sha = digest_of({name: stored[name] for name in stored.files})
    monkeypatch.setattr(_weights, "NETWORKS", (Network(PAIRS, "a.ckpt", sha),))
    with pytest.raises(BenchError, match=r"other\.npz: are weights for 2 at once of 7 models, expected 3 of 3"):
        A100(data, {3: other}, count=3)


def test_the_first_models_alone_have_no_released_network(data: Path) -> None:
    with pytest.raises(BenchError, match=r"4 models: the released networks know 7; give K=FILE"):
        A100(data, count=4)
    for count in (0, 8):
        with pytest.raises(BenchError, match=rf"{count} models: expected 1 to 7"):
            A100(data, count=count)
    world = A100(data, {2: sums(data / "few.npz", 2, known=4)}, count=4)
    assert world.latencies_ms([group("resnet50", "resnet101")]).tolist() == [2012]
    with pytest.raises(BenchError, match="no network for groups of 3"):
        world.latency_ns(group("resnet50", "resnet101", "resnet152"))


def test_files_are_given_by_size_of_group() -> None:
    assert files_of(None) == {}
    assert files_of(["a.npz", "3=b.npz", "4=c/d=e.npz"]) == {2: Path("a.npz"), 3: Path("b.npz"), 4: Path("c/d=e.npz")}
    assert files_of(["x/3=b.npz"]) == {2: Path("x/3=b.npz")}
    for given, words in (
        (["two=a.npz"], "two=a.npz: expected K=FILE"),
        (["0=a.npz"], "0=a.npz: expected K=FILE"),
        (["3="], "3=: expected K=FILE"),
        (["a.npz", "2=b.npz"], "there is a network for groups of 2 already, a.npz"),
    ):
        with pytest.raises(BenchError, match=words):
            files_of(given)


def test_pairs_do_not_run_on_a_network_for_four(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["abacus-pairs", "--quick", "--data", str(data), "--predictor-file"]
    assert main([*arguments, str(data / "abacus" / MIG4G)]) == 2
    assert "mig4g_4in4.npz: takes 23 inputs, expected 15" in capsys.readouterr().err
    assert main([*arguments, f"4={data / 'abacus' / MIG4G}", "--models", "7", "--predictor-file", "two=x"]) == 2
    assert "two=x: expected K=FILE" in capsys.readouterr().err
