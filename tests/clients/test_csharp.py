"""The compiled C# client on every installed runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
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

CLIENT = CLIENTS / "csharp" / "Ludus.cs"
_LIMIT_S = 120.0


def compiled(target: Path, *sources: Path) -> Path:
    """Compile in Unity's C# dialect without warnings."""
    command = [need("mcs"), "-langversion:7.2", "-warnaserror", "-debug-", f"-out:{target}", *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mono")
    return compiled(tmp_path_factory.mktemp("csharp") / "driver.exe", CLIENT, DRIVERS / "Driver.cs")


class TestBlocking(Contract, HostileContract, CornerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, program: Path) -> Iterator[Driver]:
        with driver([need("mono"), program], environment(program.parent)) as driven:
            yield driven


class TestTasks(EssentialContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, program: Path) -> Iterator[Driver]:
        with driver([need("mono"), program], environment(program.parent), "async=1") as driven:
            yield driven


if shutil.which("dotnet") is not None:  # Debian has no package of it, and dozens of skipped tests would tell nothing more

    class TestDotnet(Contract, HostileContract, CornerContract):
        """The same program on the other runtime."""

        has_tls = False  # .NET Core 3.1 knows no OpenSSL 3 and aborts

        @pytest.fixture(scope="class")
        @classmethod
        def driver(cls, program: Path) -> Iterator[Driver]:
            config = program.with_suffix(".runtimeconfig.json")
            framework = {"name": "Microsoft.NETCore.App", "version": "3.1.0"}
            settings = {"System.Globalization.Invariant": True}
            options = {"framework": framework, "rollForward": "LatestMajor", "configProperties": settings}
            config.write_text(json.dumps({"runtimeOptions": options}))
            with driver([need("dotnet"), "exec", "--runtimeconfig", config, program], environment(program.parent)) as driven:
                yield driven


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    example = CLIENTS / "csharp" / "example" / "CartPole.cs"
    made = compiled(tmp_path_factory.mktemp("cartpole") / "cartpole.exe", CLIENT, example)
    return [need("mono"), made, "--url", "{url}", "--matches", "3"]


def test_the_example_is_a_game_that_can_be_won_and_lost(game: list[str | Path], tmp_path: Path) -> None:
    can_be_won_and_lost(*game, home=tmp_path)


def test_the_example_makes_no_mistakes(game: list[str | Path], tmp_path: Path) -> None:
    makes_no_mistakes(*game, home=tmp_path)
