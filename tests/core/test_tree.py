from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ludus.core import tree
from ludus.core.tree import Tree
from ludus.errors import Damaged

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
KEYS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=5)
TREES = st.recursive(
    ARRAYS,
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def same(a: Tree, b: Tree) -> bool:
    """Structure, dtype, shape and every bit (NaN included) agree."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def wire(header: Any, body: bytes = b"\0" * 64) -> bytes:
    """A message with a header of our own making, around bodies that are really there."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    start = b"LDS1" + len(packed).to_bytes(8, "little") + packed
    return start + b"\0" * (-len(start) % 64) + body


def one_leaf(dtype: Any = "<f4", shape: Any = (1,), at: Any = 0) -> dict[str, Any]:
    return {"skeleton": "x", "leaves": [["x", dtype, shape, at]], "meta": {}}


# -- walking ------------------------------------------------------------------------------------------------------------


def test_map_applies_to_corresponding_leaves_whatever_the_order_of_keys() -> None:
    a = {"x": np.array([1, 2]), "y": (np.array(3), {"z": np.array(4)})}
    b = {"y": (np.array(30), {"z": np.array(40)}), "x": np.array([10, 20])}
    total = tree.map_tree(lambda p, q: p + q, a, b)
    assert same(total, {"x": np.array([11, 22]), "y": (np.int64(33), {"z": np.int64(44)})})


def test_leaves_come_in_the_order_of_keys_with_dotted_paths() -> None:
    found = list(tree.leaves({"b": (1, {"d": 2, "c": 3}), "a": 4, "e": {}}))
    assert found == [("a", 4), ("b.0", 1), ("b.1.c", 3), ("b.1.d", 2)]


def test_a_lone_leaf_has_the_empty_path() -> None:
    assert list(tree.leaves(7)) == [("", 7)]


def test_copy_into_writes_every_leaf_in_place() -> None:
    target = {"a": np.zeros(2, np.float32), "b": (np.zeros((), np.int64),)}
    kept = target["a"]
    tree.copy_into(target, {"b": (np.int64(5),), "a": np.array([1.5, 2.5])})
    assert target["a"] is kept
    assert same(target, {"a": np.array([1.5, 2.5], np.float32), "b": (np.array(5),)})


@pytest.mark.parametrize(
    ("target", "source", "error"),
    [
        (np.zeros(2, np.int64), np.array([0.5, 1.5]), TypeError),
        (np.zeros(2), np.zeros(3), ValueError),
        ({"a": np.zeros(1)}, {"b": np.zeros(1)}, KeyError),
        ((np.zeros(1),), (np.zeros(1), np.zeros(1)), ValueError),
    ],
    ids=["fractions into integers", "another shape", "another key", "another length"],
)
def test_copy_into_refuses_what_does_not_fit(target: Tree, source: Tree, error: type[Exception]) -> None:
    with pytest.raises(error):
        tree.copy_into(target, source)


def test_stack_adds_an_axis_and_concatenate_does_not() -> None:
    rows = [{"a": np.full((2, 3), i), "b": (np.full((2, 1), -i),)} for i in range(4)]
    stacked, joined, wide = tree.stack(rows), tree.concatenate(rows), tree.concatenate(rows, axis=1)
    assert (stacked["a"].shape, stacked["b"][0].shape) == ((4, 2, 3), (4, 2, 1))
    assert (joined["a"].shape, wide["a"].shape) == ((8, 3), (2, 12))
    assert stacked["a"][3, 0, 0] == joined["a"][6, 0] == wide["a"][0, 9] == 3


# -- the wire format: what is written is read ---------------------------------------------------------------------------


@given(TREES)
def test_what_is_encoded_is_decoded_bit_by_bit(value: Tree) -> None:
    decoded, _ = tree.decode(tree.encode(value))
    assert same(decoded, value)


@given(st.dictionaries(st.text(max_size=4), st.dictionaries(st.text(max_size=4), ARRAYS, max_size=3), max_size=3))
def test_any_key_survives_or_is_refused_when_written(value: Tree) -> None:
    try:
        message = tree.encode(value)
    except TypeError:  # two leaves of one dotted path
        return
    assert same(tree.decode(message)[0], value)


def test_the_meta_is_encoded_with_the_arrays() -> None:
    meta = {"model": "red", "version": 7, "ratio": 0.5, "none": None, "list": [1, "two"]}
    assert tree.decode(tree.encode((), meta)) == ((), meta)


def test_transposed_and_strided_arrays_keep_their_values() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    value = {"t": base.T, "s": base[::2, ::-3]}
    decoded, _ = tree.decode(tree.encode(value))
    np.testing.assert_array_equal(decoded["t"], base.T)
    np.testing.assert_array_equal(decoded["s"], base[::2, ::-3])


def test_decoded_arrays_are_aligned_read_only_views_of_the_message() -> None:
    message = tree.encode({"a": np.arange(3, dtype=np.int8), "b": np.arange(5.0)})
    decoded, _ = tree.decode(message)
    for leaf in (decoded["a"], decoded["b"]):
        assert np.shares_memory(leaf, np.frombuffer(message, np.uint8))
        assert leaf.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            leaf[0] = 1


def test_even_a_writable_buffer_gives_read_only_arrays() -> None:
    message = bytearray(tree.encode(np.arange(4)))
    decoded, _ = tree.decode(memoryview(message))
    assert not decoded.flags.writeable
    message[-8] = 9
    assert decoded[-1] == 9


@pytest.mark.parametrize("leaf", [np.array([None]), np.array(["a"]), np.array([b"a"]), np.array([1j]), np.array(["2024"], "M8")])
def test_an_array_that_is_not_of_numbers_is_not_written(leaf: Tree) -> None:
    with pytest.raises(TypeError, match="dtype"):
        tree.encode({"leaf": leaf})


def test_two_leaves_of_one_dotted_path_are_not_written() -> None:
    with pytest.raises(TypeError, match="same dotted path"):
        tree.encode({"a": {"b": np.zeros(1)}, "a.b": np.ones(1)})


# -- the wire format: nothing malformed gets in -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.arange(5), "b": (np.ones((2, 3), np.float32), np.zeros(0))},
        {"a": np.arange(5), "empty": np.zeros((3, 0))},
        np.float32(1),
        (),
    ],
    ids=["tree", "empty last", "scalar", "no leaves"],
)
def test_a_message_cut_anywhere_is_damaged(value: Tree) -> None:
    message = tree.encode(value, {"k": 1})
    for length in range(len(message)):
        with pytest.raises(Damaged):
            tree.decode(message[:length])


