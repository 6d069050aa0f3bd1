"""The file with the secret of a job or of a Ray cluster: is it there, and for us alone? Its contents are never looked at by anybody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.cluster.doctor.finding import Finding, failed, ok, skipped
from ludus.runtime.surroundings import TOKEN

RAY_PATH, RAY_TOKEN, RAY_MODE = "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
_LEAST = 16


@dataclass(frozen=True)
class Token:
    """`named`: by which variable; empty for the file in the home directory. `kind`: what is there: file, none, or something else."""

    named: str
    path: str
    kind: str
    mode: int = 0o600
    ours: bool = True
    length: int = 64
    why: str = ""


def look_tokens(environ: Mapping[str, str]) -> list[Token]:
    found = [_look(name, Path(environ[name])) for name in (TOKEN, RAY_PATH) if environ.get(name)]
    usual = Path(environ.get("HOME") or "/") / ".ray" / "auth_token"
    if not environ.get(RAY_PATH) and not environ.get(RAY_TOKEN) and usual.exists():
        found.append(_look("", usual))
    return found


def _look(named: str, path: Path) -> Token:
    try:
        about = path.stat()
    except OSError as error:
        return Token(named, str(path), "none", why=error.strerror or str(error))
    if not stat.S_ISREG(about.st_mode):
        return Token(named, str(path), "other")
    try:
        length = len(path.read_bytes().strip())
    except OSError as error:
        return Token(
            named, str(path), "file", about.st_mode & 0o7777, about.st_uid == os.getuid(), why=error.strerror or str(error)
        )
    return Token(named, str(path), "file", about.st_mode & 0o7777, about.st_uid == os.getuid(), length)


def judge_tokens(tokens: list[Token], environ: Mapping[str, str]) -> list[Finding]:
    mode = environ.get(RAY_MODE, "")
    if not tokens:
        if mode == "token" and not environ.get(RAY_TOKEN):
            return [failed("token", f"{RAY_MODE}=token, and there is none", f"Name its file in {RAY_PATH}, or unset {RAY_MODE}.")]
        return [skipped("token", "none is in use; every job makes its own")]
    found = [judge_token(token) for token in tokens]
    if mode == "token":
        return found
    # A file that Ray has made by itself, and that nothing of ours uses: every job has its own.
    return [
        replace(finding, status="warning") if not token.named and finding.status == "failed" else finding
        for token, finding in zip(tokens, found, strict=True)
    ]


def judge_token(token: Token) -> Finding:
    where = f"{token.path}{f' ({token.named})' if token.named else ''}"
    if token.kind == "none":
        return failed(
            "token", f"{where} is not there: {token.why}", f"Copy it from where the cluster was started, or unset {token.named}."
        )
    if token.kind != "file":
        return failed("token", f"{where} is not a file", f"Name a file in {token.named or RAY_PATH}.")
    if not token.ours:
        return failed(
            "token", f"{where} belongs to somebody else", f"Make one of your own, and name it in {token.named or RAY_PATH}."
        )
    if token.mode & 0o077:
        return failed(
            "token",
            f"{where} can be read by others (mode {token.mode:04o})",
            f"chmod 600 {token.path}; and make a new one: it may be known.",
        )
    if token.why:
        return failed("token", f"{where} cannot be read: {token.why}", f"chmod 600 {token.path}")
    if token.length < _LEAST:
        return failed("token", f"{where} holds {token.length} characters", "Make one anew: it is cut off, or can be guessed.")
    if not token.named:  # Ray makes it by itself; ours are never mistaken for it, for we always say which one is meant
        return ok(
            "token",
            f"{where}, private; for `ray start` and ray.init set {RAY_MODE} on all machines, or only some of them take it",
        )
    return ok("token", f"{where}, private")
