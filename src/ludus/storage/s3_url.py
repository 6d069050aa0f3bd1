"""URLs of stores on S3: `s3://bucket/prefix?endpoint=http://host:port&region=name`."""

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
    """None = from the environment, else Amazon S3."""
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Url:
        """Raises UsageError, whose message never contains possible secrets."""
        scheme, _, rest = url.partition("://")
        if scheme != "s3":
            raise UsageError(f"{_redact(url)!r} is not the URL of a store on S3.", _FORM)
        path, _, query = rest.partition("?")
        bucket, _, prefix = path.partition("/")
        if "@" in bucket or (":" in bucket and "@" in rest):  # a secret may contain a slash
            raise UsageError(
                f"{_redact(url)!r} contains credentials, which process lists and logs would show.",
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file in LUDUS_S3_CREDENTIALS_FILE.",
            )
        if not bucket:
            raise UsageError(f"{_redact(url)!r} names no bucket.", _FORM)
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(f"{bucket!r} is not the name of a bucket (in {_redact(url)!r}).", _FORM)
        prefix = prefix.strip("/")  # not URL-decoded: %20 is not a space, as in the tools of AWS
        if prefix:
            check_key(prefix)
        options = _parse_options(url, query)
        return cls(bucket, prefix, options.get("endpoint"), options.get("region"))

    @property
    def url(self) -> str:
        """The URL as a string, which `parse` accepts."""
        options = [("endpoint", self.endpoint), ("region", self.region)]
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options if value)
        path = f"/{self.prefix}" if self.prefix else ""
        return f"s3://{self.bucket}{path}{'?' if query else ''}{query}"

    def below(self, key: str) -> S3Url:
        """Return the URL of a key as a prefix of the same bucket."""
        return replace(self, prefix=self.path(key))

    def path(self, key: str) -> str:
        """Return the name of the object of a key in the bucket."""
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)


def default_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint from the environment; None = Amazon S3. Raises UsageError."""
    endpoint = next(filter(None, (environment.get(name) for name in _VARIABLES)), None)
    return None if endpoint is None else check_endpoint(endpoint)


def check_endpoint(endpoint: str) -> str:
    """Raises UsageError unless it is `http(s)://host[:port][/path]`."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is not a number
        valid = False
    if not valid or "@" in endpoint or "?" in endpoint:
        raise UsageError(
            f"{_redact(endpoint)!r} is not the endpoint of an S3 server.",
            "Write http://host:port or https://host.",
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
            f"{_redact(url)!r} has a path in its options, after the endpoint or the region.",
            "Options come last: s3://bucket/run/best?endpoint=http://host:port. "
            "Set an endpoint with a path in AWS_ENDPOINT_URL_S3.",
        )
    return {name: value for name, value in options.items() if value}


def _redact(url: str) -> str:
    """Remove everything before an @, which may be a secret, and the options."""
    return re.sub(r"://.*@", "://***@", url).partition("?")[0]
