"""Roles by hand: which machine this is, what is started on it, and the secret that they share."""

from __future__ import annotations

import dataclasses
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.launch.hostfile import NodeList, read_iplist
from ludus.launch.job import checked
from ludus.launch.local_address import Here, Network, locate
from ludus.launch.roles import (
    Meeting,
    Subject,
    cluster_job,
    copy_line,
    joining_job,
    learner_job,
    need_token,
    token_path,
    train_words,
)
from ludus.process.job_env import Surroundings

ONE = read_iplist("10.0.0.2 root 36000 1", "learner.iplist")
TWO = read_iplist("10.0.0.2 root 36000 1\n10.0.0.3 root 36000 2", "learner.iplist")
NAMES = read_iplist("node2 root 36000 1\nnode3", "learner.iplist")


# -- which machine is this? -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeNetwork(Network):
    """A machine with these interfaces, in a network with these names."""

    cards: Mapping[str, str]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def resolve(self, host: str) -> tuple[str, ...]:
        return (self.names[host],) if host in self.names else ()

    def is_ours(self, address: str) -> bool:
        return address in self.cards.values() or address.startswith("127.")

    def interfaces(self) -> dict[str, str]:
        return dict(self.cards)

    def towards(self, address: str) -> str:
        return address if address.startswith("127.") else self.cards.get("eth0", "")


HEAD = FakeNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "192.168.1.2"})
SECOND = FakeNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.3"})
STRANGER = FakeNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.9", "ib0": "10.1.0.9", "docker0": ""})


def test_a_machine_finds_itself_in_the_list_by_its_address() -> None:
    assert locate(TWO, {}, network=HEAD) == Here(0, "10.0.0.2", "10.0.0.2")
    assert locate(TWO, {}, network=SECOND) == Here(1, "10.0.0.3", "10.0.0.2")


def test_it_may_be_told_which_one_it_is() -> None:
    assert locate(TWO, {}, 1, network=STRANGER) == Here(1, "10.0.0.3", "10.0.0.2")
    with pytest.raises(
        UsageError, match=r"--node 2: learner.iplist has 2 machines, counted from 0. The list: 0: 10.0.0.2, 1: 10.0.0.3"
    ):
        locate(TWO, {}, 2, network=HEAD)


def test_a_machine_that_is_not_in_the_list_is_told_its_own_addresses() -> None:
    with pytest.raises(UsageError, match=r"not in learner.iplist; its addresses are 127.0.0.1, 10.0.0.9, 10.1.0.9\. .*--node N"):
        locate(TWO, {}, network=STRANGER)


def test_an_actor_need_not_be_in_the_list() -> None:
    assert locate(ONE, {}, network=STRANGER, must=False) == Here(None, "10.0.0.9", "10.0.0.2")
    assert locate(ONE, {"NET_CARD_NAME": "ib0"}, network=STRANGER, must=False) == Here(None, "10.1.0.9", "10.0.0.2")
    with pytest.raises(UsageError, match=r"no way from this machine to the head, 10.0.0.2"):
        locate(ONE, {}, network=FakeNetwork({"lo": "127.0.0.1"}), must=False)


@pytest.mark.parametrize(("card", "why"), [("eth7", "is none of this machine's interfaces"), ("docker0", "has no IPv4 address")])
def test_an_interface_that_is_not_there_is_named_with_those_that_are(card: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        locate(ONE, {"NET_CARD_NAME": card}, network=STRANGER, must=False)
    assert str(caught.value) == f"NET_CARD_NAME={card} {why}. There are: lo (127.0.0.1), eth0 (10.0.0.9), ib0 (10.1.0.9)."


def test_an_interface_chooses_among_the_addresses_of_a_name() -> None:
    named = FakeNetwork(HEAD.cards, {"node2": "10.0.0.2", "node3": "10.0.0.3"})
    assert locate(NAMES, {}, network=named) == Here(0, "10.0.0.2", "10.0.0.2")
    assert locate(NAMES, {"NET_CARD_NAME": "eth1"}, network=named) == Here(0, "192.168.1.2", "192.168.1.2")


def test_a_name_that_stands_for_every_address_is_nobodys() -> None:
    blocked = FakeNetwork({"lo": "127.0.0.1", "all": "0.0.0.0", "eth0": "10.0.0.9"}, {"node2": "0.0.0.0"})
    with pytest.raises(UsageError, match="nobody knows the address of node2"):
        locate(NAMES, {}, network=blocked, must=False)


def test_an_interface_with_another_address_than_the_list_has_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"the address 192.168.1.2, and learner.iplist names this machine by 10.0.0.2\. Write"):
        locate(TWO, {"NET_CARD_NAME": "eth1"}, network=HEAD)


