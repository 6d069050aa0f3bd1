"""One run on real hosts that meet in a Ray cluster: found by name, served by the workers of another host, told when it breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.process.auth import PEER_TIMEOUT_S
from tests.remote.node import ROOT, Failed, Node
from tests.system import hosts as rig
from tests.system.hosts import SHARED, Hosts
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RAY = Path(sys.executable).with_name("ray")
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Fleet:
    """Hosts, and processes of runs there. They share a directory, as machines with a network file system do."""

    def __init__(self, hosts: Hosts, base: Path) -> None:
        self.hosts, self.base = hosts, base
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LUDUS_", "ip_head", "TMPDIR"))}
        self.env = kept | {"LUDUS_TOKEN_FILE": str(SHARED / "token")}

    def node(self, host: int) -> Node:
        """A process there; its temporary directories and shared memory are those of the host."""

        def start(argv: list[str]) -> subprocess.Popen[bytes]:
            there = [part.replace(str(self.base), str(SHARED)) for part in argv]
            log = SHARED / f"node-{host}-{time.monotonic_ns()}.log"
            quiet = ["bash", "-c", f'exec "$@" 2>{log}', "-", *there]
            return self.hosts.run(host, quiet, env=self.env, cwd=ROOT, output=subprocess.PIPE)

        return Node(self.base / f"h{host}", start)

    def ask_to_join(self, node: Node, address: str, trial: str = "t") -> None:
        """Every host in a directory of its own: nothing but the address may lead them to each other."""
        node.tell("join", str(SHARED / node.base.name), trial, address)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    base = tmp_path_factory.mktemp("fleet")
    with rig.up(2, base) as hosts:
        yield Fleet(hosts, base)


def opened(fleet: Fleet, home: Node, away: Node, port: int) -> None:
    """The same call on both hosts; the one that has the address becomes the hub, the other waits for it."""
    address = f"tcp://{fleet.hosts.address(0)}:{port}"
    fleet.ask_to_join(away, address)
    fleet.ask_to_join(home, address)
    assert home.answer()["hub"]
    joined = away.answer()
    assert (joined["hub"], joined["home"]) == (False, False)


@pytest.mark.long
def test_a_host_that_is_cut_off_is_told_and_given_up_and_may_come_back_until_the_hub_loses_its_power(fleet: Fleet) -> None:
    with fleet.node(0) as home, fleet.node(1) as away:
        opened(fleet, home, away, 7001)
        home.ask("make", "m", 2.0)
        home.ask("crew", "central", 2)
        assert away.ask("call", "m", 3) == 6
        assert all(path.startswith(f"tcp://{fleet.hosts.address(0)}:") for path in away.ask("workers", "central"))
        assert away.ask("gather", "central", 40) == [20.0 + i for i in range(40)]
        away.tell("take_for_ever", "b")
        wait_until(lambda: home.ask("peers") >= 3, 10)  # its calls, its copy of the weights, its place in the queue
        fleet.hosts.cut(1)
        with pytest.raises(Failed, match=r"WorkerFailed: .* is gone") as caught:
            away.answer()
        assert caught.value.seconds < 2 * PEER_TIMEOUT_S
        wait_until(lambda: home.ask("peers") == 0, 2 * PEER_TIMEOUT_S)
        home.ask("push", "b", [5.0])
        assert home.ask("take", "b", 1) == [5.0], "nothing is handed to a host that is gone"
        with pytest.raises(Failed, match="WorkerFailed") as caught:
            away.ask("publish", "m", 9)
        assert caught.value.seconds < 1
        with pytest.raises(Failed, match="WorkerFailed") as caught:
            away.ask("call", "central", 9)
        assert caught.value.seconds < 2 * PEER_TIMEOUT_S
        fleet.hosts.mend(1)
        assert away.ask("leave") == []
        fleet.ask_to_join(away, f"tcp://{fleet.hosts.address(0)}:7001")
        away.answer()
        assert away.ask("publish", "m", 4) == 2
        assert away.ask("until_version", "m", 2) == 2
        assert away.ask("call", "m", 3) == 12
        away.tell("play_for", "central", 60.0)
        time.sleep(1.0)
        fleet.hosts.cut(1)  # with a question under way: what is not acknowledged would be sent again for a quarter of an hour
        with pytest.raises(Failed, match="WorkerFailed") as caught:
            away.answer()
        assert caught.value.seconds < 3 * PEER_TIMEOUT_S
        fleet.hosts.mend(1)
        away.ask("leave")
        fleet.ask_to_join(away, f"tcp://{fleet.hosts.address(0)}:7001")
        away.answer()
        away.tell("wait_for_the_end")
        fleet.hosts.power_off(0)
        with pytest.raises(Failed, match=r"WorkerFailed: .* is gone") as caught:
            away.answer()
        assert caught.value.seconds < 2 * PEER_TIMEOUT_S


# -- hosts that meet in a Ray cluster


class Ray:
    """Ray on every host of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.address = fleet, f"{fleet.hosts.address(0)}:6379"
        (fleet.base / "ray-token").write_text("c" * 64)
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(SHARED / "ray-token"), "RAY_USAGE_STATS_ENABLED": "0"}
        fleet.env |= HEALTH | known
        del fleet.env["LUDUS_TOKEN_FILE"]
        for host in range(len(fleet.hosts)):
            self.start(host)

    def start(self, host: int) -> None:
        where = ["--head", "--port=6379", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
        small = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        address = f"--node-ip-address={self.fleet.hosts.address(host)}"
        path = self.fleet.base / f"ray-{host}.log"
        with open(path, "wb") as log:
            started = self.fleet.hosts.run(host, [RAY, "start", *where, *small, address], env=self.fleet.env, output=log)
            assert started.wait(90) == 0, path.read_text()

    def ask_to_join(self, node: Node, trial: str) -> None:
        node.tell("join", str(SHARED / "project"), trial, self.address)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    base = tmp_path_factory.mktemp("ray")
    with rig.up(2, base) as hosts:
        yield Ray(Fleet(hosts, base))


@pytest.mark.long
def test_a_run_is_found_by_name_from_another_host_and_its_workers_serve_there(ray: Ray) -> None:
    with ray.fleet.node(0) as home, ray.fleet.node(1) as away:
        ray.ask_to_join(home, "found")
        assert home.answer()["hub"]
        home.ask("make", "m", 2.0)
        home.ask("crew", "central", 2)
        ray.ask_to_join(away, "found")
        joined = away.answer()
        assert (joined["hub"], joined["home"]) == (False, False)
        assert away.ask("call", "m", 3) == 6
        version = home.ask("publish", "m", 4)
        assert away.ask("until_version", "m", version) == version
        assert away.ask("call", "m", 3) == 12
        assert all(path.startswith(f"tcp://{ray.fleet.hosts.address(0)}:") for path in away.ask("workers", "central"))
        assert away.ask("gather", "central", 40) == [20.0 + i for i in range(40)]
        away.ask("push", "b", [1.0, 2.0])
        assert home.ask("take", "b", 2) == [1.0, 2.0]
        assert away.ask("serve", "m", "seen") == [8.0, 12.0]


@pytest.mark.long
def test_of_two_hosts_that_come_at_once_one_becomes_the_hub_and_after_its_death_the_next(ray: Ray) -> None:
    with ray.fleet.node(0) as one, ray.fleet.node(1) as two:
        for node in (one, two):
            node.ask("version_of_python")  # both are up: now they start together
        for node in (one, two):
            ray.ask_to_join(node, "race")
        came = [node.answer() for node in (one, two)]
        assert sorted(joined["hub"] for joined in came) == [False, True]
        hub, other = (one, two) if came[0]["hub"] else (two, one)
        hub.ask("make", "m", 3.0)
        assert other.ask("call", "m", 2) == 6
        other.tell("wait_for_the_end")
        os.kill(_child_of(hub), signal.SIGKILL)
        with pytest.raises(Failed, match=r"WorkerFailed: .* is gone"):
            other.answer()
        ray.ask_to_join(other, "race")
        assert other.answer()["hub"], "the name is free again"
        assert other.ask("call", "m", 2) == 6, "from what was kept"


def _child_of(node: Node) -> int:
    """The process in the host, as it is numbered outside: what put it there waits for it."""
    pid = node.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.long
def test_when_the_head_of_ray_is_lost_the_run_goes_on(ray: Ray) -> None:
    """The last of this file: it takes the cluster away."""
    with ray.fleet.node(1) as hub:
        ray.ask_to_join(hub, "headless")
        assert hub.answer()["hub"]
        hub.ask("make", "m", 3.0)
        ray.fleet.hosts.power_off(0)
        time.sleep(75)  # after a minute Ray ends the processes that use it
        assert hub.ask("call", "m", 2) == 6
        assert hub.ask("leave") == []
