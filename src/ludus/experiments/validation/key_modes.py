"""The table of keys of `config:` that have no effect in some training modes, with reasons; used by validation and the docs.

A key without effect is an error unless it has its default value. A key that another setting switches off gives a notice. Saved
configurations are not checked, as they contain every key.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ludus.config.problem import ConfigProblem
from ludus.config.schema import EMBEDDED, EXTERNAL, GAMECORE, AlgorithmConfig
from ludus.envs.vector_env import row_info, training_env_config
from ludus.errors import ConfigError


class TrainingMode(enum.Enum):
    """How a run collects experience. Local workers and those of a Ray cluster are the same mode."""

    IN_PROCESS = "in this process (num_workers: 0)"
    IN_TURN = "workers, sampling: sync"
    PIPELINED = "workers, sampling: pipelined"
    ASYNC = "workers, sampling: async"
    FLEET = "a fleet, sampling: sync"
    FLEET_ASYNC = "a fleet, sampling: async"
    EXTERNAL = "env: external"
    AGENTS = "several agents"
    AGENTS_IN_TURN = "several agents, workers, sampling: sync"
    AGENTS_PIPELINED = "several agents, workers, sampling: pipelined"
    AGENTS_ASYNC = "several agents, workers, sampling: async"


_AGENT_MODES = {
    "sync": TrainingMode.AGENTS_IN_TURN,
    "pipelined": TrainingMode.AGENTS_PIPELINED,
    "async": TrainingMode.AGENTS_ASYNC,
}
SEVERAL_AGENTS = frozenset({TrainingMode.AGENTS, *_AGENT_MODES.values()})


def mode_of(env: str, memory: str, config: AlgorithmConfig, *, several: bool) -> TrainingMode:
    if env == EXTERNAL:
        return TrainingMode.EXTERNAL
    if several and memory == EMBEDDED:
        return _AGENT_MODES[config.sampling] if config.num_workers else TrainingMode.AGENTS
    if memory != EMBEDDED:
        return TrainingMode.FLEET_ASYNC if config.sampling == "async" else TrainingMode.FLEET
    if not config.num_workers:
        return TrainingMode.IN_PROCESS
    return {"sync": TrainingMode.IN_TURN, "pipelined": TrainingMode.PIPELINED, "async": TrainingMode.ASYNC}[config.sampling]


_ON_DEMAND = "batches are sampled on demand here, so none waits for the learner"
_ALWAYS_FRESH = "experience is at most one update old here"
_NO_WORKERS = "this process samples without workers"
_GAMES_PLAY = "games connect over HTTP; the run has no environments of its own"
_NO_EVALUATION = "games connect over HTTP; the run has no environment for evaluations. Play evaluation games with `ludus serve`"
_FLEET_WORKERS = "fleet workers are started and restarted outside of this run"
_GATEWAYS = "it applies to workers that step environments; here games connect over HTTP"

_LOCAL_WORKERS: Mapping[TrainingMode, str] = {
    TrainingMode.IN_PROCESS: _NO_WORKERS,
    TrainingMode.FLEET: _FLEET_WORKERS,
    TrainingMode.FLEET_ASYNC: _FLEET_WORKERS,
    TrainingMode.EXTERNAL: _GATEWAYS,
    TrainingMode.AGENTS: _NO_WORKERS,
}

WITHOUT_EFFECT: Mapping[str, Mapping[TrainingMode, str]] = {
    "blocks_ahead": {
        TrainingMode.IN_PROCESS: _ON_DEMAND,
        TrainingMode.IN_TURN: _ON_DEMAND,
        TrainingMode.EXTERNAL: _GAMES_PLAY,
        TrainingMode.AGENTS: _ON_DEMAND,
        TrainingMode.AGENTS_IN_TURN: _ON_DEMAND,
    },
    "max_lag": {
        TrainingMode.IN_PROCESS: _ALWAYS_FRESH,
        TrainingMode.IN_TURN: _ALWAYS_FRESH,
        TrainingMode.PIPELINED: _ALWAYS_FRESH,
        TrainingMode.FLEET: _ALWAYS_FRESH,
        TrainingMode.EXTERNAL: "batches of games are trained on as they arrive",
        TrainingMode.AGENTS: _ALWAYS_FRESH,
        TrainingMode.AGENTS_IN_TURN: _ALWAYS_FRESH,
        TrainingMode.AGENTS_PIPELINED: _ALWAYS_FRESH,
    },
    "sampling": {TrainingMode.EXTERNAL: "games decide when they play"},
    "inference_device": {TrainingMode.EXTERNAL: "requests of games are answered on the CPU"},
    "restart_failed_sub_environments": {TrainingMode.EXTERNAL: _GAMES_PLAY},
    "min_nodes": _LOCAL_WORKERS,
    "max_worker_restarts": _LOCAL_WORKERS,
    "worker_restart_backoff_s": _LOCAL_WORKERS,
    "worker_hang_s": _LOCAL_WORKERS,
    "num_envs_per_worker": {TrainingMode.EXTERNAL: _GAMES_PLAY},
    "evaluation_interval": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_interval_unit": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_duration": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_duration_unit": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_num_workers": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_video": {TrainingMode.EXTERNAL: _NO_EVALUATION},
    "evaluation_config": {TrainingMode.EXTERNAL: _NO_EVALUATION},
}
"""Key → the modes in which it has no effect, with the reason."""

REFUSED_ELSEWHERE: Mapping[str, frozenset[TrainingMode]] = {
    "batch_mode": frozenset(
        {
            TrainingMode.PIPELINED,
            TrainingMode.FLEET,
            TrainingMode.FLEET_ASYNC,
            TrainingMode.EXTERNAL,
            TrainingMode.AGENTS_PIPELINED,
        }
    ),
    "preprocess": frozenset({TrainingMode.EXTERNAL}),
    "wrappers": frozenset({TrainingMode.EXTERNAL}),
    "multiagent": frozenset(TrainingMode) - SEVERAL_AGENTS,
}
"""Key → modes in which other checks refuse it."""

EVERYWHERE = frozenset(
    {
        "seed", "num_learners", "gradient_accumulation", "mixed_precision", "learner_device", "num_gpus", "rollout_fragment_length",
        "train_batch_size", "gamma", "explore", "observation_filter", "env_config", "model", "metrics_num_episodes_for_smoothing",
        "min_time_s_per_iteration", "min_sample_timesteps_per_iteration", "learner_threads", "torch_threads", "start_timeout_s",
        "num_workers", "self_play", "display",
    }
)  # fmt: skip
"""Keys that every mode uses; `self_play` if the game has two sides."""

_OF_EVALUATION_WORKERS = frozenset({"max_worker_restarts", "worker_restart_backoff_s", "worker_hang_s"})


def find_ineffective_keys(
    env: str, memory: str, config: AlgorithmConfig, given: Mapping[str, str], *, several: bool
) -> list[ConfigProblem]:
    """Keys without effect in the mode of this experiment. `given`: key → as it is written, of the keys that somebody set."""
    mode = mode_of(env, memory, config, several=several)
    found = []
    for key, written in given.items():
        reason = WITHOUT_EFFECT.get(key, {}).get(mode)
        if reason is None or is_default(config, key) or _is_used(key, config, mode):
            continue
        path = f"config.{written}"
        found.append(ConfigProblem(f"{path} has no effect with {mode.value}: {reason}. Leave it out.", path))
    if _scale_is_unused(config) and "preprocess" in given:
        path = "config.preprocess.scale"
        found.append(
            ConfigProblem(f"{path} has no effect with model.custom_model: a custom model scales its observations itself.", path)
        )
    return found


def is_default(config: AlgorithmConfig, key: str) -> bool:
    field = type(config).model_fields[key]
    return bool(getattr(config, key) == field.get_default(call_default_factory=True))


def _is_used(key: str, config: AlgorithmConfig, mode: TrainingMode) -> bool:
    """Exceptions: evaluation workers use worker keys, and external games allow evaluation_duration 0."""
    if key == "evaluation_duration":
        return config.evaluation_duration == 0
    return key in _OF_EVALUATION_WORKERS and mode is not TrainingMode.EXTERNAL and config.evaluation_num_workers > 0


def _scale_is_unused(config: AlgorithmConfig) -> bool:
    return config.model.custom_model is not None and config.preprocess.scale not in (None, True)


def find_idle_self_play(env: str, config: AlgorithmConfig) -> str | None:
    """Why `self_play` has no effect; None if it has, or is not set. Makes the environment."""
    if config.self_play.checkpoint is not None:
        return f"config.self_play.opponents is fixed, which is for environments with several agents; {env} has one. Leave it out."
    if is_default(config, "self_play"):
        return None
    if env == EXTERNAL:
        sampled = config.self_play.opponents is not None
        return (
            None if sampled else "config.self_play has no effect without opponents: all sessions learn, with the newest version."
        )
    try:
        env_config = training_env_config(env, config.env_config, config.self_play)
    except ConfigError as error:
        return str(error)
    if env == GAMECORE:  # whether it has opponents follows from its config
        return None
    rows = row_info(env, config.num_envs_per_worker, env_config, preprocess=config.preprocess, wrappers=config.wrappers)
    if rows.has_opponents:
        return None
    return (
        f"config.self_play has no effect: {env} has no opponents from the past. Leave it out, or give the environment some in "
        "config.env_config, as {opponent: past}; for PettingZoo environments all agents learn anyway."
    )


# -- keys that another setting switches off ------------------------------------------------------------------------------

_Switch = Callable[[Any], str | None]


def _not_recurrent(config: Any) -> str | None:
    recurrent = config.model.core or config.model.use_lstm or config.model.custom_model is not None
    return None if recurrent else "the model has no recurrent layer (model.core)"


def _never_evaluated(config: Any) -> str | None:
    return None if config.evaluation_duration else "evaluation_duration is 0"


def _no_interval(config: Any) -> str | None:
    with_checkpoints = config.evaluation_interval == "checkpoint" and config.evaluation_duration
    return "evaluation_interval is checkpoint" if with_checkpoints else _never_evaluated(config)


def _no_priorities(config: Any) -> str | None:
    return (
        None if config.replay_buffer_config.prioritized else "replay_buffer_config.type is ReplayBuffer, which has no priorities"
    )


def _no_penalty(config: Any) -> str | None:
    return None if config.kl_coeff else "kl_coeff is 0"


SWITCHED_OFF: Mapping[str, _Switch] = {
    "model.cell_size": _not_recurrent,
    "model.max_seq_len": _not_recurrent,
    "evaluation_interval": _never_evaluated,
    "evaluation_interval_unit": _no_interval,
    "evaluation_duration_unit": _never_evaluated,
    "evaluation_num_workers": _never_evaluated,
    "evaluation_video": _never_evaluated,
    "evaluation_config": _never_evaluated,
    "replay_buffer_config.alpha": _no_priorities,
    "replay_buffer_config.beta": _no_priorities,
    "replay_buffer_config.eps": _no_priorities,
    "kl_target": _no_penalty,
}
"""Key → why another key of the same experiment makes it useless, or None."""


def find_switched_off_keys(
    config: AlgorithmConfig, given: Mapping[str, Any], written: Mapping[str, str]
) -> Iterator[ConfigProblem]:
    """Of the keys that were given, those that another key switches off."""
    for key, switch in SWITCHED_OFF.items():
        section, _, inner = key.rpartition(".")
        there = given.get(section) if section else given
        name = inner or key
        if not isinstance(there, Mapping) or name not in there or (section or key) not in type(config).model_fields:
            continue
        owner = getattr(config, section) if section else config
        default = type(owner).model_fields[name].get_default(call_default_factory=True)
        reason = switch(config)
        if reason is not None and getattr(owner, name) != default:
            path = f"config.{written.get(key, key)}"
            yield ConfigProblem(f"{path} has no effect: {reason}.", path)
