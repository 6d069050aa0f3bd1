"""Games that are forks of an imported module: as fresh as a new program, and ended as reliably."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import WorkerFailed
from ludus.process import identity
from ludus.process.commands import command as process
from ludus.process.commands.command import GameProcess, Games
from tests.process.test_command import GONE_S, STUBBORN, STUBBORN_PROCESSES, living, marked
from tests.waiting import wait_until

GAME = textwrap.dedent(
    """
    import atexit, ctypes, json, logging, logging.handlers, os, random, signal, sys, time

    IMPORTED_BY = os.getpid()
    NUMBERS = random.random()
    atexit.register(print, "what is registered while it is imported is not run")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, print)
    if __name__ != "__main__":
        print("said once, to nobody", end="")
    prepared = 0

    def prepare():
        global prepared
        prepared += 1

    def looked():
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        targets = {fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in "012"}
        return {
            "environment": dict(os.environ), "directory": os.getcwd(), "arguments": sys.argv[1:],
            "signals": [status["SigIgn"], status["SigCgt"], status["SigBlk"]],
            "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
            "wakeup": signal.set_wakeup_fd(-1), "alone": os.getsid(0) == os.getpgid(0) == os.getpid(), "umask": os.umask(0o22),
            "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1], "targets": targets,
            "read": sys.stdin.read(), "threads": status["Threads"].strip(), "main": sys.modules["__main__"].main.__name__,
            "traps": status["NSpid"].strip() == str(os.getpid()),
        }

    def main(argv):
        what = argv[0] if argv else ""
        if what == "look":
            imported = {"imported_by": IMPORTED_BY, "prepared": prepared, "random": [random.random(), random.random()], "pid": os.getpid()}
            found = {"same": looked(), "other": imported}
            with open(argv[1], "w") as file:
                json.dump(found, file)
        elif what == "raise":
            raise RuntimeError("it is broken")
        elif what == "exit":
            sys.exit(json.loads(argv[1]))
        elif what == "say":
            print("ün", end="")
            print("err", file=sys.stderr)
            global memory
            memory = logging.handlers.MemoryHandler(10, target=logging.StreamHandler(sys.stdout))
            memory.emit(logging.LogRecord("n", 20, "p", 1, " logged", (), None))
        elif what == "crash":
            ctypes.string_at(0)
        elif what == "stubborn":
            sys.argv[1:] = argv[1:]
            exec(argv[2])
        elif what == "sleep":
            os.write(1, b"up\\n")
            time.sleep(600)
        return 7 if what == "look" else None

    if __name__ == "__main__":
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        atexit.unregister(print)
        prepare()
        sys.exit(main(sys.argv[1:]))
    """
)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "warmgame.py").write_text(GAME)
    return folder


@pytest.fixture(scope="module")
def games(folder: Path) -> Iterator[Games]:
    with Games(warm="warmgame", environment=environment(folder)) as games:
        yield games


def stubborn(games: Games, folder: Path) -> tuple[GameProcess, dict[int, str]]:
    folder.mkdir()
    game = games.start(["warmgame", "stubborn", str(folder), STUBBORN], warm=True, log=folder.with_suffix(".log"))
    return game, marked(folder, STUBBORN_PROCESSES)


# -- as fresh as a new program


def test_a_fork_finds_what_a_program_finds(games: Games, folder: Path, tmp_path: Path) -> None:
    """The oracle is the same game, executed by the same guard."""
    others = [games.start(["other", "sleep"], warm=True, log=tmp_path / "other.log") for _ in range(2)]
    room = tmp_path / "room"
    room.mkdir()
    kwargs: dict[str, Any] = {"environment": {"PYTHONPATH": str(folder), "MAP": "düst", "LC_ALL": "C.UTF-8"}, "directory": room}
    plain = [sys.executable, "-P", "-X", "faulthandler", "-m", "warmgame", "look", "seen.json"]
    found: list[dict[str, Any]] = []
    for number, (command, warm) in enumerate(
        [(plain, False), (["a", "look", "seen.json"], True), (["a", "look", "seen.json"], True)]
    ):
        game = games.start(command, warm=warm, log=tmp_path / f"{number}.log", name=f"game-{number}", **kwargs)
        ended = game.wait(20)
        assert ended is not None
        assert (ended.code, ended.last_lines) == (7, ())
        found.append(json.loads((room / "seen.json").read_text()))
        assert found[-1]["other"]["pid"] == game.pid
    first, second, third = found
    assert first["same"] == second["same"] == third["same"]
    assert first["same"]["descriptors"] == [0, 1, 2]
    assert first["same"]["environment"]["MAP"] == "düst"
    assert second["other"]["imported_by"] == third["other"]["imported_by"] == games.spawner_pid
    assert second["other"]["prepared"] == 1
    assert second["other"]["random"] != third["other"]["random"]
    for other in others:
        assert other.stop(grace_s=5).code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nothing"], 0, ()),
        (["exit", "3"], 3, ()),
        (["exit", "null"], 0, ()),
        (["exit", '"the map is missing"'], 1, ("the map is missing",)),
        (["raise"], 1, ("RuntimeError: it is broken",)),
        (["say"], 0, ("err", "ün logged")),
    ],
)
def test_its_end_is_that_of_a_program(games: Games, tmp_path: Path, words: list[str], code: int, says: tuple[str, ...]) -> None:
    ended = games.start(["warmgame", *words], warm=True, log=tmp_path / "log").wait(20)
    assert ended is not None
    assert (ended.code, ended.killed) == (code, False)
    assert ended.last_lines[-len(says) :] == says if says else ended.last_lines == ()


def test_a_crash_reports_its_traceback(games: Games, tmp_path: Path) -> None:
    ended = games.start(["warmgame", "crash"], warm=True, log=tmp_path / "log").wait(20)
    assert ended is not None
    assert ended.code == -signal.SIGSEGV
    assert any(re.search(r'warmgame\.py", line \d+ in main', line) for line in ended.last_lines)


def test_an_impossible_request_is_an_error(games: Games, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"No such file or directory: .*missing"):
        games.start(["warmgame"], warm=True, log=tmp_path / "log", directory=tmp_path / "missing")
    with pytest.raises(WorkerFailed, match="null byte"):
        games.start(["warmgame"], warm=True, log=tmp_path / "log", environment={"A": "a\0b"})
    wait_until(lambda: games.running == [], 5)


# -- ended as surely


def test_nothing_of_it_survives_its_stop_and_other_games_do(games: Games, tmp_path: Path) -> None:
    game, began = stubborn(games, tmp_path / "one")
    other, others = stubborn(games, tmp_path / "two")
    ended = game.stop(grace_s=0.1)
    assert (ended.code, ended.killed, ended.left) == (-signal.SIGKILL, True, ())
    assert living(began) == []
    assert len(living(others)) == STUBBORN_PROCESSES
    os.kill(other.guard, signal.SIGKILL)
    wait_until(lambda: living(others) == [], GONE_S)


def test_it_ends_with_its_spawner_and_the_next_is_warm_again(folder: Path, tmp_path: Path) -> None:
    with Games(warm="warmgame", environment=environment(folder)) as games:
        game, began = stubborn(games, tmp_path / "game")
        first = games.spawner_pid
        os.kill(first, signal.SIGKILL)
        ended = game.wait(GONE_S + 10)
        assert ended is not None
        assert ended.killed
        assert living(began) == []
        following = games.start(["warmgame", "exit", "5"], warm=True, log=tmp_path / "log").wait(20)
        assert following is not None
        assert (following.code, games.spawner_pid != first) == (5, True)


_OWNER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from ludus.process.commands.command import Games
    games = Games(warm=sys.argv[1])
    for folder in map(Path, sys.argv[3:]):
        folder.mkdir()
        games.start(["game", "stubborn", str(folder), sys.argv[2]], warm=True, log=folder.with_suffix(".log"))
    print(games.spawner_pid, flush=True)
    time.sleep(600)
    """
)


