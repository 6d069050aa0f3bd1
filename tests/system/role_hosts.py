"""Roles that are started by hand, in a directory of their own: commands, what they left to read, and what still runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.launch.local import LocalOrchestrator
from ludus.process.job_env import PORTS, is_port_free
from tests.system.hosts import SHARED, Hosts, up
from tests.waiting import wait_until

LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")
TRAINING = (
    *("CartPole-v1", "--run", "PPO", "--num-envs", "2", "--seed", "1"),
    *("--set", "config.train_batch_size=256", "--set", "config.rollout_fragment_length=32", "--set", "config.num_epochs=1"),
    *("--set", "config.evaluation_interval=0"),
)
_FOREIGN = (
    "RAY_",
    "LUDUS_",
    "ip_head",
    "ACTOR_NUM",
    "CPU_NUM",
    "NO_MODEL_POOL",
    "NO_ACTOR_MODEL_POOL",
    "NET_CARD_NAME",
    "LOG_DIR",
)


def free_port() -> int:
    """The first of three that nobody has; below what outgoing connections are given."""
    start = 20_000 + os.getpid() % 3000 * 3
    return next(port for port in range(start, 32_000, PORTS) if all(is_port_free(port + n) for n in range(PORTS)))


class Machine:
    """This one, as the commands see it: their state and logs are below `base`."""

    def __init__(self, base: Path, nodes: str = "127.0.0.1 root 36000 1\n") -> None:
        self.base, self.port = base, free_port()
        self.state, self.logs, self.list = base / "state", base / "logs", base / "learner.iplist"
        self.list.write_text(nodes)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.env |= {"LUDUS_STATE_DIR": str(self.state), "COLUMNS": "300"}

    def ludus(
        self, *words: str | Path, env: Mapping[str, str] | None = None, code: int | None = 0, within_s: float = 120.0
    ) -> str:
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

    def state_of(self, part: str) -> str:
        """Without the command, which takes a moment: of its newest job."""
        return next((job.state for job in reversed(LocalOrchestrator(self.state).list()) if job.name == part), "none")

    def log(self, name: str) -> str:
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], object], within_s: float) -> None:
        """Raises AssertionError, with all that was said, when it does not happen."""

        def said() -> str:
            return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.logs.rglob("*.log")))

        wait_until(what, within_s, what=said, poll_s=0.2)

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


class RoleHosts:
    """Hosts of the rig on which roles are started by hand; each has a directory of its own in what they share."""

    def __init__(self, hosts: Hosts, base: Path, nodes: str) -> None:
        self.hosts, self.base, self.nodes = hosts, base, nodes
        self.env = {name: value for name, value in os.environ.items() if not name.startswith((*_FOREIGN, "TMPDIR"))}
        for host in range(len(hosts)):
            self.place(host).mkdir()
            (self.place(host) / "learner.iplist").write_text(nodes)

    def place(self, host: int) -> Path:
        """As seen from outside."""
        return self.base / f"h{host}"

    def ludus(self, host: int, *words: str, env: Mapping[str, str] | None = None, code: int | None = 0) -> str:
        there = SHARED / f"h{host}"
        told = {"HOME": str(there), "LUDUS_STATE_DIR": str(there / "state"), "COLUMNS": "300"}
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(there), *LUDUS, *words]  # nsenter would look for it outside
        process = self.hosts.run(host, inside, env={**self.env, **told, **(env or {})}, output=subprocess.PIPE)
        said = process.communicate(timeout=180)[0].decode()
        assert code is None or process.returncode == code, f"ludus {words} on h{host} ended with {process.returncode}:\n{said}"
        return said

    def start(self, host: int, part: str, *words: str, env: Mapping[str, str] | None = None) -> str:
        return self.ludus(host, part, "start", "--iplist", "learner.iplist", *words, env=env)

    def share_token(self) -> None:
        """As scp would."""
        token = (self.place(0) / "state" / "token").read_text()
        for host in range(1, len(self.hosts)):
            (self.place(host) / "state").mkdir(exist_ok=True)
            path = self.place(host) / "state" / "token"
            path.write_text(token)
            path.chmod(0o600)

    def status(self, host: int, part: str) -> dict[str, Any]:
        found = json.loads(self.ludus(host, part, "status", "--json", code=None).splitlines()[-1])
        return dict(found[-1]) if found else {}

    def at_work(self) -> dict[str, int]:
        """Machine → workers of the learner that are ready there."""
        return {node["name"]: node["ready"] for node in self.status(0, "learner").get("nodes", [])}

    def log(self, host: int, name: str) -> str:
        path = self.place(host) / "logs" / name
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], object], within_s: float) -> None:
        def said() -> str:
            logs = sorted(self.base.glob("h*/logs/*/*.log"))
            return "\n".join(f"--- {path.relative_to(self.base)}\n{path.read_text()[-1500:]}" for path in logs)

        wait_until(what, within_s, what=said, poll_s=0.5)

    def left(self, host: int) -> list[str]:
        """What still runs there and is ours."""
        ours = ("python", "ray", "ludus", "gcs", "sampler")
        return [
            process.info["name"] for process in self.hosts.processes(host) if any(name in process.info["name"] for name in ours)
        ]


@contextlib.contextmanager
def role_hosts(n: int, base: Path, nodes: Callable[[Hosts], str]) -> Iterator[RoleHosts]:
    with up(n, base) as hosts:
        yield RoleHosts(hosts, base, nodes(hosts))
