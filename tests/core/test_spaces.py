from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs

from ludus.core import spaces
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.errors import ConfigError

Space = gym.Space[Any]

ELEMENTARY: list[Space] = [
    gs.Box(-1.0, 1.0, (3,)),
    gs.Box(-np.inf, np.inf, (2, 2)),
    gs.Box(0.1, np.inf, ()),
    gs.Box(np.array([0.0, -np.inf, -1 / 3]), np.array([np.inf, 1.0, 1 / 3]), dtype=np.float64),
    gs.Box(np.array([0.1, 0.2], np.float32), np.array([0.3, 0.7], np.float32)),
    gs.Box(0, 255, (4, 84, 84), np.uint8),
    gs.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    gs.Box(0, 1, (0,)),
    gs.Discrete(1),
    gs.Discrete(5, start=-3),
    gs.Discrete(5, dtype=np.int32),
    gs.MultiDiscrete([2, 3, 4]),
    gs.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [-2, 3]])),
    gs.MultiDiscrete([2, 3], dtype=np.int32),
    gs.MultiBinary(4),
    gs.MultiBinary((2, 3)),
]
NESTED: list[Space] = [
    gs.Dict({"b": gs.Discrete(2), "a": gs.Box(-np.inf, 1.0, (2,))}),
    gs.Tuple([gs.MultiBinary(2), gs.Dict({"x": gs.Tuple([gs.Discrete(3, start=1)])})]),
    gs.Dict({"deep": gs.Dict({"deeper": gs.Tuple([gs.MultiDiscrete(np.array([[2, 3]])), gs.Box(0, 255, (5, 5, 3), np.uint8)])})}),
    gs.Dict([("z", gs.Discrete(2)), ("y", gs.Discrete(3))]),
    gs.Dict({}),
    gs.Tuple([]),
]


# -- JSON ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ELEMENTARY + NESTED, ids=repr)
def test_a_space_written_as_json_is_read_as_an_equal_space(space: Space) -> None:
    text = json.dumps(spaces.to_json(space), allow_nan=False)
    assert spaces.from_json(json.loads(text)) == space


def test_bounds_that_are_all_equal_are_written_once() -> None:
    data = spaces.to_json(gs.Box(0, 255, (3, 84, 84), np.uint8))
    assert (data["low"], data["high"]) == (0, 255)


@pytest.mark.parametrize("space", [gs.Text(3), gs.Graph(gs.Discrete(2), None), gs.Sequence(gs.Discrete(2))], ids=repr)
def test_a_space_without_a_fixed_shape_is_refused_with_its_name(space: Space) -> None:
    name = type(space).__name__
    with pytest.raises(ConfigError, match=f"A {name} space"):
        spaces.to_json(gs.Dict({"x": space}))
    with pytest.raises(ConfigError, match=rf"observation\.x\.0 is a {name} space"):
        spaces.array_spec(gs.Dict({"x": gs.Tuple([space])}))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"type": "Sphere"},
        {"type": ["Box"]},
        {"type": "Discrete"},
        {"type": "Discrete", "n": -1},
        {"type": "Discrete", "n": "many"},
        {"type": "Discrete", "n": float("inf")},
        {"type": "MultiDiscrete", "nvec": [0], "start": [0]},
        {"type": "MultiDiscrete", "nvec": [2], "start": [0, 0]},
        {"type": "MultiBinary", "shape": []},
        {"type": "MultiBinary", "shape": [0]},
        {"type": "Dict", "spaces": []},
        {"type": "Dict", "spaces": {"a": 5}},
        {"type": "Tuple", "spaces": 5},
        {"type": "Box", "shape": [2], "dtype": "object", "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float99", "low": 0, "high": 1},
        {"type": "Box", "shape": [-1], "dtype": "float32", "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": [0, 0, 0], "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": "nan", "high": 1},
    ],
    ids=repr,
)
def test_what_describes_no_space_is_a_config_error(data: Any) -> None:
    with pytest.raises(ConfigError):
        spaces.from_json(data)


