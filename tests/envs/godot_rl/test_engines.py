"""A game in Godot's own physics that speaks the protocol of Godot RL Agents, stepped and trained."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ludus
from ludus.envs.godot_rl.match import GodotMatch
from ludus.envs.pettingzoo import Departure, Turn
from tests.tools import need

SOURCE = Path(__file__).parent / "chase" / "chase.gd"
PORT = 24_400 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_GODOT_4 = {
    "for Godot 3": "for Godot 4",
    "\tupdate()\n": "\tqueue_redraw()\n",
    "JSON.parse(stream.get_utf8_string()).result": "JSON.parse_string(stream.get_utf8_string())",
    "JSON.print(": "JSON.stringify(",
    "while stream.get_status() == StreamPeerTCP.STATUS_CONNECTING:\n": (
        "while stream.get_status() == StreamPeerTCP.STATUS_CONNECTING:\n\t\tstream.poll()\n"
    ),
    "while stream.get_available_bytes() == 0:\n": "while stream.get_available_bytes() == 0:\n\t\tstream.poll()\n",
}
_SCENE = '[gd_scene load_steps=2 format={format}]\n{script}\n[node name="Chase" type="Node2D"]\nscript = ExtResource({id})\n'


def make_game(directory: Path, engine: str) -> Path:
    """Write the project for an engine, and a program that starts it like an exported game."""
    text, four = SOURCE.read_text(encoding="utf-8"), engine == "godot4"
    for three, other in _GODOT_4.items() if four else ():
        assert three in text, three
        text = text.replace(three, other)
    project = directory / "project"
    project.mkdir()
    (project / "chase.gd").write_text(text)
    path = 'path="res://chase.gd" type="Script"'
    scene = (
        _SCENE.format(format=3, script=f'[ext_resource {path} id="1"]', id='"1"')
        if four
        else _SCENE.format(format=2, script=f"[ext_resource {path} id=1]", id=" 1 ")
    )
    (project / "main.tscn").write_text(scene)
    (project / "project.godot").write_text(
        f'config_version={5 if four else 4}\n[application]\nconfig/name="chase"\nrun/main_scene="res://main.tscn"\n'
    )
    game = directory / "chase.x86_64"
    game.write_text(f'#!/bin/sh\nexport HOME={directory} LC_ALL=C.UTF-8\nexec {need(engine)} --path {project} "$@"\n')
    game.chmod(0o755)
    return game


@pytest.fixture(params=["godot3-server", "godot4"])
def game(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_game(tmp_path, request.param)


def test_pucks_that_are_pushed_to_their_targets_arrive(game: Path) -> None:
    match = GodotMatch("godot_rl", {"env_path": str(game), "port": PORT, "framerate": 60, "action_repeat": 4})
    try:
        step, totals = match.reset(0), dict.fromkeys(match.agents, 0.0)
        for _ in range(100):
            actions = {}
            for turn in step.turns:
                way, speed = turn.observation[:2], turn.observation[2:]
                actions[turn.agent] = {"move": np.clip(4 * way - 2 * speed, -1, 1), "brake": 0}
            step = match.step(actions)
            outcomes: list[Turn | Departure] = [*step.turns, *step.departures]
            for one in outcomes:
                totals[one.agent] += one.reward
            if step.over:
                break
        assert step.over
        assert all(total > 1.0 for total in totals.values()), totals  # 1 for the target, and the way to it
    finally:
        match.close()


@pytest.mark.long
def test_a_policy_learns_in_the_engine(game: Path, tmp_path: Path) -> None:
    result = ludus.train(
        "godot_rl",
        run="PPO",
        stop={"timesteps": 12_000},
        local_dir=str(tmp_path / "runs"),
        num_envs_per_worker=2,
        train_batch_size=1000,
        lr=1e-3,
        evaluation_interval=0,
        env_config={"env_path": str(game), "port": PORT, "framerate": 60, "action_repeat": 4, "done_agents": "continue"},
    )
    assert result.episode_return_mean > 4
