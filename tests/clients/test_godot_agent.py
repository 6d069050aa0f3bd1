"""The node LudusAgent and its example, the lander, in Godot 3 and Godot 4."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings
from tests.clients.contract import environment
from tests.clients.driving import CLIENTS
from tests.local_servers import gateway
from tests.tools import need

GDSCRIPT = CLIENTS / "gdscript"
SPEC: dict[str, Any] = {
    "observation_space": {"type": "Box", "shape": [6], "dtype": "float32", "low": "-inf", "high": "inf"},
    "action_space": {"type": "Discrete", "n": 4, "start": 0},
}
NOTHING, MAIN_ENGINE, TURN_LEFT, TURN_RIGHT = range(4)
_EPISODE = re.compile(r"^episode \d+: return (-?[\d.]+), (\d+) decisions, (.*)$", re.MULTILINE)


class Pilot(Actor):
    """Lands by the rule that the example compares itself with, and records each session."""

    ended: ClassVar[list[tuple[float, int, int]]] = []
    """Return, ticks and the last flags of every session that ended."""
    idle = False

    async def start(self, session: str, body: bytes) -> bytes:
        self.total, self.ticks = 0.0, 0
        return b""

    async def tick(self, body: bytes) -> bytes:
        reward, flags, x, height, across, down, angle, turning = struct.unpack("<fI6f", body)
        assert flags == 0
        self.total, self.ticks = self.total + reward, self.ticks + 1
        return struct.pack(
            "<q", NOTHING if self.idle else self.rule(x * 150, height * 150, across * 50, down * 50, angle / 2, turning)
        )

    def rule(self, x: float, height: float, across: float, down: float, angle: float, turning: float) -> int:
        wanted = max(-0.4, min(0.4, -0.003 * x - 0.012 * across))
        error = wanted - angle - 0.5 * turning
        if abs(error) > 0.12:
            return TURN_RIGHT if error > 0 else TURN_LEFT
        return MAIN_ENGINE if down > max(12.0, min(90.0, 0.4 * height)) else NOTHING

    async def end(self, body: bytes) -> bytes:
        reward, flags = struct.unpack_from("<fI", body)
        self.ended.append((self.total + reward, self.ticks, flags))
        return b""


class Stone(Pilot):
    idle = True


class Broken(Pilot):
    """Loses every session in its first tick."""

    starts: ClassVar[int] = 0

    async def start(self, session: str, body: bytes) -> bytes:
        Broken.starts += 1
        return await super().start(session, body)

    async def tick(self, body: bytes) -> bytes:
        raise RuntimeError("out of order")


class Occupied(Pilot):
    """Refuses an end for now, more often than a client repeats it by itself."""

    starts: ClassVar[int] = 0
    refusals: ClassVar[int] = 0

    async def start(self, session: str, body: bytes) -> bytes:
        Occupied.starts += 1
        return await super().start(session, body)

    async def end(self, body: bytes) -> bytes:
        if Occupied.refusals < 4:
            Occupied.refusals += 1
            raise Refused(503, "worker_busy", "Not now.", "Wait.")
        return await super().end(body)


@pytest.fixture(scope="module", params=["godot3-server", "godot4"])
def lander(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The command of the example, in a copy: an engine may write into its project."""
    made = tmp_path_factory.mktemp("lander") / "lander"
    if request.param == "godot4":
        shutil.copytree(GDSCRIPT / "godot4" / "lander", made)
        return [need("godot4"), "--headless", "--path", made, "--fixed-fps", "60"]
    shutil.copytree(GDSCRIPT / "lander", made)
    return [need("godot3-server"), "--path", made, "--fixed-fps", "60"]


