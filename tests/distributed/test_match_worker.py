"""A worker that plays matches: which blocks it writes, also as the successor of one that died between two of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core.tree import Array, leaves
from ludus.core.types import Segments
from ludus.distributed.match_results import WORKER_RESULTS
from ludus.distributed.ray_nodes import RayNodes
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import LocalNode, SamplingNode
from ludus.distributed.sampling_worker import PolicyBoard
from ludus.experiments.assembly.match_evaluation import assign_agents, make_match
from ludus.experiments.assembly.match_worker_training import make_plan
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.resolve import resolve
from ludus.ray_cluster.cluster import Cluster
from ludus.transport.ring_buffer import Wakeup
from tests.waiting import wait_until

SETTINGS: dict[str, Any] = {
    "num_workers": 1,
    "num_envs_per_worker": 2,
    "train_batch_size": 24,
    "model": {"fcnet_hiddens": [8]},
    "multiagent": {"policies": ["talk", "hear"], "policy_mapping": {"speak*": "talk", "listener": "hear"}},
}


def make_parts() -> tuple[SamplingPlan, dict[str, Array]]:
    """The plan of workers for two policies, and their weights."""
    resolved = resolve({"env": "tests.matches:make_roles", "config": SETTINGS})
    config = resolved.config
    match = make_match("tests.matches:make_roles", config)
    assert config.multiagent is not None
    assignment = assign_agents(match, config.multiagent)
    match.close()
    policies = {name: make_policy(*spaces, config) for name, spaces in assignment.spaces.items()}
    plan: SamplingPlan = make_plan("tests.matches:make_roles", config, assignment, policies, seed=0)
    board = PolicyBoard(policies.values())
    return plan, {name: value.detach().numpy() for name, value in board.state_dict().items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    plan, weights = make_parts()
    node = LocalNode(plan, log_dir=tmp_path)
    node.publish(1, weights)
    yield node
    node.close()


def next_block(node: SamplingNode) -> Segments:
    found: list[Segments] = []

    def look() -> bool:
        report = node.workers().get(0)
        assert report is None or report.state != "failed", report
        block = node.take(0)
        found.extend([] if block is None else [block])
        return bool(found)

    wait_until(look)
    return found[0]


def test_a_worker_writes_one_block_of_every_model_in_turn(node: LocalNode) -> None:
    node.start(0, 0)
    blocks = [next_block(node) for _ in range(2)]
    assert [block.model for block in blocks] == ["talk", "hear"]
    assert [block.env_steps for block in blocks] == [24, 0]  # counted once
    assert all(block.spec.results == WORKER_RESULTS for block in blocks)
    assert sum(len(block.episode_return) for block in blocks) > 0


def test_the_successor_of_a_worker_that_died_between_two_models_writes_the_missing_one(node: LocalNode) -> None:
    node.start(0, 1)  # block 0, of the first model, was taken from its predecessor
    assert next_block(node).model == "hear"


@pytest.mark.system
def test_blocks_of_matches_are_the_same_through_a_ray_agent(node: LocalNode, tmp_path: Path) -> None:
    node.start(0, 0)
    near = [next_block(node) for _ in range(2)]
    plan, weights = make_parts()
    with contextlib.ExitStack() as stack:
        wakeup = stack.enter_context(Wakeup.create(tmp_path / "wakeup"))
        cluster = stack.enter_context(Cluster("local", num_cpus=1, object_store_memory=100 << 20))
        nodes = stack.enter_context(contextlib.closing(RayNodes(cluster, plan, wakeup.path, agent_here=True)))
        (far,) = nodes.current()
        far.publish(1, weights)
        far.start(0, 0)
        for here in near:
            there = next_block(far)
            assert (here.model, here.env_steps) == (there.model, there.env_steps)
            for (path, one), (_, other) in zip(leaves(here.arrays()), leaves(there.arrays()), strict=True):
                np.testing.assert_array_equal(one, other, path)
