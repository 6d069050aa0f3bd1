"""What happens to a training on three hosts when hosts, cables, heads and tokens go wrong; and what a Ray of ours leaves behind."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import ludus
from ludus.core.tree import leaves
from ludus.distributed.ray_nodes import RayNodes, RayTimeouts
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import LocalNode
from ludus.errors import WorkerFailed
from ludus.models.policy import Policy
from ludus.ray_cluster.cluster import Cluster
from ludus.transport.ring_buffer import Wakeup
from tests.distributed.test_ray_nodes import FIRST, cluster, next_block, plan, policy, wakeup  # noqa: F401 - fixtures
from tests.ray_cluster.test_cluster import an_owner
from tests.system.hosts import SHARED
from tests.system.ray_hosts import OPTIONS, RUN, RayHosts, end, ray_hosts
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

BUSY_S = 60.0  # for processes to start, on a machine that has other things to do


def newest(cluster: RayHosts) -> int:
    """The newest checkpoint that is whole."""
    return max((int(path.name) for path in (cluster.base / RUN / "checkpoints").glob("[0-9]*")), default=0)


def test_hosts_leave_and_return_and_only_the_loss_of_the_head_ends_the_run_which_then_resumes(tmp_path: Path) -> None:
    with ray_hosts(3, tmp_path) as cluster:
        hosts = cluster.hosts
        for host in (0, 1):
            cluster.start_ray(host)
        cluster.formed(2)
        training = cluster.train(1, *OPTIONS)  # not on the head, which is to be lost later
        cluster.until(lambda: sum(cluster.at_work().values()) == 3 and len(cluster.at_work()) == 2, 2 * BUSY_S, training)

        cluster.start_ray(2)  # somebody joins: a worker moves over
        cluster.until(lambda: cluster.at_work() == {"h0": 1, "h1": 1, "h2": 1}, 2 * BUSY_S, training)
        cluster.goes_on(training)

        hosts.power_off(2)
        cluster.until(lambda: "h2" not in cluster.at_work() and sum(cluster.at_work().values()) == 3, BUSY_S, training)
        cluster.goes_on(training)
        hosts.power_on(2)
        cluster.start_ray(2)
        cluster.until(lambda: cluster.at_work() == {"h0": 1, "h1": 1, "h2": 1}, 2 * BUSY_S, training)
        cluster.goes_on(training)

        hosts.cut(2)
        cut_at = time.monotonic()
        cluster.until(lambda: "h2" not in cluster.at_work(), RayTimeouts.silent_s + 12, training)
        assert time.monotonic() - cut_at < RayTimeouts.silent_s + 12
        cluster.until(lambda: sum(cluster.at_work().values()) == 3, BUSY_S, training)
        hosts.mend(2)
        cluster.start_ray(2)  # the Ray that was cut off ends itself when it hears that it was given up
        cluster.until(lambda: cluster.at_work() == {"h0": 1, "h1": 1, "h2": 1}, 2 * BUSY_S, training)
        cluster.goes_on(training)
        assert "learner died" not in cluster.said()

        hosts.power_off(0)
        assert training.wait(RayTimeouts.head_s + BUSY_S) == 1, cluster.said()
        said = " ".join(cluster.said().split())
        assert "The head of the cluster is gone" in said
        assert "--resume" in said
        cluster.until(lambda: cluster.agents(1) == [], 60)
        before = newest(cluster)
        assert before > 0

        for host in (1, 2):
            hosts.power_off(host)
        for host in (0, 1, 2):
            hosts.power_on(host)
            cluster.start_ray(host)
        resumed = cluster.train(1, "--resume", str(SHARED / RUN))
        cluster.until(lambda: newest(cluster) > before, 3 * BUSY_S, resumed)
        assert end(resumed) == 130, cluster.said()


def test_a_wrong_token_an_absent_one_and_an_absent_head_are_told_apart(tmp_path: Path) -> None:
    with ray_hosts(2, tmp_path) as cluster:
        cluster.start_ray(0)
        cluster.formed(1)
        (tmp_path / "wrong").write_text("0" * 64)

        def ended(host: int, **env: str) -> str:
            training = cluster.train(host, *OPTIONS, env=env)
            assert training.wait(BUSY_S) == 2, cluster.said()
            said = " ".join(cluster.said().split())
            (tmp_path / "train.log").unlink()
            return said

        assert "does not accept the token from /mnt/wrong" in ended(0, RAY_AUTH_TOKEN_PATH=str(SHARED / "wrong"))
        assert "requires a token, and none is set" in ended(0, RAY_AUTH_TOKEN_PATH="")
        assert "is not part of the Ray cluster" in ended(1)
        cluster.hosts.power_off(0)
        assert f"no Ray cluster at {cluster.address}" in ended(1)
        assert not (tmp_path / RUN).exists(), "a run that could not be set up leaves nothing behind"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_ray_of_ours_is_gone_however_its_owner_ends(tmp_path: Path, number: int) -> None:
    with an_owner(tmp_path) as owner, open(owner.home / "token") as held:
        assert len(owner.processes) >= 2
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held.fileno()]) as reader:
            owner.end(number)
            assert owner.left() == []
            assert not owner.home.exists()
            assert reader.poll() is None, "somebody who merely looks at a file of it is not one of its processes"
            reader.kill()


def test_a_training_on_a_ray_of_its_own_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    words = [*OPTIONS, "--address", "local", "--ray-num-cpus", "2"]
    words[words.index("--project") + 1] = str(tmp_path)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with open(tmp_path / "said", "wb") as said:
        argv = [sys.executable, "-m", "ludus.cli.main", "train", *words]
        training = subprocess.Popen(argv, stdout=said, stderr=said, env=environ, process_group=0)
    try:
        deadline = time.monotonic() + 2 * BUSY_S
        while not list((tmp_path / RUN / "checkpoints").glob("[0-9]*")):
            assert training.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        family = psutil.Process(training.pid).children(recursive=True)
        assert any(process.name() == "raylet" for process in family)
    finally:
        training.kill()
        training.wait(30)
    assert psutil.wait_procs(family, timeout=30)[1] == []


def test_an_agent_that_nobody_calls_ends_itself_and_its_workers(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, threading
        from ludus.distributed import node_agent
        from tests.distributed.test_ray_nodes import SETTINGS, make_plan, make_policy, probe_environment
        node_agent.ORPHAN_S = 15.0
        shape = probe_environment("CartPole-v1", SETTINGS)
        policy = make_policy(shape.observation_space, shape.action_space, SETTINGS)
        agent = node_agent.NodeAgent("alone")
        agent.open(make_plan("CartPole-v1", SETTINGS, shape, policy, 1, 0), node_agent.local_node, None, "")
        agent.publish(1, policy.weights())
        agent.start(0, 0, 1)
        while not agent.next_bundle(1, 0.5)[0].blocks:
            pass
        print(agent._node.workers()[0].pid, flush=True)
        threading.Event().wait(120)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        worker = psutil.Process(int(agent.stdout.readline()))
        assert agent.wait(60) == 1
        assert psutil.wait_procs([worker], timeout=20)[1] == []


def test_another_version_of_ludus_is_refused_by_name(
    cluster: Cluster, plan: SamplingPlan, wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ludus.__version__
    monkeypatch.setattr(ludus, "__version__", "99.0")
    with pytest.raises(WorkerFailed, match=f"has ludus {there}, and this machine 99.0"):
        RayNodes(cluster, plan, wakeup.path, agent_here=True)


def test_an_agent_that_stands_still_is_given_up_whatever_ray_says(
    cluster: Cluster, plan: SamplingPlan, policy: Policy, wakeup: Wakeup
) -> None:
    nodes = RayNodes(cluster, plan, wakeup.path, agent_here=True)
    try:
        (node,) = nodes.current()
        node.publish(FIRST, policy.weights())
        node.start(0, 0)
        next_block(node, 0, wakeup)
        wait_until(lambda: bool(node.workers()), pause=wakeup.wait)
        agent = next(p for p in psutil.Process(node.workers()[0].pid).parents() if "NodeAgent" in p.name())
        agent.suspend()
        wait_until(lambda: node.lost, pause=wakeup.wait)
        assert "has not answered for" in node.lost
        wait_until(lambda: nodes.current() and nodes.current()[0] is not node, pause=wakeup.wait)
        assert psutil.wait_procs([agent], timeout=20)[1] == [], "it is ended, so that it does not wake up beside its successor"
    finally:
        nodes.close()


def test_blocks_are_the_same_with_and_without_ray(cluster: Cluster, plan: SamplingPlan, policy: Policy, wakeup: Wakeup) -> None:
    nodes = RayNodes(cluster, plan, wakeup.path, agent_here=True)
    here = LocalNode(plan, wakeup.path)
    try:
        (there,) = nodes.current()
        for node in (here, there):
            node.publish(FIRST, policy.weights())
            node.start(1, 0)
        for update in range(3):
            ours, theirs = next_block(here, 1, wakeup), next_block(there, 1, wakeup)
            for (path, a), (_, b) in zip(leaves(ours.arrays()), leaves(theirs.arrays()), strict=True):
                assert np.array_equal(a, b, equal_nan=True), (update, path)
            here.release(1, ours)
            for node in (here, there):
                node.publish(FIRST + update + 1, policy.weights())
    finally:
        here.close()
        nodes.close()
