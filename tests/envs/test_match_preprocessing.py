"""Preprocessing of several agents, compared with that of one: each agent of these games has an environment of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from ludus.config.schema import PreprocessConfig
from ludus.core.tree import Tree, leaves
from ludus.envs.matches.preprocessing import preprocess_match
from ludus.envs.pettingzoo import Departure, MatchStep, MultiAgentMatch, make_match, match_of
from ludus.envs.preprocessing import preprocess_env
from ludus.envs.vector_env import make_environments
from ludus.errors import ConfigError
from tests.matches import ScriptParallel, ScriptTurns, Simple

AGENTS = {"long": 12, "short": 7, "middle": 9}
"""Agent → steps of its episode."""


class Screen(gym.Env[Any, Any]):
    """Random pictures and numbers; rewards depend on the actions. Ends after `length` steps, terminated if that is odd."""

    observation_space = gym.spaces.Dict(
        {"screen": gym.spaces.Box(0, 255, (6, 9, 3), np.uint8), "speed": gym.spaces.Box(-2, 2, (2,), np.float32)}
    )
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length: int) -> None:
        self.length = length

    def _see(self) -> dict[str, Any]:
        return {
            "screen": self.random.integers(256, size=(6, 9, 3), dtype=np.uint8),
            "speed": self.random.uniform(-2, 2, 2).astype(np.float32),
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.random, self.t = np.random.default_rng(seed), 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= self.length
        reward = (int(action) + 1) * (2.0 if self.t % 2 else -0.7)
        return self._see(), reward, over and self.length % 2 == 1, over and self.length % 2 == 0, {}


class Screens(ParallelEnv):  # type: ignore[misc] # PettingZoo has no types
    """One `Screen` for each agent; an agent leaves when its own ends."""

    metadata: ClassVar[dict[str, Any]] = {"name": "screens", "render_modes": []}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents, self.agents = list(AGENTS), list[str]()
        self.envs = {agent: Screen(length) for agent, length in AGENTS.items()}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Screen.observation_space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Screen.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(AGENTS)
        seen = {agent: env.reset(seed=seed_of(agent, seed or 0))[0] for agent, env in self.envs.items()}
        return seen, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        made = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        self.agents = [agent for agent in self.agents if agent not in made or not (made[agent][2] or made[agent][3])]
        return tuple({agent: result[part] for agent, result in made.items()} for part in range(5))


def seed_of(agent: str, seed: int) -> int:
    return 1000 * list(AGENTS).index(agent) + seed


def action_of(agent: str, number: int) -> int:
    return (number + len(agent)) % 3


def take_turns() -> Any:
    return parallel_to_aec(Screens())


Steps = list[tuple[Tree, float, bool, bool]]
"""Of one agent: the observation before its action, the reward for it, and whether its episode was terminated or truncated then."""


def play_alone(agent: str, config: PreprocessConfig, seed: int) -> tuple[Steps, Tree]:
    """What the preprocessing of one environment gives, and the last observation."""
    env = preprocess_env(Screen(AGENTS[agent]), config, "screen")
    observation, _ = env.reset(seed=seed_of(agent, seed))
    steps: Steps = []
    while True:
        before = observation
        observation, reward, terminated, truncated, _ = env.step(action_of(agent, len(steps)))
        steps.append((before, float(reward), terminated, truncated))
        if terminated or truncated:
            return steps, observation


def play_together(match: MultiAgentMatch, seed: int) -> dict[str, tuple[Steps, Tree]]:
    open_steps: dict[str, list[Any]] = {agent: [] for agent in match.agents}
    whole: dict[str, tuple[Steps, Tree]] = {}

    def pay(agent: str, reward: float, left: Departure | None = None) -> None:
        if open_steps[agent]:
            ends = (False, False) if left is None else (left.terminated, left.truncated)
            open_steps[agent][-1] = (open_steps[agent][-1][0], reward, *ends)

    result = match.reset(seed)
    while True:
        for left in result.departures:
            pay(left.agent, left.reward, left)
            whole[left.agent] = open_steps[left.agent], left.observation
        if result.over:
            return whole
        actions = {}
        for turn in result.turns:
            pay(turn.agent, turn.reward)
            actions[turn.agent] = action_of(turn.agent, len(open_steps[turn.agent]))
            open_steps[turn.agent].append((turn.observation, None, False, False))
        result = match.step(actions)


def assert_same(one: Tree, other: Tree) -> None:
    parts, others = dict(leaves(one)), dict(leaves(other))
    assert parts.keys() == others.keys()
    for path, value in parts.items():
        np.testing.assert_array_equal(value, others[path], err_msg=path)
        assert np.asarray(value).dtype == np.asarray(others[path]).dtype


CONFIGS: dict[str, dict[str, Any]] = {
    "grey": {"grey": True},
    "resize": {"resize": [3, 4]},
    "stack": {"stack": 3},
    "clip": {"clip_reward": True},
    "clip between": {"clip_reward": [-1.0, 1.5]},
    "scale": {"scale": True},
    "flatten": {"flatten": True},
    "drop": {"drop": ["speed"]},
    "all of it": {"drop": ["speed"], "grey": True, "resize": [3, 3], "stack": 2, "clip_reward": [-0.5, 2.5]},
}


@pytest.mark.parametrize("make", [Screens, take_turns], ids=["at once", "in turn"])
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_every_agent_observes_and_earns_what_it_would_alone(make: Callable[[], Any], settings: dict[str, Any]) -> None:
    _compare(make, PreprocessConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"frame_skip": 2},
        {"frame_skip": 5, "clip_reward": [-3.0, 3.0]},
        {"frame_skip": 2, "max_episode_steps": 3, "stack": 2},
        {"max_episode_steps": 4},
    ],
    ids=str,
)
def test_actions_are_repeated_and_episodes_limited_as_alone(settings: dict[str, Any]) -> None:
    _compare(Screens, PreprocessConfig(**settings))


def _compare(make: Callable[[], Any], config: PreprocessConfig) -> None:
    match = preprocess_match(match_of(make(), "screens", config.drop or ()), config)
    for seed in (3, 4):  # the second match: nothing of the first is left in a stack
        together = play_together(match, seed)
        for agent in AGENTS:
            (steps, last), (expected, expected_last) = together[agent], play_alone(agent, config, seed)
            space = preprocess_env(Screen(1), config, "screen").observation_space
            assert match.agents[agent].observation == space
            assert [(reward, *ends) for _, reward, *ends in steps] == [
                (pytest.approx(reward), *ends) for _, reward, *ends in expected
            ]
            for (seen, *_), (other, *_) in zip(steps, expected, strict=True):
                assert_same(seen, other)
            if last is not None:
                assert_same(last, expected_last)
            assert (last is None) == expected[-1][2], "a terminated episode needs no last observation"


def test_videos_with_skipped_frames_have_the_speed_of_the_game() -> None:
    skipped = preprocess_match(match_of(Simple(), "simple"), PreprocessConfig(frame_skip=4, stack=2))
    assert (Simple.metadata["render_fps"], skipped.metadata["render_fps"]) == (10, 2.5)


def test_matches_start_with_some_idle_steps_whose_rewards_do_not_count() -> None:
    env = Screens()
    match = preprocess_match(match_of(env, "screens"), PreprocessConfig(noop_max=3))
    steps = []
    for seed in range(60):
        began = match.reset(seed)
        steps.append(env.envs["long"].t)
        assert [turn.reward for turn in began.turns] == [0.0] * 3
        assert not began.departures
    assert set(steps) == {0, 1, 2, 3}
    again = [(match.reset(seed), env.envs["long"].t)[1] for seed in range(60)]
    assert again == steps


def test_no_reward_is_lost_whoever_comes_waits_and_leaves() -> None:
    for settings in ({"frame_skip": 3}, {"max_episode_steps": 4}, {"frame_skip": 2, "max_episode_steps": 3, "stack": 2}):
        env = ScriptParallel()
        match = preprocess_match(match_of(env, "script"), PreprocessConfig(**settings))
        _check_books(match, env, 40)


def test_agents_in_turn_leave_at_the_limit_with_what_they_have_earned() -> None:
    env = ScriptTurns()
    match = preprocess_match(match_of(env, "script"), PreprocessConfig(max_episode_steps=7))
    cut = [left for step in _check_books(match, env, 40) for left in step.departures if left.truncated]
    assert len(cut) > 60
    assert all(left.observation is not None for left in cut)


def _check_books(match: MultiAgentMatch, env: Any, matches: int) -> list[MatchStep]:
    """Play at random; the rewards of turns and departures are those that the game has paid. Returns the last steps."""
    random, last = np.random.default_rng(0), []
    for seed in range(matches):
        step, paid = match.reset(seed), 0.0
        in_match = {turn.agent for turn in step.turns}
        while not step.over:
            step = match.step({turn.agent: int(random.integers(4)) for turn in step.turns})
            paid += sum(turn.reward for turn in step.turns) + sum(left.reward for left in step.departures)
            in_match = (in_match - {left.agent for left in step.departures}) | {turn.agent for turn in step.turns}
        assert paid == pytest.approx(env.books.paid, abs=1e-5)
        assert in_match == set(), "all agents have left"
        last.append(step)
    return last


class Told(Simple):
    """Observations with a text."""

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Dict({"seen": super().observation_space(agent), "mission": gym.spaces.Text(20)})

    def _see(self, agent: str) -> Any:
        return {"seen": super()._see(agent), "mission": "go"}


def test_a_part_that_networks_cannot_read_can_be_dropped() -> None:
    match = match_of(Told(), "told", ["mission"])
    assert list(match.agents["a"].observation) == ["seen"]  # type: ignore[call-overload] # a Dict
    assert list(match.reset(0).turns[0].observation) == ["seen"]
    with pytest.raises(ConfigError, match=r"the observation of a\.mission is a Text space.*drop"):
        match_of(Told(), "told")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("pettingzoo/tictactoe_v3", {"frame_skip": 2}, r"preprocess\.frame_skip: the agents of .* act in turn"),
        ("pettingzoo/tictactoe_v3", {"noop_max": 2}, r"preprocess\.noop_max: the agents of .* act in turn"),
        ("tests.matches:make_simple", {"episodic_life": True}, r"preprocess\.episodic_life"),
        ("tests.matches:make_simple", {"standard": True}, r"preprocess\.standard"),
        ("tests.matches:make_simple", {"resize": [8, 8]}, r"preprocess\.resize: 'a' of .* has no image observations"),
        ("tests.matches:make_simple", {"drop": ["mission"]}, r"preprocess\.drop: the observation of no agent of .* 'mission'"),
        ("openspiel/kuhn_poker", {"drop": ["mission"]}, r"preprocess\.drop"),
        ("openspiel/kuhn_poker", {"frame_skip": 2}, r"preprocess\.frame_skip"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_match(name, preprocess=PreprocessConfig(**settings))


def marks(match: MultiAgentMatch, part: str | None) -> dict[str, list[float]]:
    """What marks each agent in its first observation, which is in its space: a part, or the last numbers of a vector."""
    found = {}
    for turn in match.reset(1).turns:
        space, seen = match.agents[turn.agent].observation, turn.observation
        assert space.contains(seen), space
        found[turn.agent] = (seen[-len(match.agents) :] if part is None else seen[part]).tolist()
    return found


@pytest.mark.parametrize("make", [Screens, take_turns], ids=["at once", "in turn"])
def test_an_indicator_tells_the_agents_apart(make: Callable[[], Any]) -> None:
    parts = preprocess_match(match_of(make(), "screens"), PreprocessConfig(agent_indicator=True, stack=2))
    agents = list(AGENTS)
    expected = {agent: np.eye(3)[agents.index(agent)].tolist() for agent in agents}
    found = marks(parts, "agent")
    assert found == {agent: expected[agent] for agent in found}
    flat = preprocess_match(match_of(make(), "screens"), PreprocessConfig(agent_indicator=True, flatten=True))
    assert marks(flat, None) == found
    plain = preprocess_match(match_of(make(), "screens"), PreprocessConfig(stack=2))
    for one, other in zip(parts.reset(1).turns, plain.reset(1).turns, strict=True):
        rest = {key: value for key, value in dict(one.observation).items() if key != "agent"}
        assert_same(rest, other.observation)


def test_an_indicator_stands_beside_an_image() -> None:
    config = PreprocessConfig(agent_indicator=True, drop=["speed"], flatten=False)
    match = preprocess_match(match_of(Screens(), "screens", ["speed"]), config)
    assert set(match.agents["long"].observation.spaces) == {"screen", "agent"}  # type: ignore[attr-defined]
    alone = preprocess_match(match_of(Pictures(), "pictures"), PreprocessConfig(agent_indicator=True, stack=2))
    assert marks(alone, "agent") == {"left": [1.0, 0.0], "right": [0.0, 1.0]}
    assert alone.agents["left"].observation["observation"].shape == (4, 4, 2)  # type: ignore[index]


class Pictures(ParallelEnv):  # type: ignore[misc] # PettingZoo has no types
    """Two agents that see the same picture."""

    metadata: ClassVar[dict[str, Any]] = {"name": "pictures", "render_modes": []}
    render_mode = None
    possible_agents: ClassVar[list[str]] = ["left", "right"]

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(0, 255, (4, 4, 1), np.uint8)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, np.full((4, 4, 1), 7, np.uint8)), {agent: {} for agent in self.agents}


def test_an_indicator_needs_several_agents() -> None:
    with pytest.raises(ConfigError, match=r"preprocess\.agent_indicator: CartPole-v1 has one agent"):
        make_environments("CartPole-v1", 1, preprocess=PreprocessConfig(agent_indicator=True))


def test_games_of_openspiel_have_stacks_and_limits_too() -> None:
    match = make_match("openspiel/leduc_poker", preprocess=PreprocessConfig(stack=2, max_episode_steps=2))
    size = int(np.prod(make_match("openspiel/leduc_poker").agents["player_0"].observation.shape or ()))
    assert match.agents["player_0"].observation.shape == (2 * size,)
    step = match.reset(0)
    for _ in range(2):
        assert step.turns[0].observation.shape == (2 * size,)
        step = match.step({turn.agent: int(np.flatnonzero(turn.mask)[0]) for turn in step.turns if turn.mask is not None})
    assert step.over
    assert {left.agent for left in step.departures} == {"player_0", "player_1"}
