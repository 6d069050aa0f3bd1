"""Games with a loop of frames in a process, and actors that make them wait or lose their session."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import pytest

from ludus.errors import Refused
from ludus.experiments import runner
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from tests.clients.contract import Balancer, can_be_won_and_lost, environment, makes_no_mistakes
from tests.experiments.called import data, training
from tests.local_servers import gateway
from tests.waiting import wait_until

LIMIT_S = 60.0


class Playing:
    """A game in a process, with the lines that it prints."""

    def __init__(self, command: Sequence[str | Path], url: str, home: Path, *words: str) -> None:
        filled = [*map(str, command), "--url", url, *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(filled, text=True, env=environment(home), **pipes)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)

    def _read(self) -> None:
        with cast(IO[str], self.process.stdout) as output:
            for line in output:
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: sum(bool(re.match(pattern, line)) for line in self.lines) >= times, LIMIT_S)
        assert found, self.lines[-20:]

    def frames(self) -> int:
        return sum(line.startswith("frame ") for line in self.lines)

    def finish(self) -> list[str]:
        assert self.process.wait(LIMIT_S) == 0, self.lines[-20:]
        self._reading.join(LIMIT_S)
        assert not [line for line in self.lines if "Exception" in line]
        return self.lines

    def lengths(self) -> list[int]:
        """Of the matches that have ended, in frames."""
        return [int(found[1]) for line in self.lines if (found := re.match(r"match \d+: (\d+) frames", line))]


class Patient(Balancer):
    """Answers the third tick of a session only when it is allowed to."""

    allowed: ClassVar[threading.Event] = threading.Event()
    asked: ClassVar[threading.Event] = threading.Event()

    async def tick(self, body: bytes) -> bytes:
        reply = await super().tick(body)
        if self.ticks == 3:
            self.asked.set()
            while not self.allowed.is_set():
                await asyncio.sleep(0.005)
        return reply


class Forgetful(Balancer):
    """Fails in the fifth tick of the first session, which is lost then."""

    failed: ClassVar[bool] = False

    async def tick(self, body: bytes) -> bytes:
        reply = await super().tick(body)
        if self.ticks == 5 and not Forgetful.failed:
            Forgetful.failed = True
            raise RuntimeError("out of order")
        if self.ticks == 1:
            assert struct.unpack_from("<f", body) == (0.0,)
        return reply


class Broken(Balancer):
    """Loses every session in its first tick."""

    starts: ClassVar[int] = 0

    async def start(self, session: str, body: bytes) -> bytes:
        Broken.starts += 1
        return await super().start(session, body)

    async def tick(self, body: bytes) -> bytes:
        raise RuntimeError("out of order")


class Occupied(Balancer):
    """Refuses an end for now, more often than a client repeats it by itself."""

    refusals: ClassVar[int] = 0

    async def end(self, body: bytes) -> bytes:
        if Occupied.refusals < 4:
            Occupied.refusals += 1
            raise Refused(503, "worker_busy", "Not now.", "Wait.")
        return await super().end(body)


class FrameLoopContract:
    """What agents on a loop of frames promise. The game is CartPole:

    GAME --url URL --matches N [--period N] [--wait] [--frames]

    --wait: frames wait for their action; --frames: prints the number of each frame, and pauses for a millisecond.
    """

    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        for event in (Patient.allowed, Patient.asked):
            event.clear()
        Forgetful.failed = False
        Broken.starts = Occupied.refusals = 0
        Balancer.ended.clear()
        yield
        Patient.allowed.set()

    def test_in_step_it_can_be_won_and_lost(self, game: list[str | Path], tmp_path: Path) -> None:
        can_be_won_and_lost(*game, "--url", "{url}", "--matches", "3", "--wait", home=tmp_path)

    @pytest.mark.parametrize("words", [["--wait"], []], ids=["in step", "free"])
    def test_it_makes_no_mistakes(self, game: list[str | Path], tmp_path: Path, words: list[str]) -> None:
        makes_no_mistakes(*game, "--url", "{url}", "--matches", "3", *words, home=tmp_path)

    def test_between_decisions_the_last_action_stays_in_force(self, game: list[str | Path], tmp_path: Path) -> None:
        words = ["--matches", "2", "--wait", "--period", "3"]
        with gateway(Balancer) as served, Playing(game, served.url, tmp_path, *words) as playing:
            playing.finish()
        assert len(playing.lengths()) == 2
        assert Balancer.ended == [(math.ceil(n / 3), float(n), 2 if n == 500 else 1) for n in playing.lengths()]

    def test_frames_go_on_while_the_server_thinks(self, game: list[str | Path], tmp_path: Path) -> None:
        with gateway(Patient) as served, Playing(game, served.url, tmp_path, "--matches", "1000", "--frames") as playing:
            assert Patient.asked.wait(LIMIT_S)
            playing.wait_for("frame ", times=playing.frames() + 50)
            assert not Balancer.ended, "the third tick is still open"
            Patient.allowed.set()
            wait_until(lambda: Balancer.ended, what="an episode that ended")

    def test_the_game_goes_on_when_the_server_is_started_again(self, game: list[str | Path], tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with ExitStack() as stack:
            playing = stack.enter_context(Playing(game, url, tmp_path, "--matches", "1000", "--frames"))
            playing.wait_for("warning: .*listens")  # no server yet
            with gateway(Balancer, port=port):
                playing.wait_for("(agent: )?connected")
                wait_until(lambda: Balancer.ended, what="an episode that ended")
            playing.wait_for("warning: ", times=2)
            Balancer.ended.clear()
            stack.enter_context(gateway(Balancer, port=port))
            playing.wait_for("(agent: )?connected", times=2)
            wait_until(lambda: Balancer.ended, what="an episode that ended after the restart")

    @pytest.mark.parametrize("words", [["--wait"], ["--frames"]], ids=["in step", "free"])
    def test_after_a_lost_session_a_new_one_begins(self, game: list[str | Path], tmp_path: Path, words: list[str]) -> None:
        with gateway(Forgetful) as served, Playing(game, served.url, tmp_path, "--matches", "1000", *words) as playing:
            wait_until(lambda: len(Balancer.ended) >= 2, what="two episodes that ended")
        assert Forgetful.failed
        assert any(re.match(r"warning: (agent: )?500", line) for line in playing.lines), playing.lines[:20]

    @pytest.mark.parametrize("words", [["--wait"], ["--frames"]], ids=["in step", "free"])
    def test_a_server_that_loses_every_session_is_left_in_peace(
        self, game: list[str | Path], tmp_path: Path, words: list[str]
    ) -> None:
        with gateway(Broken) as served, Playing(game, served.url, tmp_path, "--matches", "1000", *words):
            wait_until(lambda: Broken.starts >= 3, what="a third session")
            time.sleep(1.0)
        assert Broken.starts <= 6  # pauses of 0.25 s, 0.5 s, 1 s

    def test_an_end_is_repeated_until_the_server_takes_it(self, game: list[str | Path], tmp_path: Path) -> None:
        with gateway(Occupied) as served, Playing(game, served.url, tmp_path, "--matches", "3", "--wait") as playing:
            playing.finish()
        assert Occupied.refusals == 4
        assert [ticks for ticks, _, _ in Balancer.ended] == playing.lengths()
        assert len(Balancer.ended) == 3


def learns_from_episodes(game: Sequence[str | Path], project: Path, *words: str) -> None:
    """A training gets every frame and reward of the game."""
    space = {"type": "Box", "shape": [4]}
    outside = {"observation_space": space, "action_space": {"type": "Discrete", "n": 2}}

    def start(announce: Announce) -> Result:
        return runner.train(data(3, outside, train_batch_size=256), announce=announce, project=project, trial="run")

    with training(start) as learning, Playing(game, learning.url, project, "--matches", "1000", "--wait", *words) as playing:
        result = learning.result()
    assert result.metrics["timesteps"] >= 768
    assert min(playing.lengths()) <= result.episode_return_mean <= max(playing.lengths())  # a reward of 1 per frame
