"""Writers and readers of a ring are killed hundreds of times: nothing is torn, missing or doubled, and the next goes on at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.transport.ring_buffer import Wakeup, create_ring
from tests.long.record import record
from tests.transport.killing import kill_readers, kill_writers

KILLS = 500
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(params=[70_000, 400_000])
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Hardly larger than a record, and with room for a dozen."""
    create_ring(tmp_path / "ring", request.param)
    Wakeup.create(tmp_path / "wakeup").close()
    return tmp_path / "ring", tmp_path / "wakeup"


def test_hundreds_of_killed_writers_leave_nothing_torn_missing_or_doubled(ring: tuple[Path, Path]) -> None:
    tally = kill_writers(*ring, kills=KILLS, seed=11)
    record("killed ring writers", kills=tally.kills, records=tally.records, slowest_s=round(tally.slowest_s, 4))
    assert tally.records > KILLS


def test_hundreds_of_killed_readers_lose_nothing(ring: tuple[Path, Path]) -> None:
    tally = kill_readers(*ring, kills=KILLS, seed=12)
    record("killed ring readers", kills=tally.kills, records=tally.records)
    assert tally.records > KILLS
