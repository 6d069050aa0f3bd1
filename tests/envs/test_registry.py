"""Names of environments: registered functions, older names, and which of several mistakes somebody has made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest

import ludus
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs import registry
from ludus.envs.legacy_names import CurrentName, current_name
from ludus.envs.vector_env import VectorEnvironments, check_exists, make_environments, make_one
from ludus.errors import UnknownName, UsageError
from tests import environments as tiny


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(registry.registered_envs())
    yield
    registry._registered.clear()
    registry._registered.update(before)


def length_of(name: str, **env_config: Any) -> int:
    env: Any = make_one(name, env_config)
    return int(env.length)


class TakesMapping(tiny.Count):
    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config.get("length", 7))


def test_a_registered_function_gets_its_config_as_keywords_or_as_one_mapping() -> None:
    ludus.register_env("keywords", tiny.make_count)
    ludus.register_env("mapping", lambda c: tiny.Count(c["length"]))
    ludus.register_env("class", TakesMapping)
    ludus.register_env("defaulted", lambda config=None: tiny.Count((config or {}).get("length", 9)))
    ludus.register_env("one keyword".replace(" ", "_"), lambda length: tiny.Count(length))
    for name in ("keywords", "mapping", "class", "defaulted", "one_keyword"):
        assert length_of(name, length=3) == 3
    assert length_of("class") == 7
    assert length_of("defaulted") == 9


def test_a_registered_function_may_make_vectors_and_may_replace_what_gymnasium_has() -> None:
    ludus.register_env("vectors", tiny.SameStep)
    environments = make_environments("vectors", 2)
    assert isinstance(environments, VectorEnvironments)
    assert environments.num == 2
    ludus.register_env("CartPole-v1", tiny.make_count)
    assert length_of("CartPole-v1", length=4) == 4


def test_a_misspelt_registered_name_is_suggested() -> None:
    ludus.register_env("my-football", tiny.make_count)
    with pytest.raises(UnknownName, match=r"Unknown environment 'my-fotball'.*'my-football'.*known only where that was called"):
        check_exists("my-fotball")


@pytest.mark.parametrize(
    ("name", "function"), [("", tiny.make_count), ("a b", tiny.make_count), ("a:b", tiny.make_count), ("ok", 3)]
)
def test_what_cannot_be_registered_is_refused(name: str, function: Any) -> None:
    with pytest.raises(UsageError, match=r"register_env|not a valid environment name"):
        ludus.register_env(name, function)


def test_another_version_of_a_name_is_pointed_to() -> None:
    with pytest.raises(UnknownName, match=r"no 'CartPole-v99' in Gymnasium [\d.]+\. It has CartPole-v0 and CartPole-v1"):
        check_exists("CartPole-v99")
    with pytest.raises(UnknownName, match=r"no 'LunarLander-v2' .*LunarLander-v3"):
        check_exists("LunarLander-v2")


def test_an_old_version_that_gymnasium_still_has_is_used_with_a_notice() -> None:
    assert current_name("CartPole-v0") == CurrentName(
        "CartPole-v0",
        "env: CartPole-v0 is an old version, used as configured; the current one is CartPole-v1 "
        "(episodes of up to 500 steps instead of 200).",
    )
    assert current_name("CartPole-v1") == CurrentName("CartPole-v1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Pendulum-v0", "Pendulum-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("Hopper-v1", "Hopper-v5"),
        ("HalfCheetah-v2", "HalfCheetah-v5"),  # which Gymnasium lists, and cannot make
    ],
)
def test_an_id_that_is_gone_is_its_successor(old: str, new: str) -> None:
    assert current_name(old) == CurrentName(new, f"env: {old} no longer exists; {new} is used instead.")


def test_a_game_of_atari_with_a_fixed_frame_skip_is_the_one_that_is_skipped_here() -> None:
    pytest.importorskip("ale_py")
    assert current_name("PongDeterministic-v4").name == "PongNoFrameskip-v4"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("my_game.env.Duel", "my_game.env:Duel"),
        ("ray.rllib.examples.env.random_env.RandomEnv", "ray.rllib.examples.envs.classes.random_env:RandomEnv"),
        ("no.such:thing", "no.such:thing"),
        ("NoSuch-v3", "NoSuch-v3"),
        ("external", "external"),
    ],
)
def test_a_class_named_with_dots_is_imported_and_other_names_stay(name: str, meant: str) -> None:
    assert current_name(name) == CurrentName(meant)


def test_a_registered_name_with_dots_stays() -> None:
    ludus.register_env("my.own.env", lambda: None)
    assert current_name("my.own.env").name == "my.own.env"


def test_a_constant_is_no_environment() -> None:
    with pytest.raises(UnknownName, match="is a str, not a function or class"):
        check_exists("tests.envs.test_registry:__doc__")


_SCRIPT = """
import sys
import gymnasium as gym
import ludus

class Shifted(gym.RewardWrapper):
    def __init__(self, env, by=0.0):
        super().__init__(env)
        self.by = by
    def reward(self, reward):
        return reward + self.by

if __name__ == "__main__":
    ludus.register_env("mine", lambda env_config: gym.make("CartPole-v1", **env_config))
    result = ludus.train(
        "mine", stop={"iterations": 2}, local_dir=sys.argv[1], num_workers=1, num_envs=2, train_batch_size=128, minibatch_size=64,
        evaluation_duration=2, wrappers=[{"__main__:Shifted": {"by": 1.0}}], env_config={"max_episode_steps": 20},
    )
    print(result.metrics["episode_return_mean"], result.metrics["episode_length_mean"])
"""


def test_a_registered_function_travels_with_whatever_is_sent_to_a_worker() -> None:
    ludus.register_env("mine", lambda c: tiny.Count(c["length"]))
    sent = cloudpickle.dumps(CodeBundle.of("mine", "CartPole-v1"))
    registry._registered.clear()
    with pytest.raises(UnknownName):
        check_exists("mine")
    cloudpickle.loads(sent).unpack()
    assert length_of("mine", length=6) == 6


@pytest.mark.long
def test_what_a_script_registers_and_wraps_is_known_to_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    out = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    gained, length = map(float, out.stdout.split()[-2:])
    assert gained == pytest.approx(2 * length)  # every step is worth one more
    assert length <= 20


def test_gymnasium_names_are_not_taken_for_registered_ones() -> None:
    assert registry.factory_of("CartPole-v1") is None
    assert registry.spec_of("CartPole-v1") is gym.registry["CartPole-v1"]
