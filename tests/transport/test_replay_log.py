"""The replay log: what is read is what a learner's memory would have got, whatever became of the processes that wrote it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.buffers.collate import CollatedBatches
from ludus.core.tree import encode, leaves
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import NotFound
from ludus.gateway.agent import Seat, SeatAgent
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.policy import Policy
from ludus.sampling.segment_recorder import session_spec
from ludus.testing.memory_contract import _fill
from ludus.transport import replay_log
from ludus.transport.base import SegmentWriter
from ludus.transport.local import LocalMemory
from ludus.transport.replay_log import ReadCounts, ReplayLogWriter, fill, list_recordings, read_recorded, used_bytes
from tests.gateway.scripted import Versions, run, tiny_policy
from tests.transport.recording import ONE, PLENTY, written
from tests.waiting import wait_until

HYBRID = gym.spaces.Dict({"aim": gym.spaces.Box(-2, 2, (1,), np.float32), "door": gym.spaces.Discrete(3)})
SEEN = gym.spaces.Dict(
    {
        "picture": gym.spaces.Box(0, 255, (4, 4, 1), np.uint8),
        "parts": gym.spaces.Tuple([gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(5)]),
    }
)


def numbers(where: Path, counts: ReadCounts | None = None) -> list[int]:
    return [int(segments.origin[0]) for segments in read_recorded(where, counts=counts)]


def assert_same(found: Segments, expected: Segments) -> None:
    expected = expected.trim()
    assert (found.spec, found.model, found.finals) == (expected.spec, expected.model, expected.finals)
    for (path, got), (_, wanted) in zip(leaves(found.arrays()), leaves(expected.arrays()), strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=path)
        assert got.dtype == wanted.dtype, path


# -- the same as in training ---------------------------------------------------------------------------------------------


async def session(policy: Policy, room: SegmentWriter, seed: int) -> None:
    """Episodes of any length that end in every way, with masks and changing weights."""
    random = np.random.default_rng(seed)
    versions = Versions(deepcopy(policy))
    agent = SeatAgent(Seat(BatchedPolicy(versions, deterministic=True), room, first_origin=seed))
    space = deepcopy(policy.observation_space)
    space.seed(seed)
    for _ in range(8):
        for step in range(int(random.integers(1, 12))):
            if random.random() < 0.2:
                versions.renew()
            mask = None
            if random.random() < 0.5:
                mask = (
                    {"door": np.array([1, 1, 0])} if isinstance(policy.action_space, gym.spaces.Dict) else np.array([0, 1, 1, 0])
                )
            await agent.act(space.sample(), mask, float(random.normal()) if step else 0.0)
        end = random.integers(3)
        if end == 0:
            await agent.finish(terminated=True, reward=1.0)
        elif end == 1:
            await agent.finish(truncated=True, observation=space.sample(), reward=0.5)
        else:
            agent.break_off()


@pytest.mark.parametrize("core", [None, "lstm", "gru"])
@pytest.mark.parametrize(("observation", "action"), [(None, None), (SEEN, HYBRID)], ids=["plain", "dict"])
def test_what_is_read_is_what_a_learner_gets(tmp_path: Path, core: str | None, observation: Any, action: Any) -> None:
    spaces = {} if observation is None else {"observation": observation, "action": action}
    policy = tiny_policy(**spaces, core=core, max_seq_len=3)
    spec = session_spec(policy, 5, "blue")
    memory = LocalMemory(spec, 1, 1000)
    with ReplayLogWriter(spec, tmp_path, PLENTY) as room:
        for seed in range(3):
            run(session(policy, memory, seed))
            run(session(policy, room, seed))
    counts = ReadCounts()
    found = list(read_recorded(tmp_path, counts=counts))
    assert len(found) == memory.stats().committed > 20
    assert room.stats() == replay_log.ReplayLogStats(len(found), 0, 0, used_bytes(tmp_path), "recording")
    for segments in found:
        expected = memory.take(0)
        assert expected is not None
        assert_same(segments, expected)
    assert counts == ReadCounts(files=1, segments=len(found), steps=sum(segments.steps for segments in found))


@pytest.mark.parametrize("core", [None, "lstm"])
def test_a_memory_filled_from_files_is_learned_from_as_the_live_one(tmp_path: Path, core: str | None) -> None:
    policy = tiny_policy(SEEN, HYBRID, core=core)
    spec = session_spec(policy, 6)
    live, later = LocalMemory(spec, 1, 1000), LocalMemory(spec, 1, 1000)
    with ReplayLogWriter(spec, tmp_path, PLENTY) as room:
        for seed in range(4):
            run(session(policy, live, seed))
            run(session(policy, room, seed))
    used_before = later.reserve(0)
    assert used_before is not None
    _fill(used_before, 3)  # a block that has been used holds rubbish
    later.abandon(used_before)
    counts = fill(later, tmp_path)
    assert counts.segments == live.stats().committed
    learned = []
    for memory in (live, later):
        batch = CollatedBatches([memory], 80).take(0)
        assert batch is not None
        learner = PPO(deepcopy(policy), PPOConfig(train_batch_size=80, minibatch_size=32, num_epochs=2, learner_threads=1), 7)
        before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
        numbers = learner.learn(batch, 0)
        after = [parameter.detach().clone() for parameter in learner.policy.parameters()]
        learner.close()
        assert all(np.isfinite(value) for value in numbers.values())
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        learned.append(after)
    assert all(torch.equal(one, other) for one, other in zip(*learned, strict=True))


# -- what killed processes leave behind ----------------------------------------------------------------------------------


def test_a_file_torn_at_any_byte_gives_every_whole_segment_before_the_tear(tmp_path: Path) -> None:
    spec = SegmentSpec(1, ONE.action[0], ONE.action[0])  # small, so that every byte can be tried
    ends = []
    with ReplayLogWriter(spec, tmp_path / "whole", PLENTY) as room:
        for number in range(3):
            block = room.reserve(0)
            assert block is not None
            block.valid[:], block.origin[:] = True, number
            room.commit(block)
            wait_until(lambda: not room.stats().waiting)
            ends.append(room.stats().bytes)
    whole = list_recordings(tmp_path / "whole")[0].read_bytes()
    opened = ends[0] - (ends[1] - ends[0])  # here the file has said what it is, and holds nothing yet
    torn = tmp_path / "torn.ludus"
    for length in range(len(whole) + 1):
        torn.write_bytes(whole[:length])
        counts = ReadCounts()
        complete = sum(end <= length for end in ends)
        assert numbers(torn, counts) == list(range(complete)), length
        assert (counts.torn, counts.damaged) == (length not in (opened, *ends), 0), length


def test_a_record_with_a_wrong_byte_is_left_out_and_what_follows_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = []
    with ReplayLogWriter(ONE, tmp_path / "whole", PLENTY) as room:
        for number in range(3):
            written(room, number)
            wait_until(lambda: not room.stats().waiting)
            ends.append(room.stats().bytes)
    whole = list_recordings(tmp_path / "whole")[0].read_bytes()
    bad = tmp_path / "bad.ludus"
    for at in (*range(0, len(whole), 7), *range(ends[0], ends[0] + 12)):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        counts = ReadCounts()
        found = numbers(bad, counts)
        if at < ends[0]:
            continue  # in the header, or in the first record: seen below in the others
        record = next(i for i, end in enumerate(ends) if at < end)
        in_head = at - ends[record - 1] < 12
        assert found == (list(range(record)) if in_head else [i for i in range(3) if i != record]), at
        assert (counts.damaged, counts.torn) == (1, 0), at
    assert "skipping" in caplog.text


def test_files_that_are_no_recordings_are_left_out_and_the_others_read(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY) as room:
        written(room, 5)
    (tmp_path / "a.ludus").write_bytes(b"something else entirely")
    (tmp_path / "b.ludus").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "c.ludus").write_bytes(replay_log._MAGIC + replay_log._frame(b"\xc1 not msgpack"))
    (tmp_path / "d.ludus").write_bytes(replay_log._MAGIC + replay_log._frame(b"\x81\xa4spec\x80") + replay_log._frame(b"x"))
    counts = ReadCounts()
    assert numbers(tmp_path, counts) == [5]
    assert (counts.files, counts.damaged, counts.torn) == (5, 3, 1)
    with pytest.raises(NotFound, match="no recording"):
        list(read_recorded(tmp_path / "missing"))


def test_a_segment_that_is_not_of_the_announced_shape_is_left_out(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY) as room:
        written(room, 1)
    path = list_recordings(tmp_path)[0]
    other = Segments.empty(replace(ONE, observation={**ONE.observation, "vector": ONE.action[0]}), 1)
    meta = {"steps": 4, "finals": 0, "temperature": 1.0}
    for arrays in (other.arrays(), {"reward": other.reward}, {**other.arrays(), "spec": other.reward}):
        with path.open("ab") as file:
            file.write(replay_log._frame(encode(arrays, meta)))
    counts = ReadCounts()
    assert numbers(tmp_path, counts) == [1]
    assert counts.damaged == 3


def test_segments_that_were_written_before_episodes_had_results_are_read(tmp_path: Path) -> None:
    without = replace(ONE, results=())
    with ReplayLogWriter(without, tmp_path, PLENTY) as room:
        written(room, 1)
    block = Segments.empty(without, 1)
    block.origin[0] = 2
    arrays = {name: array for name, array in block.arrays().items() if name != "results"}
    with list_recordings(tmp_path)[0].open("ab") as file:
        file.write(replay_log._frame(encode(arrays, {"steps": 4, "finals": 0, "temperature": 1.0})))
    counts = ReadCounts()
    assert numbers(tmp_path, counts) == [1, 2]
    assert counts.damaged == 0


@pytest.mark.system
@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_everything_that_was_written_before_kill_9_is_read(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.transport.recording", "for-ever", str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            told = next(int(line) for line in process.stdout if int(line) > 200)
        finally:
            process.send_signal(signal.SIGKILL)
        told = max([told, *(int(line) for line in process.stdout.read().split())])
    counts = ReadCounts()
    found = numbers(tmp_path, counts)
    assert found == list(range(len(found)))
    assert len(found) >= told > 200
    assert counts.damaged == 0
    assert counts.torn <= 1
    assert counts.files > 3


# -- bounds --------------------------------------------------------------------------------------------------------------


def test_files_are_rotated_and_read_in_order(tmp_path: Path) -> None:
    with ReplayLogWriter(replace(ONE, model="left/../wing"), tmp_path, PLENTY, file_bytes=10_000) as room:
        for number in range(40):
            written(room, number)
    files = list_recordings(tmp_path)
    assert len(files) > 3
    assert all(path.stat().st_size <= 10_000 for path in files)
    assert all(path.name.startswith("left_.._wing-") for path in files)
    assert numbers(tmp_path) == list(range(40))
    assert {segments.model for segments in read_recorded(tmp_path)} == {"left/../wing"}


@pytest.mark.long
@pytest.mark.system
def test_several_processes_write_side_by_side_and_keep_one_bound(tmp_path: Path) -> None:
    writers, each, limit = 4, 150, 400_000
    command = [sys.executable, "-m", "tests.transport.recording", "many", str(tmp_path), str(limit)]
    processes = [subprocess.Popen([*command, str(who), str(each)]) for who in range(writers)]
    assert [process.wait(60) for process in processes] == [0] * writers
    told = [tuple(map(int, (tmp_path / f"{who}.counts").read_text().split())) for who in range(writers)]
    counts = ReadCounts()
    found = numbers(tmp_path, counts)
    assert limit - 5_000 < used_bytes(tmp_path) <= limit
    assert [sum(told_of) for told_of in told] == [each] * writers, "every segment is written or counted as dropped"
    assert [sum(number // 1000 == who for number in found) for who in range(writers)] == [one[0] for one in told]
    assert len(set(found)) == len(found)
    assert (counts.torn, counts.damaged) == (0, 0)
    for who in range(writers):
        mine = [number for number in found if number // 1000 == who]
        assert mine == sorted(mine)


def test_at_the_bound_recording_stops_nothing_is_deleted_and_it_goes_on_when_files_are_moved_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "older.ludus"
    mine.write_bytes(bytes(15_000))
    with ReplayLogWriter(ONE, tmp_path, 20_000) as room:
        for number in range(20):
            written(room, number)
        wait_until(lambda: not room.stats().waiting)
        stats = room.stats()
        assert (stats.state, stats.written + stats.dropped) == ("full", 20)
        assert 0 < stats.written < 20
        assert used_bytes(tmp_path) <= 20_000
        assert mine.stat().st_size == 15_000
        written(room, 50)
        wait_until(lambda: room.stats().dropped == stats.dropped + 1)
        mine.rename(tmp_path / "older.kept")
        written(room, 51)
        wait_until(lambda: room.stats().written == stats.written + 1)
        assert room.stats().state == "recording"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("20000 bytes, the limit" in text for text in warnings) == 1, warnings
    assert numbers(tmp_path, ReadCounts()) == [*range(stats.written), 51]


def test_a_file_that_is_moved_away_while_it_is_written_is_left_alone(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY) as room:
        written(room, 1)
        wait_until(lambda: room.stats().written == 1)
        (first,) = list_recordings(tmp_path)
        moved = first.rename(tmp_path / "taken")
        written(room, 2)
        wait_until(lambda: room.stats().written == 2)
        assert numbers(moved) == [1]
        assert numbers(tmp_path) == [2]
        list_recordings(tmp_path)[0].unlink()
        written(room, 3)
    assert numbers(tmp_path) == [3]


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Nobody can write to the directory meanwhile."""
    with replay_log._lock_directory(directory):
        yield


