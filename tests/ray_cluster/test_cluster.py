"""Address of a Ray cluster, requirements for joining it, and that a Ray started here leaves nothing behind."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import ludus
from ludus.errors import MissingExtra, Unreachable, UsageError, WorkerFailed
from ludus.process import identity
from ludus.process.job_env import JobEnv
from ludus.ray_cluster import cluster
from ludus.ray_cluster.cluster import (
    Cluster,
    address_of,
    check_membership,
    missing_nodes,
    probe_cluster,
    wait_for_nodes,
)
from ludus.ray_cluster.membership import Member
from ludus.ray_cluster.ray_temp_dir import sweep

ANSWER = {
    "address": "127.0.0.1:6379",
    "ray": "",
    "python": "",
    "members": [{"id": "a", "host": "here", "address": "127.0.0.1", "cores": 2, "alive": True, "head": True}],
}


# -- which one


@pytest.mark.parametrize(
    ("option", "environ", "meant"),
    [
        (None, {}, None),
        ("", {"RAY_ADDRESS": " "}, None),
        (None, {"RAY_ADDRESS": "a:1", "ip_head": "b:2"}, "a:1"),
        (None, {"ip_head": "b:2"}, "b:2"),
        ("c:3", {"RAY_ADDRESS": "a:1"}, "c:3"),
        ("local", {"RAY_ADDRESS": "a:1"}, "local"),
        ("auto", {}, "auto"),
        ("auto", {"RAY_ADDRESS": "a:1"}, "a:1"),
        ("10.0.0.7", {}, "10.0.0.7:6379"),
    ],
)
def test_the_option_comes_before_the_environment_and_nothing_means_no_ray(
    option: str | None, environ: dict[str, str], meant: str | None
) -> None:
    assert address_of(option, environ) == meant


@pytest.mark.parametrize("address", ["ray://head:10001", "head:port", ":6379", "head:0", "head:70000"])
def test_an_address_that_cannot_be_one_is_refused_by_name(address: str) -> None:
    with pytest.raises(UsageError, match=address):
        address_of(address, {})


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ludus\[cluster\]"):
        Cluster("local")


_FOR_SWEEPS = {"ray_tune.py"}  # imported only when a sweep begins: see the next test


def test_ray_is_imported_when_it_is_used_and_not_before() -> None:
    """Checked in the source files: importing all modules takes seconds."""
    for path in Path(ludus.__file__).parent.rglob("*.py"):
        if path.name in _FOR_SWEEPS:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "ray" for name in names), path


def test_no_module_imports_ray_at_import_time() -> None:
    for path in Path(ludus.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                assert "ludus.tuning.ray_tune" not in names, path


# -- joining


def test_without_a_listener_there_is_no_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match=f"no Ray cluster at 127.0.0.1:{port}"):
        Cluster(f"127.0.0.1:{port}")


def test_a_silent_listener_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(UsageError, match=r"did not reply within|cannot be joined"),
    ):
        probe_cluster(f"127.0.0.1:{mute.getsockname()[1]}", os.environ, within_s=3)


def test_sizes_are_not_for_a_cluster_that_runs_already() -> None:
    with pytest.raises(UsageError, match="--ray-num-cpus"):
        Cluster("127.0.0.1:6379", num_cpus=2)


def test_other_versions_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"Ray 1\.13\.0 \(here \d.*Python 2\.7 \(here 3"):
        check_membership({**ANSWER, "ray": "1.13.0", "python": "2.7.18"}, "head:6379")


def test_a_machine_outside_the_cluster_gets_a_hint_how_to_join() -> None:
    foreign = {**ANSWER["members"][0], "address": "192.0.2.77"}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"its nodes are 192\.0\.2\.77.*ray start --address=127\.0\.0\.1:6379"):
        check_membership({**ANSWER, "members": [foreign]}, "head:6379")


# -- the Ray of a job

JOB = JobEnv(("10.0.0.1", "10.0.0.2", "10.0.0.3"), 0, 20_000, None, 3, 0.3)


class Told(cluster.RayHead):
    """A head with scripted replies; the last one repeats."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.address, self._answers = JOB.head, list(answers)

    def query(self, timeout_s: float) -> dict[str, Any]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def there(*numbers: int, **other: str) -> dict[str, Any]:
    """The answer of a head with these nodes of JOB."""
    members = [Member(f"id{n}", "host", JOB.nodes[n], 2, True, n == 0, cluster.node_name(n), False, f"/tmp/{n}") for n in numbers]
    return {"address": JOB.head, "ray": "", "python": "", "members": [vars(m) for m in members], **other}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(cluster, "is_listening", lambda address, within_s: True)
    monkeypatch.setenv("LUDUS_JOB_ID", "j-1")
    return []


