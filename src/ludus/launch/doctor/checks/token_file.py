"""Checks token files of jobs, runs and Ray clusters: existence, permissions, and equality on all machines.

Tokens never leave their machine: they are compared by an HMAC with a key that is random for each run of the doctor.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.launch.doctor.finding import DoctorFinding, failure, ok, skip
from ludus.launch.roles import TOKEN_FILE, token_path
from ludus.process.job_env import TOKEN

RAY_PATH, RAY_TOKEN, RAY_MODE = "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
_MIN_CHARS, _MAX_CHARS = 16, 4096


@dataclass(frozen=True)
class TokenFile:
    """`named`: the variable with its path; "" for the default path. `kind`: file, none or other.

    `role`: token of `ludus learner` and `ludus actor`. `plain`: it has only letters and digits.
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
    def is_rays(self) -> bool:
        """Created by Ray itself in the home directory; Ludus does not use it."""
        return not self.named and not self.role


def inspect_tokens(environ: Mapping[str, str]) -> list[TokenFile]:
    found = [_inspect(name, Path(environ[name])) for name in (TOKEN, RAY_PATH) if environ.get(name)]
    role, named = token_path(None, environ), TOKEN_FILE if environ.get(TOKEN_FILE) else ""
    if named or role.exists():
        found.append(replace(_inspect(named, role), role=True))
    usual = Path(environ.get("HOME") or "/") / ".ray" / "auth_token"
    if not environ.get(RAY_PATH) and not environ.get(RAY_TOKEN) and usual.exists():
        found.append(_inspect("", usual))
    return found


def _inspect(named: str, path: Path) -> TokenFile:
    try:
        about = path.stat()
    except OSError as error:
        return TokenFile(named, str(path), "none", why=error.strerror or str(error))
    if not stat.S_ISREG(about.st_mode):
        return TokenFile(named, str(path), "other")
    token = TokenFile(named, str(path), "file", about.st_mode & 0o7777, about.st_uid == os.getuid())
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_CHARS + 1).strip()
    except OSError as error:
        return replace(token, why=error.strerror or str(error))
    return replace(token, length=len(text), plain=text.isalnum())


def fingerprint(environ: Mapping[str, str], key: str) -> str:
    """Return the HMAC of the token of learners and actors; "" if there is none."""
    try:
        with open(token_path(None, environ), "rb") as file:
            text = file.read(_MAX_CHARS).strip()
    except OSError:
        return ""
    return hmac.new(key.encode(), text, "sha256").hexdigest() if text else ""


def check_equal_tokens(fingerprints: Mapping[str, str]) -> DoctorFinding:
    """`fingerprints`: by machine. A machine with another token or none cannot join the run."""
    check, different = "token on all nodes", list(dict.fromkeys(fingerprints.values()))
    if not any(fingerprints.values()):
        text = "none yet; `ludus learner start` creates one on the first machine, and prints how to copy it"
        return skip(check, text, "`ludus submit` needs none: every job has its own.")
    if len(different) == 1:
        return ok(check, f"the same on {len(fingerprints)} of {len(fingerprints)}")
    groups = (([node for node in fingerprints if fingerprints[node] == value], value) for value in different)
    text = "; ".join(f"{'one' if value else 'none'}: {', '.join(nodes)}" for nodes, value in groups)
    remedy = "Copy the file of the first machine to the others, with scp -p (docs/roles.md)."
    return failure(check, f"they differ ({text})", remedy)


def check_tokens(tokens: list[TokenFile], environ: Mapping[str, str]) -> list[DoctorFinding]:
    mode = environ.get(RAY_MODE, "")
    if not tokens:
        if mode == "token" and not environ.get(RAY_TOKEN):
            return [
                failure("token", f"{RAY_MODE}=token, and there is none", f"Name its file in {RAY_PATH}, or unset {RAY_MODE}.")
            ]
        return [skip("token", "none is in use; every job creates its own")]
    found = []
    for token in tokens:
        finding = check_token(token)
        if token.is_rays and finding.status == "failed" and mode != "token":  # Ludus does not use it
            finding = replace(finding, status="warning")
        found.append(finding)
    return found


def check_token(token: TokenFile) -> DoctorFinding:
    where = f"{token.path}{f' ({token.named})' if token.named else ''}"
    variable = token.named or (TOKEN_FILE if token.role else RAY_PATH)
    if token.kind == "none":
        origin = "`ludus learner start` creates it on the first machine: copy it" if token.role else "Copy it"
        remedy = f"{origin} from where the cluster was started, or unset {variable}."
        return failure("token", f"{where} cannot be found: {token.why}", remedy)
    if token.kind != "file":
        return failure("token", f"{where} is not a file", f"Name a file in {variable}.")
    if not token.ours:
        return failure("token", f"{where} belongs to another user", f"Create your own, and name it in {variable}.")
    if token.mode & 0o077:
        remedy = f"chmod 600 {token.path}; and create a new one: it may be known."
        return failure("token", f"{where} can be read by other users (mode {token.mode:04o})", remedy)
    if token.why:
        return failure("token", f"{where} cannot be read: {token.why}", f"chmod 600 {token.path}")
    if token.length < _MIN_CHARS:
        return failure("token", f"{where} holds {token.length} characters", "Create a new one: it is cut off, or can be guessed.")
    if token.role and (token.length > _MAX_CHARS or not token.plain):
        return failure("token", f"{where} does not contain a token", "Copy it again from the first machine of the run.")
    if token.is_rays:  # Ludus always names its token, so that Ray does not use this one
        advice = f"for `ray start` and ray.init set {RAY_MODE} on all machines, or only some of them use it"
        return ok("token", f"{where}, private; {advice}")
    return ok("token", f"{where}, private")
