"""Jobs of learners, actors and clusters: the local address, the planned roles, and the shared token."""

from __future__ import annotations

import dataclasses
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.launch.hostfile import Hostfile, parse_hostfile
from ludus.launch.job import check_job
from ludus.launch.local_address import HostNetwork, LocalAddress, find_local_address
from ludus.launch.roles import (
    NodeContribution,
    Rendezvous,
    TrainingTask,
    cluster_job,
    copy_command,
    ensure_token,
    joining_job,
    learner_job,
    token_path,
    train_arguments,
)
from ludus.process.job_env import JobEnv

ONE = parse_hostfile("10.0.0.2 root 36000 1", "learner.iplist")
TWO = parse_hostfile("10.0.0.2 root 36000 1\n10.0.0.3 root 36000 2", "learner.iplist")
NAMES = parse_hostfile("node2 root 36000 1\nnode3", "learner.iplist")


# -- local address ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeHostNetwork(HostNetwork):
    """A machine with these interfaces, in a network with these names."""

    cards: Mapping[str, str]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def resolve(self, host: str) -> tuple[str, ...]:
        return (self.names[host],) if host in self.names else ()

    def is_local(self, address: str) -> bool:
        return address in self.cards.values() or address.startswith("127.")

    def interfaces(self) -> dict[str, str]:
        return dict(self.cards)

    def address_towards(self, address: str) -> str:
        return address if address.startswith("127.") else self.cards.get("eth0", "")


HEAD = FakeHostNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "192.168.1.2"})
SECOND = FakeHostNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.3"})
STRANGER = FakeHostNetwork({"lo": "127.0.0.1", "eth0": "10.0.0.9", "ib0": "10.1.0.9", "docker0": ""})


def test_a_machine_finds_itself_in_the_list_by_its_address() -> None:
    assert find_local_address(TWO, {}, network=HEAD) == LocalAddress(0, "10.0.0.2", "10.0.0.2")
    assert find_local_address(TWO, {}, network=SECOND) == LocalAddress(1, "10.0.0.3", "10.0.0.2")


def test_the_user_may_give_the_number_of_this_machine() -> None:
    assert find_local_address(TWO, {}, 1, network=STRANGER) == LocalAddress(1, "10.0.0.3", "10.0.0.2")
    with pytest.raises(
        UsageError, match=r"--node 2: learner.iplist has 2 machines, counted from 0. The list: 0: 10.0.0.2, 1: 10.0.0.3"
    ):
        find_local_address(TWO, {}, 2, network=HEAD)


def test_the_error_of_an_unlisted_machine_names_its_addresses() -> None:
    with pytest.raises(UsageError, match=r"not in learner.iplist; its addresses are 127.0.0.1, 10.0.0.9, 10.1.0.9\. .*--node N"):
        find_local_address(TWO, {}, network=STRANGER)


def test_an_actor_need_not_be_in_the_list() -> None:
    assert find_local_address(ONE, {}, network=STRANGER, required=False) == LocalAddress(None, "10.0.0.9", "10.0.0.2")
    assert find_local_address(ONE, {"NET_CARD_NAME": "ib0"}, network=STRANGER, required=False) == LocalAddress(
        None, "10.1.0.9", "10.0.0.2"
    )
    with pytest.raises(UsageError, match=r"no route from this machine to the head, 10.0.0.2"):
        find_local_address(ONE, {}, network=FakeHostNetwork({"lo": "127.0.0.1"}), required=False)


