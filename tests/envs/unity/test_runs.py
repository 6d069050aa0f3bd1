"""Whole runs in Unity players: training, evaluation, rollouts, workers, self-play."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("google.protobuf")

import ludus
from ludus.envs.pettingzoo import make_match
from tests.unity_player.executable import write_player
from tests.unity_player.ports import first_port

FIRST_PORT = first_port(24_000)
SMALL: dict[str, Any] = {
    "num_envs": 1,
    "train_batch_size": 64,
    "minibatch_size": 64,
    "num_epochs": 1,
    "model": {"fcnet_hiddens": [16]},
    "evaluation_duration": 2,
}


def players(directory: Path) -> list[psutil.Process]:
    """Players of this test that run."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(directory) in (process.info["cmdline"] or [])]


@pytest.fixture(autouse=True)
def no_player_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert players(tmp_path) == []


def settings(directory: Path, scene: str, **env_config: Any) -> dict[str, Any]:
    marked = {"additional_args": ["--mark", str(directory)]}  # which the player ignores, and `players` finds
    player = write_player(directory, scene, areas=2)
    return {"file_name": str(player), "base_port": FIRST_PORT, "no_graphics": True, **marked, **env_config}


def test_players_of_a_test_are_found(tmp_path: Path) -> None:
    with contextlib.closing(make_match("unity", settings(tmp_path, "walk"))) as match:
        match.reset(0)
        assert len(players(tmp_path)) == 1


def test_a_run_trains_evaluates_and_is_rolled_out(tmp_path: Path) -> None:
    """Masks, which the player checks."""
    logs = tmp_path / "logs"
    config = settings(tmp_path, "walk", log_folder=str(logs))
    more = SMALL | {"evaluation_duration": 5}
    result = ludus.train("unity", stop={"iterations": 2}, local_dir=tmp_path, env_config=config, **more)
    assert result.metrics["timesteps"] >= 128
    assert result.metrics["evaluation/episodes"] == 5
    assert len(list(logs.iterdir())) < 5, "one for training and one for evaluations"  # more if other programs take the ports
    agent = ludus.load(result.run_dir)
    mask = np.array([1, 0, 0, 1, 0])
    action, _ = agent.act(np.zeros(7, np.float32), mask=mask)
    assert list(action) == [0, 0]
    played = ludus.rollout(result.run_dir, 2, out=tmp_path / "steps.npz")
    assert len(played.lengths) == 2


def test_two_teams_learn_by_self_play(tmp_path: Path) -> None:
    config = settings(tmp_path, "soccer", teams=["blue", "red"])
    sides = [[f"{team}_{number}" for number in range(4)] for team in ("blue", "red")]  # of two areas
    result = ludus.train(
        "unity",
        stop={"iterations": 2},
        local_dir=tmp_path,
        env_config=config,
        self_play={"opponents": "mix", "snapshot_every": 1, "sides": sides},
        **{**SMALL, "evaluation_duration": 0},
    )
    assert result.metrics["iterations"] == 2


def test_workers_have_players_of_their_own(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    config = settings(tmp_path, "ball", log_folder=str(logs))
    more = SMALL | {"num_workers": 2, "train_batch_size": 256}
    result = ludus.train("unity", stop={"iterations": 3}, local_dir=tmp_path, env_config=config, **more)
    assert result.metrics["iterations"] == 3
    assert len(list(logs.glob("Player-*.log"))) >= 2


@pytest.mark.parametrize("scene", ["ball", "soccer"])
def test_the_examples_run(tmp_path: Path, scene: str) -> None:
    smaller: dict[str, Any] = {"num_workers": 0, "train_batch_size": 32, "minibatch_size": 32, "num_epochs": 1}
    config = settings(tmp_path, scene)
    if scene == "soccer":
        config |= {"file_name": str(write_player(tmp_path, scene)), "teams": ["blue", "red"]}
    file = Path(__file__).parents[3] / "examples" / "unity" / f"{scene}.yaml"
    result = ludus.train(file=file, stop={"iterations": 1}, local_dir=tmp_path, env_config=config, **smaller)
    assert result.metrics["iterations"] == 1
