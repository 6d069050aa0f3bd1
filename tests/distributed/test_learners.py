"""Learners in several processes: equal after every update, losses noticed, nothing left behind, states interchangeable."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from ludus.algorithms.ppo import PPO
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.learners.group import SharedAlgorithm, share_learning
from ludus.distributed.learners.listener import LearnerListener
from ludus.distributed.learners.rank import serve_remote_rank
from ludus.errors import TrainingDiverged, WorkerFailed
from ludus.process.identity import is_alive_since, start_ticks
from ludus.process.workers.supervisor import Supervisor
from ludus.transport.segment_codec import spec_from_plain, spec_to_plain
from tests.algorithms.experience import config_for, experience, policy_for

LOGS = Path("logs")


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """One for all tests: it takes seconds to start, and learners then none."""
    logs = tmp_path_factory.mktemp("logs")
    with Supervisor(log_dir=logs, preload=("torch", "ludus.distributed.learners.group", "ludus.algorithms.ppo")) as one:
        yield one


@contextlib.contextmanager
def sharing(kind: str, supervisor: Supervisor, learners: int = 2, settings: Any = None, **options: Any) -> Iterator[Any]:
    config = config_for(**(settings or {}))
    mine = PPO(policy_for(kind), config, config.seed)
    algorithm = share_learning(mine, config, learners, LOGS, supervisor=supervisor, **options)
    assert isinstance(algorithm, SharedAlgorithm)
    with contextlib.closing(algorithm):
        yield algorithm


def alone(kind: str, **settings: Any) -> PPO:
    config = config_for(**settings)
    return PPO(policy_for(kind), config, config.seed)


def data(kind: str) -> list[Segments]:
    return [experience(policy_for(kind), *size, seed=i) for i, size in enumerate([(12, 7), (9, 5), (20, 9)])]


def processes(algorithm: Any) -> list[int]:
    return [process.pid for process in algorithm._learners._processes.values()]


def assert_alike(one: Any, other: Any, atol: float = 1e-5) -> None:
    for name, value in one.policy.weights().items():
        assert other.policy.weights()[name] == pytest.approx(value, abs=atol), name


@pytest.mark.parametrize(("kind", "transport"), [("lstm", "shared"), ("hybrid", "gloo")])
def test_two_learners_learn_what_one_learns(supervisor: Supervisor, kind: str, transport: str) -> None:
    settings = {"normalize_reward": True, "kl_target": 0.05, "stop_kl": 0.075}
    single = alone(kind, **settings)
    with sharing(kind, supervisor, settings=settings, transport=transport) as several:
        for i, block in enumerate(data(kind)):
            mine, theirs = single.learn(block, i), several.learn(block, i)
            assert theirs["learners"] == 2
            assert {name: theirs[name] for name in mine} == pytest.approx(mine, rel=1e-3, abs=1e-5)
        assert_alike(single, several)
        pids = processes(several)
        assert all(pids)
    assert not any(is_alive_since(pid, 0) for pid in pids)


def test_after_a_batch_that_is_no_use_all_learners_go_on_from_where_they_were(supervisor: Supervisor) -> None:
    good, bad = data("mlp")[0], data("mlp")[1]
    bad.value[0] = np.nan
    single = alone("mlp")
    with sharing("mlp", supervisor) as several:
        for algorithm in (single, several):
            algorithm.learn(good, 0)
            with pytest.raises(TrainingDiverged, match="gradient became nan"):
                algorithm.learn(bad, 0)
            algorithm.learn(good, 0)
        several._learners.wait_until_done()
        assert_alike(single, several)


def test_states_of_one_and_of_several_learners_are_interchangeable(supervisor: Supervisor) -> None:
    blocks = data("filtered")
    single, resumed = alone("filtered"), alone("filtered")
    with sharing("filtered", supervisor) as several:
        single.learn(blocks[0], 0)
        several.policy.load_weights(single.policy.weights())
        several.load_state(*single.state())
        single.learn(blocks[1], 0)
        several.learn(blocks[1], 0)
        assert_alike(single, several)
        resumed.policy.load_weights(several.policy.weights())
        resumed.load_state(*several.state())
        several.learn(blocks[2], 0)
    single.learn(blocks[2], 0)
    resumed.learn(blocks[2], 0)
    assert_alike(single, several)
    assert_alike(single, resumed)
    assert resumed.optimizer.updates == single.optimizer.updates


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_killed_learner_is_noticed_in_seconds_and_leaves_no_process(supervisor: Supervisor, transport: str) -> None:
    block = data("mlp")[2]
    with sharing("mlp", supervisor, learners=3, transport=transport) as several:
        several.learn(block, 0)
        pids = processes(several)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"Learner 2 of 3 is lost: killed by SIGKILL.*learner-2.log"):
            several.learn(block, 0)
        assert time.monotonic() - began < 20
    assert not any(is_alive_since(pid, 0) for pid in pids)


def test_a_learner_that_is_killed_in_the_middle_of_an_update_is_noticed(supervisor: Supervisor) -> None:
    block = data("mlp")[2]
    with sharing("mlp", supervisor, settings={"num_epochs": 100_000, "minibatch_size": 8}) as several:
        pid = processes(several)[0]
        started = start_ticks(pid)
        original, count = several.optimizer.group.sum_, 0

        def sum_and_kill(tensor: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == 20:
                os.kill(pid, signal.SIGKILL)
            original(tensor)

        several.optimizer.group.sum_ = sum_and_kill
        with pytest.raises(WorkerFailed, match="Learner 1 of 2 is lost: killed by SIGKILL"):
            several.learn(block, 0)
    assert started is not None
    assert not is_alive_since(pid, started)


@pytest.mark.long
def test_a_learner_that_hangs_is_given_up(supervisor: Supervisor) -> None:
    block = data("mlp")[0]
    with sharing("mlp", supervisor) as several:
        several.learn(block, 0)
        several._learners.wait_until_done()
        several.optimizer.group._timeout_s = 1.0
        pid = processes(several)[0]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match="Learner 1 did not join an all-reduce within 1 s"):
            several.learn(block, 0)
    assert not is_alive_since(pid, 0)


def test_a_learner_on_another_node_calls_by_address(supervisor: Supervisor) -> None:
    token, kind, failures = b"a token of this very run", "lstm", []
    with contextlib.closing(LearnerListener("127.0.0.1", token)) as entrance:

        def live() -> None:
            try:
                serve_remote_rank(entrance.address, token)
            except Exception as error:
                failures.append(error)

        elsewhere = threading.Thread(target=live)
        elsewhere.start()
        single = alone(kind)
        with sharing(kind, supervisor, learners=3, remote=1, listener=entrance) as several:
            for block in data(kind):
                single.learn(block, 0)
                several.learn(block, 0)
            assert_alike(single, several)
        elsewhere.join(30)
    assert not elsewhere.is_alive()
    assert failures == []


def test_a_learner_that_does_not_come_from_its_node_is_named(supervisor: Supervisor) -> None:
    config = config_for()
    with contextlib.closing(LearnerListener("127.0.0.1", b"a token of this very run")) as entrance:
        options: Any = {"supervisor": supervisor, "remote": 1, "listener": entrance, "start_s": 0.2}
        with pytest.raises(WorkerFailed, match=r"Learner 1 of 2 did not come to tcp://127\.0"):
            share_learning(PPO(policy_for("mlp"), config, 0), config, 2, LOGS, **options)


class Careless(PPO):
    """Draws from a generator that is not in its state."""

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        with torch.no_grad():
            self.optimizer.flat.add_(torch.rand_like(self.optimizer.flat))
        return super().learn(segments, timestep)


def test_learners_that_drift_apart_are_an_error(supervisor: Supervisor) -> None:
    config, block = config_for(), data("mlp")[0]
    algorithm = share_learning(Careless(policy_for("mlp"), config, 0), config, 2, LOGS, supervisor=supervisor)
    assert isinstance(algorithm, SharedAlgorithm)
    with contextlib.closing(algorithm):
        algorithm.learn(block, 0)
        with pytest.raises(WorkerFailed, match="Learner 1 has other weights than learner 0"):
            algorithm.learn(block, 0)


class Unbuildable(PPO):
    def __init__(self, policy: Any, config: Any, seed: int) -> None:
        if "learner-1.log" in os.readlink("/proc/self/fd/1"):
            raise RuntimeError("there is only one of me")
        super().__init__(policy, config, seed)


def test_a_learner_that_cannot_start_reports_the_reason(supervisor: Supervisor) -> None:
    config = config_for()
    with pytest.raises(WorkerFailed, match="there is only one of me"):
        share_learning(Unbuildable(policy_for("mlp"), config, 0), config, 2, LOGS, supervisor=supervisor)


def test_one_learner_is_the_algorithm_itself() -> None:
    algorithm = alone("mlp")
    assert share_learning(algorithm, config_for(), 1, None) is algorithm


def test_a_spec_survives_the_way_to_another_learner() -> None:
    leaf = ArraySpec((2, 3), np.dtype(np.uint8))
    seen = {"a": leaf, "b": (leaf, ArraySpec((), np.dtype(np.int64)))}
    spec = SegmentSpec(7, seen, (leaf,), 4, (ArraySpec((8,), np.dtype(np.float32)),), 4, 2, "m", ("won", "seconds"))
    assert spec_from_plain(msgpack.unpackb(msgpack.packb(spec_to_plain(spec)))) == spec
