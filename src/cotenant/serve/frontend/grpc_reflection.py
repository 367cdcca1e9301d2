"""gRPC server reflection: list of services and descriptors of their messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf import descriptor_pb2

from cotenant.serve.frontend.grpc_call import HEADERS, OK_TRAILERS, Call, Packed, parse, unpacking
from cotenant.serve.frontend.grpc_frames import CODES, RESOURCE_EXHAUSTED
from cotenant.serve.frontend.h2_connection import H2Stream
from cotenant.wire.codec import Limits, shown
from cotenant.wire.codec_http import at_once
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES, POOL, REFLECTION_SERVICES, SERVICE

REFLECTION = frozenset(f"/{service}/ServerReflectionInfo".encode() for service in REFLECTION_SERVICES)
"""Paths of the methods."""
_MOST_QUESTION_BYTES = 64 << 10
"""Maximum bytes of a request, which has only a name. It is read and decompressed on the loop."""
_MOST_UNREAD_BYTES = 256 << 10
"""Maximum unread bytes of answers."""


class ReflectionCall(Call):
    """Stream of reflection requests, each answered at once."""

    def __init__(self, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        super().__init__(stream, fields, replace(limits, max_body_bytes=_MOST_QUESTION_BYTES))
        self.has_begun = True
        stream.respond(HEADERS)

    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Answer the requests."""
        for is_packed, data in messages:
            if self.stream.unsent() > _MOST_UNREAD_BYTES:
                self.fail(RESOURCE_EXHAUSTED, "the client does not read the answers of this stream")
                return
            if is_packed:
                data = at_once(unpacking(self.encoding, data, self.limits))
            question = parse("ServerReflectionRequest", data)
            self.send(_answer(question).SerializeToString())
        self.stream.release()
        if is_end:
            self.finish()
            self.stream.end(OK_TRAILERS)

    def withdraw(self) -> None:
        """Do nothing: the call has no query."""


def _answer(question: Any) -> Any:
    answer = MESSAGES["ServerReflectionResponse"](valid_host=question.host, original_request=question)
    kind = question.WhichOneof("message_request")
    try:
        if kind == "list_services":
            for name in (SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES):
                answer.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            _add_file(answer, POOL.FindFileByName(question.file_by_filename))
        elif kind == "file_containing_symbol":
            symbol = question.file_containing_symbol
            _add_file(answer, POOL.FindFileContainingSymbol(_known(symbol)))
        elif kind == "all_extension_numbers_of_type":
            POOL.FindMessageTypeByName(question.all_extension_numbers_of_type)
            answer.all_extension_numbers_response.base_type_name = question.all_extension_numbers_of_type
        else:
            raise KeyError
    except KeyError:
        name = getattr(question, kind) if kind else "nothing"
        answer.error_response.error_code = CODES["NOT_FOUND"]
        answer.error_response.error_message = f"{shown(str(name))} is unknown"
    return answer


def _known(symbol: str) -> str:
    """Translate a symbol of the older reflection service to its current name."""
    new, old = (service.rpartition(".")[0] for service in REFLECTION_SERVICES)
    return symbol.replace(old, new, 1) if symbol.startswith(f"{old}.") else symbol


def _add_file(answer: Any, file: Any) -> None:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    answer.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())
