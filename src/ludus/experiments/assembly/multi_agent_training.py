"""Experiments with several agents in one environment: who plays whom, and the program that trains all of them."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.algorithms.base import Algorithm
from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig, MultiAgentConfig
from ludus.config.section import check_model_name
from ludus.config.translation import canonical_config, nested_schema
from ludus.config.validation import parse_algorithm_config
from ludus.core import trust
from ludus.core.metrics import Sink
from ludus.core.plugins import did_you_mean, import_object
from ludus.core.types import DEFAULT_MODEL
from ludus.envs import pettingzoo as games
from ludus.envs.pettingzoo import AgentSpaces, Match, Whole, central_space
from ludus.errors import ConfigError, Interrupted
from ludus.experiments.assembly import byte_scales
from ludus.experiments.assembly.components import (
    Resolved,
    count_on,
    embedding_bound,
    make_conductor,
    make_policy,
    make_pool,
    opened,
)
from ludus.experiments.assembly.http_training import Algorithms, Shared, add_models
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.program import Handle, Program
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import warn_of_cuts
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.byte_scales import Seen
from ludus.models.centralized_critic import OWN, WHOLE, actor_of
from ludus.models.devices import acting_on, named_device
from ludus.models.policy import PROBABILITIES, Policy
from ludus.models.weights.version_store import FixedSource, LocalPool
from ludus.sampling.episode_runner import Score, longest_episode, undisturbed
from ludus.sampling.multi_agent import Copies, MatchBatches, MultiSampler, play_matches
from ludus.sampling.opponents import RANDOM, Opponent, ZeroSum
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory

_ROWS = 16  # matches that are evaluated side by side
_SHOW_EVERY_S = 10.0
_SEEDS = 7919  # between the seeds of two policies: equal networks must not begin with equal weights


def is_meant(env: str, settings: Mapping[str, Any]) -> bool:
    """Whether an experiment has several agents: its environment says so, or its author does."""
    if settings.get("multiagent") is not None and ":" in env and "/" not in env:
        return True  # it need not be made to find out; whoever makes it says what is wrong
    return games.is_multi_agent(env, settings.get("env_config"))


# -- who plays whom -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """Which model plays which agent, and what its network takes."""

    agents: Mapping[str, str]
    spaces: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]


def resolved_config(env: str, schema: type[AlgorithmConfig], config: AlgorithmConfig) -> AlgorithmConfig:
    """The configuration with every agent named in it: all later work goes by that. Raises ConfigError, EnvironmentFault."""
    section = config.multiagent or MultiAgentConfig()
    _refuse_what_is_not_there(config)
    match = make_match(env, config)
    try:
        found = match.agents
    finally:
        match.close()
    mapping = assigned(list(found), section)
    policies = section.policies or list(dict.fromkeys(mapping.values()))
    named = section.model_copy(update={"policies": policies, "policy_mapping": mapping})
    whole = config.model_copy(update={"multiagent": named})
    _check_spaces(found, mapping)
    for policy in named.names():
        policy_config(schema, whole, policy)
    _check_trained(named)
    return whole


def _refuse_what_is_not_there(config: AlgorithmConfig) -> None:
    section = config.multiagent or MultiAgentConfig()
    if config.workers:
        raise ConfigError(
            f"config.num_workers is {config.workers}, and several agents in one environment are sampled by this process.",
            "Leave num_workers at 0; raise num_envs_per_worker.",
        )
    if config.evaluation_num_workers:
        raise ConfigError(
            f"config.evaluation_num_workers is {config.evaluation_num_workers}, and several agents are evaluated by this process.",
            "Leave it at 0.",
        )
    if config.evaluation_duration_unit != "episodes":
        raise ConfigError(
            f"config.evaluation_duration_unit is {config.evaluation_duration_unit}, and matches of several agents are counted.",
            "Leave it at episodes.",
        )
    if config.batch_mode != "truncate_episodes":
        raise ConfigError(
            "config.batch_mode is complete_episodes, which environments with several agents do not have.", "Leave it out."
        )
    if config.preprocess.changes_environment:
        raise ConfigError(
            "config.preprocess is for environments with one agent.",
            "Use wrappers of PettingZoo: config.wrappers, module:function.",
        )
    if section.centralized_value and config.learns != PROBABILITIES:
        raise ConfigError("config.multiagent.centralized_value is for policies with a value: PPO, APPO, IMPALA.", "Leave it out.")
    if section.centralized_value and config.model.custom_model is not None:
        raise ConfigError(
            "config.multiagent.centralized_value stands beside model.custom_model.",
            "A model of your own computes its value itself: leave one of them out.",
        )


def assigned(agents: Sequence[str], section: MultiAgentConfig) -> dict[str, str]:
    """Agent → policy, for all of them. Raises ConfigError."""
    listed, where = section.names(), "config.multiagent.policy_mapping"
    given = section.policy_mapping
    if given is None:
        mapping = _by_name(agents, listed)
    elif isinstance(given, str) and ":" in given:
        function = import_object(given, "policy mapping", _maps_agents)
        mapping = {agent: str(function(agent)) for agent in agents}
    elif isinstance(given, str):
        mapping = dict.fromkeys(agents, given)
    else:
        mapping = _by_patterns(agents, given, where)
    for agent, policy in mapping.items():
        if listed and policy not in listed:
            raise ConfigError(f"{where} gives {agent!r} to {policy!r}, which is no policy.", did_you_mean(policy, listed))
        check_model_name(policy, where)
    idle = [policy for policy in listed if policy not in mapping.values()]
    if idle:
        played = ", ".join(f"{agent}: {policy}" for agent, policy in mapping.items())
        raise ConfigError(f"The policy {idle[0]!r} plays no agent ({played}).", "Give it one in policy_mapping, or leave it out.")
    return mapping


def _maps_agents(found: Any, project: bool) -> bool:
    return project and inspect.isfunction(found) and trust.is_in_project(found.__module__)


def _by_name(agents: Sequence[str], listed: Sequence[str]) -> dict[str, str]:
    """Without a mapping: one policy for all, or policies that are called like the agents."""
    if not listed:
        return dict.fromkeys(agents, DEFAULT_MODEL)
    if len(listed) == 1:
        return dict.fromkeys(agents, listed[0])
    missing = [agent for agent in agents if agent not in listed]
    if missing:
        raise ConfigError(
            f"config.multiagent has {len(listed)} policies, and nothing says which of them plays {missing[0]!r}.",
            "Set policy_mapping: {agent or pattern: policy}.",
        )
    return {agent: agent for agent in agents}


def _by_patterns(agents: Sequence[str], given: Mapping[str, str], where: str) -> dict[str, str]:
    mapping: dict[str, str] = {}
    used: set[str] = set()
    for agent in agents:
        fitting = [key for key in given if key == agent] or [key for key in given if fnmatch.fnmatchcase(agent, key)]
        if not fitting:
            raise ConfigError(
                f"{where} does not say who plays the agent {agent!r}; the agents are {', '.join(agents)}.",
                "Add it, or a pattern like red_* or *.",
            )
        if len({given[key] for key in fitting}) > 1:
            shown = " and ".join(repr(key) for key in fitting)
            raise ConfigError(f"{where} gives {agent!r} to several policies, by {shown}.", "Keep one of them.")
        mapping[agent] = given[fitting[0]]
        used.update(fitting)
    unused = [key for key in given if key not in used and not any(fnmatch.fnmatchcase(agent, key) for agent in agents)]
    if unused:
        raise ConfigError(f"{where} names {unused[0]!r}, which is no agent.", did_you_mean(unused[0], agents))
    return mapping


def _check_spaces(agents: Mapping[str, AgentSpaces], mapping: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for agent, policy in mapping.items():
        other = first.setdefault(policy, agent)
        for what in ("observation", "action"):
            mine, theirs = getattr(agents[agent], what), getattr(agents[other], what)
            if mine != theirs:
                raise ConfigError(
                    f"The policy {policy!r} plays {other!r} and {agent!r}, whose {what} spaces differ: {theirs} and {mine}.",
                    "Give each kind of agent a policy of its own: config.multiagent.policy_mapping.",
                )


def _check_trained(section: MultiAgentConfig) -> None:
    trained, names = section.policies_to_train, section.names()
    for policy in trained or ():
        if policy not in names:
            raise ConfigError(f"config.multiagent.policies_to_train names {policy!r}.", did_you_mean(policy, names))
    if trained is not None and not trained:
        raise ConfigError("config.multiagent.policies_to_train is empty: nothing would be learned.", "Name a policy.")


_OWN = frozenset({"gamma", "model", "observation_filter", "seed"})
"""Keys of every algorithm in which policies may differ; those of an algorithm itself may all."""


def policy_config(schema: type[AlgorithmConfig], config: AlgorithmConfig, policy: str) -> AlgorithmConfig:
    """The configuration of one policy: that of the run, with the keys in which it differs. Raises ConfigError."""
    assert config.multiagent is not None
    where, own = f"config.multiagent.policies.{policy}", canonical_config(config.multiagent.own_keys(policy))
    common = sorted(AlgorithmConfig.model_fields.keys() - _OWN)
    for key in own:
        if key in common:
            raise ConfigError(f"{where}.{key}: all policies have this in common.", "Set it in config:.")
    seed = (config.seed + _SEEDS * config.multiagent.names().index(policy)) % (1 << 30)
    if not own:
        return config.model_copy(update={"seed": seed})
    base = config.model_dump(by_alias=True)
    for key, value in own.items():
        field = schema.model_fields.get(key)
        if isinstance(value, Mapping) and field is not None and nested_schema(field.annotation) and base[key] is not None:
            own[key] = {**base[key], **value}  # of a section only what is said; what is no section is one value
    try:
        return parse_algorithm_config(schema, {**base, "seed": seed, **own}, collated=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from error


def cast_of(match: Match, section: MultiAgentConfig) -> Cast:
    """Of a resolved configuration. With a centralised value the networks take the whole beside the observation."""
    assert isinstance(section.policy_mapping, Mapping)
    mapping = dict(section.policy_mapping)
    whole = Whole(match.agents, match.state_space).space if section.centralized_value else None
    taken = {}
    for agent, policy in mapping.items():
        own = match.agents[agent]
        taken[policy] = (own.observation if whole is None else central_space(own.observation, whole), own.action)
    return Cast(mapping, {policy: taken[policy] for policy in section.names()})


# -- the program --------------------------------------------------------------------------------------------------------


def make_match(env: str, config: AlgorithmConfig, render_mode: str | None = None) -> Match:
    """The environment as this run plays it, in the wrappers that its config names."""
    return games.make_match(env, config.env_config, render_mode, config.wrappers)


def program_of(
    resolved: Resolved,
    open_run: Callable[[], Run],
    before: Checkpoint | None,
    sinks: Sequence[Sink],
    environment_seed: int,
    counting_on: bool,
    interrupted: Callable[[], bool],
    announce: Callable[[str], None] | None = None,
) -> tuple[Program, tuple[Handle, ...]]:
    """Which components such a run has and how they are joined."""
    e, config, kind = resolved.experiment, resolved.config, resolved.algorithm
    assert config.multiagent is not None
    names = config.multiagent.names()
    of_each = {name: policy_config(kind.Config, config, name) for name in names}
    program = Program()
    clock = program.add("clock", RunClock, e.stop.time_s)
    stop = program.add("stop", StopCheck, interrupted, clock)
    copies = program.add("environments", _copies, e.env, config, stop)
    cast = program.add("cast", _cast, copies, config)
    opponent = program.add("opponent", _opponent, cast, config)
    policies = program.add("policies", _policies, cast, of_each, config, e.env, before, announce)
    program.add("memory check", check_memory, resolved, policies)
    algorithms = program.add("algorithms", Algorithms, kind, policies, of_each, before)
    run = program.add("run", _opened, open_run, policies, config)
    learning = program.add("learning", Shared, algorithms, policies, of_each, run)
    pool = program.add("pool", make_pool, run, before if counting_on else None)
    program.add("versions", add_models, pool, policies, before)
    batches = program.add("batches", _batches, policies, copies, config)
    sampler = program.add_worker("sampler", _sampler, copies, cast, pool, batches, config, environment_seed, stop)
    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = program.add_worker("trainer", _trainer, learning, batches, pool, smoothing, clock)
    program.add("counters", count_on, before if counting_on else None, trainer, sampler)
    evaluation = program.add("evaluation", _evaluation, resolved, cast, policies, opponent, sampler, stop)
    conductor = program.add_worker("conductor", make_conductor, trainer, sampler, pool, run, resolved, evaluation, sinks)
    return program, (run, sampler, trainer, conductor, pool)


def _copies(env: str, config: AlgorithmConfig, stop: StopCheck) -> Copies:
    """Raises Interrupted."""
    forgiving = config.restart_failed_sub_environments
    with stop.interruptible():
        return Copies(lambda: make_match(env, config), config.num_envs_per_worker, forgiving=forgiving, beat=stop.raise_if_due)


def _cast(copies: Copies, config: AlgorithmConfig) -> Cast:
    assert config.multiagent is not None
    return cast_of(copies[0], config.multiagent)


def _policies(
    cast: Cast,
    of_each: Mapping[str, AlgorithmConfig],
    config: AlgorithmConfig,
    env: str,
    before: Checkpoint | None,
    announce: Callable[[str], None] | None,
) -> dict[str, Policy]:
    assert config.multiagent is not None
    central = config.multiagent.centralized_value

    @functools.cache
    def look() -> dict[str, Seen]:
        return byte_scales.largest_seen_of_agents(lambda: make_match(env, config), cast.agents, config.seed, central=central)

    made = {}
    for name, (seen, done) in cast.spaces.items():
        scales = byte_scales.choose(seen, of_each[name], functools.partial(_seen_of, look, name), before, announce, name)
        policy = make_policy(seen, done, of_each[name], scales, central=central, embed_above=embedding_bound(before, name))
        made[name] = acting_on(policy, named_device(of_each[name].inference_device, "inference_device"))
    return made


def _seen_of(look: Callable[[], Mapping[str, Seen]], model: str) -> Seen:
    return look()[model]


def _opened(open_run: Callable[[], Run], policies: Mapping[str, Policy], config: AlgorithmConfig) -> Run:
    return opened(open_run, next(iter(policies.values())), config)


def _batches(policies: Mapping[str, Policy], copies: Copies, config: AlgorithmConfig) -> MatchBatches:
    """Room for all that may be recorded until a batch is complete, in segments of a single step if need be."""
    assert config.multiagent is not None
    trained = config.multiagent.policies_to_train or list(policies)
    agents = len(copies[0].agents)
    together = agents if config.multiagent.count_steps_by == "env_steps" else 1  # decisions in one of the steps that are counted
    blocks = config.train_batch_size * together + 4 * len(copies) * agents + 16
    steps = config.steps
    return MatchBatches({name: LocalMemory(session_spec(policies[name], steps, name), 1, blocks) for name in trained})


def _sampler(
    copies: Copies, cast: Cast, pool: LocalPool, batches: MatchBatches, config: AlgorithmConfig, seed: int, stop: StopCheck
) -> MultiSampler:
    assert config.multiagent is not None
    return MultiSampler(
        copies,
        cast.agents,
        {name: pool.source(name) for name in cast.spaces},
        batches,
        config.train_batch_size,
        seed,
        central=config.multiagent.centralized_value,
        explore=config.explore,
        smoothing=config.metrics_num_episodes_for_smoothing,
        by_env_steps=config.multiagent.count_steps_by == "env_steps",
        beat=stop.before_step,
        interruptible=stop.interruptible,
    )


def _trainer(
    algorithms: dict[str, Algorithm], batches: MatchBatches, pool: LocalPool, smoothing: int, clock: RunClock
) -> Trainer:
    return Trainer(algorithms, batches, pool, smoothing=smoothing, by_model=False, clock=clock)


# -- evaluation ---------------------------------------------------------------------------------------------------------


class MatchEvaluation:
    """Own copies of the environment, own seeds: training does not notice it."""

    def __init__(
        self,
        resolved: Resolved,
        cast: Cast,
        policies: Mapping[str, Policy],
        opponent: Opponent | None,
        zero_sum: ZeroSum,
        stop: StopCheck,
    ) -> None:
        """`opponent`: None plays the policies of the run, or chance once its matches are found to be zero-sum."""
        self._resolved, self._cast, self._stop = resolved, cast, stop
        self._opponent, self._zero_sum = opponent, zero_sum
        self._sources = {name: FixedSource(actor_of(policy)) for name, policy in policies.items()}
        self._copies: Copies | None = None

    @property
    def every_s(self) -> float | None:
        """Seconds of training between two evaluations for the display; None: only when the config wants one.

        The training return of a zero-sum game is always 0: only an evaluation shows whether anything is learned.
        """
        asked = self._resolved.config.evaluation_interval != "checkpoint"
        return None if asked or not self._zero_sum else _SHOW_EVERY_S

    def __call__(self, iteration: int) -> Score:
        try:
            with self._stop.interruptible():
                return self._score(iteration)
        except Interrupted:
            return Score((), (), complete=False)

    def _score(self, iteration: int) -> Score:
        config, env = self._resolved.config, self._resolved.experiment.env
        if self._copies is None:
            asked = config.evaluation_config.env_config
            other = config if asked is None else config.model_copy(update={"env_config": {**config.env_config, **asked}})
            rows = min(config.evaluation_duration, _ROWS)
            forgiving = config.restart_failed_sub_environments
            self._copies = Copies(
                lambda: make_match(env, other), rows, forgiving=forgiving, beat=self._stop.before_evaluation_step
            )
        with undisturbed():
            score = self._played(self._copies, (config.seed * 7919 + iteration * 104_729 + 1) % (1 << 31))
        warn_of_cuts(score, env)
        return score

    def _played(self, copies: Copies, seed: int) -> Score:
        config = self._resolved.config
        return play_matches(
            copies,
            self._cast.agents,
            self._sources,
            config.evaluation_duration,
            seed,
            deterministic=not config.evaluation_config.explore,
            opponent=self._opponent or (RANDOM if self._meets_chance else None),
            max_steps=longest_episode(self._resolved.experiment.env),
            interrupted=self._stop.ends_evaluation,
        )

    @property
    def _meets_chance(self) -> bool:
        section = self._resolved.config.multiagent
        return section is not None and section.evaluation_opponents is None and bool(self._zero_sum)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def _opponent(cast: Cast, config: AlgorithmConfig) -> Opponent | None:
    """Whom evaluations play, if the config names somebody. Raises UsageError when a run does not fit the agents."""
    assert config.multiagent is not None
    named = config.multiagent.evaluation_opponents
    if named in (None, "policies") or not config.evaluation_duration:
        return None
    return RANDOM if named == "random" else opponent_of(str(named), cast)


def opponent_of(where: str, cast: Cast) -> Opponent:
    """The policies of a run or checkpoint, by the agents that they played in training. Raises UsageError, NotFound."""
    run, found = checkpoint.open_checkpoint(where)
    section = found.state["config"]["config"].get("multiagent") or {}
    mapping = section.get("policy_mapping")
    if not isinstance(mapping, Mapping) or not cast.agents.keys() <= mapping.keys():
        raise ConfigError(
            f"config.multiagent.evaluation_opponents is {where}, which was not trained with the agents {', '.join(cast.agents)}.",
            "Name a run of the same environment, random or policies.",
        )
    models = {model: found.policy(model) for model in dict.fromkeys(mapping[agent] for agent in cast.agents)}
    policies = {agent: models[mapping[agent]] for agent in cast.agents}
    for agent, model in cast.agents.items():
        seen, done = cast.spaces[model]
        own = seen[OWN] if isinstance(seen, gym.spaces.Dict) and set(seen.spaces) == {OWN, WHOLE} else seen
        theirs = policies[agent]
        if (theirs.observation_space, theirs.action_space) != (own, done):
            raise ConfigError(
                f"config.multiagent.evaluation_opponents is {where}, whose policy for {agent!r} sees {theirs.observation_space} and does "
                f"{theirs.action_space}; here it is {own} and {done}.",
                "Name a run of the same environment, random or policies.",
            )
    return Opponent(run.name, policies)


def _evaluation(
    resolved: Resolved,
    cast: Cast,
    policies: Mapping[str, Policy],
    opponent: Opponent | None,
    sampler: MultiSampler,
    stop: StopCheck,
) -> MatchEvaluation | None:
    if not resolved.config.evaluation_duration:
        return None
    return MatchEvaluation(resolved, cast, policies, opponent, sampler.zero_sum, stop)
