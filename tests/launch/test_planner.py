"""Which processes a command takes on which node."""

from __future__ import annotations

import sys

import pytest

from ludus.errors import UsageError
from ludus.launch.job import checked
from ludus.launch.planner import Launch, launch

LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")


def made(*words: str, **options: object) -> Launch:
    return launch(words, **{"environ": {}, **options})  # type: ignore[arg-type]


def test_on_one_node_a_training_needs_no_ray() -> None:
    job = checked(made("train", "CartPole-v1", "--num-workers", "4").job)
    assert [(role.name, role.command, role.restart) for role in job.roles] == [
        ("main", (*LUDUS, "train", "CartPole-v1", "--num-workers", "4"), "when-killed")
    ]
    assert (job.name, job.nodes, job.ray) == ("train-CartPole-v1", 1, 0)


def test_on_several_nodes_each_has_a_ray_and_the_first_the_training() -> None:
    job = checked(made("train", "ALE/Pong-v5", nodes=3, cpus=[36], gpus=[1], wait_s=90.0).job)
    ray, main = job.roles
    assert (ray.name, ray.count, ray.at, ray.restart) == ("ray", 3, (0, 1, 2), "on-failure")
    assert ray.command == (sys.executable, "-P", "-m", "ludus.launch.ray_role", "--cpus", "36", "--gpus", "1")
    assert (main.name, main.node(0), job.main, job.nodes, job.ray, job.wait_s) == ("main", 0, "main", 3, 3, 90.0)
    assert job.name == "train-Pong-v5"


def test_nodes_of_several_kinds_have_a_role_each() -> None:
    job = checked(made("train", "x", nodes=5, cpus=[4, 4, 36, 36, 36], gpus=[1, 0, 0, 0, 0]).job)
    assert [(role.name, role.at, role.command[4:]) for role in job.roles if role.name != "main"] == [
        ("ray", (0,), ("--cpus", "4", "--gpus", "1")),
        ("ray-2", (1,), ("--cpus", "4")),
        ("ray-3", (2, 3, 4), ("--cpus", "36")),
    ]


def test_work_may_begin_with_fewer_nodes() -> None:
    assert made("tune", "x.yaml", nodes=4, min_nodes=2).job.ray == 2
    assert made("tune", "x.yaml", nodes=1, min_nodes=2).job.ray == 0


def test_workers_of_a_fleet_run_on_every_node() -> None:
    for words in (["fleet", "worker"], ["worker"], ["ludus", "fleet", "worker"]):
        job = checked(made(*words, "--memory", "redis://h", "--store", "/s", nodes=3).job)
        assert [(role.name, role.count, role.at) for role in job.roles] == [("worker", 2, (1, 2)), ("main", 1, ())]
        assert {role.command for role in job.roles} == {(*LUDUS, "fleet", "worker", "--memory", "redis://h", "--store", "/s")}
        assert job.ray == 0


def test_what_runs_on_one_machine_is_not_put_on_several() -> None:
    with pytest.raises(UsageError, match="one machine"):
        made("serve", "runs/x", nodes=2)
    with pytest.raises(UsageError, match="--address"):
        made("train", "x", "--address=h:1", nodes=2)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "x", "--redis-password", "s3cret"],
        ["train", "--redis-password=s3cret", "x"],
        ["train", "--redis_password=s3cret", "x"],
    ],
)
def test_the_password_of_an_old_ray_is_dropped_and_never_seen(words: list[str]) -> None:
    found = made(*words, nodes=2)
    assert "s3cret" not in repr(found)
    assert "token" in found.notices[0]
    assert found.job.roles[-1].command[-2:] == ("train", "x")


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="seen by everyone") as caught:
        made("worker", "--memory=redis://me:s3cret@host:1/0", "--store", "s")
    assert "s3cret" not in str(caught.value)


def test_known_secrets_are_handed_on_where_they_are_set() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "k" * 20, "WANDB_API_KEY": "", "OTHER": "x"}
    assert made("train", "x", environ=environ, secrets=["OTHER"]).job.secrets == ("OTHER", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize("words", [[], ["--help"], ["ludus"]])
def test_a_command_is_needed(words: list[str]) -> None:
    with pytest.raises(UsageError, match="no command"):
        made(*words)


@pytest.mark.parametrize("words", [["train", "-f", "a b/§ü.yaml"], ["train"], ["export", "../../x"]])
def test_a_job_has_a_name_whatever_it_is_about(words: list[str]) -> None:
    assert checked(made(*words).job).name.startswith(words[0])


def test_learners_of_other_nodes_are_awaited_by_the_training_alone() -> None:
    job = checked(made("train", "x", nodes=3, learner_nodes=2, wait_s=90.0).job)
    ray, learner, main = job.roles
    assert (learner.at, learner.restart, learner.command[-1]) == ((1,), "always", "ludus.distributed.learners.remote_rank")
    assert main.environment == {"LUDUS_JOB_LEARNERS": "1", "LUDUS_JOB_WAIT_S": "90"}
    assert ray.environment == learner.environment == {}
    for words, nodes in ((["tune", "x"], 3), (["train", "x"], 1)):
        with pytest.raises(UsageError, match="learn on 2 of"):
            made(*words, nodes=nodes, learner_nodes=2)