@pytest.mark.parametrize(("card", "why"), [("eth7", "is not an interface of this machine"), ("docker0", "has no IPv4 address")])
def test_an_unknown_interface_is_an_error_that_lists_the_others(card: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_local_address(ONE, {"NET_CARD_NAME": card}, network=STRANGER, required=False)
    assert str(caught.value) == f"NET_CARD_NAME={card} {why}. Interfaces: lo (127.0.0.1), eth0 (10.0.0.9), ib0 (10.1.0.9)."


def test_an_interface_chooses_among_the_addresses_of_a_name() -> None:
    named = FakeHostNetwork(HEAD.cards, {"node2": "10.0.0.2", "node3": "10.0.0.3"})
    assert find_local_address(NAMES, {}, network=named) == LocalAddress(0, "10.0.0.2", "10.0.0.2")
    assert find_local_address(NAMES, {"NET_CARD_NAME": "eth1"}, network=named) == LocalAddress(0, "192.168.1.2", "192.168.1.2")


def test_a_name_that_resolves_to_the_unspecified_address_is_unknown() -> None:
    blocked = FakeHostNetwork({"lo": "127.0.0.1", "all": "0.0.0.0", "eth0": "10.0.0.9"}, {"node2": "0.0.0.0"})
    with pytest.raises(UsageError, match="the name node2 cannot be resolved"):
        find_local_address(NAMES, {}, network=blocked, required=False)


def test_an_interface_that_contradicts_the_list_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"the address 192.168.1.2, and learner.iplist names this machine by 10.0.0.2\. Write"):
        find_local_address(TWO, {"NET_CARD_NAME": "eth1"}, network=HEAD)


def test_with_a_loopback_head_the_interface_is_ignored() -> None:
    alone = parse_hostfile("127.0.0.1 root 36000 1")
    assert find_local_address(alone, {"NET_CARD_NAME": "eth0"}, network=HEAD) == LocalAddress(0, "127.0.0.1", "127.0.0.1")
    assert find_local_address(alone, {}, network=STRANGER, required=False) == LocalAddress(0, "127.0.0.1", "127.0.0.1")


def test_a_name_that_resolves_to_loopback_is_replaced_by_a_reachable_address() -> None:
    debian = FakeHostNetwork(HEAD.cards, {"node2": "127.0.1.1", "node3": "10.0.0.3"})
    assert find_local_address(NAMES, {}, network=debian) == LocalAddress(0, "10.0.0.2", "10.0.0.2")
    assert find_local_address(NAMES, {"NET_CARD_NAME": "eth1"}, network=debian) == LocalAddress(0, "192.168.1.2", "192.168.1.2")


def test_an_unresolvable_head_is_an_error_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"learner.iplist, line 1: the name node2 cannot be resolved"):
        find_local_address(NAMES, {}, network=FakeHostNetwork(SECOND.cards, {"node3": "10.0.0.3"}))


def test_two_lines_of_this_machine_are_ambiguous() -> None:
    both = parse_hostfile("10.0.0.2\n192.168.1.2", "list")
    with pytest.raises(UsageError, match=r"Machines 0, 1 of list are all this one. Choose one: --node N"):
        find_local_address(both, {}, network=HEAD)
    assert find_local_address(both, {"NET_CARD_NAME": "eth1"}, network=HEAD).node == 1


def test_the_real_network_knows_this_machine() -> None:
    network = HostNetwork()
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.is_local("127.0.0.1")
    assert not network.is_local("192.0.2.1")
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" in network.resolve("localhost")
    assert network.resolve("no-such-name.invalid") == ()
    assert set(network.interfaces()) == {name for _, name in socket.if_nameindex()}


# -- jobs -----------------------------------------------------------------------------------------------------------------

PYTHON = (sys.executable, "-P", "-m")


def rendezvous(here: LocalAddress, base: Path = Path("/home/me")) -> Rendezvous:
    return Rendezvous(here, base / "token", base / "logs")


def test_the_learner_job_has_ray_lifeline_and_training() -> None:
    job = check_job(learner_job(ONE, rendezvous(find_local_address(ONE, {}, network=HEAD)), ["CartPole-v1", "-n", "6"], {}))
    assert (job.name, job.main, job.place, job.nodes, job.ray) == ("learner", "main", "10.0.0.2:9610", 1, 0)
    assert [(role.name, role.command[3:], role.restart, role.log) for role in job.roles] == [
        ("ray", ("ludus.launch.ray_role", "--cpus", "0"), "on-failure", "/home/me/logs/learner/ray.log"),
        ("lifeline", ("ludus.launch.ssh.lifeline", "serve"), "on-failure", "/home/me/logs/learner/lifeline.log"),
        ("main", ("ludus.cli.main", "train", "CartPole-v1", "-n", "6"), "when-killed", "/home/me/logs/learner/train.log"),
    ]
    for role in job.roles:
        assert role.command[:3] == PYTHON
        env = JobEnv.from_environ(role.environment)
        assert env is not None
        assert (env.head, env.lifeline_address) == ("10.0.0.2:9610", ("10.0.0.2", 9611))
        assert (env.node, env.ray, env.token_file) == (0, 2, Path("/home/me/token"))
        assert env.nodes == ("10.0.0.2", "any-actor")


