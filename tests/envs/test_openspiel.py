from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ludus
from ludus.envs.pettingzoo import Departure, Turn, is_multi_agent, make_match
from ludus.errors import ConfigError, UnknownName

pytest.importorskip("pyspiel")


@pytest.mark.parametrize("name", ["leduc_poker", "connect_four", "backgammon", "goofspiel", "matrix_rps"])
def test_random_play_reaches_the_end_and_rewards_add_up_to_zero(name: str) -> None:
    assert is_multi_agent(f"openspiel/{name}")
    match, random = make_match(f"openspiel/{name}"), np.random.default_rng(0)
    for seed in range(3):
        step, returns = match.reset(seed), dict.fromkeys(match.agents, 0.0)
        while not step.over:
            for turn in step.turns:
                assert turn.mask is not None
                assert match.agents[turn.agent].observation.contains(turn.observation)
            actions = {turn.agent: random.choice(np.flatnonzero(turn.mask)) for turn in step.turns if turn.mask is not None}
            step = match.step(actions)
            rows: list[Turn | Departure] = [*step.turns, *step.departures]
            for row in rows:
                returns[row.agent] += row.reward
        assert {left.agent for left in step.departures} == set(match.agents)
        assert sum(returns.values()) == pytest.approx(0.0)


def test_a_seed_fixes_the_deal() -> None:
    match = make_match("openspiel/leduc_poker")
    deals = [match.reset(seed).turns[0].observation.tolist() for seed in (1, 1, *range(2, 12))]
    assert deals[0] == deals[1]
    assert len({tuple(deal) for deal in deals}) > 3


def test_game_parameters_come_from_env_config() -> None:
    assert len(make_match("openspiel/kuhn_poker", {"players": 3}).agents) == 3


def test_unknown_games_and_parameters_are_errors_with_a_remedy() -> None:
    with pytest.raises(UnknownName) as error:
        make_match("openspiel/leduc_pokker")
    assert "leduc_poker" in str(error.value.hint)
    with pytest.raises(ConfigError, match="cannot load"):
        make_match("openspiel/kuhn_poker", {"colour": 3})


def test_leduc_is_trained_by_self_play(tmp_path: Path) -> None:
    config = {
        "num_envs_per_worker": 16, "train_batch_size": 512, "minibatch_size": 128, "gamma": 1.0, "evaluation_duration": 20,
        "self_play": {"opponents": "mix", "latest": 0.5, "snapshot_every": 2, "window": 5},
    }  # fmt: skip
    result = ludus.train("openspiel/leduc_poker", stop={"timesteps": 4096}, config=config, local_dir=str(tmp_path))
    assert {"match/win/latest", "match/win/past"} <= set(result.metrics)
    assert 0.2 < result.metrics["match/win/past"] < 0.8


@pytest.mark.parametrize(
    ("env", "self_play", "message"),
    [
        ("openspiel/leduc_poker", {"window": 3}, "no effect without opponents"),
        ("mpe2/simple_spread_v3", {"opponents": "past"}, "needs two sides, and there are 3 agents"),
        (
            "mpe2/simple_spread_v3",
            {"opponents": "past", "sides": [["agent_0"], ["agent_1", "agent_x"]]},
            "'agent_x', which is no agent",
        ),
        ("mpe2/simple_spread_v3", {"opponents": "past", "sides": [["agent_0"], ["agent_1"]]}, "all agents, each once"),
    ],
)
def test_self_play_that_does_not_fit_the_game_is_refused(
    env: str, self_play: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ludus.train(env, stop={"timesteps": 64}, config={"self_play": self_play}, local_dir=str(tmp_path))
