"""Segments as messages: a short msgpack header and the raw bytes of the block, optionally compressed; specs as plain values.

Messages are untrusted: every field is validated, sizes in a message never cause allocations, and decoding runs no code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import numpy as np

from ludus.core import plugins
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import Damaged, MissingExtra, UsageError
from ludus.transport.message_stream import Buffer
from ludus.transport.shared_memory import BlockLayout

Compression = Literal["none", "lz4", "zstd"]

FORMAT = 1
_MAGIC = b"LUDSEG"
_ALIGN = 64  # the block begins at a multiple of it, so that its arrays are aligned if the message is
_MAX_HEADER = 1024
_MAX_NAME = 200
_MAX_INT = 1 << 62

_MALFORMED = (msgpack.exceptions.UnpackException, ValueError, TypeError, RecursionError)


class RejectedMessage(Exception):
    """A message that cannot be used. `kind` is one of a few values, for counters."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True)
class SegmentHeader:
    worker: str
    life: str
    """Random id of the sender's process start: sequence numbers begin at 0 with each."""
    seq: int
    plan: str
    layout: int
    """Checksum of the layout of the block."""
    version: int
    codec: Compression
    size: int
    """Uncompressed size of the block."""
    env_steps: int | None = None


class SegmentEncoder:
    """Encodes the messages of one worker. Without compression the block is not copied."""

    def __init__(self, layout: BlockLayout, worker: str, plan: str, compression: Compression = "none") -> None:
        """Raises UsageError, MissingExtra."""
        if not 0 < len(worker) <= _MAX_NAME or not len(plan) <= _MAX_NAME:
            raise UsageError(f"The name of the worker {worker!r} or of the plan {plan!r} is too long, or empty.")
        self._layout, self._worker, self._plan, self._codec = layout, worker, plan, compression
        self._compress = _compressor(compression)
        self._life = os.urandom(8).hex()

    def encode(self, segments: Segments, record: memoryview, seq: int) -> list[Buffer]:
        """Return the pieces of a message. `record` is the sealed block that `segments` are views of."""
        header = {
            "v": FORMAT,
            "worker": self._worker,
            "life": self._life,
            "seq": seq,
            "plan": self._plan,
            "layout": self._layout.checksum,
            "version": int(segments.version.max(initial=0)),
            "codec": self._codec,
            "size": self._layout.nbytes,
            "env_steps": segments.env_steps,
        }
        packed: bytes = msgpack.packb(header)
        start = len(_MAGIC) + 2 + len(packed)
        head = b"".join((_MAGIC, len(packed).to_bytes(2, "little"), packed, bytes(-start % _ALIGN)))
        return [head, self._compress(record)]


class SegmentDecoder:
    """Decodes messages of one plan with blocks of one layout."""

    def __init__(self, layout: BlockLayout, plan: str) -> None:
        self._layout, self._plan = layout, plan
        self._unpack: dict[str, Callable[[memoryview, int], Buffer]] = {}

    def decode(self, message: Buffer) -> tuple[SegmentHeader, Segments]:
        """Return header and block; the block is a view of the message if not compressed. Raises RejectedMessage."""
        view = memoryview(message).cast("B")
        header, start = _parse_header(view)
        if header.plan != self._plan:
            raise RejectedMessage("another plan", f"{header.plan!r} from {header.worker!r}")
        if header.layout != self._layout.checksum or header.size != self._layout.nbytes:
            raise RejectedMessage(
                "another shape", f"blocks of {header.size} bytes from {header.worker!r}, ours have {self._layout.nbytes}"
            )
        record = view[start:]
        if header.codec != "none":
            record = memoryview(self._decompress(header.codec, record))
        if len(record) != self._layout.nbytes:
            raise RejectedMessage("truncated", f"{len(record)} of {self._layout.nbytes} bytes from {header.worker!r}")
        try:
            segments = self._layout.load(record)
        except Damaged as error:
            raise RejectedMessage("damaged", error.message) from error
        if header.version != segments.version.max(initial=0) or (header.env_steps or 0) > segments.valid.size:
            raise RejectedMessage("a header that lies", f"about its version or its steps, from {header.worker!r}")
        segments.env_steps = header.env_steps
        return header, segments

    def _decompress(self, codec: Compression, data: memoryview) -> Buffer:
        if codec not in self._unpack:
            try:
                self._unpack[codec] = _decompressor(codec)
            except MissingExtra as error:  # the worker's choice must not end the learner
                raise RejectedMessage(f"packed with {codec}, which is not installed here", error.hint) from error
        return self._unpack[codec](data, self._layout.nbytes)