def test_on_one_machine_alone_no_interface_matters() -> None:
    alone = read_iplist("127.0.0.1 root 36000 1")
    assert locate(alone, {"NET_CARD_NAME": "eth0"}, network=HEAD) == Here(0, "127.0.0.1", "127.0.0.1")
    assert locate(alone, {}, network=STRANGER, must=False) == Here(0, "127.0.0.1", "127.0.0.1")


def test_a_machine_whose_own_name_means_loopback_takes_the_address_that_others_see() -> None:
    debian = FakeNetwork(HEAD.cards, {"node2": "127.0.1.1", "node3": "10.0.0.3"})
    assert locate(NAMES, {}, network=debian) == Here(0, "10.0.0.2", "10.0.0.2")
    assert locate(NAMES, {"NET_CARD_NAME": "eth1"}, network=debian) == Here(0, "192.168.1.2", "192.168.1.2")


def test_a_head_that_nobody_knows_is_an_error_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"learner.iplist, line 1: nobody knows the address of node2"):
        locate(NAMES, {}, network=FakeNetwork(SECOND.cards, {"node3": "10.0.0.3"}))


def test_two_lines_that_are_this_machine_need_to_be_told_apart() -> None:
    both = read_iplist("10.0.0.2\n192.168.1.2", "list")
    with pytest.raises(UsageError, match=r"Machines 0, 1 of list are all this one. Say which one is meant: --node N"):
        locate(both, {}, network=HEAD)
    assert locate(both, {"NET_CARD_NAME": "eth1"}, network=HEAD).node == 1


