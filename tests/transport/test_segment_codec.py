"""Segments as messages: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import os
import pickle
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import lz4.block
import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spaces import ArraySpec
from ludus.core.tree import leaves, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import MissingExtra, UsageError
from ludus.testing.memory_contract import ROWS, SPEC
from ludus.transport.segment_codec import Compression, RejectedMessage, SegmentDecoder, SegmentEncoder
from ludus.transport.shared_memory import BlockLayout

LAYOUT = BlockLayout(SPEC, ROWS)
CODECS: tuple[Compression, ...] = ("none", "lz4", "zstd")
LARGE = BlockLayout(SegmentSpec(steps=64, observation=ArraySpec((64, 64), np.dtype(np.uint8)), action=SPEC.action), 2)


def block(layout: BlockLayout = LAYOUT, seed: int = 0) -> tuple[Segments, memoryview]:
    """Filled at random, sealed."""
    buffer = memoryview(bytearray(layout.nbytes))
    segments, random = layout.views(buffer), np.random.default_rng(seed)
    for _, array in leaves(segments.arrays()):
        array[...] = random.integers(0, 2 if array.dtype == np.bool_ else 100, array.shape).astype(array.dtype)
    segments.finals = min(1, layout.spec.finals)
    segments.episode_return, segments.episode_length = random.normal(size=3).astype(np.float32), random.integers(1, 9, 3)
    layout.seal(segments, buffer)
    return segments, buffer


def message(codec: Compression = "none", seq: int = 5, seed: int = 0, plan: str = "plan", layout: BlockLayout = LAYOUT) -> bytes:
    segments, buffer = block(layout, seed)
    return b"".join(SegmentEncoder(layout, "worker 1", plan, codec).encode(segments, buffer, seq))


def forged(body: bytes | memoryview, **fields: Any) -> bytes:
    """A message whose header says whatever is wanted."""
    header = {"v": 1, "worker": "w", "life": "l", "seq": 0, "plan": "plan", "layout": LAYOUT.checksum, "version": 99,
              "codec": "none", "size": LAYOUT.nbytes, "env_steps": None} | fields  # fmt: skip
    packed: bytes = msgpack.packb({key: value for key, value in header.items() if value is not ...})
    start = 8 + len(packed)
    return b"LUDSEG" + len(packed).to_bytes(2, "little") + packed + bytes(-start % 64) + bytes(body)


def rejected(data: bytes, layout: BlockLayout = LAYOUT) -> str:
    with pytest.raises(RejectedMessage) as caught:
        SegmentDecoder(layout, "plan").decode(data)
    return caught.value.kind


@pytest.mark.parametrize("codec", CODECS)
def test_everything_in_a_block_arrives(codec: Compression) -> None:
    segments, buffer = block()
    segments.env_steps = 7
    pieces = SegmentEncoder(LAYOUT, "worker 1", "plan", codec).encode(segments, buffer, 12)
    sent = map_tree(np.copy, segments.arrays())
    header, got = SegmentDecoder(LAYOUT, "plan").decode(b"".join(pieces))
    assert (header.worker, header.seq, header.version) == ("worker 1", 12, int(segments.version.max()))
    assert (got.finals, got.env_steps, got.spec, got.model) == (1, 7, SPEC, SPEC.model)
    for (path, one), (_, other) in zip(leaves(got.arrays()), leaves(sent), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=path)


def test_an_unpacked_block_is_not_copied_on_either_side() -> None:
    segments, buffer = block()
    _, body = SegmentEncoder(LAYOUT, "w", "plan").encode(segments, buffer, 0)
    assert body is buffer
    data = np.frombuffer(message(), np.uint8)
    _, got = SegmentDecoder(LAYOUT, "plan").decode(data.data)
    for path, leaf in leaves(got.arrays()):
        if leaf.size and not path.startswith(("episode", "origin")):
            assert np.shares_memory(leaf, data), path


def test_the_arrays_of_a_message_are_aligned() -> None:
    data = np.empty(len(message()) + 64, np.uint8)
    start = -data.ctypes.data % 64
    data[start : start + len(message())] = np.frombuffer(message(), np.uint8)
    _, got = SegmentDecoder(LAYOUT, "plan").decode(data[start : start + len(message())].data)
    assert all(leaf.flags.aligned for _, leaf in leaves(got.arrays()))


def test_writers_of_one_name_are_different_lives() -> None:
    one, other = (SegmentDecoder(LAYOUT, "plan").decode(message())[0] for _ in range(2))
    assert one.worker == other.worker
    assert one.life != other.life


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "not a message"),
        (pickle.dumps({"a": 1}), "not a message"),
        (b"LUDSE", "not a message"),
        (b"LUDSEG", "truncated"),
        (b"LUDSEG\xff\xff" + bytes(70000), "truncated"),
        (b"LUDSEG\x10\x00" + b"\x81", "truncated"),
        (b"LUDSEG\x04\x00" + b"\xc1\xc1\xc1\xc1" + bytes(100), "malformed header"),
        (b"LUDSEG\x01\x00" + b"\x07" + bytes(100), "malformed header"),
        (b"LUDSEG\x05\x00" + b"\xdd\xff\xff\xff\xff" + bytes(100), "malformed header"),
        (b"LUDSEG\x00\x02" + b"\x91" * 512 + bytes(100), "malformed header"),
        (forged(b"", v=2), "another format"),
        (forged(b"", v=...), "another format"),
        (forged(b"", extra=1), "malformed header"),
        (forged(b"", seq=...), "malformed header"),
        (forged(b"", seq=-1), "malformed header"),
        (forged(b"", seq=1 << 63), "malformed header"),
        (forged(b"", seq=1.5), "malformed header"),
        (forged(b"", seq=True), "malformed header"),
        (forged(b"", worker=""), "malformed header"),
        (forged(b"", worker="w" * 201), "malformed header"),
        (forged(b"", worker=b"\xff"), "malformed header"),
        (forged(b"", life=7), "malformed header"),
        (forged(b"", codec="pickle"), "malformed header"),
        (forged(b"", codec=["none"]), "malformed header"),
        (forged(b"", version=-1), "malformed header"),
        (forged(b"", plan="other"), "another plan"),
        (forged(b"", layout=1), "another shape"),
        (forged(b"", size=1 << 40), "another shape"),
        (forged(b""), "truncated"),
        (forged(bytes(LAYOUT.nbytes - 1)), "truncated"),
        (forged(bytes(LAYOUT.nbytes + 1)), "truncated"),
        (forged(bytes(LAYOUT.nbytes)), "damaged"),
    ],
)
def test_a_poisoned_message_is_rejected_by_kind(data: bytes, kind: str) -> None:
    assert rejected(data) == kind


def test_a_pickle_in_place_of_the_block_is_never_loaded() -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.abort, ())

    for codec in CODECS:
        assert rejected(forged(pickle.dumps(Trap()), codec=codec)) in ("truncated", "not unpackable")


@pytest.mark.parametrize("field", ["finals", "episodes"])
def test_a_block_that_lies_about_its_counts_is_rejected(field: str) -> None:
    data = bytearray(message())
    at = len(data) - LAYOUT.nbytes + (16 if field == "finals" else 24)
    data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    assert rejected(bytes(data)) == "damaged"


def test_a_header_that_lies_about_its_version_or_its_steps_is_rejected() -> None:
    segments, buffer = block()
    version = int(segments.version.max())
    assert SegmentDecoder(LAYOUT, "plan").decode(forged(buffer, version=version))[0].version == version
    assert rejected(forged(buffer, version=version + 1)) == "a header that lies"
    assert rejected(forged(buffer, version=version, env_steps=SPEC.steps * ROWS + 1)) == "a header that lies"


@pytest.mark.parametrize(
    "bomb",
    [
        forged(lz4.block.compress(bytes(64 << 20), store_size=False), codec="lz4"),
        forged(lz4.block.compress(bytes(LAYOUT.nbytes - 64), store_size=False), codec="lz4"),
        forged(zstandard.ZstdCompressor().compress(bytes(64 << 20)), codec="zstd"),
        forged(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20)), codec="zstd"),
        forged(b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8, codec="zstd"),  # a frame that claims to be without end
        forged(b"", codec="zstd"),
        forged(b"", codec="lz4"),
        forged(os.urandom(500), codec="lz4"),
        forged(os.urandom(500), codec="zstd"),
    ],
    ids=[
        "lz4 bomb",
        "lz4 short",
        "zstd bomb",
        "zstd without size",
        "zstd endless",
        "zstd none",
        "lz4 none",
        "lz4 noise",
        "zstd noise",
    ],
)
def test_a_bomb_is_rejected_before_it_takes_up_room(bomb: bytes) -> None:
    SegmentDecoder(LAYOUT, "plan").decode(message("lz4"))  # imported before it is measured
    SegmentDecoder(LAYOUT, "plan").decode(message("zstd"))
    tracemalloc.start()
    try:
        assert rejected(bomb) in ("not unpackable", "truncated")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_packing_makes_pictures_smaller() -> None:
    segments, buffer = block(LARGE)
    segments.observation[...] = 7
    for codec in CODECS[1:]:
        packed = b"".join(SegmentEncoder(LARGE, "w", "plan", codec).encode(segments, buffer, 0))
        assert len(packed) < LARGE.nbytes / 4
        assert SegmentDecoder(LARGE, "plan").decode(packed)[1].observation.max() == 7


@settings(max_examples=150)
@given(st.sampled_from(CODECS), st.data())
def test_a_message_that_was_damaged_anywhere_is_read_or_rejected_and_nothing_else(
    codec: Compression, data: st.DataObject
) -> None:
    whole = bytearray(message(codec))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole) - 1, 600)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for poisoned in (bytes(whole), bytes(whole[:cut])):
        try:
            _, got = SegmentDecoder(LAYOUT, "plan").decode(poisoned)
        except RejectedMessage:
            continue
        assert got.reward.shape == (SPEC.steps, ROWS)
        assert 0 <= got.finals <= SPEC.finals


def test_another_model_is_another_shape() -> None:
    other = BlockLayout(replace(SPEC, model="right"), ROWS)
    assert rejected(message(layout=other)) == "another shape"
    assert rejected(message(layout=BlockLayout(SPEC, ROWS + 1))) == "another shape"


def test_a_name_that_no_reader_would_take_is_refused_at_once() -> None:
    for name in ("", "w" * 201):
        with pytest.raises(UsageError, match="name"):
            SegmentEncoder(LAYOUT, name, "plan")
    with pytest.raises(UsageError, match="lz4"):
        SegmentEncoder(LAYOUT, "w", "plan", "lz5")  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "package"), [("lz4", "lz4.block"), ("zstd", "zstandard")])
def test_what_a_learner_cannot_unpack_is_rejected_and_what_a_worker_cannot_pack_is_refused(
    codec: Compression, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = message(codec)
    monkeypatch.setitem(sys.modules, package, None)
    assert rejected(data) == f"packed with {codec}, which is not installed here"
    with pytest.raises(MissingExtra, match=r"compression"):
        SegmentEncoder(LAYOUT, "w", "plan", codec)
