"""`ludus learner`, `actor` and `cluster`: what is asked of them before anything is started, and what they say."""

from __future__ import annotations

import json
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ludus.cli import cluster, learner, roles
from ludus.cli.actor import address_of, is_set, number_of
from ludus.cluster import roles as jobs
from ludus.cluster.cluster import Job, Role, wait
from ludus.cluster.local import LocalOrchestrator
from ludus.errors import UnknownName, UsageError
from ludus.runtime.machine import usable_cores
from ludus.runtime.surroundings import FIRST_PORT
from tests.cli.calling import Call, one_line

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
        (("learner", *START), "What shall the learner train?"),
        (("learner", *START, "CartPole-v1"), "Add --num-workers N: the sum of ACTOR_NUM"),
        (("learner", *START, "CartPole-v1", "--num-workers", "0"), "How many workers"),
        (("learner", *START, "CartPole-v1", "-n", "2", "--address", "x:1"), "--address: the run has a Ray of its own"),
        (("learner", *START, "CartPole-v1", "-n", "2", "-dc"), "-dc: its workers come by `ludus actor start`"),
        (("learner", *START, "CartPole-v1", "-n", "2", "--set", "config.gama=1"), "gamma"),
        (("learner", *START, "CartPole-v9", "-n", "2"), "CartPole-v9"),
        (("learner", *START, "CartPole-v1", "-n", "2", "--node", "3"), "--node 3: learner.iplist has 1 machines"),
        (("learner", "start", "--iplist", "missing", "x"), "The list of machines missing cannot be read"),
        (("actor", "start", "--iplist", "far.iplist"), "There is no token in"),
        (
            ("actor", "start", "--iplist", "far.iplist", "--no-model-pool"),
            "--no-model-pool is for a machine that the learner runs on",
        ),
        (("actor", *START, "--gamecore", "nowhere"), "'nowhere' is not the address of a gamecore server"),
        (("learner", "stop", "--port", "1"), ""),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    Path("far.iplist").write_text("192.0.2.7 root 36000 1\n")
    monkeypatch.setenv("NET_CARD_NAME", "lo")  # there may be no way to another machine from here
    said = call(*words)
    if message:
        assert said.code == 2
        assert message in one_line(said)
    else:
        assert said.code == 0
        assert "none is running here" in said.out
    assert LocalOrchestrator().list() == []


def test_an_option_that_training_does_not_have_is_told_as_there(call: Call) -> None:
    said = call("learner", *START, "CartPole-v1", "--num-wrokers", "3")
    assert said.code == 2
    assert "--num-wrokers" in said.err
    assert LocalOrchestrator().list() == []


def test_a_port_that_somebody_has_is_told(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = call("learner", *START, "CartPole-v1", "-n", "2", "--port", str(port))
    assert said.code == 2
    assert f"Port {port} of this machine is in use. Choose another one with --port" in said.err
    assert LocalOrchestrator().list() == []


def test_where_nothing_was_started_there_is_nothing_to_show(call: Call) -> None:
    said = call("learner", "status")
    assert (said.code, said.err) == (1, "no learner was started here\n")
    assert call("actor", "status", "--json").json == []
    assert "There is no cluster that was brought up from here" in one_line(call("cluster", "status"))
    assert "There is no cluster 'x'" in one_line(call("cluster", "down", "x"))


def test_the_port_is_the_same_wherever_it_is_said() -> None:
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
def test_the_number_of_workers_is_found_wherever_it_is_said(words: list[str], workers: object, learners: int | None) -> None:
    Path("x.yaml").write_text(FILE)
    assert learner.training_of(words)[:2] == (workers, learners)


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
    assert number_of(option, environ, listed) == number


@pytest.mark.parametrize("text", ["0", "-1", "six", "6.0", "99999", "1" * 5000])
def test_what_is_no_number_of_actors(text: str) -> None:
    with pytest.raises(UsageError, match=r"ACTOR_NUM=.* is no number of workers"):
        number_of(None, {"ACTOR_NUM": text}, 0)


@pytest.mark.parametrize("text", ["10.0.0.5:23432", "node1:1", "[fe80::1]:23432", ""])
def test_the_address_of_a_gamecore_server(text: str) -> None:
    assert address_of(f" {text} ") == text


@pytest.mark.parametrize("text", ["node1", ":1", "node1:", "node1:0", "node1:65536", "a b:1", "node1:" + "1" * 5000])
def test_what_is_no_address_of_a_gamecore_server(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a gamecore server"):
        address_of(text)


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)])
def test_a_switch_of_a_script(text: str, meant: bool) -> None:
    assert is_set("NO_MODEL_POOL", {"NO_MODEL_POOL": text}) is meant
    with pytest.raises(UsageError, match="X=perhaps is neither 1 nor 0"):
        is_set("X", {"X": "perhaps"})


