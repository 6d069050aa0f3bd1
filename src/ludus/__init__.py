"""Ludus: train game agents and put them into the live game, with one code base.

    import ludus
    result = ludus.train(env="CartPole-v1", stop={"episode_return_mean": 475})
    action, state = result.agent.act(observation)

Everything is imported when it is first used: `import ludus` alone brings neither PyTorch nor Gymnasium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ludus.actor.agent import Agent as Agent
    from ludus.api import load as load
    from ludus.api import resume as resume
    from ludus.api import train as train
    from ludus.errors import LudusError as LudusError
    from ludus.experiment.experiment import Result as Result

_WHERE = {
    "Agent": "ludus.actor.agent",
    "LudusError": "ludus.errors",
    "Result": "ludus.experiment.experiment",
    "load": "ludus.api",
    "resume": "ludus.api",
    "train": "ludus.api",
}

__all__ = ["Agent", "LudusError", "Result", "__version__", "load", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ludus' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