def run(command: list[str | Path], home: Path, *words: str) -> list[tuple[float, int, str]]:
    """Return, decisions and outcome of every episode that the game prints."""
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, env=environment(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SCRIPT ERROR" not in done.stderr, done.stderr
    return [(float(total), int(decisions), outcome) for total, decisions, outcome in _EPISODE.findall(done.stdout)]


def reports(command: list[str | Path], url: str, home: Path, text: str) -> bool:
    """Whether the game prints an error with the text within 30 seconds."""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": environment(home)}
    with subprocess.Popen([*command, f"--url={url}"], text=True, **pipes) as process:
        limit = threading.Timer(30, process.kill)
        limit.start()
        try:
            return any(text in line for line in process.stderr or ())
        finally:
            limit.cancel()
            process.kill()


def play(
    actor: type[Pilot], command: list[str | Path], home: Path, *words: str
) -> tuple[list[tuple[float, int, str]], list[tuple[float, int, int]]]:
    Pilot.ended.clear()
    with gateway(actor, GatewaySettings(spec=SPEC)) as served:
        told = run(command, home, f"--url={served.url}", "--episodes=3", "--seed=3", *words)
    return told, list(Pilot.ended)


def test_the_lander_lands_by_the_actions_of_the_server(lander: list[str | Path], tmp_path: Path) -> None:
    told, ended = play(Pilot, lander, tmp_path)
    assert [outcome for _, _, outcome in told] == ["landed"] * 3
    assert [flags for _, _, flags in ended] == [1] * 3
    for (shown, decisions, _), (total, ticks, _) in zip(told, ended, strict=True):
        assert decisions == ticks
        assert abs(shown - total) < 0.01
        assert total > 5


def test_it_crashes_without_them(lander: list[str | Path], tmp_path: Path) -> None:
    told, ended = play(Stone, lander, tmp_path)
    assert [outcome for _, _, outcome in told] == ["crashed"] * 3
    assert all(total < -5 for total, _, _ in ended)


def test_without_waiting_every_reward_arrives(lander: list[str | Path], tmp_path: Path) -> None:
    """Frames do not wait for the server: an action is set some frames after its observation."""
    told, ended = play(Pilot, lander, tmp_path, "--async")
    assert len(told) == len(ended) == 3
    for (shown, _, _), (total, ticks, flags) in zip(told, ended, strict=True):
        assert abs(shown - total) < 0.01
        assert ticks >= 1
        assert flags in (1, 2)


def test_both_engines_play_the_same_rule(lander: list[str | Path], tmp_path: Path) -> None:
    told = run(lander, tmp_path, "--player=script", "--episodes=10", "--seed=1")
    assert [outcome for _, _, outcome in told] == ["landed"] * 10
    assert all(7 < total < 10 for total, _, _ in told)  # measured in both: 7.9 to 8.9
    told = run(lander, tmp_path, "--player=random", "--episodes=10", "--seed=1")
    assert all(total < -5 for total, _, _ in told)


def test_an_observation_of_another_size_is_named(lander: list[str | Path], tmp_path: Path) -> None:
    wider = {**SPEC, "observation_space": {**SPEC["observation_space"], "shape": [7]}}
    with gateway(Pilot, GatewaySettings(spec=wider)) as served:
        assert reports(lander, served.url, tmp_path, "has 6 numbers, the server expects 7")


def test_a_server_that_loses_every_session_is_reported_and_left_in_peace(lander: list[str | Path], tmp_path: Path) -> None:
    Broken.starts = 0
    with gateway(Broken, GatewaySettings(spec=SPEC)) as served:
        assert reports(lander, served.url, tmp_path, "lost ")
        assert Broken.starts == 2


def test_an_end_is_repeated_until_the_server_takes_it(lander: list[str | Path], tmp_path: Path) -> None:
    Occupied.starts = Occupied.refusals = 0
    told, ended = play(Occupied, lander, tmp_path)
    assert Occupied.refusals == 4
    assert [decisions for _, decisions, _ in told] == [ticks for _, ticks, _ in ended]
    assert len(ended) == Occupied.starts == 3


def test_the_editor_of_godot_4_knows_the_node(tmp_path: Path) -> None:
    made = tmp_path / "lander"
    shutil.copytree(GDSCRIPT / "godot4" / "lander", made)
    command = [need("godot4"), "--headless", "--editor", "--quit", "--path", str(made)]
    subprocess.run(command, capture_output=True, timeout=120, env=environment(tmp_path))
    assert '&"LudusAgent"' in (made / ".godot" / "global_script_class_cache.cfg").read_text()


_NAMES = {
    "for Godot 3": "for Godot 4",
    "export(int, 1, 1000) var": "@export_range(1, 1000) var",
    'export(String, "error", "repeat") var': '@export_enum("error", "repeat") var',
    "\nexport var": "\n@export var",
    "onready var": "@onready var",
    "OS.get_ticks_msec()": "Time.get_ticks_msec()",
    "PoolByteArray": "PackedByteArray",
    ".empty()": ".is_empty()",
    "var parsed = JSON.parse(_client.reply.get_string_from_utf8())\n\tvar spec = parsed.result": (
        "var spec = JSON.parse_string(_client.reply.get_string_from_utf8())"
    ),
    'agent.connect("episode_ended", self, "_on_episode_ended")': 'agent.connect("episode_ended", _on_episode_ended)',
    "shape.shape.extents = Vector2(2 * WIDTH, 50)": "shape.shape.size = Vector2(4 * WIDTH, 100)",
    "shape.shape.extents = SIZE / 2": "shape.shape.size = SIZE",
    "body.contacts_reported": "body.max_contacts_reported",
    "\tupdate()\n": "\tqueue_redraw()\n",
    "Color.gray": "Color.GRAY",
    "Color.yellow": "Color.YELLOW",
    "Color.lightblue": "Color.LIGHT_BLUE",
    "Color.orange": "Color.ORANGE",
    "godot3-server": "godot --headless",
    "godot3 ": "godot ",
    "clients/gdscript/lander": "clients/gdscript/godot4/lander",
}
"""Names of Godot 3 and of Godot 4."""


@pytest.mark.parametrize("name", ["addons/ludus/ludus_agent.gd", "lander/lander.gd"])
def test_the_files_are_the_same_but_for_the_engine(name: str) -> None:
    made = (GDSCRIPT / name).read_text(encoding="utf-8")
    for three, four in _NAMES.items():
        made = made.replace(three, four)
    assert made == (GDSCRIPT / "godot4" / name).read_text(encoding="utf-8")
