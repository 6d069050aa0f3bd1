"""Frames of environments that have no RGB rendering of their own and draw in a window: pictures of the private screen of this process.

The environment is made again on the private screen, in `human` mode if it has one, and played for a moment until its window is open.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from ludus.core.spaces import ACTION_MASK
from ludus.display import headless
from ludus.display.private_screen import APT_XVFB, find_xvfb
from ludus.display.screen_grab import Picture, ScreenGrab
from ludus.envs.faults import close_quietly, environment_errors
from ludus.envs.pettingzoo import MatchWrapper, MultiAgentMatch
from ludus.errors import MissingExtra, UsageError
from ludus.process.screen_choice import EGL, NONE, screen_choice

RGB, DEPTH, HUMAN = "rgb_array", "depth_array", "human"

_FIRST_STEPS = 10
"""Steps within which the window must be open."""
_WINDOW_S = 2.0


def make_recorded(make: Callable[[str | None], gym.Env[Any, Any]], name: str) -> gym.Env[Any, Any]:
    """Return an environment whose `render` returns frames. `make(render_mode)` makes the environment.

    Raises UsageError if it neither renders nor draws in a window, MissingExtra if that would need an Xvfb.
    """
    env = make(RGB)
    if renders(env.render_mode, env.metadata):
        return env
    env.close()
    _check_screen(env.metadata, name)
    with headless.kept_screen() as private, contextlib.ExitStack() as made:
        grab = made.enter_context(ScreenGrab(private, _WINDOW_S))
        env = make(HUMAN if HUMAN in _modes(env.metadata) else None)
        made.callback(close_quietly, env)
        recorded = _ScreenEnv(env, grab)
        _open_window(recorded, name)
        made.pop_all()
    return recorded


def make_recorded_match(make: Callable[[str | None], MultiAgentMatch], name: str) -> MultiAgentMatch:
    """The same for an environment with several agents. Its window must be open after a reset."""
    match = make(RGB)
    if RGB in _modes(match.metadata) or HUMAN not in _modes(match.metadata):
        return match
    match.close()
    _check_screen(match.metadata, name)
    with headless.kept_screen() as private, contextlib.ExitStack() as made:
        grab = made.enter_context(ScreenGrab(private, _WINDOW_S))
        match = make(HUMAN)
        made.callback(close_quietly, match)
        match.reset(0)
        grab.frame()
        made.pop_all()
    return _ScreenMatch(match, grab)


def renders(mode: str | None, metadata: Mapping[str, Any]) -> bool:
    """Whether an environment made in `mode` renders images; one that lists no render modes is believed."""
    return mode in (RGB, DEPTH) and (not _modes(metadata) or mode in _modes(metadata))


def _modes(metadata: Mapping[str, Any]) -> list[str]:
    return list(metadata.get("render_modes") or ())


def _check_screen(metadata: Mapping[str, Any], name: str) -> None:
    """Raises UsageError, MissingExtra if frames cannot be read from a private screen."""
    why = f"{name} cannot render RGB frames: its render modes are {_modes(metadata) or 'none'}"
    if _modes(metadata) == [DEPTH]:
        raise UsageError(f"{why}. A depth map is not a video of the game.", "Record depth maps in false colours with --depth.")
    if not sys.platform.startswith("linux"):
        raise UsageError(f"{why}.", "Record without --video.")
    if (choice := screen_choice()) in (EGL, NONE):
        raise UsageError(
            f"{why}, and display is {choice}.", "With display: xvfb its window is recorded; or record without --video."
        )
    if find_xvfb() is None:
        raise MissingExtra(f"{why}, and Xvfb, on which its window would be recorded, is not installed.", APT_XVFB)


def _open_window(env: gym.Env[Any, Any], name: str) -> None:
    """Play until the window is open. Raises UsageError."""
    with environment_errors(name, "reset", 0):
        observation, info = env.reset(seed=0)
    for step in range(1, _FIRST_STEPS + 1):
        try:
            env.render()
        except UsageError as error:
            if step == _FIRST_STEPS:
                raise UsageError(
                    f"{name} cannot render RGB frames: its render modes are {_modes(env.metadata) or 'none'}, and it has opened no"
                    f" window on a private screen in {step} steps.",
                    "Record without --video, or give it a render method.",
                ) from error
        else:
            return
        mask = observation.get(ACTION_MASK) if isinstance(observation, dict) else info.get(ACTION_MASK)
        try:
            action = env.action_space.sample(mask if mask is None else mask.astype("int8"))
        except (TypeError, ValueError, AssertionError):  # the space does not support masks
            action = env.action_space.sample()
        with environment_errors(name, "step", step):
            observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            observation, info = env.reset()


class _ScreenEnv(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any], grab: ScreenGrab) -> None:
        super().__init__(env)
        self._grab = grab

    @property
    def render_mode(self) -> str | None:  # type: ignore[override] # as in gym.Wrapper
        return RGB

    def render(self) -> Any:
        return self._grab.frame()

    def close(self) -> None:
        self._grab.close()
        self.env.close()


class _ScreenMatch(MatchWrapper):
    def __init__(self, match: MultiAgentMatch, grab: ScreenGrab) -> None:
        super().__init__(match)
        self._grab = grab

    def render(self) -> Picture:
        return self._grab.frame()

    def close(self) -> None:
        self._grab.close()
        super().close()