# -- array specifications -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (gs.Box(-1, 1, (3, 2), np.float64), (3, 2), np.float32),
        (gs.Box(-1, 1, (), np.float16), (), np.float32),
        (gs.Box(0, 255, (8, 8, 3), np.uint8), (8, 8, 3), np.uint8),
        (gs.Box(-5, 5, (2,), np.int32), (2,), np.int32),
        (gs.Discrete(4, start=2, dtype=np.int32), (), np.int64),
        (gs.MultiDiscrete(np.array([[2, 3], [4, 5]])), (2, 2), np.int64),
        (gs.MultiBinary(3), (3,), np.int8),
        (gs.MultiBinary((2, 3)), (2, 3), np.int8),
    ],
    ids=repr,
)
def test_an_elementary_space_is_stored_in_one_array(space: Space, shape: tuple[int, ...], dtype: type) -> None:
    spec = spaces.array_spec(space)
    assert spec == ArraySpec(shape, np.dtype(dtype))
    assert (spec.zeros(5, 2).shape, spec.zeros(5, 2).dtype) == ((5, 2, *shape), np.dtype(dtype))


def test_a_nested_space_is_stored_in_a_tree_of_its_form() -> None:
    spec = spaces.array_spec(gs.Dict({"a": gs.Tuple([gs.Discrete(2), gs.MultiBinary(3)]), "b": gs.Box(0, 1, (2,))}))
    assert spec == {
        "a": (ArraySpec((), np.dtype(np.int64)), ArraySpec((3,), np.dtype(np.int8))),
        "b": ArraySpec((2,), np.dtype(np.float32)),
    }


# -- masks --------------------------------------------------------------------------------------------------------------

MASK = gs.MultiBinary(2)


def test_without_a_mask_the_observation_stays_as_it_is() -> None:
    for space in (gs.Discrete(3), gs.Dict({"observation": gs.Discrete(3)}), gs.Tuple([MASK])):
        assert spaces.split_mask(space) == (space, None)


def test_a_single_observation_next_to_its_mask_is_unwrapped() -> None:
    board = gs.Box(0, 1, (9,))
    assert spaces.split_mask(gs.Dict({"observation": board, "action_mask": MASK})) == (board, MASK)
    assert spaces.without_mask({"observation": 7, "action_mask": 8}, unwrap=True) == 7


def test_several_observations_next_to_the_mask_stay_a_dict() -> None:
    inner: dict[str, Space] = {"observation": gs.Discrete(3), "speed": gs.Box(0, 1, (2,))}
    assert spaces.split_mask(gs.Dict({**inner, "action_mask": MASK})) == (gs.Dict(inner), MASK)
    assert spaces.without_mask({"observation": 7, "speed": 8, "action_mask": 9}, unwrap=False) == {"observation": 7, "speed": 8}


def test_an_observation_of_nothing_but_a_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing but 'action_mask'"):
        spaces.split_mask(gs.Dict({"action_mask": MASK}))


HYBRID = gs.Dict(  # pairs keep their order, a dict would be sorted
    [
        ("move", gs.Discrete(3)),
        ("aim", gs.Box(-1, 1, (2,))),
        ("keys", gs.Tuple([gs.MultiBinary(2), gs.MultiDiscrete(np.array([[2], [3]]))])),
    ]
)


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (gs.Discrete(4, start=9), 4),
        (gs.MultiDiscrete(np.array([[2, 3], [4, 5]])), 14),
        (gs.MultiBinary((2, 3)), 6),
        (gs.Box(-1, 1, (7,)), 0),
        (HYBRID, 10),
    ],
    ids=repr,
)
def test_a_mask_has_one_entry_per_option(space: Space, size: int) -> None:
    assert spaces.mask_size(space) == size


def test_elementary_actions_come_in_the_order_of_their_masks() -> None:
    assert [path for path, _ in spaces.space_leaves(HYBRID, "action")] == [
        "action.aim",
        "action.keys.0",
        "action.keys.1",
        "action.move",
    ]


