"""Resolution of an experiment: check it completely before anything starts, and give every key its value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.algorithms.base import Algorithm
from ludus.config.schema import EMBEDDED, EXTERNAL, AlgorithmConfig, ExperimentConfig, StopConfig
from ludus.config.validation import check_experiment, dump_config, parse_algorithm_config, parse_external_config
from ludus.envs.legacy_names import current_name
from ludus.envs.vector_env import check_exists, has_opponent_rows, reward_threshold, training_env_config
from ludus.errors import ConfigError, EnvironmentFault, UsageError
from ludus.experiments.validation import validate
from ludus.experiments.validation.validate import ParsedExperiment
from ludus.models.devices import learner_device, parse_device
from ludus.process import screen_choice
from ludus.process.job_env import JobEnv

DEFAULT_TIMESTEPS = 1_000_000

Announce = Callable[[str], None]
"""Takes a sentence for the person who started the run."""

_RAY_VARIABLES = ("RAY_ADDRESS", "ip_head")


@dataclass(frozen=True)
class ClusterOptions:
    """The Ray cluster of a run: HOST:PORT, `auto`, or `local` for one that the run starts itself."""

    address: str
    num_cpus: int | None = None
    object_store_memory: int | None = None
    asked_for: bool = True
    """Named by an option. False: by an environment variable, which may be meant for other programs."""


@dataclass(frozen=True)
class ResolvedExperiment:
    """A checked experiment in which every key has its value."""

    experiment: ExperimentConfig
    algorithm: type[Algorithm]
    config: AlgorithmConfig
    cluster: ClusterOptions | None = None
    """Not part of the experiment: the same one runs on any cluster."""

    def to_dict(self) -> dict[str, Any]:
        """The contents of `config.yaml`."""
        data = self.experiment.model_dump(mode="json")
        name = data.pop("name")
        return {name: data}

    @property
    def is_external(self) -> bool:
        """Games call this run over HTTP."""
        return self.experiment.env == EXTERNAL


def resolve(data: Mapping[str, Any], cluster: ClusterOptions | None = None) -> ResolvedExperiment:
    """Check everything that can be checked before anything starts. Raises UsageError with all that is wrong."""
    return resolve_parsed(ParsedExperiment(data), cluster)


def resolve_parsed(parsed: ParsedExperiment, cluster: ClusterOptions | None = None) -> ResolvedExperiment:
    try:
        return _resolve(parsed, cluster)
    except (UsageError, EnvironmentFault) as error:
        problems = validate.validate_experiment(parsed.data)
        if len(problems) < 2:
            raise
        raise ConfigError("\n".join(problems)) from error


def _resolve(parsed: ParsedExperiment, cluster: ClusterOptions | None) -> ResolvedExperiment:
    experiment = check_experiment(parsed.reading)
    experiment = experiment.model_copy(update={"env": current_name(experiment.env).name})
    external = experiment.env == EXTERNAL
    screen_choice.configure(parsed.config_reading.data.get("display", screen_choice.AUTO))
    algorithm = validate.algorithm_of(experiment.run)
    multi_agent = parsed.is_multi_agent
    if not external and not multi_agent:
        check_exists(experiment.env)
    if experiment.memory == EMBEDDED:
        config = parsed.algorithm_config
    else:
        config = _with_fleet_worker(parsed).algorithm_config
        _check_fleet(experiment.memory, config, cluster, external=external)
    if external:
        from ludus.experiments.validation.game_seats import check_self_play, seats_of

        check_self_play(config.self_play, seats_of(parse_external_config(config.env_config)))
    _check_mode(config, cluster, external=external)
    if multi_agent:
        from ludus.experiments.validation.agent_mapping import resolve_agents

        config = resolve_agents(experiment.env, algorithm.Config, config)
        if experiment.memory != EMBEDDED and config.multiagent is not None and len(config.multiagent.names()) > 1:
            raise ConfigError(
                f"memory is {experiment.memory}, and the agents have several policies: {', '.join(config.multiagent.names())}.",
                "A fleet trains one policy: use one for all agents, or num_workers with memory: embedded.",
            )
    elif config.multiagent is not None:
        raise ConfigError(
            f"config.multiagent is for environments with several agents; {experiment.env} has one.", "Leave it out."
        )
    if config.self_play.opponents == "league" and not multi_agent:
        _check_two_sides(experiment.env, config)
    stop, config = resolve_iterations(experiment.stop, config)
    if not stop.model_dump(exclude_none=True):
        solved = None if external or multi_agent else reward_threshold(experiment.env)
        stop = StopConfig(timesteps=DEFAULT_TIMESTEPS, episode_return_mean=solved)
    experiment = experiment.model_copy(update={"stop": stop, "config": dump_config(config)})
    return ResolvedExperiment(experiment, algorithm, config, cluster)


def _check_two_sides(env: str, config: AlgorithmConfig) -> None:
    """Raises ConfigError unless a player of a league can play the other side of the matches of this environment."""
    if env == EXTERNAL:
        from ludus.experiments.validation.game_seats import check_match_processes, seats_of

        check_match_processes(config.self_play, seats_of(parse_external_config(config.env_config)), config.workers)
        return
    env_config = training_env_config(env, config.env_config, config.self_play)
    if not has_opponent_rows(env, config.num_envs_per_worker, env_config, config.preprocess, config.wrappers):
        raise ConfigError(
            f"config.self_play.opponents is league, and {env} has no side that players of a league can play.",
            "Environments with several agents and vector environments with opponent rows, such as the Arena, have one.",
        )


def _with_fleet_worker(parsed: ParsedExperiment) -> ParsedExperiment:
    """In a fleet `num_workers` is the number of equally sized segments in a batch, from any worker: at least one."""
    config = parsed.config_reading.data
    if config.get("num_workers") not in (None, 0, "auto"):
        return parsed
    return ParsedExperiment({**parsed.reading.data, "config": {**config, "num_workers": 1}})


def _check_fleet(memory: str, config: AlgorithmConfig, cluster: ClusterOptions | None, *, external: bool) -> None:
    from ludus.transport.message_stream import check_url

    check_url(memory)
    for conflict, reason in (
        (external, "games call the learner itself"),
        (cluster is not None and cluster.asked_for, "an address of a Ray cluster is given, whose workers bring it"),
        (
            config.batch_mode == "complete_episodes",
            "config.batch_mode is complete_episodes, which workers of a fleet do not make",
        ),
        (
            config.sampling == "pipelined",
            "config.sampling is pipelined; workers of a fleet sample in turn (sync) or freely (async)",
        ),
    ):
        if conflict:
            raise ConfigError(f"memory is {memory}, and {reason}.", "Leave one of them out.")


def _check_mode(config: AlgorithmConfig, cluster: ClusterOptions | None, *, external: bool) -> None:
    if cluster is not None and cluster.asked_for and (external or not config.workers):
        raise ConfigError(
            f"A cluster ({cluster.address}) is where workers sample, and this run has none.",
            "Set num_workers, or leave the address out.",
        )
    if config.sampling == "pipelined" and not config.workers:
        raise ConfigError(
            "config.sampling is pipelined, and num_workers is 0.", "Set num_workers: other processes have to sample."
        )
    if config.batch_mode == "complete_episodes" and (external or (config.workers and config.sampling != "async")):
        raise ConfigError(
            "config.batch_mode is complete_episodes, and "
            + ("games call us." if external else "workers take turns with the learner, a block for every update."),
            "Use truncate_episodes: the value of the last observation replaces the rest of an unfinished episode."
            if external
            else "Set num_workers: 0, or sampling: async with IMPALA or APPO, or use truncate_episodes.",
        )
    if external and (config.wrappers or config.preprocess.changes_environment):
        key = "wrappers" if config.wrappers else "preprocess"
        raise ConfigError(f"config.{key} is for environments that we call, and here games call us.", "Do it in the game.")
    learner_device(config.learner_device, config.num_gpus)
    if cluster is None or external or not config.workers:  # else other machines, with other devices, compute the actions
        parse_device(config.inference_device, "inference_device")


def cluster_of(option: str | None, num_cpus: int | None = None, object_store_memory: int | None = None) -> ClusterOptions | None:
    """The Ray cluster named by the option, RAY_ADDRESS, ip_head or the job of this process; None without any. Raises UsageError."""
    address = None
    if option or any(map(os.environ.get, _RAY_VARIABLES)) or JobEnv.from_environ(os.environ) is not None:
        from ludus.ray_cluster.cluster import address_of

        address = address_of(option, os.environ)
    if address is None:
        if num_cpus is not None or object_store_memory is not None:
            raise UsageError("--ray-num-cpus and --ray-object-store-memory are for a Ray.", "Add --address local.")
        return None
    return ClusterOptions(address, num_cpus, object_store_memory, asked_for=bool(option))


def job_nodes() -> int:
    """Number of machines in the Ray cluster of this process's job, which are assumed to be alike; 1 without such a job."""
    job = JobEnv.from_environ(os.environ)
    return len(job.nodes) if job is not None and job.ray else 1


