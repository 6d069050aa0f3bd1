"""All fuzz targets with inputs mutated by Hypothesis. `python -m bench.fuzz` runs longer."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import talk_http, targets

EXAMPLES = int(os.environ.get("LUDUS_FUZZ_EXAMPLES", "150"))
TARGETS = targets()

TOKENS = (
    b"", b"\0", b"\xff\xfe", b"-1", b"1e999", b"NaN", b"9" * 400, b"1_0", b"[" * 300, b'{"a":' * 200, b"null", b"true", b"[]", b"{}", b'""',
    b"\r\n", b"\r\n\r\n", b": ", b"../../etc/passwd", b"%00", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"\xc1", b"\xdf\xff",
    b"&x ", b"*x", b"!!python/object:os.system ", b"1e400", b"\xed\xa0\x80", b"4294967296", b"18446744073709551616", b"-9223372036854775809",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A valid input with some parts replaced, removed, repeated or swapped for special values."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 4, 16, 1000])))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_known_inputs_are_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    accepted = [target.check(data) for data in target.corpus()]
    assert any(accepted), "no valid input: the target tests nothing"


def test_the_http_target_reaches_the_actors() -> None:
    assert b"hello" in talk_http(TARGETS["http"].seeds[0])


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_whatever_comes_is_read_or_refused(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=mutated(tuple(target.corpus())) | st.binary(max_size=200))
    def check(data: bytes) -> None:
        target.check(data)

    check()
