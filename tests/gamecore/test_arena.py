"""The Arena of the built-in catalogue: saved states, recordings, evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.gamecore.server import catalogue
from ludus.gamecore.server.http.app import Settings, running
from ludus.protocol.gamecore_client import GamecoreClient, GameState

pytest.importorskip("numba")

from ludus.games.arena.engine.recording import read_recording, verify

pytestmark = pytest.mark.system

FRAMES, LIMIT_S = 300, 120.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arena")


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[GamecoreClient]:
    """The built-in entry, but every match saves a state."""
    ours: dict[str, Any] = yaml.safe_load(catalogue.BUILTIN.read_text())
    ours["games"]["arena"]["states"]["save"] = True
    (home / "games.yaml").write_text(yaml.safe_dump(ours))
    with (
        running(Settings(port=0, games=home / "games.yaml", state_dir=home / "state")) as server,
        GamecoreClient(f"{server.host}:{server.port}", max_frame_num=FRAMES) as client,
    ):
        yield client


def play(client: GamecoreClient, name: str, lineup: Any = ((107,), (190,)), **more: Any) -> GameState:
    client.start_game(name, [None, None], [list(camp) for camp in lineup], **more)
    return client.wait_game(name, LIMIT_S)


def test_matches_start_from_saved_states_but_not_in_another_mode_or_an_evaluation(client: GamecoreClient, home: Path) -> None:
    assert play(client, "judged", eval_mode=True).state == "finished"
    assert not list((home / "state" / "states").glob("arena/*/*")), "evaluations save none"
    first = play(client, "first", start_from="any", seed=4)
    assert first.start_from is None
    (kept,) = (home / "state" / "states").glob("arena/*/*")
    assert kept.parent.name == "1v1"
    again = play(client, "again", start_from="any", seed=4)
    assert (again.start_from, again.result["hash"]) == (kept.name, first.result["hash"]), "the same match, from there on"
    team = play(client, "team", ((190, 173, 117), (141, 111, 107)), start_from="any")
    assert (team.state, team.start_from) == ("finished", None)
    with GamecoreClient(client.server, simulator_type="repeat", max_frame_num=FRAMES) as repeating:
        assert play(repeating, "repeated").start_from is not None
        assert play(repeating, "judged", eval_mode=True).start_from is None


def test_a_match_is_recorded_if_requested(client: GamecoreClient, home: Path) -> None:
    played = play(client, "filmed", seed=11, options={"record": True, "rule": "hard"})
    recording = read_recording(home / "state" / "games" / "filmed" / played.result["recording"])
    assert verify(recording) == played.result["hash"]
    assert recording.names == ("hard", "hard")
    assert "recording" not in play(client, "unseen", seed=11).result
