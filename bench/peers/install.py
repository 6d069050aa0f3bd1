"""Create one virtual environment per peer: `python -m bench.peers.install [NAME ...]`.

Idempotent: an environment whose recorded requirements match the table is left alone. A peer that does not
install is reported, its reason kept in `<venvs>/<peer>.failed`, and the next one is tried.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.peers import GAME_CLIENTS, PEERS, TORCH, Peer, venv_root

STAMP = "ludus-bench.json"
STEP_TIMEOUT_S = 1800.0
TAIL_LINES = 12


class InstallError(Exception):
    """A step of one peer's installation failed; the message is the end of its output."""


def is_installed(peer: Peer) -> bool:
    stamp = peer.venv / STAMP
    if not (peer.python.exists() and stamp.exists()):
        return False
    recorded: list[str] = json.loads(stamp.read_text())["requirements"]
    return recorded == _asked(peer)


def _asked(peer: Peer) -> list[str]:
    return [*peer.requirements, *peer.pinned, *peer.source_builds]


def install(peer: Peer) -> None:
    """Build `peer.venv` from scratch. Raises InstallError."""
    shutil.rmtree(peer.venv, ignore_errors=True)
    peer.failure_file.unlink(missing_ok=True)
    _run([_interpreter(peer), "-m", "venv", str(peer.venv)])
    pip = [str(peer.python), "-m", "pip", "install", "--quiet", "--no-input"]
    if peer.uses_torch:
        _run([*pip, TORCH])
    _run([*pip, *peer.requirements])
    if peer.pinned:
        _run([*pip, "--no-deps", "--ignore-requires-python", *peer.pinned])
    if peer.source_builds:
        _run([*pip, "--no-build-isolation", *peer.source_builds])
    frozen = _run([str(peer.python), "-m", "pip", "freeze"]).splitlines()
    stamp = {"requirements": _asked(peer), "frozen": [line for line in frozen if "==" in line]}
    (peer.venv / STAMP).write_text(json.dumps(stamp, indent=1))


def _interpreter(peer: Peer) -> str:
    """The program that the peer wants, from PATH or pyenv; otherwise the one that runs this."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/*/bin/{peer.interpreter}")) if peer.interpreter else []
    for program in (shutil.which(peer.interpreter) if peer.interpreter else None, *map(str, pyenv)):
        # The commands of pyenv exist for versions that are not in use, too, and fail.
        if (
            program
            and subprocess.run([program, "-c", ""], capture_output=True, timeout=STEP_TIMEOUT_S, check=False).returncode == 0
        ):
            return program
    return sys.executable


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"no end after {STEP_TIMEOUT_S:.0f} s: {' '.join(command)}") from error
    if done.returncode != 0:
        raise InstallError(_tail(done.stderr or done.stdout))
    return done.stdout


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-TAIL_LINES:])


def _headline(reason: str) -> str:
    """The one line of pip's output that says what went wrong."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower()]
    return (errors or lines or ["no output"])[0][:160]


def ensure(peer: Peer) -> str:
    """Install if needed and say in one line what happened. Raises InstallError."""
    if is_installed(peer):
        return "ready"
    started = time.monotonic()
    try:
        install(peer)
    except InstallError as error:
        shutil.rmtree(peer.venv, ignore_errors=True)
        peer.failure_file.write_text(f"{error}\n")
        raise
    return f"installed in {time.monotonic() - started:.0f} s"


def _prepare_root(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / ".gitignore").write_text("*\n")


def main(argv: Sequence[str] | None = None) -> int:
    known = PEERS | GAME_CLIENTS
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; default: all")
    names = parser.parse_args(argv).names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown peer {', '.join(unknown)}; choose from {', '.join(known)}")
    _prepare_root(venv_root())
    failed = []
    for name in names:
        try:
            print(f"{name}: {ensure(known[name])}", flush=True)
        except InstallError as error:
            failed.append(name)
            print(f"{name}: failed: {_headline(str(error))}", flush=True)
    if failed:
        print(f"not installed: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