@pytest.mark.parametrize("claimed", [0, 1, 10, 51, 10**6, 2**63, 2**64 - 1])
def test_a_header_that_lies_about_its_length_is_damaged(claimed: int) -> None:
    message = bytearray(tree.encode({"a": np.arange(3)}))
    message[4:12] = claimed.to_bytes(8, "little")
    with pytest.raises(Damaged):
        tree.decode(bytes(message))


@pytest.mark.parametrize(
    "leaf",
    [
        one_leaf(shape=[17]),
        one_leaf(shape=[2**40, 2**40]),
        one_leaf(shape=[2**63, 2]),
        one_leaf(shape=[0, 2**62, 2**62]),
        one_leaf(shape=[-1]),
        one_leaf(shape=[-2, -2]),
        one_leaf(shape=[1] * 65),
        one_leaf(shape=[float("inf")]),
        one_leaf(shape=["x"]),
        one_leaf(shape=None),
        one_leaf(at=61),
        one_leaf(at=-4),
        one_leaf(at=2**63),
        one_leaf(at=float("inf")),
        one_leaf(at="x"),
    ],
    ids=repr,
)
def test_a_leaf_that_lies_about_its_size_or_place_is_damaged(leaf: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        tree.decode(wire(leaf))


@pytest.mark.parametrize(
    "dtype",
    ["O", "|O8", "U4", "S4", "V8", "M8[s]", "m8", "c16", "f4,f4", "(2,)f4", "(,)f4,f4", "f4,(", "", "?!", 7, {"a": 1}, ["f4"]],
)
def test_only_plain_numbers_are_decoded(dtype: Any) -> None:
    with pytest.raises(Damaged):
        tree.decode(wire(one_leaf(dtype=dtype)))


@pytest.mark.parametrize(
    "header",
    [
        None,
        [],
        "text",
        {},
        {"leaves": 5, "skeleton": (), "meta": {}},
        {"leaves": [5], "skeleton": "x", "meta": {}},
        {"leaves": [["x", "<f4"]], "skeleton": "x", "meta": {}},
        {"leaves": [], "skeleton": "x", "meta": {}},
        {"leaves": [], "skeleton": 3, "meta": {}},
        {"leaves": [], "skeleton": {"d": []}, "meta": {}},
        {"leaves": [], "skeleton": {"t": {}}, "meta": {}},
        {"leaves": [], "skeleton": {"t": []}, "meta": 4},
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\x01\xff\x00",
    ],
    ids=repr,
)
def test_a_header_of_another_form_is_damaged(header: Any) -> None:
    with pytest.raises(Damaged):
        tree.decode(wire(header))


def nested(level: bytes, depth: int) -> bytes:
    skeleton = msgpack.packb("skeleton") + level * depth + msgpack.packb("x")
    leaves = msgpack.packb("leaves") + msgpack.packb([["x", "<f4", [1], 0]])
    return wire(b"\x83" + skeleton + leaves + msgpack.packb("meta") + msgpack.packb({}))


LEVELS = pytest.mark.parametrize("level", [b"\x81\xa1t\x91", b"\x81\xa1d\x81\xa1k", b"\x91"], ids=["tuples", "dicts", "lists"])


@LEVELS
@pytest.mark.parametrize("depth", [600, 100_000])
def test_a_structure_nested_too_deeply_is_damaged(depth: int, level: bytes) -> None:
    with pytest.raises(Damaged):
        tree.decode(nested(level, depth))


@LEVELS
@pytest.mark.parametrize("depth", [100, 250, 400, 480, 490, 500, 508])
def test_a_deep_structure_never_ends_in_a_recursion_error(depth: int, level: bytes) -> None:
    try:
        decoded, _ = tree.decode(nested(level, depth))
    except Damaged:
        return
    assert len(list(tree.leaves(decoded))) == 1


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return setattr, (Bomb, "exploded", True)


def test_a_pickle_is_refused_unopened() -> None:
    bomb = pickle.dumps(Bomb())
    for message in (bomb, b"LDS1" + bomb, wire(bomb), wire(one_leaf(dtype="O", shape=[8]), bomb + b"\0" * 64)):
        with pytest.raises(Damaged):
            tree.decode(message)
    assert not Bomb.exploded


@given(st.binary(max_size=200))
def test_random_bytes_are_damaged(noise: bytes) -> None:
    for message in (noise, b"LDS1" + noise, wire(noise)):
        with pytest.raises(Damaged):
            tree.decode(message)


MESSAGE = tree.encode({"a": np.arange(6, dtype=np.int32), "b": (np.zeros((2, 2)), np.array(True))}, {"version": 3})


@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_either_decode_to_arrays_or_are_damaged(changes: list[tuple[int, int]]) -> None:
    message = bytearray(MESSAGE)
    for at, byte in changes:
        message[at] = byte
    try:
        decoded, _ = tree.decode(bytes(message))
    except Damaged:
        return
    assert all(isinstance(leaf, np.ndarray) and not leaf.flags.writeable for _, leaf in tree.leaves(decoded))
