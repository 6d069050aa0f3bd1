"""A game that speaks the protocol of Godot RL Agents, in the standard library: started by `game_at`, by Ludus and by the package godot-rl.

Its world is arithmetic on the seed and the actions, so that two programs that drive it in the same way see the same numbers.
"""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any

VERSION = ("0", "7")


def game_at(directory: Path, scene: str = "chase", fault: str = "") -> Path:
    """Write an executable that starts this game, as an exported game is one."""
    path = directory / f"{scene}{fault}.x86_64"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {Path(__file__)} "$@" --scene={scene} --fault={fault}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Chaser:
    """An agent on a line: it moves by its action, and its episode ends near the goal or after a number of steps of its own."""

    observation_space: dict[str, Any] = {"obs": {"size": [4], "space": "box"}}  # noqa: RUF012 - as JSON
    action_space: dict[str, Any] = {"move": {"size": 1, "action_type": "continuous"}}  # noqa: RUF012
    policy = "shared_policy"

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.random = random.Random(1000 * seed + number)
        self.reward = 0.0
        self.done = False
        self.begin()

    def begin(self) -> None:
        self.at, self.goal, self.steps = self.random.uniform(-1, 1), self.random.uniform(-1, 1), 0

    def move(self, action: dict[str, Any]) -> float:
        return float(action["move"][0])

    def act(self, action: dict[str, Any]) -> None:
        before = abs(self.goal - self.at)
        self.at += 0.1 * self.move(action)
        self.steps += 1
        after = abs(self.goal - self.at)
        self.reward += before - after
        if after < 0.05 or self.steps >= 20 + self.number:
            self.reward += 1.0 if after < 0.05 else 0.0
            self.done = True
            self.begin()

    def observe(self) -> dict[str, Any]:
        return {"obs": [self.at, self.goal, self.goal - self.at, self.steps / 20]}

    def dance(self) -> str:
        return f"agent {self.number} dances"


class Hybrid(Chaser):
    """Two parts of the observation, one of them an image, and three actions."""

    observation_space = {  # noqa: RUF012
        "obs": {"size": [2], "space": "box"},
        "camera_2d": {"size": [3, 4, 3], "space": "box"},
        "level": {"size": 5, "space": "discrete"},
    }
    action_space = {  # noqa: RUF012
        "turn": {"size": 3, "action_type": "discrete"},
        "thrust": {"size": 2, "action_type": "continuous"},
        "fire": {"size": 2, "action_type": "discrete"},
    }

    def move(self, action: dict[str, Any]) -> float:
        return float((action["turn"] - 1) * 0.5 + 0.25 * action["thrust"][0] - 0.25 * action["thrust"][1] + 0.1 * action["fire"])

    def observe(self) -> dict[str, Any]:
        pixels = bytes((self.steps * 7 + self.number + i) % 256 for i in range(3 * 4 * 3))
        return {"obs": [self.at, self.goal], "camera_2d": pixels.hex(), "level": self.steps % 5}


class Hunter(Chaser):
    policy = "hunter"


class Prey(Hybrid):
    policy = "prey"


SCENES: dict[str, list[type[Chaser]]] = {
    "one": [Chaser],
    "chase": [Chaser] * 4,
    "hybrid": [Hybrid] * 2,
    "policies": [Hunter, Prey, Hunter],
}


