"""Coach's preset names: the equivalent preset of Ludus, or why there is none and the nearest one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludus.core.plugins import did_you_mean
from ludus.errors import UnknownName, UsageError

Experiment = dict[str, Any]


@dataclass(frozen=True)
class CoachPreset:
    """A preset of Coach as a variation of one of ours."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the experiment, and of `config`, that differ from the preset."""
    config: Mapping[str, Any] | None = None
    """The whole `config`, if the preset has another algorithm."""
    levels: Mapping[str, str] = field(default_factory=dict)
    """Level → environment; empty if it has one environment."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Level → our preset for it."""
    reaches: Mapping[str, Any] | None = None
    """Its target, if it is known and differs from that of the preset."""
    as_preset: bool = False
    """Whether the target of our preset holds for it too."""


@dataclass(frozen=True)
class UnsupportedPreset:
    """A preset of Coach without an equivalent."""

    why: str
    instead: str


def supported_names() -> list[str]:
    """Return the names of all supported presets."""
    return sorted(COACH_PRESETS)


def find_preset(name: str) -> CoachPreset | UnsupportedPreset | None:
    """Look up a preset by name, ignoring case; None if Coach has no such preset."""
    known = canonical_name(name)
    return None if known is None else COACH_PRESETS.get(known) or UNSUPPORTED_PRESETS[known]


def canonical_name(name: str) -> str | None:
    lowered = name.lower()
    return next((known for known in (*COACH_PRESETS, *UNSUPPORTED_PRESETS) if known.lower() == lowered), None)


def unsupported_error(name: str, missing: UnsupportedPreset) -> UnknownName:
    return UnknownName(f"{name} is not supported: {missing.why}.", f"Nearest is {missing.instead}.")


def environment_of(name: str, entry: CoachPreset, level: str | None, usual: str) -> str:
    """Return the environment of a level; other names are environments themselves. Raises UsageError."""
    if level is None:
        if entry.levels:
            raise UsageError(f"{name} is for many environments: which?", f"-lvl {' | '.join(_some_levels(entry))}")
        return usual
    if level in entry.levels:
        return entry.levels[level]
    if level in _REMOVED and entry.levels is MUJOCO:
        raise UsageError(f"-lvl {level}: Gymnasium has no {level} any more.", did_you_mean(level, entry.levels))
    if entry.levels and not _is_environment(level):
        raise UnknownName(f"{name} has no level {level!r}.", did_you_mean(level, entry.levels))
    return level


def _some_levels(entry: CoachPreset) -> list[str]:
    return [*list(entry.levels)[:6], *["…"] * (len(entry.levels) > 6)]


def _is_environment(level: str) -> bool:
    return any(mark in level for mark in (":", "/", "-v"))


def make_experiment(name: str, entry: CoachPreset, level: str | None, presets: Mapping[str, Experiment]) -> Experiment:
    """Return the experiment of a preset. `presets`: name → experiment of our presets. Raises UsageError."""
    base = copy.deepcopy(dict(presets[entry.own.get(level or "", entry.preset)]))
    made_for = level is not None and level in entry.own
    env = environment_of(name, entry, level, base["env"])
    moved = env != base["env"]
    changed = copy.deepcopy(dict(entry.changes))
    config = dict(base["config"]) if entry.config is None else copy.deepcopy(dict(entry.config))
    config |= changed.pop("config", {})
    out = base | changed | {"env": env, "config": config}
    if entry.reaches is not None and not moved:
        out["target"] = dict(entry.reaches)
    elif moved or not (entry.as_preset or made_for):
        out.pop("target", None)
    if not (entry.as_preset or made_for):
        out["description"] = f"{env} by {out['run']}, under the name that it has in Coach."
    return out


# -- environments -------------------------------------------------------------------------------------------------------

MUJOCO: Mapping[str, str] = {
    "hopper": "Hopper-v5",
    "half_cheetah": "HalfCheetah-v5",
    "walker2d": "Walker2d-v5",
    "inverted_pendulum": "InvertedPendulum-v5",
    "inverted_double_pendulum": "InvertedDoublePendulum-v5",
    "reacher": "Reacher-v5",
    "ant": "Ant-v5",
    "swimmer": "Swimmer-v5",
    "humanoid": "Humanoid-v5",
    "humanoid_standup": "HumanoidStandup-v5",
    "pusher": "Pusher-v5",
}
_REMOVED = ("thrower", "striker")

