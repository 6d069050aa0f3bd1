"""Jobs planned for `ludus` commands: their roles, and the nodes of their processes."""

from __future__ import annotations

import sys

import pytest

from ludus.errors import UsageError
from ludus.launch.job import check_job
from ludus.launch.planner import ONE_NODE, NodeRequest, PlannedJob, RuntimeEnv, plan_job

LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")


def plan(*words: str, nodes: NodeRequest = ONE_NODE) -> PlannedJob:
    return plan_job(words, environ={}, nodes=nodes)


def test_on_one_node_a_training_needs_no_ray() -> None:
    job = check_job(plan("train", "CartPole-v1", "--num-workers", "4").job)
    assert [(role.name, role.command, role.restart) for role in job.roles] == [
        ("main", (*LUDUS, "train", "CartPole-v1", "--num-workers", "4"), "when-killed")
    ]
    assert (job.name, job.nodes, job.ray) == ("train-CartPole-v1", 1, 0)


def test_on_several_nodes_each_runs_ray_and_the_first_also_the_training() -> None:
    job = check_job(plan("train", "ALE/Pong-v5", nodes=NodeRequest(3, [36], [1], wait_s=90.0)).job)
    ray, main = job.roles
    assert (ray.name, ray.count, ray.at, ray.restart) == ("ray", 3, (0, 1, 2), "on-failure")
    assert ray.command == (sys.executable, "-P", "-m", "ludus.launch.ray_role", "--cpus", "36", "--gpus", "1")
    assert (main.name, main.node(0), job.main, job.nodes, job.ray, job.wait_s) == ("main", 0, "main", 3, 3, 90.0)
    assert job.name == "train-Pong-v5"


def test_each_run_of_equal_nodes_has_its_own_ray_role() -> None:
    job = check_job(plan("train", "x", nodes=NodeRequest(5, [4, 4, 36, 36, 36], [1, 0, 0, 0, 0])).job)
    assert [(role.name, role.at, role.command[4:]) for role in job.roles if role.name != "main"] == [
        ("ray", (0,), ("--cpus", "4", "--gpus", "1")),
        ("ray-2", (1,), ("--cpus", "4")),
        ("ray-3", (2, 3, 4), ("--cpus", "36")),
    ]


def test_a_minimum_lets_work_start_with_fewer_nodes() -> None:
    assert plan("tune", "x.yaml", nodes=NodeRequest(4, minimum=2)).job.ray == 2
    assert plan("tune", "x.yaml", nodes=NodeRequest(1, minimum=2)).job.ray == 0


def test_workers_of_a_fleet_run_on_every_node() -> None:
    for words in (["fleet", "worker"], ["worker"], ["ludus", "fleet", "worker"]):
        job = check_job(plan(*words, "--memory", "redis://h", "--store", "/s", nodes=NodeRequest(3)).job)
        assert [(role.name, role.count, role.at) for role in job.roles] == [("worker", 2, (1, 2)), ("main", 1, ())]
        assert {role.command for role in job.roles} == {(*LUDUS, "fleet", "worker", "--memory", "redis://h", "--store", "/s")}
        assert job.ray == 0


def test_a_command_for_one_machine_is_refused_on_several() -> None:
    with pytest.raises(UsageError, match="one machine"):
        plan("serve", "runs/x", nodes=NodeRequest(2))
    with pytest.raises(UsageError, match="--address"):
        plan("train", "x", "--address=h:1", nodes=NodeRequest(2))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "x", "--redis-password", "s3cret"],
        ["train", "--redis-password=s3cret", "x"],
        ["train", "--redis_password=s3cret", "x"],
    ],
)
def test_the_redis_password_of_old_ray_is_removed_from_the_job(words: list[str]) -> None:
    planned = plan(*words, nodes=NodeRequest(2))
    assert "s3cret" not in repr(planned)
    assert "token" in planned.notices[0]
    assert planned.job.roles[-1].command[-2:] == ("train", "x")


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="visible to all users") as caught:
        plan("worker", "--memory=redis://me:s3cret@host:1/0", "--store", "s")
    assert "s3cret" not in str(caught.value)


def test_known_secrets_are_passed_on_if_they_are_set() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "k" * 20, "WANDB_API_KEY": "", "OTHER": "x"}
    planned = plan_job(["train", "x"], environ=environ, runtime=RuntimeEnv(secrets=["OTHER"]))
    assert planned.job.secrets == ("OTHER", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize("words", [[], ["--help"], ["ludus"]])
def test_a_missing_command_is_an_error(words: list[str]) -> None:
    with pytest.raises(UsageError, match="no command"):
        plan(*words)


@pytest.mark.parametrize("words", [["train", "-f", "a b/§ü.yaml"], ["train"], ["export", "../../x"]])
def test_the_default_job_name_is_always_valid(words: list[str]) -> None:
    assert check_job(plan(*words).job).name.startswith(words[0])


def test_only_the_training_waits_for_learners_of_other_nodes() -> None:
    job = check_job(plan("train", "x", nodes=NodeRequest(3, learners=2, wait_s=90.0)).job)
    ray, learner, main = job.roles
    assert (learner.at, learner.restart, learner.command[-1]) == ((1,), "always", "ludus.distributed.learners.remote_rank")
    assert main.environment == {"LUDUS_JOB_LEARNERS": "1", "LUDUS_JOB_WAIT_S": "90"}
    assert ray.environment == learner.environment == {}
    for words, nodes in ((["tune", "x"], 3), (["train", "x"], 1)):
        with pytest.raises(UsageError, match="learn on 2 of"):
            plan(*words, nodes=NodeRequest(nodes, learners=2))
