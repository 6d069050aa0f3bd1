"""The recommended configuration follows from what was found."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ludus.envs.env_check.findings import CHECKS, EnvFinding, EnvReport
from ludus.experiments.recommendation.settings import TrialCost, recommend
from ludus.experiments.recommendation.verdict import describe_workers

DISCRETE, BOX = {"type": "Discrete", "n": 3}, {"type": "Box", "shape": [2]}
IMAGE = {"shape": [210, 160, 3], "image": True}


def report(*kinds: str, action: dict[str, Any] = DISCRETE, step_s: float = 1e-5, **facts: Any) -> EnvReport:
    known = {"spaces": {"": {"action": action}}, "step_s": {"median": step_s}, "several_agents": False, **facts}
    return EnvReport("my_game:make", {}, [EnvFinding(CHECKS[kind], "") for kind in kinds], known, ["spaces", "play"])


def config(found: EnvReport, cost: TrialCost | None = None) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(recommend(found, cost).to_yaml())["make"]
    assert data == recommend(found, cost).data
    inner: dict[str, Any] = data["config"]
    return inner


def test_a_fast_environment_needs_no_special_setting() -> None:
    assert config(report()) == {"num_envs_per_worker": 32, "train_batch_size": 4096, "minibatch_size": 512}


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("observation_scale", {"observation_filter": "MeanStdFilter"}),
        ("reward_scale", {"normalize_reward": True}),
        ("reward_outliers", {"normalize_reward": True}),
        ("reward_sparse", {"entropy_coeff": 0.01}),
        ("endless", {"preprocess": {"max_episode_steps": 1000}}),
    ],
)
def test_a_finding_leads_to_its_setting(kind: str, setting: dict[str, Any]) -> None:
    assert config(report(kind)).items() >= setting.items()


@pytest.mark.parametrize(
    ("facts", "run"),
    [
        ({}, "PPO"),
        ({"step_s": 0.05}, "DQN"),
        ({"step_s": 0.05, "action": BOX}, "PPO"),
        ({"step_s": 0.05, "masked": True}, "PPO"),
        ({"step_s": 0.05, "several_agents": True}, "PPO"),
    ],
)
def test_the_algorithm_follows_from_actions_and_speed(facts: dict[str, Any], run: str) -> None:
    assert recommend(report(**facts)).data["run"] == run


@pytest.mark.parametrize(
    ("facts", "number"),
    [
        ({"native_vector": True}, 64),
        ({"native_vector": True, "several_agents": True}, 64),
        ({"several_agents": True}, 16),
        ({"step_s": 0.002}, 16),
        ({"step_s": 0.05, "action": BOX}, 8),
        ({"processes": {"count": 1, "bytes": 1}}, 4),
    ],
)
def test_the_number_of_copies_follows_from_their_cost(facts: dict[str, Any], number: int) -> None:
    assert config(report(**facts))["num_envs_per_worker"] == number


def test_large_images_are_reduced_and_text_is_dropped() -> None:
    found = config(report(observation={"view": IMAGE}, drop=["mission"]))
    assert found["preprocess"] == {"drop": ["mission"], "grey": True, "resize": [84, 84], "stack": 4}


def test_settings_of_the_user_stay() -> None:
    found = report(observation={"": IMAGE})
    found.env_config, found.settings = {"level": 3}, {"preprocess": {"frame_skip": 4}, "wrappers": ["my_game:Shaped"]}
    given = config(found)
    assert (given["env_config"], given["preprocess"], given["wrappers"]) == ({"level": 3}, {"frame_skip": 4}, ["my_game:Shaped"])


@pytest.mark.parametrize(("apart", "text"), [(2000.0, "run: APPO"), (1050.0, "asynchronous sampling would not be faster")])
def test_workers_follow_from_the_trial(apart: float, text: str) -> None:
    cost = TrialCost(1e-3, 5e-4, 1e-4, 9e-4, 4, 3, {"alone": 900.0, "workers": 1000.0, "async": apart})
    assert config(report(), cost)["num_workers"] == 3
    workers = describe_workers(cost)
    assert text in workers
    assert "50 % of it waiting" in workers
