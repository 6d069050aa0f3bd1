"""Discovery of a run's hub in a Ray cluster: one name, one hub, and nothing left when it is gone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludus.distributed.hub.ray_discovery import (
    ActorDiscovery,
    HubAddress,
    RayDiscoveryProcess,
    card_address,
    rendezvous_address,
    run_name,
)
from ludus.errors import UsageError, WorkerFailed
from ludus.ray_cluster.cluster import LOCAL, Cluster

pytestmark = pytest.mark.long

SPOT = HubAddress("tcp://10.0.0.1:7", "secret-token")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with Cluster(LOCAL, num_cpus=1, object_store_memory=80 << 20) as started:
        yield started


def soon() -> float:
    return time.monotonic() + 60


def test_of_many_that_come_at_once_one_becomes_the_hub_and_the_others_find_it(cluster: Cluster, tmp_path: Path) -> None:
    meetings = [ActorDiscovery(tmp_path / "t", cluster.address) for _ in range(4)]
    together = threading.Barrier(len(meetings))

    def come(meeting: ActorDiscovery) -> HubAddress | None:
        together.wait(30)
        found = meeting.find_or_claim(soon())
        if found is None:
            meeting.publish(SPOT)
        return found

    with ThreadPoolExecutor(len(meetings)) as pool:
        found = list(pool.map(come, meetings))
    assert found.count(None) == 1
    assert found.count(SPOT) == len(meetings) - 1
    assert meetings[0].host()
    other = ActorDiscovery(tmp_path / "other", cluster.address)
    assert other.find_or_claim(soon()) is None, "another run is another name"
    for meeting in (*meetings, other):
        meeting.close()
    again = ActorDiscovery(tmp_path / "t", cluster.address)
    deadline = soon()
    while (spot := again.find_or_claim(deadline)) is not None:  # the actor ends a moment after the request
        assert spot == SPOT
    again.close()


def test_waiting_for_a_hub_that_never_publishes_its_address_times_out(cluster: Cluster, tmp_path: Path) -> None:
    silent, waiting = (ActorDiscovery(tmp_path / "t", cluster.address) for _ in range(2))
    assert silent.find_or_claim(soon()) is None
    with pytest.raises(WorkerFailed, match="did not publish its address"):
        waiting.find_or_claim(time.monotonic() + 1)
    silent.close()


def test_the_discovery_process_holds_the_actor_and_this_process_survives_the_loss_of_ray(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, visitor = (RayDiscoveryProcess(tmp_path / "t", cluster.address) for _ in range(2))
    assert hub.find_or_claim(60) == cluster.members()[0].address
    hub.publish(SPOT)
    assert visitor.find_or_claim(60) == SPOT
    command = Path(f"/proc/{hub._process.pid}/cmdline").read_bytes() + Path(f"/proc/{hub._process.pid}/environ").read_bytes()
    assert SPOT.token.encode() not in command
    visitor.close()
    with caplog.at_level(logging.ERROR):
        hub._process.kill()
        deadline = soon()
        while "goes on" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    hub.close()
    after = RayDiscoveryProcess(tmp_path / "t", cluster.address)
    while isinstance(after.find_or_claim(60), HubAddress):  # the job of a process that was killed ends a moment later
        assert time.monotonic() < deadline
    after.close()


def test_a_missing_cluster_is_an_error(tmp_path: Path) -> None:
    keeper = RayDiscoveryProcess(tmp_path / "t", "127.0.0.1:9")
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:9"):
        keeper.find_or_claim(30)
    keeper.close()


def test_the_process_of_the_notice_imports_nothing_heavy() -> None:
    script = "import ludus.distributed.hub.ray_discovery, sys; assert not {'torch', 'numpy', 'ray'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_run_has_one_name_that_shows_no_path_of_others(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "atari" / "v0", tmp_path / "b" / "atari" / "v0"
    assert run_name(one) == run_name(one)
    assert run_name(one) != run_name(two)
    assert "/atari/v0/" in run_name(one)
    assert str(tmp_path) not in run_name(one)
    assert "secret-token" not in repr(SPOT)


def test_the_interface_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NET_CARD_NAME", raising=False)
    assert card_address() == ""
    monkeypatch.setenv("NET_CARD_NAME", "lo")
    assert card_address() == "127.0.0.1"
    monkeypatch.setenv("NET_CARD_NAME", "nocard0")
    with pytest.raises(UsageError, match="nocard0"):
        card_address()


def test_the_address_of_a_run_comes_from_the_call_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "ip_head"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous_address(None) is None
    assert rendezvous_address("tcp://h:1") == "tcp://h:1"
    assert rendezvous_address("h:1") == "h:1"
    monkeypatch.setenv("ip_head", "head:6379")
    assert rendezvous_address(None) == "head:6379"
    assert rendezvous_address("tcp://h:1") == "tcp://h:1"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert rendezvous_address(None) is None, "a Ray of one machine is no place to meet"
