"""A game of 0 A.D. without pictures: its process and its HTTP interface.

    with ZeroADGame(log=None) as game:
        game.start_map(seed=1)
        game.evaluate("1 + 1")
        game.step([(1, {"type": "walk", "entities": [7], "x": 10, "z": 20, "queued": False})])

The interface executes any JavaScript in the simulation, so it listens on loopback only. The game refuses to run as root: then it is started
under the account `nobody`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ludus.envs.player_process import PlayerProcess
from ludus.errors import MissingExtra
from ludus.io.ports import reserve_tcp_port
from ludus.process.temp_dirs import TempDir, short_temp_dir

PROGRAM: Final = "pyrogenesis"
TURN_S: Final = 0.2
"""Game time of one step."""
MAP_SIZE: Final = 1024.0
"""Metres of each side of the empty map."""
_MAP: Final = "scenarios/_default"
_GAMES_PATH: Final = "/usr/games"
_NOBODY: Final = 65534
_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""All variables that the game gets, because other processes of the account `nobody` can read them."""
_START_S, _REQUEST_S = 60.0, 60.0
_POLL_S: Final = 0.05

Command = Mapping[str, Any]
"""A command of a player, as the game's own interface sends it: `{"type": "attack", "entities": [ids], "target": id, …}`."""


def find_program() -> str:
    """The path of the game. Raises MissingExtra."""
    found = shutil.which(PROGRAM, path=os.pathsep.join((os.environ.get("PATH", ""), _GAMES_PATH)))
    if found is None:
        raise MissingExtra(
            f"ludus/ZeroAD needs the game 0 A.D. (the program {PROGRAM}), which is not installed.",
            "On Debian and Ubuntu: apt-get install --no-install-recommends 0ad 0ad-data  (1.4 GB).",
        )
    return found


class ZeroADGame:
    """A running game. `log`: file of its output; None: a temporary file. Raises MissingExtra, EnvironmentFault."""

    def __init__(self, log: Path | None = None) -> None:
        program = find_program()
        with contextlib.ExitStack() as stack:
            home = TempDir(short_temp_dir())
            stack.callback(home.close)
            port, claim = reserve_tcp_port("0ad")
            stack.enter_context(claim)
            arguments = [
                program,
                "-mod=public",
                f"-rl-interface=127.0.0.1:{port}",
                "-autostart-nonvisual",
                f"-autostart={_MAP}",
                "-autostart-disable-replay",
                "-unique-logs",
            ]
            if os.geteuid() == 0:
                os.chown(home.path, _NOBODY, _NOBODY)
                user = f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"
                arguments = ["setpriv", *user, *arguments]
            environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
            environment |= {"HOME": str(home.path), "XDG_RUNTIME_DIR": str(home.path)}
            self._player = stack.enter_context(
                PlayerProcess(arguments, name="0 A.D.", log=log, environment=environment, directory=home.path, grace_s=1.0)
            )
            self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_S)
            stack.callback(self._connection.close)
            self._wait_until_ready()
            self._resources = stack.pop_all()

    def __enter__(self) -> ZeroADGame:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._player.pid

    def start_map(self, seed: int) -> None:
        """Start the empty map anew, with two players and no condition of victory."""
        player = {"Civ": "athen", "AI": "", "Team": -1}
        settings = {
            "PlayerData": [None, {"Name": "blue", **player}, {"Name": "red", **player}],
            "VictoryConditions": ["endless"],
            "CheatsEnabled": True,
            "RevealMap": True,
            "Seed": seed,
            "AISeed": seed,
        }
        scenario = {"settings": settings, "mapType": "scenario", "map": f"maps/{_MAP}", "gameSpeed": 1}
        self._post("/reset?playerID=1", json.dumps(scenario))

    def step(self, commands: Iterable[tuple[int, Command]] = ()) -> None:
        """Let the players command, and simulate one turn. The game drops commands that are not valid."""
        self._post("/step", "\n".join(f"{player};{json.dumps(command)}" for player, command in commands))

    def evaluate(self, code: str) -> Any:
        """The value of JavaScript in the simulation. Raises EnvironmentFault if it is null, which an exception gives, too."""
        value = json.loads(self._post("/evaluate", code))
        if value is None:
            raise self._player.fault(f"0 A.D. returned nothing for the code {code[:200]!r}.", "An exception is in its log.")
        return value

    def close(self) -> None:
        """Repeated calls have no effect."""
        self._resources.close()

    def _post(self, path: str, body: str) -> bytes:
        try:
            self._connection.request("POST", path, body.encode())
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._player.wait(1.0)  # it may just be ending
            raise self._player.fault(
                f"0 A.D. does not answer {path.partition('?')[0]}: {error or type(error).__name__}."
            ) from error
        if response.status != http.HTTPStatus.OK:
            raise self._player.fault(f"0 A.D. answered {path.partition('?')[0]} with the status {response.status}.")
        return content

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            self._player.check()
            try:
                self._connection.connect()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise self._player.fault(f"0 A.D. did not listen within {_START_S:.0f} s.") from error
                time.sleep(_POLL_S)
            else:
                return
