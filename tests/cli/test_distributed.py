"""`ludus train -dc` with small programs as learner and workers, and a real Redis."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.cli.training import train
from ludus.cli.training.distributed import (
    GRACE_S,
    LUDUS,
    MAX_FAILURES,
    MODELS,
    RestartFailures,
    cancel_on_signals,
    check_place,
    fleet_job,
    new_restarts,
    use_credentials,
)
from ludus.compat.coach.fleet_ini import FleetFile, read_fleet_file
from ludus.errors import ConfigError, MissingExtra, UsageError
from ludus.experiments.runs import resume_diff
from ludus.experiments.runs.run_dir import Run
from ludus.launch.job import JobStatus, ProcessStatus, check_job
from ludus.launch.local import LocalOrchestrator
from ludus.launch.supervisor import STEADY_S
from ludus.models.custom import loader
from ludus.testing.orchestrator_contract import wait_until_ended
from ludus.transport.message_stream import PASSWORD
from tests.cli.calling import Call
from tests.tools import need
from tests.waiting import wait_until

needs_redis = pytest.mark.usefixtures("redis_installed")


@pytest.fixture
def redis_installed() -> None:
    need("redis-server")
    need("redis-cli")


STAND_IN = """
role=$2
ask() { REDISCLI_AUTH="$LUDUS_MEMORY_PASSWORD" redis-cli -p "$port" "$@"; }
port=$(echo "$*" | sed -n 's,.*redis://127.0.0.1:\\([0-9]*\\)/0.*,\\1,p')
[ $role = worker ] && { WORKER; }
echo "port $port"
until ask ping 2>/dev/null | grep -q PONG; do sleep 0.05; done
"""
"""What stands for `ludus`: it is called with `fleet learner …` and `fleet worker …`."""


@contextmanager
def start_fleet(
    tmp_path: Path, learner: str, *words: str, worker: str = "exec sleep 600", lives: int = MAX_FAILURES, as_json: bool = False
) -> Iterator[subprocess.Popen[str]]:
    script = f"""
import sys
from pathlib import Path
import typer
from ludus.cli.training import distributed
distributed.LUDUS = ("sh", "-c", {STAND_IN.replace("WORKER", worker) + learner!r}, "ludus")
distributed.MAX_FAILURES = {lives}
config_path = Path({str(tmp_path / "dist.ini")!r})
try:
    distributed.run_distributed(arguments={list(words)!r}, name="trial", workers=2, config_path=config_path, as_json={as_json})
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""
    (tmp_path / "dist.ini").write_text(f"[coach]\nmemory_backend = redispubsub\nlocal_path = {tmp_path}/runs\n")
    environment = os.environ | {"LUDUS_STATE_DIR": str(tmp_path / "state")}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            for status in jobs(tmp_path).list():
                jobs(tmp_path).cancel(status.id, at_once=True)
                wait_until_ended(jobs(tmp_path), status.id)


def jobs(tmp_path: Path) -> LocalOrchestrator:
    return LocalOrchestrator(tmp_path / "state")


