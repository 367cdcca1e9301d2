"""`cotenant infer`: send one query to a running server and print the response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from cotenant.wire.api import Array

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MOST_ROWS = 4
_MOST_VALUES = 10
"""Values of a row that are printed; of a longer row the largest ones."""


def infer(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Inputs: JSON, a text, @FILE.npy, @FILE.json or @PICTURE.jpg. 'NAME=' may be left out for an only "
            "input; a single number fills the whole input. Inputs that are left out get made-up values.",
            show_default=False,
        ),
    ] = None,
    http: Annotated[str, typer.Option(help="URL of the server's HTTP front end.")] = "http://127.0.0.1:8000",
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Where MODEL/labels.txt and MODEL/config.toml lie, if here.")
    ] = Path("models"),
    as_json: AsJson = False,
) -> None:
    """Send one query to a running server: outputs with labels, latency, and how to explain the query."""
    import numpy as np

    from cotenant.wire.client import InferenceClient

    with InferenceClient(http) as client:
        specs = client.metadata(model)["inputs"]
        inputs, invented = inputs_of(specs, values or [], _declared(repository / model))
        reply = client.infer(model, inputs)
    if as_json:
        outputs = {
            name: {"shape": list(array.shape), "dtype": str(array.dtype), "values": _plain(array)}
            for name, array in reply.outputs.items()
        }
        print_json({"model": model, "query": reply.query, "ms": reply.took_s * 1e3, "outputs": outputs})
        return
    labels = _labels(repository / model)
    for name, array in reply.outputs.items():
        rows = [array] if array.ndim < 2 else list(array[:_MOST_ROWS])
        texts = [_row_words(np.ravel(row), labels) for row in rows]
        print(f"{name}  {array.dtype}{list(array.shape)}: " + "\n  ".join(texts if len(texts) == 1 else ["", *texts]))
    if invented:
        print(f"Made-up values: {', '.join(invented)}. Give yours as NAME=VALUE.")
    print(f"Answered in {reply.took_s * 1e3:.1f} ms, query {reply.query}.")
    print(f"  cotenant explain {reply.query} {repository}")


def inputs_of(
    specs: Sequence[Mapping[str, Any]], given: Sequence[str], declared: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Array], list[str]]:
    """Arrays by input from the values on the command line, and the names of inputs with made-up values.

    `specs` are the inputs of the model's metadata; -1 is an open dimension. `declared` are shapes for made-up values.
    Raises ConfigError for an unknown input, and for a value that does not fit.
    """
    from cotenant.errors import ConfigError

    known = {spec["name"]: spec for spec in specs}
    texts: dict[str, str] = {}
    for text in given:
        name, is_named, value = text.partition("=")
        if not is_named or (name not in known and len(known) == 1 and not name.isidentifier()):
            if len(known) != 1:
                raise ConfigError(
                    f"{text!r}: the model has {len(known)} inputs, expected NAME=VALUE: {', '.join(known)}"
                )
            name, value = next(iter(known)), text
        if name not in known:
            raise ConfigError(f"the model has no input {name!r}, it has {', '.join(known)}")
        texts[name] = value
    made = {
        name: _array(name, spec, texts[name]) if name in texts else _invented(spec, declared.get(name))
        for name, spec in known.items()
    }
    return made, [name for name in known if name not in texts]


def _array(name: str, spec: Mapping[str, Any], text: str) -> Array:
    import numpy as np

    from cotenant.errors import ConfigError
    from cotenant.wire.codec import DTYPES

    dtype, shape = DTYPES[spec["datatype"]], [int(dim) for dim in spec["shape"]]
    if text.startswith("@"):
        value = _read(name, Path(text[1:]), spec["datatype"], shape)
    else:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
    if spec["datatype"] == "BYTES":
        array = np.array(value, np.object_)
        array = np.vectorize(lambda each: each if isinstance(each, bytes) else str(each).encode(), otypes="O")(array)
    else:
        try:
            array = np.array(value).astype(dtype)
        except (ValueError, TypeError):
            raise ConfigError(f"input {name!r}: {text[:80]!r} holds no {spec['datatype']} values") from None
    if array.ndim == 0:
        return np.full([max(dim, 1) for dim in shape], array[()], array.dtype)
    if array.ndim == len(shape) - 1:
        array = array[np.newaxis]
    fits = array.ndim == len(shape) and all(dim in (-1, had) for dim, had in zip(shape, array.shape, strict=True))
    if not fits:
        raise ConfigError(f"input {name!r}: the value has the shape {list(array.shape)}, the model takes {shape}")
    return array


def _read(name: str, path: Path, datatype: str, shape: Sequence[int]) -> Any:
    import numpy as np

    from cotenant.errors import ConfigError
    from cotenant.files import read_bytes

    try:
        if path.suffix.lower() in _PICTURES and datatype != "BYTES":
            return _pixels(name, path, datatype, shape)
        content = read_bytes(path, ConfigError)
        if path.suffix == ".npy":
            return np.load(BytesIO(content), allow_pickle=False)
        return json.loads(content) if path.suffix == ".json" else content
    except (OSError, ValueError) as error:
        raise ConfigError(f"input {name!r}: {path} cannot be read: {error}") from None


def _pixels(name: str, path: Path, datatype: str, shape: Sequence[int]) -> Any:
    """A picture as RGB (or grey) of the input's size; floats run from 0 to 1. Raises ConfigError."""
    import numpy as np

    from cotenant.errors import ConfigError

    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"input {name!r}: pictures need Pillow: pip install 'cotenant[zoo]'") from None
    is_first = len(shape) == 4 and shape[1] in (1, 3)
    channels, height, width = (
        shape[1:] if is_first else (shape[3], shape[1], shape[2]) if len(shape) == 4 else (0, 0, 0)
    )
    if channels not in (1, 3):
        raise ConfigError(f"input {name!r}: takes {list(shape)}, expected one or three channels for a picture")
    with Image.open(path) as picture:
        made = picture.convert("L" if channels == 1 else "RGB")
        size = (width if width > 0 else made.width, height if height > 0 else made.height)
        pixels = np.asarray(made.resize(size)).reshape(size[1], size[0], channels)
    if datatype.startswith("FP"):
        pixels = pixels.astype(np.float32) / 255
    return pixels.transpose(2, 0, 1) if is_first else pixels


