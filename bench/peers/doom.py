"""ViZDoom's basic scenario for peers that bring no Doom of their own: what Sample Factory's `doom_basic` shows and does.

160×120 in colour, the nearest pixels of it as 128×72; frame skip 4; nothing, left, right or attack; rewards in hundredths.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import vizdoom

HEIGHT, WIDTH = 72, 128
ROWS, COLUMNS = np.arange(HEIGHT) * 120 // HEIGHT, np.arange(WIDTH) * 160 // WIDTH
FRAME_SKIP = 4
REWARD_SCALE = 0.01
ACTIONS = [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


class Doom(gym.Env):
    """uint8 [3, 72, 128], or [72, 128, 3]."""

    def __init__(self, channels_last: bool = False) -> None:
        self._channels_last = channels_last
        shape = (HEIGHT, WIDTH, 3) if channels_last else (3, HEIGHT, WIDTH)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(len(ACTIONS))
        self._directory = tempfile.mkdtemp(prefix="doom-")
        self._game = game = vizdoom.DoomGame()
        game.load_config(os.path.join(vizdoom.scenarios_path, "basic.cfg"))
        game.set_doom_config_path(os.path.join(self._directory, "engine.ini"))
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24 if channels_last else vizdoom.ScreenFormat.CRCGCB)
        game.set_render_hud(True)
        game.set_render_decals(False)
        game.set_render_particles(False)
        self._last = np.zeros(shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self._game.is_running():
            self._game.new_episode()
        else:
            self._game.set_seed(int(self.np_random.integers(1 << 32)))
            self._game.init()
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = self._game.make_action(ACTIONS[int(action)], FRAME_SKIP) * REWARD_SCALE
        over = self._game.is_episode_finished()
        truncated = over and self._game.is_episode_timeout_reached()
        return self._seen(), reward, over and not truncated, truncated, {}

    def _seen(self) -> np.ndarray:
        state = self._game.get_state()
        if state is not None:
            screen = state.screen_buffer
            rows = screen.take(ROWS, axis=0 if self._channels_last else 1)
            self._last = rows.take(COLUMNS, axis=1 if self._channels_last else 2)
        return self._last

    def close(self) -> None:
        self._game.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class DoomThreads(gym.vector.VectorEnv):
    """Many games stepped by a few threads, in same-step autoreset: the engines are processes, and waiting for them frees the GIL."""

    def __init__(self, num_envs: int, threads: int) -> None:
        self.num_envs = num_envs
        self._games = [Doom() for _ in range(num_envs)]
        self.single_observation_space = self._games[0].observation_space
        self.single_action_space = self._games[0].action_space
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads
        self._obs = np.zeros((num_envs, *self.single_observation_space.shape), np.uint8)
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated, self._truncated = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        for i, game in enumerate(self._games):
            self._obs[i] = game.reset(seed=None if seed is None else seed + i)[0]
        return self._obs.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        parts = [range(part, self.num_envs, self._threads) for part in range(self._threads)]
        list(self._pool.map(lambda part: self._step(part, actions), parts))
        return self._obs.copy(), self._reward, self._terminated, self._truncated, {}

    def _step(self, part: range, actions: np.ndarray) -> None:
        for i in part:
            game = self._games[i]
            obs, self._reward[i], self._terminated[i], self._truncated[i], _ = game.step(actions[i])
            if self._terminated[i] or self._truncated[i]:
                obs, _ = game.reset()
            self._obs[i] = obs

    def close_extras(self, **_: Any) -> None:
        self._pool.shutdown()
        for game in self._games:
            game.close()
