"""Trainings on a real Kubernetes: every shape to the end, and drained nodes, lost nodes, killed pods and launchers on the way."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from ludus.errors import Refused, Unreachable
from ludus.protocol.client import Client
from tests import s3
from tests.long.record import record
from tests.system.kubernetes import cartpole_game
from tests.system.kubernetes.endings import ENDINGS
from tests.system.kubernetes.lab import KubernetesLab, kubernetes_lab
from tests.system.kubernetes_rig import KubernetesRig
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # the first one builds the cluster

SOLVED = ("--stop", "episode_return_mean=475", "--stop", "timesteps=3000000")
LEARN_S = 1200.0
BUSY_S = 180.0


@pytest.fixture
def lab(ludus_kubernetes: KubernetesRig, tmp_path: Path) -> Iterator[KubernetesLab]:
    with kubernetes_lab(ludus_kubernetes, tmp_path) as found:
        yield found


# -- shapes -----------------------------------------------------------------------------------------------------------------


def test_cartpole_is_solved_by_one_pod_with_its_run_on_s3(lab: KubernetesLab) -> None:
    file = lab.cluster_file(**lab.s3_keys(), ttl_s=30)
    said = lab.ludus("submit", "-f", file, "--wait", "--", "train", "CartPole-v1", *SOLVED, timeout_s=LEARN_S)
    assert "target return reached" in said
    _, listed = s3.server(lab.rig.machine_address).ask("GET", s3.BUCKET, f"list-type=2&prefix={lab.namespace}%2F")
    assert b"/checkpoints/" in listed
    objects = lab.rig.kubectl("get", "jobs,pods,configmaps", f"--namespace={lab.namespace}", "--output=yaml")
    assert s3.SECRET not in said + objects
    lab.wait_until_nothing_is_left()


def test_cartpole_is_solved_by_a_ray_cluster_of_three_pods(lab: KubernetesLab) -> None:
    file = lab.cluster_file(nodes=3, ttl_s=5)
    said = lab.ludus(
        "submit", "-f", file, "--wait", "--", "train", "CartPole-v1", "--num-workers", "3", *SOLVED, timeout_s=LEARN_S
    )
    assert "Ray: 3 nodes" in said
    assert "target return reached" in said
    lab.wait_until_nothing_is_left()


def test_cartpole_is_solved_by_a_fleet_with_its_own_redis(lab: KubernetesLab) -> None:
    file = lab.cluster_file(workers=2, ttl_s=5, redis_storage="100Mi", redis_memory="128Mi")
    words = ("fleet", "learner", "-p", "CartPole_ClippedPPO", *SOLVED)
    said = lab.ludus("submit", "-f", file, "--wait", "--", *words, timeout_s=LEARN_S)
    assert "target return reached" in said
    lab.wait_until_nothing_is_left()


def test_cartpole_is_solved_by_games_of_a_gamecore_server(lab: KubernetesLab) -> None:
    """Learner, actors and games in three pods. The games are processes of the server's pod, from a catalogue of the user."""
    shutil.copy(cartpole_game.__file__, lab.home)
    (lab.home / "games.yaml").write_text(yaml.safe_dump({"games": {"cartpole": CARTPOLE_GAME}}))
    (lab.home / "cartpole.yaml").write_text(yaml.safe_dump({"cartpole": CARTPOLE_TRAINING}))
    file = lab.cluster_file(
        nodes=2,
        gamecore=True,
        gamecore_games="games.yaml",
        copy=[Path(cartpole_game.__file__).name],
        gamecore_memory="1Gi",
        ttl_s=5,
    )
    said = lab.ludus("submit", "-f", file, "--wait", "--", "train", "-f", "cartpole.yaml", *SOLVED, timeout_s=LEARN_S)
    assert "Ray: 2 nodes" in said
    assert "target return reached" in said
    lab.wait_until_nothing_is_left()