def line(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stdout is not None
    for result in process.stdout:
        if result.startswith(beginning):
            return result.strip()
    raise AssertionError(f"it never result {beginning}")


@needs_redis
def test_the_learner_is_shown_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    learner = """
echo "words: $*"
redis-cli -p $port ping
tr '\\0' ' ' < /proc/$(ask info server | tr -d '\\r' | sed -n 's/process_id://p')/cmdline; echo
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' > "$LUDUS_JOB_DIR/commands"
printf %s "$LUDUS_MEMORY_PASSWORD" | grep -rlF -f - "$LUDUS_JOB_DIR"
exit 7
"""
    with start_fleet(tmp_path, learner, "CartPole-v1", "--set", "lr=1e-3") as process:
        shown, told = process.communicate(timeout=60)
    assert process.returncode == 7
    port = int(re.findall(r"^port (\d+)$", shown, re.MULTILINE)[0])
    assert (
        f"words: fleet learner CartPole-v1 --set lr=1e-3 --experiment-name trial --memory redis://127.0.0.1:{port}/0 "
        f"--store {tmp_path}/runs/trial --num-workers 2" in shown
    )
    assert "NOAUTH" in shown, "the server answers without a password"
    assert f"redis-server 127.0.0.1:{port}" in shown
    (status,) = jobs(tmp_path).list()
    directory = Path(status.logs).parent
    assert "redis-server" in (directory / "commands").read_text()
    found = [result for result in shown.splitlines() if result.startswith(str(directory))]
    assert found == [f"{directory}/scratch/redis/redis.conf"], "the password is in sight"
    assert f"all logs are in {status.logs}" in told
    for sentence in ("Redis Streams", "2 workers", f"the run is {tmp_path}/runs/trial", "failed: learner-0 ended with code 7"):
        assert sentence in told
    assert {path.name for path in Path(status.logs).iterdir()} == {
        "learner-0.log", "memory-0.log", "supervisor.log", "worker-0.log", "worker-1.log",
    }  # fmt: skip
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server is still there"
    assert not list((tmp_path / "state").rglob("redis.conf"))


@needs_redis
def test_a_killed_redis_is_restarted_with_its_data(tmp_path: Path) -> None:
    learner = """
ask set kept it >/dev/null
was=$(ask info server | tr -d '\\r' | sed -n 's/process_id://p')
kill -9 $was
until ask ping 2>/dev/null | grep -q PONG; do sleep 0.05; done
echo "still $(ask get kept)"
sleep 1.5
"""
    with start_fleet(tmp_path, learner) as process:
        shown, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "still it" in shown
    assert "memory-0 ended with code 137 and is restarted (1); its log: " in told


@needs_redis
def test_an_interruption_lets_the_learner_save_and_a_second_one_does_not(tmp_path: Path) -> None:
    learner = "trap 'echo saved; exit 130' TERM; echo ready; while :; do sleep 0.05; done"
    with start_fleet(tmp_path, learner) as process:
        line(process, "ready")
        process.send_signal(signal.SIGINT)
        shown, told = process.communicate(timeout=60)
        assert process.returncode == 130
        assert shown == "saved\n"
        assert "the learner saves a checkpoint" in told
        assert "before it had saved" not in told
        assert [status.state for status in jobs(tmp_path).list()] == ["cancelled"]
    with start_fleet(tmp_path, "trap 'echo deaf' TERM; echo ready; while :; do sleep 0.05; done") as process:
        line(process, "ready")
        process.send_signal(signal.SIGTERM)
        line(process, "deaf")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "the learner ended before it saved a checkpoint (code 137); there is no checkpoint" in told
        assert [status.exit_code for status in jobs(tmp_path).list()] == [130, 137]


@needs_redis
def test_it_ends_when_its_output_pipe_is_closed(tmp_path: Path) -> None:
    with start_fleet(tmp_path, "trap 'exit 130' TERM; echo ready; while :; do echo more; sleep 0.05; done") as process:
        line(process, "ready")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) != 0
        assert [status.state for status in jobs(tmp_path).list()] == ["cancelled"]


def test_signals_ignored_by_nohup_stay_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cancel_on_signals(jobs(tmp_path), "trial"):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_handler_does_not_call_the_orchestrator(tmp_path: Path) -> None:
    """It may have interrupted a request of the orchestrator's client, whose locks are then held."""
    release = threading.Event()
    calls: list[tuple[bool, bool]] = []

    class Blocking(LocalOrchestrator):
        def cancel(self, job_id: str, *, at_once: bool = False) -> None:
            assert release.wait(10)
            calls.append((threading.current_thread() is threading.main_thread(), at_once))

    with cancel_on_signals(Blocking(tmp_path), "trial") as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGTERM, signal.SIGINT]
        release.set()
    assert calls == [(False, False), (False, True)]


