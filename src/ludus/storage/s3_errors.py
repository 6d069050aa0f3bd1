"""What went wrong with a request to S3, as an error of ours. Pure.

The client tells too few kinds of failure apart; the rest is in its text, of which the status and the server's code are used and no more.
"""

from __future__ import annotations

import re
from typing import Literal

from ludus.errors import AlreadyExists, LudusError, NotFound, StoreError, StoreFull, StoreUnavailable, UsageError
from ludus.storage import multipart_cleanup, s3_credentials

Verb = Literal["read", "write", "create", "list", "delete"]
"""`create`: to write if there is nothing yet."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"kind: (Timeout|Connect)\b")
_WHY = {"Timeout": "it did not answer in time", "Connect": "nothing can be reached there"}
_QUOTA = re.compile(r"quota|insufficient|storagefull", re.IGNORECASE)
_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect")
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_UNKNOWN = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidClientTokenId", *_EXPIRED)
_CURABLE = ("RequestTimeTooSkewed", *_EXPIRED)  # somebody renews a token or sets a clock, and it goes on
_PASSING = (408, 409, 412, 425, 429)  # of those below 500


def translate(error: Exception, verb: Verb, what: str, server: str) -> LudusError:
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if isinstance(error, ValueError):
        return UsageError(f"{what!r} is not a valid key on S3.")
    if "/latest/api/token" in text or "/latest/meta-data" in text:  # the last place where the client looks for credentials
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
            f"Cannot {doing} at {server}: its certificate is not one to be trusted.",
            f"Name a file with that of its authority in {multipart_cleanup.AUTHORITIES}.",
        )
    if "redirect without LOCATION" in text:
        return _wrong_region(doing)
    why = _WHY[found[1]] if (found := _KIND.search(text)) else "the connection broke"
    return StoreUnavailable(f"Cannot {doing} at {server}: {why}.", "Is the server well, and the end point right?")


def _status_error(status: int, code: str, verb: Verb, doing: str, what: str, server: str) -> LudusError:
    said = f"{status} {code}".strip()
    if code == "NoSuchBucket":
        return NotFound(f"Cannot {doing}: {server} has no such bucket.", "Make it, or correct the address.")
    if status == 404 and verb in ("read", "delete"):
        return NotFound(f"There is no {what}.")
    if status == 507 or _QUOTA.search(code):
        return StoreFull(f"No space left to {doing} ({said}).", "Free some room or raise the quota; what was written is intact.")
    if code in _CURABLE:
        return StoreUnavailable(f"Not allowed to {doing} for now ({said}).", _remedy(code))
    if status in (401, 403):
        return StoreFull(f"Not allowed to {doing} ({said}).", _remedy(code))
    if 300 <= status < 400 or code in _REGION:
        return _wrong_region(doing)
    if code == "NoSuchUpload":
        return StoreUnavailable(f"Cannot {doing}: somebody has aborted the upload.", "Try again, if it is still yours to write.")
    if status in _PASSING or (status >= 500 and status not in (501, 505)):
        return StoreUnavailable(f"Cannot {doing} at {server}: it answers {said}.", "Try again when the server is well.")
    return StoreError(f"Cannot {doing}: {server} answered {said}.", "" if code else "Is it the end point of an S3 server?")


def _wrong_region(doing: str) -> UsageError:
    return UsageError(
        f"Cannot {doing}: it is in another region than the one asked for.", "Set AWS_REGION, or ?region= in the address."
    )


def _remedy(code: str) -> str:
    if code == "RequestTimeTooSkewed":
        return "Set the clock of this machine."
    if code in _UNKNOWN:
        return "The credentials are wrong or have expired: see AWS_ACCESS_KEY_ID, AWS_PROFILE, or the file of credentials."
    return "The credentials need the rights to get, put, delete and list objects there."