def test_a_job_with_a_ray_has_its_address_and_any_other_comes_first() -> None:
    environ = JOB.environment()
    assert address_of(None, environ) == "10.0.0.1:20000"
    assert address_of(None, environ | {"RAY_ADDRESS": "a:1"}) == "a:1"
    assert address_of("local", environ) == "local"
    assert address_of(None, replace(JOB, ray=0).environment()) is None


def test_work_begins_when_all_nodes_joined_and_waiting_is_announced_once(heard: list[str]) -> None:
    head = Told({}, there(0), there(0, 2), there(0, 1, 2))
    assert wait_for_nodes(JOB, head, time.monotonic() + 20, heard.append).directory == "/tmp/0"
    assert heard == ["waiting for nodes: 1 of 3 joined"]


def test_fewer_nodes_are_enough_if_the_job_allows_it_but_not_without_this_one(heard: list[str]) -> None:
    head = Told(there(1, 2), there(0, 1))
    assert wait_for_nodes(replace(JOB, ray=2), head, time.monotonic() + 20, heard.append).address == "10.0.0.1"


def test_missing_nodes_are_named_at_the_deadline(heard: list[str]) -> None:
    with pytest.raises(WorkerFailed, match=r"2 of 3 nodes joined within 0\.3 s; missing: 10\.0\.0\.3\..*jobs logs j-1") as failed:
        wait_for_nodes(JOB, Told(there(0, 1)), time.monotonic() + 0.3, heard.append)
    assert failed.value.exit_code == 1
    assert failed.value.final, "another attempt would wait as long again"


def test_a_head_that_never_comes_is_named_at_the_deadline(heard: list[str]) -> None:
    with pytest.raises(WorkerFailed, match=r"head of this job's Ray at 10\.0\.0\.1:20000 did not reply within 0\.3 s"):
        wait_for_nodes(JOB, Told({}), time.monotonic() + 0.3, heard.append)
    assert heard == []


def test_a_head_of_another_token_or_another_ray_is_not_waited_for(heard: list[str]) -> None:
    with pytest.raises(UsageError, match="does not accept the token"):
        wait_for_nodes(JOB, Told({"refused": "token"}), time.monotonic() + 20, heard.append)
    with pytest.raises(UsageError, match=r"runs Ray 1\.13\.0"):
        wait_for_nodes(JOB, Told(there(0, ray="1.13.0", python="3.11.0")), time.monotonic() + 20, heard.append)


def test_of_several_nodes_at_one_address_as_many_are_missed_as_did_not_come() -> None:
    assert missing_nodes(("10.0.0.1", "10.0.0.1", "10.0.0.2"), ["10.0.0.1"]) == ["10.0.0.1", "10.0.0.2"]
    assert missing_nodes(("10.0.0.1", "10.0.0.1"), ["10.0.0.1", "10.0.0.1"]) == []


# -- a Ray of ours

OWNER = """
import sys, time
from ludus.ray_cluster.cluster import Cluster
with Cluster("local", num_cpus=1, announce=lambda sentence: print("said", sentence, flush=True)) as cluster:
    import psutil
    print("home", cluster.home, flush=True)
    print("address", cluster.address, flush=True)
    print("pids", *[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
    sys.stdin.read()
"""


