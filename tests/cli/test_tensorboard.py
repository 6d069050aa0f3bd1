"""`ludus tensorboard`: a real TensorBoard on real runs, and the SSH tunnel command."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from ludus.cli.evaluation import tensorboard
from ludus.cli.evaluation.tensorboard import SshTunnel, announcement
from ludus.experiments.runs import remote_runs
from ludus.process import identity, procfs
from tests.cli.calling import Call, one_line
from tests.cli.programs import program
from tests.experiments import small
from tests.waiting import wait_until

USER = getpass.getuser()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tensorboard") / "runs" / "default" / "first"
    small.train(where, 1)
    return where


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


# -- the line -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({}, f"ssh -N -L 6006:127.0.0.1:6009 {USER}@{socket.gethostname()}"),
        ({"SSH_CONNECTION": "203.0.113.7 50122 198.51.100.4 22"}, f"ssh -N -L 6006:127.0.0.1:6009 {USER}@198.51.100.4"),
        ({"SSH_CONNECTION": "203.0.113.7 50122 198.51.100.4 2222"}, f"ssh -N -p 2222 -L 6006:127.0.0.1:6009 {USER}@198.51.100.4"),
        ({"SSH_CONNECTION": "fe80::1%eth0 50122 2001:db8::4 22"}, f"ssh -N -L 6006:127.0.0.1:6009 {USER}@2001:db8::4"),
        ({"SSH_CONNECTION": "nonsense"}, f"ssh -N -L 6006:127.0.0.1:6009 {USER}@{socket.gethostname()}"),
        (
            {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "node7", "SLURM_SUBMIT_HOST": "login1"},
            f"ssh -N -J {USER}@login1 -L 6006:127.0.0.1:6009 {USER}@node7",
        ),
        (
            {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "node7", "SSH_CONNECTION": "203.0.113.7 50122 2001:db8::4 2222"},
            f"ssh -N -J '{USER}@[2001:db8::4]:2222' -L 6006:127.0.0.1:6009 {USER}@node7",
        ),
        ({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "node7"}, f"ssh -N -L 6006:127.0.0.1:6009 {USER}@node7"),
    ],
)
def test_the_line_for_ssh_leads_to_where_we_are(environ: dict[str, str], line: str) -> None:
    assert SshTunnel.of(environ).line(6009) == line


def test_a_tunnel_command_is_printed_only_for_loopback() -> None:
    there = SshTunnel("anna", "gpu3")
    result = announcement("runs", "127.0.0.1", 6007, there)
    assert "http://127.0.0.1:6007/" in result
    assert "\n  ssh -N -L 6006:127.0.0.1:6007 anna@gpu3\n" in result
    assert "http://127.0.0.1:6006/" in result
    assert "\n  ssh -N -L '6006:[::1]:6007' anna@gpu3\n" in announcement("runs", "::1", 6007, there)
    assert "\n  ssh -N -L 6006:localhost:6007 anna@gpu3\n" in announcement("runs", "localhost", 6007, there)
    assert "ssh" not in announcement("runs", "10.0.0.5", 6007, there)
    assert "http://[::]:6007/" in announcement("runs", "::", 6007, there)


def test_print_prints_the_line_and_starts_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.7 50122 198.51.100.4 22")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = call("tensorboard", "no/such/run", "--print", "--port", "7000")
    assert (result.code, result.out) == (0, f"ssh -N -L 6006:127.0.0.1:7000 {USER}@198.51.100.4\n")
    for host, reached in {"::1": "'6006:[::1]:7000'", "::": "'6006:[::1]:7000'", "0.0.0.0": "6006:127.0.0.1:7000"}.items():
        result = call("tensorboard", "no/such/run", "--print", "--port", "7000", "--host", host)
        assert result.out == f"ssh -N -L {reached} {USER}@198.51.100.4\n"


# -- what cannot be -----------------------------------------------------------------------------------------------------


def test_a_place_without_runs_and_a_port_in_use_are_errors(call: Call, run: Path, tmp_path: Path) -> None:
    assert "There is no directory" in one_line(call("tensorboard", tmp_path / "nowhere"))
    assert "No runs in" in one_line(call("tensorboard", tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("tensorboard", run, "--port", str(port))
        assert result.code == 2
        assert f"Port {port} of 127.0.0.1 is in use" in one_line(result)


# -- the real one -------------------------------------------------------------------------------------------------------


def test_it_shows_the_runs_on_loopback_and_leaves_nothing_behind(run: Path) -> None:
    with program("tensorboard", run.parents[1], listens=False) as running:
        line = running.wait_for("TensorBoard of ")
        url = line.split(": ", 1)[1].split()[0]
        assert url.startswith("http://127.0.0.1:6")
        port = int(url.rstrip("/").rpartition(":")[2])
        assert f" -L 6006:127.0.0.1:{port} " in running.wait_for("ssh -N")
        wait_until(lambda: json.loads(get(f"{url}data/runs")) == ["default/first"])
        below = procfs.list_descendants(running.process.pid)
        assert below
        running.process.send_signal(signal.SIGINT)
        code, _, err = running.finish()
        assert code == 0, err
    wait_until(lambda: not any(map(is_running, below)))


def test_when_it_is_killed_nothing_of_it_stays(run: Path) -> None:
    with program("tensorboard", run, listens=False) as running:
        running.wait_for("ssh -N")
        below = procfs.list_descendants(running.process.pid)
        assert below
        running.process.kill()
        running.finish()
    wait_until(lambda: not any(map(is_running, below)))


def test_of_a_run_on_a_store_copies_are_shown_and_kept_up_to_date(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(tensorboard, "_REFRESH_S", 0.05)
    place, _, query = s3_url.partition("?")
    where = f"{place}/runs/first?{query}"
    store = remote_runs.store_of(remote_runs.directory_of(where))
    store.put("config.yaml", b"name: first\n")
    store.put("events.out.tfevents.1.here", b"one")
    store.put("metrics.jsonl", b"")
    with tensorboard.event_directory(f"{place}/runs?{query}") as shown:
        copy = shown / "first" / "events.out.tfevents.1.here"
        assert copy.read_bytes() == b"one"
        with open(copy, "rb") as read:  # as TensorBoard does, which never opens it again
            assert read.read() == b"one"
            store.put("events.out.tfevents.1.here", b"one, two")
            wait_until(lambda: read.read() == b", two")
        assert not list(remote_runs.directory_of(where).glob("events.*")), "the training process owns the working directory"
    assert not shown.exists()


def is_running(pid: int) -> bool:
    return identity.start_time(pid) is not None and os.path.exists(f"/proc/{pid}")
