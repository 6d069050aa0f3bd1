"""Health check of a container: exit code 0 if its `ludus` command works, else 1 with the reason.

`serve` and `gamecore serve` must answer GET /health on their port. Any other command must run and not be stopped; it ends its container
when it exits. Standard library only, because it starts every 30 seconds.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

SERVERS = {("serve",): 8000, ("gamecore", "serve"): 23432}
"""Command → its default port."""
_TIMEOUT_S = 5.0
_STOPPED = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie", "X": "dead"}


def main(proc: Path = Path("/proc")) -> str:
    """Return what is wrong; empty: healthy."""
    found = find_command(proc)
    if found is None:
        return "no ludus command runs in this container"
    pid, words = found
    state = process_state(proc / pid)
    if state in _STOPPED:
        return f"process {pid} (ludus {' '.join(words[:2])}) is {_STOPPED[state]}"
    for command, port in SERVERS.items():
        if tuple(words[: len(command)]) == command:
            return ask(int(option(words, "--port") or port), tls=option(words, "--tls-cert") is not None)
    return ""


def find_command(proc: Path) -> tuple[str, list[str]] | None:
    """Process id and words after `ludus` of the oldest process that runs it: the main process of the container."""
    pids = sorted((path.name for path in proc.iterdir() if path.name.isdigit()), key=int)
    for pid in pids:
        try:
            words = (proc / pid / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:  # it has ended meanwhile
            continue
        for index, word in enumerate(words[:3]):  # [python] ludus …; tini's own command line has it later or behind `--`
            if Path(word).name == "ludus" and "--" not in words[:index]:
                return pid, words[index + 1 :]
    return None


def process_state(process: Path) -> str:
    try:
        return (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return "X"


def option(words: Sequence[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def ask(port: int, *, tls: bool) -> str:
    """GET /health of this container. Its certificate names another host, so it is not verified."""
    context = ssl._create_unverified_context() if tls else None  # noqa: S323 # loopback
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=context)
        if tls
        else http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    )
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"GET /health on port {port}: {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"GET /health on port {port} answers {status}"


if __name__ == "__main__":
    wrong = main()
    sys.stdout.write(f"{wrong or 'healthy'}\n")
    sys.exit(bool(wrong))
