"""The file with the secret of a job, of a run or of a Ray cluster: is it there, for us alone, and the same on all machines?

Its contents never leave the machine: those of several are compared by what an HMAC makes of them, with a key for this one look.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.launch.doctor.finding import Finding, failed, ok, skipped
from ludus.launch.roles import TOKEN_FILE, token_path
from ludus.process.job_env import TOKEN

RAY_PATH, RAY_TOKEN, RAY_MODE = "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
_LEAST, _MOST = 16, 4096


@dataclass(frozen=True)
class Token:
    """`named`: by which variable; empty for a file in its usual place. `kind`: what is there: file, none, or something else.

    `role`: of a run whose learner and actors are started by hand. `plain`: nothing but letters and digits is in it.
    """

    named: str
    path: str
    kind: str
    mode: int = 0o600
    ours: bool = True
    length: int = 64
    why: str = ""
    role: bool = False
    plain: bool = True

    @property
    def rays(self) -> bool:
        """Made by Ray itself, in the home directory: nothing of ours uses it."""
        return not self.named and not self.role


def look_tokens(environ: Mapping[str, str]) -> list[Token]:
    found = [_look(name, Path(environ[name])) for name in (TOKEN, RAY_PATH) if environ.get(name)]
    role, named = token_path(None, environ), TOKEN_FILE if environ.get(TOKEN_FILE) else ""
    if named or role.exists():
        found.append(replace(_look(named, role), role=True))
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
        with open(path, "rb") as file:
            text = file.read(_MOST + 1).strip()
    except OSError as error:
        return Token(
            named, str(path), "file", about.st_mode & 0o7777, about.st_uid == os.getuid(), why=error.strerror or str(error)
        )
    return Token(named, str(path), "file", about.st_mode & 0o7777, about.st_uid == os.getuid(), len(text), plain=text.isalnum())


def fingerprint(environ: Mapping[str, str], key: str) -> str:
    """Of the token by which roles know each other; the same for the same token and key, and nothing can be learnt from it. Empty: no token."""
    try:
        with open(token_path(None, environ), "rb") as file:
            text = file.read(_MOST).strip()
    except OSError:
        return ""
    return hmac.new(key.encode(), text, "sha256").hexdigest() if text else ""


def judge_same(told: Mapping[str, str]) -> Finding:
    """`told`: the fingerprint of each machine of a list; with another token, or none, it could not join a run of theirs."""
    check, different = "token on all nodes", list(dict.fromkeys(told.values()))
    if not any(told.values()):
        return skipped(
            check,
            "none has one yet; `ludus learner start` makes one on the first machine, and says how it is copied",
            "For `ludus submit` there is nothing to do: every job brings its own.",
        )
    if len(different) == 1:
        return ok(check, f"the same on {len(told)} of {len(told)}")
    groups = (([node for node in told if told[node] == value], value) for value in different)
    said = "; ".join(f"{'one' if value else 'none'}: {', '.join(nodes)}" for nodes, value in groups)
    return failed(
        check, f"they differ ({said})", "Copy the file of the first machine to the others, with scp -p (docs/roles.md)."
    )


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
        replace(finding, status="warning") if token.rays and finding.status == "failed" else finding
        for token, finding in zip(tokens, found, strict=True)
    ]


def judge_token(token: Token) -> Finding:
    where = f"{token.path}{f' ({token.named})' if token.named else ''}"
    variable = token.named or (TOKEN_FILE if token.role else RAY_PATH)
    if token.kind == "none" and token.role:
        return failed(
            "token",
            f"{where} is not there: {token.why}",
            f"`ludus learner start` makes it, on the first machine; copy it from there, or unset {variable}.",
        )
    if token.kind == "none":
        return failed(
            "token", f"{where} is not there: {token.why}", f"Copy it from where the cluster was started, or unset {token.named}."
        )
    if token.kind != "file":
        return failed("token", f"{where} is not a file", f"Name a file in {variable}.")
    if not token.ours:
        return failed("token", f"{where} belongs to another user", f"Make one of your own, and name it in {variable}.")
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
    if token.role and (token.length > _MOST or not token.plain):
        return failed("token", f"{where} holds no token", "Copy it anew, from the first machine of the run.")
    if token.rays:  # Ray makes it by itself; ours are never mistaken for it, for we always say which one is meant
        return ok(
            "token",
            f"{where}, private; for `ray start` and ray.init set {RAY_MODE} on all machines, or only some of them take it",
        )
    return ok("token", f"{where}, private")
