"""Roles that are started by hand, in a directory of their own: commands, what they left to read, and what still runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ludus.runtime.surroundings import PORTS, is_free

LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")
TRAINING = (
    *("CartPole-v1", "--run", "PPO", "--num-envs", "2", "--seed", "1"),
    *("--set", "config.train_batch_size=256", "--set", "config.rollout_fragment_length=32", "--set", "config.num_epochs=1"),
    *("--set", "config.evaluation_interval=0"),
)
_FOREIGN = ("RAY_", "LUDUS_", "ip_head", "ACTOR_NUM", "CPU_NUM", "NO_MODEL_POOL", "NO_ACTOR_MODEL_POOL", "NET_CARD_NAME", "LOG_DIR")


def free_port() -> int:
    """The first of three that nobody has; below what outgoing connections are given."""
    start = 20_000 + os.getpid() % 3000 * 3
    return next(port for port in range(start, 32_000, PORTS) if all(is_free(port + n) for n in range(PORTS)))


class Machine:
    """This one, as the commands see it: their state and logs are below `base`."""

    def __init__(self, base: Path, nodes: str = "127.0.0.1 root 36000 1\n") -> None:
        self.base, self.port = base, free_port()
        self.state, self.logs, self.list = base / "state", base / "logs", base / "learner.iplist"
        self.list.write_text(nodes)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.env |= {"LUDUS_STATE_DIR": str(self.state), "COLUMNS": "300"}

    def ludus(self, *words: str | Path, env: Mapping[str, str] | None = None, code: int | None = 0, within_s: float = 120.0) -> str:
        done = subprocess.run(
            [*LUDUS, *map(str, words)], cwd=self.base, env={**self.env, **(env or {})}, timeout=within_s, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, f"ludus {words} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start(self, part: str, *words: str, env: Mapping[str, str] | None = None) -> str:
        return self.ludus(part, "start", "--iplist", self.list, "--port", str(self.port), *words, env=env)

    def status(self, part: str) -> dict[str, Any]:
        found = json.loads(self.ludus(part, "status", "--json", code=None).splitlines()[-1])
        return dict(found[-1]) if found else {}

    def log(self, name: str) -> str:
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], object], within_s: float) -> None:
        """Raises AssertionError, with all that was said, when it does not happen."""
        deadline = time.monotonic() + within_s
        while not what():
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.logs.rglob("*.log")))
                raise AssertionError(f"not within {within_s:g} s\n{said}")
            time.sleep(0.2)

    def left(self) -> list[str]:
        """Processes of these roles that still run, by the state directory in their environment."""
        mark = f"LUDUS_STATE_DIR={self.state}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it has just ended, or is another's
                continue
        return found
