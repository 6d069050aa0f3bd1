"""Algorithms of RLlib that are special cases of ours, and the nearest alternatives to those that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class SpecialCase:
    """An algorithm of RLlib that is one of ours with certain settings."""

    run: str
    config: Callable[[Values], Values]
    """(given config with translated keys) → settings that define the special case."""
    notice: str


def _simple_q(config: Values) -> Values:
    buffer = config.get("replay_buffer_config")
    typed = "prioritized_replay" in config or (isinstance(buffer, Mapping) and {"type", "prioritized_replay"} & set(buffer))
    uniform = {} if typed else {"replay_buffer_config": {**(buffer or {}), "type": "ReplayBuffer"}}
    return {"double_q": False, "dueling": False, **uniform}


_A2C_STEPS, _A2C_BATCH = 20, 200
"""RLlib's default rollout_fragment_length and train_batch_size."""


def _a2c(config: Values) -> Values:
    """One gradient step per batch: the probability ratio is 1, so PPO's clipping has no effect."""
    numbers = [config.get(key) for key in ("train_batch_size", "rollout_fragment_length", "num_workers", "num_envs_per_worker")]
    given, steps, workers, envs = (number if isinstance(number, int) else None for number in numbers)
    unit = max(1, steps or _A2C_STEPS) * max(1, workers or 0) * max(1, envs or 1)
    batch, micro = -(-(given or _A2C_BATCH) // unit) * unit, config.get("microbatch_size")
    pieces = {"gradient_accumulation": max(1, -(-batch // micro))} if isinstance(micro, int) and micro > 0 else {}
    return {"num_epochs": 1, "train_batch_size": batch, "minibatch_size": given or batch, "kl_coeff": 0.0, **pieces}


SPECIAL_CASES: Mapping[str, SpecialCase] = {
    "SimpleQ": SpecialCase("DQN", _simple_q, "DQN with double_q, dueling and prioritized replay off"),
    "A2C": SpecialCase("PPO", _a2c, "PPO with one gradient step on each batch"),
}


def find_special_case(run: Any) -> SpecialCase | None:
    """Look up an algorithm name, ignoring case."""
    name = str(run).lower() if isinstance(run, str) else ""
    return next((case for known, case in SPECIAL_CASES.items() if known.lower() == name), None)


_OTHER_ALGORITHMS: Mapping[str, str] = {
    "A3C": "IMPALA samples asynchronously and corrects for the lag",
    "PG": "PPO with num_epochs: 1 and lambda: 1 is nearly the same",
    "DDPPO": "PPO with num_learners above 1 shares its gradients",
    "APEX": "DQN with num_workers samples in parallel",
    "Rainbow": "DQN has all of its parts but noise and distributions",
    "R2D2": "PPO, APPO and IMPALA have recurrent models (use_lstm), DQN has none",
    "QMIX": "PPO with several agents and centralized_value is the nearest",
    "MAPPO": "PPO with several agents and centralized_value is the same",
    "SAC": "PPO is for continuous actions here",
    "DDPG": "PPO is for continuous actions here",
    "TD3": "PPO is for continuous actions here",
    "APEX_DDPG": "PPO is for continuous actions here",
    "ES": "all algorithms here use gradients",
    "ARS": "all algorithms here use gradients",
    "MARWIL": "all algorithms here learn from environments, not from files",
    "BC": "all algorithms here learn from environments, not from files",
    "CQL": "all algorithms here learn from environments, not from files",
    "CRR": "all algorithms here learn from environments, not from files",
    "DT": "all algorithms here learn from environments, not from files",
    "DreamerV3": "all algorithms here are model-free",
    "Dreamer": "all algorithms here are model-free",
    "MBMPO": "all algorithms here are model-free",
    "MAML": "meta-learning is not available",
    "AlphaZero": "tree search is not available",
    "AlphaStar": "league training is not available yet",
    "MADDPG": "PPO with several agents and centralized_value is the nearest",
    "LinUCB": "bandits are not available",
    "LinTS": "bandits are not available",
    "SlateQ": "slate recommendation is not available",
    "IQL": "all algorithms here learn from environments, not from files",
}


def suggest_algorithm(run: str) -> str:
    """Return a sentence with the nearest alternative to an unsupported algorithm of RLlib; '' for any other name."""
    name = run.removeprefix("contrib/").lower()
    instead = next((why for other, why in _OTHER_ALGORITHMS.items() if other.lower() == name), "")
    return f"{run} is not supported: {instead}." if instead else ""
