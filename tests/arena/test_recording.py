"""Recordings of the Arena: replayed bit for bit, or refused."""

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
from tests.arena.recorded import play, recorded

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matches") / "match.arena"
    recorded(path, size=3)
    return path


# -- played again ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_recording_is_replayed_to_the_same_state(size: int, tmp_path: Path) -> None:
    arena = recorded(tmp_path / "match.arena", size)
    found = read_recording(tmp_path / "match.arena")
    again = found.begin()
    moments = [(moment.number, int(moment.match[TICK])) for moment in replay(found, again)]
    assert moments == [(number, 3 * number) for number in range(121)]
    assert again.hash(0) == arena.hash(0) == verify(found)
    assert again.units[0, layout.ILLEGAL].sum() > 0  # orders that were refused are part of it


@pytest.mark.parametrize(
    ("mode", "ticks_played", "winner", "last"),
    [("1v1", 15_928, 0, "d57f4a36f8f3683af49b4b32af5bad1e"), ("3v3", 23_054, 1, "1e39ba91e8219017c8bc094d49f416da")],
)
def test_a_match_that_was_played_on_another_machine_is_the_same_here(
    mode: str, ticks_played: int, winner: int, last: str
) -> None:
    """Orders by chance, until a base fell. Whoever changes the rules changes RULES, and plays them anew (`tests/arena/recorded.py`)."""
    found = read_recording(GOLDEN / f"{mode}.arena")
    assert (found.mode, found.rules) == (mode, layout.RULES)
    assert (found.result["ticks"], found.result["winner"], verify(found)) == (ticks_played, winner, last)


def test_each_of_several_matches_is_recorded_by_itself() -> None:
    arena = Arena(1, 3)
    arena.reset([1, 2, 3], lineups=[((190,), (173,)), ((107,), (107,)), ((141,), (111,))])
    recorders = [Recorder(arena, m) for m in range(3)]
    play(arena, 60, recorders)
    hashes = [arena.hash(m) for m in range(3)]
    assert len(set(hashes)) == 3
    assert [verify(recorder.recording()) for recorder in recorders] == hashes


def test_it_knows_who_played_and_how_it_ended(file: Path) -> None:
    found = read_recording(file)
    assert (found.mode, found.seed, found.names) == ("3v3", 7, ("left", "right"))
    assert found.lineup == [[190, 173, 117], [141, 111, 107]]
    assert found.result == {"over": False, "winner": None, "ticks": 360}
    assert found.seconds == 24.0
    assert file.stat().st_size < 3_000


def test_a_match_that_begins_from_a_saved_state_is_recorded_from_there(tmp_path: Path) -> None:
    earlier = recorded(tmp_path / "earlier.arena")
    arena = Arena(1, 2)
    arena.reset([0, 0])
    arena.load(1, earlier.save(0))
    recorder = Recorder(arena, 1)
    play(arena, 40, [recorder], seed=3)
    found = read_recording(recorder.write(tmp_path / "later.arena"))
    assert found.start == earlier.save(0)
    assert verify(found) == arena.hash(1)


def test_settings_of_the_match_and_lenience_are_kept() -> None:
    arena = Arena(1, 1, ArenaSettings(seconds=10, every=5), lenient=True)
    arena.reset([3])
    arena.match[0, LIMIT] = 101  # as a game process does that is told how many frames it may take
    recorder = Recorder(arena)
    play(arena, 40, [recorder])
    found = recorder.recording()
    assert arena.over[0]
    assert (found.limit, found.every, found.lenient, found.start) == (101, 5, True, None)
    assert len(found.decisions) == 21  # and none after the end
    assert verify(found) == arena.hash(0)


def test_a_match_of_no_decisions_is_one_too(tmp_path: Path) -> None:
    arena = Arena(1)
    arena.reset([5])
    found = read_recording(Recorder(arena).write(tmp_path / "nothing.arena"))
    assert verify(found) == arena.hash(0)