_GAMES = """
pong breakout
air_raid alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider berzerk bowling boxing carnival
centipede chopper_command crazy_climber demon_attack double_dunk elevator_action enduro fishing_derby freeway frostbite gopher
gravitar hero ice_hockey jamesbond journey_escape kangaroo krull kung_fu_master montezuma_revenge ms_pacman name_this_game phoenix
pitfall pooyan private_eye qbert riverraid road_runner robotank seaquest skiing solaris space_invaders star_gunner tennis
time_pilot tutankham up_n_down venture video_pinball wizard_of_wor yars_revenge zaxxon
"""
ATARI: Mapping[str, str] = {
    game: "".join(part.capitalize() for part in game.split("_")) + "NoFrameskip-v4" for game in _GAMES.split()
}

# -- what can be trained ------------------------------------------------------------------------------------------------

_ATARI_DQN: Mapping[str, Any] = {
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 4,
    "train_batch_size": 32,
    "training_intensity": 8,
    "lr": 1.0e-4,
    "gamma": 0.99,
    "num_steps_sampled_before_learning_starts": 20_000,
    "target_network_update_freq": 8_000,
    "epsilon": [[0, 1.0], [1_000_000, 0.01]],
    "grad_clip": 10.0,
    "replay_buffer_config": {"type": "ReplayBuffer", "capacity": 100_000},
    "preprocess": {"clip_reward": "sign", "episodic_life": True, "max_episode_steps": 27_000},
    "model": {"fcnet_activation": "relu"},
}
_DOOM_DQN: Mapping[str, Any] = {
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 4,
    "train_batch_size": 64,
    "training_intensity": 16,
    "lr": 5.0e-4,
    "gamma": 0.99,
    "num_steps_sampled_before_learning_starts": 1_000,
    "target_network_update_freq": 1_000,
    "epsilon": [[0, 1.0], [20_000, 0.05]],
    "grad_clip": 10.0,
    "n_step": 3,
    "replay_buffer_config": {"type": "ReplayBuffer", "capacity": 60_000},
    "preprocess": {"resize": [36, 64], "grey": True},
    "model": {"fcnet_activation": "relu", "fcnet_hiddens": [128], "conv_filters": [[16, 6, 3], [32, 3, 2], [32, 3, 2]]},
}
_PRIORITY = {"type": "PrioritizedReplayBuffer", "capacity": 100_000}


def _atari(*, double: bool, dueling: bool, priority: bool = False) -> CoachPreset:
    config = {**_ATARI_DQN, "double_q": double, "dueling": dueling}
    config |= {"replay_buffer_config": dict(_PRIORITY)} if priority else {}
    return CoachPreset("pong", {"run": "DQN", "stop": {"timesteps": 10_000_000}}, config, ATARI)


def _doom(*, double: bool, dueling: bool, reaches: Mapping[str, Any] | None = None) -> CoachPreset:
    return CoachPreset("doom-basic", {"run": "DQN"}, {**_DOOM_DQN, "double_q": double, "dueling": dueling}, reaches=reaches)