def test_it_does_not_survive_its_owner(folder: Path, tmp_path: Path) -> None:
    rooms = [tmp_path / "one", tmp_path / "two"]
    command = [sys.executable, "-c", _OWNER, "warmgame", STUBBORN, *map(str, rooms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(folder)) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline()
            began = {pid: since for room in rooms for pid, since in marked(room, STUBBORN_PROCESSES).items()}
            assert len(living(began)) == 2 * STUBBORN_PROCESSES
        finally:
            owner.kill()
        wait_until(lambda: living(began) == [], GONE_S)


def test_a_spawner_that_still_imports_does_not_survive_its_owner(folder: Path, tmp_path: Path) -> None:
    (folder / "endless.py").write_text("import time; time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, "endless", ""], stdout=subprocess.PIPE, env=environment(folder)
    ) as owner:
        try:
            assert owner.stdout is not None
            spawner = int(owner.stdout.readline())
            since = identity.start_time(spawner)
            assert since is not None
        finally:
            owner.kill()
        wait_until(lambda: not identity.is_alive(spawner, since), GONE_S)


# -- modules that cannot be kept warm


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken", "1 / 0", "ZeroDivisionError: division by zero"),
        ("leaves", "import sys; sys.exit('not here')", "SystemExit: not here"),
        ("mainless", "main = 3", r"mainless has no function main\(argv\)"),
        ("unprepared", "def main(argv): pass\ndef prepare(): raise OSError('no kernels')", "OSError: no kernels"),
        (
            "threaded",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\ndef main(argv): pass",
            "threaded has started 1 threads",
        ),
        ("gone", "import os; os._exit(9)", "its process ended with code 9 when it was imported, 3 times in a row"),
    ],
)
def test_a_module_that_cannot_be_warm_reports_the_reason_and_commands_still_start(
    folder: Path, tmp_path: Path, name: str, text: str, why: str
) -> None:
    if text:
        (folder / f"{name}.py").write_text(text)
    with Games(warm=name, environment=environment(folder)) as games:
        with pytest.raises(WorkerFailed, match=f"The module {name} cannot be kept warm: {why}"):
            games.start([name], warm=True, log=tmp_path / "log")
        assert re.search(why, games.warm_failure or "")
        ended = games.start(["cat", f"/proc/{games.spawner_pid}/status"], log=tmp_path / "log").wait(20)
        assert ended is not None
        assert ended.code == 0
        assert "Threads:\t1" in (tmp_path / "log").read_text()


def test_an_import_without_end_is_given_up(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "endless.py").write_text("import time; time.sleep(600)")
    with Games(warm="endless", environment=environment(folder)) as games:
        with pytest.raises(WorkerFailed, match=r"not imported within 0\.1 s"):
            games.wait_until_warm(0.1)
        assert games.warm_failure is None
        monkeypatch.setattr(process, "WARM_S", 0.2)
        ended = games.start(["true"], log=tmp_path / "log").wait(20)
        assert ended is not None
        assert games.warm_failure == "it was not imported within 0.2 s"


def test_close_does_not_wait_for_the_import(folder: Path) -> None:
    (folder / "endless.py").write_text("import time; time.sleep(600)")
    games = Games(warm="endless", environment=environment(folder))
    closing = threading.Thread(target=games.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert identity.start_time(games.spawner_pid) is None


def test_no_module_no_warm_game(tmp_path: Path) -> None:
    with Games() as games, pytest.raises(WorkerFailed, match="No module is kept warm here"):
        games.start(["warmgame"], warm=True, log=tmp_path / "log")