@pytest.mark.parametrize(
    "mask",
    [
        np.array([1, 0, 1, 0, 0, 1, 1, 0, 0, 1], np.int8),
        [1, 0, 1, 0, 0, 1, 1, 0, 0, 1],
        {"move": [0, 0, 1], "keys": ([1, 0], [[1, 0], [0, 1, 1]])},
        {"move": np.array([False, False, True]), "keys": [np.array([1, 0]), np.array([1, 0, 0, 1, 1])], "aim": None},
    ],
    ids=["flat", "list", "nested lists", "nested arrays"],
)
def test_masks_of_every_form_become_one_boolean_vector(mask: Tree) -> None:
    flat = spaces.flat_mask(mask, HYBRID)
    assert flat.dtype == np.bool_
    expected = [1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert flat.astype(int).tolist() == expected


def test_masks_of_a_batch_keep_their_rows() -> None:
    space = gs.Tuple([gs.Discrete(2), gs.MultiBinary((1, 2))])
    mask = (np.array([[1, 0], [1, 1], [0, 1]]), np.array([[[1, 1]], [[0, 1]], [[0, 0]]]))
    flat = spaces.flat_mask(mask, space, batch=3)
    assert flat.astype(int).tolist() == [[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("mask", [np.ones(9), np.ones(11), {"move": np.ones(3)}, {}, [], (np.ones(3), np.ones(3))], ids=repr)
def test_a_mask_of_another_size_names_both_sizes(mask: Tree) -> None:
    with pytest.raises(ConfigError, match=r"mask has \d+ entries, the actions have 10 options"):
        spaces.flat_mask(mask, HYBRID)


@pytest.mark.parametrize(
    "mask",
    [
        ["a"] * 10,
        [1] * 9 + [None],
        [1] * 9 + [2],
        [1] * 9 + [-1e9],
        [1] * 9 + [np.nan],
        np.full(10, 0.5),
        np.array([1] * 9 + [None], object),
    ],
    ids=repr,
)
def test_a_mask_holds_zeros_and_ones_only(mask: Tree) -> None:
    with pytest.raises(ConfigError, match="values other than 0"):
        spaces.flat_mask(mask, HYBRID)


@pytest.mark.parametrize(
    "mask", [{"mvoe": [1, 1, 1]}, {"move": [1, 1, 1], "keys": [[1, 1], [1] * 5], "x": [1]}, {"move": {"a": 1}}]
)
def test_a_part_of_a_mask_that_no_action_has_is_named(mask: Tree) -> None:
    with pytest.raises(ConfigError, match=r"mask has \['(mvoe|x|a)'\]"):
        spaces.flat_mask(mask, HYBRID)


# -- values that somebody gives -----------------------------------------------------------------------------------------

EVERYTHING = gs.Dict(
    {
        "vector": gs.Box(-1, 1, (3,)),
        "number": gs.Box(-1, 1, ()),
        "picture": gs.Box(0, 255, (2, 2, 1), np.uint8),
        "bytes": gs.Box(-100, 100, (2,), np.int16),
        "kind": gs.Discrete(3, start=5),
        "kinds": gs.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, 0]])),
        "flags": gs.MultiBinary((1, 2)),
        "pair": gs.Tuple([gs.Discrete(2), gs.Box(0, 1, (1,), np.float64)]),
    }
)


def given() -> dict[str, Any]:
    """Something of the space above as JSON would bring it."""
    return {
        "vector": [0.5, 1, -1],
        "number": 0.25,
        "picture": [[[0], [1]], [[2], [255]]],
        "bytes": [-7, 8],
        "kind": 7,
        "kinds": [[2, 2]],
        "flags": [[1, 0]],
        "pair": [1, [0.5]],
    }


