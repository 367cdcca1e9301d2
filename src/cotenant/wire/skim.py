"""Partial protobuf parser: reads single fields of a request before its tensors are decoded."""

from __future__ import annotations

from cotenant.errors import CotenantError

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class WireError(CotenantError):
    """Invalid protobuf message."""


def string_field(data: bytes, number: int) -> str:
    """Read a string field of a protobuf message; the last one if repeated, "" if absent.

    Raises WireError for an invalid message.
    """
    at, end, found = 0, len(data), ""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            if at + size > end:
                raise WireError("the protobuf message is truncated")
            if key >> 3 == number:
                try:
                    found = data[at : at + size].decode("utf-8")
                except UnicodeDecodeError:
                    raise WireError(f"field {number} of the message is not UTF-8") from None
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise WireError("the received bytes are not a protobuf message")
    if at != end:
        raise WireError("the protobuf message is truncated")
    return found


def model_of(data: bytes) -> tuple[str, str] | None:
    """Read model and version (fields 1 and 2) from the first bytes of a ModelInferRequest; None if incomplete. All
    protobuf libraries write the fields in this order."""
    found = ["", ""]
    at = 0
    try:
        for number in (1, 2):
            key, after = _varint(data, at)
            if key != number << 3 | _LENGTH:
                break
            size, after = _varint(data, after)
            if after + size > len(data):
                return None
            found[number - 1], at = data[after : after + size].decode("utf-8"), after + size
    except (WireError, UnicodeDecodeError):
        return None
    return (found[0], found[1]) if at else None


def length_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field of a protobuf message, such as a nested message."""
    return _encoded(number << 3 | _LENGTH) + _encoded(len(content)) + content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("the received bytes are not a protobuf message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