@needs_redis
def test_nothing_is_left_when_the_command_itself_is_killed(tmp_path: Path) -> None:
    with start_fleet(tmp_path, "echo ready; exec sleep 600") as process:
        line(process, "ready")
        (status,) = jobs(tmp_path).list()
        running = [p.pid for p in status.processes if p.pid is not None]
        assert len(running) == 4
        process.kill()
        process.wait(20)
        wait_until(lambda: jobs(tmp_path).list()[0].over)
        assert jobs(tmp_path).list()[0].reason == "the process that started it is gone"
        assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]


@needs_redis
def test_a_second_run_of_the_same_command_keeps_the_first(tmp_path: Path) -> None:
    with start_fleet(tmp_path, "echo ready; exec sleep 600") as first:
        line(first, "ready")
        (status,) = jobs(tmp_path).list()
        with start_fleet(tmp_path, "echo never") as second:
            shown, told = second.communicate(timeout=60)
            assert f"The job {status.id} already trains {tmp_path}/runs/trial." in told
            assert second.returncode != 0
            assert shown == ""
            assert [found.state for found in jobs(tmp_path).list()] == ["running"]


@needs_redis
def test_a_job_whose_workers_all_refuse_their_work_is_ended(tmp_path: Path) -> None:
    with start_fleet(tmp_path, "exec sleep 600", worker="echo there is no such model; exit 2", lives=2) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "failed: each worker ended with code 2 2 times in a row" in told
    assert told.count("there is no such model") >= 1
    assert [status.state for status in jobs(tmp_path).list()] == ["cancelled"]


@needs_redis
def test_with_json_the_result_is_all_that_goes_to_stdout(tmp_path: Path) -> None:
    result = '{"run_dir": "there", "iterations": 3}'
    with start_fleet(tmp_path, f"echo starting; echo '{{\"a\": 1}}'; echo '{result}'; echo bye", as_json=True) as process:
        shown, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert shown == f"{result}\n"
    for output in ("starting", '{"a": 1}', "bye"):
        assert output in told.splitlines()


# -- the program --------------------------------------------------------------------------------------------------------


def test_a_fleet_with_a_server_of_its_own_has_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PASSWORD, "hush-hush")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    file = read_fleet_file("[ludus]\nredis_url = redis://me@redis.example\ndata_store = s3\ns3_bucket_name = games")
    job = fleet_job(file, "trial", ["-p", "CartPole_ClippedPPO"], 3, 1)
    assert [(role.name, role.count, role.restart) for role in job.roles] == [
        ("learner", 1, "when-killed"), ("worker", 3, "always"),
    ]  # fmt: skip
    assert job.main == "learner"
    assert PASSWORD in job.secrets
    for role in job.roles:
        assert role.command[-6:-2] == ("--memory", "redis://me@redis.example", "--store", "s3://games/trial") or role.command[-4:] == (
            "--memory", "redis://me@redis.example", "--store", "s3://games/trial",
        )  # fmt: skip
    with pytest.raises(MissingExtra, match=r"redis-server.*apt install redis-server.*redis_url"):
        fleet_job(FleetFile(), "trial", [], 1, 1)


