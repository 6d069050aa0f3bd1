"""Several agents in one environment: from the config to the checkpoint, to the service and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from pettingzoo.utils.wrappers import BaseParallelWrapper

import ludus
from ludus.config.schema import MultiAgentConfig
from ludus.core.metrics import read_jsonl
from ludus.errors import ConfigError, EnvironmentFault
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.validation.agent_mapping import map_agents, policy_config
from ludus.gateway.server import GatewaySettings
from ludus.protocol.client import Client
from ludus.serving.checkpoint_follower import CheckpointFollower, CheckpointSource, UpdateSettings
from ludus.serving.worker import ServingWorker
from ludus.storage.local import LocalStore
from tests.experiments.small import same
from tests.local_servers import gateway
from tests.matches import Simple

ROLES = {"policies": ["talk", "hear"], "policy_mapping": {"speak*": "talk", "listener": "hear"}}
SETTINGS: dict[str, Any] = {
    "num_envs_per_worker": 4,
    "train_batch_size": 80,
    "minibatch_size": 40,
    "num_epochs": 2,
    "model": {"fcnet_hiddens": [8]},
    "evaluation_duration": 4,
    "metrics_num_episodes_for_smoothing": 5,
}


def data(iterations: int = 2, *, env: str = "tests.matches:make_roles", **settings: Any) -> dict[str, Any]:
    section = {"multiagent": ROLES} if env.endswith("make_roles") else {}
    return {"env": env, "stop": {"iterations": iterations}, "config": {**SETTINGS, **section, **settings}}


def train(where: Path, iterations: int = 2, **changes: Any) -> Result:
    return runner.train(data(iterations, **changes), project=where.parent, trial=where.name)


def newest(run: Path) -> checkpoint.Checkpoint:
    return checkpoint.newest(LocalStore(run))


# -- configs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"policies": ["talk", "hear"], "policy_mapping": {"speaker": "talk", "listener": "here"}}, "Did you mean 'hear'"),
        ({"policies": ["talk", "hear"], "policy_mapping": {"speaker": "talk"}}, "has no policy for the agent 'listener'"),
        ({"policies": ["talk", "hear"]}, "none of them is assigned to 'speaker'"),
        ({"policy_mapping": {"*": "m"}}, "plays 'speaker' and 'listener', whose observation spaces differ"),
        ({}, "plays 'speaker' and 'listener', whose observation spaces differ"),
        ({**ROLES, "policies": ["talk", "hear", "idle"]}, "'idle' plays no agent"),
        ({"policy_mapping": {"speaker": "a", "listener": "b", "speeker": "a"}}, "Did you mean 'speaker'"),
        ({"policy_mapping": {"speaker": "a", "list*": "b", "*ner": "c"}}, "several policies, by 'list*' and '*ner'"),
        ({**ROLES, "policies_to_train": ["tolk"]}, "Did you mean 'talk'"),
        ({**ROLES, "policies_to_train": []}, "nothing would be learned"),
        ({"policy_mapping": {"speaker": "a/b", "listener": "c"}}, "a model's name is made of"),
        ({**ROLES, "policies": {"talk": {"lr": "fast"}, "hear": {}}}, "config.multiagent.policies.talk"),
        ({**ROLES, "policies": {"talk": {"num_workers": 2}, "hear": {}}}, "all policies have this in common"),
        ({**ROLES, "policies": {"talk": {"lrr": 1}, "hear": None}}, "lrr"),
        ({**ROLES, "policy": 1}, "config.multiagent.policy"),
    ],
)
def test_a_wrong_section_is_refused_before_anything_starts(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(data(multiagent=section))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluation_num_workers": 1}, "evaluation_num_workers"),
        ({"evaluation_duration_unit": "timesteps"}, "evaluation_duration_unit"),
        ({"batch_mode": "complete_episodes"}, "complete_episodes"),
        ({"preprocess": {"frame_skip": 2}}, "config.preprocess"),
        ({"multiagent": {**ROLES, "centralized_value": True}, "model": {"custom_model": "mine"}}, "custom_model"),
    ],
)
def test_settings_that_several_agents_do_not_support_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(data(**settings))


def test_a_section_for_an_environment_with_one_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="CartPole-v1 has one"):
        resolve({"env": "CartPole-v1", "config": {"multiagent": {"policies": ["a"]}}})


def of_its_color(agent: str) -> str:
    return agent.partition("_")[0]


@pytest.mark.parametrize(
    ("section", "mapping"),
    [
        ({}, {"red_0": "model", "red_1": "model", "blue_0": "model"}),
        ({"policies": ["one"]}, {"red_0": "one", "red_1": "one", "blue_0": "one"}),
        ({"policy_mapping": "all"}, {"red_0": "all", "red_1": "all", "blue_0": "all"}),
        ({"policies": ["red_0", "red_1", "blue_0"]}, {"red_0": "red_0", "red_1": "red_1", "blue_0": "blue_0"}),
        ({"policy_mapping": {"red_*": "red", "blue_0": "blue"}}, {"red_0": "red", "red_1": "red", "blue_0": "blue"}),
        ({"policy_mapping": {"red_1": "own", "*": "rest"}}, {"red_0": "rest", "red_1": "own", "blue_0": "rest"}),
        ({"policy_mapping": f"{__name__}:of_its_color"}, {"red_0": "red", "red_1": "red", "blue_0": "blue"}),
    ],
)
def test_policies_are_given_to_agents_by_name_by_pattern_or_by_function(section: dict[str, Any], mapping: Any) -> None:
    assert map_agents(["red_0", "red_1", "blue_0"], MultiAgentConfig.model_validate(section)) == mapping


def test_the_resolved_config_names_every_agent() -> None:
    resolved = resolve(data(multiagent={**ROLES, "policies": {"talk": {"lr": 0.5}, "hear": None}}))
    saved = resolved.experiment.config["multiagent"]
    assert saved["policy_mapping"] == {"speaker": "talk", "listener": "hear"}
    again = resolve({**data(), "config": resolved.experiment.config})
    assert again.config == resolved.config


def test_a_policy_differs_in_what_it_names_of_a_section_and_in_nothing_else() -> None:
    settings = {key: value for key, value in SETTINGS.items() if key not in ("minibatch_size", "num_epochs")}
    settings["replay_buffer_config"] = {"type": "ReplayBuffer", "capacity": 700, "alpha": 0.25}
    settings["model"] = {"fcnet_hiddens": [8], "fcnet_activation": "elu"}
    own = {"replay_buffer_config": {"capacity": 300}, "model": {"fcnet_hiddens": [4]}}
    settings["multiagent"] = {**ROLES, "policies": {"talk": own, "hear": {}}}
    resolved = resolve({"env": "tests.matches:make_roles", "run": "DQN", "config": settings})
    talk, hear = (policy_config(resolved.algorithm.Config, resolved.config, name) for name in ("talk", "hear"))
    assert (talk.model.fcnet_hiddens, talk.model.fcnet_activation) == ([4], "elu")
    stores = [config.model_dump()["replay_buffer_config"] for config in (talk, hear)]
    assert [store["capacity"] for store in stores] == [300, 700]
    assert [(store["type"], store["alpha"]) for store in stores] == [("ReplayBuffer", 0.25)] * 2


def unlicensed(config: dict[str, Any]):  # type: ignore[no-untyped-def] # as users write it: nothing is declared
    raise RuntimeError("no licence")


def test_an_environment_that_cannot_be_made_is_an_error_and_not_taken_for_one_agent() -> None:
    ludus.register_env("unlicensed", unlicensed)
    with pytest.raises(EnvironmentFault, match="no licence"):
        resolve({"env": "unlicensed", "config": {"multiagent": ROLES}})
    with pytest.raises(ConfigError) as caught:  # whatever else is wrong is told as well
        resolve({"env": "unlicensed", "config": {"lrr": 1, "multiagent": ROLES}})
    assert "no licence" in str(caught.value)
    assert "lrr" in str(caught.value)


# -- training -----------------------------------------------------------------------------------------------------------


def test_two_policies_are_trained_stored_and_loaded(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 4, multiagent={**ROLES, "policies": {"talk": {"lr": 0.0}, "hear": {}}})
    found = newest(tmp_path / "run")
    assert set(found.weights) == {"talk", "hear"}
    assert found.state["config"]["config"]["multiagent"]["policy_mapping"] == {"speaker": "talk", "listener": "hear"}
    hear = ludus.load(tmp_path / "run", model="hear")
    assert hear.act(np.array([1.0], np.float32))[0] in (0, 1, 2)
    assert result.metrics["matches"] >= 8
    rows = read_jsonl(result.run_dir / "metrics.jsonl")
    for model, rate in (("talk", 0.0), ("hear", 1e-3)):
        assert {row[f"{model}/learner/lr"] for row in rows if f"{model}/learner/lr" in row} == {rate}
    means = [row[f"{model}/episode_return_mean"] for row in rows[:1] for model in ("talk", "hear")]
    assert means[0] == means[1]  # they share what they earn
    assert rows[0]["episode_return_mean"] == pytest.approx(sum(means), abs=1e-4)


def test_agents_learn_what_pays(tmp_path: Path) -> None:
    """Each is paid for every 1 that either chooses: 10 in a match at random, 20 at best."""
    settings = {"num_epochs": 8, "lr": 1e-2, "train_batch_size": 100, "evaluation_duration": 20}
    result = train(tmp_path / "run", 12, env="tests.matches:make_simple", **settings)
    assert result.metrics["evaluation/return_mean"] >= 19


@pytest.mark.parametrize(("by", "timesteps", "decisions"), [("env_steps", 80, 160), ("agent_steps", 80, 80)])
def test_timesteps_are_of_the_environment_unless_those_of_agents_are_asked_for(
    tmp_path: Path, by: str, timesteps: int, decisions: int
) -> None:
    """Two agents of one policy act at once; a batch is 80 of the steps that are counted."""
    result = runner.train(
        {**data(env="tests.matches:make_simple", multiagent={"count_steps_by": by}), "stop": {"timesteps": 240}},
        project=tmp_path,
        trial="run",
    )
    rows = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if "agent_steps" in row]
    assert [row["timesteps"] for row in rows] == [timesteps, 2 * timesteps, 3 * timesteps]
    assert [row["agent_steps"] for row in rows] == [decisions, 2 * decisions, 3 * decisions]
    assert [row["env_steps"] for row in rows] == [n * decisions // 2 for n in (1, 2, 3)]
    resumed = runner.resume(tmp_path / "run", stop={"timesteps": 320})
    assert (resumed.metrics["timesteps"], resumed.metrics["agent_steps"]) == (320, 4 * decisions)


def test_the_same_seed_is_the_same_run_to_the_last_bit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, 4)
    train(tmp_path / "other", 4, seed=1)
    one, two, other = (newest(tmp_path / name) for name in ("one", "two", "other"))
    assert all(same(one.weights[model], two.weights[model]) for model in one.weights)
    assert not same(one.weights["hear"], other.weights["hear"])


def test_policies_that_are_not_trained_keep_their_weights_and_are_stored(tmp_path: Path) -> None:
    train(tmp_path / "short", 1, multiagent={**ROLES, "policies_to_train": ["hear"]})
    train(tmp_path / "long", 4, multiagent={**ROLES, "policies_to_train": ["hear"]})
    short, long = newest(tmp_path / "short"), newest(tmp_path / "long")
    assert same(short.weights["talk"], long.weights["talk"])
    assert not same(short.weights["hear"], long.weights["hear"])


def test_policies_of_equal_networks_begin_with_weights_of_their_own(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, env="tests.matches:make_simple", lr=0.0, multiagent={"policies": ["a", "b"]})
    found = newest(tmp_path / "run")
    assert not same(found.weights["a"], found.weights["b"])


def test_a_run_goes_on_where_it_was_and_another_begins_with_its_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", 4)
    before = newest(tmp_path / "run")
    result = runner.resume(tmp_path / "run", stop={"iterations": 6})
    assert result.metrics["iterations"] == 6
    assert result.metrics["timesteps"] > before.state["progress"]["timesteps"]
    restored = runner.train(
        data(1, lr=0.0), project=tmp_path, trial="again", restore=tmp_path / "run" / "checkpoints" / before.name
    )
    assert restored.metrics["iterations"] == 1
    found = newest(tmp_path / "again")
    assert all(same(found.weights[model], before.weights[model]) for model in ("talk", "hear"))


@pytest.mark.parametrize("algorithm", ["PPO", "IMPALA", "APPO", "DQN"])
@pytest.mark.parametrize("env", ["tests.matches:make_turns", "tests.matches:make_parallel"])
def test_every_algorithm_learns_from_agents_that_come_and_go(tmp_path: Path, algorithm: str, env: str) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "minibatch_size"}
    settings |= {"env_config": {"masked": "info"}, "evaluation_duration": 0}
    settings.pop("num_epochs") if algorithm == "DQN" else None
    result = runner.train(
        {"env": env, "run": algorithm, "stop": {"iterations": 3}, "config": settings}, project=tmp_path, trial="run"
    )
    assert result.metrics["iterations"] >= 3
    assert result.metrics["matches"] > 0


def test_a_fault_of_the_environment_keeps_what_was_learned(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"'stranger' of tests\.matches:make_simple appeared"):
        train(tmp_path / "run", 50, env="tests.matches:make_simple", env_config={"fault": "stranger", "at": 60, "length": 100})
    assert newest(tmp_path / "run").state["progress"]["iterations"] > 0


class Doubled(BaseParallelWrapper):  # type: ignore[misc] # PettingZoo has no types
    def __init__(self, env: Any, factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def step(self, actions: Any) -> Any:
        seen, rewards, *others = self.env.step(actions)
        return seen, {agent: self.factor * reward for agent, reward in rewards.items()}, *others


def test_wrappers_of_pettingzoo_are_put_around_every_copy(tmp_path: Path) -> None:
    settings = {"wrappers": [{f"{__name__}:Doubled": {"factor": 0.0}}], "evaluation_duration": 3}
    result = train(tmp_path / "run", 1, env="tests.matches:make_simple", **settings)
    assert result.metrics["episode_return_max"] == 0
    assert result.metrics["evaluation/return_max"] == 0
    with pytest.raises(ConfigError, match="Check its keywords"):
        resolve(data(env="tests.matches:make_simple", wrappers=[{f"{__name__}:Doubled": {"by": 1}}]))


def test_a_registered_environment_may_have_several_agents(tmp_path: Path) -> None:
    ludus.register_env("my-match", lambda config: Simple(**config))
    result = train(tmp_path / "run", 1, env="my-match", env_config={"length": 7})
    assert result.metrics["episode_length_mean"] == 7


def test_workers_that_are_chosen_for_several_agents_are_none(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 1, num_workers="auto")
    assert result.metrics["iterations"] == 1
    assert newest(tmp_path / "run").state["config"]["config"]["num_workers"] == 0


# -- a centralised value ------------------------------------------------------------------------------------------------

CENTRAL = {**ROLES, "centralized_value": True}


@pytest.mark.parametrize("model", [{"fcnet_hiddens": [8]}, {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4}])
def test_who_plays_with_a_centralised_value_needs_no_state(tmp_path: Path, model: dict[str, Any]) -> None:
    result = train(tmp_path / "run", 4, multiagent=CENTRAL, model=model, observation_filter="MeanStdFilter")
    stored = newest(tmp_path / "run").state["models"]["hear"]["description"]
    assert set(stored["observation_space"]["spaces"]) == {"observation", "state"}
    agent = ludus.load(tmp_path / "run", model="hear")
    assert agent.observation_space.shape == (1,)
    assert agent.act(np.array([1.0], np.float32))[0] in (0, 1, 2)
    assert result.agent.observation_space == gym.spaces.Discrete(3)
    resumed = runner.resume(tmp_path / "run", stop={"iterations": 6})
    assert resumed.metrics["iterations"] == 6
    assert np.isfinite(resumed.metrics["evaluation/return_mean"])
    description, weights = newest(tmp_path / "run").acting("hear")
    assert not [name for name in weights if "actor" in name or "value_trunk" in name]
    assert description["observation_space"]["type"] == "Box"


# -- serving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("central", [False, True])
def test_every_agent_is_a_seat_that_its_policy_plays(tmp_path: Path, central: bool) -> None:
    train(tmp_path / "run", 2, multiagent={**ROLES, "centralized_value": central})
    source = CheckpointSource(str(tmp_path / "run"))
    release = source.release()
    assert release.seats == {"speaker": "talk", "listener": "hear"}
    policies = release.policies()
    (tmp_path / "service").mkdir()
    CheckpointFollower({"default": source}, tmp_path / "service", UpdateSettings()).open()
    service = ServingWorker(tmp_path / "service")
    service.load()
    with gateway(service, GatewaySettings(spec=source.spec()), extension=service) as served, Client(served.url) as client:
        spec = client.spec()
        assert spec["seats"]["speaker"]["observation_space"]["n"] == 3
        assert spec["seats"]["listener"]["observation_space"]["shape"] == [1]
        client.start("s")
        for number in range(3):
            seen = {"speaker": number, "listener": [float(number)]}
            tick = {"seats": {seat: {"observation": value} for seat, value in seen.items()}}
            actions = json.loads(client.tick("s", json.dumps(tick).encode()))["actions"]
            talk = policies["talk"].act(np.array([number])).action
            hear = policies["hear"].act(np.array([[number]], np.float32)).action
            assert actions == {"speaker": int(talk[0]), "listener": int(hear[0])}
        alone = json.loads(client.tick("s", json.dumps({"seats": {"listener": {"observation": [1.0]}}}).encode()))
        assert set(alone["actions"]) == {"listener"}
        client.end("s", json.dumps({"seats": {"speaker": {"terminated": True}, "listener": {"terminated": True}}}).encode())