COACH_PRESETS: Mapping[str, CoachPreset] = {
    "CartPole_ClippedPPO": CoachPreset("cartpole", as_preset=True),
    # Seeds 0 to 3: 488, 500, 500, 500; and dueling 436, 500, 500, 500.
    "CartPole_DQN": CoachPreset(
        "cartpole-dqn",
        {"config": {"double_q": False, "dueling": False}},
        reaches={"return_mean": 475, "timesteps": 50_000},
    ),
    "CartPole_Dueling_DDQN": CoachPreset(
        "cartpole-dqn",
        {"config": {"double_q": True, "dueling": True}},
        reaches={"return_mean": 425, "timesteps": 50_000},
    ),
    "Mujoco_ClippedPPO": CoachPreset("hopper", levels=MUJOCO, own={"hopper": "hopper", "half_cheetah": "halfcheetah"}),
    "Mujoco_PPO": CoachPreset("hopper", {"config": {"clip_param": 10.0, "kl_coeff": 1.0, "kl_target": 0.01}}, levels=MUJOCO),
    "Atari_DQN": _atari(double=False, dueling=False),
    "Atari_DDQN": _atari(double=True, dueling=False),
    "Atari_Dueling_DDQN": _atari(double=True, dueling=True),
    "Atari_DQN_with_PER": _atari(double=False, dueling=False, priority=True),
    "Atari_DDQN_with_PER": _atari(double=True, dueling=False, priority=True),
    "Atari_Dueling_DDQN_with_PER_OpenAI": _atari(double=True, dueling=True, priority=True),
    "Doom_Basic_DQN": _doom(double=False, dueling=False, reaches={"return_mean": 0.7, "timesteps": 60_000}),  # one seed: 0.82
    "Doom_Basic_Dueling_DDQN": _doom(double=True, dueling=True),
}
"""Name in Coach → what it is here."""

# -- what cannot --------------------------------------------------------------------------------------------------------

_WHY: Mapping[str, str] = {
    "A3C": "many workers that change one network without waiting for each other are not; IMPALA samples without waiting, and corrects",
    "A3C_LSTM": "A3C is not; PPO, APPO and IMPALA have recurrent models (model.use_lstm)",
    "ACER": "ACER is not; IMPALA learns from earlier batches again (replay_proportion), and corrects for it",
    "BC": "it learns from recordings of people, and nothing here does",
    "CIL": "it learns from recordings of people, and nothing here does",
    "BatchRL": "it learns from files, and nothing here does",
    "Bootstrapped_DQN": "networks with many heads are not; DQN explores by epsilon",
    "C51": "values as distributions are not; DQN learns their means",
    "QR_DQN": "values as distributions are not; DQN learns their means",
    "Rainbow": "distributions and noisy networks are not; DQN has the other parts of it",
    "DDPG": "learning a value of continuous actions is not; PPO is for them",
    "SAC": "learning a value of continuous actions is not; PPO is for them",
    "TD3": "learning a value of continuous actions is not; PPO is for them",
    "NAF": "learning a value of continuous actions is not; PPO is for them",
    "Wolpertinger": "learning a value of continuous actions is not; PPO is for them",
    "DFP": "learning to predict measurements is not",
    "HAC": "hierarchies of agents are not",
    "HER": "goals that are chosen in hindsight are not",
    "MMC": "mixing in whole returns is not; DQN sums the rewards of n_step steps",
    "NEC": "a dictionary of episodes is not",
    "NStepQ": "learning values without a replay is not; DQN sums the rewards of n_step steps",
    "PAL": "advantage learning is not",
    "PG": "plain policy gradients are not; PPO with num_epochs: 1 and lambda: 1 is nearly that",
    "PPO_RND": "a bonus for what is new is not",
    "UCB": "choosing by the spread of many heads is not; DQN explores by epsilon",
    "Random": "an agent that never learns is not trained; ludus rollout can play at random",
}
_CARLA = "CARLA is no environment that is known by name; a function of yours that makes it is: env: module:function"
_STARCRAFT = "StarCraft II is no environment that is known by name; a function of yours that makes it is: env: module:function"
_ROBOSUITE = "robosuite is no environment that is known by name; a function of yours that makes it is: env: module:function"
_TOY = "this toy is no environment that is known by name; a function of yours that makes it is: env: module:function"

_ANY_CARTPOLE = "-p CartPole_ClippedPPO, or -p CartPole_DQN"
_ANY_ATARI = "-p Atari_Dueling_DDQN_with_PER_OpenAI -lvl pong, or -p pong and -p breakout, which are PPO"
_ANY_DOOM = "-p doom-basic, which is PPO, or -p Doom_Basic_DQN"
_HEALTH = "-p doom-basic -lvl VizdoomHealthGathering-v1, which is PPO"
_SUPREME = "-p doom-basic -lvl VizdoomHealthGatheringSupreme-v1, which is PPO"
_ANY_MUJOCO = "-p Mujoco_ClippedPPO -lvl hopper"
_YOURS_PPO = "ludus train module:function --run PPO"
_YOURS_DQN = "ludus train module:function --run DQN"


