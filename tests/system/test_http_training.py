"""A game that knows nothing but HTTP is learned, and the result plays the live game as well as it was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.sampling.trained_agent import TrainedAgent
from tests.cli.programs import REPOSITORY, program

EXAMPLE = REPOSITORY / "examples" / "cartpole_http"
LIMIT_S = 240.0
SEED, MATCHES = 1000, 100

pytestmark = pytest.mark.system


def game(url: str, *words: str) -> subprocess.Popen[str]:
    """The game in a process of its own; it imports nothing of ours."""
    port = url.removesuffix("/step").rpartition(":")[2]
    command = [sys.executable, str(EXAMPLE / "game.py"), "--port", port, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The last line that it prints, once it has ended."""
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    return last


def score(agent: TrainedAgent, seed: int) -> int:
    """One match of the environment that the game plays, without HTTP."""
    env: Any = gym.make("CartPole-v1").unwrapped
    observation, _ = env.reset(seed=seed)
    for steps in range(1, 501):
        observation, _, fell, _, _ = env.step(agent.act(observation)[0])
        if fell:
            return steps
    return 500


def trained(run: Path, workers: int) -> None:
    """Train it as the example says; games play in `workers` processes, or beside the learner."""
    where = ["--set", "config.env_config.port=0", "--project", str(run.parent), "--trial", run.name]
    settings = ["--set", f"config.num_workers={workers}", "--json"]
    with program("train", "-f", EXAMPLE / "cartpole.yaml", *where, *settings, listens=False) as training:
        playing = game(training.wait_for("games connect to http://").split()[-1])
        try:
            code = training.process.wait(LIMIT_S)
            _, out, err = training.finish()
            games = told(playing)
        finally:
            playing.kill()
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["stopped_by"] == "episode_return_mean", result
    assert result["episode_return_mean"] >= 475
    assert games["steps"] >= result["timesteps"], "what was learned from was played"
    last = read_jsonl(run / "metrics.jsonl")[-1]
    assert (last["games/failed"], last["games/silent"], last["games/refused"]) == (0, 0, 0)


@pytest.mark.long
def test_training_through_http_learns_cartpole_and_the_served_agent_scores_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, workers=0)
    with program("serve", run, "--port", "0", "--json", listens=False) as service:
        port = json.loads(service.wait_for('"port"'))["port"]
        playing = game(f"http://127.0.0.1:{port}/step", "--matches", str(MATCHES), "--seed", str(SEED))
        try:
            live = told(playing)
        finally:
            playing.kill()
    assert live["matches"] == MATCHES
    assert live["mean_score"] >= 475

    agent = ludus.load(run)
    alone = [score(agent, SEED + number) for number in range(MATCHES)]
    # The service decides for many matches at once, in sums of another order: a match on the edge may go another way.
    assert sum(one == other for one, other in zip(alone, live["scores"], strict=True)) >= 95


@pytest.mark.long
def test_games_that_play_in_workers_are_learned_too(tmp_path: Path) -> None:
    trained(tmp_path / "run", workers=1)
