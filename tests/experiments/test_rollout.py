"""Rollouts: the same whoever plays them, every step in one file, and videos that show what there was to see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest

import ludus
from ludus.errors import Damaged, EnvironmentFault, NotFound, UsageError
from ludus.experiments.evaluation import rollout as rollouts
from ludus.experiments.evaluation.rollout import MultiAgentPlayer, RolloutResult, RolloutSpec
from ludus.experiments.evaluation.rollout_file import EpisodeSteps, RolloutFile
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.sampling import episode_runner
from ludus.sampling.trained_agent import TrainedAgent
from tests import matches
from tests.experiments import small
from tests.experiments.evaluated import Walk
from tests.matches import Roles

WALK, CRASHING, ENDLESS = (f"tests.experiments.evaluated:{name}" for name in ("Walk", "Crashing", "Endless"))

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # imageio's reader leaves pipes open


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.train(tmp_path_factory.mktemp("rollout") / "run", 1, env=WALK, evaluation_duration=0).run_dir


def columns(path: Path | None) -> dict[str, Any]:
    assert path is not None
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


# -- the same, whoever plays --------------------------------------------------------------------------------------------


def test_any_number_of_processes_plays_and_writes_the_same(run: Path, tmp_path: Path) -> None:
    def played(workers: int, **options: Any) -> tuple[RolloutResult, bytes]:
        file = tmp_path / f"{workers}-{len(options)}.npz"
        result = ludus.rollout(run, 7, seed=5, deterministic=False, out=file, num_workers=workers, save_info=True, **options)
        return result, file.read_bytes()

    alone, together = played(0), played(2)
    assert len(alone[0].returns) == 7
    assert len(set(alone[0].returns)) == 7
    assert (together[0].returns, together[0].lengths) == (alone[0].returns, alone[0].lengths)
    assert together[1] == alone[1], "to the last byte"
    short, shared = played(0, steps=20), played(2, steps=20)
    assert len(columns(short[0].steps_file)["step"]) == 20
    assert (shared[0].returns, shared[1]) == (short[0].returns, short[1]), "also when it ends in the middle of an episode"


def test_an_episode_does_not_depend_on_those_before_it(run: Path) -> None:
    all_of_them = ludus.evaluate(run, 5, seed=3, deterministic=False).returns
    assert ludus.evaluate(run, 2, seed=3, deterministic=False).returns == all_of_them[:2]
    assert ludus.evaluate(run, 3, seed=3, deterministic=False) == ludus.evaluate(run, 3, seed=3, deterministic=False)
    assert ludus.evaluate(run, 3, seed=3).returns != all_of_them[:3]


def test_an_evaluation_says_how_far_to_trust_it(run: Path) -> None:
    score = ludus.evaluate(run, 12)
    assert score.low < score.mean < score.high
    assert min(score.returns) <= score.low
    assert score.high <= max(score.returns)
    agent = ludus.load(run)
    assert ludus.evaluate(agent, 12, env=WALK).returns == score.returns
    assert ludus.evaluate(agent, 2, env=WALK, env_config={"length": 30}).lengths[0] >= 30
    assert ludus.evaluate(agent, 12).returns == score.returns, "a loaded agent knows its run"
    with pytest.raises(UsageError, match="has no run that names an environment"):
        ludus.evaluate(TrainedAgent(agent.policy), 1)


def test_the_failure_of_an_environment_in_another_process_is_told_as_in_this_one(run: Path) -> None:
    said = []
    for workers in (0, 1):
        with pytest.raises(
            EnvironmentFault, match=r"Crashing raised RuntimeError in step \(step 5\): the game crashed"
        ) as caught:
            ludus.rollout(run, 2, env=CRASHING, num_workers=workers)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_an_episode_that_never_ends_is_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_runner, "EPISODE_STEPS", 40)
    played = ludus.rollout(run, 2, env=ENDLESS)
    assert (played.lengths, played.cut) == ([40, 40], 2)
    assert ludus.rollout(run, 2, env=ENDLESS, steps=60).lengths == []


# -- the file -----------------------------------------------------------------------------------------------------------


def test_a_rollout_is_read_back_episode_by_episode(run: Path, tmp_path: Path) -> None:
    played = ludus.rollout(run, 3, seed=1, out=tmp_path / "steps.npz")
    episodes = ludus.read_rollout(tmp_path / "steps.npz")
    assert [int(episode["episode"]) for episode in episodes] == [0, 1, 2]
    assert [len(episode["reward"]) for episode in episodes] == played.lengths
    assert [episode["reward"].sum() for episode in episodes] == pytest.approx(played.returns)
    env, agent = Walk(), ludus.load(run)
    for i, episode in enumerate(episodes):
        observation, _ = env.reset(seed=1 + i)
        for seen, action in zip(episode["observation"], episode["action"], strict=True):
            assert seen.tobytes() == observation.tobytes()
            assert agent.act(observation)[0] == action
            observation, *_ = env.step(action)
        assert episode["final_observation"].tobytes() == observation.tobytes()
        assert episode["terminated"].tolist() == [False] * (played.lengths[i] - 1) + [True]


def test_an_unfinished_episode_has_its_last_observation_too(run: Path, tmp_path: Path) -> None:
    ludus.rollout(run, 1, steps=3, out=tmp_path / "steps.npz")
    (episode,) = ludus.read_rollout(tmp_path / "steps.npz")
    assert episode["observation"].shape == (3, 5)
    assert not np.array_equal(episode["final_observation"], episode["observation"][-1])
    assert not episode["terminated"].any()


def test_what_is_no_rollout_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no rollout at"):
        ludus.read_rollout(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("not a zip")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for name in ("text.npz", "other.npz"):
        with pytest.raises(Damaged, match="not the file of a rollout"):
            ludus.read_rollout(tmp_path / name)


def test_columns_that_change_their_shape_are_refused(tmp_path: Path) -> None:
    with EpisodeSteps(tmp_path / "p", False) as part:
        part.add({}, {"seen": np.zeros(2)})
        with pytest.raises(EnvironmentFault, match="'seen' changes its shape from step to step"):
            part.add({}, {"seen": np.zeros(3)})
    with RolloutFile(tmp_path / "steps.npz", False) as log:
        for sides in (2, 3):
            with EpisodeSteps(tmp_path / str(sides), False) as part:
                part.add({}, {"seen": np.zeros(sides)})
        log.extend(tmp_path / "2")
        with pytest.raises(EnvironmentFault, match="'seen' changes its shape from episode to episode"):
            log.extend(tmp_path / "3")


# -- pictures -----------------------------------------------------------------------------------------------------------


def frames(path: Path | None) -> Any:
    assert path is not None
    return imageio.v3.imread(path)


def test_a_grid_shows_episodes_side_by_side_and_dims_those_that_have_ended(run: Path, tmp_path: Path) -> None:
    played = ludus.rollout(run, 5, video=tmp_path / "grid.mp4", video_grid=True)
    lengths = played.lengths
    shown = frames(played.video)
    assert shown.shape == (max(lengths), 2 * 64, 3 * 80, 3)
    assert min(lengths) < max(lengths)

    def green(t: int, cell: int) -> Any:
        top, left = cell // 3 * 64, cell % 3 * 80
        return shown[t, top + 25 : top + 35, left : left + 80, 1].astype(int).mean(axis=0)

    for cell, length in enumerate(lengths):
        wide = [int((green(t, cell) > 180).sum()) for t in range(length)]
        assert wide == pytest.approx([8 * t for t in range(length)], abs=4), "every cell plays its own episode"
        after = green(max(lengths) - 1, cell)
        if length < max(lengths):
            assert 60 < after[: 8 * (length - 2)].mean() < 120, "dimmed, on its last picture"
    assert shown[0, :13, :20].max() > 150, "a label"
    assert not shown[:, 64:, 160:].any(), "the sixth cell is empty"


def test_depth_is_refused_as_a_video_and_written_under_its_own_name_when_asked_for(run: Path, tmp_path: Path) -> None:
    for kind in ("one", "bytes"):
        with pytest.raises(UsageError, match=r"not an RGB image: one number per pixel is a depth map.*--depth"):
            ludus.rollout(run, 1, env_config={"depth": kind}, video=tmp_path / "x.mp4")
        played = ludus.rollout(run, 1, env_config={"depth": kind}, video=tmp_path / f"{kind}.mp4", depth=True)
        assert played.video == tmp_path / f"{kind}-depth.mp4"
    native = ludus.rollout(run, 1, video=tmp_path / "native.mp4", depth=True).video
    assert native == tmp_path / "native-depth.mp4"
    picture = frames(native)[-1].astype(int)
    assert picture.shape == (64, 80, 3)
    assert picture[-1, -1, 0] > 180, "far is yellow"
    assert picture[0, 0, 2] > picture[0, 0, 1], "near is violet"
    assert {path.name for path in tmp_path.iterdir()} == {"one-depth.mp4", "bytes-depth.mp4", "native-depth.mp4"}


def test_colours_are_not_depth(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "render", lambda self: np.zeros((64, 80, 3), np.uint8))
    with pytest.raises(UsageError, match=r"uint8\[64, 80, 3\], which is not a depth map.*--video"):
        ludus.rollout(run, 1, video=tmp_path / "x.mp4", depth=True)


def test_the_result_as_json_has_the_interval(run: Path) -> None:
    told = json.loads(json.dumps(ludus.rollout(run, 8).to_json()))
    assert told["return_low"] < told["return_mean"] < told["return_high"]
    one = ludus.rollout(run, 1).to_json()
    assert (one["return_low"], one["episodes"]) == (None, 1)
    assert rollouts.RolloutResult().to_json()["return_mean"] is None


# -- several agents -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two agents that see different things, each with a model of its own."""
    where = tmp_path_factory.mktemp("roles") / "run"
    policies = {"policies": ["speaker", "listener"], "policy_mapping": {"speaker": "speaker", "listener": "listener"}}
    return small.train(where, 1, env="tests.matches:make_roles", multiagent=policies, evaluation_duration=0).run_dir


