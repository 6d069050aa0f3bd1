"""Container format of the Arena's files: a file kind, a JSON header, compressed parts and a checksum.

    16 bytes   file kind
     4 bytes   length of the header, little endian
    header     JSON, UTF-8; "parts" holds the compressed and the uncompressed length of each part
    parts      deflate, one after the other
    16 bytes   BLAKE2b of everything before it

Reading executes nothing in the file and checks every length before it is used.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ludus.errors import Damaged, NotFound, StoreError, UsageError
from ludus.io.atomic_file import replace_file

MAX_BYTES: Final = 64 << 20
MAX_HEADER: Final = 1 << 20
_MAGIC = 16
_CHECK = 16
_REWRITE = "Record it again; this file cannot be repaired."


def encode_file(kind: bytes, header: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    assert len(kind) == _MAGIC
    packed = [zlib.compress(part, 9) for part in parts]
    lengths = [[len(small), len(part)] for small, part in zip(packed, parts, strict=True)]
    text = json.dumps({**header, "parts": lengths}, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
    body = b"".join([kind, len(text).to_bytes(4, "little"), text, *packed])
    return body + _digest(body)


def decode_file(data: bytes, kind: bytes, name: str, what: str) -> tuple[dict[str, Any], list[bytes]]:
    """Return the header and the parts. `name` and `what` appear in error messages. Raises UsageError for a file of another kind,
    Damaged for a truncated or modified file."""
    if not data.startswith(kind):
        raise UsageError(f"{name} is not {what}.", "Its first bytes are those of another kind of file.")
    if len(data) < _MAGIC + 4 + _CHECK:
        raise Damaged(f"{name} is truncated after {len(data)} bytes.", _REWRITE)
    body = memoryview(data)[:-_CHECK]
    if _digest(body) != data[-_CHECK:]:
        raise Damaged(f"{name} is damaged or truncated: its checksum does not match.", _REWRITE)
    length = int.from_bytes(data[_MAGIC : _MAGIC + 4], "little")
    start = _MAGIC + 4 + length
    if length > MAX_HEADER or start > len(body):
        raise Damaged(f"{name} has a header with the invalid length {length}.", _REWRITE)
    header = _header(bytes(body[_MAGIC + 4 : start]), name)
    parts = []
    for small, large in _lengths(header.pop("parts", None), len(body) - start, name):
        parts.append(_decompress(body[start : start + small], large, name))
        start += small
    return header, parts


def read_file(path: Path, kind: bytes, what: str) -> tuple[dict[str, Any], list[bytes]]:
    return decode_file(read_bytes(path), kind, str(path), what)


def read_bytes(path: Path) -> bytes:
    """Read a file of at most `MAX_BYTES`. Raises NotFound, StoreError, and UsageError for a larger one."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"There is no file {path}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MB.", "It is not a file of the Arena.")
    return data


def write_file(path: Path, data: bytes) -> Path:
    """Replace a file durably; create its directory. Raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, durable=True)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}.", "Check that the directory exists and has free space."
        ) from error
    return path


def _header(text: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} has a header that is not JSON.", _REWRITE) from error
    if not isinstance(header, dict):
        raise Damaged(f"{name} has a header that is not a JSON object.", _REWRITE)
    return header


def _lengths(given: Any, room: int, name: str) -> list[tuple[int, int]]:
    fits = isinstance(given, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n <= MAX_BYTES for n in pair) for pair in given
    )
    if not fits or sum(pair[0] for pair in given) != room:
        raise Damaged(f"{name} has parts whose lengths do not match its header.", _REWRITE)
    return [(small, large) for small, large in given]


def _decompress(packed: memoryview, length: int, name: str) -> bytes:
    """Decompress at most `length` bytes, so that a crafted file cannot exhaust the memory."""
    unpacker = zlib.decompressobj()
    try:
        part = unpacker.decompress(packed, length + 1)
    except zlib.error as error:
        raise Damaged(f"{name} has a part that cannot be decompressed: {error}.", _REWRITE) from error
    if len(part) != length or not unpacker.eof or unpacker.unused_data:
        raise Damaged(f"{name} has a part whose length does not match its header.", _REWRITE)
    return part


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK).digest()
