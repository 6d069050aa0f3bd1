"""The package godot-rl drives the same game as `env: godot_rl`, and sees the same at every step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from bench.peers.godot_rl_steps import choose
from bench.peers.install import InstallError, ensure
from bench.peers.peers import GAME_CLIENTS
from ludus.envs.godot_rl.match import GodotMatch
from ludus.envs.pettingzoo import MatchStep
from tests.envs.godot_rl.stand_in import game_at
from tests.tools import skip

STEPS = 1000
PORT = 23_400 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
SEED = 5


@pytest.fixture(scope="module")
def official() -> list[str]:
    """The command that records steps with the official package, in its own virtual environment."""
    peer = GAME_CLIENTS["godot_rl"]
    try:
        ensure(peer)
    except InstallError as error:
        skip(f"godot-rl could not be installed: {error}")
    return [str(peer.python), str(peer.script("steps"))]


def action_of(match: GodotMatch, agent: int, step: int) -> Any:
    space = match.agents[list(match.agents)[agent]].action
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"move": space}
    chosen = {
        name: choose(step, agent, name, int(part.n), discrete=True)
        if isinstance(part, gym.spaces.Discrete)
        else np.array(choose(step, agent, name, (part.shape or (0,))[0], discrete=False))
        for name, part in parts.items()
    }
    return chosen if isinstance(space, gym.spaces.Dict) else chosen["move"]


def check_observation(seen: Any, recorded: dict[str, Any]) -> None:
    own = seen if isinstance(seen, dict) else {"obs": seen}
    assert own.keys() == recorded.keys()
    for name, value in own.items():
        given = recorded[name]
        if isinstance(given, str):  # the package decodes images only if the first agent has them
            given = np.frombuffer(bytes.fromhex(given), np.uint8).reshape(value.shape)
        np.testing.assert_array_equal(value, np.asarray(given, value.dtype))


@pytest.mark.parametrize("scene", ["chase", "hybrid", "policies"])
def test_both_see_the_same_at_every_step(official: list[str], tmp_path: Path, scene: str) -> None:
    game, recorded = game_at(tmp_path, scene), tmp_path / "steps.jsonl"
    words = [str(game), "--port", str(PORT), "--seed", str(SEED), "--steps", str(STEPS), "--record", str(recorded)]
    done = subprocess.run([*official, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    match = GodotMatch("godot_rl", {"env_path": str(game), "port": PORT, "seed": SEED, "done_agents": "continue"})
    try:
        # In a game that runs twice on the same port the seeds are the same.
        assert match._game.port == PORT
        assert [name.rpartition("_")[0] for name in match.agents] == lines[0]["policies"]
        match.reset(0)
        step: MatchStep = match.reset(0)  # the package was reset twice, too
        observations = [turn.observation for turn in step.turns]
        episodes = 0
        for number, line in enumerate(lines[1:], -1):
            if number >= 0:
                step = match.step({name: action_of(match, agent, number) for agent, name in enumerate(match.agents)})
                rewards = {turn.agent: turn.reward for turn in step.turns} | {left.agent: left.reward for left in step.departures}
                assert [rewards[name] for name in match.agents] == line["reward"]
                ended = [left.agent for left in step.departures if left.terminated]
                assert [name in ended for name in match.agents] == line["done"]
                episodes += len(ended)
                turns = match.reset(0).turns if step.over else step.turns
                observations = [turn.observation for turn in turns]
            for seen, own in zip(observations, line["obs"], strict=True):
                check_observation(seen, own)
        assert len(lines) == STEPS + 2
        assert episodes >= 40
    finally:
        match.close()
