"""Evaluations of several agents: by workers as in the training process, by steps, with videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.errors import ConfigError
from ludus.experiments import runner
from tests.experiments.test_evaluation_video import frames_of
from tests.matches import Simple

TICTACTOE, SIMPLE, TURNS = "pettingzoo/tictactoe_v3", "tests.matches:make_simple", "tests.matches:make_turns"
SETTINGS: dict[str, Any] = {
    "num_envs_per_worker": 4,
    "train_batch_size": 80,
    "num_epochs": 1,
    "minibatch_size": 40,
    "model": {"fcnet_hiddens": [8]},
    "evaluation_interval": 2,
}


def train(where: Path, env: str, **settings: Any) -> Path:
    data = {"env": env, "stop": {"iterations": 2}, "checkpoint_freq": 0, "config": {**SETTINGS, **settings}}
    return runner.train(data, project=where.parent, trial=where.name, supervised=False).run_dir


def scores(run: Path) -> list[dict[str, float]]:
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "evaluation/return_mean" in row]
    return [{key: row[key] for key in row if key.startswith("evaluation/") or key == "timesteps"} for row in rows]


def compare_with_workers(tmp_path: Path, env: str, **settings: Any) -> dict[str, float]:
    """Evaluate inline and by two workers; return the last score."""
    inline = scores(train(tmp_path / "inline", env, **settings))
    beside = scores(train(tmp_path / "beside", env, evaluation_num_workers=2, **settings))
    assert inline
    assert beside == inline
    return inline[-1]


def test_workers_find_the_same_score_as_the_training_process(tmp_path: Path) -> None:
    explored = {"evaluation_duration": 21, "evaluation_config": {"explore": True}}
    score = compare_with_workers(tmp_path, TURNS, env_config={"masked": "info"}, **explored)
    assert score["evaluation/episodes"] == 21
    assert score["evaluation/return_min"] < score["evaluation/return_max"]


def test_workers_play_against_chance_in_a_zero_sum_game(tmp_path: Path) -> None:
    score = compare_with_workers(tmp_path, TICTACTOE, evaluation_duration=30)
    parts = [score[f"evaluation/{result}/random"] for result in ("win", "draw", "loss")]
    assert sum(parts) == pytest.approx(1)
    assert min(score["evaluation/win/random"], score["evaluation/loss/random"]) > 0


def test_workers_play_against_another_run(tmp_path: Path) -> None:
    other = train(tmp_path / "other", TICTACTOE, evaluation_duration=0, evaluation_interval="checkpoint")
    section = {"evaluation_opponents": str(other)}
    score = compare_with_workers(tmp_path, TICTACTOE, multiagent=section, evaluation_duration=12, seed=3)
    assert score["evaluation/win/other"] + score["evaluation/draw/other"] + score["evaluation/loss/other"] == pytest.approx(1)


def test_an_evaluation_may_be_so_many_environment_steps(tmp_path: Path) -> None:
    steps = {"evaluation_duration": 2100, "evaluation_duration_unit": "timesteps"}
    score = compare_with_workers(tmp_path, SIMPLE, env_config={"length": 40}, **steps)
    assert score["evaluation/length_mean"] == 40
    assert 2100 <= score["evaluation/episodes"] * 40 < 2100 + 2 * 40, "two copies, each of which finishes its last match"


def test_the_first_matches_of_an_evaluation_are_recorded_by_workers_as_well(tmp_path: Path) -> None:
    """The masks of this game forbid most actions: only the same course ends after the same number of steps."""
    settings = {"env_config": {"render_mode": "rgb_array"}, "evaluation_duration": 3, "evaluation_video": 2}
    settings |= {"evaluation_config": {"explore": True}}
    counts = []
    for name, workers in (("inline", 0), ("beside", 2)):
        run = train(tmp_path / name, TICTACTOE, evaluation_num_workers=workers, **settings)
        videos = sorted((run / "videos").iterdir())
        assert [path.name for path in videos] == [f"evaluation-iteration-000002-episode-{i}.mp4" for i in (1, 2)]
        counts.append([frames_of(path) for path in videos])
        (score,) = scores(run)
        assert 5 <= min(counts[-1]) <= max(counts[-1]) <= 9
        assert 0 < score["evaluation/length_mean"] * 3 - sum(counts[-1]) <= 9, "what remains is the third match"
    assert counts[0] == counts[1]


def test_more_videos_than_copies_show_later_matches(tmp_path: Path) -> None:
    settings = {"evaluation_duration": 12, "evaluation_duration_unit": "timesteps", "evaluation_video": 3}
    run = train(tmp_path / "run", SIMPLE, env_config={"length": 6}, **settings)
    assert [frames_of(path) for path in sorted((run / "videos").iterdir())] == [6, 6, 6]


def test_a_game_without_pictures_is_trained_without_videos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(tmp_path / "run", "openspiel/kuhn_poker", evaluation_duration=2, evaluation_video=1)
    assert "videos of evaluations of openspiel/kuhn_poker are no longer recorded" in caplog.text
    assert scores(run)
    assert not (run / "videos").exists()


class Paid(Simple):
    """Everybody earns 3 in every step."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, *rest = super().step(actions)
        return seen, dict.fromkeys(rewards, 3.0), *rest


def make_paid(**settings: Any) -> Paid:
    return Paid(**settings)


def test_a_run_with_preprocessing_is_played_everywhere_as_it_was_trained(tmp_path: Path) -> None:
    preprocess = {"stack": 3, "clip_reward": [-1.5, 1.5], "max_episode_steps": 4, "frame_skip": 2}
    settings = {"preprocess": preprocess, "env_config": {"length": 30}, "evaluation_duration": 2}
    run = train(tmp_path / "run", f"{__name__}:make_paid", **settings)
    (score,) = scores(run)
    row = read_jsonl(run / "metrics.jsonl")[-1]
    assert score["evaluation/length_mean"] == row["episode_length_mean"] == 4
    assert row["episode_return_mean"] == pytest.approx(2 * 4 * 1.5)
    assert score["evaluation/return_mean"] == pytest.approx(2 * 4 * 2 * 3), "evaluations do not clip"
    assert ludus.load(run).policy.observation_space.shape == (3 * 2,)
    played = ludus.evaluate(run, 2)
    assert played.mean == pytest.approx(48)
    assert played.lengths == (4, 4)


def test_battles_are_fought_with_the_preprocessing_of_the_training(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        TICTACTOE,
        preprocess={"flatten": True, "stack": 2},
        evaluation_duration=0,
        evaluation_interval="checkpoint",
    )
    result = ludus.battle(str(run), "rule:random", games=4)
    assert len(result.games) == 4
    assert not any(game.failed for game in result.games)


def test_an_environment_of_evaluations_with_other_agents_is_refused_at_the_start(tmp_path: Path) -> None:
    changed = {"evaluation_config": {"env_config": {"fault": "late"}}, "evaluation_duration": 2}
    with pytest.raises(ConfigError, match=r"evaluation_config\.env_config changes the agents of .*'late'"):
        train(tmp_path / "run", SIMPLE, **changed)
