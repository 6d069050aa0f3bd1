"""The example league on two-player Pong, with short matches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.core import trust
from ludus.league.players import PlayerRole
from ludus.league.runtime.coordinator import run_league
from ludus.league.runtime.league_file import LeagueConfig, check_players
from ludus.tournament.contestants import TrainedContestant, contestant

pytest.importorskip("multi_agent_ale_py", reason="pip install 'ludus[pettingzoo-atari]'")
pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples/leagues/pong.yaml"


def test_the_league_trains_and_its_snapshots_play_random_play_and_the_script(tmp_path: Path) -> None:
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    data["config"] |= {"num_envs_per_worker": 4, "train_batch_size": 256, "minibatch_size": 128, "num_epochs": 1}
    data["config"]["preprocess"] |= {"max_episode_steps": 60}
    data["snapshots"] = {"main": {"min_steps": 256, "max_steps": 256}}
    data |= {"turn_steps": 256, "evaluation": {"matches": 4, "pairs": "fixed"}, "stop": {"timesteps": 512}}
    trust.allow(data)
    config = LeagueConfig.model_validate(data)
    resolved = check_players(config, tmp_path)
    result = run_league(config, tmp_path, yaml.safe_dump(data).encode(), resolved, lambda line: None)
    players, payoff = result.state.players, result.state.payoff
    assert result.stopped_by == "timesteps 512"
    assert not [one for one in players.values() if one.quarantine]
    assert {one.name for one in players.values() if one.role is PlayerRole.HISTORICAL} == {"main.1", "main.2"}
    assert all(payoff.record("main.1", other).games == 4 for other in ("random", "follower"))
    assert payoff.record("follower", "random").games == 4
    assert payoff.record("follower", "random").gain > 0, "sixty decisions are one or two points"
    snapshot = contestant(tmp_path / "players/main.1")
    assert isinstance(snapshot, TrainedContestant)
    assert snapshot.env == "pettingzoo/pong_v3"
