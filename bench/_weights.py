"""The networks that the authors of Abacus (SC'21) released: fetched from their repository, checked, and found again.

Their repository states no licence, so ours holds a description of the networks and not the weights. The released files
are checkpoints of torch. They are read here without running their contents. The check compares the digest of the
converted arrays, whatever file they come from.
"""

from __future__ import annotations

import hashlib
import io
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._registry import BenchError
from bench._server import cache_folder

REPOSITORY, COMMIT = "https://github.com/Raphael-Hao/Abacus", "59bb21ec"
COMMAND = "python -m bench fetch"
FOLDER = "abacus"
"""In a data folder, and in the cache."""
_LAYERS = ("hidden1", "hidden2", "hidden3", "predict")
_MOST_BYTES = 1 << 20
"""A checkpoint has some 20 kB."""
_TIMEOUT_S = 60.0
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Network:
    """Weights: the file that they are kept in, the one they were released in, and the digest of the arrays."""

    file: str
    released: str
    sha256: str


PAIRS, TRIPLES = "predictor_a100_2in7.npz", "predictor_a100_3in4.npz"
MIG2G, MIG4G = "predictor_a100_mig2g_2in4.npz", "predictor_a100_mig4g_4in4.npz"
NETWORKS = (
    Network(
        PAIRS,
        "model/A100/2in7/all.ckpt",
        "696b970c9dd24bcc8da9225ea5e604abd30fe46b35e4d4f1d4904cd61a936002",
    ),
    Network(
        TRIPLES,
        "model/A100/3in4/all.ckpt",
        "3ec30bfad71976728ef4c45b02e32726a2c8f45a5d89a165e30cf170242d0a76",
    ),
    Network(
        MIG2G,
        "model/mig/2in4/all.ckpt",
        "bc9fef810dc7b27991cea6415009d8a18f46a8ac90ec2a65b639da678d26d74a",
    ),
    Network(
        MIG4G,
        "model/mig/4in4/all.ckpt",
        "dd1210b27ea5e8cf1d055c9f7568cab08bf99dfe1e0a4906f615a5f5128b6430",
    ),
)


def find_weights(data: Path, file: str = PAIRS) -> Path:
    """The file of a network, in a data folder or else in the cache. Raises BenchError where it is in neither."""
    places = [folder / FOLDER / file for folder in (data, cache_folder())]
    found = next((path for path in places if path.exists()), None)
    if found is None:
        looked = " nor ".join(str(path) for path in places)
        raise BenchError(f"the released weights are neither {looked}: get them with '{COMMAND}'")
    return found


def released_as(sha256: str) -> str | None:
    """The file of the released network with that digest; None for other weights."""
    return next((network.file for network in NETWORKS if network.sha256 == sha256), None)


def fetch(source: Path | None = None) -> None:
    """Get all networks into the cache, from the repository or a checkout of it, or one of them from a single file.

    Only networks with the right digest are kept. Raises BenchError for the first that cannot be had.
    """
    if source is not None and not source.is_dir():
        _keep_one(source)
        return
    for network in NETWORKS:
        kept = _kept(network)
        if _is_whole(kept, network):
            print(f"{kept}: is there")
            continue
        if source is None:
            place = f"{REPOSITORY}/raw/{COMMIT}/{network.released}"
            arrays = read_checkpoint(_download(place), place)
        else:
            place = str(source / network.released)
            arrays = read_checkpoint(_read(source / network.released), place)
        found = digest_of(arrays)
        if found != network.sha256:
            raise BenchError(f"{place}: holds arrays of digest {found}, expected {network.sha256}")
        _keep(arrays, kept)


def read_checkpoint(content: bytes, name: str) -> Arrays:
    """The arrays W1 b1 .. W4 b4 in a checkpoint. Raises BenchError for anything but weights of such a network."""
    try:
        import torch
    except ImportError:
        raise BenchError("checkpoints are read with torch: pip install 'cotenant[torch]'") from None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        tensors = {f"W{n}": state[f"{layer}.weight"] for n, layer in enumerate(_LAYERS, 1)}
        tensors |= {f"b{n}": state[f"{layer}.bias"] for n, layer in enumerate(_LAYERS, 1)}
        return {key: tensor.numpy() for key, tensor in tensors.items()}
    except Exception as error:  # whatever a reader of foreign bytes runs into
        reason = str(error).partition("\n")[0]
        raise BenchError(
            f"{name}: is no checkpoint of a network with the layers {', '.join(_LAYERS)} "
            f"({type(error).__name__}: {reason})"
        ) from None


def digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names: the same in whatever file they lie."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _keep_one(file: Path) -> None:
    """One checkpoint on its own: its digest says which network it is."""
    arrays = read_checkpoint(_read(file), str(file))
    found = digest_of(arrays)
    network = next((each for each in NETWORKS if each.sha256 == found), None)
    if network is None:
        known = ", ".join(f"{each.sha256} ({each.released})" for each in NETWORKS)
        raise BenchError(f"{file}: holds arrays of digest {found}, expected one of {known}")
    _keep(arrays, _kept(network))


def _kept(network: Network) -> Path:
    return cache_folder() / FOLDER / network.file


def _is_whole(path: Path, network: Network) -> bool:
    try:
        with np.load(path) as stored:
            return digest_of({name: stored[name] for name in stored.files}) == network.sha256
    except Exception:  # whatever is wrong with it, it is got again
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BenchError(
            f"{path}: cannot be read ({error.strerror}); expected a checkpoint, or a checkout of {REPOSITORY} "
            f"at {COMMIT}"
        ) from None


def _download(url: str) -> bytes:
    """All of a file, in memory: nothing is written before it is known to be right."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MOST_BYTES + 1)
            length = response.headers.get("Content-Length")
    except (OSError, HTTPException) as error:
        raise BenchError(
            f"{url}: cannot be downloaded ({error}); '{COMMAND} --from DIR' takes a checkout of the repository"
        ) from None
    if len(content) > _MOST_BYTES:
        raise BenchError(f"{url}: has more than {_MOST_BYTES} bytes, expected a small checkpoint")
    if length is not None and len(content) != int(length):
        raise BenchError(f"{url}: ended after {len(content)} of {length} bytes; try again")
    return content


def _keep(arrays: Mapping[str, Any], path: Path) -> None:
    """Write the file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    print(f"{path}: kept")
