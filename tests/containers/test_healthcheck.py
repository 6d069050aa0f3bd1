"""The health check of the images: real processes and a real server behind a /proc that shows these processes alone, as in a container."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.process import procfs
from tests.containers.test_dockerfile import load
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers run Linux")
healthcheck = load("healthcheck")
LUDUS = Path(sys.executable).with_name("ludus")


@contextmanager
def process(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.terminate()
        child.communicate(timeout=60)


def proc_with(directory: Path, *pids: int) -> Path:
    directory.mkdir()
    for pid in pids:
        (directory / str(pid)).symlink_to(f"/proc/{pid}")
    (directory / "meminfo").touch()
    return directory


def test_a_server_is_healthy_while_it_answers(tmp_path: Path) -> None:
    words = (LUDUS, "gamecore", "serve", "--port", "0", "--state-dir", tmp_path / "state", "--json")
    with process(sys.executable, *words) as server:
        assert server.stdout is not None
        port = str(json.loads(server.stdout.readline())["port"])
        assert healthcheck.ask(int(port), tls=False) == ""
        proc = proc_with(tmp_path / "proc", server.pid)
        assert healthcheck.find_command(proc) == (str(server.pid), list(map(str, words[1:])))
        assert "port 0" in healthcheck.main(proc), "it looks where the command line says"
    assert "refused" in healthcheck.ask(int(port), tls=False)


def test_another_command_is_healthy_while_it_is_not_stopped(tmp_path: Path) -> None:
    script = tmp_path / "ludus"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([script, "train", "CartPole-v1"], stdin=subprocess.PIPE) as training:
        proc = proc_with(tmp_path / "proc", training.pid)
        wait_until(lambda: healthcheck.find_command(proc), what="the interpreter of the script")
        assert healthcheck.main(proc) == ""
        training.send_signal(signal.SIGSTOP)
        wait_until(lambda: (stat := procfs.read_stat(training.pid)) is not None and stat.state == "T")
        assert healthcheck.main(proc) == f"process {training.pid} (ludus train CartPole-v1) is stopped"
        training.send_signal(signal.SIGCONT)
        training.terminate()
    assert healthcheck.main(proc) == "no ludus command runs in this container"


@pytest.mark.parametrize(
    ("cmdline", "found"),
    [
        ("tini\0--\0ludus\0serve\0", None),
        ("/opt/ludus/bin/python3\0/opt/ludus/bin/ludus\0serve\0runs/a\0", ["serve", "runs/a"]),
        ("/opt/ludus/bin/ludus\0train\0", ["train"]),
        ("python\0-m\0ludus.gamecore.server\0", None),
        ("", None),
    ],
)
def test_the_main_process_is_found_by_its_command_line(tmp_path: Path, cmdline: str, found: list[str] | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_text(cmdline)
    assert healthcheck.find_command(tmp_path) == (None if found is None else ("7", found))


@pytest.mark.parametrize("words", [["serve", "--port", "9000"], ["serve", "--port=9000", "run"]])
def test_the_port_is_read_from_the_command_line(words: list[str]) -> None:
    assert healthcheck.option(words, "--port") == "9000"
    assert healthcheck.option(words, "--tls-cert") is None


def test_default_ports_are_those_of_the_commands() -> None:
    from typer.main import get_command

    from ludus.cli.main import app

    for path, port in healthcheck.SERVERS.items():
        command = get_command(app)
        for name in path:
            command = command.commands[name]  # type: ignore[attr-defined] # groups have them
        assert next(parameter.default for parameter in command.params if parameter.name == "port") == port
