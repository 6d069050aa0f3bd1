"""Ludus: train game agents and put them into the live game, with one code base.

    import ludus
    result = ludus.train(env="CartPole-v1", stop={"episode_return_mean": 475})
    action, state = result.agent.act(observation)

Names are imported on first use: `import ludus` alone imports neither PyTorch nor Gymnasium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ludus.api import battle as battle
    from ludus.api import evaluate as evaluate
    from ludus.api import load as load
    from ludus.api import read_rollout as read_rollout
    from ludus.api import resume as resume
    from ludus.api import rollout as rollout
    from ludus.api import train as train
    from ludus.api import trainable as trainable
    from ludus.api import tune as tune
    from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv as VectorMultiAgentEnv
    from ludus.envs.matches.vector_multi_agent import VectorMultiAgentStep as VectorMultiAgentStep
    from ludus.envs.registry import register_env as register_env
    from ludus.errors import LudusError as LudusError
    from ludus.errors import Refused as Refused
    from ludus.experiments.control.callbacks import Callback as Callback
    from ludus.experiments.control.callbacks import TrainingRun as TrainingRun
    from ludus.experiments.result import Result as Result
    from ludus.experiments.runs.run_agent import RunAgent as RunAgent
    from ludus.gateway.actor import Actor as Actor
    from ludus.models.inference.onnx_policy import OnnxPolicy as OnnxPolicy
    from ludus.models.policy import Policy as Policy
    from ludus.process.commands.command import Games as Games
    from ludus.protocol.gamecore_client import GamecoreClient as GamecoreClient
    from ludus.remote import fakes as fake
    from ludus.remote.actor import RemoteActor as RemoteActor
    from ludus.remote.agent import Agent as Agent
    from ludus.remote.buffer import RemoteBuffer as RemoteBuffer
    from ludus.remote.context import init as init
    from ludus.remote.context import metric as metric
    from ludus.remote.context import run_until_asked_to_stop as run_until_asked_to_stop
    from ludus.remote.model import RemoteModel as RemoteModel
    from ludus.remote.model import get_torch_model_weights as get_torch_model_weights
    from ludus.remote.model import set_torch_model_weights as set_torch_model_weights
    from ludus.remote.trainer import RemoteTrainer as RemoteTrainer
    from ludus.remote.trainer import learner as learner

_MODULES = {
    "Actor": "ludus.gateway.actor",
    "Agent": "ludus.remote.agent",
    "Callback": "ludus.experiments.control.callbacks",
    "GamecoreClient": "ludus.protocol.gamecore_client",
    "Games": "ludus.process.commands.command",
    "LudusError": "ludus.errors",
    "OnnxPolicy": "ludus.models.inference.onnx_policy",
    "Policy": "ludus.models.policy",
    "Refused": "ludus.errors",
    "RemoteActor": "ludus.remote.actor",
    "RemoteBuffer": "ludus.remote.buffer",
    "RemoteModel": "ludus.remote.model",
    "RemoteTrainer": "ludus.remote.trainer",
    "Result": "ludus.experiments.result",
    "RunAgent": "ludus.experiments.runs.run_agent",
    "TrainingRun": "ludus.experiments.control.callbacks",
    "VectorMultiAgentEnv": "ludus.envs.matches.vector_multi_agent",
    "VectorMultiAgentStep": "ludus.envs.matches.vector_multi_agent",
    "battle": "ludus.api",
    "evaluate": "ludus.api",
    "fake": "ludus.remote",
    "get_torch_model_weights": "ludus.remote.model",
    "init": "ludus.remote.context",
    "learner": "ludus.remote.trainer",
    "load": "ludus.api",
    "metric": "ludus.remote.context",
    "read_rollout": "ludus.api",
    "register_env": "ludus.envs.registry",
    "resume": "ludus.api",
    "rollout": "ludus.api",
    "run_until_asked_to_stop": "ludus.remote.context",
    "set_torch_model_weights": "ludus.remote.model",
    "train": "ludus.api",
    "trainable": "ludus.api",
    "tune": "ludus.api",
}

__all__ = [
    "Actor",
    "Agent",
    "Callback",
    "GamecoreClient",
    "Games",
    "LudusError",
    "OnnxPolicy",
    "Policy",
    "Refused",
    "RemoteActor",
    "RemoteBuffer",
    "RemoteModel",
    "RemoteTrainer",
    "Result",
    "RunAgent",
    "TrainingRun",
    "VectorMultiAgentEnv",
    "VectorMultiAgentStep",
    "__version__",
    "battle",
    "evaluate",
    "fake",
    "get_torch_model_weights",
    "init",
    "learner",
    "load",
    "metric",
    "read_rollout",
    "register_env",
    "resume",
    "rollout",
    "run_until_asked_to_stop",
    "set_torch_model_weights",
    "train",
    "trainable",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ludus' has no attribute {name!r}")
    import importlib

    if name == "fake":  # a module: `ludus.fake.FakeBuffer`
        return importlib.import_module("ludus.remote.fakes")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
