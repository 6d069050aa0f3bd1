"""Translation of errors of the S3 client to LudusErrors.

The client has few exception classes; the HTTP status and the S3 error code are parsed from its message.
"""

from __future__ import annotations

import re
from typing import Literal

from ludus.errors import AlreadyExists, LudusError, NotFound, StoreError, StoreFull, StoreUnavailable, UsageError
from ludus.storage import multipart_cleanup, s3_credentials

Verb = Literal["read", "write", "create", "list", "delete"]
"""`create`: write unless the object exists."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"kind: (Timeout|Connect)\b")
_WHY = {"Timeout": "the request timed out", "Connect": "the connection failed"}
_QUOTA = re.compile(r"quota|insufficient|storagefull", re.IGNORECASE)
_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect")
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_UNKNOWN = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidClientTokenId", *_EXPIRED)
_RECOVERABLE = ("RequestTimeTooSkewed", *_EXPIRED)  # resolved when a token is renewed or a clock is set
_TEMPORARY = (408, 409, 412, 425, 429)  # in addition to those from 500


def translate(error: Exception, verb: Verb, what: str, server: str) -> LudusError:
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if isinstance(error, ValueError):
        return UsageError(f"{what!r} is not a valid key on S3.")
    if "/latest/api/token" in text or "/latest/meta-data" in text:  # the client's last source of credentials
        return UsageError(f"There are no credentials for {what}.", s3_credentials.REMEDY)
    if verb == "create" and status in (409, 412):
        return AlreadyExists(f"{what} exists already.")
    doing = f"{'write' if verb == 'create' else verb} {what}"
    if status is None:
        return _connection_error(text, doing, server)
    return _status_error(status, code, verb, doing, what, server)


def _connection_error(text: str, doing: str, server: str) -> LudusError:
    if "InvalidCertificate" in text:
        return StoreUnavailable(
            f"Cannot {doing} at {server}: its certificate is not trusted.",
            f"Set {multipart_cleanup.AUTHORITIES} to a file with the certificate of its authority.",
        )
    if "redirect without LOCATION" in text:
        return _wrong_region(doing)
    why = _WHY[found[1]] if (found := _KIND.search(text)) else "the connection broke"
    return StoreUnavailable(f"Cannot {doing} at {server}: {why}.", "Check that the server runs and that the endpoint is right.")


def _status_error(status: int, code: str, verb: Verb, doing: str, what: str, server: str) -> LudusError:
    reply = f"{status} {code}".strip()
    if code == "NoSuchBucket":
        return NotFound(f"Cannot {doing}: {server} has no such bucket.", "Create it, or correct the URL.")
    if status == 404 and verb in ("read", "delete"):
        return NotFound(f"There is no {what}.")
    if status == 507 or _QUOTA.search(code):
        hint = "Free some space or raise the quota; everything written before is intact."
        return StoreFull(f"No space left to {doing} ({reply}).", hint)
    if code in _RECOVERABLE:
        return StoreUnavailable(f"Not allowed to {doing} for now ({reply}).", _remedy(code))
    if status in (401, 403):
        return StoreFull(f"Not allowed to {doing} ({reply}).", _remedy(code))
    if 300 <= status < 400 or code in _REGION:
        return _wrong_region(doing)
    if code == "NoSuchUpload":
        return StoreUnavailable(f"Cannot {doing}: the upload was aborted by another process.", "Try again.")
    if status in _TEMPORARY or (status >= 500 and status not in (501, 505)):
        return StoreUnavailable(f"Cannot {doing} at {server}: it answers {reply}.", "Try again later.")
    return StoreError(f"Cannot {doing}: {server} answered {reply}.", "" if code else "Is it the endpoint of an S3 server?")


def _wrong_region(doing: str) -> UsageError:
    return UsageError(f"Cannot {doing}: the bucket is in another region.", "Set AWS_REGION, or ?region= in the URL.")


def _remedy(code: str) -> str:
    if code == "RequestTimeTooSkewed":
        return "Set the clock of this machine."
    if code in _UNKNOWN:
        return "The credentials are wrong or have expired: check AWS_ACCESS_KEY_ID, AWS_PROFILE, or the credentials file."
    return "The credentials need permission to get, put, delete and list objects there."