@pytest.mark.skipif(sys.platform == "win32", reason="locks")
def test_committing_a_segment_never_waits_for_the_disk(tmp_path: Path) -> None:
    one = Segments.empty(ONE, 1).nbytes
    with ReplayLogWriter(ONE, tmp_path, PLENTY, queue_bytes=10 * one) as room:
        with held(tmp_path):
            for number in range(30):
                written(room, number)
            stats = room.stats()
            assert (stats.waiting + stats.dropped, stats.written) == (30, 0)
            assert 5 <= stats.waiting <= 10
        wait_until(lambda: not room.stats().waiting)
        written(room, 30)
    assert numbers(tmp_path) == [*range(stats.waiting), 30]
    assert room.stats().dropped == stats.dropped


def test_open_blocks_are_bounded_and_lost_ones_are_not_counted_for_ever(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY, open_bytes=3 * Segments.empty(ONE, 1).nbytes) as room:
        held = [room.reserve(0) for _ in range(4)]
        assert [block is not None for block in held] == [True, True, True, False]
        assert held[0] is not None
        room.abandon(held[0])
        assert room.reserve(0) is not None  # and lost at once
        held.clear()
        assert [room.reserve(0) is not None for _ in range(3)] == [True] * 3
        foreign = Segments.empty(ONE, 1)
        with pytest.raises(ValueError, match="committed without having been reserved"):
            room.commit(foreign)
        with pytest.raises(ValueError, match="abandoned without having been reserved"):
            room.abandon(foreign)


