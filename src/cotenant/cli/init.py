"""`cotenant init`: a model repository from bare model files, with a measured first configuration for each model."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.config import ServerConfig
    from cotenant.measure.load_spec import LoadReport
    from cotenant.measure.loader_process import Loader
    from cotenant.profiles.profile_file import Point
    from cotenant.repository.sources import BareModel

_FACTOR = 3.0
"""SLO over the p95 of a full batch: room for one batch that runs, one that waits, and the answer."""
_LEAST_SLO_MS = 20
"""Below, the server's own time for a request decides (docs/benchmarks.md, `overhead`)."""
_UNTRIED_SLO_MS = 1000
_DEFAULT = Path("models")


@dataclass(frozen=True, slots=True)
class Draft:
    """A first configuration. `slo_basis` and `batch_basis` are sentences for the comments; `shapes` by input."""

    name: str
    slo_ms: int
    slo_basis: str
    max_batch: int
    batch_basis: str
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    warning: str = ""


def init(
    paths: Annotated[list[Path], typer.Argument(help="Files (.onnx, .pt2), or a directory with such files.")],
    repository: Annotated[
        Path | None,
        typer.Option(
            "--repository",
            "-r",
            help="The model repository. Default: the directory that is given, or 'models' for files.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model repository from bare model files: layout, input shapes, batch size and a first SLO, measured here.

    Files that are given by name are copied into the repository; files of a directory that becomes the repository are
    moved within it. A model that has a configuration already is left alone.
    """
    from cotenant.cli.progress import progress
    from cotenant.config import load_server_config
    from cotenant.errors import ConfigError, CotenantError
    from cotenant.measure.loader_process import Loader
    from cotenant.measure.quick_profiles import QuickProfiles
    from cotenant.repository import SERVER_FILE, quick_profiles_path
    from cotenant.repository.sources import sources_of

    root = repository or (paths[0] if len(paths) == 1 and paths[0].is_dir() else _DEFAULT)
    sources = [source for path in paths for source in sources_of(path)]
    if twice := [name for name, count in Counter(each.name for each in sources).items() if count > 1]:
        raise ConfigError(f"several files would become the model {min(twice)!r}; rename one of them")
    root.mkdir(parents=True, exist_ok=True)
    settings = load_server_config(root / SERVER_FILE)
    quick = QuickProfiles(quick_profiles_path(root) if settings.device.kind == "cpu" else None)
    made: list[Draft] = []
    errors: dict[str, str] = {}
    with (
        closing(Loader(settings.server.load_limit_s, is_quiet=True)) as loader,
        progress("init", quiet=as_json) as on_step,
    ):
        for at, source in enumerate(sources):
            on_step(at, len(sources), f"{source.name} is opened and measured")
            try:
                report = measured(root, source, settings, loader)
                draft = drafted(source.name, report)
                _place(root, source, draft)
            except CotenantError as error:
                errors[source.name] = str(error)
            else:
                made.append(draft)
                if report.is_measured:
                    quick.add(report.profile)
    if as_json:
        rows = [{"model": each.name, "slo_ms": each.slo_ms, "max_batch": each.max_batch} for each in made]
        print_json({"repository": str(root), "models": rows, "errors": errors})
    else:
        _print(root, made, errors)
    if errors:
        raise typer.Exit(1)


def measured(root: Path, source: BareModel, settings: ServerConfig, loader: Loader) -> LoadReport:
    """Open, try and measure a model in a child process. Raises ConfigError, ModelError and VersionLoadError."""
    from cotenant.config import ModelConfig, TenantSection
    from cotenant.errors import ConfigError
    from cotenant.measure.load_spec import VersionSpec
    from cotenant.measure.sweep import served_shares
    from cotenant.repository import CONFIG_FILE, ModelVersion

    if (root / source.name / CONFIG_FILE).exists():
        raise ConfigError(f"{root / source.name / CONFIG_FILE}: is there already; edit it, or remove it to start anew")
    if not source.is_placed and (root / source.name).is_dir() and root / source.name not in source.path.parents:
        raise ConfigError(f"{root / source.name}: is there already; rename {source.path.name}, or remove the directory")
    config = ModelConfig(tenant=TenantSection(slo_ms=_UNTRIED_SLO_MS))
    found = ModelVersion(source.name, 1, True, source.path.resolve(), config)
    shares = served_shares(settings)
    return loader.load(VersionSpec(str(root), found, shares, device=settings.device.gpu, is_draft=True))


def drafted(name: str, report: LoadReport) -> Draft:
    """The configuration that follows from the shapes, the trial of merging and the measurement."""
    model, (slo_ms, basis) = report.facts.found.config.model, _slo(report)
    reason = report.facts.merging.reason or "the first dimension of an input is fixed, or queries cannot be merged"
    return Draft(name, slo_ms, basis, model.max_batch, reason, model.shapes, report.warning)


def _slo(report: LoadReport) -> tuple[int, str]:
    """The SLO in ms and the sentence that gives its reason."""
    if report.warning:
        return _UNTRIED_SLO_MS, f"It could not be measured ({report.warning}): set the target that you promise."
    rows = report.facts.found.config.model.max_batch
    slowest: Point = max(
        (point for point in report.profile.points if point.items == rows), key=lambda point: point.p95_ns
    )
    least_ms = _FACTOR * slowest.p95_ns / 1e6
    slo_ms = next_slo_ms(least_ms)
    unit = "core" if report.facts.device == "cpu" else "SM"
    measured = f"{slowest.origin('p95')} with {rows} row{'s' * (rows > 1)} on {slowest.cores} {unit}(s): "
    text = f"{measured}{slowest.p95_ns / 1e6:.3g} ms. Three times that, rounded up to 1, 2 or 5 times a power of ten"
    return slo_ms, f"{text}{f', but at least {_LEAST_SLO_MS} ms.' if least_ms < _LEAST_SLO_MS else '.'}"


def next_slo_ms(least_ms: float) -> int:
    """The smallest of 1, 2 and 5 times a power of ten that is above `least_ms`, at least `_LEAST_SLO_MS`."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > least_ms and step * power >= _LEAST_SLO_MS:
                return step * power
        power *= 10


def config_text(draft: Draft, file: str) -> str:
    """The `config.toml` of a model, with comments that give the reason of each value."""
    from cotenant.files import toml_text

    lines = [
        f"# Written by 'cotenant init' for {file!r}. All keys: docs/configuration.md",
        "",
        "[tenant]",
        "# Latency target of every query in ms, from the first byte of its request to its response.",
        *(f"# {line}" for line in _wrapped(draft.slo_basis)),
        f"slo_ms = {draft.slo_ms}",
        "",
        "[model]",
        "# Rows of a batch at most; 1: every query runs alone. Reason for merging them or not:",
        *(f"# {line}" for line in _wrapped(draft.batch_basis)),
        f"max_batch = {draft.max_batch}",
    ]
    for shape in draft.shapes:
        lines += [
            "",
            "# The input shape at which the model is measured; requests may have others.",
            "# Found by trial: set the shape that your clients send.",
            "[[model.shapes]]",
            toml_text(shape).rstrip(),
        ]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(" ".join(text.split()), 110)


def _place(root: Path, source: BareModel, draft: Draft) -> None:
    """Put the model's files and its configuration where the repository has them."""
    from cotenant.files import write_whole
    from cotenant.repository import CONFIG_FILE
    from cotenant.repository.formats import formats

    folder = root / source.name
    if not source.is_placed:
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        is_inside = root.resolve() in source.path.resolve().parents
        target = version / formats()[source.path.suffix].file
        for origin, copy in [*_weights(source.path, version), (source.path, target)]:  # the model's file comes last
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.move if is_inside else shutil.copyfile)(origin, copy)
    write_whole(folder / CONFIG_FILE, config_text(draft, source.path.name).encode())


def _weights(path: Path, version: Path) -> list[tuple[Path, Path]]:
    """Files with external weights of an ONNX model, and where they go."""
    if path.suffix != ".onnx":
        return []
    from cotenant.execute.onnx.segment_store import external_files

    return [(path.parent / location, version / location) for location in external_files(path, path)]


def _print(root: Path, made: Sequence[Draft], errors: dict[str, str]) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_left_out
    from cotenant.report.fitted_table import FittedTable

    console = make_console()
    if made:
        table = FittedTable("model", "SLO", "max batch", "measured at", "remark")
        for each in made:
            table.add_row(each.name, f"{each.slo_ms} ms", str(each.max_batch), _shape_words(each.shapes), each.warning)
        console.print(table)
    print_left_out(console, errors)
    if made:
        console.print(f"Read {root / made[0].name / 'config.toml'}, then:")
        console.print(f"  cotenant serve {root}")
        console.print(f"  cotenant infer {made[0].name}")


def _shape_words(shapes: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"{name} {list(dims)}" for shape in shapes for name, dims in shape.items()) or "its own shape"
