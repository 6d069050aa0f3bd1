"""The presets: each of them is an experiment that could start now, and says what it reaches."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.algorithms.dqn import DQNConfig
from ludus.cli.training import presets
from ludus.compat.coach import preset_names
from ludus.config.experiment_file import load_experiments
from ludus.errors import UnknownName, UsageError
from ludus.experiments.resolve import resolve
from ludus.experiments.source import preset_index

ISSUED = {
    "acrobot",
    "breakout",
    "cartpole",
    "cartpole-lstm",
    "doom-basic",
    "halfcheetah",
    "hopper",
    "hybrid",
    "lunarlander",
    "masked",
    "mountaincar-continuous",
    "pong",
}
PUBLISHED = {"cartpole": (490, 100_000), "cartpole-lstm": (450, 100_000), "lunarlander": (230, 1_000_000)} | {
    "halfcheetah": (2000, 1_000_000),
    "hopper": (2200, 1_000_000),
}


def test_the_gallery_is_whole() -> None:
    assert set(preset_index.names()) >= ISSUED


@pytest.mark.parametrize("name", preset_index.names())
def test_a_preset_is_an_experiment_with_a_target_within_its_stop(name: str) -> None:
    ((key, data),) = load_experiments(preset_index.preset(name)).items()
    assert key == name
    about = preset_index.read_summary(name)
    assert about.description
    for module, family in (
        ("ale_py", "NoFrameskip"),
        ("vizdoom", "Vizdoom"),
        ("mpe2", "mpe2/"),
        ("pettingzoo", "pettingzoo/"),
        ("nle", "ludus/NetHack"),
    ):
        if about.env.startswith(family) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    resolved = resolve({"name": key, **data})
    assert resolved.experiment.stop.timesteps == about.target.timesteps
    if name in PUBLISHED:
        assert (about.target.return_mean, about.target.timesteps) == PUBLISHED[name]


def test_a_preset_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no preset 'cartpol'.*'cartpole'"):
        preset_index.preset("cartpol")
    with pytest.raises(UnknownName):
        preset_index.preset("../gallery")


def test_presets_are_listed_and_shown_on_the_command_line(tmp_path: Path) -> None:
    listed = json.loads(CliRunner().invoke(presets.app, ["list", "--json"]).output)
    ours = {item["name"] for item in listed if "description" in item}
    assert ours == set(preset_index.names())
    assert {item["name"] for item in listed if "missing" not in item} == ours | set(preset_names.COACH_PRESETS)
    assert {item["name"] for item in listed} == ours | set(preset_names.COACH_PRESETS) | set(preset_names.unsupported_presets())
    table = CliRunner().invoke(presets.app, ["list"], env={"COLUMNS": "200"})
    assert all(name in table.output for name in [*preset_index.names(), *preset_names.COACH_PRESETS])
    shown = CliRunner().invoke(presets.app, ["show", "hybrid"])
    copied = tmp_path / "mine.yaml"
    copied.write_text(shown.output)
    assert load_experiments(copied)["hybrid"]["env"] == "ludus.envs.toy_envs:golf"
    copied.write_text(CliRunner().invoke(presets.app, ["show", "Mujoco_ClippedPPO", "-lvl", "walker2d"]).output)
    assert load_experiments(copied)["Mujoco_ClippedPPO"]["env"] == "Walker2d-v5"


# -- names of Coach -----------------------------------------------------------------------------------------------------

NAMES = """
Acrobot_DDQN_BCQ_BatchRL Atari_A3C Atari_A3C_LSTM Atari_ACER Atari_Bootstrapped_DQN Atari_C51 Atari_DDQN Atari_DDQN_with_PER Atari_DQN
Atari_DQN_with_PER Atari_Dueling_DDQN Atari_Dueling_DDQN_with_PER_OpenAI Atari_NEC Atari_NStepQ Atari_QR_DQN Atari_Rainbow
Atari_UCB_with_Q_Ensembles BitFlip_DQN BitFlip_DQN_HER CARLA_3_Cameras_DDPG CARLA_CIL CARLA_DDPG CARLA_Dueling_DDQN CartPole_A3C
CartPole_ACER CartPole_ClippedPPO CartPole_DDQN_BCQ_BatchRL CartPole_DDQN_BatchRL CartPole_DFP CartPole_DQN CartPole_Dueling_DDQN
CartPole_NEC CartPole_NStepQ CartPole_PAL CartPole_PG ControlSuite_DDPG Doom_Basic_A3C Doom_Basic_ACER Doom_Basic_BC Doom_Basic_DFP
Doom_Basic_DQN Doom_Basic_Dueling_DDQN Doom_Battle_DFP Doom_Health_DFP Doom_Health_MMC Doom_Health_Supreme_DFP
ExplorationChain_Bootstrapped_DQN ExplorationChain_Dueling_DDQN ExplorationChain_UCB_Q_ensembles Fetch_DDPG_HER_baselines
InvertedPendulum_PG MontezumaRevenge_BC Mujoco_A3C Mujoco_A3C_LSTM Mujoco_ClippedPPO Mujoco_DDPG Mujoco_NAF Mujoco_PPO Mujoco_SAC
Mujoco_TD3 Pendulum_HAC Starcraft_CollectMinerals_A3C Starcraft_CollectMinerals_Dueling_DDQN
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_of_coach_is_trained_or_says_what_comes_nearest(name: str) -> None:
    entry = preset_names.find_preset(name)
    assert entry is not None
    if isinstance(entry, preset_names.UnsupportedPreset):
        with pytest.raises(UnknownName, match=rf"{name} is not supported: .*\. Nearest is ") as raised:
            preset_index.experiments(name)
        for words in re.findall(r"-p (\S+?),?(?: -lvl (\S+?))?(?:[,. ]|$)", str(raised.value)):
            assert preset_index.experiments(words[0], words[1] or None), "what comes nearest is there"
    else:
        level = next(iter(entry.levels), None)
        assert preset_index.experiments(name.lower(), level) == preset_index.experiments(name, level), "in whatever case"


