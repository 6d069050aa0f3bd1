"""Coach's preset names: the equivalent preset of Ludus, or why there is none and the nearest one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

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


def find_preset(name: str) -> CoachPreset | UnsupportedPreset | None:
    """Look up a preset by name, ignoring case; None if Coach has no such preset."""
    known = canonical_name(name)
    return None if known is None else COACH_PRESETS.get(known) or unsupported_presets()[known]


def canonical_name(name: str) -> str | None:
    lowered = name.lower()
    return next((known for known in (*COACH_PRESETS, *unsupported_presets()) if known.lower() == lowered), None)


def environment_of(name: str, entry: CoachPreset, level: str | None, usual: str) -> str:
    """Return the environment of a level; other names are environments themselves. Raises UsageError."""
    if level is None:
        if entry.levels:
            some = [*list(entry.levels)[:6], *["…"] * (len(entry.levels) > 6)]
            raise UsageError(f"{name} is for several environments.", f"Choose one: -lvl {' | '.join(some)}")
        return usual
    if level in entry.levels:
        return entry.levels[level]
    if level in _REMOVED and entry.levels is MUJOCO:
        raise UsageError(f"-lvl {level}: Gymnasium has no {level} any more.", did_you_mean(level, entry.levels))
    if entry.levels and not any(mark in level for mark in (":", "/", "-v")):  # not an environment itself
        raise UnknownName(f"{name} has no level {level!r}.", did_you_mean(level, entry.levels))
    return level


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

# -- supported presets ------------------------------------------------------------------------------------------------

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
"""Name in Coach → the equivalent preset."""


@functools.cache
def unsupported_presets() -> Mapping[str, UnsupportedPreset]:
    """Name in Coach → why there is no equivalent."""
    text = resources.files(__package__).joinpath("unsupported_presets.yaml").read_text(encoding="utf-8")
    return {
        name: UnsupportedPreset(why, instead)
        for why, alternatives in yaml.safe_load(text).items()
        for instead, names in alternatives.items()
        for name in names
    }
