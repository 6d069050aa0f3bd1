"""The duel as an environment: two engines per match, restarted between matches."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ludus.errors import ConfigError
from tests.waiting import wait_until

pytest.importorskip("vizdoom", reason="the duel needs `pip install ludus[doom]`")

import psutil

from ludus.games.doom.env import DoomDuelEnv
from ludus.games.doom.player import BotPlayer

pytestmark = [pytest.mark.timeout(150)]


@pytest.fixture
def duel() -> Iterator[DoomDuelEnv]:
    env = DoomDuelEnv(2, seconds=16, damage_reward=0.01, render_mode="rgb_array")
    yield env
    env.close()


def engines() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.name() == "vizdoom"]


def wait_for_end_of_engines() -> None:
    until = time.monotonic() + 20
    while engines() and time.monotonic() < until:
        time.sleep(0.05)
    assert not engines()


def test_matches_end_together_restart_at_zero_and_leave_no_process(duel: DoomDuelEnv) -> None:
    both, shape = np.arange(2), (2, 2)
    step = duel.reset(np.array([5, 6]), both)
    assert step.acting.all()
    before = np.array([[view.damage for view in views] for views in duel.views])
    bots, total = [BotPlayer(one) for one in range(2)], np.zeros(shape)
    for decision in range(1, 141):
        actions = np.zeros(shape, np.int64)  # camp 1 stands still
        actions[:, 0] = [bot.act(views[0], 0.0) for bot, views in zip(bots, duel.views, strict=True)]
        step = duel.step(actions, np.ones(2, np.bool_))
        assert (step.reward[:, 0] == -step.reward[:, 1]).all()
        assert step.terminated.all() == (decision == 140)
        total += step.reward
        assert np.abs(duel.observation).max() < 20  # also when somebody is dead
    damage = np.array([[view.damage for view in views] for views in duel.views]) - before
    assert duel.frags[:, 0].sum() >= 1  # the bot hits somebody who stands still
    np.testing.assert_allclose(total[:, 0], duel.frags[:, 0] - duel.frags[:, 1] + 0.01 * (damage[:, 0] - damage[:, 1]), atol=1e-4)
    assert np.asarray(duel.render()).shape == (360, 972, 3)
    assert len(engines()) == 4
    step = duel.reset(np.array([7]), np.array([1]))
    assert duel.frags[1].tolist() == [0, 0]
    seen = duel.observation[1, 0].reshape(2, -1)
    assert (seen[0] == seen[1]).all()  # at the start twice the same
    assert seen[0, 0] == 1.0  # health
    step = duel.step(np.zeros(shape, np.int64), np.ones(2, np.bool_))
    assert (np.abs(step.reward[1]) < 0.5).all()  # what was dealt before does not count
    duel.close()
    wait_for_end_of_engines()


KILLED_ENGINE = """
import numpy as np
from ludus.errors import WorkerFailed
from ludus.games.doom.engine import PRESSES
from ludus.games.doom.env import DoomDuelEnv
from tests.doom.test_duel_env import engines
duel = DoomDuelEnv(2, seconds=16)
duel.reset(np.array([1, 2]), np.arange(2))
print(*[one.pid for one in engines()], flush=True)
engines()[0].kill()
try:
    duel.step(np.full((2, 2), len(PRESSES) - 1), np.ones(2, np.bool_))
except WorkerFailed as error:
    assert "duel of Doom has ended" in str(error), error
else:
    raise AssertionError("no error")
duel.close()
"""


def test_a_killed_engine_ends_the_match_and_leaves_no_process() -> None:
    """In a process of its own: ViZDoom 1.3 sometimes reads the memory of an engine that has been killed, and crashes."""
    done = subprocess.run([sys.executable, "-c", KILLED_ENGINE], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGSEGV), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="the engines end")


def test_a_match_without_a_decision_is_refused() -> None:
    with pytest.raises(ConfigError, match="frame skip of 0"):
        DoomDuelEnv(frame_skip=0)
    with pytest.raises(ConfigError, match=r"0\.01 s"):
        DoomDuelEnv(seconds=0.01)