def test_a_closed_writer_drops_segments_without_errors(tmp_path: Path) -> None:
    room = ReplayLogWriter(ONE, tmp_path, PLENTY)
    written(room, 1)
    block = room.reserve(0)
    assert block is not None
    room.close()
    room.close()
    room.commit(block)
    assert room.reserve(0) is None
    assert (room.stats().written, room.stats().dropped) == (1, 1)
    assert not [thread for thread in threading.enumerate() if thread is room._thread]


# -- disks that refuse ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_disk(directory: Path, size_kib: int) -> Iterator[Path]:
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(directory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_drops_segments_logs_once_and_recording_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiny_disk(tmp_path / "disk", 64) as disk:
        (disk / "ballast").write_bytes(bytes(40_000))
        with ReplayLogWriter(ONE, disk / "replay", PLENTY, retry_s=0.05) as room:
            number = 0
            while room.stats().state != "failing" or room.stats().dropped < 100:
                written(room, number)
                number += 1
                time.sleep(0.001)
                assert number < 10_000
            wait_until(lambda: not room.stats().waiting)
            before = room.stats()
            whole = numbers(disk / "replay")
            assert len(whole) == before.written < number == before.written + before.dropped
            (disk / "ballast").unlink()
            written(room, number)
            wait_until(lambda: room.stats().written == before.written + 1)
            assert room.stats().state == "recording"
        counts = ReadCounts()
        assert numbers(disk / "replay", counts) == [*whole, number]
        assert counts.damaged == 0
    refusals = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(refusals) == 1


def test_a_directory_that_cannot_be_made_costs_segments_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "replay").write_text("in the way")
    with ReplayLogWriter(ONE, tmp_path / "replay", PLENTY, retry_s=0.02) as room:
        written(room, 1)
        wait_until(lambda: room.stats().dropped == 1)
        assert room.stats().state == "failing"
        (tmp_path / "replay").unlink()
        written(room, 2)
        wait_until(lambda: room.stats().written == 1)
    assert numbers(tmp_path / "replay") == [2]


