"""The GDScript clients in their engines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.contract import (
    Contract,
    CornerContract,
    EssentialContract,
    HostileContract,
    can_be_won_and_lost,
    environment,
    makes_no_mistakes,
)
from tests.clients.driving import CLIENTS, DRIVERS, Driver, driver
from tests.tools import need

GDSCRIPT = CLIENTS / "gdscript"


@pytest.fixture(scope="module")
def godot3(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = project(tmp_path_factory.mktemp("godot3"), GDSCRIPT / "ludus.gd", DRIVERS / "driver.gd", 4)
    return [need("godot3-server"), "--path", made, "-s", "driver.gd"]


@pytest.fixture(scope="module")
def godot4(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = project(tmp_path_factory.mktemp("godot4"), GDSCRIPT / "godot4" / "ludus.gd", DRIVERS / "driver4.gd", 5)
    return [need("godot4"), "--headless", "--path", made, "-s", "driver.gd"]


def project(directory: Path, client: Path, script: Path, version: int) -> Path:
    shutil.copy(client, directory / "ludus.gd")
    shutil.copy(script, directory / "driver.gd")
    (directory / "project.godot").write_text(f'config_version={version}\n[application]\nconfig/name="driver"\n')
    return directory


class TestGodot3(Contract, HostileContract, CornerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot3: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot3, environment(tmp_path_factory.mktemp("home")), by_port=True) as driven:
            yield driven


class TestGodot3FrameByFrame(EssentialContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot3: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot3, environment(tmp_path_factory.mktemp("home")), "async=1", by_port=True) as driven:
            yield driven


class TestGodot4(Contract, HostileContract, CornerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot4: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot4, environment(tmp_path_factory.mktemp("home")), by_port=True) as driven:
            yield driven


class TestGodot4FrameByFrame(EssentialContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot4: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot4, environment(tmp_path_factory.mktemp("home")), "async=1", by_port=True) as driven:
            yield driven


_NAMES = {
    "PoolByteArray": "PackedByteArray",
    "extends Reference": "extends RefCounted",
    "StreamPeerSSL": "StreamPeerTLS",
    "OS.get_ticks_usec": "Time.get_ticks_usec",
    ".find_last(": ".rfind(",
    ".to_utf8()": ".to_utf8_buffer()",
    ".to_ascii()": ".to_ascii_buffer()",
    ".empty()": ".is_empty()",
    ".ord_at(": ".unicode_at(",
}
"""Renames of Godot 4."""
_LINES = {
    "# Ludus client for Godot 3 games": "# Ludus client for Godot 4 games",
    "For Godot 4 use godot4/ludus.gd.": "For Godot 3 use ../ludus.gd.",
    "\t_stream.blocking_handshake = false\n": "",
    "connect_to_stream(_tcp, true, _host, certificate)": "connect_to_stream(_tcp, _host, TLSOptions.client(certificate))",
    "\t_tcp.get_status()  # also polls the socket\n": "\t_tcp.poll()\n",
    "_request.subarray(_sent, _request.size() - 1)": "_request.slice(_sent)",
    "_buffer.subarray(0, int(min(_buffer.size(), MAX_HEAD)) - 1)": "_buffer.slice(0, MAX_HEAD)",
    "_buffer.subarray(count, _buffer.size() - 1)": "_buffer.slice(count)",
    "_buffer.subarray(end + 2, end + 1 + size)": "_buffer.slice(end + 2, end + 2 + size)",
    "\tvar parsed = JSON.parse(text)\n": "\tvar parser = JSON.new()  # unlike JSON.parse_string it logs no errors\n",
    "parsed.error != OK or not parsed.result is": "parser.parse(text) != OK or not parser.data is",
    "var said = parsed.result": "var said = parser.data",
}
"""Changed behaviour of Godot 4."""


def test_the_two_files_are_the_same_but_for_the_engine() -> None:
    """The two clients differ only by these replacements."""
    made, theirs = ((GDSCRIPT / name).read_text(encoding="utf-8") for name in ("ludus.gd", "godot4/ludus.gd"))
    for three, four in (_LINES | _NAMES).items():
        assert three in made, f"nobody needs {three!r} any more"
        made = made.replace(three, four)
    assert made.splitlines() == theirs.splitlines()


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = tmp_path_factory.mktemp("cartpole") / "game"
    shutil.copytree(GDSCRIPT / "example", made)  # an engine may write into its project
    return [need("godot3-server"), "--path", made, "--fixed-fps", "60", "--url={url}", "--matches=3"]


def test_the_example_is_a_game_that_can_be_won_and_lost(game: list[str | Path], tmp_path: Path) -> None:
    can_be_won_and_lost(*game, home=tmp_path)


def test_the_example_makes_no_mistakes(game: list[str | Path], tmp_path: Path) -> None:
    makes_no_mistakes(*game, home=tmp_path)
