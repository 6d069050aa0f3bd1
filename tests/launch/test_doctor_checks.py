"""The doctor's checks on this machine, with real servers, programs and limits, intact and broken."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.display import headless
from ludus.display.game_screen import MIN_OPENGL
from ludus.errors import UsageError
from ludus.launch.doctor import local_checks
from ludus.launch.doctor.checks import (
    directories,
    env_smoke_test,
    executable,
    graphics,
    limits,
    ports,
    redis,
    shadowed_modules,
    store,
    token_file,
)
from ludus.launch.doctor.finding import DoctorFinding
from ludus.launch.doctor.local_checks import CheckThread, DoctorRequest, run_local_checks
from ludus.process import cgroups
from ludus.storage.base import Bytes
from ludus.storage.local import LocalStore
from ludus.transport.message_stream import open_message_stream
from tests.redis_server import RedisServer
from tests.s3 import SECRET, Server
from tests.tools import need

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

NOBODY = 65534


def by_check(findings: Any) -> dict[str, DoctorFinding]:
    return {finding.check: finding for finding in findings}


# -- Redis ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), aof=False) as server:
        yield server


def test_a_redis_check_leaves_no_keys(redis_server: RedisServer) -> None:
    run = open_message_stream(redis_server.full_url, "a-run", 10)
    run.push(b"a message of a run", 5.0)
    client = redis_server.client()
    before = sorted(client.keys("*"))
    for url in (redis_server.full_url, redis_server.player_url):
        found = redis.check_redis(url)
        assert found.status in ("ok", "warning"), found  # the latter: a busy machine
        assert "written, read back and removed" in found.found
    assert sorted(client.keys("*")) == before
    assert [bytes(delivery.data) for delivery in run.pull(2, 1.0)] == [b"a message of a run"]
    run.drop()
    run.close()
    client.close()


@pytest.mark.parametrize("password", ["wrong-password-77", ""])
def test_a_wrong_password_is_reported_without_showing_it(
    redis_server: RedisServer, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LUDUS_MEMORY_PASSWORD", raising=False)
    url = redis_server.url.replace("://", f"://:{password}@") if password else redis_server.url
    found = by_check(run_local_checks(DoctorRequest(memory=url, launcher=True)).findings)["memory server"]
    assert found.status == "failed"
    assert "password" in found.found
    assert "LUDUS_MEMORY_PASSWORD" in found.fix
    assert "wrong-password-77" not in str(found.to_json())


def test_an_unreachable_redis_is_a_finding_within_its_time_limit(redis_server: RedisServer, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = redis.check_redis(f"redis://127.0.0.1:{taken.getsockname()[1]}")
    assert away.status == "failed"
    assert "127.0.0.1" in away.found
    with redis_server.paused():
        silent = redis.check_redis(redis_server.full_url)
    assert silent.status == "failed"


# -- stores ---------------------------------------------------------------------------------------------------------------


def test_an_s3_check_leaves_no_keys(s3_server: Server) -> None:
    url = s3_server.url("doctor-test")
    found = store.check_store(url)
    assert found.status in ("ok", "warning"), found
    assert re.search(r"write .* read .* create .* bundle .* ms", found.found)
    _, listed = s3_server.ask("GET", "ludus", "prefix=doctor-test")
    assert b"<Key>" not in listed


def test_an_unreachable_or_forbidden_s3_is_reported_without_the_secret(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LUDUS_S3_RETRY_S", "LUDUS_S3_TIMEOUT_S"):
        monkeypatch.delenv(name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = store.check_store(s3_server.url("x", endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}"))
    assert away.status == "failed"
    assert away.fix
    wrong = SECRET[::-1]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    refused = by_check(run_local_checks(DoctorRequest(store=s3_server.url("x"), launcher=True)).findings)["store"]
    assert refused.status == "failed"
    assert wrong not in str(refused.to_json())


def test_a_check_of_a_local_store_leaves_no_files(tmp_path: Path) -> None:
    there = tmp_path / "new" / "runs"
    found = store.check_store(str(there))
    assert found.status in ("ok", "warning"), found
    assert f"({directories.filesystem_type(tmp_path)})" in found.found
    assert list(tmp_path.iterdir()) == [], "directories that were made for it are removed"
    (tmp_path / "file").write_text("")
    assert store.check_store(str(tmp_path / "file" / "runs")).status == "failed"


class Careless(LocalStore):
    """A store that ignores `overwrite=False`."""

    def __init__(self, url: str) -> None:
        super().__init__(url.partition("://")[2])

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        super().put(key, data)


def test_a_store_without_exclusive_creation_fails(tmp_path: Path) -> None:
    found = store.check_store(f"{__name__}:Careless://{tmp_path}")
    assert found.status == "failed"
    assert "two trainers could overwrite each other's run" in found.found
    assert list(tmp_path.iterdir()) == []


# -- spoilt on purpose ----------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """Run the doctor in another process, with a changed environment."""

    def run(*options: str, wrapper: tuple[str, ...] = (), before: Callable[[], None] | None = None, **environ: str) -> Any:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LUDUS_"))}
        done = subprocess.run(
            [*wrapper, sys.executable, "-P", "-m", "ludus.cli.main", "doctor", "--json", *options],
            env={**clean, "HOME": str(tmp_path), "LUDUS_STATE_DIR": str(tmp_path / "state"), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=before,
        )
        assert done.stdout, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        failures = [finding for finding in found if finding["status"] == "failed"]
        assert done.returncode == bool(failures), (failures, done.stderr)
        return done.returncode, {finding["check"]: finding for finding in found}

    return run


def test_too_few_open_files_are_reported(doctor: Callable[..., Any]) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))

    code, found = doctor("--quick", "--num-workers", "8", before=lower)
    assert code == 1
    assert found["open files"]["status"] == "failed"
    assert found["open files"]["fix"] == "ulimit -n 200"
    assert "100 (hard 200); needed 64 + 8 workers × 12 = 160" in found["open files"]["found"]


def test_known_issues_of_the_environment_are_named(doctor: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = doctor(
            *("--quick", "--port", port),
            LD_PRELOAD="libm.so.6",
            OMP_NUM_THREADS="999",
            LUDUS_JOB_TOKEN_FILE=str(token),
            RAY_ADDRESS="127.0.0.1:1",
            http_proxy="http://user:hunter22@proxy:3128",
        )
    assert code == 1
    assert {found[name]["status"] for name in ("ports", "token")} == {"failed"}
    assert found["token"]["fix"].startswith(f"chmod 600 {token}")
    assert port in found["ports"]["found"]
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "RAY_ADDRESS", "shadowed modules", "proxy"):
        assert found[name]["status"] == "warning", name
    assert "hunter22" not in str(found)
    assert "0123456789abcdef" not in str(found)


def _mounts() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    need("unshare")


def test_a_small_shared_memory_and_a_full_disk_are_reported(doctor: Callable[..., Any], tmp_path: Path) -> None:
    _mounts()
    runs = tmp_path / "runs"
    runs.mkdir()
    script = (
        f"mount -t tmpfs -o size=300m tmpfs /dev/shm && mount -t tmpfs -o size=1m tmpfs {runs} && "
        f'{{ head -c 2000000 /dev/zero > {runs}/full 2>/dev/null; exec "$@"; }}'
    )
    code, found = doctor("--num-workers", "16", "--store", str(runs), wrapper=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert code == 1
    assert found["shared memory"]["status"] == "failed"
    assert "300 MB, 300 MB free; needed 64 MB of weights + 16 rings × 32 MB = 576 MB" in found["shared memory"]["found"]
    assert found["disk for runs"]["status"] == "failed"
    assert "No space left" in found["disk for runs"]["found"]
    assert found["store"]["status"] == "failed"
    assert "No space left" in found["store"]["found"]


def test_the_directory_of_ludus_shm_is_checked(doctor: Callable[..., Any], tmp_path: Path) -> None:
    """Follows the fix of a small shared memory: set LUDUS_SHM to a directory with more room."""
    _mounts()
    wide, script = (
        tmp_path / "wide",
        'mount -t tmpfs -o size=300m tmpfs /dev/shm && mount -t tmpfs -o size=1g tmpfs "$0" && exec "$@"',
    )
    wide.mkdir()
    wrapper = ("unshare", "--mount", "sh", "-c", script, str(wide))
    _, found = doctor("--quick", "--num-workers", "16", wrapper=wrapper, LUDUS_SHM=str(wide))
    assert found["shared memory"]["status"] == "ok"
    assert f"LUDUS_SHM={wide}: 1.0 GB" in found["shared memory"]["found"]


def test_the_token_of_learners_and_actors_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> DoctorFinding:
        return by_check(run_local_checks(DoctorRequest(quick=True, launcher=True)).findings)["token"]

    for name in ("RAY_AUTH_TOKEN_PATH", "LUDUS_JOB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LUDUS_TOKEN_FILE", str(tmp_path / "gone"))
    assert told().status == "failed"
    assert f"{tmp_path}/gone (LUDUS_TOKEN_FILE) cannot be found" in told().found
    monkeypatch.delenv("LUDUS_TOKEN_FILE")
    assert told().status == "skipped"
    token = tmp_path / "state" / "token"
    token.parent.mkdir()
    token.write_text("feedfacecafebeef")
    token.chmod(0o644)
    assert (told().status, told().fix.split(";")[0]) == ("failed", f"chmod 600 {token}")
    token.chmod(0o600)
    assert (told().status, told().found) == ("ok", f"{token}, private")


def test_an_invalid_ludus_screen_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_SCREEN", "bogus")
    found = by_check(run_local_checks(DoctorRequest(quick=True)).findings)["display"]
    assert (found.status, "auto, xvfb, egl, none" in found.fix) == ("failed", True)


def test_ray_is_not_checked_on_a_submitting_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def without(package: str) -> str:
        if package in ("ray", "torch"):
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", without)
    found = by_check(run_local_checks(DoctorRequest(ray=True, launcher=True, quick=True)).findings)
    assert (found["ray"].status, found["torch"].status) == ("skipped", "skipped")
    assert by_check(run_local_checks(DoctorRequest(ray=True, quick=True)).findings)["ray"].status == "failed"


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers: every access blocks until it is unmounted."""
    _mounts()
    place = tmp_path / "hanging"
    place.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    system = ctypes.CDLL(None, use_errno=True)
    if system.mount(b"hanging", os.fsencode(place), b"fuse", 0, options) != 0:
        os.close(server)
        pytest.skip(f"no FUSE: {os.strerror(ctypes.get_errno())}")
    yield place
    os.close(server)  # then those who wait are told that it is gone
    system.umount2(os.fsencode(place), 2)