class Game:
    def __init__(self, arguments: dict[str, str]) -> None:
        self.fault = arguments.get("fault", "")
        seed = int(arguments.get("env_seed", "1"))
        self.agents = [kind(number, seed) for number, kind in enumerate(SCENES[arguments.get("scene", "chase")])]
        self.steps = 0
        if self.fault == "mute":
            time.sleep(600)
        if self.fault == "exit":
            sys.exit("the scene main.tscn is missing")
        self.socket = socket.create_connection(("127.0.0.1", int(arguments.get("port", "11008"))), timeout=20)
        self.socket.settimeout(120)
        self.stream = self.socket.makefile("rwb")

    def read(self) -> dict[str, Any] | None:
        prefix = self.stream.read(4)
        if len(prefix) < 4:
            return None
        message = json.loads(self.stream.read(struct.unpack("<I", prefix)[0]))
        assert isinstance(message, dict)
        return message

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if self.fault == "halves" and len(data) > 8:
            self.stream.write(struct.pack("<I", len(data)) + data[:5])
            self.stream.flush()
            time.sleep(0.05)
            data, prefix = data[5:], b""
        else:
            prefix = struct.pack("<I", len(data))
        self.stream.write(prefix + data)
        self.stream.flush()

    def send_raw(self, data: bytes) -> None:
        self.stream.write(data)
        self.stream.flush()

    def describe(self) -> dict[str, Any]:
        observed = [agent.observation_space for agent in self.agents]
        acted = [agent.action_space for agent in self.agents]
        message: dict[str, Any] = {"type": "env_info", "n_agents": len(self.agents)}
        if self.fault == "old":  # plugins before 0.5 declare the spaces once, and no policies
            return {**message, "observation_space": observed[0], "action_space": acted[0]}
        message |= {"observation_space": observed, "action_space": acted}
        message["agent_policy_names"] = [agent.policy for agent in self.agents]
        if self.fault == "version":
            message["action_space"] = [{"move": {"size": 1, "action_type": "quantum"}}] * len(self.agents)
        return message

    def observe(self) -> list[dict[str, Any]]:
        return [agent.observe() for agent in self.agents]

    def step(self, actions: list[dict[str, Any]]) -> None:
        self.steps += 1
        if self.steps == 5:
            self.fail()
        for agent, action in zip(self.agents, actions, strict=True):
            agent.act(action)
        reply: dict[str, Any] = {"type": "step", "obs": self.observe()}
        reply["reward"] = [agent.reward for agent in self.agents]
        reply["done"] = [agent.done for agent in self.agents]
        reply["info"] = [{} for _ in self.agents]
        for agent in self.agents:
            agent.reward, agent.done = 0.0, False
        if self.steps == 5 and self.fault == "nan":
            reply["obs"][0]["obs"][1] = float("nan")
        if self.steps == 5 and self.fault == "nan_reward":
            reply["reward"][0] = float("nan")
        if self.steps == 5 and self.fault == "fewer":
            reply["obs"].pop()
        self.send(reply)

    def fail(self) -> None:
        if self.fault == "die":
            sys.stderr.write("Segmentation fault in the physics of the stand-in\n")
            sys.stderr.flush()
            os._exit(11)
        elif self.fault == "hang":
            time.sleep(600)
        elif self.fault == "huge":
            self.send_raw(b"\xff\xff\xff\xff{}")
        elif self.fault == "garbage":
            self.send_raw(struct.pack("<I", 12) + b"<html>\xff\xfe</h")
        elif self.fault == "other":
            self.send({"type": "reset", "obs": self.observe()})

    def run(self) -> None:
        message = self.read()
        assert message is not None
        assert message["type"] == "handshake"
        if (message["major_version"], message["minor_version"]) != VERSION:
            sys.stderr.write("WARNING: minor version mismatch\n")
        while (message := self.read()) is not None:
            kind = message["type"]
            if kind == "close":
                if self.fault == "stay":
                    time.sleep(600)
                return
            if kind == "env_info":
                self.send(self.describe())
            elif kind == "reset":
                for agent in self.agents:
                    agent.reward, agent.done = 0.0, False
                    agent.begin()
                self.send({"type": "reset", "obs": self.observe(), "info": [{} for _ in self.agents]})
            elif kind == "call":
                self.send({"type": "call", "returns": [getattr(agent, message["method"])() for agent in self.agents]})
            else:
                self.step(message["action"])


def main() -> None:
    words = [word.removeprefix("--").partition("=") for word in sys.argv[1:]]
    Game({name: value for name, _, value in words}).run()


if __name__ == "__main__":
    main()
