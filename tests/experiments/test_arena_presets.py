"""The presets of the Arena from end to end: trained for a moment, in the sampler and below a gamecore server, fought with and exported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.config.experiment_file import load_experiments
from ludus.experiments import runner
from ludus.experiments.export_run import export_checkpoint
from ludus.experiments.source import preset_index
from ludus.gamecore.server.http.app import Settings, running
from ludus.tournament.battle import battle
from ludus.tournament.contestants import ScriptedContestant, contestant
from ludus.tournament.settings import BattleSettings

pytestmark = pytest.mark.system
SELF_PLAY = {"self": 0.5, "past": 0.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("uvicorn")
    with running(Settings(port=0, state_dir=tmp_path_factory.mktemp("gamecore"))) as found:
        yield f"127.0.0.1:{found.port}"


@pytest.mark.parametrize(
    ("preset", "far", "opponent", "lstm"),
    [
        ("Arena_1v1_PPO", False, None, True),
        ("Arena_1v1_PPO", True, SELF_PLAY, False),
        ("Arena_3v3_PPO", False, SELF_PLAY, False),
        ("Arena_3v3_PPO", True, None, True),
    ],
)
def test_a_preset_trains_and_fights(
    server: str, tmp_path: Path, preset: str, far: bool, opponent: dict[str, float] | None, lstm: bool
) -> None:
    ((_, data),) = copy.deepcopy(load_experiments(preset_index.preset(preset))).items()
    config: dict[str, Any] = data["config"]
    seats = 3 if "3v3" in preset else 1
    config |= {"num_envs_per_worker": 4 * seats, "rollout_fragment_length": 40, "train_batch_size": 160 * seats}
    config |= {"minibatch_size": 80 * seats, "num_epochs": 1, "evaluation_duration": 0}
    config["env_config"] |= {"seconds": 12} | ({"opponent": opponent, "matchmaking": "fixed"} if opponent else {})
    config["model"] |= {"use_lstm": True, "lstm_cell_size": 16} if lstm else {}
    if far:
        data["env"] = "gamecore"
        config["env_config"] |= {"server": server}
    data |= {"stop": {"iterations": 3}, "checkpoint_time_s": 1000}
    data.pop("target")
    result = runner.train({"name": preset, **data}, project=tmp_path, trial="run")

    metrics = result.metrics
    assert metrics["timesteps"] == pytest.approx(480 * seats, rel=0.2)
    assert all(np.isfinite(metrics[f"learner/{name}"]) for name in ("policy_loss", "value_loss", "entropy", "kl"))
    against = ["past"] if opponent else [who for who in ("easy", "medium", "hard") if f"match/win/{who}" in metrics]
    assert against
    for who in against:
        low, mean, high = (metrics[f"match/win/{who}{which}"] for which in ("_low", "", "_high"))
        assert 0 <= low <= mean <= high <= 1
        assert high - low > 0.1, "a handful of matches proves little"
    terms = BattleSettings(2, mode="3v3" if seats == 3 else "1v1", seconds=10, seed=3)
    played = battle(contestant(tmp_path / "run"), ScriptedContestant("easy"), terms)
    assert not played.failed
    if far and lstm:  # the most of everything; it takes long
        exported = export_checkpoint(tmp_path / "run", out=tmp_path / "agent.onnx").file
        assert exported is not None
        again = battle(contestant(exported), ScriptedContestant("easy"), terms)
        assert [game.ticks for game in again.games] == [game.ticks for game in played.games]
