"""`ludus learner`, `actor` and `cluster`: checks before the start, and output."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ludus.cli.clusters import cluster, learner, roles
from ludus.cli.clusters.actor import is_enabled, parse_host, parse_server, worker_count
from ludus.errors import UnknownName, UsageError
from ludus.launch import roles as jobs
from ludus.launch.hostfile import MachineRole, load_hostfile
from ludus.launch.job import Job, Role, wait
from ludus.launch.local import LocalOrchestrator
from ludus.launch.local_address import LocalAddress
from ludus.launch.ssh.backend import SshJobDir, SshNode, SshOrchestrator, SshSettings
from ludus.process.host import usable_cores
from ludus.process.job_env import FIRST_PORT
from tests.cli.calling import Call, one_line
from tests.waiting import wait_until

_FOREIGN = ("NET_CARD_NAME", "ACTOR_NUM", "CPU_NUM", "NO_MODEL_POOL", "NO_ACTOR_MODEL_POOL", "GAMECORE_SERVER_ADDR", "LOG_DIR")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    for name in (*_FOREIGN, "LUDUS_TOKEN_FILE", "RAY_ADDRESS", "ip_head"):
        monkeypatch.delenv(name, raising=False)
    Path("learner.iplist").write_text("127.0.0.1 root 36000 1\n")


START = ("start", "--iplist", "learner.iplist")


# -- wrong usage is told before anything is started -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("learner", *START), "nothing to train"),
        (("learner", *START, "CartPole-v1"), "Add --num-workers N: the sum of ACTOR_NUM"),
        (("learner", *START, "CartPole-v1", "--num-workers", "0"), "number of workers of the learner is not given"),
        (
            ("learner", *START, "CartPole-v1", "-n", "2", "--address", "x:1"),
            "--address is not supported: `ludus learner` starts its own Ray cluster",
        ),
        (("learner", *START, "CartPole-v1", "-n", "2", "-dc"), "-dc is not supported: `ludus actor start` starts the workers"),
        (("learner", *START, "CartPole-v1", "-n", "2", "--set", "config.gama=1"), "gamma"),
        (("learner", *START, "CartPole-v9", "-n", "2"), "CartPole-v9"),
        (
            ("learner", *START, "CartPole-v1", "-n", "2", "--upload-dir", "s3://AK:geheim@h/b"),
            "A password in a command is visible",
        ),
        (("learner", *START, "CartPole-v1", "-n", "2", "--token-file", "learner.iplist/x"), "learner.iplist/x cannot be written"),
        (
            ("learner", *START, "CartPole-v1", "-n", "2", "--token-file", "/proc/nope/x"),
            "/proc/nope/x cannot be written: No such",
        ),
        (("learner", *START, "CartPole-v1", "-n", "2", "--node", "3"), "--node 3: learner.iplist has 1 machines"),
        (("learner", "start", "--iplist", "missing", "x"), "missing cannot be read: No such file or directory"),
        (("actor", "start", "--iplist", "far.iplist"), "which the machines of a run share, does not exist"),
        (
            ("actor", "start", "--iplist", "far.iplist", "--no-model-pool"),
            "--no-model-pool works only on the machine of the learner",
        ),
        (("actor", *START, "--gamecore", "nowhere"), "'nowhere' is not the address of a gamecore server"),
        (("learner", "stop", "--port", "1"), ""),
    ],
)
def test_invalid_commands_are_reported_and_nothing_is_started(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    Path("far.iplist").write_text("192.0.2.7 root 36000 1\n")
    monkeypatch.setenv("NET_CARD_NAME", "lo")  # there may be no way to another machine from here
    result = call(*words)
    if message:
        assert result.code == 2
        assert message in one_line(result)
        assert "geheim" not in result.out + result.err
    else:
        assert result.code == 0
        assert "none is running here" in result.out
    assert LocalOrchestrator().list() == []


def test_workers_that_have_a_gamecore_server_have_an_agent_of_their_own(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--no-model-pool", "--gamecore", "127.0.0.1:23432", "--advertise", "127.0.0.1", "--port", str(port))
    try:
        result = call("actor", *START, *words)
        assert result.code == 0, result.err
        assert "its games reach this machine as 127.0.0.1" in result.out
        assert "keep their own copy of the weights" in result.out
        assert "RUN/logs/sampler" not in result.out, "the learner's own workers know nothing of a gamecore server"
    finally:
        assert call("actor", "stop", "--all").code == 0
    assert not [job for job in LocalOrchestrator().list() if job.state == "running"]


def test_an_unknown_training_option_is_reported_as_by_train(call: Call) -> None:
    result = call("learner", *START, "CartPole-v1", "--num-wrokers", "3")
    assert result.code == 2
    assert "--num-wrokers" in result.err
    assert LocalOrchestrator().list() == []


def test_a_port_in_use_is_reported(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("learner", *START, "CartPole-v1", "-n", "2", "--port", str(port))
    assert result.code == 2
    assert f"Port {port} of this machine is in use. Choose another --port" in result.err
    assert LocalOrchestrator().list() == []


@pytest.mark.parametrize("words", [("--redis-password", "geheim"), ("--redis-password=geheim",)])
def test_the_password_of_an_old_ray_is_dropped_and_never_shown(call: Call, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = call("learner", *START, "CartPole-v1", *words, "-n", "2", "--port", str(taken.getsockname()[1]))
    assert "--redis-password is ignored" in result.out
    assert "geheim" not in result.out + result.err
    assert "is in use" in result.err


def test_status_without_roles_fails(call: Call) -> None:
    result = call("learner", "status")
    assert (result.code, result.err) == (1, "no learner was started here\n")
    assert call("actor", "status", "--json").json == []
    assert "No cluster was started from this machine" in one_line(call("cluster", "status"))
    assert "No cluster 'x' was started" in one_line(call("cluster", "down", "x"))


def test_the_default_port_is_the_same_in_all_modules() -> None:
    assert roles.PORT == jobs.PORT
    assert roles.PORT + 2 < FIRST_PORT


# -- what is trained --------------------------------------------------------------------------------------------------------

FILE = "cartpole:\n  env: CartPole-v1\n  config: {num_workers: 3, num_learners: 2}\n"


@pytest.mark.parametrize(
    ("words", "workers", "learners"),
    [
        (["CartPole-v1"], None, None),
        (["CartPole-v1", "-n", "6"], 6, None),
        (["CartPole-v1", "--num_workers=6", "--num-learners", "2"], 6, 2),
        (["CartPole-v1", "--num-cpus", "5"], 5, None),
        (["CartPole-v1", "--num-workers", "auto"], "auto", None),
        (["CartPole-v1", "--set", "num_workers=4"], 4, None),
        (["CartPole-v1", "--config", '{"num_workers": 7}'], 7, None),
        (["-f", "x.yaml"], 3, 2),
        (["-f", "x.yaml", "-n", "5"], 5, 2),
        (["--resume", "somewhere"], "of the run", 1),
    ],
)
def test_the_number_of_workers_is_found_in_options_and_files(words: list[str], workers: object, learners: int | None) -> None:
    Path("x.yaml").write_text(FILE)
    assert learner.parse_training(words)[:2] == (workers, learners)


# -- variables of shell scripts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "environ", "listed", "number"),
    [
        (4, {"ACTOR_NUM": "6"}, 9, 4),
        (None, {"ACTOR_NUM": "6", "CPU_NUM": "7"}, 9, 6),
        (None, {"ACTOR_NUM": "", "CPU_NUM": " 7 "}, 9, 7),
        (None, {}, 9, 9),
        (None, {}, 0, usable_cores()),
    ],
)
def test_the_number_of_actors(option: int | None, environ: Mapping[str, str], listed: int, number: int) -> None:
    assert worker_count(option, environ, listed) == number


@pytest.mark.parametrize("text", ["0", "-1", "six", "6.0", "99999", "1" * 5000])
def test_invalid_numbers_of_workers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"ACTOR_NUM=.* is not a valid number of workers"):
        worker_count(None, {"ACTOR_NUM": text}, 0)


@pytest.mark.parametrize("text", ["10.0.0.5:23432", "node1:1", "[fe80::1]:23432", ""])
def test_the_address_of_a_gamecore_server(text: str) -> None:
    assert parse_server(f" {text} ") == text


@pytest.mark.parametrize("text", ["node1", ":1", "node1:", "node1:0", "node1:65536", "a b:1", "node1:" + "1" * 5000])
def test_invalid_gamecore_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a gamecore server"):
        parse_server(text)


@pytest.mark.parametrize(("text", "host"), [("", ""), (" node1 ", "node1"), ("10.0.0.7", "10.0.0.7"), ("[fd00::1]", "fd00::1")])
def test_the_address_at_which_games_reach_the_actors(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["10.0.0.7:8000", "http://node1", "node 1", "me@node1", "[fd00::1]:8000", "[fd00::1"])
def test_invalid_advertised_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a name or address.*without a port"):
        parse_host(text)


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)])
def test_a_switch_of_a_script(text: str, meant: bool) -> None:
    assert is_enabled("NO_MODEL_POOL", {"NO_MODEL_POOL": text}) is meant
    with pytest.raises(UsageError, match="X=perhaps is neither 1 nor 0"):
        is_enabled("X", {"X": "perhaps"})


def test_misleading_variables_are_removed_and_reported() -> None:
    environ = {"LD_PRELOAD": "x.so", "RAY_ADDRESS": "h:1", "ip_head": "", "PATH": "p"}
    assert roles.clean_environment(environ) == [
        "LD_PRELOAD=x.so is removed for the processes of this run",
        "RAY_ADDRESS=h:1 is removed for the processes of this run",
    ]
    assert environ == {"ip_head": "", "PATH": "p"}


# -- jobs of this machine ---------------------------------------------------------------------------------------------------


PLACE = "10.0.0.2:9610"


def sleeping(part: str, place: str, subject: jobs.TrainingTask | None = None) -> Job:
    told = subject.environment() if subject else {}
    return Job(part, (Role("main", ("sleep", "600"), environment=told),), "main", place=place)


@pytest.fixture
def orchestrator() -> Iterator[LocalOrchestrator]:
    found = LocalOrchestrator()
    yield found
    for status in found.list():
        found.cancel(status.id, at_once=True)
        wait(found, status.id, 30)


def test_a_second_start_ends_the_first_of_the_same_run_and_no_other(
    capsys: pytest.CaptureFixture[str], orchestrator: LocalOrchestrator
) -> None:
    others = [orchestrator.submit(sleeping("actor", "10.0.0.2:7000")), orchestrator.submit(sleeping("learner", "10.0.0.2:9610"))]
    others += [orchestrator.submit(sleeping("actor", ""))]  # somebody's job that happens to be called so
    first = roles.start_role(sleeping("actor", "10.0.0.2:9610"), orchestrator, "actor")
    assert first.state == "running"
    assert "stop actor: none of this run is running here" in capsys.readouterr().out
    second = roles.start_role(sleeping("actor", "10.0.0.2:9610"), orchestrator, "actor")
    assert f"{first.id} has ended" in capsys.readouterr().out
    assert orchestrator.status(first.id).state == "cancelled"
    assert [orchestrator.status(job).state for job in (*others, second.id)] == ["running"] * 4
    assert [status.id for status in roles.find_roles(orchestrator, "actor")] == [others[0], second.id]
    with pytest.raises(UsageError, match=r"There are 2 actors here: .*Choose one: --iplist FILE or --port PORT; or --all"):
        roles.stop("actor", roles.RunSelector(), False, False)
    roles.stop("actor", roles.RunSelector(port=7000), False, False)
    assert [status.id for status in roles.find_roles(orchestrator, "actor")] == [second.id]


@pytest.mark.parametrize("part", ["learner", "actor"])
def test_stop_and_status_take_the_same_list_as_start(call: Call, orchestrator: LocalOrchestrator, part: MachineRole) -> None:
    elsewhere, ours = (orchestrator.submit(sleeping(part, place)) for place in ("10.0.0.2:9610", "127.0.0.1:9610"))
    for job in (elsewhere, ours):
        wait_until_running(orchestrator, job)
    of_list = ("--iplist", "learner.iplist")
    assert [job["id"] for job in call(part, "status", *of_list, "--json").json] == [ours]
    assert call(part, "status", *of_list, "--port", "7000").code == 1
    assert "--iplist FILE" in one_line(call(part, "stop", "--node", "0"))
    stopped = call(part, "stop", *of_list)
    assert (stopped.code, f"{ours} has ended" in stopped.out) == (0, True)
    assert [status.id for status in roles.find_roles(orchestrator, part)] == [elsewhere]
    assert "none is running here for head 127.0.0.1" in call(part, "stop", *of_list).out
    assert "missing cannot be read" in one_line(call(part, "stop", "--iplist", "missing"))


def wait_until_running(orchestrator: LocalOrchestrator, job: str) -> None:
    wait_until(lambda: orchestrator.status(job).state != "pending")


def test_a_start_replaces_the_same_training_and_another_one_only_on_request(
    orchestrator: LocalOrchestrator,
) -> None:
    def subject(directory: str, *experiments: str) -> Job:
        return sleeping("learner", PLACE, jobs.TrainingTask(directory, experiments))

    first = roles.start_role(subject("/a", "cartpole"), orchestrator, "learner")
    for other in (subject("/b", "cartpole"), subject("/a", "pong"), subject("/a", "cartpole", "pong")):
        with pytest.raises(UsageError) as caught:
            roles.start_role(other, orchestrator, "learner")
        assert f"Another training uses {PLACE}: {first.id}, which trains cartpole in /a; this one trains" in str(caught.value)
        assert "another --port" in str(caught.value)
        assert "ludus learner stop --port 9610, or add --replace" in str(caught.value)
    assert [status.id for status in roles.find_roles(orchestrator, "learner")] == [first.id]
    second = roles.start_role(subject("/a"), orchestrator, "learner")  # --resume RUN
    third = roles.start_role(subject("/b", "pong"), orchestrator, "learner", replaces=True)
    assert [orchestrator.status(each.id).state for each in (first, second, third)] == ["cancelled", "cancelled", "running"]


def test_concurrent_starts_run_one_after_the_other(orchestrator: LocalOrchestrator) -> None:
    class Hurried(LocalOrchestrator):
        """Somebody else begins just when it does."""

        def submit(self, job: Job) -> str:
            with pytest.raises(UsageError, match=r"Another start of the actor at 10\.0\.0\.2:9610 is in progress"):
                roles.start_role(job, LocalOrchestrator(), "actor", lock_s=0.2)
            return super().submit(job)

    first = roles.start_role(sleeping("actor", PLACE), Hurried(), "actor")
    assert [status.id for status in roles.find_roles(orchestrator, "actor")] == [first.id]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: roles.start_role(sleeping("actor", PLACE), orchestrator, "actor"), range(2)))
    (left,) = roles.find_roles(orchestrator, "actor")
    assert left.id in {status.id for status in both}


def test_a_start_waits_for_no_other_role_or_port(orchestrator: LocalOrchestrator) -> None:
    with ExitStack() as stack:
        others: list[tuple[MachineRole, str]] = [("actor", PLACE), ("learner", PLACE), ("actor", "10.0.0.2:7000")]
        for part, place in others:
            stack.enter_context(roles.start_lock(orchestrator, part, place, 0.0))
        with pytest.raises(UsageError, match="in progress"):
            stack.enter_context(roles.start_lock(orchestrator, "actor", PLACE, 0.0))
    with roles.start_lock(orchestrator, "actor", PLACE, 0.0):  # given back
        assert [path.name.split("-")[:2] for path in (orchestrator.directory.parent / "roles").glob("actor-9*")] == [
            ["actor", "9610"]
        ]


def test_the_task_of_a_learner_is_stored_with_its_job(tmp_path: Path) -> None:
    Path("x.yaml").write_text(FILE)
    listed = load_hostfile(Path("learner.iplist"))
    meeting = jobs.Rendezvous(LocalAddress(0, "127.0.0.1", "127.0.0.1"), tmp_path / "token", tmp_path / "logs")
    trained = {
        ("-f", "x.yaml"): ("cartpole",),
        ("-f", "x.yaml", "--experiment-name", "mine"): ("mine",),
        ("CartPole-v1", "-n", "2"): ("CartPole-v1",),
        ("Acrobot-v1", "-n", "2"): ("Acrobot-v1",),
        ("--resume", "somewhere"): (),
    }
    found = {words: jobs.TrainingTask.of(learner._head_job(listed, meeting, words, 0, 9.0)[0]) for words in trained}
    assert found == {words: jobs.TrainingTask(str(tmp_path), names) for words, names in trained.items()}


def test_status_is_shown_even_if_the_head_is_unreachable(call: Call, orchestrator: LocalOrchestrator) -> None:
    job_id = orchestrator.submit(sleeping("learner", PLACE))
    (orchestrator.directory / job_id / "job.json").write_text("{")
    result = call("learner", "status", "--nodes")
    assert result.code == 0
    assert f"{job_id}  running" in result.out
    assert "job.json is damaged" in result.err
    (told,) = call("learner", "status", "--nodes", "--json").json
    assert (told["id"], told["machines"]) == (job_id, [])
    assert "job.json is damaged" in told["trouble"]


def test_status_shows_the_run_and_where_its_workers_are(call: Call, tmp_path: Path) -> None:
    orchestrator = LocalOrchestrator()
    job_id = orchestrator.submit(sleeping("learner", "10.0.0.2:9610"))
    try:
        workers = [{"node": "h1", "state": "ready"}, {"node": "h1", "state": "starting"}, {"node": "h2", "state": "ready"}]
        run = tmp_path / "run"
        run.mkdir()
        nodes = [{"name": "h1", "cores": 2}, {"name": "h2", "cores": 1}]
        (run / "status.json").write_text(json.dumps({"sampling": {"nodes": nodes, "workers": workers}}))
        (orchestrator.directory / job_id / "run.json").write_text(json.dumps({"cartpole": str(run)}))
        told = call("learner", "status", "--json").json
        assert [(each["id"], each["state"], each["run"]) for each in told] == [(job_id, "running", str(run))]
        assert told[0]["nodes"] == [{"name": "h1", "workers": 2, "ready": 1}, {"name": "h2", "workers": 1, "ready": 1}]
        result = call("learner", "status")
        assert result.code == 0
        assert "workers on h1: 1 of 2 ready" in result.out
        assert str(run) in result.out
    finally:
        orchestrator.cancel(job_id, at_once=True)
        wait(orchestrator, job_id, 30)
    assert call("learner", "status").code == 1


# -- clusters ---------------------------------------------------------------------------------------------------------------


def make_record(name: str, job_id: str, token: str = "") -> cluster.ClusterRecord:
    found = cluster.ClusterRecord(name, job_id)
    found.write(cluster.JOB, job_id)
    if token:
        found.write(cluster.TOKEN, token)
    return found


def test_the_record_of_a_cluster_and_its_token_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    games = make_record("games", "games-20261116-1-ab", "secret" * 10)
    assert cluster.find("games") == cluster.choose_cluster(None) == cluster.choose_cluster("games") == games
    assert games.token == tmp_path / "state" / "clusters" / "games" / "token"
    assert stat.S_IMODE(games.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(games.directory.stat().st_mode) == 0o700
    make_record("other", "other-1")
    with pytest.raises(UsageError, match=r"There are 2 clusters: games, other. Pass the name"):
        cluster.choose_cluster(None)
    with pytest.raises(UnknownName, match=r"No cluster 'gmaes' was started.*Did you mean 'games'"):
        cluster.choose_cluster("gmaes")
    games.remove()
    assert cluster.find("games") is None
    assert not games.directory.exists()


def test_a_path_is_not_a_cluster_name_and_foreign_files_are_kept(call: Call, tmp_path: Path) -> None:
    precious = tmp_path / "x" / "precious"
    precious.parent.mkdir()
    precious.touch()
    (tmp_path / "x" / "job").write_text("hi")
    for name in (str(tmp_path / "x"), "../../x"):
        assert f"No cluster {name!r} was started" in one_line(call("cluster", "down", name))
    games = make_record("games", "games-1")
    (games.directory / "notes").touch()
    assert "the cluster games is down" in call("cluster", "down", "games").out
    assert [path.name for path in games.directory.iterdir()] == ["notes"]
    assert sorted(path.name for path in precious.parent.iterdir()) == ["job", "precious"]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program in place of SSH that runs the command, its last word, on this machine; it refuses while a file `refuse` is beside it."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ -e {program.parent}/refuse ] && echo "ssh: connect to host h: Connection refused" >&2 && exit 255\n'
        f"[ -e {program.parent}/once ] && mv {program.parent}/once {program.parent}/refuse\n"
        'for last; do :; done; exec sh -c "$last"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    yield program
    (program.parent / "refuse").unlink(missing_ok=True)
    with SshOrchestrator() as there:
        for status in there.list():
            there.cancel(status.id, at_once=True)
            wait(there, status.id, 30)


def sleepy(ssh: Path) -> Path:
    """An interpreter with a Ray that only sleeps."""
    python = ssh.parent / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *ray_host*) exec sleep 600;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return python


def test_the_record_of_a_cluster_with_an_unreachable_head_is_kept(call: Call, ssh: Path) -> None:
    with SshOrchestrator(settings=SshSettings((SshNode("127.0.0.1"),))) as there:
        games = make_record("games", there.submit(sleeping("games", "")))
    (ssh.parent / "refuse").touch()
    result = call("cluster", "down")
    assert result.code == 1
    assert "The cluster games may still be up: its first machine, 127.0.0.1, does not answer" in result.err
    assert "is down" not in result.out
    again = call("cluster", "up", "--iplist", "learner.iplist", "--name", "games")
    assert again.code == 1
    assert "may still be up" in one_line(again)
    assert cluster.find("games") == games
    (ssh.parent / "refuse").unlink()
    assert "the cluster games is down" in call("cluster", "down").out
    assert cluster.find("games") is None
    with SshOrchestrator() as there:
        assert there.status(games.id).state == "cancelled"


def test_the_record_of_a_cluster_with_a_lost_head_can_be_removed(call: Call, ssh: Path) -> None:
    with SshOrchestrator(settings=SshSettings((SshNode("127.0.0.1"),))) as there:
        make_record("games", there.submit(sleeping("games", "")))
    (ssh.parent / "refuse").touch()
    assert call("cluster", "down", "--forget").code == 0
    assert cluster.find("games") is None


def test_a_started_cluster_is_recorded_even_if_its_token_cannot_be_fetched(call: Call, ssh: Path) -> None:
    (ssh.parent / "once").touch()  # one connection, and no other
    result = call("cluster", "up", "--iplist", "learner.iplist", "--python", str(sleepy(ssh)), "--wait", "0")
    assert result.code == 1
    assert "Connection refused" in result.err
    found = cluster.find("cluster")
    assert found is not None
    (ssh.parent / "refuse").unlink()
    with SshOrchestrator() as there:
        assert there.status(found.id).state == "running"
    assert call("cluster", "down").code == 0


def test_keys_that_are_named_here_are_found_from_elsewhere(call: Call, ssh: Path) -> None:
    keys = ("--identity", "keys/id", "--known-hosts", "known")
    (ssh.parent / "once").touch()  # nobody asks a Ray that sleeps, which takes long
    call("cluster", "up", "--iplist", "learner.iplist", *keys, "--python", str(sleepy(ssh)), "--wait", "0")
    (ssh.parent / "refuse").unlink()
    found = cluster.find("cluster")
    assert found is not None
    with SshOrchestrator() as there:
        settings = SshJobDir(there.directory / found.id).settings()
    assert (settings.identity, settings.known_hosts) == (Path("keys/id").absolute(), Path("known").absolute())
    assert call("cluster", "down").code == 0


def test_the_page_shows_which_machines_are_up(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.mktime((2026, 11, 16, 10, 0, 0, 0, 0, -1))
    up = {"node": 0, "host": "node2", "up": True, "cores": 8, "since": now, "why": ""}
    lost = {"node": 1, "host": "node1", "up": False, "cores": 6, "since": now, "why": "health check failed"}
    never = {"node": 2, "host": "node3", "up": False, "cores": 0, "since": None, "why": "nothing was started there"}
    page = {"name": "games", "id": "games-1", "state": "running", "reason": "", "trouble": "", "address": "node2:7000"}
    cluster._print({**page, "nodes": [up, lost, never]})
    result = capsys.readouterr().out
    assert "node2                up since 2026-11-16 10:00:00, 8 cores" in result
    assert "node1                DOWN since 2026-11-16 10:00:00: health check failed" in result
    assert "node3                DOWN: nothing was started there" in result
