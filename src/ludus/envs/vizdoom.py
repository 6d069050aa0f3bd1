"""ViZDoom scenarios with the usual preprocessing: a small colour image, one button at a time, frame skip 4.

The engine renders 160×120, sampled to [72, 128, 3]; that costs a fifth of the scenario's own resolution. `preprocess:` changes size,
frame skip and colour. `env_config` may hold `reward_scale` (0.01 for the basic scenario, whose rewards go down to −300) and any key
of ViZDoom's config files, such as `doom_skill`. `preprocess: {standard: false}` gives ViZDoom's own Gymnasium environment instead.
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

# The engine is a separate process that would outlive a killed parent: PR_SET_PDEATHSIG makes the kernel end it.
# It is not started if the parent has exited before that call.
_LAUNCHER = """#!/bin/sh
{setup}printf '%s\\n' "$@" > {arguments}
exec {python} -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])' "$PPID" {engine} "$@"
"""
_OWN_DIRECTORY = """cd {directory} || exit 1
echo $$ > pid
exec > {log} 2>&1
"""
_INSTANCE = "+viz_instance_id"
_SHARED = ("ViZDoomSM", "ViZDoomMQCtr", "ViZDoomMQDoom")


def is_doom(spec: EnvSpec, preprocess: PreprocessConfig) -> bool:
    """Return whether this is a ViZDoom scenario with standard preprocessing, not an id registered by others."""
    return preprocess.standard is not False and spec.id.startswith("Vizdoom") and "scenario_config_file" in spec.kwargs


def make_doom(
    spec: EnvSpec, config: Mapping[str, Any], preprocess: PreprocessConfig
) -> tuple[gym.Env[Any, Any], PreprocessConfig]:
    """Return one game of a scenario, and the preprocessing that the engine does not do. Raises MissingExtra, UsageError."""
    plugins.require("vizdoom", "doom", spec.id)
    height, width = preprocess.resize or (None, None)
    translated = {"frame_skip": preprocess.frame_skip, "grayscale": preprocess.grey, "height": height, "width": width}
    given = {key: value for key, value in translated.items() if value is not None}
    twice = [key for key in given if key in config and config[key] != given[key]]
    if twice:
        raise ConfigError(
            f"{spec.id}: env_config sets {twice[0]} to {config[twice[0]]!r}, but preprocess sets it otherwise.", "Keep one."
        )
    one_button = bool(spec.kwargs.get("max_buttons_pressed", 1))
    game = DoomEnvironment(str(spec.kwargs["scenario_config_file"]), one_button=one_button, **dict(config) | given)
    return game, preprocess.model_copy(update={"frame_skip": None, "grey": None, "resize": None})


class DoomEnvironment(gym.Env[Bytes, Any]):
    """Observations: uint8 [height, width, 3 or 1]; actions: no button or one (Discrete), or any buttons (MultiBinary).

    Buttons with an amount, such as turning by degrees, are left out. After the last step of an episode the engine has no image, so the
    previous one is returned again. The scenario's time limit truncates.
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
                f"A Doom image of {width}×{height} with frame skip {frame_skip} is not possible.",
                f"Use at most {SCREEN[1]}×{SCREEN[0]} and a frame skip of at least 1.",
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
                raise UsageError(f"ViZDoom rejects {key}={value!r} (env_config).", "See the keys of its config files.")
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
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Bytes, float, bool, bool, dict[str, Any]]:
        pressed = self._presses[int(action)] if self._one_button else np.asarray(action, np.float64).tolist()
        reward = self._game.make_action(pressed, self._frame_skip) * self._reward_scale
        over = self._game.is_episode_finished()
        truncated = over and self._game.is_episode_timeout_reached()
        return self._observation(), reward, over and not truncated, truncated, {}

    def render(self) -> Any:
        """The whole screen as rendered by the engine, [120, 160, 3]."""
        return np.repeat(self._screen, 3, axis=-1) if self._screen.shape[-1] == 1 else self._screen.copy()

    def close(self) -> None:
        self._game.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ludus-doom-"))
        self._game.set_doom_config_path(str(self._directory / "engine.ini"))  # otherwise it is written to the working directory
        if not sys.platform.startswith("linux"):
            self._game.init()
            return
        arguments = self._directory / "arguments"
        self._game.set_vizdoom_path(str(write_launcher(self._directory / "engine", arguments)))
        self._game.init()
        unlink_shared(arguments.read_text(encoding="utf-8").splitlines())

    def _observation(self) -> Bytes:
        state = self._game.get_state()
        if state is not None:
            screen = state.screen_buffer
            self._screen = screen if screen.ndim == 3 else screen[..., None]
        return self._pick(self._screen)


class Nearest:
    """Nearest-neighbour sampling of a screen without OpenCV, as fast."""

    def __init__(self, height: int, width: int) -> None:
        self._rows = np.arange(height) * SCREEN[0] // height
        self._columns = np.arange(width) * SCREEN[1] // width
        # 160 → 128 keeps four columns of five: a strided copy, three times as fast as indexing.
        self._four_of_five = width * 5 == SCREEN[1] * 4

    def __call__(self, screen: Bytes) -> Bytes:
        rows = screen.take(self._rows, axis=0)
        if not self._four_of_five:
            return rows.take(self._columns, axis=1)
        h, w, c = rows.shape
        return np.ascontiguousarray(rows.reshape(h, w // 5, 5 * c)[:, :, : 4 * c]).reshape(h, w // 5 * 4, c)


def write_launcher(path: Path, arguments: Path, log: Path | None = None) -> Path:
    """Write a program that starts an engine which ends with its parent, and stores its arguments in a file.

    `log`: the engine runs in the directory of this file and writes its output to it, and its process id to `pid` beside it.
    """
    import vizdoom

    engine = Path(vizdoom.__file__).parent / "vizdoom"
    values = {
        key: shlex.quote(str(value)) for key, value in (("python", sys.executable), ("engine", engine), ("arguments", arguments))
    }
    setup = "" if log is None else _OWN_DIRECTORY.format(directory=shlex.quote(str(log.parent)), log=shlex.quote(log.name))
    path.write_text(_LAUNCHER.format(setup=setup, **values), encoding="utf-8")
    path.chmod(0o700)
    return path


def unlink_shared(arguments: list[str]) -> None:
    """Unlink the shared memory after both sides have opened it, so that it disappears with them."""
    if _INSTANCE in arguments:
        instance = arguments[arguments.index(_INSTANCE) + 1]
        for kind in _SHARED:
            Path(f"/dev/shm/{kind}{instance}").unlink(missing_ok=True)  # noqa: S108 - fixed by ViZDoom
