"""Signing by hand: the examples that Amazon publishes, and an address with a name that needs encoding on a real server."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ludus.errors import StoreError
from ludus.storage import multipart_cleanup
from ludus.storage.s3_credentials import Credentials
from tests.s3 import BUCKET, KEY_ID, SECRET, Server

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
MOMENT = datetime(2013, 5, 24, tzinfo=UTC)


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_the_published_examples_are_signed_as_published(query: str, signature: str) -> None:
    headers = multipart_cleanup.sign("GET", "examplebucket.s3.amazonaws.com", "/", query, EXAMPLE, "us-east-1", MOMENT)
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"
    )


def test_a_session_token_is_signed_too() -> None:
    who = Credentials(EXAMPLE.key_id, EXAMPLE.secret, "token")
    headers = multipart_cleanup.sign("GET", "host", "/", "", who, "us-east-1", MOMENT)
    assert headers["x-amz-security-token"] == "token"
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token," in headers["authorization"]


@pytest.mark.system
def test_uploads_are_listed_and_aborted_whatever_they_are_called(s3_server: Server) -> None:
    server, who = multipart_cleanup.S3Endpoint(s3_server.endpoint, BUCKET, None, 20.0), Credentials(KEY_ID, SECRET)
    assert s3_server.ask("POST", f"{BUCKET}/odd/%C3%BC%20%23%26%2B1", "uploads=")[0] == 200
    assert s3_server.ask("POST", f"{BUCKET}/odd/2", "uploads=")[0] == 200
    found = list(multipart_cleanup.list_uploads(server, who, "odd/"))
    assert sorted(upload.key for upload in found) == ["odd/2", "odd/ü #&+1"]
    for upload in found * 2:  # also what is gone already
        multipart_cleanup.abort_upload(server, who, upload)
    assert list(multipart_cleanup.list_uploads(server, who, "odd/")) == []


@pytest.mark.system
def test_a_refusal_is_an_error_without_secrets(s3_server: Server) -> None:
    server = multipart_cleanup.S3Endpoint(s3_server.endpoint, BUCKET, None, 20.0)
    with pytest.raises(StoreError, match="403") as caught:
        list(multipart_cleanup.list_uploads(server, Credentials(KEY_ID, "hunter2"), "odd/"))
    assert "hunter2" not in str(caught.value)
