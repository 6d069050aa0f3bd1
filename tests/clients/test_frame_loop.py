"""The C++ agent for frames that do not wait: its example on a loop of frames, under the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.frames import FrameLoopContract, learns_from_episodes
from tests.clients.test_cpp import CLIENT, SANITIZED, compiled


@pytest.mark.parametrize("options", ["-std=c++11 -fno-exceptions -fno-rtti", "-std=c++20"])
def test_it_compiles_in_every_dialect_without_a_warning(options: str) -> None:
    compiled(CLIENT / "ludus_agent.hpp", "-fsyntax-only", "-x", "c++", *options.split())


class TestFrameLoop(FrameLoopContract):
    @pytest.fixture(scope="class")
    @classmethod
    def game(cls, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
        made = tmp_path_factory.mktemp("frames") / "frame_loop"
        compiled(CLIENT / "example" / "frame_loop.cpp", "-std=c++11", *SANITIZED, "-pthread", "-o", made)
        return [made]

    def test_a_training_learns_from_its_episodes(self, game: list[str | Path], tmp_path: Path) -> None:
        learns_from_episodes(game, tmp_path)


def test_a_closed_agent_does_not_wait_for_anything(tmp_path: Path) -> None:
    source = """#include <ludus_agent.hpp>
    int main() {
        ludus::AgentLoop loop(ludus::Options("127.0.0.1", 9));
        if (!loop.close(5000)) return 1;
        loop.update(0);
        loop.wait(0);
        return loop.ready();
    }"""
    (tmp_path / "closed.cpp").write_text(source)
    compiled(tmp_path / "closed.cpp", "-std=c++11", "-pthread", "-o", tmp_path / "closed")
    subprocess.run([tmp_path / "closed"], check=True, timeout=20)


def test_the_threads_of_an_agent_share_nothing_unguarded(tmp_path: Path) -> None:
    made = tmp_path / "frame_loop"
    compiled(CLIENT / "example" / "frame_loop.cpp", "-std=c++11", "-g", "-fsanitize=thread", "-pthread", "-o", made)
    learns_from_episodes([made], tmp_path / "runs")