@pytest.mark.parametrize(("name", "workers", "complaint"), [("trial", 0, "-n 0"), ("a/b", 1, "a/b"), ("", 1, "name")])
def test_a_fleet_that_cannot_be_is_refused(name: str, workers: int, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        fleet_job(read_fleet_file("[ludus]\nredis_url = redis://host"), name, [], workers, 1)


def test_secrets_are_read_from_the_places_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from file\n")
    environ: dict[str, str] = {}
    use_credentials(read_fleet_file(f"[ludus]\nredis_url = redis://host\nredis_password_file = {tmp_path}/password"), environ)
    assert environ == {PASSWORD: "from file"}
    use_credentials(read_fleet_file("[ludus]\nredis_url = redis://:in-url@host"), environ)
    assert environ == {PASSWORD: "in-url"}
    use_credentials(read_fleet_file("[ludus]\nredis_url = redis://host"), environ)
    assert environ == {PASSWORD: "in-url"}, "the user's own stays"
    use_credentials(FleetFile(), environ)
    assert re.fullmatch("[0-9a-f]{48}", environ[PASSWORD]), "a private server has a new one"


def test_credentials_under_their_older_names_are_found() -> None:
    s3 = read_fleet_file("[coach]\nredis_url = redis://host\ndata_store = s3\ns3_bucket_name = games")
    result: list[str] = []
    environ = {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "hush"}
    use_credentials(s3, environ, result.append)
    assert (environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]) == ("id", "hush")
    assert result == ["ACCESS_KEY_ID is used as AWS_ACCESS_KEY_ID", "SECRET_ACCESS_KEY is used as AWS_SECRET_ACCESS_KEY"]
    environ = {"ACCESS_KEY_ID": "older", "AWS_ACCESS_KEY_ID": "newer"}
    use_credentials(s3, environ)
    assert environ["AWS_ACCESS_KEY_ID"] == "newer"


def test_the_last_log_line_of_a_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("x" * 10_000 + "\nfirst\nno such server\n\n")
    status = JobStatus("id", "trial", "running", processes=(ProcessStatus("worker", 0, "waiting", 2),), logs=str(tmp_path))
    (sentence,) = new_restarts(status, {})
    assert sentence.endswith(f"its log: {tmp_path}/worker-0.log: no such server")


def test_restarts_of_processes_are_reported_once() -> None:
    known: dict[str, int] = {}

    def at(*processes: ProcessStatus) -> list[str]:
        return list(new_restarts(JobStatus("id", "trial", "running", processes=processes, logs="/logs"), known))

    assert at(ProcessStatus("worker", 0, "running"), ProcessStatus("worker", 1, "pending")) == []
    waits = ProcessStatus("worker", 0, "waiting", 1)
    assert at(waits) == ["worker-0 ended with code 1 and is restarted (1); its log: /logs/worker-0.log"]
    assert at(waits) == []
    assert at(ProcessStatus("worker", 0, "running", 1, restarts=1)) == []
    assert at(ProcessStatus("worker", 0, "running", 137, restarts=3)) == [
        "worker-0 ended with code 137 and is restarted (3); its log: /logs/worker-0.log"
    ]
    assert at(ProcessStatus("worker", 2, "waiting", 0)) == []
    assert at(ProcessStatus("worker", 1, "ended", 0), ProcessStatus("learner", 0, "ended", 130)) == []
    assert at(ProcessStatus("other", 0, "ended", 2)) == ["other-0 ended with code 2; its log: /logs/other-0.log"]
    assert at(ProcessStatus("learner", 0, "ended", 0), ProcessStatus("worker", 0, "ended", 143, restarts=3)) == [], "it is over"


def test_a_learner_has_time_to_save_and_its_place_is_known() -> None:
    job = fleet_job(read_fleet_file("[ludus]\nredis_url = redis://host"), "trial", [], 1, 1)
    assert job.grace_s == GRACE_S > 60
    assert job.place == job.roles[0].command[job.roles[0].command.index("--store") + 1]


def test_models_next_to_the_file_are_found_by_workers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS, "/elsewhere")
    job = fleet_job(read_fleet_file("[ludus]\nredis_url = redis://host"), "trial", [], 1, 1, tmp_path)
    assert MODELS == loader.VARIABLE
    assert [role.environment[MODELS] for role in job.roles] == [f"{tmp_path}{os.pathsep}/elsewhere"] * 2


