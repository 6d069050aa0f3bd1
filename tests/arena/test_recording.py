"""Recordings, saved states and videos of the Arena."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest

from ludus.errors import ConfigError, Damaged, LudusError, NotFound, StoreError, UsageError
from ludus.games.arena.engine import checksummed_file, layout, recording
from ludus.games.arena.engine import saved_state as states
from ludus.games.arena.engine.layout import ALIVE, LIMIT, TICK, X, Y
from ludus.games.arena.engine.recording import Recorder, Recording, pack, read_recording, replay, verify, write_recording
from ludus.games.arena.engine.saved_state import read_state, write_state
from ludus.games.arena.engine.settings import ArenaSettings
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.render.video import interpolate, resample, state_at, ticks, write_video
from tests.arena.random_recordings import play, write_random_recording

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matches") / "match.arena"
    write_random_recording(path, size=3)
    return path


# -- replay ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_recording_is_replayed_to_the_same_state(size: int, tmp_path: Path) -> None:
    arena = write_random_recording(tmp_path / "match.arena", size)
    found = read_recording(tmp_path / "match.arena")
    again = found.begin()
    moments = [(moment.number, int(moment.match[TICK])) for moment in replay(found, again)]
    assert moments == [(number, 3 * number) for number in range(121)]
    assert again.hash(0) == arena.hash(0) == verify(found)
    assert again.units[0, layout.ILLEGAL].sum() > 0  # illegal orders are recorded too


@pytest.mark.parametrize(
    ("mode", "ticks_played", "winner", "last"),
    [("1v1", 15_928, 0, "d57f4a36f8f3683af49b4b32af5bad1e"), ("3v3", 23_054, 1, "1e39ba91e8219017c8bc094d49f416da")],
)
def test_golden_recordings_replay_bit_for_bit(mode: str, ticks_played: int, winner: int, last: str) -> None:
    """Random orders until a base fell. After a change of the rules, increase RULES and record again (`random_recordings.py`)."""
    found = read_recording(GOLDEN / f"{mode}.arena")
    assert (found.mode, found.rules) == (mode, layout.RULES)
    assert (found.result["ticks"], found.result["winner"], verify(found)) == (ticks_played, winner, last)


def test_several_matches_are_recorded_separately() -> None:
    arena = Arena(1, 3)
    arena.reset([1, 2, 3], lineups=[((190,), (173,)), ((107,), (107,)), ((141,), (111,))])
    recorders = [Recorder(arena, m) for m in range(3)]
    play(arena, 60, recorders)
    hashes = [arena.hash(m) for m in range(3)]
    assert len(set(hashes)) == 3
    assert [verify(recorder.recording()) for recorder in recorders] == hashes


def test_a_recording_holds_players_and_result(file: Path) -> None:
    found = read_recording(file)
    assert (found.mode, found.seed, found.names) == ("3v3", 7, ("left", "right"))
    assert found.lineup == [[190, 173, 117], [141, 111, 107]]
    assert found.result == {"over": False, "winner": None, "ticks": 360}
    assert found.seconds == 24.0
    assert file.stat().st_size < 3_000


def test_a_match_from_a_saved_state_is_recorded_with_it(tmp_path: Path) -> None:
    earlier = write_random_recording(tmp_path / "earlier.arena")
    arena = Arena(1, 2)
    arena.reset([0, 0])
    arena.load(1, earlier.save(0))
    recorder = Recorder(arena, 1)
    play(arena, 40, [recorder], seed=3)
    found = read_recording(recorder.write(tmp_path / "later.arena"))
    assert found.start == earlier.save(0)
    assert verify(found) == arena.hash(1)


def test_a_recording_holds_the_settings_of_the_match() -> None:
    arena = Arena(1, 1, ArenaSettings(seconds=10, every=5), lenient=True)
    arena.reset([3])
    arena.match[0, LIMIT] = 101  # as a game process does with max_frames
    recorder = Recorder(arena)
    play(arena, 40, [recorder])
    found = recorder.recording()
    assert arena.over[0]
    assert (found.limit, found.every, found.lenient, found.start) == (101, 5, True, None)
    assert len(found.decisions) == 21  # none after the end
    assert verify(found) == arena.hash(0)


def test_a_recording_can_be_empty(tmp_path: Path) -> None:
    arena = Arena(1)
    arena.reset([5])
    found = read_recording(Recorder(arena).write(tmp_path / "nothing.arena"))
    assert verify(found) == arena.hash(0)


def test_the_same_match_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_random_recording(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# -- rejected -------------------------------------------------------------------------------------------------------------


def test_a_modified_decision_is_detected(file: Path) -> None:
    found = read_recording(file)
    changed = found.decisions.copy()
    changed[3, 0] = (1, 4, 0, 0)
    with pytest.raises(Damaged, match="replay differs: before decision 50 of 120"):
        verify(dataclasses.replace(found, decisions=changed))


def test_a_modified_start_is_detected_at_once(file: Path) -> None:
    found = dataclasses.replace(read_recording(file), lineup=[[117, 173, 190], [141, 111, 107]])
    with pytest.raises(Damaged, match="before decision 0"):
        next(replay(found))


def test_a_recording_of_other_rules_is_rejected(file: Path, tmp_path: Path) -> None:
    other = write_recording(tmp_path / "old.arena", dataclasses.replace(read_recording(file), rules=layout.RULES + 1))
    with pytest.raises(UsageError, match=f"recorded under rules {layout.RULES + 1}.*with rules {layout.RULES}"):
        read_recording(other)


def test_a_truncated_or_modified_file_is_rejected(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    broken = tmp_path / "broken.arena"
    for length in {0, 1, 15, 16, 20, 35, 36, 100, len(whole) // 2, len(whole) - 1}:
        broken.write_bytes(whole[:length])
        with pytest.raises((Damaged, UsageError)):
            read_recording(broken)
    for at in range(0, len(whole), len(whole) // 60):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises((Damaged, UsageError)):
            read_recording(broken)
    broken.write_bytes(whole + b"\0")
    with pytest.raises(Damaged):
        read_recording(broken)


def test_files_of_another_kind_are_rejected(file: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a match")
    with pytest.raises(UsageError, match="is not a recording of the Arena"):
        read_recording(text)
    with pytest.raises(UsageError, match="is not a saved state of the Arena"):
        read_state(file)
    with pytest.raises(NotFound, match="no file"):
        read_recording(tmp_path / "nowhere.arena")
    with pytest.raises(StoreError, match="cannot be read"):
        read_recording(tmp_path)


def forge(file: Path, tmp_path: Path, change: dict[str, Any], parts: dict[int, bytes] | None = None) -> Path:
    """Write a file with a valid checksum and modified content."""
    header, content = checksummed_file.read_file(file, recording.KIND, "")
    for at, part in (parts or {}).items():
        content[at] = part
    path = tmp_path / "forged.arena"
    path.write_bytes(checksummed_file.encode_file(recording.KIND, header | change, content))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": 11},
        {"size": 2},
        {"size": "3"},
        {"size": True},
        {"decisions": -1},
        {"decisions": 10**9},
        {"decisions": 119},
        {"hash_every": 0},
        {"seed": 2**40},
        {"every": 0},
        {"every": 16},
        {"limit": 0},
        {"lineup": None},
        {"lineup": [[1], [2]]},
        {"lineup": [[190, 173], [141, 111, 107]]},
        {"lineup": 7},
        {"names": ["a"]},
        {"names": [1, 2]},
        {"saved": True},
    ],
    ids=str,
)
def test_an_inconsistent_header_is_rejected(change: dict[str, Any], file: Path, tmp_path: Path) -> None:
    with pytest.raises(Damaged):
        read_recording(forge(file, tmp_path, change))


def test_an_invalid_start_state_is_rejected(file: Path, tmp_path: Path) -> None:
    state = bytearray(read_recording(file).begin().save(0))
    state[-4:] = b"\xff" * 4
    state[28:32] = (99).to_bytes(4, "little")  # the first number of the match
    with pytest.raises(Damaged, match="starts from an invalid state"):
        read_recording(forge(file, tmp_path, {"saved": True}, {0: bytes(state[:-8])}))


def test_invalid_decisions_do_no_harm(file: Path, tmp_path: Path) -> None:
    wild = np.random.default_rng(0).integers(-128, 128, 120 * 6 * 4).astype(np.int8).tobytes()
    found = read_recording(forge(file, tmp_path, {}, {1: wild}))
    with pytest.raises(Damaged, match="replay differs"):
        verify(found)


def test_a_decompression_bomb_is_rejected(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    text = json.dumps({"parts": [[len(bomb), 10]]}).encode()
    body = recording.KIND + len(text).to_bytes(4, "little") + text + bomb
    path = tmp_path / "bomb.arena"
    path.write_bytes(body + checksummed_file._digest(body))
    with pytest.raises(Damaged, match="length does not match its header"):
        checksummed_file.read_file(path, recording.KIND, "")


def test_control_characters_are_removed_from_names(file: Path, tmp_path: Path) -> None:
    found = read_recording(forge(file, tmp_path, {"names": ["\x1b[2Jhard", "x" * 500]}))
    assert found.names == ("2Jhard", "x" * 80)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a directory")
    with pytest.raises(StoreError, match="cannot be written"):
        write_recording(tmp_path / "taken" / "match.arena", read_recording(file))
    (tmp_path / "match.arena").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        write_recording(tmp_path / "match.arena", read_recording(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["match.arena", "taken"]


# -- saved states ---------------------------------------------------------------------------------------------------------


def test_a_saved_state_round_trips_through_a_file(tmp_path: Path) -> None:
    arena = write_random_recording(tmp_path / "match.arena", 3, 30)
    saved = read_state(write_state(tmp_path / "state", arena.save(0)))
    assert (saved.mode, saved.tick, saved.seconds) == ("3v3", 90, 6.0)
    assert saved.heroes == ("Ember", "Falcon", "Bulwark", "Grace", "Shade", "Lancer")
    other = Arena(3)
    other.load(0, saved.data)
    assert other.hash(0) == arena.hash(0)


def test_a_damaged_state_file_is_rejected(tmp_path: Path) -> None:
    arena = write_random_recording(tmp_path / "match.arena", 1, 5)
    path = write_state(tmp_path / "state", arena.save(0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30] + whole[-29:])
    with pytest.raises(Damaged, match="checksum"):
        read_state(path)
    path.write_bytes(checksummed_file.encode_file(states.KIND, {}, [b"LudusArenaState\0" + bytes(40)]))
    with pytest.raises(ConfigError, match=r"state: The state was saved under rules 0"):
        read_state(path)
    with pytest.raises(ConfigError):
        write_state(tmp_path / "none", b"anything")
    assert not (tmp_path / "none").exists()


# -- videos ---------------------------------------------------------------------------------------------------------------


def test_ticks_yields_every_tick_of_the_recording(file: Path) -> None:
    found = read_recording(file)
    seen = list(ticks(found))
    assert [int(match[TICK]) for _, match in seen] == list(range(361))
    for moment in replay(found):
        units, match = seen[3 * moment.number]
        assert np.array_equal(units, moment.units)
        assert np.array_equal(match, moment.match)


def test_positions_are_interpolated_between_ticks(file: Path) -> None:
    states = list(ticks(read_recording(file)))
    before, after = states[150], states[151]
    walkers = np.flatnonzero((before[0][X] != after[0][X]) & (before[0][ALIVE] == 1) & (after[0][ALIVE] == 1))
    assert len(walkers) > 3
    half, _ = interpolate(before, after, 0.5)
    assert np.abs(2 * half[[X, Y]] - before[0][[X, Y]] - after[0][[X, Y]]).max() <= 1
    others = [field for field in range(layout.FIELDS) if field not in (X, Y)]
    assert np.array_equal(half[others], before[0][others])


def test_recalls_and_deaths_are_not_interpolated(file: Path) -> None:
    before, after = list(ticks(read_recording(file)))[150:152]
    jumped = after[0].copy()
    jumped[X, 0] = before[0][X, 0] + 40_000
    jumped[ALIVE, 1] = 0
    half, _ = interpolate(before, (jumped, after[1]), 0.5)
    assert np.array_equal(half[[X, Y], :2], before[0][[X, Y], :2])


def test_double_speed_halves_the_frames(file: Path) -> None:
    states = list(ticks(read_recording(file)))
    slow = list(resample(iter(states), 0.5))
    fast = list(resample(iter(states), 2.0))
    assert [int(match[TICK]) for _, match in slow] == [*(tick // 2 for tick in range(720)), 360]
    assert [int(match[TICK]) for _, match in fast] == list(range(0, 361, 2))
    part = [int(match[TICK]) for _, match in resample(iter(states), 5.0, 2.0, 4.0)]
    assert part == [30, 35, 40, 45, 50, 55, 60]


def test_a_video_is_written_completely(file: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []

    def progress(done: int, total: int | None) -> None:
        told.append((done, total))

    frames = write_video(
        read_recording(file), tmp_path / "match.mp4", width=160, fps=10, speed=8, first_s=5, last_s=13, progress=progress
    )
    with imageio.get_reader(tmp_path / "match.mp4") as reader:
        assert reader.count_frames() == frames == 36
        assert reader.get_data(3).shape[1] == 160
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((1, 36), (36, 36))
    assert [path.name for path in tmp_path.iterdir()] == ["match.mp4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 0}, "video is 0"),
        ({"speed": float("nan")}, "video is nan"),
        ({"fps": 0}, "0 frames per second"),
        ({"camp": 2}, "no camp 2"),
        ({"width": 10}, "10 pixels wide"),
        ({"first_s": 1000.0, "width": 160}, "no frames after 1000 s"),
    ],
)
def test_invalid_video_options_are_rejected_before_writing(
    options: dict[str, Any], message: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        write_video(read_recording(file), tmp_path / "match.mp4", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_video_needs_the_suffix_mp4(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Use match\.mp4"):
        write_video(read_recording(file), tmp_path / "match.gif")


def test_a_video_of_a_later_part_shows_the_same_states(file: Path) -> None:
    recording = read_recording(file)
    whole = resample(ticks(recording), 0.5, 7.1, 8.3)
    part = resample(ticks(recording, math.floor(7.1 * 15) - 1), 0.5, 7.1, 8.3)
    for (units, match), (other_units, other_match) in zip(whole, part, strict=True):
        assert np.array_equal(units, other_units)
        assert np.array_equal(match, other_match)


def test_a_diverging_replay_writes_no_video(file: Path, tmp_path: Path) -> None:
    found = read_recording(file)
    forged: Recording = dataclasses.replace(found, hashes=[bytes(16), *found.hashes[1:]])
    with pytest.raises(LudusError, match="replay differs"):
        write_video(forged, tmp_path / "match.mp4", width=160)
    assert list(tmp_path.iterdir()) == []


def test_state_at_returns_the_state_of_a_second(file: Path) -> None:
    found = read_recording(file)
    assert int(state_at(found, 10.0)[1][TICK]) == 150
    assert int(state_at(found, 0.0)[1][TICK]) == 0
    assert int(state_at(found, 999.0)[1][TICK]) == 360
    with pytest.raises(UsageError):
        state_at(found, -1.0)


def test_recordings_are_small(file: Path) -> None:
    found = read_recording(file)
    assert len(pack(found)) < found.decisions.nbytes
