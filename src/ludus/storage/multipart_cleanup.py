"""Unfinished uploads in parts: S3 keeps what a killed writer sent, shows it in no listing, and has it paid for.

The client can neither list nor abort those of others, so the two requests are made and signed here (Signature Version 4).
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
"""Names a file of certificates, for a server whose own is signed by nobody well known."""
_PAGES = 100  # of up to 1000 uploads


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


def list_uploads(server: S3Endpoint, who: Credentials, prefix: str) -> Iterator[Upload]:
    """All below the prefix. Raises StoreError, OSError."""
    marker: dict[str, str] = {}
    for _ in range(_PAGES):
        page = _parse(_request(server, who, "GET", "", {"uploads": "", "prefix": prefix, **marker}))
        for element in page.iter("Upload"):
            yield Upload(element.findtext("Key", ""), element.findtext("UploadId", ""))
        following = {
            "key-marker": page.findtext("NextKeyMarker", ""),
            "upload-id-marker": page.findtext("NextUploadIdMarker", ""),
        }
        if page.findtext("IsTruncated", "") != "true" or following == marker or not following["key-marker"]:
            return
        marker = following


def abort_upload(server: S3Endpoint, who: Credentials, upload: Upload) -> None:
    """Nothing happens when it is gone already. Raises StoreError, OSError."""
    _request(server, who, "DELETE", upload.key, {"uploadId": upload.id}, fine=(200, 204, 404))


def _request(
    server: S3Endpoint, who: Credentials, method: str, key: str, query: Mapping[str, str], *, fine: tuple[int, ...] = (200,)
) -> bytes:
    region = server.region or "us-east-1"
    base = urlsplit(server.endpoint or f"https://s3.{region}.amazonaws.com")
    path = quote(f"{base.path.rstrip('/')}/{server.bucket}" + (f"/{key}" if key else ""), safe="/-_.~")
    asked = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
    headers = sign(method, base.netloc, path, asked, who, region, datetime.now(UTC))
    connection = _connect(base, server.timeout_s)
    try:
        connection.request(method, f"{path}?{asked}", headers=headers)
        answer = connection.getresponse()
        body = answer.read(64 << 20)
    except http.client.HTTPException as error:
        raise StoreError(f"{base.netloc} did not answer as an HTTP server does.") from error
    finally:
        connection.close()
    if answer.status not in fine:
        raise StoreError(f"{base.netloc} answered {answer.status} {answer.reason}.")
    return body


def _connect(base: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    if base.scheme != "https":
        return http.client.HTTPConnection(base.netloc, timeout=timeout_s)
    context = ssl.create_default_context()
    if authorities := os.environ.get(AUTHORITIES):
        context.load_verify_locations(authorities)  # beside the usual ones, as the client has it
    return http.client.HTTPSConnection(base.netloc, timeout=timeout_s, context=context)


def sign(method: str, host: str, path: str, query: str, who: Credentials, region: str, now: datetime) -> dict[str, str]:
    """The headers of a request without a body. Pure; `path` and `query` are encoded already, the query in order."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if who.token:
        headers["x-amz-security-token"] = who.token
    signed = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, path, query, lines, signed, _EMPTY))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    secret = f"AWS4{who.secret}".encode()
    for part in scope.split("/"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={who.key_id}/{scope}, SignedHeaders={signed}, Signature={signature}"
    return {**headers, "authorization": credential}


def _parse(body: bytes) -> ET.Element:
    try:
        root = ET.fromstring(body)  # noqa: S314 - from the server that holds our data; expat bounds the growth of entities
    except ET.ParseError as error:
        raise StoreError("The list of unfinished uploads is not XML.") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # with or without the name space
    return root