def test_the_real_network_knows_this_machine() -> None:
    network = Network()
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.is_ours("127.0.0.1")
    assert not network.is_ours("192.0.2.1")
    assert network.towards("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" in network.resolve("localhost")
    assert network.resolve("no-such-name.invalid") == ()
    assert set(network.interfaces()) == {name for _, name in socket.if_nameindex()}


# -- what is started ------------------------------------------------------------------------------------------------------

PYTHON = (sys.executable, "-P", "-m")


def meeting(here: Here, base: Path = Path("/home/me")) -> Meeting:
    return Meeting(here, base / "token", base / "logs")


def test_the_learner_is_a_head_a_door_and_a_training() -> None:
    job = checked(learner_job(ONE, meeting(locate(ONE, {}, network=HEAD)), ["CartPole-v1", "-n", "6"], {}))
    assert (job.name, job.main, job.place, job.nodes, job.ray) == ("learner", "main", "10.0.0.2:9610", 1, 0)
    assert [(role.name, role.command[3:], role.restart, role.log) for role in job.roles] == [
        ("ray", ("ludus.launch.ray_role", "--cpus", "0"), "on-failure", "/home/me/logs/learner/ray.log"),
        ("door", ("ludus.launch.ssh.lifeline", "door"), "on-failure", "/home/me/logs/learner/door.log"),
        ("main", ("ludus.cli.main", "train", "CartPole-v1", "-n", "6"), "when-killed", "/home/me/logs/learner/train.log"),
    ]
    for role in job.roles:
        assert role.command[:3] == PYTHON
        around = Surroundings.of(role.environment)
        assert around is not None
        assert (around.head, around.door) == ("10.0.0.2:9610", ("10.0.0.2", 9611))
        assert (around.node, around.ray, around.token_file) == (0, 2, Path("/home/me/token"))
        assert around.nodes == ("10.0.0.2", "any-actor")


@pytest.mark.parametrize(("listed", "cpus", "ray", "learners"), [(ONE, 0, 2, 0), (TWO, 0, 2, 2), (ONE, 4, 1, 0), (TWO, 4, 1, 2)])
def test_work_begins_when_there_is_somebody_to_do_it(listed: NodeList, cpus: int, ray: int, learners: int) -> None:
    job = learner_job(listed, meeting(Here(0, "10.0.0.2", "10.0.0.2")), ["x"], {}, cpus=cpus, wait_s=7)
    *others, main = (Surroundings.of(role.environment) for role in job.roles)
    assert main is not None
    assert (main.ray, main.wait_s, main.learners) == (ray, 7, learners)
    assert all(around is not None and around.learners == 0 for around in others)


def test_a_further_machine_of_the_list_brings_a_learner_for_each_slot() -> None:
    here = locate(TWO, {}, network=SECOND)
    job = checked(joining_job("learner", TWO, meeting(here), {}, learners=2))
    assert [(role.name, role.count, role.command[3:], role.log) for role in job.roles] == [
        ("learner", 2, ("ludus.distributed.learners.remote_rank",), "/home/me/logs/learner/rank_{index}.log"),
        ("main", 1, ("ludus.launch.ssh.lifeline", "hold", "--stay"), "/home/me/logs/learner/monitor.log"),
    ]
    around = Surroundings.of(job.roles[0].environment)
    assert around is not None
    assert around.learners_entrance == ("10.0.0.2", 9612)
    assert [role.name for role in joining_job("learner", TWO, meeting(here), {}, learners=1, cpus=3).roles] == [
        "ray",
        "learner",
        "main",
    ]


def test_an_actor_is_a_node_that_stays() -> None:
    here = locate(ONE, {}, network=STRANGER, must=False)
    job = checked(joining_job("actor", ONE, meeting(here), {}, cpus=6, gamecore="10.0.0.9:23432", advertise="10.0.7.7"))
    assert (job.name, job.main, job.place) == ("actor", "main", "10.0.0.2:9610")
    ray, main = job.roles
    assert ray.command == (
        *PYTHON, "ludus.launch.ray_role", "--cpus", "6", "--gamecore", "10.0.0.9:23432",
        "--log-dir", "/home/me/logs/actor", "--stay",
    )  # fmt: skip
    assert main.command == (*PYTHON, "ludus.launch.ssh.lifeline", "hold", "--stay")
    assert (ray.restart, main.restart) == ("always", "always")
    around = Surroundings.of(ray.environment)
    assert around is not None
    assert (around.nodes, around.node, around.head) == (("10.0.0.2", "10.0.0.9"), 1, "10.0.0.2:9610")
    assert ray.environment["GAMECORE_SERVER_ADDR"] == "10.0.0.9:23432"
    assert ray.environment["LUDUS_ADVERTISE"] == "10.0.7.7"


def test_every_machine_has_a_number_of_its_own_and_one_that_is_not_in_the_list_the_next() -> None:
    def around(listed: NodeList, here: Here) -> tuple[tuple[str, ...], int]:
        found = Surroundings.of(joining_job("actor", listed, meeting(here), {}, cpus=1).roles[0].environment)
        assert found is not None
        return found.nodes, found.node

    assert around(TWO, Here(1, "10.0.0.3", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3"), 1)
    assert around(TWO, Here(0, "10.0.0.2", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3", "10.0.0.2"), 2)
    assert around(TWO, Here(None, "10.0.0.9", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3", "10.0.0.9"), 2)
    assert around(NAMES, Here(1, "10.1.0.3", "10.0.0.2")) == (("10.0.0.2", "10.1.0.3"), 1)


def test_an_actor_beside_the_learner_shares_its_weights() -> None:
    job = joining_job("actor", ONE, meeting(Here(0, "10.0.0.2", "10.0.0.2")), {}, cpus=2, share_weights=True)
    assert "--share-weights" in job.roles[0].command
    assert "--gamecore" not in job.roles[0].command
    assert "GAMECORE_SERVER_ADDR" not in job.roles[0].environment


def test_a_run_of_one_machine_alone_listens_there_alone() -> None:
    alone = read_iplist("127.0.0.1 root 36000 1")
    here = meeting(Here(0, "127.0.0.1", "127.0.0.1"))
    for job in (learner_job(alone, here, ["x"], {}), joining_job("actor", alone, here, {}, cpus=1)):
        assert all(role.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" for role in job.roles)
    far = learner_job(ONE, meeting(Here(0, "10.0.0.2", "10.0.0.2")), ["x"], {})
    assert all("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in role.environment for role in far.roles)


def test_two_learners_are_of_one_run_when_they_were_started_in_one_place_for_the_same() -> None:
    first = Subject("/a", ("cart pole", "pong"))
    assert first.is_same_run(Subject("/a", ("pong", "cart pole")))
    assert first.is_same_run(Subject("/a"))
    assert Subject("/a").is_same_run(first)
    assert not first.is_same_run(Subject("/a", ("pong",)))
    assert not first.is_same_run(Subject("/b", ("cart pole", "pong")))
    assert not first.is_same_run(Subject("/b"))
    here = meeting(Here(0, "10.0.0.2", "10.0.0.2"))
    assert Subject.of(learner_job(ONE, here, ["x"], {}, subject=first)) == first
    assert Subject.of(learner_job(ONE, here, ["x"], {})) is None
    assert Subject.of(joining_job("actor", ONE, here, {}, cpus=1)) is None


def test_secrets_are_named_and_never_written() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "horse-battery-staple", "WANDB_API_KEY": ""}
    for job in (
        learner_job(ONE, meeting(Here(0, "10.0.0.2", "10.0.0.2")), ["x"], environ),
        joining_job("actor", ONE, meeting(Here(None, "10.0.0.9", "10.0.0.2")), environ, cpus=1),
    ):
        assert job.secrets == ("AWS_SECRET_ACCESS_KEY",)
        assert "horse" not in repr(job)


def test_a_standing_cluster_is_a_head_and_nodes() -> None:
    listed = read_iplist("nodes:\n- {host: a}\n- {host: b, actors: 6}\n- {host: c, actors: 6}\n- {host: d, actors: 2}\n")
    job = checked(cluster_job("games", listed, python="/opt/bin/python"))
    assert (job.name, job.main, job.nodes, job.ray) == ("games", "head", 4, 4)
    host = ("/opt/bin/python", "-P", "-m", "ludus.launch.ray_role")
    assert [(role.name, role.count, role.at, role.restart, role.command) for role in job.roles] == [
        ("head", 1, (0,), "when-killed", (*host, "--stay")),
        ("node", 2, (1, 2), "on-failure", (*host, "--cpus", "6", "--stay")),
        ("node-2", 1, (3,), "on-failure", (*host, "--cpus", "2", "--stay")),
    ]
    assert all("LUDUS_JOB_PORT" not in role.environment for role in job.roles)
    told = cluster_job("games", listed, cpus=4, port=7000)
    assert {role.command[-3:] for role in told.roles} == {("--cpus", "4", "--stay")}
    assert all(role.environment == {"LUDUS_JOB_PORT": "7000"} for role in told.roles)
    assert [role.name for role in cluster_job("alone", read_iplist("a")).roles] == ["head"]


def test_machines_meet_by_ipv4_and_ssh_may_go_by_ipv6() -> None:
    with pytest.raises(UsageError, match=r"fe80::1 is an IPv6 address, and the machines of a run meet by IPv4\. Write"):
        cluster_job("games", read_iplist("fe80::1"))
    both = read_iplist("nodes:\n- {host: 'fe80::1', address: 10.0.0.2}\n")
    assert cluster_job("games", both).nodes == 1


# -- the training ---------------------------------------------------------------------------------------------------------

ACTORS = read_iplist("nodes:\n- {host: a, slots: 2}\n- {host: b, actors: 6}\n- {host: c, actors: 4}\n")


@pytest.mark.parametrize(
    ("words", "listed", "workers", "learners", "found"),
    [
        (["CartPole-v1", "-n", "6"], ONE, 6, None, ["CartPole-v1", "-n", "6"]),
        (["CartPole-v1"], ACTORS, None, None, ["CartPole-v1", "--num-workers", "10", "--num-learners", "2"]),
        (["CartPole-v1", "-n", "3"], ACTORS, 3, 1, ["CartPole-v1", "-n", "3"]),
        ([], ONE, 2, None, ["-f", "experiment.yaml"]),
    ],
)
def test_what_the_arguments_leave_open_is_taken_from_the_list(
    words: list[str], listed: NodeList, workers: int | None, learners: int | None, found: list[str]
) -> None:
    there = Path("experiment.yaml")
    assert train_words(words, listed, workers=workers, learners=learners, experiment=there)[0] == found


def test_what_nobody_says_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"How many workers .*the sum of ACTOR_NUM"):
        train_words(["CartPole-v1"], ONE, workers=None, learners=None, experiment=None)
    with pytest.raises(UsageError, match=r"What shall the learner train\?.*experiment.yaml"):
        train_words([], ONE, workers=None, learners=None, experiment=None)


# -- the token ------------------------------------------------------------------------------------------------------------


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    assert need_token(path, ONE, create=True)
    text = path.read_text()
    assert len(text) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not need_token(path, ONE, create=True)
    assert path.read_text() == text


def test_where_it_is_missing_the_command_that_brings_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        need_token(tmp_path / "my state" / "token", ONE, create=False)
    assert "scp -P 36000 '10.0.0.2:" not in str(caught.value)
    assert f"mkdir -p -m 700 '{tmp_path}/my state' && scp -P 36000 'root@10.0.0.2:{tmp_path}/my state/token'" in str(caught.value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "scp root@node2:.local/token" in copy_line(tmp_path / ".local" / "token", read_iplist("node2 root"))
    assert "scp '[fe80::1]:.local/token'" in copy_line(tmp_path / ".local" / "token", read_iplist("fe80::1"))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a" * 64, 0o644, r"can be read by others\. chmod 600"),
        ("", 0o600, "holds no token"),
        ("short", 0o600, "holds no token"),
        ("ä" * 64, 0o600, "it is not text"),
        ("a" * 10_000, 0o600, "holds no token"),
        ("a b" * 20, 0o600, "holds no token"),
    ],
)
def test_what_is_no_private_token_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        need_token(path, ONE, create=True)


def test_where_the_token_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path))
    assert token_path(None, {}) == tmp_path / "token"
    assert token_path(None, {"LUDUS_TOKEN_FILE": "/a/b"}) == Path("/a/b")
    assert token_path(Path("/c"), {"LUDUS_TOKEN_FILE": "/a/b"}) == Path("/c")