def test_the_same_match_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorded(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# -- refused --------------------------------------------------------------------------------------------------------------


def test_one_decision_that_was_changed_is_noticed(file: Path) -> None:
    found = read_recording(file)
    changed = found.decisions.copy()
    changed[3, 0] = (1, 4, 0, 0)
    with pytest.raises(Damaged, match="replay differs: before decision 50 of 120"):
        verify(dataclasses.replace(found, decisions=changed))


def test_another_beginning_is_noticed_at_once(file: Path) -> None:
    found = dataclasses.replace(read_recording(file), lineup=[[117, 173, 190], [141, 111, 107]])
    with pytest.raises(Damaged, match="before decision 0"):
        next(replay(found))


def test_a_recording_of_other_rules_is_refused(file: Path, tmp_path: Path) -> None:
    other = write_recording(tmp_path / "old.arena", dataclasses.replace(read_recording(file), rules=layout.RULES + 1))
    with pytest.raises(UsageError, match=f"recorded under rules {layout.RULES + 1}.*with rules {layout.RULES}"):
        read_recording(other)


def test_a_file_that_was_cut_off_or_changed_is_refused(file: Path, tmp_path: Path) -> None:
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


def test_other_files_are_told_apart(file: Path, tmp_path: Path) -> None:
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


def resealed(file: Path, tmp_path: Path, change: dict[str, Any], parts: dict[int, bytes] | None = None) -> Path:
    """A file whose checksum is right and whose content was made up."""
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
def test_a_header_that_lies_is_refused(change: dict[str, Any], file: Path, tmp_path: Path) -> None:
    with pytest.raises(Damaged):
        read_recording(resealed(file, tmp_path, change))


def test_a_beginning_that_no_match_comes_to_is_refused(file: Path, tmp_path: Path) -> None:
    state = bytearray(read_recording(file).begin().save(0))
    state[-4:] = b"\xff" * 4
    state[28:32] = (99).to_bytes(4, "little")  # the first number of the match
    with pytest.raises(Damaged, match="starts from an invalid state"):
        read_recording(resealed(file, tmp_path, {"saved": True}, {0: bytes(state[:-8])}))


def test_decisions_that_are_nonsense_harm_nobody(file: Path, tmp_path: Path) -> None:
    wild = np.random.default_rng(0).integers(-128, 128, 120 * 6 * 4).astype(np.int8).tobytes()
    found = read_recording(resealed(file, tmp_path, {}, {1: wild}))
    with pytest.raises(Damaged, match="replay differs"):
        verify(found)


def test_a_part_that_unpacks_to_more_than_it_says_is_not_unpacked(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    text = json.dumps({"parts": [[len(bomb), 10]]}).encode()
    body = recording.KIND + len(text).to_bytes(4, "little") + text + bomb
    path = tmp_path / "bomb.arena"
    path.write_bytes(body + checksummed_file._digest(body))
    with pytest.raises(Damaged, match="length does not match its header"):
        checksummed_file.read_file(path, recording.KIND, "")


def test_control_characters_in_names_do_not_reach_a_terminal(file: Path, tmp_path: Path) -> None:
    found = read_recording(resealed(file, tmp_path, {"names": ["\x1b[2Jhard", "x" * 500]}))
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


def test_a_saved_state_goes_through_a_file(tmp_path: Path) -> None:
    arena = recorded(tmp_path / "match.arena", 3, 30)
    saved = read_state(write_state(tmp_path / "state", arena.save(0)))
    assert (saved.mode, saved.tick, saved.seconds) == ("3v3", 90, 6.0)
    assert saved.heroes == ("Ember", "Falcon", "Bulwark", "Grace", "Shade", "Lancer")
    other = Arena(3)
    other.load(0, saved.data)
    assert other.hash(0) == arena.hash(0)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    arena = recorded(tmp_path / "match.arena", 1, 5)
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


# -- films ----------------------------------------------------------------------------------------------------------------


def test_every_tick_is_shown_and_decisions_are_as_they_were_recorded(file: Path) -> None:
    found = read_recording(file)
    seen = list(ticks(found))
    assert [int(match[TICK]) for _, match in seen] == list(range(361))
    for moment in replay(found):
        units, match = seen[3 * moment.number]
        assert np.array_equal(units, moment.units)
        assert np.array_equal(match, moment.match)


def test_between_two_ticks_everybody_is_on_the_way(file: Path) -> None:
    states = list(ticks(read_recording(file)))
    before, after = states[150], states[151]
    walkers = np.flatnonzero((before[0][X] != after[0][X]) & (before[0][ALIVE] == 1) & (after[0][ALIVE] == 1))
    assert len(walkers) > 3
    half, _ = interpolate(before, after, 0.5)
    assert np.abs(2 * half[[X, Y]] - before[0][[X, Y]] - after[0][[X, Y]]).max() <= 1
    others = [field for field in range(layout.FIELDS) if field not in (X, Y)]
    assert np.array_equal(half[others], before[0][others])


def test_whoever_jumps_far_or_dies_is_not_seen_on_the_way(file: Path) -> None:
    before, after = list(ticks(read_recording(file)))[150:152]
    jumped = after[0].copy()
    jumped[X, 0] = before[0][X, 0] + 40_000
    jumped[ALIVE, 1] = 0
    half, _ = interpolate(before, (jumped, after[1]), 0.5)
    assert np.array_equal(half[[X, Y], :2], before[0][[X, Y], :2])


def test_a_film_twice_as_fast_takes_half_the_pictures(file: Path) -> None:
    states = list(ticks(read_recording(file)))
    slow = list(resample(iter(states), 0.5))
    fast = list(resample(iter(states), 2.0))
    assert [int(match[TICK]) for _, match in slow] == [*(tick // 2 for tick in range(720)), 360]
    assert [int(match[TICK]) for _, match in fast] == list(range(0, 361, 2))
    part = [int(match[TICK]) for _, match in resample(iter(states), 5.0, 2.0, 4.0)]
    assert part == [30, 35, 40, 45, 50, 55, 60]


def test_a_film_is_written_whole(file: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []

    def progress(done: int, total: int | None) -> None:
        told.append((done, total))

    frames = write_video(
        read_recording(file), tmp_path / "film.mp4", width=160, fps=10, speed=8, first_s=5, last_s=13, progress=progress
    )
    with imageio.get_reader(tmp_path / "film.mp4") as reader:
        assert reader.count_frames() == frames == 36
        assert reader.get_data(3).shape[1] == 160
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((1, 36), (36, 36))
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speed": 0}, "video is 0"),
        ({"speed": float("nan")}, "video is nan"),
        ({"fps": 0}, "0 frames per second"),
        ({"camp": 2}, "no camp 2"),
        ({"width": 10}, "10 pixels wide"),
        ({"first_s": 1000.0, "width": 160}, "no frames after 1000 s"),
    ],
)
def test_a_film_that_cannot_be_is_not_begun(options: dict[str, Any], said: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        write_video(read_recording(file), tmp_path / "film.mp4", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_film_is_called_mp4(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Call it film\.mp4"):
        write_video(read_recording(file), tmp_path / "film.gif")


def test_a_film_of_a_later_part_shows_the_same_states(file: Path) -> None:
    recording = read_recording(file)
    whole = resample(ticks(recording), 0.5, 7.1, 8.3)
    part = resample(ticks(recording, math.floor(7.1 * 15) - 1), 0.5, 7.1, 8.3)
    for (units, match), (other_units, other_match) in zip(whole, part, strict=True):
        assert np.array_equal(units, other_units)
        assert np.array_equal(match, other_match)


def test_a_replay_that_goes_another_way_makes_no_film(file: Path, tmp_path: Path) -> None:
    found = read_recording(file)
    forged: Recording = dataclasses.replace(found, hashes=[bytes(16), *found.hashes[1:]])
    with pytest.raises(LudusError, match="replay differs"):
        write_video(forged, tmp_path / "film.mp4", width=160)
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_a_second_is_found(file: Path) -> None:
    found = read_recording(file)
    assert int(state_at(found, 10.0)[1][TICK]) == 150
    assert int(state_at(found, 0.0)[1][TICK]) == 0
    assert int(state_at(found, 999.0)[1][TICK]) == 360
    with pytest.raises(UsageError):
        state_at(found, -1.0)


def test_packing_takes_little_room(file: Path) -> None:
    found = read_recording(file)
    assert len(pack(found)) < found.decisions.nbytes