def test_several_agents_are_rolled_out_into_one_file(roles: Path, tmp_path: Path) -> None:
    played = ludus.rollout(roles, 4, seed=2, deterministic=False, out=tmp_path / "steps.npz")
    assert played.returns == [sum(pair) for pair in zip(played.agents["speaker"], played.agents["listener"], strict=True)]
    entries = ludus.read_rollout(tmp_path / "steps.npz")
    assert [(int(e["episode"]), str(e["agent"])) for e in entries] == [(i, a) for i in range(4) for a in ("speaker", "listener")]
    for speaker, listener in zip(entries[::2], entries[1::2], strict=True):
        episode, env = int(speaker["episode"]), Roles()
        seen, _ = env.reset(seed=2 + episode)
        gained = 0.0
        for t in range(5):
            assert (speaker["observation"][t], listener["observation"][t, 0]) == (seen["speaker"], seen["listener"][0])
            actions = {"speaker": speaker["action"][t], "listener": listener["action"][t]}
            seen, rewards, *_ = env.step(actions)
            assert (speaker["reward"][t], listener["reward"][t]) == (rewards["speaker"], rewards["listener"])
            gained += rewards["speaker"]
        assert played.agents["speaker"][episode] == gained
        assert listener["truncated"].tolist() == [False] * 4 + [True]
        assert listener["final_observation"] == seen["listener"]
    again = ludus.rollout(roles, 4, seed=2, deterministic=False, out=tmp_path / "again.npz", num_workers=1)
    assert again.agents == played.agents
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "steps.npz").read_bytes()


