"""Games as processes: exit codes, logs, thread limits, and no processes left. Real programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludus.errors import WorkerFailed
from ludus.io.rotating_log import previous_path
from ludus.process import identity, procfs
from ludus.process.commands import command as process
from ludus.process.commands.command import GameExit, GameProcess, Games
from ludus.process.commands.thread_limits import ResourceLimit
from tests.tools import need
from tests.waiting import wait_until

PYTHON = (sys.executable, "-I", "-S", "-c")
GONE_S = 5.0  # measured: at most 0.4 s, on a machine with nine times as much to do as it can

STUBBORN = textwrap.dedent(
    """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def stay():
        open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
        time.sleep(600)

    if os.fork() == 0:  # an ordinary child
        stay()
    if os.fork() == 0:  # one that leaves the session
        os.setsid()
        stay()
    if os.fork() == 0:  # a daemon
        os.setsid()
        if os.fork() == 0:
            stay()
        os._exit(0)
    if os.fork() == 0:  # one that is another program, with an empty environment
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", SELF, sys.argv[1]], {})
        os._exit(0)
    stay()
    """
)
_AGAIN = "import os, sys, time; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); time.sleep(600)"
STUBBORN = STUBBORN.replace("SELF", repr(_AGAIN))
STUBBORN_PROCESSES = 5


@pytest.fixture
def games() -> Iterator[Games]:
    started = Games()
    yield started
    started.close(grace_s=0)


def stubborn(games: Games, folder: Path) -> tuple[GameProcess, dict[int, str]]:
    """A game of five processes, which do all they can to survive it, and when each of them began."""
    folder.mkdir()
    game = games.start([*PYTHON, STUBBORN, str(folder)], log=folder.with_suffix(".log"), kind="stubborn")
    return game, marked(folder, STUBBORN_PROCESSES)


def marked(folder: Path, count: int) -> dict[int, str]:
    wait_until(lambda: len(list(folder.iterdir())) == count, 20.0)
    began = {int(file.name): identity.start_time(int(file.name)) for file in folder.iterdir()}
    return {pid: since for pid, since in began.items() if since is not None}


def living(began: dict[int, str]) -> list[int]:
    return [pid for pid, since in began.items() if identity.is_alive(pid, since)]


# -- how they end


def test_the_exit_of_a_game_has_its_code_and_last_lines(games: Games, tmp_path: Path) -> None:
    log = tmp_path / "deeper" / "game.log"
    script = "import os, sys; print('hello', os.getcwd(), os.environ['MAP']); print('oh no', file=sys.stderr); sys.exit(3)"
    game = games.start([*PYTHON, script], log=log, environment={"MAP": "dust"}, directory=tmp_path)
    ended = game.wait(20)
    assert ended is not None
    assert (ended.code, ended.killed, str(ended)) == (3, False, "ended with code 3")
    assert sorted(ended.last_lines) == [f"hello {tmp_path} dust", "oh no"]
    assert sorted(log.read_text().splitlines()) == sorted(ended.last_lines)
    assert game.name == "game"
    wait_until(lambda: games.running == [], 5)


def test_a_crashed_game_is_distinguished_from_one_that_ends(games: Games, tmp_path: Path) -> None:
    game = games.start([*PYTHON, "import os; print('here', flush=True); os.kill(os.getpid(), 11)"], log=tmp_path / "log")
    ended = game.wait(20)
    assert ended is not None
    assert (ended.code, str(ended), ended.last_lines) == (-11, "ended by signal SIGSEGV", ("here",))


def test_on_exit_is_called_once(games: Games, tmp_path: Path) -> None:
    told: list[tuple[str, GameExit | None]] = []
    heard = threading.Event()

    def note(game: GameProcess) -> None:
        told.append((game.name, game.exit))
        heard.set()
        raise RuntimeError("and what it does with it is its own business")

    games.start([*PYTHON, "raise SystemExit(4)"], log=tmp_path / "log", name="one", on_exit=note)
    assert heard.wait(20)
    following = games.start([*PYTHON, "pass"], log=tmp_path / "log").wait(20)
    assert following is not None
    assert [(name, ended and ended.code) for name, ended in told] == [("one", 4)]


@pytest.mark.parametrize(
    ("command", "directory", "log", "says"),
    [
        (["no-such-game"], "", "log", "No such file or directory: no-such-game"),
        (["/etc/passwd"], "", "log", "Permission denied: /etc/passwd"),
        (["true"], "missing", "log", "No such file or directory"),
        (["true"], "", ".", "Is a directory"),
        (["a\0b"], "", "log", "null byte"),
    ],
)
def test_a_start_that_fails_reports_the_reason(
    games: Games, tmp_path: Path, command: list[str], directory: str, log: str, says: str
) -> None:
    with pytest.raises(WorkerFailed, match=re.escape(says)) as failed:
        games.start(command, log=tmp_path / log, directory=tmp_path / directory)
    assert repr(command) in failed.value.hint
    wait_until(lambda: games.running == [], 5)


def test_a_game_that_is_asked_to_stop_has_time_for_it(games: Games, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved'), sys.exit(0)))\n"
        "os.write(1, b'up\\n'); time.sleep(600)"
    )
    game = games.start([*PYTHON, script], log=tmp_path / "log")
    wait_until(lambda: game.last_lines() == ["up"], 20)
    ended = game.stop(grace_s=20)
    assert (ended.code, ended.killed, ended.last_lines) == (0, False, ("up", "saved"))
    assert game.stop(grace_s=1) is ended


def test_what_a_wrapper_started_has_time_as_well(games: Games, tmp_path: Path) -> None:
    """A wrapper (a shell, xvfb-run) ends at once when it is asked to; the game that it runs still saves."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.3); os.write(1, b'saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); os.write(1, b'up\\n'); time.sleep(600)"
    )
    game = games.start(["sh", "-c", f"{sys.executable} -I -S {inner} & wait"], log=tmp_path / "log")
    wait_until(lambda: game.last_lines() == ["up"], 20)
    ended = game.stop(grace_s=20)
    assert (ended.code, ended.last_lines) == (-signal.SIGTERM, ("up", "saved"))
    assert not ended.killed


