"""Cleanup of unfinished multipart uploads, which S3 keeps after a writer was killed, and bills, but does not list as objects.

The S3 client cannot list or abort them, so the two requests are made and signed here (Signature Version 4).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import ssl
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import SplitResult, quote, urlsplit

from ludus.errors import StoreError
from ludus.storage.s3_credentials import Credentials

_EMPTY = hashlib.sha256(b"").hexdigest()
AUTHORITIES = "AWS_CA_BUNDLE"
"""Environment variable with a file of additional CA certificates."""
_MAX_PAGES = 100  # of up to 1000 uploads


@dataclass(frozen=True)
class S3Endpoint:
    endpoint: str | None
    bucket: str
    region: str | None
    timeout_s: float


@dataclass(frozen=True)
class Upload:
    key: str
    id: str


def list_uploads(server: S3Endpoint, credentials: Credentials, prefix: str) -> Iterator[Upload]:
    """Yield all unfinished uploads below the prefix. Raises StoreError, OSError."""
    marker: dict[str, str] = {}
    for _ in range(_MAX_PAGES):
        page = _parse(_request(server, credentials, "GET", "", {"uploads": "", "prefix": prefix, **marker}))
        for element in page.iter("Upload"):
            yield Upload(element.findtext("Key", ""), element.findtext("UploadId", ""))
        following = {
            "key-marker": page.findtext("NextKeyMarker", ""),
            "upload-id-marker": page.findtext("NextUploadIdMarker", ""),
        }
        if page.findtext("IsTruncated", "") != "true" or following == marker or not following["key-marker"]:
            return
        marker = following


def abort_upload(server: S3Endpoint, credentials: Credentials, upload: Upload) -> None:
    """Abort an upload, if it still exists. Raises StoreError, OSError."""
    _request(server, credentials, "DELETE", upload.key, {"uploadId": upload.id}, expected=(200, 204, 404))


def _request(
    server: S3Endpoint,
    credentials: Credentials,
    method: str,
    key: str,
    query: Mapping[str, str],
    *,
    expected: tuple[int, ...] = (200,),
) -> bytes:
    region = server.region or "us-east-1"
    base = urlsplit(server.endpoint or f"https://s3.{region}.amazonaws.com")
    path = quote(f"{base.path.rstrip('/')}/{server.bucket}" + (f"/{key}" if key else ""), safe="/-_.~")
    encoded = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
    headers = sign(method, base.netloc, path, encoded, credentials, region, datetime.now(UTC))
    connection = _connect(base, server.timeout_s)
    try:
        connection.request(method, f"{path}?{encoded}", headers=headers)
        response = connection.getresponse()
        body = response.read(64 << 20)
    except http.client.HTTPException as error:
        raise StoreError(f"{base.netloc} did not send a valid HTTP response.") from error
    finally:
        connection.close()
    if response.status not in expected:
        raise StoreError(f"{base.netloc} answered {response.status} {response.reason}.")
    return body


def _connect(base: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    if base.scheme != "https":
        return http.client.HTTPConnection(base.netloc, timeout=timeout_s)
    context = ssl.create_default_context()
    if authorities := os.environ.get(AUTHORITIES):
        context.load_verify_locations(authorities)  # in addition to the system's, as the S3 client does
    return http.client.HTTPSConnection(base.netloc, timeout=timeout_s, context=context)


def sign(method: str, host: str, path: str, query: str, credentials: Credentials, region: str, now: datetime) -> dict[str, str]:
    """Return the headers of a request without a body. `path` and `query` are URL-encoded, the query is sorted."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    signed = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, path, query, lines, signed, _EMPTY))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    secret = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    authorization = f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}, SignedHeaders={signed}, Signature={signature}"
    return {**headers, "authorization": authorization}


def _parse(body: bytes) -> ET.Element:
    try:
        root = ET.fromstring(body)  # noqa: S314 - from the server with our data; expat limits entity expansion
    except ET.ParseError as error:
        raise StoreError("The list of unfinished uploads is not XML.") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # strip the XML namespace
    return root