@pytest.mark.parametrize("kind", ["make_parallel", "make_turns"])
def test_what_every_agent_saw_did_and_was_given_is_what_the_game_knows(kind: str, tmp_path: Path) -> None:
    """Agents come and go, and are paid after they have acted, perhaps turns later."""
    policy = Policy(matches.OBSERVATION, matches.ACTION, NetworkConfig(fcnet_hiddens=(8,)))
    (tmp_path / "weights").write_bytes(serialization.encode_weights(policy.weights()))
    models = {"model": (policy.description(), str(tmp_path / "weights"))}
    name = f"tests.matches:{kind}"
    stage = RolloutSpec(name, name, models, dict.fromkeys(matches.NAMES, "model"), deterministic=False, steps=True)
    player = MultiAgentPlayer(stage, dict.fromkeys(matches.NAMES, "model"))
    for episode in range(6):
        with RolloutFile(tmp_path / f"{episode}.npz", False) as steps:
            player.play(episode, 1000, steps.scratch_dir / "x", lambda: None)
            steps.extend(steps.scratch_dir / "x" / "steps")
            steps.write()
        books = player._match._env.books  # type: ignore[attr-defined]
        entries = {str(entry["agent"]): entry for entry in ludus.read_rollout(tmp_path / f"{episode}.npz")}
        for agent in matches.NAMES:
            lives = [life for life in books.lives if life.agent == agent and life.steps]
            did = [step for life in lives for step in life.steps]
            assert (agent in entries) == bool(did)
            if not did:
                continue
            entry = entries[agent]
            assert entry["observation"].tolist() == [step.seen.tolist() for step in did]
            assert entry["action"].tolist() == [step.action for step in did]
            assert entry["reward"].tolist() == pytest.approx([step.reward for step in did])
            ends = np.cumsum([len(life.steps) for life in lives]) - 1
            assert np.flatnonzero(entry["terminated"] | entry["truncated"]).tolist() == ends.tolist()
            if lives[-1].end == "truncated":  # after the end of a game there is nothing that anybody needs to see
                assert entry["final_observation"].tolist() == lives[-1].last_seen.tolist()
    player.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_match_is_filmed(tmp_path: Path) -> None:
    run = small.train(tmp_path / "run", 1, env="tests.matches:make_simple", evaluation_duration=0).run_dir
    played = ludus.rollout(run, 4, video=tmp_path / "v.mp4", video_grid=True)
    shown = frames(played.video)
    assert shown.shape == (5, 32, 32, 3)
    assert shown[:, 8, 8, 0].tolist() == pytest.approx([0, 10, 20, 30, 40], abs=6)
    with pytest.raises(UsageError, match="--save-info"):
        ludus.rollout(run, 1, save_info=True)
