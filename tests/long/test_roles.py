"""Roles by hand on several hosts: in any order, with machines that are lost and come back, and learners that are started anew."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system import ssh_rig
from tests.system.role_hosts import LUDUS, TRAINING, Machine, role_hosts

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

BUSY_S = 120.0  # for processes to start, on a machine that has other things to do


def test_actors_come_go_and_stay_while_learners_are_started_anew(tmp_path: Path) -> None:
    with role_hosts(3, tmp_path, lambda hosts: f"{hosts.address(0)} root 36000 1\r\n") as roles:
        endless = (*TRAINING, "--num-workers", "2", "--stop", "time_s=800")
        said = roles.start(0, "learner", *endless)
        assert "created a token" in said
        assert "There is no token" in roles.ludus(1, "actor", "start", "--iplist", "learner.iplist", code=2)
        roles.share_token()
        for host in (1, 2):
            said = roles.start(host, "actor", env={"ACTOR_NUM": "1", "NET_CARD_NAME": "eth0", "NO_MODEL_POOL": "0"})
            assert f"this machine: {roles.hosts.address(host)}" in said
        roles.until(lambda: roles.at_work() == {"h1": 1, "h2": 1}, 2 * BUSY_S)
        assert list((roles.place(1) / "logs" / "actor").glob("actor_*.log"))

        roles.hosts.power_off(2)
        roles.until(lambda: roles.at_work() == {"h1": 2}, BUSY_S)
        roles.until(lambda: "1 node lost" in roles.log(0, "learner/train.log"), 10)
        seen = roles.ludus(0, "learner", "status", "--nodes")
        assert f"h1 ({roles.hosts.address(1)}): up since" in seen
        assert f"h2 ({roles.hosts.address(2)}): LOST since" in seen
        roles.hosts.power_on(2)
        roles.start(2, "actor", "--num", "1")
        roles.until(lambda: roles.at_work() == {"h1": 1, "h2": 1}, 2 * BUSY_S)

        first = roles.status(0, "learner")
        said = roles.start(0, "learner", *TRAINING, "--num-workers", "2", "--stop", "timesteps=4000")  # ends the first
        assert f"{first['id']} has ended" in said
        roles.until(lambda: roles.status(0, "learner")["state"] == "succeeded", 2 * BUSY_S)
        assert roles.status(0, "learner")["run"] != first["run"]
        assert {roles.status(host, "actor")["state"] for host in (1, 2)} == {"running"}

        for host in (1, 2):
            roles.ludus(host, "actor", "stop")
        for host in (0, 1, 2):
            roles.until(lambda at=host: roles.left(at) == [], 30)  # type: ignore[misc]


def test_learners_on_two_machines_share_every_gradient(tmp_path: Path) -> None:
    with role_hosts(2, tmp_path, lambda hosts: f"{hosts.address(0)} root 22 1\n{hosts.address(1)} root 22 1\n") as roles:
        said = roles.start(0, "learner", "--num", "1", *TRAINING, "--num-workers", "2", "--stop", "timesteps=4000")
        assert "learner_num: 2 (1 on other machines)" in said
        roles.share_token()
        assert "is ignored here" in roles.start(1, "learner", "CartPole-v1")
        roles.until(lambda: roles.status(0, "learner")["state"] == "succeeded", 2 * BUSY_S)
        assert roles.status(1, "learner")["state"] == "running"
        assert roles.log(1, "learner/rank_0.log")
        roles.ludus(1, "learner", "stop")
        for host in (0, 1):
            roles.until(lambda at=host: roles.left(at) == [], 30)  # type: ignore[misc]


def test_an_actor_waits_for_a_learner_and_is_replaced_by_its_second_start(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    env = {"ACTOR_NUM": "2", "NO_MODEL_POOL": "1"}
    try:
        machine.start("actor", env=env)
        earlier = machine.status("actor")["id"]
        assert f"{earlier} has ended" in machine.start("actor", env=env)
        machine.start("learner", *TRAINING, "--num-workers", "2", "--stop", "time_s=800")
        first = machine.status("learner")["id"]
        elsewhere = machine.ludus(
            "learner", "start", "--iplist", machine.list, "--port", str(machine.port), "Acrobot-v1", "-n", "2", code=2
        )
        assert f"{first}, which trains" in elsewhere
        said = machine.start("learner", *TRAINING, "--num-workers", "2", "--stop", "timesteps=2000")
        assert f"{first} has ended" in said
        machine.until(lambda: machine.state_of("learner") == "succeeded", 2 * BUSY_S)
        assert machine.state_of("actor") == "running"
    finally:
        machine.ludus("learner", "stop", code=None)
        machine.ludus("actor", "stop", code=None)
    assert machine.left() == []


@pytest.mark.parametrize("shares", [True, False])
def test_on_one_machine_with_and_without_a_model_pool_of_its_own(tmp_path: Path, shares: bool) -> None:
    machine = Machine(tmp_path)
    try:
        machine.start("learner", *TRAINING, "--num-workers", "2", "--stop", "timesteps=3000")
        machine.start("actor", "--num", "2", env={"NO_ACTOR_MODEL_POOL": "1" if shares else "0"})
        machine.until(lambda: machine.state_of("learner") == "succeeded", 2 * BUSY_S)
        of_run = Path(machine.status("learner")["run"], "logs", "sampler").glob("sampler-*.log")
        of_actor = (tmp_path / "logs" / "actor").glob("actor_*.log")
        assert (len(list(of_run)), len(list(of_actor))) == ((2, 0) if shares else (0, 2))
    finally:
        machine.ludus("learner", "stop", code=None)
        machine.ludus("actor", "stop", code=None)
    assert machine.left() == []


def test_a_cluster_over_ssh_stands_is_trained_on_mended_and_taken_down(tmp_path: Path) -> None:
    with ssh_rig.up(3) as rig:
        machine = Machine(tmp_path, "".join(f"{rig.hosts.address(host)} root 22 1\n" for host in range(3)))
        machine.env["PATH"] = f"{rig.directory}:{machine.env['PATH']}"  # its ssh is in the network of the laptop
        reach = ("--identity", rig.identity, "--known-hosts", rig.known_hosts, "--python", sys.executable, "--cpus", "1")
        said = machine.ludus("cluster", "up", "--iplist", machine.list, *reach, within_s=240)
        exported = dict(re.findall(r"(RAY_AUTH_MODE|RAY_AUTH_TOKEN_PATH)=(\S+)", said))
        address = re.search(r"--address (\S+)", said)
        assert address is not None
        token = (machine.state / "clusters" / "cluster" / "token").read_text()
        assert Path(exported["RAY_AUTH_TOKEN_PATH"]).read_text() == token  # the rig's hosts have their disks here

        def page() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(machine.ludus("cluster", "status", "--json", code=None).splitlines()[-1])
            return found

        assert [(node["up"], node["cores"]) for node in page()["nodes"]] == [(True, 1)] * 3
        words = [*LUDUS, "train", *TRAINING, "--num-workers", "2", "--stop", "timesteps=2000", "--address", address[1]]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(rig.shared), *words]
        training = rig.hosts.run(0, inside, env={**machine.env, **exported, "HOME": str(rig.shared)}, output=subprocess.PIPE)
        trained = training.communicate(timeout=2 * BUSY_S)[0].decode()
        assert training.returncode == 0, trained

        rig.power_off(2)
        machine.until(lambda: [node["up"] for node in page()["nodes"]] == [True, True, False], BUSY_S)
        lost = machine.ludus("cluster", "status", code=1)
        assert f"{rig.hosts.address(2)}           DOWN since" in lost
        rig.power_on(2)
        again = machine.ludus("cluster", "up", "--iplist", machine.list, *reach, within_s=240)
        assert f"restarted on {rig.hosts.address(2)}" in again
        assert [node["up"] for node in page()["nodes"]] == [True, True, True]
        assert "is already up" in machine.ludus("cluster", "up", "--iplist", machine.list, *reach, within_s=240)

        assert "is down" in machine.ludus("cluster", "down", within_s=240)
        assert [ssh_rig.until_gone(rig, host) for host in range(3)] == [[], [], []]
        assert not (machine.state / "clusters" / "cluster").exists()


def test_a_training_that_is_killed_goes_on_with_its_run(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        machine.start("actor", "--num", "2")
        machine.start("learner", *TRAINING, "--num-workers", "2", "--checkpoint-freq", "5", "--stop", "timesteps=40000")
        machine.until(lambda: list(tmp_path.glob("runs/*/*/checkpoints/0*")), 2 * BUSY_S)
        before = machine.status("learner")
        (main,) = (process for process in before["processes"] if process["role"] == "main")
        os.kill(main["pid"], signal.SIGKILL)
        machine.until(lambda: machine.state_of("learner") not in ("pending", "running"), 3 * BUSY_S)
        after = machine.status("learner")
        assert (after["state"], after["run"]) == ("succeeded", before["run"])
        assert [process["restarts"] for process in after["processes"] if process["role"] == "main"] == [1]
        assert "it goes on with" in machine.log("learner/train.log")
    finally:
        machine.ludus("learner", "stop", code=None)
        machine.ludus("actor", "stop", code=None)
    assert machine.left() == []
