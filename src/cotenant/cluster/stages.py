"""Stage of an application: sends its tensors to a node of its model, and returns the node's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import grpc

from cotenant.cluster.forward import Forwarder
from cotenant.cluster.links import GrpcReply, NodeLink
from cotenant.types import Cause, Outcome
from cotenant.wire.api import Array, ServeError
from cotenant.wire.decode import grpc_outputs
from cotenant.wire.encode import grpc_request
from cotenant.wire.ending import Ending
from cotenant.wire.oip import MESSAGES, SERVICE


class StageEnd(NamedTuple):
    """End of a stage: outputs if it was answered, else the reason."""

    outcome: Outcome
    reason: str
    outputs: Mapping[str, Array]


async def ask_stage(
    forwarder: Forwarder, model: str, inputs: Mapping[str, Array], parameters: Mapping[str, int]
) -> StageEnd:
    """Send a query to a node of the model. Every error at the node or on the way becomes an outcome."""
    data = grpc_request(model, inputs, parameters)

    async def attempt(link: NodeLink, spent_ns: int) -> GrpcReply:
        return await link.grpc(f"/{SERVICE}/ModelInfer", data, None, spent_ns)

    try:
        reply: GrpcReply = await forwarder.infer(model, attempt)
    except ServeError as error:
        return StageEnd(_outcome(error.ending), error.message, {})
    if reply.code is not grpc.StatusCode.OK:
        return StageEnd(_outcome(reply.ending), reply.details or reply.code.name, {})
    return StageEnd(Outcome.ANSWERED, "", grpc_outputs(MESSAGES["ModelInferResponse"].FromString(reply.data)))


def _outcome(ending: Ending) -> Outcome:
    """Outcome of a stage: REJECTED if no node serves the model."""
    return Outcome.REJECTED if ending.cause is Cause.UNSERVED else ending.outcome
