"""The first process of a pod: output, exit codes, secrets, files and roles beside the main one, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.launch.job import RoleRestart
from ludus.launch.kubernetes import pod_process
from ludus.launch.kubernetes.pod_process import RESTART_CODE, StdoutLog, copy_files, map_exit_code, parse_options, read_secrets
from tests.waiting import wait_until

MODULE = (sys.executable, "-P", "-m", "ludus.launch.kubernetes.pod_process", "--job", "trial-abc", "--role", "main")


def run(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TMPDIR": str(tmp_path), **environment}
    return subprocess.run([*MODULE, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_output_and_exit_code_are_those_of_the_command(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--index",
        "3",
        "--",
        "sh",
        "-c",
        "echo one; echo two >&2; echo $LUDUS_JOB_ID $LUDUS_JOB_ROLE $LUDUS_JOB_INDEX; printf three; exit 7",
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "one\ntwo\ntrial-abc main 3\nthree", "")


@pytest.mark.parametrize(("command", "code"), [("kill -9 $$", 137), ("exec /no/such/program", 127), ("exit 0", 0)])
def test_exit_codes_are_those_of_a_shell(tmp_path: Path, command: str, code: int) -> None:
    assert run(tmp_path, "--", "sh", "-c", command).returncode == code


def test_a_command_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--", "/no/such/program", "--at-all")
    assert done.returncode == 127
    assert "/no/such/program cannot be started" in done.stdout


def test_a_role_beside_it_has_a_prefix_is_restarted_and_ends_with_it(tmp_path: Path) -> None:
    ray = "sh -c 'echo node $LUDUS_JOB_INDEX of $LUDUS_JOB_ROLE; [ -e again ] && exec sleep 600; touch again; exit 1'"
    script = "until [ -e again ]; do sleep 0.05; done; sleep 1.5; echo main"
    done = run(tmp_path, "--beside", f"ray-4={ray}", "--", "sh", "-c", script)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["main", "ray-4: node 4 of ray", "ray-4: node 4 of ray"]


def test_a_container_can_be_restarted_in_the_same_pod(tmp_path: Path) -> None:
    assert run(tmp_path, "--", "sh", "-c", "exit 1").returncode == 1
    assert run(tmp_path, "--", "sh", "-c", "echo again").stdout == "again\n"


def test_nodes_and_the_run_reach_the_main_role_only(tmp_path: Path) -> None:
    show = "echo ${LUDUS_JOB_NODES-} ${LUDUS_JOB_NODE-} ${LUDUS_JOB_RAY-} ${LUDUS_JOB_RUN-none}"
    environment = {
        "LUDUS_JOB_NODES": "10.0.0.1,node-1",
        "LUDUS_JOB_NODE": "1",
        "LUDUS_JOB_RAY": "2",
        "LUDUS_JOB_RUN": "/runs/.jobs/x.json",
    }
    done = run(
        tmp_path,
        "--beside",
        f'ray-0=sh -c "{show}; touch ready; exec sleep 600"',
        "--",
        "sh",
        "-c",
        f"until [ -e ready ]; do sleep 0.05; done; {show}",
        **environment,
    )
    assert sorted(done.stdout.splitlines()) == ["10.0.0.1,node-1 1 2 /runs/.jobs/x.json", "ray-0: 10.0.0.1,node-1 1 2 none"]


def test_sigterm_lets_the_command_save_and_end(tmp_path: Path) -> None:
    script = 'trap "echo saved; exit 130" TERM; touch ready; while :; do sleep 0.05; done'
    process = subprocess.Popen(
        [*MODULE, "--", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        wait_until((tmp_path / "ready").exists, 30)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "saved\n")


@pytest.mark.parametrize(
    ("restart", "code", "container", "message"),
    [
        ("never", 3, 3, ""), ("never", 0, 0, ""), ("on-failure", 3, 3, ""), ("on-failure", 0, 0, ""),
        ("when-killed", 3, 0, "exit code 3"), ("when-killed", 137, 137, ""), ("when-killed", 0, 0, ""),
        ("always", 0, RESTART_CODE, "exit code 0"), ("always", 3, 3, ""),
    ],
)  # fmt: skip
def test_the_kubelet_restarts_what_is_to_be_restarted(restart: RoleRestart, code: int, container: int, message: str) -> None:
    """It restarts every container whose exit code is not 0 (restartPolicy OnFailure)."""
    assert map_exit_code(code, restart) == (container, message)


def mounted(folder: Path, **files: str) -> Path:
    """A mounted Secret or ConfigMap: files are links into a folder that is replaced as a whole."""
    data = folder / "..2026_11_18"
    for name, text in files.items():
        path = data / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "..data").symlink_to(data.name)
    for entry in data.iterdir():
        (folder / entry.name).symlink_to(f"..data/{entry.name}")
    return folder


def test_secrets_become_variables(tmp_path: Path) -> None:
    folder = mounted(tmp_path / "env", LICENCE_KEY="horse-battery\n", OTHER="ü")
    assert read_secrets(folder) == {"LICENCE_KEY": "horse-battery\n", "OTHER": "ü"}
    assert read_secrets(tmp_path / "none") == {}


def run_here(*command: str) -> int:
    """Run a command in a child of this process, which has its patches, and return the exit code."""
    child = os.fork()
    if child == 0:
        os._exit(pod_process.run(parse_options(["--job", "x", "--role", "main", "--", *command])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the mounted Secret. The process has the directories of a pod."""
    (tmp_path / "secrets").mkdir()
    monkeypatch.setattr(pod_process, "SECRETS", tmp_path / "secrets")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "secrets"


