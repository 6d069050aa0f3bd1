"""Chooses the divisors of uint8 observations of a network: by the space, else from observations of random play."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Tree, leaves, map_tree
from ludus.core.types import DEFAULT_MODEL
from ludus.envs.vector_env import make_environments
from ludus.errors import EnvironmentFault
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.models import byte_scales
from ludus.models.byte_scales import LargestValues
from ludus.models.centralized_critic import OWN
from ludus.sampling.episode_runner import preserve_random_state

if TYPE_CHECKING:
    from ludus.envs.pettingzoo import MultiAgentMatch

log = logging.getLogger(__name__)

STEPS = 200
"""Steps of random play: several episodes of a small grid."""

Scales = tuple[tuple[str, float], ...]
Announce = Callable[[str], None]


def choose(
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


def largest_seen(env: str, config: AlgorithmConfig) -> LargestValues:
    """The largest value in each uint8 part of the observations in random play, which ends early if the environment fails."""
    from ludus.envs.pettingzoo import sample_action

    largest: dict[str, int] = {}
    random = np.random.default_rng(config.seed)
    with preserve_random_state():
        one = make_environments(env, 1, config.env_config, preprocess=config.preprocess, wrappers=config.wrappers)
        try:
            observed = one.reset(config.seed)
            _update_largest(largest, observed.observation)
            for _ in range(STEPS):
                mask = None if observed.mask is None or not observed.mask[0].any() else observed.mask[0]
                action = sample_action(one.action_space, mask, random)
                observed = one.step(map_tree(lambda x: np.asarray(x)[None], action)).observations
                _update_largest(largest, observed.observation)
        except EnvironmentFault as fault:  # training will raise it
            log.warning("%s failed while its observations were sampled: %s", env, fault)
        finally:
            one.close()
    return largest


def largest_seen_of_agents(
    make: Callable[[], MultiAgentMatch], agents: Mapping[str, str], seed: int, *, central: bool
) -> dict[str, LargestValues]:
    """The same by model, in matches of several agents. `central`: of the agents' own observations."""
    from ludus.envs.pettingzoo import sample_action
    from ludus.sampling.multi_agent import plain_action

    largest: dict[str, dict[str, int]] = {model: {} for model in agents.values()}
    random = np.random.default_rng(seed)
    with preserve_random_state():
        match = make()
        try:
            moved = match.reset(seed)
            for number in range(STEPS):
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
