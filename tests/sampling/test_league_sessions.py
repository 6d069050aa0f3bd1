"""Opponents from a league in the sessions of external games."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.config.schema import SelfPlayConfig
from ludus.core import trust
from ludus.errors import Refused
from ludus.gateway.agent import Seat, SeatAgent
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.weights.version_store import FixedSource
from ludus.sampling.league_files import LeagueOpponent, Matchmaking, PairReport, UnusableModel, write_matchmaking
from ludus.sampling.league_sessions import LeagueSessions
from ludus.sampling.session_opponents import SessionResult
from tests.sampling.test_league_opponents import reports
from tests.sampling.test_match_opponents import Versions

works = True


def play_seven(observation: Any, mask: Any) -> int:
    if not works:
        raise RuntimeError("no more")
    return 7


def test_a_match_in_which_a_script_fails_is_refused_and_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:play_seven"
    trust.allow(name)
    write_matchmaking(tmp_path, Matchmaking("main", 0, (LeagueOpponent("seven", f"script:{name}", 1.0),)))
    source = Versions()
    settings = SelfPlayConfig(opponents="league", league=str(tmp_path), player="main")
    sessions = LeagueSessions(settings, BatchedPolicy(FixedSource(source.policy)), source, 0)
    result = SessionResult(True, ([1.0], [0.0]), frozenset({0, 1}))

    async def play(match: str) -> Any:
        _, policy_of = sessions.join(match)
        return await SeatAgent(Seat(policy_of(""))).act(np.zeros(2, np.float32))

    async def play_all() -> None:
        assert await play("before") == 7
        sessions.leave("before", result)
        monkeypatch.setattr(f"{__name__}.works", False)
        with pytest.raises(Refused, match="has failed") as refused:
            await play("during")
        assert refused.value.status == 410
        sessions.leave("during", result)

    asyncio.run(play_all())
    sessions.close()
    assert sessions.counts["counted"] == 1
    found = reports(tmp_path)
    assert [one.player for one in found if isinstance(one, UnusableModel)] == ["seven"]
    assert [one.wins + one.losses for one in found if isinstance(one, PairReport)] == [1]
