"""YAML: what may be written, what is refused, and that nothing grows while it is read."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import ConfigError
from ludus.io.yaml_documents import MAX_NODES, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2.5e3", -2500.0),
        ("+1e2", 100.0),
        ("1_0e3", 1e4),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, number: float) -> None:
    assert parse_yaml(f"lr: {text}", "x") == {"lr": number}


@pytest.mark.parametrize("text", ["e5", "1e", "v1e5", "'3e-4'", "12:30", "010", "2024-01-31", "2024-13-45", "1.2.3", "5000:6000"])
def test_words_that_look_like_numbers_or_dates_stay_words(text: str) -> None:
    assert parse_yaml(f"a: {text}", "x") == {"a": text.strip("'")}


def bomb(levels: int, width: int) -> str:
    """Each level is `width` aliases of the one before: width ** levels values in a few lines."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


def merged(levels: int, width: int) -> str:
    lines = ["a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(width)) + "}"]
    lines += [f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"file, line 2: the key 'a' occurs twice"),
        ("x:\n  b: 1\n  c: 2\n  b: 1", r"line 4: the key 'b' occurs twice"),
        ("x: {b: 1, b: 2}", r"the key 'b' occurs twice"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a", r"the key '<<' occurs twice"),
        (bomb(9, 10), r"more than 50,000 values"),
        (bomb(60, 2), r"more than 50,000 values"),
        (merged(9, 10), r"more than 50,000 values"),
        ("a: &a [*a]", r"line 1: an alias refers to a section that contains it"),
        ("a: &a {b: {c: *a}}", r"an alias refers to a section that contains it"),
        ("a: *nothing", r"not valid YAML"),
        ("1: x", r"line 1: the key 1 is not a string"),
        ("true: x", r"the key true reads as true or false in YAML\."),
        ("a:\n  False: x", r"line 2: the key False reads as true or false"),
        ("a:\n  null: x", r"line 2: the key null is not a string"),
        ("? [a, b]\n: x", r"a key is a string, not a list"),
        ("a: !!python/object/apply:os.system [ls]", r"not valid YAML"),
        ("a: !!binary aGVsbG8=", r"unsupported type: bytes"),
        ("a: !!set {b, c}", r"unsupported type: set"),
        ("a: [1, 2", r"not valid YAML"),
        ("a: 1\n\tb: 2", r"not valid YAML"),
        ("a: 1\n---\nb: 2", r"not valid YAML"),
        ("a: \x01", r"not valid YAML"),
        ("a: " + "1" * 5000, r"not valid YAML"),
        ("a: !!bool perhaps", r"not valid YAML"),
        ("a: !!timestamp soon", r"not valid YAML"),
        ("a: !!int many", r"not valid YAML"),
        ("[" * 5000, r"not valid YAML"),
        ("a: " + "{b: " * 5000, r"not valid YAML"),
        ("a: " + "[" * 70 + "]" * 70, r"nested more than 60 deep"),
    ],
    ids=lambda text: text[:25],
)
def test_yaml_that_is_unsafe_or_ambiguous_is_a_config_error_with_its_source(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, "the file")
    assert caught.value.message.startswith("the file")


def test_tabs_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="Indent with spaces"):
        parse_yaml("a:\n\tb: 1", "x")


def test_aliases_are_written_out_and_nothing_is_shared() -> None:
    data = parse_yaml("a: &a {x: 1, y: [1, 2]}\nb: *a\nc:\n  <<: *a\n  x: 2\nd: {<<: [{x: 7}, *a]}", "x")
    assert data == {
        "a": {"x": 1, "y": [1, 2]},
        "b": {"x": 1, "y": [1, 2]},
        "c": {"x": 2, "y": [1, 2]},
        "d": {"x": 7, "y": [1, 2]},
    }
    data["a"]["y"].append(3)
    assert data["b"]["y"] == data["c"]["y"] == [1, 2]


def test_chained_merges_are_read_in_any_order_of_construction() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: &y {<<: *x, k: 2}\nc: {<<: *y, z: 1}", "x")["c"] == {"k": 2, "z": 1}


def test_as_many_aliases_as_a_large_experiment_has_are_allowed() -> None:
    text = "a: &a [" + ", ".join(["1"] * 100) + "]\nb: [" + ", ".join(["*a"] * 100) + "]"
    assert len(parse_yaml(text, "x")["b"]) == 100
    assert MAX_NODES > 100 * 100


def test_nothing_is_nothing() -> None:
    assert parse_yaml("", "x") is None
    assert parse_yaml("# only a comment", "x") is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_dumped_is_read_back_by_us_and_by_others(value: Any) -> None:
    text = dump_yaml({"value": value})
    assert parse_yaml(text, "x") == {"value": value}
    assert yaml.safe_load(text) == {"value": value}


@pytest.mark.parametrize(
    "word", ["1e5", "yes", "010", "12:30", "2024-01-01", "<<", "=", "~", "", "0x1F", "1_0", ".inf", "null", "\x85", "a\u2028b"]
)
def test_an_ambiguous_string_is_quoted(word: str) -> None:
    text = dump_yaml([word])
    assert parse_yaml(text, "x") == yaml.safe_load(text) == [word]


def test_equal_parts_are_written_twice_and_never_as_an_alias() -> None:
    shared = [1, 2]
    assert "*" not in dump_yaml({"a": shared, "b": shared})
    assert "zwölf" in dump_yaml({"zwölf": 12})


def test_words_that_were_booleans_once_may_be_keys() -> None:
    assert parse_yaml("on: slurm\nNo: 1\nvalue: on", "x") == {"on": "slurm", "No": 1, "value": True}
