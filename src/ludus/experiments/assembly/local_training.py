"""Training in this process (`num_workers: 0`): sampler and learner take turns. Starts at once and is bit-reproducible."""

from __future__ import annotations

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.core.types import DEFAULT_MODEL
from ludus.envs.vector_env import make_environments
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
    whole_episodes,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import make_run_policy, measure_largest_values
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.models.devices import copy_for_acting, parse_device
from ludus.sampling.sampler import Interruption, Sampler, VersionClock, segment_spec
from ludus.transport.base import make_memory


def assemble_local(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run that samples and learns in turn, in this process."""
    resolved, before, seed = prepared.resolved, prepared.before, prepared.environment_seed
    e, config = resolved.experiment, resolved.config
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    with stop.interruptible():
        environments = stack.own(
            make_environments(
                e.env, config.num_envs_per_worker, config.env_config,
                preprocess=config.preprocess, wrappers=config.wrappers, forgiving=config.restart_failed_sub_environments,
                beat=stop.raise_if_due,
            )
        )  # fmt: skip
        environments.reset(seed)  # only a reset shows whether they mask actions

    spaces = environments.observation_space, environments.action_space
    policy = make_run_policy(*spaces, config, before, look=lambda: measure_largest_values(e.env, config), announce=hooks.announce)
    policy = copy_for_acting(policy, parse_device(config.inference_device, "inference_device"))
    check_memory(resolved, policy)

    learning = open_learning_run(prepared, {DEFAULT_MODEL: policy}, stack)

    # One block: sampling and learning alternate, as on-policy algorithms need it.
    memory = stack.own(make_memory("local", segment_spec(policy, environments, config.steps), environments.num, 1))
    source = learning.pool.source(DEFAULT_MODEL)
    steps = VersionClock(source.newest()[1], prepared.timesteps, environments.num * config.steps)
    if hasattr(environments, "player"):  # some rows are opponents
        from ludus.sampling.self_play import with_past_opponents

        source = with_past_opponents(environments, source, config.self_play, seed, learning.run.directory)
    sampler = Sampler(
        environments, source, memory, seed,
        explore=config.explore, timesteps=steps.timesteps, interruption=Interruption(stop.before_step, stop.interruptible),
    )  # fmt: skip

    trainer = Trainer(
        learning.algorithms,
        whole_episodes(memory, config),
        learning.pool,
        smoothing=config.metrics_num_episodes_for_smoothing,
        clock=clock,
    )
    evaluation = make_evaluation(resolved, policy, learning.run, stop, hooks.announce)
    return add_controller(prepared, hooks, stack, learning, sampler, trainer, evaluation)
