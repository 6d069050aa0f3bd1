"""Resolution of an experiment: check it completely before anything starts, and give every key its value."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.algorithms.base import Algorithm
from ludus.config.schema import EXTERNAL, AlgorithmConfig, ExperimentConfig, StopConfig
from ludus.config.translation import canonical_config
from ludus.config.validation import check_experiment, dump_config, parse_algorithm_config, parse_external_config
from ludus.envs.legacy_names import current_name
from ludus.envs.vector_env import check_exists, reward_threshold
from ludus.errors import ConfigError, EnvironmentFault, UsageError
from ludus.experiments.validation import agent_mapping, iteration_units, validate
from ludus.experiments.validation.validate import ParsedExperiment
from ludus.models.devices import learner_device, named_device
from ludus.process.host import usable_cores
from ludus.process.job_env import JobEnv
from ludus.transport.message_stream import EMBEDDED, check_url

log = logging.getLogger(__name__)

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
    algorithm = validate.algorithm_of(experiment.run)
    multi_agent = parsed.is_multi_agent
    if not external and not multi_agent:
        check_exists(experiment.env)
    if experiment.memory == EMBEDDED:
        config = parsed.algorithm_config
    else:
        config = _with_fleet_worker(parsed).algorithm_config
        _check_fleet(experiment.memory, config, cluster, external=external, multi_agent=multi_agent)
    if external:
        from ludus.experiments.validation.game_seats import seats_of

        seats_of(parse_external_config(config.env_config))
    _check_mode(config, cluster, external=external)
    if multi_agent:
        config = agent_mapping.resolve_agents(experiment.env, algorithm.Config, config)
    elif config.multiagent is not None:
        raise ConfigError(
            f"config.multiagent is for environments with several agents; {experiment.env} has one.", "Leave it out."
        )
    stop, config = iteration_units.resolve_iterations(experiment.stop, config)
    if not stop.model_dump(exclude_none=True):
        solved = None if external or multi_agent else reward_threshold(experiment.env)
        stop = StopConfig(timesteps=DEFAULT_TIMESTEPS, episode_return_mean=solved)
    experiment = experiment.model_copy(update={"stop": stop, "config": dump_config(config)})
    return ResolvedExperiment(experiment, algorithm, config, cluster)


def _with_fleet_worker(parsed: ParsedExperiment) -> ParsedExperiment:
    """In a fleet `num_workers` is the number of equally sized segments in a batch, from any worker: at least one."""
    config = parsed.config_reading.data
    if config.get("num_workers") not in (None, 0, "auto"):
        return parsed
    return ParsedExperiment({**parsed.reading.data, "config": {**config, "num_workers": 1}})


def _check_fleet(
    memory: str, config: AlgorithmConfig, cluster: ClusterOptions | None, *, external: bool, multi_agent: bool
) -> None:
    check_url(memory)
    for conflict, reason in (
        (external, "games call the learner itself"),
        (multi_agent, "several agents are sampled by the learner itself"),
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
        named_device(config.inference_device, "inference_device")


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


# -- num_workers: auto --------------------------------------------------------------------------------------------------


def choose_num_workers(
    parsed: ParsedExperiment, announce: Announce | None = None, cluster: ClusterOptions | None = None
) -> ParsedExperiment:
    """Replace `num_workers: auto` by a number, which is saved with the run. May measure the environment."""
    if not isinstance(parsed.config, Mapping) or not isinstance(parsed.run, str):
        return parsed  # `resolve` reports what is wrong with it
    if parsed.config_reading.data.get("num_workers") != "auto":
        return parsed
    config = canonical_config(parsed.config, validate.algorithm_of(parsed.run).Config)
    if cluster is not None and cluster.asked_for:
        raise ConfigError(
            "config.num_workers is auto, which looks at this machine alone, and a cluster is named.",
            "Give a number: one worker for every core of the cluster is a good start.",
        )
    number, reason = _choose_number(parsed, config, announce)
    if number == 0 and config.get("sampling") == "pipelined":
        number = 1
    message = f"num_workers: {number} ({reason})"
    log.info("%s", message)
    if announce is not None:
        announce(message)
    return ParsedExperiment(_with_config(parsed, {**config, "num_workers": number}))


def _with_config(parsed: ParsedExperiment, config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with another `config:`, from which `env` has been taken out."""
    env = {} if parsed.env is None else {"env": parsed.env}
    return {**parsed.data, **env, "config": dict(config)}


def _choose_number(parsed: ParsedExperiment, config: Mapping[str, Any], announce: Announce | None) -> tuple[int, str]:
    cores = usable_cores()
    if parsed.memory != EMBEDDED:
        return 1, "workers of a fleet come by themselves"
    if parsed.env == EXTERNAL:
        return max(0, cores - 1), f"one for every core but that of the learner, of {cores}"
    if parsed.is_multi_agent:
        return 0, "several agents are sampled by this process"
    from ludus.experiments.assembly.auto_workers import choose_workers

    any_batch = {key: value for key, value in config.items() if key != "train_batch_size"}
    alone = resolve(_with_config(parsed, any_batch | {"num_workers": 0, "sampling": "sync"}))
    measured = parse_algorithm_config(alone.algorithm.Config, any_batch)
    if announce is not None:
        announce("measuring the environment …")
    return choose_workers(alone.experiment.env, alone.algorithm, measured, config, cores * job_nodes())


def job_nodes() -> int:
    """Number of machines in the Ray cluster of this process's job, which are assumed to be alike; 1 without such a job."""
    job = JobEnv.from_environ(os.environ)
    return len(job.nodes) if job is not None and job.ray else 1