@pytest.mark.parametrize("name", sorted(preset_names.COACH_PRESETS))
def test_what_is_trained_under_a_name_of_coach_could_start_now(name: str) -> None:
    entry = preset_names.COACH_PRESETS[name]
    ((key, data),) = preset_index.experiments(name, next(iter(entry.levels), None)).items()
    assert key == name
    for module, family in (("ale_py", "Atari"), ("vizdoom", "Doom"), ("mujoco", "Mujoco")):
        if name.startswith(family) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    resolved = resolve({"name": key, **data})
    assert resolved.experiment.run == ("PPO" if name.endswith("PPO") else "DQN")
    if isinstance(resolved.config, DQNConfig):
        assert resolved.config.double_q is ("DDQN" in name)
        assert resolved.config.dueling is ("Dueling" in name)
        assert resolved.config.replay_buffer_config.prioritized is ("PER" in name)
    if resolved.experiment.target is not None:
        assert resolved.experiment.stop.timesteps == resolved.experiment.target.timesteps


def test_all_levels_are_environments() -> None:
    gym = pytest.importorskip("gymnasium")
    assert set(preset_names.MUJOCO.values()) <= set(gym.registry)
    ale = pytest.importorskip("ale_py")
    gym.register_envs(ale)
    assert set(preset_names.ATARI.values()) <= set(gym.registry)


def test_a_level_chooses_the_preset_that_was_made_for_it() -> None:
    ((_, cheetah),) = preset_index.experiments("Mujoco_ClippedPPO", "half_cheetah").items()
    ((_, ours),) = preset_index.experiments("halfcheetah").items()
    assert cheetah == ours
    ((_, ant),) = preset_index.experiments("Mujoco_ClippedPPO", "ant").items()
    assert ant["env"] == "Ant-v5"
    assert "target" not in ant, "what Hopper reaches says nothing of it"
    ((_, mine),) = preset_index.experiments("Mujoco_ClippedPPO", "my.game:make").items()
    assert mine["env"] == "my.game:make"
    ((_, other),) = preset_index.experiments("cartpole", "Acrobot-v1").items()
    assert (other["env"], "target" in other) == ("Acrobot-v1", False)


def test_a_level_that_is_missing_or_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"for several environments. Choose one: -lvl hopper \| half_cheetah"):
        preset_index.experiments("Mujoco_ClippedPPO")
    with pytest.raises(UsageError, match=r"has no level 'hoper'\. Did you mean 'hopper'"):
        preset_index.experiments("Mujoco_ClippedPPO", "hoper")
    with pytest.raises(UsageError, match=r"Gymnasium has no striker any more"):
        preset_index.experiments("Mujoco_PPO", "striker")


def test_a_name_that_nobody_has_names_the_nearest_of_both_kinds() -> None:
    with pytest.raises(UnknownName, match=r"no preset 'CartPole_ClipedPPO'.*'CartPole_ClippedPPO'"):
        preset_index.experiments("CartPole_ClipedPPO")


def test_a_preset_is_read_anew_each_time() -> None:
    preset_index.experiments("Atari_DQN", "pong")["Atari_DQN"]["config"]["model"]["fcnet_activation"] = "changed"
    assert preset_index.experiments("Atari_DQN", "pong")["Atari_DQN"]["config"]["model"]["fcnet_activation"] == "relu"