# -- what is put into a memory -------------------------------------------------------------------------------------------


def test_segments_say_at_which_temperature_they_were_drawn(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY) as room:
        written(room, 1)
        written(room.at(0.5), 2)
        written(room.at(1.0), 3)
        given_back = room.at(0.5).reserve(0)
        assert given_back is not None
        room.at(0.5).abandon(given_back)
    (path,) = list_recordings(tmp_path)
    assert [drawn_at for _, drawn_at in replay_log.read_file(path, ReadCounts())] == [1.0, 0.5, 1.0]
    assert numbers(tmp_path) == [1, 2, 3]
    memory = LocalMemory(ONE, 1, 10)
    counts = fill(memory, tmp_path)
    assert (counts.segments, counts.unfit) == (2, 1)
    assert fill(memory, tmp_path, temperature=None).segments == 3


def test_a_memory_gets_only_what_fits_it_and_no_more_than_it_holds(tmp_path: Path) -> None:
    with ReplayLogWriter(ONE, tmp_path, PLENTY) as room, ReplayLogWriter(replace(ONE, model="right"), tmp_path, PLENTY) as other:
        for number in range(5):
            written(room, number, steps=number + 1 if number < 4 else 2)
            written(other, 100 + number)
    small = LocalMemory(ONE, 1, 3)
    counts = fill(small, tmp_path, timeout_s=0)
    assert (counts.segments, counts.full, small.stats().committed) == (3, True, 3)
    short = LocalMemory(replace(ONE, steps=2), 1, 10)
    counts = fill(short, tmp_path, timeout_s=0)
    assert (counts.segments, counts.unfit, counts.full) == (3, 7, False)
    assert [_origin(short) for _ in range(3)] == [0, 1, 4]
    wide = LocalMemory(ONE, 2, 10)
    assert fill(wide, tmp_path, timeout_s=0).segments == 0
    assert wide.stats().committed == 0
    assert len([block for block in (wide.reserve(0) for _ in range(11)) if block is not None]) == 10, "a block was lost"


def _origin(memory: LocalMemory) -> int:
    taken = memory.take(0)
    assert taken is not None
    return int(taken.origin[0])
