"""Run an exported agent with only onnxruntime and NumPy. Copy this file into a game.

    agent = Agent("model-000021.onnx")
    agent.reset()                                   # at the start of every episode
    action = agent.act(observation)                 # the most probable action
    action = agent.act(observation, mask=allowed)   # if some options are not allowed
    action = agent.act(observation, temperature=1)  # sampled as in training

Pass a dict observation as a dict, and a nested one with joined keys: {"unit.health": …}.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime as ort


class Agent:
    """One player with its own recurrent state."""

    def __init__(self, path: str, seed: int = 0) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # a single decision is too small for more threads
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {item.name: item for item in self.session.get_inputs()}
        self.outputs = [item.name for item in self.session.get_outputs()]
        self.facts = json.loads(self.session.get_modelmeta().custom_metadata_map["ludus"])
        self.random = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        """Begin an episode: set the recurrent state to zeros."""
        self.state = {
            name: np.zeros([1, *item.shape[1:]], np.float32) for name, item in self.inputs.items() if name.startswith("state.")
        }

    def act(self, observation: Any, mask: Any = None, temperature: float = 0.0) -> Any:
        """Return the action: an array, or a dict of arrays."""
        feed = dict(self.state)
        for name, item in self.inputs.items():
            if name.startswith("observation"):
                value = observation if name == "observation" else observation[name.removeprefix("observation.")]
                feed[name] = np.asarray(value, TYPES[item.type])[None]
        if "mask" in self.inputs:
            options = self.inputs["mask"].shape[1]
            feed["mask"] = np.ones((1, options), bool) if mask is None else np.asarray(mask, bool).reshape(1, options)
        if "noise" in self.inputs:
            noise = noise_of(self.facts["action_space"], self.random) * temperature
            feed["noise"] = noise.astype(np.float32)[None]
        answer = dict(zip(self.outputs, self.session.run(self.outputs, feed), strict=True))
        self.state = {name: answer[f"next_{name}"] for name in self.state}
        actions = {name: value[0] for name, value in answer.items() if name == "action" or name.startswith("action.")}
        return actions["action"] if "action" in actions else {k.removeprefix("action."): v for k, v in actions.items()}


TYPES = {
    "tensor(float)": np.float32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def noise_of(space: dict[str, Any], random: np.random.Generator) -> np.ndarray:
    """Draw standard noise for one decision. The graph adds it to sample an action; scaling it scales the temperature, 0 is deterministic."""
    kind = space["type"]
    if kind == "Dict":
        return np.concatenate([noise_of(space["spaces"][key], random) for key in sorted(space["spaces"])])
    if kind == "Tuple":
        return np.concatenate([noise_of(item, random) for item in space["spaces"]])
    if kind == "Discrete":
        return random.gumbel(size=space["n"])
    if kind == "MultiDiscrete":
        return random.gumbel(size=int(np.sum(space["nvec"])))
    if kind == "MultiBinary":
        return random.logistic(size=int(np.prod(space["shape"])))
    return random.normal(size=int(np.prod(space["shape"])))  # Box