def test_a_hanging_file_system_does_not_delay_other_checks(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_checks, "CHECK_S", 0.5)
    monkeypatch.setenv("LUDUS_TOKEN_FILE", str(hanging / "token"))
    monkeypatch.setenv("LUDUS_SHM", str(hanging / "shm"))
    monkeypatch.setenv("PYTHONPATH", str(hanging))
    found = by_check(run_local_checks(DoctorRequest(quick=True, key="k")).findings)
    for check in ("token", "shadowed modules", "shared memory"):
        assert found[check].status == "failed", found[check]
        assert "no answer within" in found[check].found
    assert found["open files"].status == "ok", "the others are looked at all the same"


def test_the_process_limit_counts_the_users_threads() -> None:
    """Runs as another user: the limit does not apply to root."""
    if os.geteuid() != 0:
        pytest.skip("changing the user needs root")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            resource.setrlimit(resource.RLIMIT_NPROC, (37, 37))
            (bound, *_) = limits.inspect_threads(cgroups.Cgroups()).bounds
            os.write(writer, json.dumps([bound.name, bound.limit, bound.used]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        name, limit, used = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert (name, limit) == ("ulimit -u", 37)
    assert used >= 1


def test_a_hanging_check_is_one_finding() -> None:
    never = threading.Event()
    found = CheckThread("store", lambda: never.wait(60)).findings(time.monotonic() + 0.05)
    never.set()
    assert [(finding.check, finding.status) for finding in found] == [("store", "failed")]
    assert "no answer within" in found[0].found


def test_a_check_that_raises_is_one_finding() -> None:
    def broken() -> list[DoctorFinding]:
        raise ZeroDivisionError("of all things")

    (found,) = CheckThread("gpu", broken).findings(time.monotonic() + 5)
    assert found.status == "failed"
    assert "ZeroDivisionError: of all things" in found.found


def test_inspected_limits_agree_with_the_system() -> None:
    groups = cgroups.find_cgroups()
    memory = cgroups.read_memory(groups)
    assert memory is not None
    assert memory.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.free <= memory.total
    assert limits.inspect_cores(groups).usable == len(os.sched_getaffinity(0))
    assert limits.inspect_files().soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    names = [bound.name for bound in limits.inspect_threads(groups).bounds]
    assert {"kernel.threads-max", "kernel.pid_max"} <= set(names)
    assert all(bound.used > 0 for bound in limits.inspect_threads(groups).bounds)


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert ports.inspect_ports([port]).asked == {port: False}
    assert ports.inspect_ports([port]).asked == {port: True}


def test_tokens_are_found_by_variables_and_default_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / ".ray").mkdir()
    usual, own = tmp_path / ".ray" / "auth_token", tmp_path / "own"
    for path in (usual, own):
        path.touch(0o600)
        path.write_text("0" * 64)
    assert [token.path for token in token_file.inspect_tokens({"HOME": str(tmp_path)})] == [str(usual)]
    named = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(own), "LUDUS_JOB_TOKEN_FILE": str(tmp_path / "gone")}
    assert [(token.path, token.kind) for token in token_file.inspect_tokens(named)] == [
        (str(tmp_path / "gone"), "none"),
        (str(own), "file"),
    ]
    assert token_file.inspect_tokens({"HOME": str(tmp_path / "elsewhere")}) == []
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text("0" * 64)
    nothing_else = {"HOME": str(tmp_path / "elsewhere")}
    assert [token.path for token in token_file.inspect_tokens(nothing_else)] == [str(tmp_path / "state" / "token")]
    (chosen,) = token_file.inspect_tokens({**nothing_else, "LUDUS_TOKEN_FILE": str(own)})
    assert (chosen.path, chosen.named, chosen.role) == (str(own), "LUDUS_TOKEN_FILE", True)


