"""Learners that share gradients: sums that agree bit by bit, weights as one learner would have them, and the lost ones noticed.

Ranks are threads here: a group does not know whether its members share a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ludus.algorithms.appo import APPO, APPOConfig
from ludus.algorithms.impala import IMPALA, IMPALAConfig
from ludus.algorithms.optim.flat_adam import SINGLE_LEARNER, GradientAllReduce
from ludus.algorithms.optim.gradient_allreduce import SharedMemoryAllReduce, TorchAllReduce
from ludus.algorithms.ppo import PPO
from ludus.config.validation import parse_algorithm_config
from ludus.core.types import Segments
from ludus.errors import StoreFull, TrainingDiverged, UsageError, WorkerFailed
from ludus.models.policy import Policy
from tests.algorithms.experience import experience, policy_for, ppo

T = TypeVar("T")
Join = Callable[[int], GradientAllReduce]


def together(size: int, act: Callable[[int], T]) -> list[T]:
    """What `act(rank)` returns, called by all ranks at once."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(act, rank) for rank in range(size)]]


def shared(path: Path, size: int, numbers: int = 20_000, **options: Any) -> Join:
    SharedMemoryAllReduce.create(path, size, numbers)
    return lambda rank: SharedMemoryAllReduce(path, rank, size, **options)


def gloo(size: int, **options: Any) -> Join:
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    return lambda rank: TorchAllReduce(store, rank, size, **options)


def joined(kind: str, size: int, directory: Path) -> Join:
    return gloo(size) if kind == "gloo" else shared(directory / "group", size)


# -- sums ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), [("shared", 2), ("shared", 3), ("gloo", 2)])
def test_every_member_gets_the_same_sum(tmp_path: Path, kind: str, size: int) -> None:
    join, rounds = joined(kind, size, tmp_path), 40
    data = [
        [torch.randn(1 + 37 * i, generator=torch.Generator().manual_seed(100 * r + i)) for i in range(rounds)]
        for r in range(size)
    ]

    def act(rank: int) -> list[Tensor]:
        group, mine = join(rank), [x.clone() for x in data[rank]]
        for x in mine:
            group.sum_(x)
        group.close()
        return mine

    results = together(size, act)
    for i in range(rounds):
        torch.testing.assert_close(results[0][i], torch.stack([data[r][i] for r in range(size)]).sum(0))
        assert all(torch.equal(results[0][i], results[r][i]) for r in range(1, size))


def test_one_that_is_slow_to_read_is_not_overtaken(tmp_path: Path) -> None:
    """Members of different speed, many small sums: nobody may write into what another still reads."""
    join = shared(tmp_path / "group", 2)

    def act(rank: int) -> list[float]:
        group, out = join(rank), []
        for i in range(300):
            x = torch.tensor([float(i * (rank + 1))])
            group.sum_(x)
            if i % 7 == 3 * rank:
                time.sleep(0.0005)
            out.append(float(x))
        return out

    assert together(2, act) == [[3.0 * i for i in range(300)]] * 2


def test_alone_a_sum_is_what_it_was() -> None:
    x = torch.ones(3)
    SINGLE_LEARNER.sum_(x)
    assert x.tolist() == [1, 1, 1]


# -- the lost ones ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_member_that_does_not_come_is_given_up_by_name(tmp_path: Path, kind: str) -> None:
    join = gloo(2, timeout_s=2) if kind == "gloo" else shared(tmp_path / "group", 2, timeout_s=0.5)
    over = threading.Event()

    def act(rank: int) -> str:
        group = join(rank)
        if rank:
            over.wait(30)
            return ""
        try:
            group.sum_(torch.ones(4))
        except WorkerFailed as error:
            return str(error)
        finally:
            over.set()
        return "nothing was noticed"

    said = together(2, act)[0]
    assert ("2 s" if kind == "gloo" else "0.5 s") in said
    assert "Learner" in said


def test_waiting_ends_as_soon_as_it_is_known_to_be_in_vain(tmp_path: Path) -> None:
    def check() -> None:
        raise WorkerFailed("Learner 1 of 2 is lost: killed by SIGKILL")

    group = shared(tmp_path / "group", 2, timeout_s=60, check=check)(0)
    with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
        group.sum_(torch.ones(4))


def test_diverged_learners_are_detected(tmp_path: Path) -> None:
    join = shared(tmp_path / "group", 2)

    def act(rank: int) -> str:
        with pytest.raises(WorkerFailed) as caught:
            join(rank).sum_(torch.ones(4 + rank))
        return str(caught.value)

    assert "Learner 1 sums 5 numbers where learner 0 sums 4" in together(2, act)[0]


def test_a_sum_without_room_is_refused(tmp_path: Path) -> None:
    group = shared(tmp_path / "group", 2, numbers=16)(0)
    with pytest.raises(UsageError, match="20000 numbers"):
        group.sum_(torch.ones(20_000))


def test_shared_memory_that_is_full_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="no space for the gradients of 2 learners"):
        SharedMemoryAllReduce.create(tmp_path / "group", 2, 1 << 58)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_network_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_CARD_NAME", "nonsense0")
    with pytest.raises(UsageError, match=r"NET_CARD_NAME is 'nonsense0'.*Available: .*lo"):
        gloo(1)(0)


def test_the_network_card_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_CARD_NAME", "lo")
    join = gloo(2)

    def act(rank: int) -> float:
        x = torch.ones(1)
        join(rank).sum_(x)
        return float(x)

    assert together(2, act) == [2.0, 2.0]


# -- learning -----------------------------------------------------------------------------------------------------------