def _invented(spec: Mapping[str, Any], declared: Sequence[int] | None) -> Array:
    """Numbers around 0, ones, or a text; always the same ones."""
    import numpy as np

    from cotenant.wire.codec import DTYPES

    dtype, shape = DTYPES[spec["datatype"]], [max(int(dim), 1) for dim in declared or spec["shape"]]
    if spec["datatype"] == "BYTES":
        return np.full(shape, b"text", np.object_)
    if spec["datatype"].startswith(("FP", "BF")):
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)


def _declared(folder: Path) -> dict[str, tuple[int, ...]]:
    """The first shape that the model's configuration declares, where it can be read here."""
    from cotenant.config import load_model_config
    from cotenant.errors import ConfigError
    from cotenant.repository import CONFIG_FILE

    try:
        shapes = load_model_config(folder / CONFIG_FILE).model.shapes
    except ConfigError:
        return {}
    return shapes[0] if shapes else {}


def _labels(folder: Path) -> list[str]:
    try:
        return (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _plain(array: Array) -> Any:
    return array.astype(str).tolist() if array.dtype.kind == "O" else array.tolist()


def _row_words(row: Array, labels: Sequence[str]) -> str:
    """The values of a row; of a long one, or of one with a label for each value, the largest."""
    if row.dtype.kind == "O":
        return ", ".join(
            each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in row[:_MOST_VALUES]
        )
    if len(row) == len(labels):
        best = row.argsort()[::-1][:3]
        return ", ".join(f"{labels[at]} {row[at]:.4g}" for at in best)
    if len(row) > _MOST_VALUES:
        best = row.argsort()[::-1][:3]
        return f"{len(row)} values; largest: " + ", ".join(f"[{at}] {row[at]:.4g}" for at in best)
    return ", ".join(f"{each:.4g}" for each in row)
