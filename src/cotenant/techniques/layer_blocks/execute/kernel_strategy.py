"""The run strategy of compiled kernels, for ONNX models with a choice of `cotenant compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET, UnsetType
from typing_extensions import override

from cotenant.execute.protocol import Shapes
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import ModelFile, RunStrategy
from cotenant.profiles.version_table import VersionTable
from cotenant.techniques.layer_blocks.execute.choice import CHOICES, FOLDER


class KernelRunStrategy(RunStrategy):
    """Opens models with the kernels that were chosen for them on this machine.

    Such a model has its own graph, in ONNX layout, so that its engine does not open it before. If the kernels cannot be
    used, a warning gives the cause, and the model runs without them.
    """

    @override
    def open(self, file: ModelFile, inner: Callable[[], Runner]) -> Runner:
        if file.path.suffix != ".onnx" or file.cache_dir is None or not (file.cache_dir / FOLDER / CHOICES).is_dir():
            return inner()
        from cotenant.techniques.layer_blocks.execute.loaded_kernels import open_chosen

        return open_chosen(file, file.cache_dir) or inner()

    @override
    def versions(
        self, model: Runner, shapes: Shapes, unit_ns: Sequence[int], whole_ns: Mapping[int, int]
    ) -> VersionTable | UnsetType:
        if not model.kernels:
            return UNSET
        from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
        from cotenant.techniques.layer_blocks.measure.version_costs import version_costs

        return version_costs(model, shapes, unit_ns, whole_ns) if isinstance(model, CompiledModel) else UNSET
