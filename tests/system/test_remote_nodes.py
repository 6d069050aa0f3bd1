"""One run on real hosts that meet in a Ray cluster: found by name, served by the workers of another host, told when it breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.node import ROOT, Node
from tests.system import hosts as rig
from tests.system.hosts import SHARED, Hosts

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

RAY = Path(sys.executable).with_name("ray")
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Fleet:
    """Hosts with Ray on each of them, and processes of a run there."""

    def __init__(self, hosts: Hosts, base: Path) -> None:
        self.hosts, self.base = hosts, base
        self.address = f"{hosts.address(0)}:6379"
        token = base / "ray-token"
        token.write_text("c" * 64)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LUDUS_", "ip_head"))}
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(SHARED / token.name), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = kept | HEALTH | known
        for host in range(len(hosts)):
            self.start_ray(host)

    def start_ray(self, host: int) -> None:
        where = ["--head", "--port=6379", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
        small = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        address = f"--node-ip-address={self.hosts.address(host)}"
        with open(self.base / f"ray-{host}.log", "wb") as log:
            started = self.hosts.run(host, [RAY, "start", *where, *small, address], env=self.env, output=log)
            assert started.wait(90) == 0, (self.base / f"ray-{host}.log").read_text()

    def node(self, host: int, **env: str) -> Node:
        """A process there; its temporary directories and shared memory are those of the host."""

        def start(argv: list[str]) -> subprocess.Popen[bytes]:
            there = [part.replace(str(self.base), str(SHARED)) for part in argv]
            log = SHARED / f"node-{host}-{time.monotonic_ns()}.log"
            quiet = ["bash", "-c", f'exec "$@" 2>{log}', "-", *there]
            return self.hosts.run(host, quiet, env={**self.env, **env}, cwd=ROOT, output=subprocess.PIPE)

        return Node(self.base / f"h{host}", start)

    def join(self, node: Node, trial: str = "t", address: str | None = None) -> Any:
        return node.ask("join", str(SHARED / "project"), trial, address or self.address)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:

    base = tmp_path_factory.mktemp("fleet")
    with rig.up(2, base) as hosts:
        yield Fleet(hosts, base)


def test_a_run_is_found_by_name_from_another_host_and_its_workers_serve_there(fleet: Fleet) -> None:
    with fleet.node(0) as home, fleet.node(1) as away:
        assert fleet.join(home)["hub"]
        home.ask("make", "m", 2.0)
        home.ask("crew", "central", 2)
        joined = fleet.join(away)
        assert (joined["hub"], joined["home"]) == (False, False)
        assert away.ask("call", "m", 3) == 6
        version = home.ask("publish", "m", 4)
        assert away.ask("until_version", "m", version) == version
        assert away.ask("call", "m", 3) == 12
        assert all(path.startswith(f"tcp://{fleet.hosts.address(0)}:") for path in away.ask("workers", "central"))
        assert away.ask("gather", "central", 40) == [20.0 + i for i in range(40)]
        away.ask("push", "b", [1.0, 2.0])
        assert home.ask("take", "b", 2) == [1.0, 2.0]
        assert away.ask("serve", "m", "seen") == [8.0, 12.0]
