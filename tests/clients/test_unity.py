"""The Unity package: compiled against stubs of the engine, and played by a console that calls its messages as the engine does."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from ludus.gateway.actor import Actor
from tests.clients.contract import environment
from tests.clients.driving import CLIENTS
from tests.clients.frames import FrameLoopContract, learns_from_episodes
from tests.clients.test_csharp import compiled
from tests.local_servers import gateway
from tests.tools import need

PACKAGE = CLIENTS / "unity"
STUBS = Path(__file__).parent / "unity"
SAMPLE = PACKAGE / "Samples~" / "CartPole" / "CartPoleAgent.cs"
_LIMIT_S = 60.0


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


class Hesitant(Actor):
    """Answers its tick long after the deadline."""

    ended_by_game: ClassVar[threading.Event] = threading.Event()

    async def start(self, session: str, body: bytes) -> bytes:
        return b""

    async def tick(self, body: bytes) -> bytes:
        await asyncio.sleep(1.0)
        return b""

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            self.ended_by_game.set()
        return b""


def test_closing_ends_the_session_though_the_pending_tick_misses_its_deadline(tmp_path: Path) -> None:
    source = """using Ludus;
    static class Program {
        static int Main(string[] arguments) {
            var client = new LudusClient(arguments[0], new LudusOptions { DeadlineMs = 100 });
            var loop = new AgentLoop(client, () => new LudusStart());
            loop.Update(0);
            loop.Wait(0);
            loop.Decide(new byte[8]);
            return loop.Close().Wait(20000) ? 0 : 1;
        }
    }"""
    (tmp_path / "Program.cs").write_text(source)
    sources = [PACKAGE / "Runtime" / name for name in ("AgentLoop.cs", "Ludus.cs")]
    made = compiled(tmp_path / "closing.exe", *sources, tmp_path / "Program.cs")
    Hesitant.ended_by_game.clear()
    with gateway(Hesitant) as served:
        subprocess.run([need("mono"), made, served.url], check=True, timeout=_LIMIT_S, env=environment(tmp_path))
        assert Hesitant.ended_by_game.is_set()


class TestAgent(FrameLoopContract):
    @pytest.fixture(scope="class")
    @classmethod
    def game(cls, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
        made = tmp_path_factory.mktemp("unity") / "game.exe"
        mono = need("mono")
        compiled(made, *sorted((PACKAGE / "Runtime").glob("*.cs")), SAMPLE, *sorted(STUBS.glob("*.cs")))
        return [mono, made]

    def test_a_training_learns_from_the_episodes_of_two_agents(self, game: list[str | Path], tmp_path: Path) -> None:
        learns_from_episodes(game, tmp_path, "--agents", "2")