# -- iterations: `iterations` counts updates, `training_iteration` counts iterations as RLlib does --------------------------

_RLLIB_ITERATION: Mapping[str, str] = {"DQN": "1,000 steps or more", "APPO": "10 seconds or more", "IMPALA": "10 seconds or more"}
"""From RLlib's default min_sample_timesteps_per_iteration and min_time_s_per_iteration; an iteration of PPO is one batch, as here."""


def resolve_iterations(stop: StopConfig, config: AlgorithmConfig) -> tuple[StopConfig, AlgorithmConfig]:
    """Replace `training_iteration` by `iterations` where both count updates, and set the time between reports."""
    if stop.training_iteration is not None and config.least_iteration == (0, 0.0):
        fewer = min(stop.training_iteration, stop.iterations or stop.training_iteration)
        stop = stop.model_copy(update={"iterations": fewer, "training_iteration": None})
    if stop.training_iteration is None:
        config = config.model_copy(update={"min_time_s_per_iteration": config.report_every_s})
    return stop, config


def iteration_keys(experiment: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Keys that count updates in this experiment but iterations in RLlib."""
    keys = ["checkpoint_freq"] if experiment.get("checkpoint_freq") else []
    unit = config.get("evaluation_interval_unit", "iterations")
    if unit == "iterations" and config.get("evaluation_interval") not in (None, 0, "checkpoint"):
        keys.append("evaluation_interval")
    return keys


def iteration_notice(run: str, config: AlgorithmConfig, keys: list[str]) -> str | None:
    """A notice for users of RLlib; None if the keys mean the same."""
    if run not in _RLLIB_ITERATION or not keys:
        return None
    count = "counts" if len(keys) == 1 else "count"
    return (
        f"{' and '.join(keys)} {count} updates ({steps_of_update(config):,} steps sampled for each); "
        f"an iteration of RLlib's {run} is {_RLLIB_ITERATION[run]}."
    )


def iteration_notice_of_file(
    run: str, schema: type[AlgorithmConfig], experiment: Mapping[str, Any], config: Mapping[str, Any]
) -> str | None:
    """As `iteration_notice`, for an unresolved experiment. `config`: as written, without search values."""
    keys = iteration_keys(experiment, config)
    if run not in _RLLIB_ITERATION or not keys:
        return None
    checked = parse_algorithm_config(schema, config, collated=True)  # whether a batch fits is no matter here
    return iteration_notice(run, checked, keys)


def steps_of_update(config: AlgorithmConfig) -> int:
    """Environment steps that are sampled for one update."""
    if not config.replays:
        return config.train_batch_size
    workers = 0 if config.num_workers == "auto" else config.num_workers
    return config.num_envs_per_worker * config.steps * (1 if config.sampling == "async" else max(1, workers))
