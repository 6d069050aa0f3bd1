"""Addresses of stores on S3: what is one, what is not, and that no secret is repeated."""

from __future__ import annotations

import pytest

from ludus.errors import UsageError
from ludus.storage.s3_url import S3Url, check_endpoint


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket", S3Url("bucket")),
        ("s3://bucket/", S3Url("bucket")),
        ("s3://bucket/a/b/", S3Url("bucket", "a/b")),
        ("s3://my.bucket-1/a b%20", S3Url("my.bucket-1", "a b%20")),
        ("s3://bucket/a?endpoint=http://127.0.0.1:8333", S3Url("bucket", "a", "http://127.0.0.1:8333")),
        ("s3://bucket/a?endpoint=http%3A%2F%2Fhost%3A1/", S3Url("bucket", "a", "http://host:1")),
        ("s3://bucket?region=eu-west-1&endpoint=https://[::1]:9000", S3Url("bucket", "", "https://[::1]:9000", "eu-west-1")),
    ],
)
def test_an_address_is_taken_apart_and_put_together(url: str, address: S3Url) -> None:
    assert S3Url.parse(url) == address
    assert S3Url.parse(address.url) == address


def test_further_down_the_server_stays_the_same() -> None:
    below = S3Url.parse("s3://bucket/a?endpoint=http://host:1").below("runs/x")
    assert below.url == "s3://bucket/a/runs/x?endpoint=http://host:1"
    assert S3Url("bucket").below("x").url == "s3://bucket/x"
    with pytest.raises(UsageError):
        below.below("../..")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3:bucket", "not the URL"),
        ("http://bucket/a", "not the URL"),
        ("s3://b", "not the name of a bucket"),
        ("s3://bu cket/a", "not the name of a bucket"),
        ("s3://bucket:80/a", "not the name of a bucket"),
        ("s3://bucket/a/../b", "not a valid key"),
        ("s3://bucket/a//b", "not a valid key"),
        ("s3://bucket/a?colour=red", "unknown option 'colour'"),
        ("s3://bucket/a?endpoint=", "not the endpoint"),
        ("s3://bucket/a?endpoint=localhost:8333", "not the endpoint"),
        ("s3://bucket/a?endpoint=http://host:port", "not the endpoint"),
        ("s3://bucket/a?endpoint=ftp://host", "not the endpoint"),
        ("s3://bucket/a?endpoint=http://host:1/best", r"path in its options.*Options come last"),
        ("s3://bucket/a?region=eu-west-1/best", r"path in its options.*Options come last"),
    ],
)
def test_an_invalid_url_is_reported(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        S3Url.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hunter2secret@bucket/a",
        "s3://KEY:hunter2/secret@bucket/a",
        "s3://KEY:hunter2?secret@bucket/a",
        "s3://bucket/a?endpoint=http://KEY:hunter2secret@host:1",
        "s3://bucket/a?secret=hunter2secret",
        "https://KEY:hunter2secret@host/a",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        S3Url.parse(url)
    assert "hunter2" not in str(caught.value)


def test_an_end_point_has_no_slash_at_its_end() -> None:
    assert check_endpoint("https://host/") == "https://host"
    assert check_endpoint("https://host/s3/") == "https://host/s3", "which the environment may name"
