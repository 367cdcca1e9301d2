"""Clients of both protocols that ask for applications."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import np_to_triton_dtype

from application_samples import chain, diamond, x_of

CLIENTS = {"http": triton_http, "grpc": triton_grpc}
WAIT_S = 30.0


def tensors(triton: Any, arrays: dict[str, Any], **options: Any) -> list[Any]:
    made = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **options)
        made.append(tensor)
    return made


def check_stream(grpc_port: int) -> None:
    """Ten queries of two applications over one stream, each with its own answer."""
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for seed in range(10):
            name = "chain" if seed % 2 else "diamond"
            client.async_stream_infer(name, tensors(triton_grpc, {"x": x_of(seed, 2)}), request_id=str(seed))
        for _ in range(10):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            seed = int(result.get_response().id)
            expected = chain(x_of(seed, 2))[0] if seed % 2 else diamond(x_of(seed, 2))
            np.testing.assert_allclose(result.as_numpy("y" if seed % 2 else "total"), expected, rtol=1e-5)
        client.stop_stream()


def check_calls_given_up(grpc_port: int) -> None:
    """Forty calls side by side, a quarter of them cancelled at once: every one has one end."""
    done: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        for seed in range(40):
            call = client.async_infer(
                "diamond", tensors(triton_grpc, {"x": x_of(seed, 2)}), lambda result, error: done.put((result, error))
            )
            if seed % 4 == 0:
                call.cancel()
        for _ in range(40):
            result, error = done.get(timeout=WAIT_S)
            assert (result is None) != (error is None)
            assert error is None or "CANCELLED" in str(error.status())
