"""Launch spec, rules and bot of the Doom duel; tests/system/test_gamecore_games.py plays with engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.errors import UsageError
from ludus.games.doom.duel import DuelRules
from ludus.games.doom.engine import PRESSES, PlayerView
from ludus.games.doom.launch_spec import ActorAddress, LaunchSpec, write_result
from ludus.games.doom.player import BotPlayer


def write_config(directory: Path, **config: Any) -> dict[str, str]:
    path = directory / "config.json"
    path.write_text(
        json.dumps({"runtime_id": "m1", "camps": [None, None], "seed": 7, "max_frames": None, "options": {}} | config)
    )
    return {"LUDUS_GAME_CONFIG": str(path), "LUDUS_GAME_RESULT": str(directory / "result.json")}


def test_the_launch_spec_is_read_from_the_environment(tmp_path: Path) -> None:
    environment = write_config(
        tmp_path, camps=[None, {"url": "http://10.0.0.5:8000", "timeout_s": 2.5}], eval_mode=True, max_frames=90
    )
    found = LaunchSpec.from_environment(environment | {"LUDUS_GAME_TOKEN_0": "other", "LUDUS_GAME_TOKEN_1": "secret"})
    assert found.camps == (None, ActorAddress("http://10.0.0.5:8000", 2.5, "secret"))
    assert (found.runtime_id, found.seed, found.max_frames, found.eval_mode) == ("m1", 7, 90, True)
    assert (found.directory, found.result) == (tmp_path, tmp_path / "result.json")
    assert "secret" not in repr(found)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"runtime_id": "m", "camps": [{}]}', '{"runtime_id": "m", "seed": "x"}'])
def test_an_invalid_launch_spec_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        LaunchSpec.from_environment({"LUDUS_GAME_CONFIG": str(tmp_path / "config.json")})


def test_the_missing_variable_is_named() -> None:
    with pytest.raises(UsageError, match="LUDUS_GAME_CONFIG"):
        LaunchSpec.from_environment({})


def test_the_shorter_time_limit_applies(tmp_path: Path) -> None:
    def rules(**config: Any) -> DuelRules:
        return DuelRules.of(LaunchSpec.from_environment(write_config(tmp_path, **config)))

    assert rules() == DuelRules(tics=120 * 35, frags=0, frame_skip=4)
    assert rules(options={"seconds": 2, "frags": 5, "frame_skip": 1}) == DuelRules(70, 5, 1)
    assert rules(options={"seconds": 2}, max_frames=30).tics == 30
    assert rules(options={"seconds": 2}, max_frames=3000).tics == 70


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": "long"}, {"frags": -1}, {"frame_skip": 0}])
def test_invalid_rules_are_rejected(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        DuelRules.of(LaunchSpec.from_environment(write_config(tmp_path, options=options)))


def test_every_action_presses_its_buttons() -> None:
    left, right, fire = 0, 1, 2
    pressed = [{button for button in (left, right, fire) if keys[button]} for keys in PRESSES]
    assert pressed == [set(), {left}, {right}, {fire}, {left, fire}, {right, fire}]


def view(enemy: float | None) -> PlayerView:
    return PlayerView(np.zeros((84, 84, 1), np.uint8), (0, 0), False, enemy)


@pytest.mark.parametrize(("enemy", "most"), [(-0.5, {1}), (0.5, {2}), (0.0, {3}), (0.06, {5}), (-0.06, {4})])
def test_the_bot_moves_in_front_of_the_enemy_and_fires(enemy: float, most: set[int]) -> None:
    chosen = [BotPlayer(seed).act(view(enemy), 0.0) for seed in range(200)]
    meant = sum(action in most for action in chosen)
    assert meant > 100, "most of the time"
    assert set(chosen) - most <= {1, 2}, "else it evades"


def test_the_bot_is_deterministic() -> None:
    def played(seed: int) -> list[int]:
        player = BotPlayer(seed)
        return [player.act(view(None if n % 3 else 0.1), 0.0) for n in range(50)]

    assert played(3) == played(3) != played(4)


def test_a_result_is_written_atomically(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", {"winner": None, "frags": [1, 1]})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == {"winner": None, "frags": [1, 1]}
    write_result(None, {})


def test_without_vizdoom_the_extra_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.modules['vizdoom'] = None; from ludus.games.doom.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=write_config(tmp_path))
    assert done.returncode == 2
    assert "ludus[doom]" in done.stderr
