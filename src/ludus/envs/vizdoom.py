"""ViZDoom scenarios as they are usually trained on: a small colour picture, one button at a time, every fourth frame acted on.

The engine draws 160×120; of that the nearest pixels make up [72, 128, 3]. A frame costs a fifth of one at the scenario's own
size. `preprocess:` changes the size, the frames and the colour; `env_config` may hold `reward_scale` (0.01 for the basic
scenario, whose rewards go down to −300), and whatever else ViZDoom's own config files know, such as `doom_skill`.
`preprocess: {standard: false}` gives ViZDoom's own Gymnasium environment instead, with all its buffers.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec

from ludus.config.schema import PreprocessConfig
from ludus.core import plugins
from ludus.errors import ConfigError, UsageError

Bytes = npt.NDArray[np.uint8]

REWARD_SCALES = {"basic.cfg": 0.01}
SCREEN = (120, 160)

# The engine is a process of its own that does not notice when ours is killed, so the kernel is asked to end it (PR_SET_PDEATHSIG).
# If we are gone before that was asked, it is not started.
_LAUNCHER = """#!/bin/sh
printf '%s\\n' "$@" > {arguments}
exec {python} -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])' "$PPID" {engine} "$@"
"""
_INSTANCE = "+viz_instance_id"
_SHARED = ("ViZDoomSM", "ViZDoomMQCtr", "ViZDoomMQDoom")


def is_doom(spec: EnvSpec, preprocess: PreprocessConfig) -> bool:
    """Whether it is a scenario of ViZDoom, to be played as usual; not one that somebody registered under such a name."""
    return preprocess.standard is not False and spec.id.startswith("Vizdoom") and "scenario_config_file" in spec.kwargs


def make_doom(
    spec: EnvSpec, config: Mapping[str, Any], preprocess: PreprocessConfig
) -> tuple[gym.Env[Any, Any], PreprocessConfig]:
    """One game of a registered scenario, and what of its preprocessing the engine does not do. Raises MissingExtra, UsageError."""
    plugins.require("vizdoom", "doom", spec.id)
    height, width = preprocess.resize or (None, None)
    asked = {"frame_skip": preprocess.frame_skip, "grayscale": preprocess.grey, "height": height, "width": width}
    given = {key: value for key, value in asked.items() if value is not None}
    twice = [key for key in given if key in config and config[key] != given[key]]
    if twice:
        raise ConfigError(
            f"{spec.id}: env_config sets {twice[0]} to {config[twice[0]]!r}, and preprocess otherwise.", "Keep one."
        )
    one_button = bool(spec.kwargs.get("max_buttons_pressed", 1))
    game = DoomEnvironment(str(spec.kwargs["scenario_config_file"]), one_button=one_button, **dict(config) | given)
    return game, preprocess.model_copy(update={"frame_skip": None, "grey": None, "resize": None})


class DoomEnvironment(gym.Env[Bytes, Any]):
    """Observations uint8 [height, width, 3 or 1]; actions: nothing or one button (Discrete), or any buttons (MultiBinary).

    Buttons that take an amount, such as turning by degrees, are left out. The engine shows nothing after the last step of an
    episode: the last picture is shown once more. The scenario's time limit truncates.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 9}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        scenario: str,
        *,
        one_button: bool = True,
        width: int = 128,
        height: int = 72,
        frame_skip: int = 4,
        grayscale: bool = False,
        reward_scale: float | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        import vizdoom

        if not (0 < width <= SCREEN[1] and 0 < height <= SCREEN[0] and frame_skip > 0):
            raise UsageError(
                f"A Doom picture of {width}×{height}, every {frame_skip} frames, cannot be made.",
                f"At most {SCREEN[1]}×{SCREEN[0]}, at least every frame.",
            )
        self.render_mode = render_mode
        self._frame_skip = frame_skip
        self._reward_scale = REWARD_SCALES.get(scenario, 1.0) if reward_scale is None else reward_scale
        self._game = vizdoom.DoomGame()
        self._game.load_config(str(Path(vizdoom.scenarios_path) / scenario))
        self._game.set_window_visible(False)
        self._game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self._game.set_screen_format(vizdoom.ScreenFormat.GRAY8 if grayscale else vizdoom.ScreenFormat.RGB24)
        self._game.set_render_hud(True)
        self._game.set_render_decals(False)
        self._game.set_render_particles(False)
        self._game.set_mode(vizdoom.Mode.PLAYER)
        for key, value in settings.items():
            if not self._game.set_config({key: value}):
                raise UsageError(f"ViZDoom does not know {key}={value!r} (env_config).", "Its config files list what there is.")
        buttons = [b for b in self._game.get_available_buttons() if not vizdoom.is_delta_button(b)]
        self._game.set_available_buttons(buttons)
        self._presses = [[float(i == j) for j in range(len(buttons))] for i in range(-1, len(buttons))]
        self._one_button = one_button
        self.action_space = gym.spaces.Discrete(len(self._presses)) if one_button else gym.spaces.MultiBinary(len(buttons))
        self.observation_space = gym.spaces.Box(0, 255, (height, width, 1 if grayscale else 3), np.uint8)
        self._pick = Nearest(height, width)
        self._screen: Bytes = np.zeros((*SCREEN, 1 if grayscale else 3), np.uint8)
        self._directory: Path | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Bytes, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.set_seed(int(self.np_random.integers(1 << 32)))
        if self._game.is_running():
            self._game.new_episode()
        else:
            self._start()
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Bytes, float, bool, bool, dict[str, Any]]:
        pressed = self._presses[int(action)] if self._one_button else np.asarray(action, np.float64).tolist()
        reward = self._game.make_action(pressed, self._frame_skip) * self._reward_scale
        over = self._game.is_episode_finished()
        truncated = over and self._game.is_episode_timeout_reached()
        return self._seen(), reward, over and not truncated, truncated, {}

    def render(self) -> Any:
        """The whole screen as the engine drew it, [120, 160, 3]."""
        return np.repeat(self._screen, 3, axis=-1) if self._screen.shape[-1] == 1 else self._screen.copy()

    def close(self) -> None:
        self._game.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ludus-doom-"))
        self._game.set_doom_config_path(str(self._directory / "engine.ini"))  # else it is written to where we stand
        if not sys.platform.startswith("linux"):
            self._game.init()
            return
        arguments = self._directory / "arguments"
        self._game.set_vizdoom_path(str(launcher(self._directory / "engine", arguments)))
        self._game.init()
        unlink_shared(arguments.read_text(encoding="utf-8").splitlines())

    def _seen(self) -> Bytes:
        state = self._game.get_state()
        if state is not None:
            screen = state.screen_buffer
            self._screen = screen if screen.ndim == 3 else screen[..., None]
        return self._pick(self._screen)