def _parse_header(view: memoryview) -> tuple[SegmentHeader, int]:
    """Return the header and the start of the block."""
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise RejectedMessage("not a message", f"it begins with {bytes(view[:8])!r}")
    first = len(_MAGIC) + 2
    length = int.from_bytes(view[len(_MAGIC) : first], "little")
    if length > _MAX_HEADER or first + length > len(view):
        raise RejectedMessage("truncated", f"a header of {length} bytes in {len(view)}")
    try:
        fields: dict[str, Any] = dict(msgpack.unpackb(view[first : first + length]))
        version = fields.pop("v", None)
        if version != FORMAT:
            raise RejectedMessage("another format", f"{version!r}, not {FORMAT}: is it from another version of ludus?")
        header = SegmentHeader(**fields)
    except _MALFORMED as error:
        raise RejectedMessage("malformed header", str(error)) from error
    _check_header(header)
    return header, first + length + -(first + length) % _ALIGN


def _check_header(header: SegmentHeader) -> None:
    names = all(isinstance(name, str) and len(name) <= _MAX_NAME for name in (header.worker, header.life, header.plan))
    counts = [header.seq, header.layout, header.version, header.size, 0 if header.env_steps is None else header.env_steps]
    whole = all(type(count) is int and 0 <= count < _MAX_INT for count in counts)
    if not names or not header.worker or not whole or header.codec not in ("none", "lz4", "zstd"):
        raise RejectedMessage("malformed header", f"{header!r:.300}")


# -- packing ------------------------------------------------------------------------------------------------------------


def _compressor(codec: Compression) -> Callable[[memoryview], Buffer]:
    if codec == "none":
        return lambda data: data
    if codec == "lz4":
        lz4 = plugins.require("lz4.block", "compression", "The compression 'lz4'")
        return lambda data: lz4.compress(data, store_size=False)
    if codec == "zstd":
        zstd = plugins.require("zstandard", "compression", "The compression 'zstd'").ZstdCompressor(
            level=1, write_content_size=True
        )
        return lambda data: zstd.compress(data)
    raise UsageError(f"There is no compression {codec!r}.", plugins.did_you_mean(codec, ("none", "lz4", "zstd")))


def _decompressor(codec: Compression) -> Callable[[memoryview, int], Buffer]:
    """Return a function (data, expected size) → bytes, which raises RejectedMessage for other sizes. Raises MissingExtra."""
    if codec == "lz4":
        lz4 = plugins.require("lz4.block", "compression", "The compression 'lz4'")

        def unpack_lz4(data: memoryview, size: int) -> Buffer:
            try:
                unpacked: bytes = lz4.decompress(data, uncompressed_size=size)
            except (lz4.LZ4BlockError, ValueError, OverflowError) as error:
                raise RejectedMessage("not unpackable", str(error)) from error
            return unpacked

        return unpack_lz4
    zstandard = plugins.require("zstandard", "compression", "The compression 'zstd'")
    decompressor = zstandard.ZstdDecompressor()

    def unpack_zstd(data: memoryview, size: int) -> Buffer:
        try:
            claimed = zstandard.frame_content_size(data)  # decompress() allocates the claimed size in spite of its limit
            if claimed != size:
                raise RejectedMessage("not unpackable", f"a frame of {claimed} bytes, not {size}")
            unpacked: bytes = decompressor.decompress(data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise RejectedMessage("not unpackable", str(error)) from error
        return unpacked

    return unpack_zstd


# -- specs as plain values ----------------------------------------------------------------------------------------------

_TREES = ("observation", "action", "state")


def spec_to_plain(spec: SegmentSpec) -> dict[str, Any]:
    """Return a spec as plain values for `spec_from_plain`."""
    return {**vars(spec), **{name: _tree_to_plain(getattr(spec, name)) for name in _TREES}, "results": list(spec.results)}


def spec_from_plain(plain: Mapping[str, Any]) -> SegmentSpec:
    """Raises Damaged."""
    try:
        trees = {name: _tree_from_plain(plain[name]) for name in _TREES}
        numbers = {name: int(str(plain[name])) for name in ("steps", "mask_size", "state_every", "finals")}
        if min(numbers.values()) < 0:
            raise ValueError(f"negative: {numbers}")
        results = plain.get("results", [])  # files of earlier versions have none
        if not isinstance(results, list):
            raise ValueError(f"results: {results!r}")
        return SegmentSpec(**trees, **numbers, model=str(plain["model"]), results=tuple(map(str, results)))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, SyntaxError) as error:
        raise Damaged(f"This does not describe segments: {error}.") from error


def _tree_to_plain(tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {"d": {key: _tree_to_plain(item) for key, item in tree.items()}}
    if isinstance(tree, tuple):
        return {"t": [_tree_to_plain(item) for item in tree]}
    return [list(tree.shape), tree.dtype.str]


def _tree_from_plain(plain: Tree) -> Tree:
    if not isinstance(plain, dict):
        shape, dtype = plain
        return ArraySpec(tuple(map(int, shape)), np.dtype(dtype))
    if "d" in plain:
        return {key: _tree_from_plain(item) for key, item in plain["d"].items()}
    return tuple(map(_tree_from_plain, plain["t"]))
