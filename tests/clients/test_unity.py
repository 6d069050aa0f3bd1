"""The Unity package: compiled against stubs of the engine, and played by a console that calls its messages as the engine does."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import struct
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import pytest

from ludus.experiments import runner
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from tests.clients.contract import Balancer, can_be_won_and_lost, environment, makes_no_mistakes
from tests.clients.driving import CLIENTS
from tests.clients.test_csharp import compiled
from tests.experiments.called import data, training
from tests.local_servers import gateway
from tests.tools import need
from tests.waiting import wait_until

PACKAGE = CLIENTS / "unity"
STUBS = Path(__file__).parent / "unity"
SAMPLE = PACKAGE / "Samples~" / "CartPole" / "CartPoleAgent.cs"
_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = tmp_path_factory.mktemp("unity") / "game.exe"
    mono = need("mono")
    compiled(made, *sorted((PACKAGE / "Runtime").glob("*.cs")), SAMPLE, *sorted(STUBS.glob("*.cs")))
    return [mono, made, "--url", "{url}", "--matches"]


class Playing:
    """A game in a process, with the lines that it prints."""

    def __init__(self, command: list[str | Path], url: str, home: Path, *words: str) -> None:
        filled = [str(word).format(url=url) for word in (*command, *words)]
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
        self.process.wait(_LIMIT_S)
        self._reading.join(_LIMIT_S)

    def _read(self) -> None:
        with cast(IO[str], self.process.stdout) as output:
            for line in output:
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: sum(bool(re.match(pattern, line)) for line in self.lines) >= times, _LIMIT_S)
        assert found, self.lines[-20:]

    def frames(self) -> int:
        return sum(line.startswith("frame ") for line in self.lines)

    def finish(self) -> list[str]:
        assert self.process.wait(_LIMIT_S) == 0, self.lines[-20:]
        self._reading.join(_LIMIT_S)
        assert not [line for line in self.lines if "Exception" in line]
        return self.lines


# -- the package


def test_every_file_of_the_package_has_an_id_of_its_own() -> None:
    """Unity ignores files without a .meta file in an installed package."""
    files = [path for path in PACKAGE.rglob("*") if not any(part.endswith("~") for part in path.relative_to(PACKAGE).parts)]
    assets = {path for path in files if path.suffix != ".meta" and path.name != "Makefile"}
    assert {Path(f"{path}.meta") for path in assets} == {path for path in files if path.suffix == ".meta"}
    ids = [re.search(r"^guid: ([0-9a-f]{32})$", Path(f"{path}.meta").read_text(), re.MULTILINE) for path in assets]
    assert len({found[1] for found in ids if found}) == len(assets)


def test_the_tarball_is_complete(tmp_path: Path) -> None:
    shutil.copytree(CLIENTS, tmp_path / "clients", symlinks=True)
    subprocess.run([need("make"), "-C", tmp_path / "clients" / "unity"], check=True, capture_output=True, timeout=_LIMIT_S)
    about = json.loads((PACKAGE / "package.json").read_text())
    with tarfile.open(tmp_path / "clients" / "unity" / f"{about['name']}-{about['version']}.tgz") as archive:
        assert {Path(name).parts[0] for name in archive.getnames()} == {"package"}
        assert all(member.isfile() or member.isdir() for member in archive)
        client = archive.extractfile("package/Runtime/Ludus.cs")
        assert client is not None
        assert client.read() == (CLIENTS / "csharp" / "Ludus.cs").read_bytes()
        for sample in about["samples"]:
            assert archive.getmember(f"package/{sample['path']}/CartPoleAgent.cs").isfile()


# -- in step with the server


def test_a_game_in_step_can_be_won_and_lost(game: list[str | Path], tmp_path: Path) -> None:
    can_be_won_and_lost(*game, "3", "--wait", home=tmp_path)


@pytest.mark.parametrize("words", [["--wait"], []], ids=["in step", "free"])
def test_it_makes_no_mistakes(game: list[str | Path], tmp_path: Path, words: list[str]) -> None:
    makes_no_mistakes(*game, "3", *words, home=tmp_path)


def test_between_decisions_the_last_action_stays_in_force(game: list[str | Path], tmp_path: Path) -> None:
    Balancer.ended.clear()
    with gateway(Balancer) as served, Playing(game, served.url, tmp_path, "2", "--wait", "--period", "3") as playing:
        lengths = [int(found[1]) for line in playing.finish() if (found := re.match(r"match \d+: (\d+) frames", line))]
    assert len(lengths) == 2
    assert Balancer.ended == [(math.ceil(n / 3), float(n), 2 if n == 500 else 1) for n in lengths]


def test_a_training_learns_from_its_episodes(game: list[str | Path], tmp_path: Path) -> None:
    space = {"type": "Box", "shape": [4]}
    outside = {"observation_space": space, "action_space": {"type": "Discrete", "n": 2}}

    def start(announce: Announce) -> Result:
        return runner.train(data(3, outside, train_batch_size=256), announce=announce, project=tmp_path, trial="run")

    with training(start) as learning, Playing(game, learning.url, tmp_path, "1000", "--wait", "--agents", "2") as playing:
        result = learning.result()
        lengths = [int(found[1]) for line in playing.lines if (found := re.match(r"match \d+: (\d+) frames", line))]
    assert result.metrics["timesteps"] >= 768
    assert min(lengths) <= result.episode_return_mean <= max(lengths)  # a reward of 1 per frame


# -- frames that do not wait


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


def test_frames_go_on_while_the_server_thinks(game: list[str | Path], tmp_path: Path) -> None:
    Patient.allowed.clear()
    Patient.asked.clear()
    Balancer.ended.clear()
    with gateway(Patient) as served, Playing(game, served.url, tmp_path, "1000", "--frames") as playing:
        assert Patient.asked.wait(_LIMIT_S)
        before = playing.frames()
        playing.wait_for("frame ", times=before + 50)
        assert not Balancer.ended, "the third tick is still open"
        Patient.allowed.set()
        wait_until(lambda: Balancer.ended, what="an episode that ended")


def test_the_game_goes_on_when_the_server_is_started_again(game: list[str | Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        playing = stack.enter_context(Playing(game, f"http://127.0.0.1:{port}", tmp_path, "3", "--frames"))
        playing.wait_for("warning: agent: .*listens")  # no server yet
        with gateway(Balancer, port=port):
            playing.wait_for("agent: connected")
            playing.wait_for("match 1: ")
        playing.wait_for("warning: agent: ", times=2)
        stack.enter_context(gateway(Balancer, port=port))
        playing.wait_for("agent: connected", times=2)
        assert sum(line.startswith("match ") for line in playing.finish()) >= 3


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


@pytest.mark.parametrize("words", [["--wait"], ["--frames"]], ids=["in step", "free"])
def test_after_a_lost_session_a_new_one_begins(game: list[str | Path], tmp_path: Path, words: list[str]) -> None:
    Forgetful.failed = False
    Balancer.ended.clear()
    with gateway(Forgetful) as served, Playing(game, served.url, tmp_path, "2", *words) as playing:
        lines = playing.finish()
    assert Forgetful.failed
    assert any(line.startswith("warning: agent: 500") for line in lines), lines[:20]
    assert len(Balancer.ended) == 2


@pytest.fixture(autouse=True)
def _let_actors_go() -> Iterator[None]:
    yield
    Patient.allowed.set()
