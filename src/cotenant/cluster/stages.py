"""One stage of an application: its tensors to a node that serves its model, and the node's tensors back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import grpc

from cotenant.cluster.forward import Forwarder, LostError
from cotenant.cluster.links import GrpcReply, NodeLink
from cotenant.load.decode import grpc_outputs
from cotenant.load.encode import grpc_request
from cotenant.serve.api import UNSERVED, Array, ServeError, Status
from cotenant.serve.oip import MESSAGES, OUTCOME_KEY, SERVICE
from cotenant.types import Outcome

_UNNAMED = {
    grpc.StatusCode.UNAVAILABLE: Outcome.REJECTED,
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
}
"""What a status of gRPC is where the node does not name an outcome; all others are failures."""

_MARKS = {**{outcome.value: outcome for outcome in Outcome}, UNSERVED: Outcome.REJECTED}
"""The outcome that a node's mark names."""


class StageEnd(NamedTuple):
    """How a stage ended: its outputs where it was answered, else the reason."""

    outcome: Outcome
    reason: str
    outputs: Mapping[str, Array]


async def ask_stage(
    forwarder: Forwarder, model: str, inputs: Mapping[str, Array], parameters: Mapping[str, int]
) -> StageEnd:
    """Send a query to a node of the model. Whatever happens there, or on the way, is an end."""
    data = grpc_request(model, inputs, parameters)

    async def attempt(link: NodeLink, spent_ns: int) -> GrpcReply:
        return await link.grpc(f"/{SERVICE}/ModelInfer", data, None, spent_ns)

    try:
        reply: GrpcReply = await forwarder.infer(model, attempt)
    except LostError as error:
        return StageEnd(Outcome.FAILED, error.message, {})
    except ServeError as error:
        outcome = Outcome.REJECTED if error.status is Status.UNAVAILABLE else Outcome.FAILED
        return StageEnd(outcome, error.message, {})
    if reply.code is not grpc.StatusCode.OK:
        return StageEnd(_outcome(reply), reply.details or reply.code.name, {})
    return StageEnd(Outcome.ANSWERED, "", grpc_outputs(MESSAGES["ModelInferResponse"].FromString(reply.data)))


def _outcome(reply: GrpcReply) -> Outcome:
    mark = dict(reply.trailing).get(OUTCOME_KEY)
    if mark is None:
        return _UNNAMED.get(reply.code, Outcome.FAILED)
    return _MARKS.get(str(mark), Outcome.FAILED)
