"""Credentials for S3, searched in this order:

1. the file named by LUDUS_S3_CREDENTIALS_FILE    (INI, as ~/.aws/credentials)
2. AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
3. AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN  (left to the client)
4. the profile AWS_PROFILE, else `default`, of AWS_SHARED_CREDENTIALS_FILE, else ~/.aws/credentials
5. the container's or the machine's role          (left to the client)
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ludus.errors import UsageError

OWN_FILE = "LUDUS_S3_CREDENTIALS_FILE"
REMEDY = f"Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file of them in {OWN_FILE}."
_LEFT_TO_CLIENT = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")


@dataclass(frozen=True)
class Credentials:
    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(repr=False, default=None)
    region: str | None = None
    file: Path | None = None
    """File they were read from, to be read again when it is renewed."""


def find_credentials(environment: Mapping[str, str]) -> Credentials | None:
    """Return the credentials; None = left to the S3 client (see `client_finds_credentials`). Raises UsageError."""
    profile = environment.get("AWS_PROFILE") or "default"
    if own := environment.get(OWN_FILE):
        found = _from_file(Path(own).expanduser(), profile)
        if found is None:
            raise UsageError(
                f"{own} (named by {OWN_FILE}) has no section [{profile}] with aws_access_key_id and aws_secret_access_key.",
                "Write it as ~/.aws/credentials is written, or name another section in AWS_PROFILE.",
            )
        return found
    key_id, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if bool(key_id) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key_id else "AWS_ACCESS_KEY_ID"
        raise UsageError(f"{missing} is not set, and the other one is.", "Set both, or neither.")
    if key_id and secret:
        return Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN") or None)
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environment.get("AWS_ROLE_ARN"):
        return None
    path = _find_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    return _from_file(path, profile) if path is not None else None


def find_region(environment: Mapping[str, str]) -> str | None:
    """Return AWS_REGION, AWS_DEFAULT_REGION, or the region of the profile in AWS_CONFIG_FILE or ~/.aws/config."""
    if named := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        return named
    profile = environment.get("AWS_PROFILE") or "default"
    path = _find_file(environment, "AWS_CONFIG_FILE", "config")
    if path is None or not path.is_file():
        return None
    parser = _parse_ini(path)
    section = "default" if profile == "default" else f"profile {profile}"
    return parser.get(section, "region", fallback=None) or None


def client_finds_credentials(environment: Mapping[str, str]) -> bool:
    """Whether the environment indicates that the S3 client has credentials. (A role of the machine is not indicated.)"""
    web = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environment.get("AWS_ROLE_ARN")
    return bool(web) or any(environment.get(name) for name in _LEFT_TO_CLIENT)


def _find_file(environment: Mapping[str, str], variable: str, name: str) -> Path | None:
    """Return the file that the variable names, else the one in the home directory if it exists."""
    if named := environment.get(variable):
        return Path(named).expanduser()
    home = environment.get("HOME") or environment.get("USERPROFILE")
    path = Path(home) / ".aws" / name if home else None
    return path if path is not None and path.is_file() else None


def _from_file(path: Path, profile: str) -> Credentials | None:
    parser = _parse_ini(path)
    if not parser.has_section(profile):
        return None
    section = parser[profile]
    key_id, secret = section.get("aws_access_key_id"), section.get("aws_secret_access_key")
    if not key_id or not secret:
        return None
    return Credentials(key_id, secret, section.get("aws_session_token") or None, section.get("region") or None, path)


def _parse_ini(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The credentials file {path} cannot be read: {error.strerror}.") from error
    except (configparser.Error, UnicodeDecodeError):
        # the parser's message would contain a line of the file, which may be the secret
        raise UsageError(f"The credentials file {path} is not an INI file.", "It begins with a line [default].") from None
    return parser
