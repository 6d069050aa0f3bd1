"""Trainings on a real Kubernetes: every shape to the end, and drained nodes, lost nodes, killed pods and launchers on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

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