def impala(policy: Policy) -> IMPALA:
    """Cuts a batch by rows, some of which hold no valid step at all."""
    config = parse_algorithm_config(IMPALAConfig, {"minibatch_size": 30, "num_epochs": 2}, collated=True)
    assert isinstance(config, IMPALAConfig)
    return IMPALA(policy, config.model_copy(update={"learner_threads": 1}), seed=5)


def appo(policy: Policy) -> APPO:
    """With all that it remembers: a target, the weight of a penalty, earlier batches."""
    settings = {"minibatch_size": 30, "num_epochs": 2, "use_kl_loss": True, "target_network_update_freq": 2}
    config = parse_algorithm_config(APPOConfig, settings | {"replay_proportion": 1.0}, collated=True)
    assert isinstance(config, APPOConfig)
    return APPO(policy, config.model_copy(update={"learner_threads": 1}), seed=5)


def blocks(kind: str, count: int) -> list[Segments]:
    """Of different sizes; the last is so small that some learners get no part of a minibatch."""
    sizes = [(12, 7), (9, 5), (3, 1)][:count]
    return [experience(policy_for(kind), *size, seed=i) for i, size in enumerate(sizes)]


def learned(algorithm: PPO, data: list[Segments]) -> list[dict[str, float]]:
    return [algorithm.learn(block, 100 * i) for i, block in enumerate(data)]


def learned_together(kind: str, size: int, join: Join, data: list[Segments], **settings: Any) -> tuple[list[PPO], list[Any]]:
    algorithms = [ppo(policy_for(kind), **settings) for _ in range(size)]

    def act(rank: int) -> list[dict[str, float]]:
        algorithms[rank].optimizer.group = join(rank)
        return learned(algorithms[rank], data)

    return algorithms, together(size, act)


def assert_alike(one: PPO, other: PPO, atol: float = 1e-5) -> None:
    for name, value in one.policy.weights().items():
        assert other.policy.weights()[name] == pytest.approx(value, abs=atol), name


@pytest.mark.parametrize(
    ("kind", "transport", "size"),
    [
        ("mlp", "shared", 2),
        ("lstm", "shared", 2),
        ("hybrid", "shared", 3),
        ("filtered", "shared", 2),
        ("lstm", "shared", 3),
        ("lstm", "gloo", 2),
    ],
)
def test_the_same_batches_give_the_same_weights_on_one_learner_and_on_several(
    tmp_path: Path, kind: str, transport: str, size: int
) -> None:
    data, settings = blocks(kind, 3), {"normalize_reward": True, "entropy_coeff": 0.01}
    alone = ppo(policy_for(kind), **settings)
    expected = learned(alone, data)
    algorithms, results = learned_together(kind, size, joined(transport, size, tmp_path), data, **settings)
    for algorithm in algorithms:
        assert_alike(alone, algorithm)
        assert torch.equal(algorithm.optimizer.flat, algorithms[0].optimizer.flat), "ranks must not drift apart at all"
        assert algorithm.optimizer.updates == alone.optimizer.updates
    for found in results:
        for mine, theirs in zip(expected, found, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("make", "kind"), [(impala, "mlp"), (impala, "lstm"), (appo, "mlp")])
def test_rows_without_a_valid_step_weigh_nothing_for_any_learner(
    tmp_path: Path, make: Callable[[Policy], IMPALA], kind: str
) -> None:
    block = experience(policy_for(kind), 10, 9)
    block.valid[:, [0, 1, 2, 3, 5]] = False
    join = joined("shared", 3, tmp_path)
    alone, several = make(policy_for(kind)), [make(policy_for(kind)) for _ in range(3)]

    def act(rank: int) -> dict[str, float]:
        several[rank].optimizer.group = join(rank)
        return [several[rank].learn(block, 0) for _ in range(3)][-1]

    numbers = [alone.learn(block, 0) for _ in range(3)][-1]
    for algorithm, found in zip(several, together(3, act), strict=True):
        assert found == pytest.approx(numbers, rel=1e-3, abs=1e-5)
        assert 0 < algorithm.optimizer.updates == alone.optimizer.updates
        torch.testing.assert_close(algorithm.optimizer.flat, alone.optimizer.flat, atol=1e-5, rtol=0)


def test_all_learners_stop_their_epochs_alike(tmp_path: Path) -> None:
    data = [experience(policy_for("mlp"), 16, 8, ragged=False)]
    settings = {"num_epochs": 20, "lr": 1e-3, "minibatch_size": 16, "stop_kl": 0.015}
    alone = ppo(policy_for("mlp"), **settings)
    epochs = learned(alone, data)[0]["epochs"]
    assert 1 < epochs < 20
    algorithms, results = learned_together("mlp", 2, joined("shared", 2, tmp_path), data, **settings)
    assert [found[0]["epochs"] for found in results] == [epochs, epochs]
    assert_alike(alone, algorithms[1], atol=1e-4)


def test_all_learners_find_a_gradient_that_is_no_number(tmp_path: Path) -> None:
    block = experience(policy_for("mlp"), 8, 4, ragged=False)
    block.value[3, 2] = float("nan")
    join = joined("shared", 2, tmp_path)

    def act(rank: int) -> str:
        algorithm = ppo(policy_for("mlp"))
        algorithm.optimizer.group = join(rank)
        with pytest.raises(TrainingDiverged) as caught:
            algorithm.learn(block, 0)
        return str(caught.value)

    assert all("gradient became nan" in said for said in together(2, act))


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_gradient_in_pieces_is_the_same_gradient(kind: str, threads: int) -> None:
    data = blocks(kind, 2)
    whole, max_shards = ppo(policy_for(kind)), ppo(policy_for(kind), gradient_accumulation=3, learner_threads=threads)
    learned(whole, data)
    learned(max_shards, data)
    max_shards.close()
    assert_alike(whole, max_shards)
