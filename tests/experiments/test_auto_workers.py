"""How many workers: none where they would not help, as many as do where they would."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.config.validation import parse_algorithm_config
from ludus.experiments.assembly.auto_workers import (
    StepCost,
    best_number,
    choose_num_workers,
    measure,
    measure_matches,
    possible_workers,
)
from ludus.experiments.resolve import resolve
from ludus.experiments.validation.validate import ParsedExperiment
from tests.environments import Count
from tests.experiments.test_match_workers import ROLES
from tests.matches import Simple

MS = 1e-3


@pytest.mark.parametrize(
    ("cost", "cores", "sampling", "chosen"),
    [
        pytest.param(StepCost(0.005 * MS, 0, 0.02 * MS), 2, "sync", 0, id="learning is the limit"),
        pytest.param(StepCost(10 * MS, 0, 0.1 * MS), 8, "sync", 8, id="a slow environment takes all cores"),
        pytest.param(StepCost(10 * MS, 0, 10 * MS), 8, "async", 1, id="one worker keeps the learner busy"),
        pytest.param(StepCost(10 * MS, 9.9 * MS, 0.01 * MS), 2, "async", 8, id="environments that wait take more than the cores"),
        pytest.param(StepCost(3 * MS, 0, 1 * MS), 4, "async", 3, id="as many as the learner can follow"),
        pytest.param(StepCost(1 * MS, 0, 1 * MS), 1, "async", 0, id="one core has no room for another process"),
    ],
)
def test_the_smallest_number_that_is_nearly_best(cost: StepCost, cores: int, sampling: str, chosen: int) -> None:
    assert best_number(cost, cores, sampling, range(1, 4 * cores + 1)) == chosen


def test_a_batch_that_was_asked_for_comes_out_even() -> None:
    assert possible_workers({"train_batch_size": 96}, 8, "sync", 4) == [1, 2, 3, 4, 6, 12]
    assert possible_workers({"train_batch_size": 96, "rollout_fragment_length": 4}, 8, "sync", 4) == [3]
    assert possible_workers({}, 8, "sync", 1) == [1, 2, 3, 4]
    assert possible_workers({"train_batch_size": 96}, 8, "async", 1) == [1, 2, 3, 4]


def test_an_environment_that_waits_is_seen_to_wait() -> None:
    config = parse_algorithm_config(PPOConfig, {"num_envs_per_worker": 1, "env_config": {"stall": 1.0, "stall_s": (0.01, 0.01)}})
    cost = measure("tests.environments:make_fragile", PPO, config)
    assert cost.sample_s > 0.008  # the steps that only reset do not wait
    assert cost.wait_s > 0.8 * cost.sample_s
    assert cost.learn_s > 0


def test_opponents_from_the_past_are_played_while_it_is_measured() -> None:
    keywords = {
        "num_envs_per_worker": 4,
        "rollout_fragment_length": 32,
        "env_config": {"opponent": "past", "seconds": 20},
        "model": {"fcnet_hiddens": [8]},
    }
    cost = measure("ludus.games.arena.env.gym_env:ArenaVectorEnv", PPO, parse_algorithm_config(PPOConfig, keywords))
    assert cost.sample_s > 0


def test_matches_of_a_league_that_are_only_measured_are_not_reported(tmp_path: Path) -> None:
    self_play = {"opponents": "league", "league": str(tmp_path), "player": "main"}
    env_config = {"mode": "1v1", "max_episode_steps": 2}
    keywords = {"self_play": self_play, "env_config": env_config, "num_envs_per_worker": 2, "train_batch_size": 64}
    measure("ludus.games.arena.env.gym_env:ArenaVectorEnv", PPO, parse_algorithm_config(PPOConfig, keywords))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("tests.matches:make_roles", {"multiagent": ROLES}),
        ("tests.matches:make_turns", {"multiagent": {"count_steps_by": "agent_steps"}, "env_config": {"masked": "info"}}),
        ("pettingzoo/tictactoe_v3", {"self_play": {"opponents": "mix"}}),
    ],
    ids=["two policies", "in turn", "self-play"],
)
def test_matches_of_several_agents_are_measured(env: str, settings: dict[str, Any]) -> None:
    config = {"num_envs_per_worker": 4, "train_batch_size": 64, "model": {"fcnet_hiddens": [8]}, **settings}
    resolved = resolve({"env": env, "config": config})
    threads = torch.get_num_threads()
    cost = measure_matches(env, PPO, resolved.config)
    assert 0 < cost.sample_s < 1
    assert 0 <= cost.wait_s < cost.sample_s
    assert 0 < cost.learn_s < 1
    assert torch.get_num_threads() == threads


class SlowMatch(Simple):
    """Waits in every step, as a game in another process would."""

    def step(self, actions: dict[str, Any]) -> Any:
        time.sleep(0.01)
        return super().step(actions)


def make_slow_match(**settings: Any) -> SlowMatch:
    return SlowMatch(**settings)


def test_matches_that_wait_get_more_workers_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.experiments.assembly.auto_workers.usable_cores", lambda: 2)
    settings = {"num_workers": "auto", "num_envs_per_worker": 2, "model": {"fcnet_hiddens": [8]}}
    said: list[str] = []
    chosen = choose_num_workers(ParsedExperiment({"env": f"{__name__}:make_slow_match", "config": settings}), said.append)
    assert chosen.config["num_workers"] > 2, said
    assert "a step takes" in said[-1]


@pytest.mark.long
def test_a_very_slow_environment_is_measured_by_a_few_steps_and_the_threads_are_given_back(tmp_path: Path) -> None:
    said = tmp_path / "steps"
    config = parse_algorithm_config(PPOConfig, {"num_envs_per_worker": 1, "env_config": {"said": str(said)}, "torch_threads": 1})
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        cost = measure("tests.experiments.test_auto_workers:make_slow", PPO, config)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert cost.sample_s > cost.wait_s > 1.0
    assert said.read_text() == "...", "one step to see how slow it is, and one short block"


class Slow(Count):
    def __init__(self, said: str) -> None:
        super().__init__(length=100)
        self.said = Path(said)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with self.said.open("a") as file:
            file.write(".")
        time.sleep(1.1)
        return super().step(action)


def make_slow(**settings: Any) -> Slow:
    return Slow(**settings)
