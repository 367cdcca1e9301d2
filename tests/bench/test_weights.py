"""Released weights are fetched, checked, and found: on networks that are made here, so that nothing is downloaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench import _weights
from bench.__main__ import main
from bench._registry import BenchError
from bench._weights import Arrays, Network, digest_of, find_weights
from bench.papers.abacus._a100 import A100, FOUR
from cotenant.core.predictor import Member
from cotenant.work import Work

MADE = "a/all.ckpt", "b/all.ckpt"


def arrays(seed: int) -> Arrays:
    """Weights of the form of a released network for pairs of seven models."""
    random = np.random.default_rng(seed)
    shapes = {"W1": (32, 15), "b1": (32,), "W2": (32, 32), "b2": (32,), "W3": (32, 32), "b3": (32,)}
    shapes |= {"W4": (1, 32), "b4": (1,)}
    return {name: random.random(shape, dtype=np.float32) for name, shape in shapes.items()}


def checkpoint(path: Path, weights: Arrays) -> Path:
    import torch

    layers = dict(zip("1234", ("hidden1", "hidden2", "hidden3", "predict"), strict=True))
    parts = {"W": "weight", "b": "bias"}
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {f"{layers[key[1]]}.{parts[key[0]]}": torch.from_numpy(value) for key, value in weights.items()}
    torch.save(state, path)
    return path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two networks that are known; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    networks = [Network(f"{number}.npz", name, digest_of(arrays(number))) for number, name in enumerate(MADE)]
    monkeypatch.setattr(_weights, "NETWORKS", tuple(networks))
    for number, name in enumerate(MADE):
        checkpoint(tmp_path / "checkout" / name, arrays(number))
    return tmp_path / "checkout"


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("cache/**/*") if path.is_file())


@pytest.fixture
def served(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The checkout over HTTP, as the repository has it. Files in the dictionary end early."""
    cut: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix(f"/raw/{_weights.COMMIT}/")
            path = checkout / name
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(cut.get(name, content))

        def log_message(self, *about: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(_weights, "REPOSITORY", f"http://127.0.0.1:{server.server_port}")
    yield cut
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_is_converted_checked_and_kept(
    served: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch"]) == 0
    assert kept(tmp_path) == ["0.npz", "1.npz"]
    stored = np.load(find_weights(tmp_path, "1.npz"))
    assert all(np.array_equal(stored[name], value) for name, value in arrays(1).items())
    assert capsys.readouterr().out.count(": kept") == 2
    assert main(["fetch"]) == 0
    assert capsys.readouterr().out.count(": is there") == 2


def test_a_wrong_digest_names_the_file_and_both_digests(
    served: dict[str, bytes], checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(checkout / MADE[0], arrays(7))
    assert main(["fetch"]) == 2
    error = capsys.readouterr().err
    assert f"{_weights.REPOSITORY}/raw/{_weights.COMMIT}/{MADE[0]}" in error
    assert digest_of(arrays(7)) in error
    assert digest_of(arrays(0)) in error
    assert kept(tmp_path) == []


def test_a_download_that_ends_early_leaves_nothing(
    served: dict[str, bytes], checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served[MADE[1]] = (checkout / MADE[1]).read_bytes()[:100]
    assert main(["fetch"]) == 2
    assert f"{MADE[1]}: ended after 100 of" in capsys.readouterr().err
    assert kept(tmp_path) == ["0.npz"]  # which was whole before
    del served[MADE[1]]
    assert main(["fetch"]) == 0
    assert kept(tmp_path) == ["0.npz", "1.npz"]


def test_what_cannot_be_written_leaves_nothing_half_written(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(file: object, **_: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    assert main(["fetch", "--from", str(checkout)]) == 130
    assert kept(tmp_path) == []


def test_a_file_that_is_not_there_is_named(
    served: dict[str, bytes], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / MADE[0]).unlink()
    assert main(["fetch"]) == 2
    error = capsys.readouterr().err
    assert f"{MADE[0]}: cannot be downloaded" in error
    assert "fetch --from DIR" in error
    assert main(["fetch", "--from", str(checkout)]) == 2
    assert f"{checkout / MADE[0]}: cannot be read" in capsys.readouterr().err


def test_a_broken_file_in_the_cache_is_got_again(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "cotenant-bench" / "abacus"
    folder.mkdir(parents=True)
    (folder / "0.npz").write_bytes(b"no zip")
    np.savez(folder / "1.npz", **arrays(0))  # type: ignore[arg-type]
    assert main(["fetch", "--from", str(checkout)]) == 0
    assert np.array_equal(np.load(folder / "0.npz")["W1"], arrays(0)["W1"])
    assert np.array_equal(np.load(folder / "1.npz")["W1"], arrays(1)["W1"])


def test_one_checkpoint_is_known_by_its_digest(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "--from", str(checkout / MADE[1])]) == 0
    assert kept(tmp_path) == ["1.npz"]
    other = checkpoint(tmp_path / "other.ckpt", arrays(7))
    assert main(["fetch", "--from", str(other)]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in (str(other), digest_of(arrays(7)), *MADE))
    assert kept(tmp_path) == ["1.npz"]


class Evil:
    """Something whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    import torch

    torch.save({"hidden1.weight": Evil(tmp_path / "ran")}, tmp_path / "evil.ckpt")
    with pytest.raises(BenchError, match=r"evil\.ckpt: is no checkpoint"):
        _weights.read_checkpoint((tmp_path / "evil.ckpt").read_bytes(), "evil.ckpt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BenchError, match="text: is no checkpoint"):
        _weights.read_checkpoint(b"no zip", "text")


def test_weights_are_looked_for_in_the_data_and_then_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, cache = tmp_path / "data" / "abacus", tmp_path / "cache" / "cotenant-bench" / "abacus"
    with pytest.raises(BenchError, match=r"neither .*data.* nor .*cache.*: get them with 'python -m bench fetch'"):
        find_weights(tmp_path / "data")
    for folder in (cache, data):
        folder.mkdir(parents=True)
        np.savez(folder / _weights.PAIRS, **arrays(0))  # type: ignore[arg-type]
        assert find_weights(tmp_path / "data").parent == folder


def test_the_released_networks_give_the_latencies_that_are_known(papers_data: Path) -> None:
    known = {  # by device: groups of models, batch, ms
        "a100": ((("resnet50", "bert"), 8, 10.94), (("resnet101", "resnet152", "vgg19"), 16, 36.7)),
        "mig2g": ((("resnet101", "resnet152"), 32, 114.4),),
        "mig4g": (((*FOUR,), 8, 28.7),),
    }
    for network in _weights.NETWORKS:
        try:
            stored = np.load(find_weights(papers_data, network.file))
        except BenchError:
            pytest.skip(f"needs the released weights: run '{_weights.COMMAND}'")
        assert digest_of({name: stored[name] for name in stored.files}) == network.sha256
    for device, groups in known.items():
        world = A100(papers_data, device=device)
        for models, batch, ms in groups:
            group = tuple(
                Member(Work(name, 2 if name == "bert" else 0, batch, 0, world.operators(name)), 1) for name in models
            )
            assert world.latencies_ms([group])[0] == pytest.approx(ms, abs=0.05)