def test_a_fingerprint_depends_on_token_and_key(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    one.write_text("a" * 64)
    same.write_text("a" * 64 + "\n")
    other.write_text("b" * 64)
    of = [token_file.fingerprint({"LUDUS_TOKEN_FILE": str(path)}, "key") for path in (one, same, other, tmp_path / "gone")]
    assert of[0] == of[1] != of[2]
    assert of[3] == ""
    assert token_file.fingerprint({"LUDUS_TOKEN_FILE": str(one)}, "another") != of[0]
    assert "a" * 8 not in of[0]


def test_a_package_on_pythonpath_does_not_shadow_itself(tmp_path: Path) -> None:
    import numpy

    real = Path(numpy.__file__).parents[1]
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    (found,) = shadowed_modules.check_shadowed_modules({"PYTHONPATH": str(real)}, tmp_path)
    assert str(tmp_path) in found.found
    assert str(real) not in found.found


# -- games ----------------------------------------------------------------------------------------------------------------


def test_libraries_of_system_programs_are_found() -> None:
    found = executable.check_executable(Path("/bin/ls").resolve())
    assert (found.status, "libraries found" in found.found) == ("ok", True), found


def test_an_executable_that_cannot_run_is_explained_and_never_run(tmp_path: Path) -> None:
    check = executable.check_executable

    def write(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o755)
        return tmp_path / name

    trap = tmp_path / "game.x86_64"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    assert check(trap).fix == f"chmod +x {trap}"
    trap.chmod(0o755)
    assert check(trap).status == "ok"
    assert not (tmp_path / "was-run").exists()
    assert str(trap) in check(tmp_path / "game").fix
    assert str(trap) in check(tmp_path).fix

    ls = Path("/bin/ls").read_bytes()
    lost = write("lost", ls.replace(b"libc.so.6\0", b"libq.so.6\0"))
    found = check(lost)
    assert (found.status, "libq.so.6" in found.found, "LD_LIBRARY_PATH" in found.fix) == ("failed", True, True)
    libc = executable.list_libraries(executable.LOADERS[platform.machine()], Path("/bin/ls"), {})
    assert libc["libc.so.6"]

    other = 183 if ls[18] != 183 else 62
    assert "this processor is" in check(write("foreign", ls[:18] + bytes([other, 0]) + ls[20:])).found
    assert "no-such-interpreter-9" in check(write("old", b"#!/usr/bin/env no-such-interpreter-9\n")).found
    assert "for Windows" in check(write("game.exe", b"MZ")).found
    assert check(write("text", b"hello")).status == "warning"
    with pytest.raises(UsageError, match="loader rejects"):
        check(write("half", ls[:3000]))


def test_a_unity_player_without_its_data_folder_is_reported(tmp_path: Path) -> None:
    need("gcc")
    source, player = tmp_path / "main.c", tmp_path / "player.x86_64"
    source.write_text("int f(void) { return 0; }\nint main(void) { return f(); }\n")
    library = tmp_path / "UnityPlayer.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,UnityPlayer.so", "-o", library, source], check=True, timeout=60)
    source.write_text("int f(void);\nint main(void) { return f(); }\n")
    subprocess.run(["gcc", "-Wl,-rpath,$ORIGIN", "-o", player, source, library], check=True, timeout=60)
    assert "player_Data does not exist" in executable.check_executable(player).found
    (tmp_path / "player_Data").mkdir()
    assert executable.check_executable(player).status == "ok"


