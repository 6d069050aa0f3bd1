"""Self-play in environments with several agents: who plays the other side, with which version, and whose steps are learned from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.config.schema import SelfPlayConfig
from ludus.core.types import Segments
from ludus.envs.pettingzoo import match_of
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.match_opponents import result_names, seat_self_play
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory

LENGTH, ACTIONS = 7, 50
AGENTS = ("a", "b")


class Duel:
    """Two agents act at once, LENGTH times; whoever chose the larger number more often wins. Remembers the actions of all matches."""

    possible_agents = list(AGENTS)  # noqa: RUF012
    metadata: dict[str, Any] = {}  # noqa: RUF012 - PettingZoo declares it so

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.matches: list[list[dict[str, int]]] = []

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(ACTIONS)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(AGENTS)
        self.matches.append([])
        return self._observe(), {agent: {} for agent in AGENTS}

    def _observe(self) -> dict[str, Any]:
        return {agent: np.array([AGENTS.index(agent), 0], np.float32) for agent in AGENTS}

    def step(self, actions: dict[str, Any]) -> Any:
        self.matches[-1].append({agent: int(action) for agent, action in actions.items()})
        over = len(self.matches[-1]) == LENGTH
        gain = float(np.sign(actions["a"] - actions["b"]))
        if over:
            self.agents = []
        infos: dict[str, Any] = {agent: {} for agent in AGENTS}
        return self._observe(), {"a": gain, "b": -gain}, dict.fromkeys(AGENTS, over), dict.fromkeys(AGENTS, False), infos

    def close(self) -> None:
        pass


class Versions:
    """A policy that always chooses the number of its version."""

    def __init__(self, **network: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            space = Duel().observation_space("a")
            self.policy = Policy(space, gym.spaces.Discrete(ACTIONS), NetworkConfig(fcnet_hiddens=(4,), **network))
        self.version = 0
        self.learn()

    def newest(self) -> tuple[Policy, int]:
        return self.policy, self.version

    def learn(self) -> None:
        self.version += 1
        weights = {name: np.zeros_like(value) for name, value in self.policy.weights().items()}
        bias = next(name for name, value in weights.items() if value.shape == (ACTIONS,))
        weights[bias][self.version] = 100.0
        self.policy.load_weights(weights)


class SelfPlay:
    def __init__(self, settings: SelfPlayConfig, *, copies: int = 3, batch: int = 60, seed: int = 0, **network: Any) -> None:
        self.envs: list[Duel] = []
        self.source = Versions(**network)

        def make() -> Any:
            self.envs.append(Duel())
            return match_of(self.envs[-1], "duel")

        spec = session_spec(self.source.policy, 16, "m")
        spec = type(spec)(**{**spec.__dict__, "results": result_names(settings)})
        self.batches = MatchBatches({"m": LocalMemory(spec, 1, 500)})
        mapping = dict.fromkeys(AGENTS, "m")
        self.sampler = MultiAgentSampler(
            EnvCopies(make, copies), mapping, {"m": self.source}, self.batches, MultiAgentSettings(batch), seed,
            make_seating=seat_self_play(settings, mapping, self.source, seed),
        )  # fmt: skip

    def run(self, updates: int) -> list[Segments]:
        taken: list[Segments] = []
        while len(taken) < updates:
            self.sampler.step()
            if (batch := self.batches.take(0)) is not None:
                taken.append(batch)
                self.batches.release(batch)
                self.source.learn()
        return taken

    def whole_matches(self) -> list[list[dict[str, int]]]:
        return [match for env in self.envs for match in env.matches if len(match) == LENGTH]


def is_constant(match: list[dict[str, int]], agent: str) -> bool:
    return len({step[agent] for step in match}) == 1


def test_a_past_opponent_keeps_its_version_for_the_whole_match() -> None:
    play = SelfPlay(SelfPlayConfig(opponents="past", every=1, keep=8, period=5))
    play.run(20)
    matches = play.whole_matches()
    assert len(matches) > 60
    # The learning side may change its version in a match, when a batch is complete; the other side never does.
    assert all(is_constant(match, "a") or is_constant(match, "b") for match in matches)
    opponents = [min(match[0].values()) for match in matches]
    assert len(set(opponents)) >= 8  # many different past versions


def test_only_the_learning_side_is_recorded() -> None:
    play = SelfPlay(SelfPlayConfig(opponents="past", every=3, keep=3))
    for batch in play.run(12):
        actions, versions = batch.action[batch.valid], batch.version[batch.valid]
        np.testing.assert_array_equal(actions, versions)  # a past version would have chosen an earlier number


@pytest.mark.parametrize(("settings", "sides"), [({}, 2), ({"swap_sides": False}, 1)])
def test_against_itself_both_sides_are_recorded_unless_the_side_is_fixed(settings: dict[str, Any], sides: int) -> None:
    play = SelfPlay(SelfPlayConfig(opponents="latest", **settings))
    recorded = sum(int(batch.valid.sum()) for batch in play.run(6))
    acted = play.sampler.matches.agent_steps - play.sampler.unlearned_steps()
    assert recorded == pytest.approx(acted * sides / len(AGENTS), abs=2 * len(play.envs))


def test_both_sides_learn_in_turn_unless_the_side_is_fixed() -> None:
    def sides(settings: SelfPlayConfig) -> set[float]:
        return {float(x) for batch in SelfPlay(settings).run(4) for x in batch.observation[:-1][batch.valid][:, 0]}

    assert sides(SelfPlayConfig(opponents="latest")) == {0.0, 1.0}
    assert sides(SelfPlayConfig(opponents="latest", swap_sides=False)) == {0.0}


def test_latest_means_the_newest_version() -> None:
    play = SelfPlay(SelfPlayConfig(opponents="latest"))
    play.run(5)
    assert all(step["a"] == step["b"] for match in play.whole_matches() for step in match)


def test_a_mix_plays_both_kinds_by_their_share_and_reports_results() -> None:
    play = SelfPlay(SelfPlayConfig(opponents="mix", latest=0.25, every=1, keep=10))
    batches = play.run(30)
    assert batches[0].spec.results == ("win/latest", "draw/latest", "win/past", "draw/past")
    sums = np.sum([batch.results.sum(axis=0) for batch in batches], axis=0)
    assert sums[0, 1] / (sums[0, 1] + sums[2, 1]) == pytest.approx(0.25, abs=0.08)
    assert sums[1, 0] == sums[1, 1]  # all matches against itself are drawn
    assert sums[2, 0] > 0.7 * sums[2, 1]  # a past version chooses smaller numbers


def test_recurrent_opponents_have_a_state_of_their_own() -> None:
    play = SelfPlay(SelfPlayConfig(opponents="past", every=1, keep=4), core="lstm")
    batches = play.run(6)
    assert all(np.isfinite(batch.value).all() for batch in batches)
    assert all(is_constant(match, "a") or is_constant(match, "b") for match in play.whole_matches())


def test_the_same_seed_plays_the_same_matches() -> None:
    def actions(seed: int) -> list[Any]:
        play = SelfPlay(SelfPlayConfig(opponents="mix", latest=0.5, every=1, keep=10, period=10), seed=seed)
        play.run(10)
        return [env.matches for env in play.envs]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