def _missing(prefix: str, instead: str, **algorithms: str) -> dict[str, UnsupportedPreset]:
    return {f"{prefix}_{suffix}": UnsupportedPreset(_WHY[kind], instead) for suffix, kind in algorithms.items()}


def _same(*suffixes: str) -> dict[str, str]:
    return dict(zip(suffixes, suffixes, strict=True))


UNSUPPORTED_PRESETS: Mapping[str, UnsupportedPreset] = {
    **_missing("CartPole", _ANY_CARTPOLE, **_same("A3C", "ACER", "DFP", "NEC", "NStepQ", "PAL", "PG"),
               DQN_BatchRL="BatchRL", DDQN_BatchRL="BatchRL", DDQN_BCQ_BatchRL="BatchRL"),
    **_missing("Acrobot", "-p acrobot, which is PPO", DQN_BatchRL_BCQ="BatchRL", DDQN_BCQ_BatchRL="BatchRL"),
    **_missing("Atari", _ANY_ATARI, **_same("A3C", "A3C_LSTM", "ACER", "Bootstrapped_DQN", "C51", "NEC", "NStepQ"),
               **_same("PPO_RND", "QR_DQN", "Rainbow"), UCB_with_Q_Ensembles="UCB"),
    **_missing("MontezumaRevenge", "-p Atari_Dueling_DDQN_with_PER_OpenAI -lvl montezuma_revenge", BC="BC"),
    **_missing("Doom_Basic", _ANY_DOOM, **_same("A3C", "ACER", "BC", "DFP")),
    **_missing("Doom_Battle", "-p doom-basic -lvl VizdoomDeathmatch-v1, which is PPO", DFP="DFP"),
    **_missing("Doom_Health", _HEALTH, **_same("DFP", "MMC")),
    **_missing("Doom_Health_Supreme", _SUPREME, DFP="DFP"),
    **_missing("Mujoco", _ANY_MUJOCO, **_same("A3C", "A3C_LSTM", "DDPG", "NAF", "SAC", "TD3", "Wolpertinger")),
    **_missing("InvertedPendulum", "-p Mujoco_ClippedPPO -lvl inverted_pendulum", PG="PG"),
    **_missing("Pendulum", "ludus train Pendulum-v1 --run PPO", HAC="HAC"),
    **_missing("Fetch", _YOURS_PPO, DDPG_HER_baselines="HER"),
    **_missing("ControlSuite", "-p Mujoco_ClippedPPO -lvl walker2d", DDPG="DDPG"),
    **_missing("BitFlip", _YOURS_DQN, DQN_HER="HER"),
    **_missing("ExplorationChain", _YOURS_DQN, Bootstrapped_DQN="Bootstrapped_DQN", UCB_Q_ensembles="UCB"),
    **_missing("RoboSuite", _YOURS_PPO, CubeExp_Random="Random", CubeExp_TD3_Goal_Based="TD3", CubeExp_TD3_Intrinsic_Reward="TD3"),
    **_missing("CARLA", _YOURS_PPO, CIL="CIL", DDPG="DDPG", **{"3_Cameras_DDPG": "DDPG"}),
    **_missing("Starcraft_CollectMinerals", _YOURS_PPO, A3C="A3C"),
    "BitFlip_DQN": UnsupportedPreset(_TOY, _YOURS_DQN),
    "ExplorationChain_Dueling_DDQN": UnsupportedPreset(_TOY, _YOURS_DQN),
    "ShortCorridor_PG": UnsupportedPreset(_TOY, _YOURS_PPO),
    "CARLA_Dueling_DDQN": UnsupportedPreset(_CARLA, _YOURS_DQN),
    "RoboSuite_Lift_ClippedPPO": UnsupportedPreset(_ROBOSUITE, _YOURS_PPO),
    "Starcraft_CollectMinerals_Dueling_DDQN": UnsupportedPreset(_STARCRAFT, _YOURS_DQN),
}  # fmt: skip
"""Name in Coach → why not."""
