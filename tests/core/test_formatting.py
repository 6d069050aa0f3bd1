"""Numbers, durations, bars and curves as text."""

from __future__ import annotations

import math

import pytest

from ludus.core.formatting import bar, format_duration, format_number, pluralize, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (-0.3333, "−0.333"),
        (0.05, "0.0500"),
        (0.0123456, "0.0123"),
        (0.000012, "1.2e-05"),
        (4.938, "4.94"),
        (-56.87, "−56.9"),
        (475.34, "475.3"),
        (500.0, "500.0"),
        (1234.56, "1,235"),
        (-1234567.0, "−1,234,567"),
        (3.2e13, "3.2e+13"),
    ],
)
def test_a_number_has_as_many_digits_as_its_magnitude_needs(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.inf, "–"),
        (-1.0, "0.0 s"),
        (0.04, "0.0 s"),
        (3.21, "3.2 s"),
        (9.96, "10 s"),
        (45.4, "45 s"),
        (99.7, "1 min 40 s"),
        (120.0, "2 min"),
        (725.0, "12 min 5 s"),
        (12_000.0, "3 h 20 min"),
        (86_400.0, "1 d"),
        (443_000.0, "5 d 3 h"),
    ],
)
def test_a_duration_is_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "    "), (0.5, "██  "), (0.53, "██▏ "), (1.0, "████"), (7.0, "████"), (-1.0, "    "), (math.nan, "    ")],
)
def test_a_bar_is_always_as_wide_as_asked(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_a_noun_is_singular_after_1_only() -> None:
    assert [pluralize(number, "mistake") for number in (0, 1, 1_200)] == ["0 mistakes", "1 mistake", "1,200 mistakes"]
    assert [pluralize(number, "match", "matches") for number in (1, 2)] == ["1 match", "2 matches"]


def test_a_sparkline_squeezes_the_history_and_keeps_the_last_value() -> None:
    assert sparkline([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"
    assert sparkline([1.0] * 3, 10) == "▁▁▁"
    assert sparkline([1.0], 10) == ""
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁█"
    long = sparkline([float(i) for i in range(1001)], 40)
    assert len(long) <= 40
    assert long[-1] == "█"