def test_a_stopped_process_can_be_stopped(games: Games, tmp_path: Path) -> None:
    game = games.start(["sleep", "600"], log=tmp_path / "log")
    os.kill(game.pid, signal.SIGSTOP)
    assert game.stop(grace_s=20).code == -signal.SIGTERM


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["small", "more than a socket holds"])
def test_a_spawner_that_does_not_answer_is_not_waited_for_without_end(
    games: Games, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    first = games.start(["sleep", "600"], log=tmp_path / "first")
    monkeypatch.setattr(process, "_START_TIMEOUT_S", 0.3)
    raised: list[BaseException] = []

    def start() -> None:
        with pytest.raises(WorkerFailed, match=r"The game second was not started within 0\.3 s") as caught:
            games.start(["sleep", "600"], log=tmp_path / "second", environment={"A": "x" * size})
        raised.append(caught.value)

    os.kill(games.spawner_pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        thread.join(20)
        assert raised, "it still waits"
    finally:
        os.kill(games.spawner_pid, signal.SIGCONT)
    monkeypatch.undo()
    third = games.start(["true"], log=tmp_path / "third").wait(20)
    assert third is not None
    assert third.code == 0
    wait_until(lambda: games.running == [first], 20)


def test_what_the_owner_does_with_signals_is_not_handed_down(tmp_path: Path) -> None:
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGTERM])
    try:
        with Games() as games:
            game = games.start(["cat", "/proc/self/status"], log=tmp_path / "log")
            assert game.wait(20) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2, signal.SIGTERM])
        for number, handler in ignored.items():
            signal.signal(number, handler)
    status = dict(line.split(":\t", 1) for line in (tmp_path / "log").read_text().splitlines() if ":\t" in line)
    ours = sum(1 << (number - 1) for number in (*ignored, signal.SIGUSR2, signal.SIGTERM))
    assert int(status["SigBlk"], 16) & ours == int(status["SigIgn"], 16) & ours == 0
    assert int(status["NSsid"]) == game.pid


# -- nothing is left


def test_nothing_of_a_game_survives_its_stop_and_other_games_do(games: Games, tmp_path: Path) -> None:
    game, began = stubborn(games, tmp_path / "one")
    other, others = stubborn(games, tmp_path / "two")
    assert len(began) == len(others) == STUBBORN_PROCESSES
    ended = game.stop(grace_s=0.1)
    assert (ended.code, ended.killed, ended.left) == (-signal.SIGKILL, True, ())
    assert living(began) == []
    assert len(living(others)) == STUBBORN_PROCESSES
    assert other.exit is None


