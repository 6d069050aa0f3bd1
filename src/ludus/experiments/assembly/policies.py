"""Making of policies from `config.model`, and the number of threads that learn them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import torch

from ludus.config.schema import AlgorithmConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.errors import ConfigError
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.models.autoregressive_actions import Branch
from ludus.models.categories import EMBED_ABOVE
from ludus.models.centralized_critic import OWN, STATE
from ludus.models.networks import NetworkConfig
from ludus.models.policy import Policy
from ludus.process.host import usable_cores

log = logging.getLogger(__name__)

_MANY_PIXELS = 32 * 32


def make_policy(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: AlgorithmConfig,
    scales: tuple[tuple[str, float], ...] = (),
    *,
    central: bool = False,
    embed_above: int | None = EMBED_ABOVE,
) -> Policy:
    """Make a policy with fresh weights, which depend on the seed alone. `scales`: divisors of uint8 observations, see byte_scales.py."""
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
    if not network.central and isinstance(observation_space, gym.spaces.Dict) and set(observation_space.spaces) == {OWN, STATE}:
        log.warning(
            "Observations are {%s, %s}, and the policy sees both. For the value alone: model.centralized_value.", OWN, STATE
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


def embedding_bound(before: Checkpoint | None, model: str = DEFAULT_MODEL) -> int | None:
    """`embed_above` of a policy: that of the checkpoint the run starts with, if there is one."""
    return EMBED_ABOVE if before is None else before.embed_above(model)


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
