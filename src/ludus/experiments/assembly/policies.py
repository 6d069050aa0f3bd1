"""Making of policies from `config.model`: their networks, the divisors of uint8 observations, and the threads that learn them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch

from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Tree, leaves, map_tree
from ludus.core.types import DEFAULT_MODEL
from ludus.envs.vector_env import make_environments
from ludus.errors import ConfigError, EnvironmentFault
from ludus.experiments.resolve import Announce
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.models import byte_scales
from ludus.models.autoregressive_actions import Branch
from ludus.models.byte_scales import LargestValues
from ludus.models.network_config import NetworkConfig
from ludus.models.observation_encoder import EMBED_ABOVE
from ludus.models.policy import Policy
from ludus.process.host import usable_cores
from ludus.sampling.episode_runner import preserve_random_state

if TYPE_CHECKING:
    from ludus.envs.pettingzoo import MultiAgentMatch

log = logging.getLogger(__name__)

_MANY_PIXELS = 32 * 32
_RANDOM_STEPS = 200
"""Steps of random play that show the largest observations: several episodes of a small grid."""

Scales = tuple[tuple[str, float], ...]
"""Divisors of uint8 observations by path, where they are not 255."""


def make_run_policy(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: AlgorithmConfig,
    before: Checkpoint | None,
    *,
    look: Callable[[], LargestValues] | None,
    announce: Announce | None,
    model: str = DEFAULT_MODEL,
    central: bool = False,
) -> Policy:
    """The policy of a run that starts with the weights of `before`. `look`: plays the environment, to find its largest observations."""
    return make_policy(
        observation_space, action_space, config, choose_scales(observation_space, config, look, before, announce, model),
        central=central, embed_above=EMBED_ABOVE if before is None else before.embed_above(model),
    )  # fmt: skip


def make_policy(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: AlgorithmConfig,
    scales: Scales = (),
    *,
    central: bool = False,
    embed_above: int | None = EMBED_ABOVE,
) -> Policy:
    """Make a policy with fresh weights, which depend on the seed alone."""
    section = config.model
    network = NetworkConfig(
        fcnet_hiddens=None if section.fcnet_hiddens is None else tuple(section.fcnet_hiddens),
        fcnet_activation=section.fcnet_activation,
        conv=section.conv,
        conv_filters=None if section.conv_filters is None else tuple(section.conv_filters),
        entity_dim=section.entity_dim,
        entity_present=tuple(section.entity_present.items()),
        autoregressive=tuple(Branch(b.part, tuple(b.after), b.points_at, b.mask) for b in section.autoregressive),
        vf_share_layers=section.vf_share_layers,
        core=section.core or ("lstm" if section.use_lstm else None),
        cell_size=section.cell_size,
        max_seq_len=section.max_seq_len,
        free_log_std=section.free_log_std,
        log_std_init=section.log_std_init,
        dueling=bool(getattr(config, "dueling", False)),
        head_hiddens=tuple(getattr(config, "hiddens", ())),
        central=central or section.centralized_value,
        central_shares=(central or section.centralized_value) and section.vf_share_layers is True,
        custom_model=section.custom_model,
        custom_model_config=section.custom_model_config,
        byte_scales=scales,
        embed_above=embed_above,
    )
    keys = set(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else set()
    if not network.central and keys == {"observation", "state"}:
        log.warning(
            "Observations are {observation, state}, and the policy sees both. For the value alone: model.centralized_value."
        )
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(config.seed)
        policy = Policy(observation_space, action_space, network, config.observation_filter == "MeanStdFilter", config.learns)
    if policy.recurrent and config.batch_mode == "complete_episodes":
        raise ConfigError(
            "config.batch_mode is complete_episodes, and the model is recurrent.",
            "Use truncate_episodes: recurrent models learn from sequences of max_seq_len steps in either case.",
        )
    if section.custom_model is not None:
        if getattr(config, "hiddens", None):
            log.warning(
                "config.hiddens is %s and has no effect: custom_model %s defines all of its layers.",
                config.hiddens,  # type: ignore[attr-defined] # DQN has it
                section.custom_model,
            )
        from ludus.models.custom.validation import check_custom  # imported only for custom models

        check_custom(policy)
    return policy


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Orthogonal initialisation rounds differently with each number of threads; the same seed must give the same weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_of(policy: Policy, config: AlgorithmConfig) -> dict[str, int]:
    """Threads of a learner: convolutions over images use all cores, shared by the learners; a small network is faster on one."""
    usual = max(1, usable_cores() // config.learners) if policy.network.pixels >= _MANY_PIXELS else 1
    return {"torch_threads": config.torch_threads or usual, "learner_threads": config.learner_threads or usual}


# -- divisors of uint8 observations --------------------------------------------------------------------------------------


def choose_scales(
    space: gym.Space[Any],
    config: AlgorithmConfig,
    look: Callable[[], LargestValues] | None,
    before: Checkpoint | None = None,
    announce: Announce | None = None,
    model: str = DEFAULT_MODEL,
) -> Scales:
    """Choose the scales of one model's network, and announce those that are not obvious. `look` plays the environment.

    Weights of a checkpoint keep the scales they were learned with; a custom model scales its observations itself.
    """
    setting = config.preprocess.scale
    if config.model.custom_model is not None:
        return ()
    if before is not None and (setting is None or isinstance(setting, bool)):
        return before.byte_scales(model)
    choice = byte_scales.choose(space, setting, look)
    for scale in choice:
        log.info("%s", scale)
        if announce is not None and not scale.obvious:
            announce(str(scale))
    return byte_scales.non_default_scales(choice)


def measure_largest_values(env: str, config: AlgorithmConfig) -> LargestValues:
    """The largest value in each uint8 part of the observations in random play, which ends early if the environment fails."""
    from ludus.envs.pettingzoo import sample_action

    largest: dict[str, int] = {}
    random = np.random.default_rng(config.seed)
    with preserve_random_state():
        one = make_environments(env, 1, config.env_config, preprocess=config.preprocess, wrappers=config.wrappers)
        try:
            observed = one.reset(config.seed)
            _update_largest(largest, observed.observation)
            for _ in range(_RANDOM_STEPS):
                mask = None if observed.mask is None or not observed.mask[0].any() else observed.mask[0]
                action = sample_action(one.action_space, mask, random)
                observed = one.step(map_tree(lambda x: np.asarray(x)[None], action)).observations
                _update_largest(largest, observed.observation)
        except EnvironmentFault as fault:  # training will raise it
            log.warning("%s failed while its observations were sampled: %s", env, fault)
        finally:
            one.close()
    return largest


def measure_largest_values_of_agents(
    make: Callable[[], MultiAgentMatch], agents: Mapping[str, str], seed: int, *, central: bool
) -> dict[str, LargestValues]:
    """The same by model, in matches of several agents. `central`: of the agents' own observations."""
    from ludus.envs.pettingzoo import sample_action
    from ludus.models.centralized_critic import OWN
    from ludus.sampling.multi_agent.policy_set import plain_action

    largest: dict[str, dict[str, int]] = {model: {} for model in agents.values()}
    random = np.random.default_rng(seed)
    with preserve_random_state():
        match = make()
        try:
            moved = match.reset(seed)
            for number in range(_RANDOM_STEPS):
                for turn in moved.turns:
                    _update_largest(largest[agents[turn.agent]], {OWN: turn.observation} if central else turn.observation)
                drawn = {turn.agent: sample_action(match.agents[turn.agent].action, turn.mask, random) for turn in moved.turns}
                actions = {agent: plain_action(action) for agent, action in drawn.items()}
                moved = match.reset(seed + 1 + number) if moved.over else match.step(actions)
        except EnvironmentFault as fault:
            log.warning("%s failed while its observations were sampled: %s", match.name, fault)
        finally:
            match.close()
    return dict(largest)


def _update_largest(largest: dict[str, int], observation: Tree) -> None:
    for path, part in leaves(observation):
        if getattr(part, "dtype", None) == np.uint8 and part.size:
            largest[path] = max(largest.get(path, 0), int(part.max()))