def test_secrets_reach_the_roles_and_no_file(secrets: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The volume for temporary files is on the disk of the node."""
    mounted(secrets, env__LICENCE_KEY="horse-battery-staple")
    show = 'echo ${#LICENCE_KEY}; grep -rlF "$LICENCE_KEY" "$TMPDIR/x"; true'
    assert run_here("sh", "-c", show) == 0
    assert capfd.readouterr().out == "20\n"
    kept = [path for path in (tmp_path / "x").rglob("*") if path.is_file() and b"horse" in path.read_bytes()]
    assert kept == []


@pytest.mark.parametrize("key", ["serve-token", "env/LUDUS_MEMORY_PASSWORD"])
def test_a_placeholder_in_the_secret_is_refused(secrets: Path, capfd: pytest.CaptureFixture[str], key: str) -> None:
    """The rendered example of a Secret contains it: a service would accept a token that everybody knows."""
    mounted(secrets, **{"token": "horse-battery-staple", key.replace("/", "__"): f"{pod_process.PLACEHOLDER}\n"})
    assert run_here("echo", "started") == pod_process.PLACEHOLDER_CODE
    said = capfd.readouterr()
    assert said.out == ""
    assert f"The value of {key.rpartition('/')[2]} in the Secret is the placeholder 'replace-me'" in said.err


def test_files_are_copied_into_the_working_directory(tmp_path: Path) -> None:
    source = mounted(tmp_path / "files", **{"experiment.yaml": "a", "model__net.py": "b"})
    target = tmp_path / "work"
    target.mkdir()
    copy_files(source, target)
    assert {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()} == {
        "experiment.yaml": "a",
        "model/net.py": "b",
    }
    (target / "experiment.yaml").write_text("changed")  # a copy, not a link into the mount
    copy_files(tmp_path / "none", target)


def test_lines_of_several_roles_do_not_mix() -> None:
    read, write = os.pipe()
    log = StdoutLog("ray-0: ", write)
    log.write(b"one\ntw")
    os.write(write, b"main\n")
    log.write(b"o\nthree")
    log.close()
    os.close(write)
    with open(read, "rb") as out:
        assert out.read() == b"ray-0: one\nmain\nray-0: two\nray-0: three\n"
