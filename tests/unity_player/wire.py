"""Encoding and decoding of protobuf messages by field number."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


_SMALL = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return _SMALL[value]
    value &= 0xFFFFFFFFFFFFFFFF  # negative numbers take ten bytes
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def real(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED32) + struct.pack("<f", value)


def block(number: int, payload: bytes) -> bytes:
    """A message, a string or bytes."""
    if number < 16 and len(payload) < 0x80:
        return _SMALL[number << 3 | BYTES] + _SMALL[len(payload)] + payload
    return varint(number << 3 | BYTES) + varint(len(payload)) + payload


def text(number: int, value: str) -> bytes:
    return block(number, value.encode())


def reals(number: int, values: Sequence[float]) -> bytes:
    return block(number, struct.pack(f"<{len(values)}f", *values))


def integers(number: int, values: Sequence[int]) -> bytes:
    return block(number, b"".join(map(varint, values)))


def entry(number: int, key: str, value: bytes) -> bytes:
    """One entry of a map from strings to messages."""
    return block(number, text(1, key) + block(2, value))


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: numbers of varints, bytes of the rest. Raises ValueError."""
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        at += 1
        if key >= 0x80:
            key, at = read_varint(data, at - 1)
        kind = key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size = data[at]
            at += 1
            if size >= 0x80:
                size, at = read_varint(data, at - 1)
        elif kind == FIXED32:
            size = 4
        elif kind == FIXED64:
            size = 8
        else:
            raise ValueError(f"wire type {kind} of field {key >> 3}")
        if at + size > end:
            raise ValueError(f"field {key >> 3} is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and the position behind it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7


def read_reals(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def read_integers(packed: bytes) -> list[int]:
    """Signed 32-bit integers of a packed field."""
    if not packed or max(packed) < 0x80:
        return list(packed)
    values, at = [], 0
    while at < len(packed):
        value, at = read_varint(packed, at)
        values.append(value - (1 << 64) if value >> 63 else value)
    return values