@pytest.mark.parametrize(("hosts", "cpus", "ray", "learners"), [(ONE, 0, 2, 0), (TWO, 0, 2, 2), (ONE, 4, 1, 0), (TWO, 4, 1, 2)])
def test_the_training_waits_for_learners_and_an_actor(hosts: Hostfile, cpus: int, ray: int, learners: int) -> None:
    job = learner_job(hosts, rendezvous(LocalAddress(0, "10.0.0.2", "10.0.0.2")), ["x"], {}, cpus=cpus, wait_s=7)
    *others, main = (JobEnv.from_environ(role.environment) for role in job.roles)
    assert main is not None
    assert (main.ray, main.wait_s, main.learners) == (ray, 7, learners)
    assert all(env is not None and env.learners == 0 for env in others)


def test_another_machine_runs_a_learner_for_each_slot() -> None:
    here = find_local_address(TWO, {}, network=SECOND)
    job = check_job(joining_job("learner", TWO, rendezvous(here), {}, NodeContribution(learners=2)))
    assert [(role.name, role.count, role.command[3:], role.log) for role in job.roles] == [
        ("learner", 2, ("ludus.distributed.learners.remote_rank",), "/home/me/logs/learner/rank_{index}.log"),
        ("main", 1, ("ludus.launch.ssh.lifeline", "hold", "--stay"), "/home/me/logs/learner/monitor.log"),
    ]
    env = JobEnv.from_environ(job.roles[0].environment)
    assert env is not None
    assert env.learner_address == ("10.0.0.2", 9612)
    assert [role.name for role in joining_job("learner", TWO, rendezvous(here), {}, NodeContribution(3, 1)).roles] == [
        "ray",
        "learner",
        "main",
    ]


def test_an_actor_job_is_a_ray_node_that_rejoins() -> None:
    here = find_local_address(ONE, {}, network=STRANGER, required=False)
    share = NodeContribution(6, gamecore="10.0.0.9:23432", advertise="10.0.7.7")
    job = check_job(joining_job("actor", ONE, rendezvous(here), {}, share))
    assert (job.name, job.main, job.place) == ("actor", "main", "10.0.0.2:9610")
    ray, main = job.roles
    assert ray.command == (
        *PYTHON, "ludus.launch.ray_role", "--cpus", "6", "--gamecore", "10.0.0.9:23432",
        "--log-dir", "/home/me/logs/actor", "--stay",
    )  # fmt: skip
    assert main.command == (*PYTHON, "ludus.launch.ssh.lifeline", "hold", "--stay")
    assert (ray.restart, main.restart) == ("always", "always")
    env = JobEnv.from_environ(ray.environment)
    assert env is not None
    assert (env.nodes, env.node, env.head) == (("10.0.0.2", "10.0.0.9"), 1, "10.0.0.2:9610")
    assert ray.environment["GAMECORE_SERVER_ADDR"] == "10.0.0.9:23432"
    assert ray.environment["LUDUS_ADVERTISE"] == "10.0.7.7"


