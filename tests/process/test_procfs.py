"""Process information of /proc, compared with psutil."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from ludus.process import identity, procfs
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process and the number of its child."""
    environment = {**os.environ, "LUDUS_TEST_FAMILY": "with = and ü"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
        parent.kill()


def test_a_process_is_described_as_psutil_does() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        stat, known = procfs.read_stat(os.getpid()), psutil.Process()
        assert stat is not None
        assert (stat.parent, stat.threads) == (known.ppid(), known.num_threads())
        assert stat.start / os.sysconf("SC_CLK_TCK") + psutil.boot_time() == pytest.approx(known.create_time(), abs=1)
        times = known.cpu_times()
        assert stat.cpu / os.sysconf("SC_CLK_TCK") == pytest.approx(times.user + times.system, abs=0.5)
        assert stat.resident * os.sysconf("SC_PAGE_SIZE") == pytest.approx(known.memory_info().rss, rel=0.1)
        assert 0 < procfs.proportional_memory(os.getpid()) <= known.memory_info().rss * 1.1
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("lists", [True, False])
def test_children_are_found_with_and_without_the_list_of_the_kernel(lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lists:
        monkeypatch.setattr(procfs, "_has_children_file", lambda: False)
    with family() as (parent, child):
        assert procfs.list_children(parent.pid) == [child]
        assert parent.pid in procfs.list_children(os.getpid())
        assert {parent.pid, child} <= set(procfs.list_descendants(os.getpid()))
        assert child in procfs.list_pids()
        # Until the child has called exec, /proc may show no environment.
        wait_until(
            lambda: "LUDUS_TEST_FAMILY=with = and ü" in procfs.read_environment(child), what="the environment of the child"
        )


def test_a_process_that_ended_is_not_taken_for_one_that_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    since, ticks = identity.start_time(process.pid), identity.start_ticks(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        stat = procfs.read_stat(process.pid)  # its exit code is still there
        assert stat is not None
        assert stat.has_ended
        assert stat.is_exiting
        assert process.pid in procfs.list_children(os.getpid())
        assert process.pid not in procfs.list_descendants(os.getpid())
        assert identity.start_time(process.pid) is None
        assert since is None or not identity.is_alive(process.pid, since)
        assert not identity.is_alive_since(process.pid, ticks or 0)
    finally:
        process.wait()
    assert procfs.read_stat(process.pid) is None
    assert procfs.read_environment(process.pid) == set()


def test_another_process_with_the_number_is_not_taken_for_the_first() -> None:
    ticks = identity.start_ticks(os.getpid())
    assert ticks is not None
    assert identity.is_alive_since(os.getpid(), ticks)
    assert identity.is_alive_since(os.getpid(), 0)
    assert not identity.is_alive_since(os.getpid(), ticks + 1)


def test_without_a_proc_psutil_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "is_available", lambda: False)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        since = identity.start_time(process.pid)
        assert since is not None
        assert identity.is_alive(process.pid, since)
        assert identity.is_alive_since(process.pid, 0)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not identity.is_alive(process.pid, since)
    finally:
        process.communicate()
    assert identity.start_time(process.pid) is None
    assert not identity.is_alive_since(process.pid, 0)


def test_open_files_and_threads_are_listed() -> None:
    with open(os.devnull) as file:
        assert file.fileno() in procfs.list_open_files()
    assert psutil.Process().num_fds() == pytest.approx(len(procfs.list_open_files()), abs=2)
    assert len(procfs.list_thread_names()) == psutil.Process().num_threads()


def test_a_process_can_be_named() -> None:
    script = "from ludus.process import children, identity, procfs; children.set_name('a rather long name'); print(procfs.list_thread_names())"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "['a rather long n']"


def test_the_namespace_is_that_of_the_kernel() -> None:
    assert f"pid:[{procfs.pid_namespace()}]" == os.readlink("/proc/self/ns/pid")
    assert len(procfs.boot_id()) == 36
