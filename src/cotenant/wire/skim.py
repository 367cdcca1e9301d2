"""What is read of requests before tensors are decoded: a protobuf message is walked over field by field."""

from __future__ import annotations

from cotenant.errors import CotenantError

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class WireError(CotenantError):
    """The bytes are no protobuf message."""


def string_field(data: bytes, number: int) -> str:
    """A string field of a protobuf message, the last one where it is there twice; "" when it is not there.

    Raises WireError for bytes that are no message.
    """
    at, end, found = 0, len(data), ""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            if at + size > end:
                raise WireError("the message is cut off")
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
            raise WireError("the bytes received are no protobuf message")
    if at != end:
        raise WireError("the message is cut off")
    return found


def model_of(data: bytes) -> tuple[str, str] | None:
    """Model and version of a ModelInferRequest, of which these are the first bytes: its fields 1 and 2, in this order
    as all libraries write them. None where they are not there, or have not come."""
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
    """A length-delimited field of a protobuf message, such as a message inside another one."""
    return _encoded(number << 3 | _LENGTH) + _encoded(len(content)) + content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("the bytes received are no protobuf message")
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
