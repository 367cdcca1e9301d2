"""A tuned runtime for MLServer: onnxruntime with one thread a call, no spinning, binary tensors over HTTP.

MLServer's REST front-end takes JSON only. Its own decoding turns every tensor into a list of Python numbers, which
costs more than some of the models. The comparison is to be one of scheduling. So requests come in through a custom REST
handler of MLServer, in the protocol's binary form, and are decoded with numpy. It runs in MLServer's own environment
and imports nothing of cotenant.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime
from fastapi import Body, Header, Response
from mlserver import MLModel
from mlserver.handlers.custom import CustomHandler, register_custom_handler

_TYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32, "UINT8": np.uint8}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_pool: ThreadPoolExecutor | None = None


def _threads(count: int) -> ThreadPoolExecutor:
    """One pool per process, shared by all models: as many calls at once as this process has cores to use."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(count)
    return _pool


class OnnxRuntime(MLModel):
    """One ONNX file. `parameters.threads` is the number of calls that this process runs at once."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)

        async def binary_infer(
            body: bytes = Body(media_type="application/octet-stream"),
            length: int = Header(alias="Inference-Header-Content-Length"),
        ) -> Response:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, self._infer, body, length)

        # No route of MLServer's own matches a name with '/' in it.
        handler = CustomHandler(rest_path=f"/v2/models/binary/{settings.name}/infer")
        register_custom_handler(handler, binary_infer)
        self.binary_infer = binary_infer

    async def load(self) -> bool:
        """Open the model and run nothing yet."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        parameters = self.settings.parameters
        assert parameters is not None
        self._session = onnxruntime.InferenceSession(parameters.uri, options, providers=["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        self._executor = _threads(int(parameters.threads))
        return True

    def _infer(self, body: bytes, length: int) -> Response:
        inputs: dict[str, Any] = {}
        at = length
        for tensor in json.loads(body[:length])["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            kind = _TYPES[tensor["datatype"]]
            inputs[tensor["name"]] = np.frombuffer(body, kind, size // np.dtype(kind).itemsize, at).reshape(
                tensor["shape"]
            )
            at += size
        arrays = self._session.run(self._names, inputs)
        outputs = [
            {
                "name": name,
                "shape": array.shape,
                "datatype": _NAMES[array.dtype],
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in zip(self._names, arrays, strict=True)
        ]
        head = json.dumps({"model_name": self.name, "outputs": outputs}).encode()
        content = b"".join((head, *(array.tobytes() for array in arrays)))
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return Response(content, media_type="application/octet-stream", headers=headers)
