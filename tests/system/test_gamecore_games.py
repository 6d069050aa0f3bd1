"""Games that nobody here wrote, started by a real gamecore server, played by actors behind a real gateway."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest

from ludus.errors import WorkerFailed
from ludus.gamecore.server import catalogue
from ludus.gamecore.server.http.app import running
from ludus.gamecore.server.settings import Settings
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings
from ludus.process import identity, procfs
from ludus.protocol.gamecore_client import GamecoreClient, GameState
from tests.local_servers import Served, gateway
from tests.tools import need
from tests.waiting import wait_until

CATALOGUE = Path(__file__).parents[2] / "examples" / "gamecore" / "catalogue.yaml"
LIMIT_S = 60.0
TOKEN = "a-token-of-the-actor"
ENDLESS = {"seconds": 3600}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GamecoreClient]:
    with (
        running(Settings(port=0, games=CATALOGUE, state_dir=tmp_path_factory.mktemp("gamecore"))) as server,
        GamecoreClient(f"{server.host}:{server.port}") as client,
    ):
        yield client


def camp(served: Served) -> dict[str, Any]:
    return {"address": f"127.0.0.1:{served.port}", "token": TOKEN, "timeout_s": 10}


def listening(actor: type[Actor]) -> Any:
    return gateway(actor, GatewaySettings(token=TOKEN))


# -- Doom


class Marksman(Actor):
    """Stands still and fires. What it heard is there afterwards."""

    sessions: ClassVar[list[Marksman]] = []
    ticked: ClassVar[threading.Event] = threading.Event()
    FIRE = 3

    async def start(self, session: str, body: bytes) -> bytes:
        self.session, self.about_game = session, msgpack.unpackb(body)
        self.pictures: set[bytes] = set()
        self.rewards: list[float] = []
        self.last: dict[str, Any] | None = None
        self.sessions.append(self)
        return b""

    async def tick(self, body: bytes) -> bytes:
        told = msgpack.unpackb(body)
        self.pictures.add(told["observation"])
        self.rewards.append(told["reward"])
        if len(self.rewards) == 20:
            self.ticked.set()
        reply: bytes = msgpack.packb({"action": self.FIRE})
        return reply

    async def end(self, body: bytes) -> bytes:
        self.last = msgpack.unpackb(body) if body else {}
        return b""


@pytest.fixture
def marksman() -> Iterator[Served]:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    Marksman.sessions.clear()
    Marksman.ticked.clear()
    with listening(Marksman) as served:
        yield served


def engines(state: GameState) -> list[int]:
    assert state.pid
    return procfs.list_descendants(state.pid)


def instance(engine: int) -> str:
    """What the names of its shared memory end with; empty before it is known."""
    try:
        words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return words[words.index("+viz_instance_id") + 1] if "+viz_instance_id" in words else ""


def until_gone(processes: list[int]) -> None:
    wait_until(lambda: not any(identity.start_time(pid) for pid in processes), LIMIT_S, what=f"the end of {processes}")


def test_a_doom_duel_is_played_by_an_actor_against_the_script(client: GamecoreClient, marksman: Served) -> None:
    client.start_game("duel", [camp(marksman), None], {"mode": "1v1"}, game="doom", seed=1, options={"seconds": 60, "frags": 1})
    state = client.wait_game("duel", LIMIT_S)
    assert (state.state, state.exit_code) == ("finished", 0)
    result = state.result
    assert result["players"] == ["actor", "script"]
    assert max(result["frags"]) == 1 or result["tics"] == 60 * 35
    ahead = result["frags"][0] - result["frags"][1]
    assert result["winner"] == (None if ahead == 0 else int(ahead < 0))
    (heard,) = Marksman.sessions
    assert heard.match == "duel"
    assert heard.about_game == {"game": "doom", "camp": 0, "eval_mode": False}
    assert len(heard.rewards) == result["decisions"][0] > 0
    assert heard.last is not None
    assert heard.last["terminated"] is True
    assert sum(heard.rewards) + heard.last["reward"] == ahead, "the rewards tell the score"
    pictures = [np.frombuffer(picture, np.uint8) for picture in heard.pictures]
    assert {len(picture) for picture in pictures} == {84 * 84}
    assert len(pictures) > 1
    assert all(len(np.unique(picture)) > 8 for picture in pictures), "a picture shows something"


@pytest.mark.long
def test_a_duel_whose_engine_is_killed_is_a_crash_and_is_played_anew(client: GamecoreClient, marksman: Served) -> None:
    client.start_game("killed", [camp(marksman), camp(marksman)], game="doom", options=ENDLESS | {"frags": 1000})
    assert Marksman.ticked.wait(LIMIT_S)
    os.kill(engines(client.state("killed"))[0], signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while len(Marksman.sessions) < 4:
        assert time.monotonic() < deadline, client.state("killed")
        time.sleep(0.05)
    state = client.state("killed")
    assert state.restarts == 1
    assert "engine of camp" in client.logs("killed")
    assert len({session.session for session in Marksman.sessions}) == 4, "the actor is not told to go on with a session of before"
    assert [session.last for session in Marksman.sessions[:2]] == [{}, {}], "those were ended, and nothing is said of how"
    left = engines(state)
    assert (client.stop_game("killed") or state).state == "stopped"
    until_gone(left)


@pytest.mark.long
def test_a_duel_whose_engine_hangs_is_a_crash(client: GamecoreClient, marksman: Served) -> None:
    client.start_game("hangs", [camp(marksman) | {"timeout_s": 1}, None], game="doom", options=ENDLESS)
    assert Marksman.ticked.wait(LIMIT_S)
    left = engines(client.state("hangs"))
    os.kill(left[1], signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while client.state("hangs").restarts == 0:
        assert time.monotonic() < deadline, client.state("hangs")
        time.sleep(0.05)
    until_gone(left)
    assert "did not reach its next tic" in client.logs("hangs")
    client.stop_game("hangs")


@pytest.mark.long
@pytest.mark.parametrize("engines_there", [0, 1, 2])
def test_a_duel_that_is_stopped_while_its_engines_start_leaves_nothing(
    client: GamecoreClient, marksman: Served, engines_there: int
) -> None:
    name = f"early-{engines_there}"
    state = client.start_game(name, [camp(marksman), camp(marksman)], game="doom", options=ENDLESS)
    deadline = time.monotonic() + LIMIT_S
    while len(instances := set(filter(None, map(instance, left := engines(state))))) < engines_there:
        assert time.monotonic() < deadline
    stopped = client.stop_game(name)
    assert stopped is not None
    assert stopped.state == "stopped"
    until_gone(left)
    assert [path for path in Path("/dev/shm").glob("ViZDoom*") if any(path.name.endswith(word) for word in instances)] == []
    assert all(session.last == {} for session in Marksman.sessions)


@pytest.mark.long
def test_a_duel_that_is_stopped_tells_its_actors_and_leaves_no_engine(client: GamecoreClient, marksman: Served) -> None:
    client.start_game("stopped", [camp(marksman), camp(marksman)], game="doom", options=ENDLESS)
    assert Marksman.ticked.wait(LIMIT_S)
    left = engines(client.state("stopped"))
    assert len(left) == 2
    stopped = client.stop_game("stopped")
    assert stopped is not None
    assert stopped.state == "stopped"
    until_gone(left)
    assert [session.last for session in Marksman.sessions] == [{}, {}]


@pytest.mark.long
def test_a_duel_whose_actor_goes_away_is_a_crash_that_names_it(client: GamecoreClient, marksman: Served) -> None:
    with listening(Marksman) as second:
        there = camp(second)
        client.start_game("alone", [camp(marksman), there], game="doom", options=ENDLESS)
        assert Marksman.ticked.wait(LIMIT_S)
    with pytest.raises(WorkerFailed, match=f"actor of camp 1 at http://{there['address']}"):
        client.wait_game("alone", LIMIT_S)
    state = client.state("alone")
    assert (state.state, state.exit_code, state.restarts) == ("crashed", 1, 2)


@pytest.mark.long
def test_duels_side_by_side_do_not_meet(client: GamecoreClient) -> None:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    names = [f"beside-{n}" for n in range(4)]
    for n, name in enumerate(names):
        client.start_game(name, game="doom", seed=n, options={"seconds": 30 + n})
    ended = [client.wait_game(name, LIMIT_S) for name in names]
    assert [state.result["tics"] for state in ended] == [(30 + n) * 35 for n in range(4)]
    assert sum(sum(state.result["frags"]) for state in ended) > 0


# -- Godot


class Balancer(Actor):
    """Keeps the pole upright by a rule, or makes it fall."""

    upright: ClassVar[bool] = True
    ended: ClassVar[list[tuple[str, int, float, int]]] = []

    async def start(self, session: str, body: bytes) -> bytes:
        self.ticks, self.rewards = 0, 0.0
        return b""

    async def tick(self, body: bytes) -> bytes:
        reward, _, x, speed, angle, turning = struct.unpack("<fI4f", body)
        self.ticks, self.rewards = self.ticks + 1, self.rewards + reward
        return struct.pack("<q", int((angle + 0.3 * turning + 0.05 * x + 0.1 * speed > 0) == self.upright))

    async def end(self, body: bytes) -> bytes:
        reward, flags = struct.unpack_from("<fI", body)
        self.ended.append((self.match, self.ticks, self.rewards + reward, flags))
        return b""


class Clumsy(Balancer):
    upright = False


def test_a_godot_game_is_played_by_an_actor(client: GamecoreClient) -> None:
    need("godot3-server")
    Balancer.ended.clear()
    with listening(Balancer) as served:
        client.start_game("cart", [camp(served)], {"mode": "solo"}, options={"matches": 2})
        state = client.wait_game("cart", LIMIT_S)
    assert (state.state, state.game) == ("finished", "godot"), "the only one that plays this mode"
    assert state.result == {"winner": 0, "frames": [500, 500], "player": "actor"}
    assert Balancer.ended == [("cart", 500, 500.0, 2)] * 2
    Balancer.ended.clear()
    with listening(Clumsy) as served:
        client.start_game("cart", [camp(served)], {"mode": "solo"})
        state = client.wait_game("cart", LIMIT_S)
    ((_, ticks, rewards, flags),) = Balancer.ended
    assert state.result == {"winner": None, "frames": [ticks], "player": "actor"}
    assert (rewards, flags) == (ticks, 1)
    assert ticks < 100


def test_a_godot_game_without_an_actor_plays_by_itself_up_to_the_frame_that_was_asked_for(client: GamecoreClient) -> None:
    need("godot3-server")
    with GamecoreClient(client.server, max_frame_num=70) as asking:
        asking.start_game("rule", [None], {"mode": "solo"})
        assert asking.wait_game("rule", LIMIT_S).result == {"winner": 0, "frames": [70], "player": "script"}


def test_a_godot_game_whose_actor_is_not_there_is_a_crash_that_says_so(client: GamecoreClient) -> None:
    need("godot3-server")
    client.start_game("nobody", ["http://127.0.0.1:9"], {"mode": "solo"})
    with pytest.raises(WorkerFailed, match=r"unreachable 127\.0\.0\.1:9"):
        client.wait_game("nobody", LIMIT_S)
    assert client.state("nobody").exit_code == 1


# -- the catalogue


def test_the_example_has_the_arena_as_the_server_itself_brings_it() -> None:
    assert catalogue.read(CATALOGUE).games["arena"] == catalogue.read(None).games["arena"]