class Nearest:
    """The nearest pixels of a screen, as rows and columns to keep; without OpenCV, and as fast."""

    def __init__(self, height: int, width: int) -> None:
        self._rows = np.arange(height) * SCREEN[0] // height
        self._columns = np.arange(width) * SCREEN[1] // width
        # 160 → 128 keeps four columns of five: a copy by strides, three times as fast as picking pixels one by one.
        self._four_of_five = width * 5 == SCREEN[1] * 4

    def __call__(self, screen: Bytes) -> Bytes:
        rows = screen.take(self._rows, axis=0)
        if not self._four_of_five:
            return rows.take(self._columns, axis=1)
        h, w, c = rows.shape
        return np.ascontiguousarray(rows.reshape(h, w // 5, 5 * c)[:, :, : 4 * c]).reshape(h, w // 5 * 4, c)


def launcher(path: Path, arguments: Path) -> Path:
    """Write a program that starts an engine which ends with us, and leaves its arguments in a file."""
    import vizdoom

    engine = Path(vizdoom.__file__).parent / "vizdoom"
    words = {"python": sys.executable, "engine": engine, "arguments": arguments}
    path.write_text(_LAUNCHER.format(**{key: shlex.quote(str(word)) for key, word in words.items()}), encoding="utf-8")
    path.chmod(0o700)
    return path


def unlink_shared(arguments: list[str]) -> None:
    """Both sides have opened what they share: without names it goes away with them, however they end."""
    if _INSTANCE in arguments:
        instance = arguments[arguments.index(_INSTANCE) + 1]
        for kind in _SHARED:
            Path(f"/dev/shm/{kind}{instance}").unlink(missing_ok=True)  # noqa: S108 - its place, not a choice of ours