CARTPOLE_GAME = {
    "command": ["{python}", Path(cartpole_game.__file__).name],
    "directory": ".",
    "modes": ["1v1"],
    "options": {"together": {"type": "integer", "minimum": 0, "maximum": 1, "default": 0}},
}
CARTPOLE_TRAINING = {
    "env": "gamecore",
    "run": "PPO",
    "config": {
        "num_workers": 2,
        "num_envs_per_worker": 4,
        "train_batch_size": 2048,
        "sgd_minibatch_size": 256,
        "num_sgd_iter": 10,
        "lr": 0.001,
        "evaluation_duration": 0,
        "env_config": {
            "game": "cartpole",
            "mode": "1v1",
            "opponent": "rule",
            "together": 1,
            "observation_space": {"type": "Box", "shape": [4], "low": -10, "high": 10},
            "action_space": {"type": "Discrete", "n": 2},
        },
    },
}


# -- services ---------------------------------------------------------------------------------------------------------------

SESSIONS = 20


@dataclass
class SessionTally:
    done: int = 0
    failed: list[str] = field(default_factory=list)

    def wait_for_more(self) -> None:
        before = self.done
        wait_until(lambda: self.failed or self.done >= before + SESSIONS, BUSY_S)


@contextlib.contextmanager
def short_sessions(url: str, token: str) -> Iterator[SessionTally]:
    """Play one short session after the other, each on a connection of its own and without retries."""
    tally, over = SessionTally(), threading.Event()

    def play() -> None:
        for number in itertools.count():
            if over.wait(0.02):
                return
            try:
                with Client(url, token, retries=0) as client:
                    client.start(f"match-{number}")
                    client.tick(f"match-{number}", json.dumps({"observation": [0.0] * 4}).encode())
                    client.end(f"match-{number}")
                tally.done += 1
            except (Refused, Unreachable) as error:
                tally.failed.append(f"match-{number}: {error}")

    player = threading.Thread(target=play)
    player.start()
    try:
        yield tally
    finally:
        over.set()
        player.join()


def wait_for_rollout(lab: KubernetesLab, job_id: str) -> None:
    words = ("rollout", "status", f"deployment/{job_id}", f"--namespace={lab.namespace}", f"--timeout={BUSY_S:g}s")
    lab.rig.kubectl(*words, timeout_s=BUSY_S + 10)


def test_an_update_of_a_service_refuses_no_session(lab: KubernetesLab) -> None:
    """The old pod gets SIGTERM, by which it refuses sessions, only after the nodes have learned that it ends."""
    words = ("train", "CartPole-v1", "--stop", "iterations=3")
    lab.ludus("submit", "-f", lab.cluster_file(ttl_s=5), "--wait", "--", *words, timeout_s=BUSY_S)
    run = lab.run()
    assert run is not None
    job_id = lab.submit(lab.cluster_file(), "serve", f"/runs/{run.relative_to(lab.runs)}", "--drain-s", "5")
    wait_for_rollout(lab, job_id)
    (old,) = lab.pods(job_id)
    address = lab.rig.get("service", job_id, f"--namespace={lab.namespace}")["spec"]["clusterIP"]
    secret = lab.rig.get("secret", job_id, f"--namespace={lab.namespace}")["data"]["serve-token"]
    url, token = f"http://{address}:8000", base64.b64decode(secret).decode()

    def reachable() -> bool:
        with Client(url, token, retries=0) as client, contextlib.suppress(Unreachable):
            return bool(client.spec())
        return False

    wait_until(reachable, BUSY_S)
    with short_sessions(url, token) as tally:
        tally.wait_for_more()
        patch = {"spec": {"template": {"metadata": {"annotations": {"updated": "true"}}}}}
        lab.rig.kubectl("patch", "deployment", job_id, f"--namespace={lab.namespace}", f"--patch={json.dumps(patch)}")
        wait_for_rollout(lab, job_id)
        gone = (
            "wait",
            "--for=delete",
            f"pod/{old['metadata']['name']}",
            f"--namespace={lab.namespace}",
            f"--timeout={BUSY_S:g}s",
        )
        lab.rig.kubectl(*gone, check=False, timeout_s=BUSY_S + 10)  # an error if it is already gone
        tally.wait_for_more()
    assert tally.failed == []
    assert [pod["metadata"]["name"] for pod in lab.pods(job_id)] != [old["metadata"]["name"]]
    lab.rig.kubectl("delete", "deployment", job_id, f"--namespace={lab.namespace}", "--wait=false")
    lab.wait_until_nothing_is_left()


