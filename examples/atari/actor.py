"""Actor: converts messages of the game into model inputs, and model outputs into actions.

Training and serving use the same class. With a buffer it also records steps and pushes them in chunks of fixed length.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from model import FRAMES, SIDE

import ludus

GAMMA, LAMBDA, STEPS = 0.99, 0.95, 32


class AtariActor(ludus.Actor):
    def __init__(self, model: str, buffer: str | None = None) -> None:
        self.model = ludus.RemoteModel(name=model)
        self.buffer = ludus.RemoteBuffer(name=buffer) if buffer else None
        self.frames = np.zeros((SIDE, SIDE, FRAMES), np.float32)
        self.random = np.random.default_rng()
        self.steps: list[dict[str, Any]] = []
        self.score = 0.0

    async def tick(self, body: bytes) -> bytes:
        (reward,) = struct.unpack_from("<f", body)
        logits, value = await self.look(body)
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        if self.buffer is None:
            return bytes([int(probabilities.argmax())])
        self.reward(reward)
        if len(self.steps) == STEPS:
            self.push(float(value))
        action = int(self.random.choice(len(probabilities), p=probabilities))
        step = {"frames": self.frames, "action": action, "log_prob": np.log(probabilities[action]), "value": value}
        self.steps.append(step)
        return bytes([action])

    async def end(self, body: bytes) -> bytes:
        if self.buffer is not None and self.ended_by == "game":
            self.reward(struct.unpack_from("<f", body)[0])
            cut_off = len(body) > 4  # truncated: the body has the last picture, and the model's value of it is the bootstrap
            self.push(float((await self.look(body))[1]) if cut_off else 0.0)
            ludus.metric("score", self.score)
        return b""

    async def look(self, body: bytes) -> tuple[Any, Any]:
        """Append the picture to the last frames and return logits and value."""
        picture = np.frombuffer(body, np.uint8, offset=4).reshape(SIDE, SIDE)
        self.frames = np.concatenate([self.frames[..., 1:], picture[..., None] / np.float32(255)], axis=-1)
        return await self.model.forward(self.frames)

    def reward(self, reward: float) -> None:
        """Add the reward of the previous action."""
        self.score += reward
        if self.steps:
            self.steps[-1]["reward"] = float(np.sign(reward))

    def push(self, following: float) -> None:
        """Push the recorded steps with generalised advantage estimates; `following` is the value after the last step."""
        steps, self.steps = self.steps, []
        advantage = 0.0
        for step in reversed(steps):
            value = float(step.pop("value"))
            advantage = step.pop("reward") + GAMMA * following - value + GAMMA * LAMBDA * advantage
            step["advantage"], step["target"] = np.float32(advantage), np.float32(advantage + value)
            following = value
        for step in steps:
            self.buffer.push(step)