def test_an_unlisted_machine_gets_the_next_node_number() -> None:
    def env(hosts: Hostfile, here: LocalAddress) -> tuple[tuple[str, ...], int]:
        found = JobEnv.from_environ(joining_job("actor", hosts, rendezvous(here), {}, NodeContribution(1)).roles[0].environment)
        assert found is not None
        return found.nodes, found.node

    assert env(TWO, LocalAddress(1, "10.0.0.3", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3"), 1)
    assert env(TWO, LocalAddress(0, "10.0.0.2", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3", "10.0.0.2"), 2)
    assert env(TWO, LocalAddress(None, "10.0.0.9", "10.0.0.2")) == (("10.0.0.2", "10.0.0.3", "10.0.0.9"), 2)
    assert env(NAMES, LocalAddress(1, "10.1.0.3", "10.0.0.2")) == (("10.0.0.2", "10.1.0.3"), 1)


def test_an_actor_on_the_learners_machine_may_share_its_weights() -> None:
    job = joining_job(
        "actor", ONE, rendezvous(LocalAddress(0, "10.0.0.2", "10.0.0.2")), {}, NodeContribution(2, share_weights=True)
    )
    assert "--share-weights" in job.roles[0].command
    assert "--gamecore" not in job.roles[0].command
    assert "GAMECORE_SERVER_ADDR" not in job.roles[0].environment


def test_a_run_on_loopback_tells_ray_that_it_is_alone() -> None:
    alone = parse_hostfile("127.0.0.1 root 36000 1")
    here = rendezvous(LocalAddress(0, "127.0.0.1", "127.0.0.1"))
    for job in (learner_job(alone, here, ["x"], {}), joining_job("actor", alone, here, {}, NodeContribution(1))):
        assert all(role.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" for role in job.roles)
    far = learner_job(ONE, rendezvous(LocalAddress(0, "10.0.0.2", "10.0.0.2")), ["x"], {})
    assert all("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in role.environment for role in far.roles)


def test_learners_with_equal_directory_and_experiments_are_of_one_run() -> None:
    first = TrainingTask("/a", ("cart pole", "pong"))
    assert first.is_same_run(TrainingTask("/a", ("pong", "cart pole")))
    assert first.is_same_run(TrainingTask("/a"))
    assert TrainingTask("/a").is_same_run(first)
    assert not first.is_same_run(TrainingTask("/a", ("pong",)))
    assert not first.is_same_run(TrainingTask("/b", ("cart pole", "pong")))
    assert not first.is_same_run(TrainingTask("/b"))
    here = rendezvous(LocalAddress(0, "10.0.0.2", "10.0.0.2"))
    assert TrainingTask.of(learner_job(ONE, here, ["x"], {}, task=first)) == first
    assert TrainingTask.of(learner_job(ONE, here, ["x"], {})) is None
    assert TrainingTask.of(joining_job("actor", ONE, here, {}, NodeContribution(1))) is None


def test_jobs_contain_the_names_of_secrets_only() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "horse-battery-staple", "WANDB_API_KEY": ""}
    for job in (
        learner_job(ONE, rendezvous(LocalAddress(0, "10.0.0.2", "10.0.0.2")), ["x"], environ),
        joining_job("actor", ONE, rendezvous(LocalAddress(None, "10.0.0.9", "10.0.0.2")), environ, NodeContribution(1)),
    ):
        assert job.secrets == ("AWS_SECRET_ACCESS_KEY",)
        assert "horse" not in repr(job)


def test_a_cluster_job_has_a_head_and_nodes() -> None:
    hosts = parse_hostfile("nodes:\n- {host: a}\n- {host: b, actors: 6}\n- {host: c, actors: 6}\n- {host: d, actors: 2}\n")
    job = check_job(cluster_job("games", hosts, python="/opt/bin/python"))
    assert (job.name, job.main, job.nodes, job.ray) == ("games", "head", 4, 4)
    host = ("/opt/bin/python", "-P", "-m", "ludus.launch.ray_role")
    assert [(role.name, role.count, role.at, role.restart, role.command) for role in job.roles] == [
        ("head", 1, (0,), "when-killed", (*host, "--stay")),
        ("node", 2, (1, 2), "on-failure", (*host, "--cpus", "6", "--stay")),
        ("node-2", 1, (3,), "on-failure", (*host, "--cpus", "2", "--stay")),
    ]
    assert all("LUDUS_JOB_PORT" not in role.environment for role in job.roles)
    fixed = cluster_job("games", hosts, cpus=4, port=7000)
    assert {role.command[-3:] for role in fixed.roles} == {("--cpus", "4", "--stay")}
    assert all(role.environment == {"LUDUS_JOB_PORT": "7000"} for role in fixed.roles)
    assert [role.name for role in cluster_job("alone", parse_hostfile("a")).roles] == ["head"]


def test_machines_connect_by_ipv4_while_ssh_may_use_ipv6() -> None:
    with pytest.raises(UsageError, match=r"fe80::1 is an IPv6 address, and the machines of a run connect by IPv4\. Write"):
        cluster_job("games", parse_hostfile("fe80::1"))
    both = parse_hostfile("nodes:\n- {host: 'fe80::1', address: 10.0.0.2}\n")
    assert cluster_job("games", both).nodes == 1


# -- the training ---------------------------------------------------------------------------------------------------------

ACTORS = parse_hostfile("nodes:\n- {host: a, slots: 2}\n- {host: b, actors: 6}\n- {host: c, actors: 4}\n")


@pytest.mark.parametrize(
    ("words", "hosts", "workers", "learners", "found"),
    [
        (["CartPole-v1", "-n", "6"], ONE, 6, None, ["CartPole-v1", "-n", "6"]),
        (["CartPole-v1"], ACTORS, None, None, ["CartPole-v1", "--num-workers", "10", "--num-learners", "2"]),
        (["CartPole-v1", "-n", "3"], ACTORS, 3, 1, ["CartPole-v1", "-n", "3"]),
        ([], ONE, 2, None, ["-f", "experiment.yaml"]),
    ],
)
def test_missing_training_arguments_come_from_the_hostfile(
    words: list[str], hosts: Hostfile, workers: int | None, learners: int | None, found: list[str]
) -> None:
    there = Path("experiment.yaml")
    assert train_arguments(words, hosts, workers=workers, learners=learners, experiment=there)[0] == found


def test_missing_arguments_without_a_default_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"number of workers .*the sum of ACTOR_NUM"):
        train_arguments(["CartPole-v1"], ONE, workers=None, learners=None, experiment=None)
    with pytest.raises(UsageError, match=r"nothing to train .*experiment.yaml"):
        train_arguments([], ONE, workers=None, learners=None, experiment=None)


# -- the token ------------------------------------------------------------------------------------------------------------


def test_the_token_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    assert ensure_token(path, ONE, create=True)
    text = path.read_text()
    assert len(text) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not ensure_token(path, ONE, create=True)
    assert path.read_text() == text


def test_the_error_of_a_missing_token_has_the_copy_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        ensure_token(tmp_path / "my state" / "token", ONE, create=False)
    assert "scp -P 36000 '10.0.0.2:" not in str(caught.value)
    assert f"mkdir -p -m 700 '{tmp_path}/my state' && scp -P 36000 'root@10.0.0.2:{tmp_path}/my state/token'" in str(caught.value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "scp root@node2:.local/token" in copy_command(tmp_path / ".local" / "token", parse_hostfile("node2 root"))
    assert "scp '[fe80::1]:.local/token'" in copy_command(tmp_path / ".local" / "token", parse_hostfile("fe80::1"))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a" * 64, 0o644, r"can be read by other users\. chmod 600"),
        ("", 0o600, "does not contain a token"),
        ("short", 0o600, "does not contain a token"),
        ("ä" * 64, 0o600, "it is not text"),
        ("a" * 10_000, 0o600, "does not contain a token"),
        ("a b" * 20, 0o600, "does not contain a token"),
    ],
)
def test_an_invalid_or_readable_token_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        ensure_token(path, ONE, create=True)


def test_the_token_path_follows_option_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path))
    assert token_path(None, {}) == tmp_path / "token"
    assert token_path(None, {"LUDUS_TOKEN_FILE": "/a/b"}) == Path("/a/b")
    assert token_path(Path("/c"), {"LUDUS_TOKEN_FILE": "/a/b"}) == Path("/c")
