"""Models and files that attack a load: each is refused with a sentence, within its limits, and others are served."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client import Client, started
from cotenant.config import DeviceSection
from cotenant.measure.loader_process import Loader
from cotenant.wire.api import ServeError
from hostile_models import expanding_constant, nested_branches, nested_functions
from repositories import X, config, external, scaled, write_model

TERABYTE = 1 << 40
MEMORY = "memory_limit_mib = 300"
OUTSIDE = "outside the model's directory"
NOT_REGULAR = "is a directory, a device, a FIFO or a socket"


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, NOT_REGULAR),
    "device": (link_to("/dev/zero"), NOT_REGULAR),
    "directory": (Path.mkdir, NOT_REGULAR),
    "sparse": (sparse, rf"{TERABYTE} bytes, expected \d+ at most"),
}
WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    **{kind: KINDS[kind] for kind in ("fifo", "directory")},
    "device": (link_to("/dev/zero"), OUTSIDE),
    "link": (link_to("/etc/passwd"), OUTSIDE),
    "sparse": (sparse, r"its files have 1024 GiB, and the machine has \d+ GiB of memory"),
}
ATTACKS: dict[str, tuple[Callable[[], object] | bytes, str]] = {
    "expanding": (expanding_constant, r"took \d+ MiB, and 300 MiB are allowed"),
    "functions": (nested_functions, r"opening its files had not ended in time|took \d+ MiB"),
    "deep": (nested_branches(29).SerializeToString() + b"\xff", "no readable ONNX model"),
    "dots": (lambda: external("../../../etc/passwd"), OUTSIDE),
    "absolute": (lambda: external("/etc/passwd"), OUTSIDE),
}


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def write(root: Path) -> dict[str, str]:
    """A repository of all of them; gives the sentence of each."""
    sentences = {}
    for kind, (make, sentence) in KINDS.items():
        write_model(root, f"is_{kind}", config(more=MEMORY), {1: b""})
        path = root / f"is_{kind}" / "1" / "model.onnx"
        path.unlink()
        make(path)
        sentences[f"is_{kind}"] = sentence
    for kind, (make, sentence) in WEIGHTS.items():
        write_model(root, f"has_{kind}", config(more=MEMORY), {1: lambda: external("weights")})
        make(root / f"has_{kind}" / "1" / "weights")
        sentences[f"has_{kind}"] = sentence
    for name, (content, sentence) in ATTACKS.items():
        write_model(root, name, config(more=MEMORY), {1: content})  # type: ignore[dict-item]
        sentences[name] = sentence
    return sentences


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_each_attack_is_refused_while_others_are_served(tmp_path: Path, isolation: str) -> None:
    write_model(tmp_path, "good", config(max_batch=4), {1: lambda: scaled(2.0)})
    loader = Loader(4.0)
    server = started(tmp_path, loader=loader, device=DeviceSection(isolation=isolation))  # type: ignore[arg-type]
    try:
        client, is_over, wrong = Client(server), threading.Event(), []
        sentences = write(tmp_path)
        before = resident_mib()

        def ask() -> None:
            while not is_over.is_set():
                result = client.ask("good", X)
                if not result.outputs or not np.allclose(result.outputs["y"], 2 * X["x"] / (1 + abs(X["x"])), 1e-4):
                    wrong.append(result)

        asking = threading.Thread(target=ask)
        asking.start()
        for name, sentence in sentences.items():
            with pytest.raises(ServeError, match=sentence):
                server.load(name)
        is_over.set()
        asking.join()
        assert wrong == []
        assert resident_mib() - before < 100
        assert server.model_ready("good", "")
        assert not any(server.names.get(name).is_served for name in sentences)
    finally:
        server.stop()
        loader.close()