def test_what_would_lead_processes_astray_is_dropped_and_said() -> None:
    environ = {"LD_PRELOAD": "x.so", "RAY_ADDRESS": "h:1", "ip_head": "", "PATH": "p"}
    assert roles.clean(environ) == [
        "LD_PRELOAD=x.so is dropped for the processes of this run",
        "RAY_ADDRESS=h:1 is dropped for the processes of this run",
    ]
    assert environ == {"ip_head": "", "PATH": "p"}


# -- jobs of this machine ---------------------------------------------------------------------------------------------------


def sleeping(part: str, place: str) -> Job:
    return Job(part, (Role("main", ("sleep", "600")),), "main", place=place)


def test_a_second_start_ends_the_first_of_the_same_run_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    orchestrator = LocalOrchestrator()
    others = [orchestrator.submit(sleeping("actor", "10.0.0.2:7000")), orchestrator.submit(sleeping("learner", "10.0.0.2:9610"))]
    others += [orchestrator.submit(sleeping("actor", ""))]  # somebody's job that happens to be called so
    try:
        first = roles.begin(sleeping("actor", "10.0.0.2:9610"), orchestrator, "actor")
        assert first.state == "running"
        assert "stop actor: none of this run is running here" in capsys.readouterr().out
        second = roles.begin(sleeping("actor", "10.0.0.2:9610"), orchestrator, "actor")
        assert f"{first.id} has ended" in capsys.readouterr().out
        assert orchestrator.status(first.id).state == "cancelled"
        assert [orchestrator.status(job).state for job in (*others, second.id)] == ["running"] * 4
        assert [status.id for status in roles.mine(orchestrator, "actor")] == [others[0], second.id]
        with pytest.raises(UsageError, match=r"There are 2 actors here: .*Say which one: --port PORT; or --all"):
            roles.stop("actor", None, False, False)
        roles.stop("actor", 7000, False, False)
        assert [status.id for status in roles.mine(orchestrator, "actor")] == [second.id]
    finally:
        for status in orchestrator.list():
            orchestrator.cancel(status.id, at_once=True)
            wait(orchestrator, status.id, 30)


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
        said = call("learner", "status")
        assert said.code == 0
        assert "workers on h1: 1 of 2 at work" in said.out
        assert str(run) in said.out
    finally:
        orchestrator.cancel(job_id, at_once=True)
        wait(orchestrator, job_id, 30)
    assert call("learner", "status").code == 1


# -- clusters ---------------------------------------------------------------------------------------------------------------


def test_a_cluster_is_remembered_with_its_token_for_its_owner_alone(tmp_path: Path) -> None:
    standing = cluster.Standing("games", "games-20261116-1-ab")
    standing.write("secret" * 10)
    assert cluster.find("games") == cluster.chosen(None) == cluster.chosen("games") == standing
    assert standing.token == tmp_path / "state" / "clusters" / "games" / "token"
    assert stat.S_IMODE(standing.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(standing.directory.stat().st_mode) == 0o700
    cluster.Standing("other", "other-1").write("x")
    with pytest.raises(UsageError, match=r"There are 2 clusters: games, other. Say which one"):
        cluster.chosen(None)
    with pytest.raises(UnknownName, match=r"There is no cluster 'gmaes'.*Did you mean 'games'"):
        cluster.chosen("gmaes")
    standing.remove()
    assert cluster.find("games") is None


def test_a_page_says_what_is_up_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.mktime((2026, 11, 16, 10, 0, 0, 0, 0, -1))
    up = {"node": 0, "host": "node2", "up": True, "cores": 8, "since": now, "why": ""}
    lost = {"node": 1, "host": "node1", "up": False, "cores": 6, "since": now, "why": "health check failed"}
    never = {"node": 2, "host": "node3", "up": False, "cores": 0, "since": None, "why": "nothing was started there"}
    page = {"name": "games", "id": "games-1", "state": "running", "reason": "", "trouble": "", "address": "node2:7000"}
    cluster._print({**page, "nodes": [up, lost, never]})
    said = capsys.readouterr().out
    assert "node2                up since 2026-11-16 10:00:00, 8 cores" in said
    assert "node1                DOWN since 2026-11-16 10:00:00: health check failed" in said
    assert "node3                DOWN: nothing was started there" in said
