"""Run one peer's script in its own environment and process group, and read back its one JSON line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers.peers import PEERS, Peer

POLL_S = 0.05
GRACE_S = 10.0
TAIL_CHARS = 2000
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_peer(
    peer: str,
    task: str,
    mode: str,
    seed: int,
    *,
    max_seconds: float,
    max_frames: int,
    target: float,
    threads: int,
    timeout_s: float,
    workers: int = 0,
) -> dict[str, Any]:
    """The script's result plus `wall_s`, or `{"error": ...}` if it crashed, hung or is not installed.

    Blocks for at most `timeout_s` plus a short grace, and ends the script's process group in any case.
    Raises KeyError for an unknown peer.
    """
    entry = PEERS[peer]
    identity = {"peer": peer, "task": task, "mode": mode, "seed": seed}
    if not entry.python.exists() or entry.failure_file.exists():
        return {**identity, "error": _not_installed(entry)}
    options = {
        "--task": task,
        "--mode": mode,
        "--seed": seed,
        "--max-seconds": max_seconds,
        "--max-frames": max_frames,
        "--target": target,
        "--threads": threads,
        "--workers": workers,
    }
    command = [str(entry.python), str(entry.script(mode))]
    command += [str(word) for option in options.items() for word in option]
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as directory:
        return {**identity, **_run(command, threads, timeout_s, Path(directory))}


def _run(command: list[str], threads: int, timeout_s: float, directory: Path) -> dict[str, Any]:
    """Files instead of pipes: a daemon that a library leaves behind would keep a pipe open."""
    started = time.monotonic()
    out, err = directory / "stdout", directory / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            cwd=directory,
            env=_environment(threads, directory),
            start_new_session=True,
        )
        try:
            ended = _await_exit(process.pid, timeout_s)
            wall_s = round(time.monotonic() - started, 3)
        finally:
            _end_group(process)
    if not ended:
        return {"wall_s": wall_s, "error": f"no end after {timeout_s:.0f} s\n{_tail(err)}"}
    lines = out.read_text(errors="replace").splitlines()
    if process.returncode != 0 or not lines:
        return {"wall_s": wall_s, "error": f"exit code {process.returncode}\n{_tail(err)}"}
    return {**json.loads(lines[-1]), "wall_s": wall_s}


def _environment(threads: int, directory: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**environment, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "TMPDIR": str(directory)}


def _await_exit(pid: int, timeout_s: float) -> bool:
    """Whether the process ended in time. It stays unreaped, so that its group id cannot be given away yet."""
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the script to end, so that it takes its own helpers along, then kill what is left of its group.

    By id, not `process.terminate`, which would reap it first.
    """
    os.kill(process.pid, signal.SIGTERM)
    _await_exit(process.pid, GRACE_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=GRACE_S)


def _not_installed(peer: Peer) -> str:
    reason = peer.failure_file.read_text() if peer.failure_file.exists() else "no environment yet"
    return f"not installed, run `python -m bench.peers.install {peer.name}`: {reason.strip()}"


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL_CHARS:]
