"""Where a store on S3 is: `s3://bucket/prefix?endpoint=http://host:port&region=name`, taken apart and put together. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, quote, urlsplit

from ludus.errors import UsageError
from ludus.storage.base import check_key

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_FORM = "Write s3://bucket/prefix, with ?endpoint=http://host:port where the server is not Amazon's."


@dataclass(frozen=True)
class S3Url:
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    """None: what the environment says, else Amazon's own."""
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Url:
        """Raises UsageError. What might be a secret is never repeated in it."""
        scheme, _, rest = url.partition("://")
        if scheme != "s3":
            raise UsageError(f"{_redact(url)!r} is not the address of a store on S3.", _FORM)
        place, _, query = rest.partition("?")
        bucket, _, prefix = place.partition("/")
        if "@" in bucket or (":" in bucket and "@" in rest):  # a secret may have a slash in it
            raise UsageError(
                f"{_redact(url)!r} has credentials in it, where other users of the machine and logs would show them.",
                "Put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into a file named by LUDUS_S3_CREDENTIALS_FILE.",
            )
        if not bucket:
            raise UsageError(f"{_redact(url)!r} names no bucket.", _FORM)
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(f"{bucket!r} is not the name of a bucket (in {_redact(url)!r}).", _FORM)
        prefix = prefix.strip("/")  # as it is written: %20 is not a space here, as with the tools of S3 themselves
        if prefix:
            check_key(prefix)
        options = _parse_options(url, query)
        return cls(bucket, prefix, options.get("endpoint"), options.get("region"))

    @property
    def url(self) -> str:
        """As people write it; `parse` gives the same address again."""
        options = [("endpoint", self.endpoint), ("region", self.region)]
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options if value)
        path = f"/{self.prefix}" if self.prefix else ""
        return f"s3://{self.bucket}{path}{'?' if query else ''}{query}"

    def below(self, key: str) -> S3Url:
        """The same store, further down."""
        return replace(self, prefix=self.path(key))

    def path(self, key: str) -> str:
        """The name of an object in the bucket."""
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)


def default_endpoint(environment: Mapping[str, str]) -> str | None:
    """Of addresses that name none; None: Amazon's own. Raises UsageError."""
    named = next(filter(None, (environment.get(name) for name in _VARIABLES)), None)
    return None if named is None else check_endpoint(named)


def check_endpoint(endpoint: str) -> str:
    """Raises UsageError unless it is `http(s)://host[:port][/path]`."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        valid = False
    if not valid or "@" in endpoint or "?" in endpoint:
        raise UsageError(
            f"{_redact(endpoint)!r} is not the end point of an S3 server.",
            "Write http://host:port or https://host, and nothing more.",
        )
    return endpoint.rstrip("/")


def _parse_options(url: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"endpoint", "region"}):
        raise UsageError(f"{_redact(url)!r} has the unknown option {unknown[0]!r}.", "There are endpoint and region.")
    if "endpoint" in options:
        options["endpoint"] = check_endpoint(options["endpoint"])
    if urlsplit(options.get("endpoint", "")).path or "/" in options.get("region", ""):
        raise UsageError(
            f"{_redact(url)!r} has a path in its options, behind the end point or the region.",
            "Options come last: s3://bucket/run/best?endpoint=http://host:port. "
            "An end point that has a path of its own goes into AWS_ENDPOINT_URL_S3.",
        )
    return {name: value for name, value in options.items() if value}


def _redact(url: str) -> str:
    """Without what stands before an @, which may be a secret, and without options, which may be anything."""
    return re.sub(r"://.*@", "://***@", url).partition("?")[0]