def test_graphics_fall_back_to_a_private_screen_without_an_x_server() -> None:
    need("Xvfb")
    seen = graphics.inspect_graphics({**os.environ, "DISPLAY": ":4321"})
    found = by_check(graphics.check_graphics(seen, needed=True))
    assert found["X server"].status == "warning"
    assert "no X server answers at DISPLAY=:4321" in found["X server"].found
    assert {found[check].status for check in ("graphics", "Xvfb")} == {"ok"}
    for check in ("EGL", "OSMesa"):  # a machine need not have them: an engine that draws in software brings its own
        assert found[check].status == ("ok" if ctypes.util.find_library(check) else "skipped")
    assert seen is not None
    assert seen.backends["Xvfb"].number >= MIN_OPENGL
    with headless.screen("xvfb") as variables:
        seen = graphics.inspect_graphics({**os.environ, **variables})
    assert by_check(graphics.check_graphics(seen, needed=True))["X server"].status == "ok"


ENVIRONMENTS = """
import os, subprocess, threading, time
import gymnasium

def raising(**_):
    raise ValueError("the licence has run out")

def crashing(**_):
    os.abort()

def threaded(**_):
    for _ in range(7):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return gymnasium.make("CartPole-v1")

def with_games(**_):
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    games = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet),
        subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 600; done"], start_new_session=True, **quiet),
    ]
    launcher = subprocess.run("setsid sleep 600 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True)
    with open("games", "w") as file:
        print(*(game.pid for game in games), launcher.stdout, file=file)
    if os.environ.get("CRASHES"):
        os.abort()
    return gymnasium.make("CartPole-v1")

class Closing(gymnasium.Wrapper):
    def close(self):
        open("closed", "w").close()
        if os.environ.get("HANGS"):
            time.sleep(600)

def closing(**_):
    return Closing(gymnasium.make("CartPole-v1"))

def leaving(**_):
    raise SystemExit(3)

def on_a_screen(**_):
    from ludus.display import x11
    if why := x11.connection_error(os.environ):
        raise RuntimeError(why)
    return gymnasium.make("CartPole-v1")
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "my_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    return {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}


def test_the_smoke_test_measures_an_environment(environments: dict[str, str]) -> None:
    tried = env_smoke_test.run_smoke_test("my_environments:threaded", environments)
    assert tried.why == ""
    assert tried.threads == 7
    assert env_smoke_test.check_smoke_test(tried).status == "ok"


def test_the_smoke_test_explains_a_failure(environments: dict[str, str]) -> None:
    environments["LUDUS_SCREEN"] = "none"
    raised = env_smoke_test.run_smoke_test("my_environments:raising", environments)
    assert "the licence has run out" in raised.why
    assert "signal SIGABRT" in env_smoke_test.run_smoke_test("my_environments:crashing", environments).why
    assert "SystemExit: 3" in env_smoke_test.run_smoke_test("my_environments:leaving", environments).why


@pytest.mark.parametrize("crashes", ["", "1"])
def test_games_of_an_environment_end_with_the_smoke_test(environments: dict[str, str], tmp_path: Path, crashes: str) -> None:
    """In the same or other sessions, with output or without, ignoring signals, or orphaned."""
    tried = env_smoke_test.run_smoke_test(
        "my_environments:with_games", {**environments, "LUDUS_SCREEN": "none", "CRASHES": crashes}
    )
    assert ("signal SIGABRT" in tried.why) if crashes else (tried.why == "")
    games = [int(pid) for pid in (tmp_path / "games").read_text().split()]
    assert len(games) == 4
    assert not [pid for pid in games if _runs(pid)]
    assert crashes or tried.processes >= 4


def test_the_smoke_test_closes_the_environment(environments: dict[str, str], tmp_path: Path) -> None:
    assert env_smoke_test.run_smoke_test("my_environments:closing", environments).why == ""
    assert (tmp_path / "closed").exists()


@pytest.mark.long
def test_an_environment_that_hangs_on_close_still_has_a_result(environments: dict[str, str], tmp_path: Path) -> None:
    assert env_smoke_test.run_smoke_test("my_environments:closing", {**environments, "HANGS": "1"}).why == ""
    assert (tmp_path / "closed").exists()


def test_games_end_when_the_doctor_is_killed(environments: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import subprocess, time\n"
        "def game(**_):\n"
        "    started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    with open('pid.tmp', 'w') as file:\n"
        "        file.write(str(started.pid))\n"
        "    import os; os.rename('pid.tmp', 'pid')\n"
        "    time.sleep(600)\n"
    )
    script = "from ludus.launch.doctor.checks import env_smoke_test as trial; trial.run_smoke_test('waiting:game', timeout_s=500)"
    with subprocess.Popen([sys.executable, "-c", script], env={**environments, "LUDUS_SCREEN": "none"}) as asking:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline, "the game was not started"
            time.sleep(0.01)
        asking.kill()
    pid = int((tmp_path / "pid").read_text())
    while _runs(pid):
        assert time.monotonic() < deadline + 10, "the game would sleep for ten minutes"
        time.sleep(0.01)


def test_a_private_screen_of_an_environment_leaves_no_files(environments: dict[str, str], tmp_path: Path) -> None:
    need("Xvfb")
    temporary = tmp_path / "t"
    temporary.mkdir()
    tried = env_smoke_test.run_smoke_test(
        "my_environments:on_a_screen", {**environments, "LUDUS_SCREEN": "xvfb", "TMPDIR": str(temporary)}
    )
    assert tried.why == ""
    assert list(temporary.iterdir()) == []


def test_an_environment_that_needs_a_screen_gets_one(environments: dict[str, str]) -> None:
    need("Xvfb")
    tried = env_smoke_test.run_smoke_test("my_environments:on_a_screen", environments)
    assert tried.private_screen
    found = env_smoke_test.check_smoke_test(tried)
    assert (found.status, found.fix) == ("warning", "display: xvfb in config, or export LUDUS_SCREEN=xvfb")


def test_the_doctor_does_not_import_pytorch() -> None:
    script = (
        "import sys\nfrom ludus.launch.doctor.local_checks import DoctorRequest, run_local_checks\n"
        "found = run_local_checks(DoctorRequest(workers=1, quick=True))\nprint(len(found.findings), 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    count, torch, ray = done.stdout.split()
    assert int(count) >= 15
    assert (torch, ray) == ("False", "False")


def test_no_process_survives_a_timed_out_smoke_test(environments: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "with_game.py").write_text(
        "import subprocess, time\n"
        f"def game(**_):\n    started = subprocess.Popen(['sleep', '600'])\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\n    time.sleep(600)\n"
    )
    environments["LUDUS_SCREEN"] = "none"
    late = env_smoke_test.run_smoke_test("with_game:game", environments, timeout_s=4.0)
    assert "was not created, reset and stepped 5 times within 4 s" in late.why
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the game would sleep for ten minutes"
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