def test_lists_become_arrays_of_the_right_kind() -> None:
    fitted = spaces.SpaceParser(EVERYTHING)(given())
    for (path, spec), (_, array) in zip(leaves(spaces.array_spec(EVERYTHING)), leaves(fitted), strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype), path
    assert fitted["vector"].tolist() == [0.5, 1, -1]
    assert fitted["pair"][0] == 1
    assert set(fitted) == set(given())


@pytest.mark.parametrize("space", [s for s in [*ELEMENTARY, *NESTED, EVERYTHING] if s.shape != (0,)], ids=repr)
def test_samples_of_a_space_fit_it_as_arrays_lists_and_bytes(space: Space) -> None:
    space.seed(0)
    fit = spaces.SpaceParser(space)
    for _ in range(10):
        sample = space.sample()
        arrays = fit(sample)
        as_lists = map_tree(lambda x: np.asarray(x).tolist(), sample)
        as_bytes = map_tree(lambda x: x.tobytes(), arrays)
        for other in (fit(as_lists), fit(as_bytes)):
            for (path, one), (_, two) in zip(leaves(arrays), leaves(other), strict=True):
                np.testing.assert_array_equal(one, two, err_msg=path)


def test_what_fits_is_a_copy_that_may_be_written() -> None:
    fit = spaces.SpaceParser(gs.Box(-1, 1, (2,)))
    mine = np.zeros(2, np.float32)
    for value in (mine, mine.tobytes(), [0, 0]):
        fitted = fit(value)
        fitted[:] = 5
    assert mine.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("vector", [1, 2], "shape [2]"),
        ("vector", [[1, 2, 3]], "shape [1, 3]"),
        ("vector", 1, "shape []"),
        ("vector", [1, 2, np.nan], "nan"),
        ("vector", [1, 2, np.inf], "inf"),
        ("vector", [1, 2, 1e39], "too large for float32"),
        ("vector", [1, 2, "3"], "text"),
        ("vector", [1, 2, None], "not a number"),
        ("vector", [1, [2], 3], "inhomogeneous"),
        ("vector", [1, 2, 10**30], "not a number"),
        ("vector", [1, 2, 3j], "complex"),
        ("vector", None, "not a number"),
        ("vector", {}, "not a number"),
        ("vector", b"123", "float32[3]"),
        ("vector", np.array([1, 2, np.nan], np.float32).tobytes(), "nan"),
        ("number", [0.5], "shape [1]"),
        ("picture", [[[0], [1]], [[2], [256]]], "does not fit into uint8"),
        ("picture", [[[0], [1]], [[2], [-1]]], "does not fit into uint8"),
        ("picture", [[[0], [1]], [[2], [0.5]]], "fractions"),
        ("picture", b"\0\1\2", "uint8[2, 2, 1]"),
        ("bytes", [1, 40_000], "does not fit into int16"),
        ("bytes", [1, 1e300], "does not fit into int16"),
        ("kind", 4, "categories run from 5 to below 8"),
        ("kind", 8, "categories run from 5 to below 8"),
        ("kind", 5.5, "fractions"),
        ("kind", np.nan, "fractions"),
        ("kind", "6", "text"),
        ("kind", 2**63, "does not fit into int64"),
        ("kind", b"\0" * 8, "categories"),
        ("kinds", [[3, 0]], "categories"),
        ("kinds", [[1, -1]], "categories"),
        ("flags", [[2, 0]], "categories run from 0 to below 2"),
        ("flags", [[-1, 0]], "categories run from 0 to below 2"),
        ("flags", b"\1\7", "categories run from 0 to below 2"),
        ("pair", [1], "list of 2 parts"),
        ("pair", {"0": 1, "1": [0.5]}, "list of 2 parts"),
        ("pair", [2, [0.5]], "categories"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(path: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^observation\.{path}") as caught:
        spaces.SpaceParser(EVERYTHING)(given() | {path: value})
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [None, [], 5, "x", b"x", {}, {"vector": 1}, given() | {"more": 1}], ids=lambda v: repr(v)[:30])
def test_an_object_with_other_keys_names_all_of_them(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the keys are \['bytes', 'flags'"):
        spaces.SpaceParser(EVERYTHING)(value)


def test_numbers_that_are_whole_fit_whatever_they_are_written_as() -> None:
    fit = spaces.SpaceParser(gs.Discrete(3))
    for value in (2, 2.0, np.float32(2), np.int8(2), True + 1):
        assert fit(value) == 2
    assert spaces.SpaceParser(gs.Box(-1, 1, (2,)))([True, False]).tolist() == [1, 0]


def test_bounds_of_a_box_are_not_enforced() -> None:
    assert spaces.SpaceParser(gs.Box(-1, 1, (1,)))([7]).tolist() == [7]


@pytest.mark.parametrize(
    "values",
    [
        [0.5, -1, 2],
        [True, 0.5, False],
        [2**53 + 1, -(2**60), 0],
        [1e38, -1e38, -0.0],
        [np.float32(0.1), np.int8(3), 1],
        [3.5e38, 0, 0],
        [float("nan"), 0, 0],
        [10**30, 0, 0],
        ["1", 0, 0],
        [None, 0, 0],
        [[1], [2], [3]],
        [1, 2],
    ],
    ids=repr,
)
def test_a_short_list_alone_is_taken_as_anywhere_else(values: list[Any]) -> None:
    """Lists of plain numbers have a shorter way, which must lead to the same."""
    space = gs.Box(-1, 1, (3,))

    def outcome(fit: spaces.SpaceParser, value: Any) -> Any:
        try:
            ((_, array),) = leaves(fit(value))
        except ValueError:
            return "refused"
        return array.dtype, array.tobytes()

    assert outcome(spaces.SpaceParser(space), values) == outcome(spaces.SpaceParser(gs.Dict({"x": space})), {"x": values})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1e300, 0.0], r"observation contains 1e\+300, which is too large for float32"),
        ([0.0, -1e300], r"observation contains -1e\+300, which is too large for float32"),
        (np.array([np.inf, 0.0]), "observation contains inf$"),
        (np.array([np.nan, 0.0], np.float32).tobytes(), "observation contains nan$"),
    ],
)
def test_a_number_too_large_for_float32_is_not_called_infinite(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spaces.SpaceParser(gs.Box(-np.inf, np.inf, (2,), np.float64))(value)


# -- fast paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int64, np.float32])
def test_a_parser_of_masks_returns_what_flattening_returns(dtype: type) -> None:
    parse = spaces.MaskParser(HYBRID)
    assert parse.choices == spaces.choices(HYBRID)
    random = np.random.default_rng(0)
    for _ in range(20):
        mask: Array = random.integers(2, size=10).astype(dtype)
        before = mask.copy()
        flat = parse(mask)
        np.testing.assert_array_equal(flat, spaces.flat_mask(mask, HYBRID))
        assert flat.dtype == np.bool_
        flat[:] = True
        if dtype in (np.int8, np.uint8):
            np.testing.assert_array_equal(mask, before)


@pytest.mark.parametrize("wrong", [2, -1, 127], ids=repr)
@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_parser_of_masks_rejects_bytes_other_than_zero_and_one(wrong: int, place: int) -> None:
    mask = np.ones(10, np.int8)
    mask[place] = wrong
    with pytest.raises(ConfigError, match="values other than 0"):
        spaces.MaskParser(HYBRID)(mask)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(3,), (4, 4)])
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite_are_found_anywhere(wrong: float, shape: tuple[int, ...]) -> None:
    fit = spaces.SpaceParser(gs.Box(-np.inf, np.inf, shape))
    for place in np.ndindex(shape):
        array = np.full(shape, -1e30, np.float32)  # the squares overflow
        np.testing.assert_array_equal(fit(array), array)
        array[place] = wrong
        with pytest.raises(ValueError, match=r"contains (nan|inf|-inf)"):
            fit(array)
