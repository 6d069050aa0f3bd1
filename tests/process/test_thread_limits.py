"""Limits on threads, and the error when games need more."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.errors import WorkerFailed
from ludus.process.commands.thread_limits import (
    ResourceLimit,
    open_file_limit,
    require_room,
    room_for,
    thread_limits,
    threads_left,
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """The files of a machine with 1,000 threads at most, of which 300 are used, and without groups."""
    kernel = tmp_path / "proc/sys/kernel"
    kernel.mkdir(parents=True)
    (kernel / "threads-max").write_text("1000\n")
    (kernel / "pid_max").write_text("4194304\n")
    (tmp_path / "proc/loadavg").write_text("0.61 0.43 0.66 2/300 26790\n")
    process(tmp_path / "proc", "self", os.getuid(), 1)
    (tmp_path / "proc/self/uid_map").write_text("         0     100000      65536\n")
    (tmp_path / "proc/self/cgroup").write_text("")
    (tmp_path / "proc/self/mountinfo").write_text("")
    return tmp_path / "proc"


@pytest.fixture
def at_most_500() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (500, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NPROC, before)


def process(proc: Path, pid: str, user: int, threads: int) -> None:
    (proc / pid).mkdir()
    (proc / pid / "status").write_text(f"Name:\tgame\nUid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t0\nThreads:\t{threads}\n")


def group(path: Path, most: str, current: int) -> None:
    path.mkdir(parents=True)
    (path / "pids.max").write_text(f"{most}\n")
    (path / "pids.current").write_text(f"{current}\n")


def test_the_limits_of_this_machine_hold_what_runs_on_it() -> None:
    before = {limit.name: limit.used for limit in thread_limits()}
    enough = threading.Event()
    more = [threading.Thread(target=enough.wait, args=(30,)) for _ in range(50)]
    for thread in more:
        thread.start()
    try:
        limits = thread_limits()
    finally:
        enough.set()
    assert {limit.name for limit in limits} >= {"kernel.threads-max", "kernel.pid_max"}
    assert all(limit.used >= before[limit.name] + 50 - 40 for limit in limits), "other processes come and go, but not so many"
    assert threads_left() == limits[0].left or threads_left() is not None
    assert limits == sorted(limits, key=lambda limit: limit.left)


def test_every_thread_of_the_user_counts_and_no_other(proc: Path, at_most_500: None) -> None:
    process(proc, "12", os.getuid(), 212)
    process(proc, "13", os.getuid(), 3)
    process(proc, "14", os.getuid() + 1, 900)
    (proc / "15").mkdir()  # it ends while it is looked at
    assert thread_limits(proc)[0] == ResourceLimit("RLIMIT_NPROC", 500, 215, thread_limits(proc)[0].fix)


def test_privileged_processes_are_exempt_from_the_user_limit(proc: Path, at_most_500: None) -> None:
    (proc / "self/uid_map").write_text("         0          0 4294967295\n")
    status = (proc / "self/status").read_text()
    (proc / "self/status").write_text(status.replace("CapEff:\t0", "CapEff:\t000001fffeffffff"))
    assert [limit.name for limit in thread_limits(proc)] == ["kernel.threads-max", "kernel.pid_max"]


def test_the_groups_above_bound_it_too(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup v2"
    group(mount / "a.slice/b.scope", "400", 10)
    group(mount / "unrelated", "1", 1)
    (mount / "a.slice/pids.max").write_text("90\n")
    (mount / "a.slice/pids.current").write_text("60\n")
    (proc / "self/cgroup").write_text("0::/a.slice/b.scope\n")
    (proc / "self/mountinfo").write_text(f"41 31 0:38 / {str(mount).replace(' ', chr(92) + '040')} rw - cgroup2 cgroup2 rw\n")
    found = [limit for limit in thread_limits(proc) if "pids.max" in limit.name]
    assert [(limit.name, limit.limit, limit.used) for limit in found] == [
        (f"pids.max of {mount}/a.slice", 90, 60),
        (f"pids.max of {mount}/a.slice/b.scope", 400, 10),
    ]
    assert threads_left(proc) == 30


def test_groups_of_the_first_version_are_found_in_a_container(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "pids"
    group(mount / "inner", "max", 10)
    (mount / "pids.max").write_text("64\n")
    (mount / "pids.current").write_text("60\n")
    (proc / "self/cgroup").write_text("9:memory:/elsewhere\n8:cpu,pids:/docker/abc/inner\n0::/\n")
    (proc / "self/mountinfo").write_text(
        f"39 31 0:36 /docker/abc {mount} rw,relatime - cgroup cgroup rw,cpu,pids\n"
        f"40 31 0:37 / {tmp_path}/memory rw,relatime - cgroup cgroup rw,memory\n"
    )
    assert thread_limits(proc)[0].name == f"pids.max of {mount}"
    assert threads_left(proc) == 4


def test_a_machine_without_readable_limits_is_unlimited(tmp_path: Path) -> None:
    assert thread_limits(tmp_path) == []
    assert threads_left(tmp_path) is None
    assert room_for(100, limits=[]) is None
    require_room(1000, 100, limits=[])


def test_room_is_what_is_left_without_what_is_promised_and_kept_free() -> None:
    limits = [
        ResourceLimit("RLIMIT_NPROC", 4096, 3552, "raise it with `ulimit -u`"),
        ResourceLimit("kernel.threads-max", 192_686, 3600),
    ]
    assert room_for(212, limits) == 2  # 544 - 64 = 480
    assert room_for(212, limits, pending=100) == 1
    require_room(2, 212, limits)
    with pytest.raises(WorkerFailed) as refused:
        require_room(3, 212, limits)
    assert str(refused.value) == (
        "3 more games do not fit: each game takes 212 threads, 544 are left of 4,096 (RLIMIT_NPROC), 64 are kept free:"
        " room for 2 more. Start fewer games here, spread them over more machines, or raise it with `ulimit -u`."
    )


def test_open_files_are_counted() -> None:
    before = open_file_limit()
    assert before is not None
    with open(os.devnull), open(os.devnull):
        during = open_file_limit()
    assert during is not None
    assert during.limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert during.used == before.used + 2