def test_nothing_of_a_game_survives_its_own_end(games: Games, tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    leaving = STUBBORN.rsplit("stay()", 1)[0] + (
        f"\nwhile len(os.listdir(sys.argv[1])) < {STUBBORN_PROCESSES - 1}: time.sleep(0.01)\nsys.exit(7)"
    )
    game = games.start([*PYTHON, leaving, str(folder)], log=tmp_path / "log")
    ended = game.wait(20)
    assert ended is not None
    assert (ended.code, ended.killed) == (7, False)
    assert len(list(folder.iterdir())) == STUBBORN_PROCESSES - 1
    assert [file.name for file in folder.iterdir() if identity.start_time(int(file.name))] == []


def test_a_game_does_not_end_with_the_thread_that_started_it(games: Games, tmp_path: Path) -> None:
    """The kernel's signal for a parent's death is bound to a thread; it must not be this one."""
    started: list[GameProcess] = []
    thread = threading.Thread(target=lambda: started.append(games.start(["sleep", "600"], log=tmp_path / "log")))
    thread.start()
    thread.join(20)
    assert started[0].wait(0.2) is None
    assert started[0].stop(grace_s=5).code == -signal.SIGTERM


_OWNER = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    from ludus.process.commands.command import Games
    games = Games()
    started = []
    for folder in map(Path, sys.argv[2:]):
        folder.mkdir()
        game = games.start([sys.executable, "-I", "-S", "-c", sys.argv[1], str(folder)], log=folder.with_suffix(".log"))
        started.append(game)
    print(json.dumps({"spawner": games.spawner_pid, "guards": [game.guard for game in started]}), flush=True)
    time.sleep(600)
    """
)


@pytest.mark.parametrize("victims", [["owner"], ["spawner", "owner"], ["guard", "owner"]])
def test_no_game_survives_its_owner(victims: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / f"game-{i}" for i in range(3)]
    with subprocess.Popen([sys.executable, "-c", _OWNER, STUBBORN, *map(str, folders)], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            told = json.loads(owner.stdout.readline())
            began = {pid: since for folder in folders for pid, since in marked(folder, STUBBORN_PROCESSES).items()}
            ours = {pid: since for pid in (told["spawner"], *told["guards"]) if (since := identity.start_time(pid)) is not None}
            assert len(living(began)) == 3 * STUBBORN_PROCESSES
            assert len(ours) == 4
            for victim in victims:
                os.kill({"owner": owner.pid, "spawner": told["spawner"], "guard": told["guards"][0]}[victim], signal.SIGKILL)
            wait_until(lambda: living(began | ours) == [], GONE_S)
        finally:
            owner.kill()


def test_games_end_with_their_spawner_and_the_next_have_another(games: Games, tmp_path: Path) -> None:
    game, began = stubborn(games, tmp_path / "game")
    os.kill(games.spawner_pid, signal.SIGKILL)
    ended = game.wait(GONE_S + 10)
    assert ended is not None
    assert ended.killed
    assert living(began) == []
    following = games.start([*PYTHON, "raise SystemExit(5)"], log=tmp_path / "log").wait(20)
    assert following is not None
    assert following.code == 5


def test_a_game_ends_with_its_guard_and_others_do_not(games: Games, tmp_path: Path) -> None:
    game, began = stubborn(games, tmp_path / "one")
    _, others = stubborn(games, tmp_path / "two")
    os.kill(game.guard, signal.SIGKILL)
    ended = game.wait(20)
    assert ended is not None
    assert (ended.code, str(ended)) == (None, "ended because its supervisor ended")
    wait_until(lambda: living(began) == [], GONE_S)
    assert len(living(others)) == STUBBORN_PROCESSES


def test_many_games_come_and_go_and_leave_nothing(tmp_path: Path) -> None:
    def here() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before_all, processes = here(), set(procfs.list_descendants(os.getpid()))
    with Games() as games:
        for _ in range(2):
            started = [games.start(["sleep", "600"], log=tmp_path / f"{i}.log") for i in range(20)]
            assert len(games.running) == 20
            for game in started:
                game.ask_to_stop()
            assert [game.stop().code for game in started] == [-signal.SIGTERM] * 20
            wait_until(lambda: games.running == [], 5)
    assert here() == before_all
    assert set(procfs.list_descendants(os.getpid())) <= processes
    with pytest.raises(WorkerFailed, match="closed"):
        games.start(["true"], log=tmp_path / "log")


def test_one_that_never_stands_still_is_caught(games: Games, tmp_path: Path) -> None:
    """Its number changes a thousand times a second."""
    hop = "import os\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()"
    wrapper = f"{sys.executable} -I -S -c '{hop}' & sleep 600"
    game = games.start(["sh", "-c", wrapper], log=tmp_path / "log")
    wait_until(lambda: len(procfs.list_descendants(game.guard)) >= 2, 20)
    ended = game.stop(grace_s=0)
    assert ended.left == ()
    wait_until(lambda: procfs.list_descendants(games.spawner_pid) == [], 5)  # the guard itself is about to end


# -- what they say


_FLOOD = textwrap.dedent(
    """
    import os
    words = [bytes([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676]) for i in range(4000)]
    block = b"".join(b"%s %d\\n" % (word, i) for i, word in enumerate(words))
    for _ in range(500):
        rest = block
        while rest:
            rest = rest[os.write(1, rest):]
    print("that was all")
    """
)
FLOOD_LINES = 500 * 4000


def test_a_flood_is_read_as_fast_as_it_comes_and_does_not_fill_the_disk(games: Games, tmp_path: Path) -> None:
    """Two million lines that differ by more than numbers: most of them are only counted."""
    log = tmp_path / "log"
    ended = games.start([*PYTHON, _FLOOD], log=log, log_bytes=2_000_000).wait(60)
    assert ended is not None
    assert (ended.code, ended.last_lines[-1]) == (0, "that was all")
    assert not previous_path(log).exists()
    lines = log.read_text().splitlines()
    dropped = [
        int(found[1].replace(",", "")) for line in lines if (found := re.fullmatch(r"… ([\d,]+) lines \(.*too fast.*", line))
    ]
    left_out = [
        int(found[1].replace(",", "")) for line in lines if (found := re.fullmatch(r"… ([\d,]+) more lines? like .*", line))
    ]
    literal = len([line for line in lines if not line.startswith("…")])
    assert literal + sum(dropped) + sum(left_out) == FLOOD_LINES + 1
    assert sum(dropped) > FLOOD_LINES / 2


def test_a_line_in_every_frame_is_counted(games: Games, tmp_path: Path) -> None:
    script = "import os\nfor i in range(5000): os.write(1, b'begin\\nframe %d\\nrender done\\n' % (i // 1000))\nprint('over')"
    game = games.start([*PYTHON, script], log=tmp_path / "log")
    assert game.wait(30) is not None
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[6] == "… the last 3 lines were repeated 998 times"
    assert lines[-1] == "over"
    assert len(lines) == 5 * 7 + 1


# -- what they take


_THREADS = textwrap.dedent(
    """
    import sys, threading, time
    threading.stack_size(65536)
    for _ in range(int(sys.argv[1]) - 1):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    print("all started", flush=True)
    time.sleep(600)
    """
)


def test_the_threads_of_a_game_and_of_what_it_starts_are_counted(games: Games, tmp_path: Path) -> None:
    inner = tmp_path / "game.py"
    inner.write_text(_THREADS)
    command = ["sh", "-c", f"{sys.executable} -I -S {inner} 300; true"]
    game = games.start(command, log=tmp_path / "log", kind="heavy")
    wait_until(lambda: game.threads == 301, 20)  # updated without a call of count_threads
    assert games.expected_threads("heavy") == 301
    assert games.expected_threads("another") == 1
    second = games.start(command, log=tmp_path / "log2", kind="heavy")
    assert games._pending_threads() >= 300 - second.threads, "it is going to start as many"
    wait_until(lambda: second.count_threads() == 301, 20)
    assert games._pending_threads() == 0
    game.stop(grace_s=0)
    second.stop(grace_s=0)
    wait_until(lambda: games.running == [], 5)
    assert games.expected_threads("heavy") == 301, "they are remembered for the next"


def test_of_games_that_are_started_at_once_as_many_are_as_fit_in(
    games: Games, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100 threads each, in 400 of which 40 are kept free."""

    def limits() -> list[ResourceLimit]:
        time.sleep(0.02)  # another thread may read the limits meanwhile
        return [ResourceLimit("a limit", 400, 0)]

    monkeypatch.setattr(process, "thread_limits", limits)

    def start(number: int) -> str:
        try:
            games.start(["sleep", "600"], log=tmp_path / f"{number}.log", threads=100)
        except WorkerFailed as error:
            return error.message
        return ""

    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(start, range(8)))
    assert len(games.running) == messages.count("") == 3
    assert all("does not fit" in message for message in messages if message)


