"""Opens a model file with the engine of its format and the registered run strategies."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from cotenant.execute.errors import ModelError
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import ModelFile, strategies
from cotenant.repository.formats import Arithmetic, Format, formats
from cotenant.work import CPU


def engine_of(path: Path) -> Format:
    """The format of the file, which names its engine. Raises ModelError for an unknown suffix."""
    known = formats()
    found = known.get(path.suffix)
    if found is None:
        raise ModelError(path, f"no engine runs files that end in {path.suffix!r}", f"Give one of {', '.join(known)}")
    return found


def import_engine(suffix: str) -> None:
    """Import what opens files that end in `suffix`. Raises KeyError for an unknown one, and errors of its import."""
    resolve_name(formats()[suffix].factory)


def open_model(
    path: Path,
    *,
    cache_dir: Path | None = None,
    name: str = "",
    device: str = CPU,
    content: str = "",
    arithmetic: Arithmetic = Arithmetic(),
) -> Runner:
    """Open the model file at `path` on the CPU, or on "cuda:N".

    Copies of its files and the engine's prepared graph are kept in `cache_dir`. `name` is for messages, by default the
    file's stem. `content` is "", or the folder name (of `graph_path`) of an earlier call, which is opened whatever is
    at `path` now.

    Raises ModelError when the file cannot be read or run, or its content is not `content`. Raises it when the engine is
    not installed, or does not support `device` or `arithmetic`.
    """
    engine = engine_of(path)
    if importlib.util.find_spec(engine.package) is None:
        raise ModelError(path, f"it needs {engine.package}, which is not installed", f"Run: {engine.install}")
    if device.partition(":")[0] not in engine.devices:
        others = [each.suffix for each in formats().values() if device.partition(":")[0] in each.devices]
        raise ModelError(
            path,
            f"{engine.package} runs it only on {' and '.join(engine.devices)}",
            f"Export it as {' or '.join(others)} for {device}" if others else f"Nothing runs on {device}",
        )
    is_exact = arithmetic.precision in ("fp32", "tf32")
    if not engine.has_arithmetic and not (is_exact and not arithmetic.lays_out):
        which = "channels_last is true" if is_exact else f"precision is {arithmetic.precision!r}"
        suffixes = " or ".join(each.suffix for each in formats().values() if each.has_arithmetic)
        raise ModelError(
            path, f"{which}, which {engine.package} cannot change", f"Leave that out, or export it as {suffixes}"
        )
    file = ModelFile(path, cache_dir, name, device, content, arithmetic)
    opened = partial(_by_engine, engine, file)
    for strategy in strategies().values():
        opened = partial(strategy.open, file, opened)
    return opened()


def _by_engine(engine: Format, file: ModelFile) -> Runner:
    more = {"arithmetic": file.arithmetic} if engine.has_arithmetic else {}
    given = {"cache_dir": file.cache_dir, "name": file.name, "device": file.device, "content": file.content}
    made: Runner = resolve_name(engine.factory)(file.path, **given, **more)
    return made
