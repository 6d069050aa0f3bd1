"""Who is and was part of a Ray, and since when: `python -m ludus.ray_cluster.membership HOST:PORT TOKEN_FILE` says it as one line of JSON.

In a process of its own: what Ray has once read of its settings it does not read again, and it may end the process it is in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.errors import Unreachable

ASK_S = 10.0
WITHIN_S = 40.0
"""A machine that is busy takes a while to import Ray."""


@dataclass(frozen=True)
class Resident:
    """A machine, as the head sees it. `since`, `until`: seconds since 1970; it is still there while `until` is 0. `why` it is not."""

    address: str
    host: str
    cores: int
    head: bool
    since: float
    until: float = 0.0
    why: str = ""

    @property
    def alive(self) -> bool:
        return not self.until


def words(address: str, token_file: Path | str) -> tuple[str, ...]:
    """What is said to the module, here or on another machine."""
    return (address, str(token_file))


def take(address: str, token_file: Path, within_s: float = WITHIN_S) -> list[Resident]:
    """Oldest first. Raises Unreachable."""
    command = [sys.executable, "-P", "-m", __name__, *words(address, token_file)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, check=False)  # noqa: S603 - this interpreter, and us
    except subprocess.TimeoutExpired:
        raise Unreachable(f"The head of the Ray at {address} did not answer within {within_s:g} s.") from None
    return read(done.stdout.decode(errors="replace"), address)


def read(said: str, address: str) -> list[Resident]:
    """What the process said. Raises Unreachable."""
    for line in reversed(said.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
        except ValueError:  # cut off
            break
        if "refused" in found:
            raise Unreachable(f"The head of the Ray at {address} does not answer: {found['refused']}")
        return sorted((Resident(**each) for each in found["residents"]), key=lambda each: (each.since, each.address))
    raise Unreachable(f"The head of the Ray at {address} does not answer.")


def main(said: Sequence[str]) -> None:
    address, token_file = said
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file, "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_AUTH_TOKEN", None)
    answer: dict[str, Any]
    try:
        import ray

        client = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        answer = {"residents": [asdict(_resident(info)) for info in client.get_all_node_info(timeout=ASK_S).values()]}
    except Exception as error:  # whatever it is, it is the answer
        answer = {"refused": f"{error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads have nothing to tidy up, and may wait for a head that is gone


def _resident(info: Any) -> Resident:
    cores = int(dict(info.resources_total).get("CPU", 0))
    gone = 0.0 if info.state == 0 else info.end_time_ms / 1000 or 1.0
    why = str(info.death_info.reason_message) if gone else ""
    return Resident(
        info.node_manager_address, info.node_manager_hostname, cores, info.is_head_node, info.start_time_ms / 1000, gone, why
    )


if __name__ == "__main__":
    main(sys.argv[1:])
