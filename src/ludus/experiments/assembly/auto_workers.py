"""`num_workers: auto`: measures sampling and learning for a moment, and chooses the number of workers from the costs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from ludus.algorithms.base import Algorithm
from ludus.config.schema import EMBEDDED, EXTERNAL, AlgorithmConfig, SelfPlayConfig
from ludus.config.translation import canonical_config
from ludus.config.validation import parse_algorithm_config
from ludus.core.types import Segments
from ludus.envs.vector_env import Environments, make_environments, training_env_config
from ludus.errors import ConfigError
from ludus.experiments.assembly.learners import make_algorithm
from ludus.experiments.assembly.match_evaluation import assign_agents
from ludus.experiments.assembly.multi_agent_training import sampling_settings, trained_specs
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.resolve import Announce, ClusterOptions, job_nodes, resolve
from ludus.experiments.validation import validate
from ludus.experiments.validation.agent_mapping import policy_config
from ludus.experiments.validation.validate import ParsedExperiment
from ludus.models.policy import Policy
from ludus.process.host import usable_cores
from ludus.sampling.multi_agent.batches import MatchBatches, match_batches
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.multi_agent.seating import SeatAgents, Seating
from ludus.sampling.multi_agent.vector_copies import make_copies
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.sampling.self_play import with_past_opponents
from ludus.transport.local import LocalMemory

log = logging.getLogger(__name__)

_MEASURE_S = 0.5
_STEPS = 16
_SLOW_STEP_S = 0.2
_FEW_STEPS = 2
"""Steps to measure where one step of all environments takes longer than _SLOW_STEP_S."""
_LONG_S = 2.0
"""If the first block takes longer, nothing else is measured."""
_LEAST_SPEED_UP = 1.15
"""Least estimated speed-up: workers cost memory and a longer start."""
_NEARLY_BEST = 0.95
PER_CORE = 4
"""Most workers for a core, however long environments wait."""


def choose_num_workers(
    parsed: ParsedExperiment, announce: Announce | None = None, cluster: ClusterOptions | None = None
) -> ParsedExperiment:
    """Replace `num_workers: auto` by a number, which is saved with the run. May measure the environment. Raises UsageError."""
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
    any_batch = {key: value for key, value in config.items() if key != "train_batch_size"}
    alone = resolve(_with_config(parsed, any_batch | {"num_workers": 0, "sampling": "sync"}))
    if announce is not None:
        announce("measuring the environment …")
    measured = parse_algorithm_config(alone.algorithm.Config, any_batch, collated=parsed.is_multi_agent)
    if parsed.is_multi_agent:
        cost = measure_matches(alone.experiment.env, alone.algorithm, alone.config)
        every = range(1, PER_CORE * cores * job_nodes() + 1)  # a batch of matches is divided by any number
        return _best_with_reason(cost, cores * job_nodes(), measured.sampling, every)
    return choose_workers(alone.experiment.env, alone.algorithm, measured, config, cores * job_nodes())


@dataclass(frozen=True)
class StepCost:
    """Seconds for one environment step: of sampling, of waiting within that, and of learning."""

    sample_s: float
    wait_s: float
    learn_s: float
    environment_s: float = 0.0
    """Part of `sample_s` in the environment; the policy takes the rest."""

    def speed(self, workers: int, cores: int, sampling: str) -> float:
        """Estimated steps per second."""
        if workers == 0:
            return 1 / (self.sample_s + self.learn_s)
        computed = self.sample_s - self.wait_s
        sampled_s = max(self.sample_s / workers, computed / min(workers, cores))
        if sampling == "sync":  # the two take turns
            return 1 / (sampled_s + self.learn_s)
        return 1 / max(sampled_s, self.learn_s, (computed + self.learn_s) / cores)


def best_number(cost: StepCost, cores: int, sampling: str, possible: Iterable[int]) -> int:
    """The smallest number of workers that is nearly as fast as any; 0 unless they are worth it."""
    speeds = {workers: cost.speed(workers, cores, sampling) for workers in possible}
    most = max(speeds.values(), default=0.0)
    if most < _LEAST_SPEED_UP * cost.speed(0, cores, sampling):
        return 0
    return min(workers for workers, speed in speeds.items() if speed >= _NEARLY_BEST * most)


def possible_workers(given: Mapping[str, Any], envs: int, sampling: str, cores: int) -> list[int]:
    """Numbers of workers by which the given batch size can be divided. `given`: `config:` as written."""
    every = range(1, PER_CORE * cores + 1)
    batch, steps = given.get("train_batch_size"), given.get("rollout_fragment_length")
    if batch is None or sampling == "async":
        return list(every)
    return [n for n in every if (batch == n * envs * steps if steps else batch % (n * envs) == 0)]


def measure(env: str, algorithm: type[Algorithm], config: AlgorithmConfig) -> StepCost:
    """Sample and learn in this process for a moment, and discard the result. A very slow environment is measured by a few steps."""
    threads = torch.get_num_threads()
    env_config = training_env_config(env, config.env_config, config.self_play)
    environments = make_environments(
        env, config.num_envs_per_worker, env_config, preprocess=config.preprocess, wrappers=config.wrappers
    )
    try:
        environments.reset(config.seed)
        policy = make_policy(environments.observation_space, environments.action_space, config)
        learner = make_algorithm(algorithm, policy, config, None)
        try:
            return _measure_blocks(environments, policy, learner, config)
        finally:
            if hasattr(learner, "close"):
                learner.close()
    finally:
        environments.close()
        torch.set_num_threads(threads)  # the process may belong to a caller


def _measure_blocks(environments: Environments, policy: Policy, learner: Algorithm, config: AlgorithmConfig) -> StepCost:
    memory = LocalMemory(segment_spec(policy, environments, 1), environments.num, 1)
    self_play = config.self_play
    if self_play.opponents == "league":  # its results must not count
        self_play = SelfPlayConfig(opponents="latest")
    facing = with_past_opponents(environments, _Fixed(policy), self_play, config.seed)
    sampler = Sampler(environments, facing, memory, config.seed)
    sampler.step()
    steps = min(_STEPS if sampler.times.environment_s <= _SLOW_STEP_S else _FEW_STEPS, config.steps)
    block = Segments.empty(segment_spec(policy, environments, steps), environments.num)
    return _repeat(lambda: _measure_block(sampler, policy, learner, block))


def _repeat(measure_once: Callable[[], StepCost]) -> StepCost:
    """Measure for a moment; once if that takes long."""
    began = time.perf_counter()
    cost = measure_once()
    if time.perf_counter() - began > _LONG_S:
        return cost
    began, costs = time.perf_counter(), list[StepCost]()  # the first block is slow and does not count
    while not costs or time.perf_counter() - began < _MEASURE_S:
        costs.append(measure_once())
    return StepCost(*(sum(values) / len(costs) for values in zip(*map(astuple, costs), strict=True)))


def _measure_block(sampler: Sampler, policy: Policy, learner: Algorithm, block: Segments) -> StepCost:
    environment_s, policy_s, busy = sampler.times.environment_s, sampler.times.policy_s, time.thread_time()
    with policy.acting():
        sampler.fill(block, policy, 1)
    busy_s = time.thread_time() - busy
    environment_s = sampler.times.environment_s - environment_s
    sample_s = environment_s + sampler.times.policy_s - policy_s
    at = time.perf_counter()
    learner.learn(block, 0)
    learn_s = time.perf_counter() - at
    steps = block.spec.steps * len(block.origin)
    return StepCost(sample_s / steps, max(0.0, sample_s - busy_s) / steps, learn_s / steps, environment_s / steps)


@dataclass(frozen=True)
class _Fixed:
    policy: Policy

    def newest(self) -> tuple[Policy, int]:
        return self.policy, 1


# -- several agents -----------------------------------------------------------------------------------------------------


def measure_matches(env: str, algorithm: type[Algorithm], config: AlgorithmConfig) -> StepCost:
    """The same for several agents, for one environment step of all of them. `config`: resolved, with the policy of every agent."""
    section, threads = config.multiagent, torch.get_num_threads()
    assert section is not None
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        copies = make_copies(
            env, config.num_envs_per_worker, config.env_config, wrappers=config.wrappers, preprocess=config.preprocess
        )
        stack.callback(copies.close)
        assignment = assign_agents(copies, section)
        each = {name: policy_config(algorithm.Config, config, name) for name in section.names()}
        central = section.centralized_value
        policies = {name: make_policy(*spaces, each[name], central=central) for name, spaces in assignment.spaces.items()}
        specs = trained_specs(policies, config)
        learners = {spec.model: make_algorithm(algorithm, policies[spec.model], each[spec.model], None) for spec in specs}
        for learner in learners.values():
            stack.callback(getattr(learner, "close", lambda: None))

        def measure_steps(steps: int) -> _MatchMeasurement:
            settings = replace(sampling_settings(config, steps * len(copies)), by_env_steps=True)
            batches = match_batches(specs, settings, copies)
            sources = {name: _Fixed(policy) for name, policy in policies.items()}
            seating = _seat_one_side(assignment.agents, config.self_play)
            sampler = MultiAgentSampler(copies, assignment.agents, sources, batches, settings, config.seed, make_seating=seating)
            return _MatchMeasurement(sampler, batches, learners)

        first = measure_steps(1)
        first.sample()
        slow = first.sampler.matches.times.environment_s > _SLOW_STEP_S
        return _repeat(measure_steps(min(_FEW_STEPS if slow else _STEPS, config.steps)).measure)


def _seat_one_side(agents: Mapping[str, str], self_play: SelfPlayConfig) -> Callable[[MatchRunner, PolicySet], SeatAgents] | None:
    """Against other players one side is recorded; opponents from the past cost as much as the newest version."""
    if self_play.opponents is None or (self_play.opponents == "latest" and self_play.swap_sides):
        return None
    recorded = frozenset(self_play.sides[0] if self_play.sides else list(agents)[:1])
    return lambda matches, policies: lambda copy: Seating(agents, recorded, self_play.opponents or "")


@dataclass(frozen=True)
class _MatchMeasurement:
    sampler: MultiAgentSampler
    batches: MatchBatches
    learners: Mapping[str, Algorithm]

    def sample(self) -> list[Segments]:
        """The next batches of the models that are trained."""
        while not self.batches.ready():
            self.sampler.step()
        sampled = []
        while (batch := self.batches.take(0)) is not None:
            self.batches.release(batch)
            sampled.append(batch)
        return sampled

    def measure(self) -> StepCost:
        matches = self.sampler.matches
        times, steps, busy = matches.times, matches.env_steps, time.thread_time()
        environment_s, policy_s = times.environment_s, times.policy_s
        sampled = self.sample()
        busy_s = time.thread_time() - busy
        environment_s = times.environment_s - environment_s
        sample_s = environment_s + times.policy_s - policy_s
        at = time.perf_counter()
        for batch in sampled:
            self.learners[batch.model].learn(batch, 0)
        learn_s = time.perf_counter() - at
        steps = max(1, matches.env_steps - steps)
        return StepCost(sample_s / steps, max(0.0, sample_s - busy_s) / steps, learn_s / steps, environment_s / steps)


def choose_workers(
    env: str, algorithm: type[Algorithm], config: AlgorithmConfig, given: Mapping[str, Any], cores: int
) -> tuple[int, str]:
    """The number of workers, and the reason."""
    cost = measure(env, algorithm, config)
    possible = possible_workers(given, config.num_envs_per_worker, config.sampling, cores)
    return _best_with_reason(cost, cores, config.sampling, possible)


def _best_with_reason(cost: StepCost, cores: int, sampling: str, possible: Iterable[int]) -> tuple[int, str]:
    chosen = best_number(cost, cores, sampling, possible)
    why = f"a step takes {1e6 * cost.sample_s:.0f} µs to sample and {1e6 * cost.learn_s:.0f} µs to learn from, on {cores} cores"
    return chosen, why