# -- faults -----------------------------------------------------------------------------------------------------------------

ENDLESS = ("train", "CartPole-v1", "--stop", "timesteps=1000000000", "--checkpoint-freq", "10", "--set", "evaluation_duration=0")


def interval(lab: KubernetesLab) -> int:
    """Most timesteps between two checkpoints; updates differ a little in their number of timesteps."""
    timesteps = [0, *(int(row["timesteps"]) for row in lab.rows())]
    return 10 * max(after - before for before, after in pairwise(timesteps))


def wait_for_steps(lab: KubernetesLab, above: int) -> int:
    """The timesteps of the last report, which are more than these."""
    return wait_until(lambda: next((int(row["timesteps"]) for row in lab.rows()[-1:] if row["timesteps"] > above), None), BUSY_S, poll_s=0.1)  # fmt: skip


def test_a_drained_node_loses_no_step_and_the_training_goes_on_on_the_other(lab: KubernetesLab) -> None:
    job_id = lab.submit(lab.cluster_file(), *ENDLESS)
    wait_for_steps(lab, 20_000)
    (pod,) = lab.pods(job_id)
    node = pod["spec"]["nodeName"]
    with lab.drained(node):
        reached, saved = int(lab.rows()[-1]["timesteps"]), lab.checkpoint_steps()
        assert saved >= reached, "the last checkpoint was written after SIGTERM"
        wait_for_steps(lab, reached)
        (pod,) = lab.pods(job_id)
        assert pod["spec"]["nodeName"] != node
    lab.ludus("jobs", "cancel", job_id)
    lab.ludus("jobs", "wait", job_id, code=130)
    record("kubernetes-drain", reached=reached, saved=saved)


@pytest.mark.parametrize("how", ["delete", "kill"])
def test_a_pod_that_is_killed_is_replaced_and_the_run_resumed(lab: KubernetesLab, how: str) -> None:
    job_id = lab.submit(lab.cluster_file(), *ENDLESS)
    wait_for_steps(lab, 20_000)
    (pod,) = lab.pods(job_id)
    name = pod["metadata"]["name"]
    if how == "delete":
        lab.kill_pod(name)
    else:
        for process in lab.rig.pod_processes():
            process.kill()
    reached, saved = int(lab.rows()[-1]["timesteps"]), lab.checkpoint_steps()
    assert reached - saved <= interval(lab)
    wait_until(lambda: [it for it in lab.pods(job_id) if it["metadata"]["name"] != name], BUSY_S)
    wait_for_steps(lab, reached)
    lab.ludus("jobs", "cancel", job_id)
    lab.ludus("jobs", "wait", job_id, code=130)


def test_a_training_whose_node_loses_its_power_goes_on_on_the_other(lab: KubernetesLab) -> None:
    job_id = lab.submit(lab.cluster_file(), *ENDLESS)
    wait_for_steps(lab, 20_000)
    (pod,) = lab.pods(job_id)
    node = pod["spec"]["nodeName"]
    lab.rig.power_off(node)
    try:
        reached = int(lab.rows()[-1]["timesteps"])
        wait_for_steps(lab, reached)
    finally:
        lab.rig.power_on(node)
    lab.ludus("jobs", "cancel", job_id)
    lab.ludus("jobs", "wait", job_id, code=130)


# -- endings ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ENDINGS)
def test_nothing_is_left_after(lab: KubernetesLab, way: str) -> None:
    ENDINGS[way](lab)
    lab.wait_until_nothing_is_left()
