"""Ray over the hosts of the rig, and a training that uses it: started, looked at, ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.ray_cluster.cluster import HEALTH
from tests.system import hosts as rig
from tests.system.hosts import SHARED, Hosts
from tests.waiting import wait_until

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
PORT = 6379
RUN = "run"


class RayHosts:
    """Every host is a node of one Ray cluster whose head is host 0; they share a directory, which is `base` outside."""

    def __init__(self, hosts: Hosts, base: Path) -> None:
        self.hosts, self.base = hosts, base
        self.address = f"{hosts.address(0)}:{PORT}"
        token = base / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        foreign = ("RAY_", "LUDUS_", "ip_head", "TMPDIR")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.env |= {"RAY_AUTH_TOKEN_PATH": str(SHARED / "token"), "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(SHARED)}
        self._ray_env = self.env | {"RAY_AUTH_MODE": "token"} | {f"RAY_{key}": str(value) for key, value in HEALTH.items()}

    def start_ray(self, host: int, cores: int = 1) -> subprocess.Popen[bytes]:
        """As somebody would by hand: docs/cluster.md."""
        place = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
        sizes = [f"--num-cpus={cores}", f"--object-store-memory={80 << 20}"]
        with open(self.base / f"ray-{host}.log", "ab") as log:
            return self.hosts.run(
                host,
                [str(BIN / "ray"), "start", *place, "--block", f"--node-ip-address={self.hosts.address(host)}", *sizes],
                env=self._ray_env,
                cwd=ROOT,
                output=log,
            )

    def formed(self, hosts: int) -> None:
        """Wait until all of them are part of the cluster."""
        logs = [self.base / f"ray-{host}.log" for host in range(hosts)]
        self.until(lambda: all("Ray runtime started" in log.read_text() for log in logs), 60)

    def train(self, host: int, *options: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`ludus train` there; what it says is in train.log."""
        with open(self.base / "train.log", "ab") as log:
            argv = [str(BIN / "ludus"), "train", *options, "--address", self.address]
            return self.hosts.run(host, argv, env={**self.env, **(env or {})}, cwd=ROOT, output=log)

    def said(self) -> str:
        """What the training has printed, or Ray if there is none yet."""
        logs = [self.base / "train.log", *sorted(self.base.glob("ray-*.log"))]
        return next((log.read_text() for log in logs if log.exists()), "")

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.base / RUN / "status.json").read_text())
            return found
        return {}

    def at_work(self) -> dict[str, int]:
        """Node → how many of its workers are ready."""
        sampling = self.status().get("sampling", {})
        count = {node["name"]: 0 for node in sampling.get("nodes", [])}
        for worker in sampling.get("workers", []):
            count[worker["node"]] = count.get(worker["node"], 0) + (worker["state"] == "ready")
        return count

    def agents(self, host: int) -> list[int]:
        """Processes there that belong to a training, and not to Ray itself."""
        ours = ("NodeAgent", "sampler-", "ludus")
        return [process.pid for process in self.hosts.processes(host) if any(name in process.info["name"] for name in ours)]

    def iterations(self) -> int:
        with contextlib.suppress(OSError):
            return (self.base / RUN / "metrics.jsonl").read_text().count("\n")
        return 0

    def until(self, what: Callable[[], object], within_s: float, training: subprocess.Popen[bytes] | None = None) -> None:
        """Raises AssertionError, with what the training has said, when it does not happen."""

        def ended() -> str:
            return f"the training ended with {training.returncode}" if training and training.poll() is not None else ""

        wait_until(what, within_s, what=lambda: f"{self.status()}\n{self.said()[-3000:]}", failed=ended, poll_s=0.2)

    def goes_on(self, training: subprocess.Popen[bytes], within_s: float = 60.0, iterations: int = 3) -> None:
        """The run makes progress from now on."""
        goal = self.iterations() + iterations
        self.until(lambda: self.iterations() >= goal, within_s, training)


@contextlib.contextmanager
def ray_hosts(n: int, base: Path) -> Iterator[RayHosts]:
    with rig.up(n, base) as hosts:
        yield RayHosts(hosts, base)


def end(training: subprocess.Popen[bytes]) -> int:
    """Ctrl-C, and time to write a checkpoint."""
    return rig.end(training, signal.SIGINT, within_s=60.0)


OPTIONS = (
    *("CartPole-v1", "--run", "PPO", "--num-workers", "3", "--num-envs", "2", "--seed", "1"),
    *("--project", str(SHARED), "--trial", RUN, "--checkpoint-freq", "2", "--stop", "time_s=500"),
    *("--set", "config.train_batch_size=192", "--set", "config.rollout_fragment_length=32", "--set", "config.num_epochs=1"),
    *("--set", "config.evaluation_interval=0"),
)
"""A training that needs little and does not end by itself."""
