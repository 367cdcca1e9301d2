"""Applications of a model repository: `NAME/config.toml` with `[application]`, read and checked without its models.

`serve.models.served_application` checks the tensors of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from cotenant.config import NS_PER_MS, ApplicationSection, StageSection, load_application_config
from cotenant.core.flow import StageGraph
from cotenant.errors import ConfigError, CotenantError
from cotenant.repository import CONFIG_FILE, UnknownApplicationError, application_names, is_application


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a tensor: the output `tensor` of a stage, or an input of the application if `stage` is None.

    A stage is its position in `ApplicationSpec.stages`.
    """

    stage: int | None
    tensor: str


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: a model of the repository, and the sources of its inputs."""

    name: str
    model: str
    inputs: Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class ApplicationSpec:
    """An application as declared in its file, with its stages in topological order."""

    name: str
    path: Path
    slo_ns: int
    priority: int
    stages: tuple[StageSpec, ...]
    outputs: Mapping[str, Source]
    graph: StageGraph

    @property
    def stages_text(self) -> str:
        """Text of the stages: `a -> b` for a chain, else `a, b, c (after a, b)`."""
        names, after = self.graph.names, self.graph.after
        if all(needed == tuple(range(max(0, at - 1), at)) for at, needed in enumerate(after)):
            return " -> ".join(names)
        others = [f" (after {', '.join(names[each] for each in needed)})" if needed else "" for needed in after]
        return ", ".join(name + other for name, other in zip(names, others, strict=True))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the application, in the order of their first use by a stage."""
        sources = [source for stage in self.stages for source in stage.inputs.values()]
        return tuple(dict.fromkeys(source.tensor for source in sources if source.stage is None))


def read_application(root: Path, name: str) -> ApplicationSpec:
    """Read an application of a repository.

    Raises UnknownApplicationError for an unknown name, and ConfigError with the file, the key and the expected value.
    """
    if not is_application(root, name):
        raise UnknownApplicationError(f"application {name!r}: there is no such directory in the repository")
    path = root / name / CONFIG_FILE
    versions = [entry.name for entry in path.parent.iterdir() if entry.is_dir() and entry.name.isdecimal()]
    if versions:
        raise ConfigError(
            f"{path}: application: the directory also has the version {versions[0]!r} of a model, expected an "
            "application or a model: move one of them to another directory"
        )
    return _spec(name, path, load_application_config(path))


def readable_applications(root: Path) -> dict[str, ApplicationSpec]:
    """All applications of a repository with valid files, by name."""
    found: dict[str, ApplicationSpec] = {}
    for name in application_names(root):
        try:
            found[name] = read_application(root, name)
        except CotenantError:
            continue
    return found


def _spec(name: str, path: Path, section: ApplicationSection) -> ApplicationSpec:
    where = f"{path}: application"
    names = [stage.name for stage in section.stage]
    for number, stage in enumerate(section.stage):
        if stage.model == name:
            raise ConfigError(
                f"{where}.stage[{number}].model: {name!r} is the application itself, expected a model in another "
                "directory"
            )
        if "." in stage.name:
            raise ConfigError(
                f"{where}.stage[{number}].name: {stage.name!r} has a dot, which separates a stage and its output"
            )
        if stage.name in names[:number]:
            raise ConfigError(f"{where}.stage[{number}].name: {stage.name!r} occurs twice, expected distinct names")
    order = _order(section.stage, names, where)
    at = {stage.name: number for number, stage in enumerate(order)}

    def source(text: str) -> Source:
        stage, dot, tensor = text.partition(".")
        return Source(at[stage], tensor) if dot else Source(None, text)

    stages = tuple(
        StageSpec(stage.name, stage.model, {taken: source(text) for taken, text in stage.inputs.items()})
        for stage in order
    )
    outputs: dict[str, Source] = {}
    for output, text in section.outputs.items():
        key = f"{where}.outputs.{output}"
        if "." not in text:
            raise ConfigError(f"{key}: {text!r} names no output of a stage, expected STAGE.OUTPUT")
        _check_source(text, names, key)
        outputs[output] = source(text)
    after = tuple(
        tuple(sorted({each.stage for each in stage.inputs.values() if each.stage is not None})) for stage in stages
    )
    used = {number for needed in after for number in needed} | {each.stage for each in outputs.values()}
    for number, made in enumerate(stages):
        if number not in used:
            raise ConfigError(
                f"{where}.stage[{names.index(made.name)}]: no output of stage {made.name!r} is used, expected one as "
                "the source of another stage or in [application.outputs]; or remove the stage"
            )
    graph = StageGraph(tuple(stage.name for stage in stages), after)
    return ApplicationSpec(name, path, round(section.slo_ms * NS_PER_MS), section.priority, stages, outputs, graph)


def _order(stages: tuple[StageSection, ...], names: list[str], where: str) -> list[StageSection]:
    """The stages in topological order, else in the order of the file."""
    needs: dict[str, list[str]] = {}
    for number, stage in enumerate(stages):
        needs[stage.name] = []
        for taken, text in stage.inputs.items():
            _check_source(text, names, f"{where}.stage[{number}].inputs.{taken}")
            if "." in text:
                needs[stage.name].append(text.partition(".")[0])
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise ConfigError(f"{where}.stage: stages depend on each other in a cycle: {cycle}") from None
    by_name = {stage.name: stage for stage in stages}
    order: list[StageSection] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=names.index)
        order += [by_name[name] for name in ready]
        sorter.done(*ready)
    return order


def _check_source(text: str, names: list[str], key: str) -> None:
    known = ", ".join(map(repr, names))
    stage, dot, tensor = text.partition(".")
    if not dot:
        if stage in names:
            raise ConfigError(f"{key}: {text!r} is a stage, expected one of its outputs as {text}.OUTPUT")
        return
    if stage not in names:
        raise ConfigError(
            f"{key}: {text!r} names the unknown stage {stage!r}, expected STAGE.OUTPUT with one of the stages {known}, "
            "or the name of an input of the application, which has no dot"
        )
    if not tensor:
        raise ConfigError(f"{key}: {text!r} names no output, expected {stage}.OUTPUT")