def test_a_file_that_is_called_like_one_of_pythons_does_not_break_a_role(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('this is not the one')\n")
    result = subprocess.run(
        [*LUDUS, "fleet", "worker", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_name_that_equals_an_unused_secret_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-longer-test")
    monkeypatch.delenv(PASSWORD, raising=False)
    local = fleet_job(read_fleet_file("[ludus]\nredis_url = redis://host"), "a-longer-test", [], 1, 1)
    assert local.secrets == ()
    assert check_job(local, os.environ) == local
    remote = read_fleet_file("[ludus]\nredis_url = redis://host\ndata_store = s3\ns3_bucket_name = games")
    with pytest.raises(UsageError, match=r"AWS_ACCESS_KEY_ID is in the command.*coincidence, change"):
        check_job(fleet_job(remote, "a-longer-test", [], 1, 1), os.environ)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    job = fleet_job(remote, "test", [], 1, 1)
    assert set(job.secrets) >= {"AWS_SECRET_ACCESS_KEY"}
    assert check_job(job, os.environ) == job


@needs_redis
def test_a_fleet_does_not_hide_the_runs_of_an_experiment(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "trial"
    check_place(str(place))
    Run.create(place / "PPO_one", {"trial": {"env": "CartPole-v1"}})
    check_place(str(place / "PPO_one"))
    with start_fleet(tmp_path, "exit 0") as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"{place} holds 1 run that no fleet created, and the run of this fleet would hide them. Choose another -e." in told
    assert jobs(tmp_path).list() == []


def test_patience_ends_when_all_workers_fail_in_a_row_or_the_memory_does() -> None:
    def after(patience: RestartFailures, now: float, **ends: tuple[int, int]) -> str:
        processes = tuple(
            ProcessStatus(name.partition("_")[0], int(name.partition("_")[2]), "running", code, restarts)
            for name, (restarts, code) in ends.items()
        )
        return patience.update(JobStatus("id", "trial", "running", processes=processes, logs="/logs"), now)

    patience = RestartFailures()
    assert after(patience, 0, worker_0=(MAX_FAILURES, 2), worker_1=(MAX_FAILURES - 1, 2)) == ""
    assert "each worker ended with code 2" in after(patience, 1, worker_0=(MAX_FAILURES, 2), worker_1=(MAX_FAILURES, 2))
    assert after(patience, 2 + STEADY_S, worker_0=(MAX_FAILURES, 2), worker_1=(MAX_FAILURES + 1, 2)) == "", (
        "one has been working for long"
    )
    assert after(RestartFailures(), 0, worker_0=(99, 1)) == "", "it may be the network"
    assert after(RestartFailures(), 0, worker_0=(99, 0)) == "", "it finds the run finished"
    memory = RestartFailures()
    assert after(memory, 0, worker_0=(0, 0), memory_0=(MAX_FAILURES - 1, 1)) == ""
    assert "memory-0 ended with code 1" in after(memory, 0, worker_0=(0, 0), memory_0=(MAX_FAILURES, 1))


# -- a run that is there ------------------------------------------------------------------------------------------------


def test_changed_settings_of_a_fleet_run_are_refused_with_a_hint(tmp_path: Path) -> None:
    config = {"env": "CartPole-v1", "run": "PPO", "memory": "redis://h", "config": {"num_workers": 2}}
    Run.create(tmp_path / "run", {"exp": config})
    with pytest.raises(
        ConfigError, match=r"(?s)num_workers is 2 in the run, but 3 in the settings.*same -n.*ludus fleet worker"
    ) as caught:
        resume_diff.resume_changes(tmp_path / "run", {"name": "exp", **config, "config": {"num_workers": 3}})
    assert "--resume" not in str(caught.value)


def test_a_finished_run_prints_its_result_again(call: Call, tmp_path: Path) -> None:
    small = ["--num-envs", "2", "--set", "train_batch_size=32", "--set", "minibatch_size=16", "--set", "evaluation_duration=0"]
    trained = call("train", "CartPole-v1", *small, "--stop", "iterations=1", "--json", "--local-dir", tmp_path).json
    assert train.read_result(Path(trained["run_dir"])).to_json() == trained