class Owner:
    """A process that has started Ray."""

    def __init__(self, home: Path) -> None:
        without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**without, "HOME": str(home)},
            text=True,
            process_group=0,
        )
        assert self.popen.stdout is not None
        self.said: list[str] = []
        told: dict[str, str] = {}
        for line in self.popen.stdout:
            key, _, value = line.strip().partition(" ")
            if key == "said":
                self.said.append(value)
            told[key] = value
            if key == "pids":
                break
        self.home, self.address = Path(told["home"]), told["address"]
        self.processes = [psutil.Process(int(pid)) for pid in told["pids"].split()]

    def end(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(30)

    def left(self) -> list[psutil.Process]:
        """What still runs, after a moment for what is about to end. (The last to end, the guard, is one of them.)"""
        _, alive = psutil.wait_procs(self.processes, timeout=20)
        return [*alive, *(process for process in psutil.process_iter(["cmdline"]) if self._is_ours(process))]

    def _is_ours(self, process: psutil.Process) -> bool:
        return any(str(self.home) in part for part in process.info["cmdline"] or ())

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait(30)
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def an_owner(home: Path) -> Iterator[Owner]:
    owner = Owner(home)
    try:
        yield owner
    finally:
        owner.close()


def test_a_ray_of_ours_is_private_and_dies_with_its_owner(tmp_path: Path) -> None:
    with an_owner(tmp_path) as owner:
        assert owner.said == ["starting Ray …", "Ray: 1 node, 1 core"]
        assert owner.home.stat().st_mode & 0o777 == 0o700
        assert (owner.home / "token").stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / ".ray").exists(), "a token in the home directory would switch on authentication elsewhere"
        listening = {c.laddr.ip for p in owner.processes for c in _connections(p) if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, "reachable from this machine only"

        token = {"RAY_AUTH_TOKEN_PATH": str(owner.home / "token")}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
        found = probe_cluster(owner.address, clean | token, within_s=60)
        assert found.authentication == {"RAY_AUTH_MODE": "token", **token}
        with pytest.raises(UsageError, match="requires a token, and none is set"):
            probe_cluster(owner.address, clean, within_s=60)
        (tmp_path / "wrong").write_text("0" * 64)
        with pytest.raises(UsageError, match=rf"does not accept the token from {tmp_path}/wrong"):
            probe_cluster(owner.address, clean | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")}, within_s=60)

        assert len(owner.processes) >= 2
        owner.end(signal.SIGKILL)
        assert owner.left() == []
        assert not owner.home.exists()


def _connections(process: psutil.Process) -> list[psutil._common.sconn]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.net_connections())
    return []


def test_only_directories_of_the_dead_are_swept(tmp_path: Path) -> None:
    ours, dead, other = (tmp_path / f"ludus-ray-{name}" for name in ("ours", "dead", "other"))
    for directory in (ours, dead, other):
        directory.mkdir()
    (ours / "owner").write_text(f"{os.getpid()} {identity.start_ticks(os.getpid())}")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    (dead / "owner").write_text(f"{ended.pid} 1")
    assert sweep(tmp_path) == 1
    assert ours.exists()
    assert other.exists(), "without an owner file it may be under construction"
    assert not dead.exists()


# -- when it goes wrong


class Silent(Cluster):
    """One whose head falls silent when it has let us in."""

    left = False

    def _join(self, address: str, join_s: float) -> None:
        self.address = address
        self._undo.callback(setattr, type(self), "left", True)

    def members(self, timeout_s: float = 3.0) -> list[Member]:
        raise Unreachable("it does not reply any more")


def test_a_head_that_falls_silent_at_once_is_left_again() -> None:
    with pytest.raises(Unreachable, match="does not reply any more"):
        Silent("127.0.0.1:6379")
    assert Silent.left
