"""Workers of an agent, over a real Ray on this machine: their blocks, their deaths, and what is left at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from ludus.config.schema import AlgorithmConfig
from ludus.core.types import Segments
from ludus.distributed.ray_nodes import RayNodes
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import SamplingNode
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.assembly.worker_training import make_plan, probe_environment
from ludus.models.policy import Policy
from ludus.ray_cluster.cluster import Cluster
from ludus.transport.ring_buffer import Wakeup
from tests.waiting import wait_until

pytestmark = pytest.mark.system

SETTINGS = AlgorithmConfig(num_workers=2, num_envs_per_worker=2, rollout_fragment_length=8, train_batch_size=32, sampling="sync")
FIRST = 5  # the version with which block 0 is made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("local", num_cpus=2, object_store_memory=100 << 20) as cluster:
        yield cluster
    assert [p for p in psutil.Process().children(recursive=True) if "ray" in p.name()] == []


@pytest.fixture(scope="module")
def wakeup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wakeup]:
    wakeup = Wakeup.create(tmp_path_factory.mktemp("wakeup") / "wakeup")
    yield wakeup
    wakeup.close()


@pytest.fixture(scope="module")
def policy() -> Policy:
    shape = probe_environment("CartPole-v1", SETTINGS)
    return make_policy(shape.observation_space, shape.action_space, SETTINGS)


@pytest.fixture(scope="module")
def plan(policy: Policy) -> SamplingPlan:
    return make_plan("CartPole-v1", SETTINGS, probe_environment("CartPole-v1", SETTINGS), policy, FIRST, seed=0)


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, plan: SamplingPlan, wakeup: Wakeup) -> Iterator[RayNodes]:
    """With an agent for this machine: it is the only one."""
    before = set(threading.enumerate())
    nodes = RayNodes(cluster, plan, wakeup.path, agent_here=True)
    yield nodes
    agents = [process for process in psutil.Process().children(recursive=True) if "NodeAgent" in process.name()]
    family = [process for agent in agents for process in (agent, *agent.children(recursive=True))]
    nodes.close()
    assert len(family) >= 3, "an agent, its forkserver and a worker at the least"
    assert psutil.wait_procs(family, timeout=20)[1] == [], "workers end with an agent that is dismissed"
    ours = ("ray-post", "ray-clerk")
    assert [thread for thread in threading.enumerate() if thread not in before and thread.name in ours] == []


def next_block(node: SamplingNode, worker: int, wakeup: Wakeup) -> Segments:
    came: list[Segments] = []

    def look() -> bool:
        report = node.workers().get(worker)
        assert report is None or report.state != "failed", report
        block = node.take(worker)
        came.extend([block] if block is not None else [])
        return bool(came)

    wait_until(look, pause=wakeup.wait)
    return came[0]


def test_blocks_come_in_order_and_follow_the_weights(cluster: Cluster, nodes: RayNodes, policy: Policy, wakeup: Wakeup) -> None:
    (node,) = nodes.current()
    assert (node.name, node.cores) == (cluster.members()[0].host, 2)
    node.publish(FIRST, policy.weights())
    for worker in (0, 1):
        node.start(worker, 0)
    for update in range(4):
        blocks = [next_block(node, worker, wakeup) for worker in (0, 1)]
        for worker, block in enumerate(blocks):
            assert np.unique(block.version).tolist() == [FIRST + update], "block k is made after k updates"
            assert block.origin.tolist() == [2 * worker, 2 * worker + 1]
            assert block.valid.any()
            node.release(worker, block)
        node.publish(FIRST + update + 1, policy.weights())
    wait_until(lambda: 1 in node.workers() and node.workers()[1].counter("blocks") >= 4, pause=wakeup.wait)

    node.stop(0)
    node.start(0, 4)  # as after a move: it goes on where the learner is
    assert np.unique(next_block(node, 0, wakeup).version).tolist() == [FIRST + 4]


def test_a_killed_agent_takes_its_workers_along_and_is_replaced(nodes: RayNodes, policy: Policy, wakeup: Wakeup) -> None:
    (node,) = nodes.current()
    node.publish(FIRST + 10, policy.weights())
    node.start(2, 0)
    wait_until(lambda: 2 in node.workers() and node.workers()[2].pid is not None, pause=wakeup.wait)
    worker = psutil.Process(node.workers()[2].pid)
    agent = next(parent for parent in worker.parents() if "NodeAgent" in parent.name())
    agent.kill()
    wait_until(lambda: node.lost, pause=wakeup.wait)
    assert "agent" in node.lost
    assert psutil.wait_procs([worker], timeout=20)[1] == []

    wait_until(lambda: nodes.current(), pause=wakeup.wait)
    (another,) = nodes.current()
    assert another is not node
    another.publish(FIRST + 11, policy.weights())
    another.start(2, 3)
    assert np.unique(next_block(another, 2, wakeup).version).tolist() == [FIRST + 11]
