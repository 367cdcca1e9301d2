"""The fitted predictor as a data file: arrays and one JSON text in an npz archive, without executable content."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cotenant.errors import CotenantError
from cotenant.files import decode, read_bytes, write_whole
from cotenant.predict.conformal import Margins
from cotenant.techniques.overlap.predict.measured import MeasuredGroups, MemberKey
from cotenant.techniques.overlap.predict.overlap import OverlapModel, OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import WIDTH, TenantFacts
from cotenant.techniques.overlap.predict.overlap_net import NORMS, Monotone

FORMAT = "cotenant-overlap/2"
_META = "meta"


class OverlapFileError(CotenantError):
    """A file of a fitted predictor cannot be used. The message names the file and the expected content."""


@dataclass(frozen=True, slots=True)
class _Meta:
    """An OverlapModel without its weights and measured groups."""

    monotone: Monotone
    scale_ns: float
    tenants: tuple[str, ...]
    facts: tuple[TenantFacts, ...]
    margins: Margins
    fingerprint: str
    created: str
    command: str
    digests: tuple[tuple[str, str], ...]
    format: str = FORMAT


def keep_overlap(folder: Path, predictor: OverlapPredictor) -> None:
    """Write a predictor under its key, for the replay of traces; an existing file stays."""
    path = folder / f"overlap-{predictor.key}.npz"
    if not path.exists():
        save_overlap(path, predictor)


def find_overlap(folder: Path, key: str, quantile: float) -> OverlapPredictor:
    """Read a predictor by its key. Raises OverlapFileError when there is none."""
    return read_overlap(folder / f"overlap-{key}.npz", quantile)


def save_overlap(path: Path, predictor: OverlapPredictor) -> None:
    """Write the fitted model atomically; quantile and factor are chosen when it is loaded."""
    model = predictor.model
    meta = msgspec.convert(model, _Meta, from_attributes=True)
    arrays: dict[str, Any] = {f"w_{name}": each for name, each in model.weights.items()}
    arrays["lengths"], arrays["members"] = model.measured.lengths, model.measured.members
    arrays[_META] = np.frombuffer(msgspec.json.encode(meta), dtype=np.uint8)
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_overlap(path: Path, quantile: float = 0.5) -> OverlapPredictor:
    """Read a file of `save_overlap`. Raises OverlapFileError for other or inconsistent content."""
    try:
        content = read_bytes(path, OverlapFileError, "make it with 'cotenant profile --groups'")
        with np.load(BytesIO(content), allow_pickle=False) as stored:
            meta = decode(stored[_META].tobytes(), _Meta, str(path), OverlapFileError, "fit it anew", FORMAT)
            weights = {name[2:]: stored[name] for name in stored.files if name.startswith("w_")}
            lengths, members = stored["lengths"], stored["members"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise OverlapFileError(f"{path}: is no fitted predictor ({error}); fit it anew") from None
    width = weights["b3"].size if "b3" in weights else 0
    count = len(meta.tenants) + 1
    expected = {
        "w1": (count, WIDTH, width),
        "b1": (count, width),
        "w2": (count, width, width),
        "b2": (count, width),
        "w3": (3 * width, width),
        "b3": (width,),
        "w4": (width, width),
        "b4": (width,),
        "w5": (width,),
        "skip": (3 * width,),
        "norms": (len(NORMS),),
        "b5": (1,),
    }
    found = {name: each.shape for name, each in weights.items()}
    if width < 2 or found != expected or not all(np.isfinite(each).all() for each in weights.values()):
        raise OverlapFileError(f"{path}: weights have the shapes {found}, expected {expected}, all finite")
    rows = int(lengths.sum()) if lengths.ndim == 1 and lengths.dtype.kind == "i" else -1
    if members.shape != (rows, len(MemberKey._fields)):
        raise OverlapFileError(f"{path}: measured members have the shape {members.shape}, expected {rows} rows")
    arrays = {name: each.astype(np.float32) for name, each in weights.items()}
    model = OverlapModel(
        arrays,
        measured=MeasuredGroups(lengths.astype(np.intp), members.astype(np.float64)),
        **{each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "format"},
    )
    try:
        return OverlapPredictor(model, quantile)
    except (CotenantError, IndexError) as error:
        raise OverlapFileError(f"{path}: cannot be used ({error})") from None
