"""Which version a new session gets."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import Refused
from ludus.protocol.spec import StartOptions
from ludus.serving.routing_table import FILE, AgentRoutes, RoutingTable, session_fraction

SESSIONS = [f"match-{number}" for number in range(4000)]
PATHS = {120: "a", 121: "b", 122: "c"}
ONE = AgentRoutes(121, PATHS, levels=(120,), canary=122, percent=25.0)
ANY = StartOptions()


def test_sessions_without_options_get_the_current_version_of_the_first_agent() -> None:
    both = RoutingTable({"hard": AgentRoutes(7, {7: "x"}), "easy": AgentRoutes(3, {3: "y"})})
    assert both.choose("s", ANY) == ("hard", 7)
    assert both.choose("s", StartOptions(model="easy")) == ("easy", 3)


def test_a_canary_gets_its_share_and_the_same_sessions_again() -> None:
    got = [ONE.choose(session, -1) for session in SESSIONS]
    assert set(got) == {121, 122}
    assert 0.22 < got.count(122) / len(got) < 0.28
    assert got == [ONE.choose(session, -1) for session in SESSIONS]
    whole = AgentRoutes(121, PATHS, canary=122, percent=100.0)
    assert {whole.choose(session, -1) for session in SESSIONS} == {122}
    none = AgentRoutes(121, PATHS, canary=122, percent=0.0)
    assert {none.choose(session, -1) for session in SESSIONS} == {121}


def test_sessions_of_a_small_canary_share_stay_in_a_larger_one() -> None:
    small = AgentRoutes(121, PATHS, canary=122, percent=5.0)
    assert {s for s in SESSIONS if small.choose(s, -1) == 122} < {s for s in SESSIONS if ONE.choose(s, -1) == 122}


def test_fractions_of_different_purposes_are_independent() -> None:
    both = [(session_fraction(s, "canary") < 0.5, session_fraction(s, "record") < 0.5) for s in SESSIONS]
    for pair in ((False, False), (False, True), (True, False), (True, True)):
        assert 0.2 < both.count(pair) / len(both) < 0.3
    assert all(0 <= session_fraction(s, "canary") < 1 for s in SESSIONS)


@pytest.mark.parametrize("asked", [120, 121, 122])
def test_a_session_may_request_any_offered_version(asked: int) -> None:
    assert {ONE.choose(session, asked) for session in SESSIONS[:50]} == {asked}


@pytest.mark.parametrize("asked", [0, 119, 123, 1 << 62])
def test_an_unknown_version_gets_404_with_the_available_ones(asked: int) -> None:
    with pytest.raises(Refused) as refused:
        ONE.choose("s", asked)
    assert (refused.value.status, refused.value.error) == (404, "version")
    assert "120, 121, 122" in refused.value.hint


def test_an_unknown_model_gets_404_with_the_nearest_name() -> None:
    with pytest.raises(Refused) as refused:
        RoutingTable({"easy": ONE, "hard": ONE}).choose("s", StartOptions(model="eassy"))
    assert (refused.value.status, refused.value.error) == (404, "model")
    assert "easy" in refused.value.hint
    with pytest.raises(Refused) as refused:
        RoutingTable({"easy": ONE}).choose("s", StartOptions(model="x" * 256))
    assert len(refused.value.message) < 150


NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.integers(0, 1 << 40)
AGENTS = st.builds(
    AgentRoutes,
    current=NUMBERS,
    releases=st.dictionaries(NUMBERS, st.text(max_size=9), max_size=4),
    levels=st.lists(NUMBERS, max_size=3).map(tuple),
    canary=st.none() | NUMBERS,
    percent=st.floats(0, 100),
    withdrawn=st.lists(NUMBERS, max_size=3).map(tuple),
)


@given(st.dictionaries(NAMES, AGENTS, max_size=3))
def test_a_routing_table_round_trips(tmp_path_factory: pytest.TempPathFactory, agents: dict[str, AgentRoutes]) -> None:
    where = tmp_path_factory.getbasetemp()
    RoutingTable(agents).write(where)
    found = RoutingTable.read(where)
    assert found == RoutingTable(agents)
    assert list(found.agents) == list(agents), "the first one is who plays when nobody is named"


def test_a_concurrent_reader_sees_the_old_or_the_new_table(tmp_path: Path) -> None:
    lineups = [RoutingTable({"default": AgentRoutes(n, {n: "x" * 50_000 * n})}) for n in (1, 2)]
    lineups[0].write(tmp_path)
    done, seen = threading.Event(), set()
    wrong: list[int | Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                found = RoutingTable.read(tmp_path).agents["default"]
                seen.add(found.current)
                if len(found.releases[found.current]) != 50_000 * found.current:
                    wrong.append(found.current)
            except (OSError, ValueError) as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        lineups[number % 2].write(tmp_path)
    done.set()
    reader.join(20)
    assert not wrong
    assert seen == {1, 2}
    assert os.listdir(tmp_path) == [FILE]
    assert json.loads((tmp_path / FILE).read_text())["default"]["current"] == 2
