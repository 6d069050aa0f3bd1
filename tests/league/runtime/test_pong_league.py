"""The example league on two-player Pong, with short matches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.core import trust
from ludus.league.players import PlayerRole
from ludus.league.runtime.coordinator import LeagueResult, run_league
from ludus.league.runtime.league_file import LeagueConfig, check_players
from ludus.tournament.contestants import TrainedContestant, contestant

pytest.importorskip("multi_agent_ale_py", reason="pip install 'ludus[pettingzoo-atari]'")
pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples/leagues/pong.yaml"

IMAGES = {"frame_skip": 4, "grey": True, "resize": [42, 42], "stack": 2, "agent_indicator": True}


def shrink(max_episode_steps: int) -> dict[str, Any]:
    """The example with the same parts, for a test: two turns of short matches and small batches."""
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    data["config"] |= {"num_envs_per_worker": 4, "train_batch_size": 128, "minibatch_size": 128, "num_epochs": 1}
    data["config"]["preprocess"] |= {"max_episode_steps": max_episode_steps}
    data["snapshots"] = {"main": {"min_steps": 128, "max_steps": 128}}
    return data | {"turn_steps": 128, "evaluation": {"matches": 4, "pairs": "fixed"}, "stop": {"timesteps": 256}}


def run(directory: Path, data: dict[str, Any]) -> LeagueResult:
    trust.allow(data)
    config = LeagueConfig.model_validate(data)
    resolved = check_players(config, directory)
    result = run_league(config, directory, yaml.safe_dump(data).encode(), resolved, lambda line: None)
    assert result.stopped_by == "timesteps 256"
    assert not [one for one in result.state.players.values() if one.quarantine]
    snapshots = {one.name for one in result.state.players.values() if one.role is PlayerRole.HISTORICAL}
    assert snapshots == {"main.1", "main.2"}
    return result


def test_the_league_trains_and_its_snapshots_play_random_play_and_the_script(tmp_path: Path) -> None:
    payoff = run(tmp_path, shrink(60)).state.payoff
    assert all(payoff.record("main.1", other).games == 4 for other in ("random", "follower"))
    assert payoff.record("follower", "random").games == 4
    assert payoff.record("follower", "random").gain > 0, "sixty decisions are one or two points"
    snapshot = contestant(tmp_path / "players/main.1")
    assert isinstance(snapshot, TrainedContestant)
    assert snapshot.env == "pettingzoo/pong_v3"


def test_the_league_trains_on_images(tmp_path: Path) -> None:
    data = shrink(20)
    data["env_config"], data["evaluation"] = {}, {"pairs": "none"}
    del data["config"]["wrappers"], data["players"]["follower"]
    data["config"]["preprocess"] |= IMAGES
    data["config"]["model"] = {"conv_filters": [[8, 8, 4], [16, 4, 2]], "fcnet_hiddens": [32]}
    assert run(tmp_path, data).state.results > 0
