"""A model of Triton's Python back end: one ONNX file with onnxruntime, one thread a call, no spinning.

The server forms batches of requests where it is configured to; those of one batch run in one call. It runs in the
peer's own environment and imports nothing of cotenant.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    """`parameters.path` is the file."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Open the model and run nothing yet."""
        self.config = json.loads(arguments["model_config"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        path = self.config["parameters"]["path"]["string_value"]
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch of requests; their inputs have one shape except for the number of rows."""
        given = [
            {name: backend.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            for request in requests
        ]
        if len({tuple(array.shape[1:] for array in each.values()) for each in given}) > 1:
            return [self._answer(self._run(each)) for each in given]
        rows = [len(next(iter(each.values()))) for each in given]
        joined = given[0] if len(given) == 1 else {n: np.concatenate([each[n] for each in given]) for n in self.inputs}
        made = self._run(joined)
        if len(given) == 1:
            return [self._answer(made)]
        ends = np.cumsum(rows).tolist()
        return [
            self._answer([array[end - count : end] for array in made]) for end, count in zip(ends, rows, strict=True)
        ]

    def _run(self, inputs: dict[str, Any]) -> list[Any]:
        made: list[Any] = self.session.run(self.outputs, inputs)
        return made

    def _answer(self, outputs: list[Any]) -> Any:
        return backend.InferenceResponse(
            [backend.Tensor(name, array) for name, array in zip(self.outputs, outputs, strict=True)]
        )
