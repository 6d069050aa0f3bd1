"""Environments for `ludus check-env`: a good one, and others that differ from it by one fault each."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv

from ludus.display import x11
from ludus.process import screen_choice

Step = tuple[Any, Any, Any, Any, dict[str, Any]]


class Walk(gym.Env[Any, Any]):
    """A random walk to one of two ends, from −1 to 1. Without a fault: the zoo's other inhabitants change one thing each."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space: gym.Space[Any] = Box(-1.5, 1.5, (2,), np.float32)
        self.action_space: gym.Space[Any] = Discrete(2)
        self.place, self.speed, self.steps = 0.0, 0.0, 0

    def seen(self) -> Any:
        return np.array([self.place, self.speed], np.float32)

    def info(self) -> Any:
        return {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.place, self.speed, self.steps = float(self.np_random.uniform(-0.1, 0.1)), 0.0, 0
        return self.seen(), self.info()

    def step(self, action: Any) -> Step:
        self.steps += 1
        self.speed = float(0.2 * (int(action) - 0.5) + self.np_random.normal(0, 0.02))
        self.place += self.speed
        over = abs(self.place) >= 1
        self.place = float(np.clip(self.place, -1, 1))
        return self.seen(), float(self.place >= 1) - 0.01, over, self.steps >= 200, self.info()

    def render(self) -> Any:
        picture = np.zeros((32, 64, 3), np.uint8)
        picture[:, int(30 + 28 * self.place)] = 255
        return picture


class Grid(Walk):
    """Like MiniGrid: a symbol grid, a direction, and a task as text."""

    def __init__(self, render_mode: str | None = None, text: bool = False) -> None:
        super().__init__(render_mode)
        self.text = text
        parts: dict[str, gym.Space[Any]] = {"image": Box(0, 255, (7, 7, 3), np.uint8), "direction": Discrete(4)}
        self.observation_space = Dict({**parts, "mission": Text(40)} if text else parts)

    def seen(self) -> Any:
        image = np.zeros((7, 7, 3), np.uint8)
        image[3, int(3 + 3 * np.clip(self.place, -1, 1))] = (2, 5, 0)
        return {"image": image, "direction": self.steps % 4, **({"mission": "go to the end"} if self.text else {})}


class Mission(Grid):
    """Its task is text, which `preprocess: {drop: …}` removes."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, text=True)


class Masked(Walk):
    """Near the lower end only one direction is allowed."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Dict({"observation": self.observation_space, "action_mask": MultiBinary(2)})

    def mask(self) -> Any:
        return np.array([self.place > -0.5, True], np.int8)

    def seen(self) -> Any:
        return {"observation": super().seen(), "action_mask": self.mask()}


class Nested(Walk):
    """Tuples inside of dicts, categories that do not begin at 0, a composite action with a mask in the infos."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        hero = Tuple((Box(-1.5, 1.5, (2,), np.float32), Discrete(5, start=1)))
        self.observation_space = Dict({"hero": hero, "bag": MultiDiscrete([10, 10])})
        self.action_space = MultiDiscrete([2, 3])

    def seen(self) -> Any:
        return {"hero": (super().seen(), 1 + self.steps % 5), "bag": np.full(2, self.steps % 10)}

    def info(self) -> Any:
        return {"action_mask": (np.ones(2, np.bool_), np.arange(3) != self.steps % 3)}

    def step(self, action: Any) -> Step:
        return super().step(action[0])


# -- what they return


class OutOfBounds(Walk):
    def seen(self) -> Any:
        return super().seen() * (1 if self.steps < 7 else 3)


class WrongShape(Walk):
    def seen(self) -> Any:
        return np.zeros(3, np.float32)


class LacksKey(Grid):
    def seen(self) -> Any:
        return {"image": super().seen()["image"]}


class Doubles(Walk):
    def seen(self) -> Any:
        return super().seen().astype(np.float64)


class FractionsInBytes(Grid):
    def seen(self) -> Any:
        return {**super().seen(), "image": super().seen()["image"] / 255}


class NotANumber(Walk):
    def seen(self) -> Any:
        return super().seen() * (np.nan if self.steps > 5 else 1)


class OldGym(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class ResetWithoutInfo(Walk):
    def reset(self, **keywords: Any) -> Any:
        return super().reset(**keywords)[0]


class Changed(Walk):
    """Changes one of the five values of a step."""

    index = 0
    value: Any = None

    def step(self, action: Any) -> Step:
        made = list(super().step(action))
        made[self.index] = self.value
        return tuple(made)


class RewardNan(Changed):
    index, value = 1, float("nan")


class RewardNone(Changed):
    index = 1


class RewardArray(Changed):
    index, value = 1, np.ones(1)


class FlagIsInt(Changed):
    index, value = 3, 0


class InfoIsNone(Changed):
    index = 4


class ReservedInfo(Walk):
    def info(self) -> Any:
        return {"final_obs": 1}


class SpacesChange(Walk):
    def reset(self, **keywords: Any) -> Any:
        self.observation_space = Box(-1.5, 1.5 + self.np_random.random(), (2,), np.float32)
        return super().reset(**keywords)


class Constant(Walk):
    def seen(self) -> Any:
        return np.zeros(2, np.float32)


class NotASpace(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = (2,)  # type: ignore[assignment]


class OnlyText(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Text(10)


class UnboundedAction(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = Box(-np.inf, np.inf, (1,), np.float32)

    def step(self, action: Any) -> Step:
        return super().step(int(action[0] > 0))


class NoConstructor(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        raise OSError("no licence server")


class Raises(Walk):
    def step(self, action: Any) -> Step:
        if self.steps == 6:
            raise KeyError("enemy")
        return super().step(action)


class EqualBounds(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(np.array([-1.5, -1.5, 0], np.float32), np.array([1.5, 1.5, 0], np.float32))

    def seen(self) -> Any:
        return np.append(super().seen(), np.float32(0))


class ResetWithoutOptions(Walk):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class OneBuffer(Walk):
    """Returns the same array again and again."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.buffer = np.zeros(2, np.float32)

    def seen(self) -> Any:
        self.buffer[:] = self.place, self.speed
        return self.buffer


class CloseOnce(Walk):
    is_open = True

    def close(self) -> None:
        if not self.is_open:
            raise RuntimeError("the window is closed")
        self.is_open = False


# -- episodes and rewards


class TimeIsUp(Walk):
    """Ends after 20 steps, by terminated."""

    def step(self, action: Any) -> Step:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.steps >= 20, False, info


class Endless(Walk):
    def step(self, action: Any) -> Step:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


class LargeObservations(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-2000, 2000, (2,), np.float32)

    def seen(self) -> Any:
        return super().seen() * 1000


class WideBounds(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Box(-1e6, 1e6, (2,), np.float32)


class LargeRewards(Walk):
    def step(self, action: Any) -> Step:
        observation, reward, *rest = super().step(action)
        return observation, 500.0 * reward, *rest


class RareRewards(Walk):
    def step(self, action: Any) -> Step:
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


# -- masks


class NoChoice(Masked):
    def mask(self) -> Any:
        return np.zeros(2, np.int8) if self.steps == 4 else super().mask()


class LongMask(Masked):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Dict({**self.observation_space.spaces, "action_mask": MultiBinary(3)})  # type: ignore[attr-defined]

    def mask(self) -> Any:
        return np.ones(3, np.int8)


class ForgetsMask(Walk):
    def info(self) -> Any:
        return {"action_mask": np.ones(2, np.int8)} if self.steps % 5 != 3 else {}


# -- randomness and state


class Unseeded(Walk):
    def step(self, action: Any) -> Step:
        observation, *rest = super().step(action)
        return np.clip(observation + np.random.default_rng().normal(0, 0.01, 2), -1.5, 1.5).astype(np.float32), *rest


class Shared(Walk):
    """Seeds a generator that all copies use."""

    generator = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if seed is not None:
            type(self).generator = np.random.default_rng(seed)
        made = super().reset(seed=seed)
        self.place = float(self.generator.uniform(-0.1, 0.1))
        return self.seen(), made[1]

    def step(self, action: Any) -> Step:
        self.place += float(self.generator.normal(0, 0.01))
        return super().step(action)


class HashOrder(Walk):
    """Depends on the hash of a string, which differs from process to process."""

    def reset(self, **keywords: Any) -> Any:
        _, info = super().reset(**keywords)
        self.place += hash("goal") % 1000 / 1e5
        return self.seen(), info


class NeedsScreen(Walk):
    """Opens a window."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if problem := x11.connection_error(os.environ):
            raise RuntimeError(problem)


class NeedsNoScreen(Walk):
    """Works with `display: none` only."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if screen_choice.screen_choice() != screen_choice.NONE:
            raise RuntimeError("there is a screen")


class OnePort(Walk):
    """Only one process can have it open."""

    held: socket.socket | None = None

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if OnePort.held is None:
            OnePort.held = socket.socket()
            OnePort.held.bind(("127.0.0.1", int(os.environ["ZOO_PORT"])))


# -- resources


class Leaks(Walk):
    kept: list[bytes] = []  # noqa: RUF012 - that is its fault

    def step(self, action: Any) -> Step:
        self.kept.append(bytes(os.urandom(1)) * 30_000)
        return super().step(action)


class Prints(Walk):
    def step(self, action: Any) -> Step:
        sys.stdout.write(f"acting {action}\n")
        sys.stdout.flush()
        return super().step(action)


class Slow(Walk):
    def step(self, action: Any) -> Step:
        time.sleep(0.025)
        return super().step(action)


class Uneven(Walk):
    def step(self, action: Any) -> Step:
        if self.steps % 10 == 9:
            time.sleep(0.06)
        return super().step(action)


class LeavesThread(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


class LeavesProcess(Walk):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.game = subprocess.Popen(["sleep", "30"])


class LeavesFile(Walk):
    files: list[Any] = []  # noqa: RUF012 - that is its fault

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.files.append(open(os.devnull))  # noqa: SIM115 - that is its fault


class Game(Walk):
    """Has a process of its own, and ends it."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.game = subprocess.Popen(["sleep", "30"])

    def close(self) -> None:
        self.game.kill()
        self.game.wait()


class CloseFails(Walk):
    def close(self) -> None:
        raise AttributeError("window")


class NoResetMidway(Walk):
    def reset(self, **keywords: Any) -> Any:
        if 0 < self.steps < 200 and abs(self.place) < 1:
            raise RuntimeError("the episode is not over")
        return super().reset(**keywords)


# -- pictures


class Depth(Walk):
    def render(self) -> Any:
        return np.zeros((32, 64), np.float32)


class NoPicture(Walk):
    def render(self) -> Any:
        return None


class NoFps(Walk):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012


# -- the process


class Hangs(Walk):
    def step(self, action: Any) -> Step:
        if self.steps == 5:
            time.sleep(600)
        return super().step(action)


class Crashes(Walk):
    def step(self, action: Any) -> Step:
        if self.steps == 5:
            ctypes.string_at(0)
        return super().step(action)


class Exits(Walk):
    def step(self, action: Any) -> Step:
        if self.steps == 5:
            sys.exit("game over")
        return super().step(action)


class ExitsHard(Walk):
    def step(self, action: Any) -> Step:
        if self.steps == 5:
            os._exit(3)
        return super().step(action)


class CrashesAfterEnd(Walk):
    """Its library frees the world at the end of an episode."""

    def step(self, action: Any) -> Step:
        if self.steps and abs(self.place) >= 1:
            ctypes.string_at(0)
        return super().step(action)


class CrashesOnForbidden(Masked):
    def step(self, action: Any) -> Step:
        if not self.mask()[int(action)]:
            ctypes.string_at(0)
        return super().step(action)


# -- many at once


class Rows(VectorEnv[Any, Any, Any]):
    """A vector of walks."""

    def __init__(self, num_envs: int = 1, fault: str = "") -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs + (fault == "count" and num_envs > 1)
        self.fault, self._envs = fault, [Walk() for _ in range(self.num_envs)]
        self._over = np.zeros(self.num_envs, np.bool_)
        self.single_observation_space, self.single_action_space = self._envs[0].observation_space, self._envs[0].action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        seeds = [None if seed is None else seed + i * (self.fault != "equal") for i in range(self.num_envs)]
        self._over[:] = False
        return self._shown(np.stack([env.reset(seed=own)[0] for env, own in zip(self._envs, seeds, strict=True)])), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        made = [
            (env.reset()[0], 0.0, False, False, {}) if over else env.step(0 if self.fault == "equal" else action)
            for env, action, over in zip(self._envs, actions, self._over, strict=True)
        ]
        observation, reward, terminated, truncated = (np.array([each[k] for each in made]) for k in range(4))
        if self.fault == "equal":
            observation[:], terminated[:], truncated[:] = observation[0], terminated[0], truncated[0]
        self._over = terminated | truncated
        return (
            self._shown(observation),
            reward[:, None] if self.fault == "reward" and len(reward) > 1 else reward,
            terminated,
            truncated,
            {},
        )

    def _shown(self, observation: Any) -> Any:
        return observation[:, :1] if self.fault == "shape" and len(observation) > 1 else observation


def make(kind: str, settings: Mapping[str, Any] | None = None, render_mode: str | None = None) -> gym.Env[Any, Any]:
    made: gym.Env[Any, Any] = globals()[kind](render_mode=render_mode, **(settings or {}))
    return made


def make_rows(num_envs: int, fault: str = "") -> Rows:
    return Rows(num_envs, fault)
