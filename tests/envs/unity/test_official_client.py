"""The player of these tests, as `mlagents-envs` sees it, and as Ludus does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.peers.install import InstallError, ensure
from bench.peers.peers import GAME_CLIENTS
from ludus.envs.pettingzoo import Departure, MatchStep
from ludus.envs.unity.match import UnityMatch
from tests.unity_player.scenes import SCENES
from tests.unity_player.traces import DIGESTS, SEED, STEPS, Row, choose, digest, free_port, official_rows, our_rows, player_of


@pytest.fixture(scope="session")
def official() -> None:
    """`mlagents-envs` in its own environment, which is made if it does not exist."""
    try:
        ensure(GAME_CLIENTS["mlagents_envs"])
    except InstallError as error:
        pytest.skip(f"mlagents-envs cannot be installed: {error}")


@pytest.mark.parametrize("scene", SCENES)
def test_each_of_1000_steps_is_what_the_official_client_recorded(scene: str, tmp_path: Path) -> None:
    """Observations, rewards, groups, masks, endings and statistics; `python -m tests.unity_player.traces` records."""
    expected = json.loads(DIGESTS.read_text())[scene]
    found = [digest(row) for row in our_rows(scene, tmp_path)]
    differing = [step for step, own in enumerate(found) if own != expected[8 * step : 8 * step + 8]]
    assert len(found) == STEPS
    assert not differing, f"{len(differing)} steps differ; the long test below shows how"


@pytest.mark.long
@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("scene", SCENES)
def test_each_of_1000_steps_is_what_the_official_client_returns(scene: str, tmp_path: Path) -> None:
    theirs = official_rows(scene, tmp_path)
    for step, (own, their) in enumerate(zip(our_rows(scene, tmp_path), theirs, strict=True)):
        assert own == their, f"step {step}"


@pytest.mark.parametrize("scene", ["walk", "soccer"])
def test_a_match_gives_every_reward_and_ending_of_the_steps(scene: str, tmp_path: Path) -> None:
    """The rewards of an agent from its first action to its end, and how it ended, in the order of the player's messages."""
    endings = list(endings_of(our_rows(scene, tmp_path)))
    assert len(endings) > 20
    found = list(endings_of_match(scene, tmp_path))
    assert len(found) == len(endings)
    for own, their in zip(found, endings, strict=True):
        assert own == pytest.approx(their, abs=1e-5)


def endings_of(rows: Iterator[Row]) -> Iterator[tuple[float, bool]]:
    """Return of every episode that ended, and whether it was interrupted."""
    returns: dict[tuple[str, int], float] = {}
    for row in rows:
        for name, each in row["behaviours"].items():
            for kind in ("terminals", "decisions"):
                steps = each[kind]
                for place, agent in enumerate(steps["ids"]):
                    reward = steps["rewards"][place] + steps["group_rewards"][place]
                    if kind == "decisions":
                        returns[name, agent] = returns.get((name, agent), 0.0) + reward
                    elif (name, agent) in returns:
                        yield returns.pop((name, agent)) + reward, steps["interrupted"][place]


def endings_of_match(scene: str, directory: Path) -> Iterator[tuple[float, bool]]:
    settings = {"file_name": str(player_of(scene, directory)), "base_port": free_port(), "seed": SEED, "no_graphics": True}
    match = UnityMatch("unity", settings)
    try:
        at = match.reset(0)
        returns: dict[str, float] = {}
        while (player := match._player) is not None and player.exchanges < STEPS:
            if at.over:
                at = match.reset(0)
            at = match.step(_actions(match, player.exchanges - 1, at))
            for departure in at.departures:
                if not _is_cut(match, departure, at):
                    yield returns.pop(departure.agent, 0.0) + departure.reward, departure.truncated
                else:
                    returns[departure.agent] = returns.get(departure.agent, 0.0) + departure.reward
            for turn in at.turns:
                returns[turn.agent] = returns.get(turn.agent, 0.0) + turn.reward
    finally:
        match.close()


def _is_cut(match: UnityMatch, departure: Departure, at: MatchStep) -> bool:
    """Whether the agent only leaves the match, and its episode goes on in the next one."""
    if not at.over or not departure.truncated:
        return False
    turn = match._turns.get(departure.agent)
    return departure.observation is None or (turn is not None and departure.observation is turn.observation)


def _actions(match: UnityMatch, number: int, at: MatchStep) -> dict[str, object]:
    """Those of `our_rows`."""
    places: dict[str, int] = {}
    actions: dict[str, object] = {}
    behaviours = {slot: name for name, slots in match._layout.slots.items() for slot in slots}
    for turn in at.turns:
        name = behaviours[turn.agent]
        place = places[name] = places.get(name, -1) + 1
        branches = match._layout.behaviors[name].branches
        assert turn.mask is not None
        masks = [mask.tolist() for mask in np.split(~turn.mask, np.cumsum(branches)[:-1])]
        actions[turn.agent] = choose(number, name, place, 0, masks)[1]
    return actions