_TOO_MANY = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from ludus.errors import WorkerFailed
    from ludus.process.commands.thread_limits import thread_limits
    from ludus.process.commands.command import Games
    used = sum(int(line.split()[1]) for path in Path("/proc").glob("[0-9]*/status") for line in path.read_text().splitlines() if line.startswith("Threads"))
    resource.setrlimit(resource.RLIMIT_NPROC, (used + 700, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    with Games() as games:
        try:
            for i in range(20):
                games.start([sys.executable, "-I", "-S", "-c", sys.argv[1], "100"], log=Path(sys.argv[2]) / f"{i}.log", kind="heavy", threads=100)
        except WorkerFailed as error:
            started = games.running
            for game in started:
                while game.last_lines(1) != ["all started"]:
                    assert game.wait(0.02) is None, game.exit
            print(len(started), error)
    """
)  # fmt: skip


def test_one_game_too_many_is_refused_before_the_limit_is_hit(tmp_path: Path) -> None:
    """Also while those before it have not started their threads yet. Root is exempt from the limit except in a user namespace."""
    wrapper = [need("unshare"), "-Ur"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", _TOO_MANY, _THREADS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    count, _, message = done.stdout.partition(" ")
    assert 4 <= int(count) <= 6  # (700 - 64) / 101, and other processes come and go
    assert "1 more game does not fit: each game takes 101 threads" in message
    assert "(RLIMIT_NPROC)" in message
    assert "ulimit -u" in message
