"""A small file that is whole or refused: what it is, a header as JSON, parts that are compressed, and a checksum over everything.

    16 bytes   what kind of file
     4 bytes   length of the header, little endian
    header     JSON, UTF-8; "parts" says for each part how long it is in the file and how long when unpacked
    parts      deflate, one after the other
    16 bytes   BLAKE2b of all that is before

Nothing in it is ever run, and no length is believed before it was compared with what is there.
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
_REWRITE = "Record it anew; this one cannot be mended."


def seal(kind: bytes, header: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    assert len(kind) == _MAGIC
    packed = [zlib.compress(part, 9) for part in parts]
    lengths = [[len(small), len(part)] for small, part in zip(packed, parts, strict=True)]
    text = json.dumps({**header, "parts": lengths}, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
    body = b"".join([kind, len(text).to_bytes(4, "little"), text, *packed])
    return body + _digest(body)


def unseal(data: bytes, kind: bytes, name: str, what: str) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the parts. `name` of the file and `what` it should be are for the messages. Raises UsageError for a file
    of another kind, Damaged for one that was cut off or changed."""
    if not data.startswith(kind):
        raise UsageError(f"{name} is not {what}.", "It begins otherwise.")
    if len(data) < _MAGIC + 4 + _CHECK:
        raise Damaged(f"{name} is cut off after {len(data)} bytes.", _REWRITE)
    body = memoryview(data)[:-_CHECK]
    if _digest(body) != data[-_CHECK:]:
        raise Damaged(f"{name} is damaged or cut off: its checksum is another.", _REWRITE)
    length = int.from_bytes(data[_MAGIC : _MAGIC + 4], "little")
    start = _MAGIC + 4 + length
    if length > MAX_HEADER or start > len(body):
        raise Damaged(f"{name} has a header of {length} bytes, which cannot be.", _REWRITE)
    header = _header(bytes(body[_MAGIC + 4 : start]), name)
    parts = []
    for small, large in _lengths(header.pop("parts", None), len(body) - start, name):
        parts.append(_unpacked(body[start : start + small], large, name))
        start += small
    return header, parts


def read_sealed(path: Path, kind: bytes, what: str) -> tuple[dict[str, Any], list[bytes]]:
    return unseal(read_bytes(path), kind, str(path), what)


def read_bytes(path: Path) -> bytes:
    """Of a file that is not too large to be one of ours."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"There is no file {path}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MB.", "It is none of the Arena's files.")
    return data


def write_whole(path: Path, data: bytes) -> Path:
    """Replace a file durably; create its directory. Raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, durable=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.", "Is there such a directory, and room in it?") from error
    return path


def _header(text: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} has a header that is not JSON.", _REWRITE) from error
    if not isinstance(header, dict):
        raise Damaged(f"{name} has a header that is no object.", _REWRITE)
    return header


def _lengths(given: Any, room: int, name: str) -> list[tuple[int, int]]:
    fits = isinstance(given, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n <= MAX_BYTES for n in pair) for pair in given
    )
    if not fits or sum(pair[0] for pair in given) != room:
        raise Damaged(f"{name} has parts of other lengths than it says.", _REWRITE)
    return [(small, large) for small, large in given]


def _unpacked(packed: memoryview, length: int, name: str) -> bytes:
    """Never more than was promised, whatever is in it."""
    unpacker = zlib.decompressobj()
    try:
        part = unpacker.decompress(packed, length + 1)
    except zlib.error as error:
        raise Damaged(f"{name} has a part that cannot be unpacked: {error}.", _REWRITE) from error
    if len(part) != length or not unpacker.eof or unpacker.unused_data:
        raise Damaged(f"{name} has a part of another length than it says.", _REWRITE)
    return part


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK).digest()
