"""Preprocessing of any environment: what the agent does, sees and gets afterwards, held against other implementations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text, Tuple

from ludus.config.schema import AlgorithmConfig, PreprocessConfig
from ludus.config.validation import parse_algorithm_config
from ludus.envs.preprocessing import area_weights, for_evaluation, preprocess_env
from ludus.envs.vector_env import LoopEnvironments, VectorEnvironments, make_environments, make_one
from ludus.errors import ConfigError, EnvironmentFault
from tests.generated_spaces import Random


class Film(gym.Env[Any, Any]):
    """Shows random pictures beside a mask and a number; the reward is the step times 10; a life goes every third step."""

    def __init__(self, shape: tuple[int, ...] = (21, 16, 3), lives: int = 2, masked: bool = False, tells: bool = True) -> None:
        picture = Box(0, 255, shape, np.uint8)
        self._parts: dict[str, Box[Any]] = {"picture": picture, "speed": Box(-2, 2, (), np.float64)}
        mask: dict[str, gym.Space[Any]] = {"action_mask": MultiBinary(2)} if masked else {}
        self.observation_space: Any = Dict({**self._parts, **mask})
        self.action_space = Discrete(2)
        self._masked, self._all_lives, self._tells = masked, lives, tells
        self.steps, self.taken, self.resets = 0, [], 0  # type: ignore[var-annotated]

    def _seen(self) -> Any:
        self.last = self.np_random.integers(0, 256, self._parts["picture"].shape).astype(np.uint8)
        seen: dict[str, Any] = {"picture": self.last, "speed": np.array(self.steps % 3 - 1.0)}
        return seen | ({"action_mask": np.array([1, self.steps % 2], np.int8)} if self._masked else {})

    def _info(self) -> dict[str, Any]:
        return {"lives": self._all_lives - self.steps // 3} if self._tells else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.resets = 0, self.resets + 1
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.taken.append(action)
        return self._seen(), 10.0 * self.steps, self.steps >= 3 * self._all_lives, False, self._info()


def dressed(env: gym.Env[Any, Any], **settings: Any) -> gym.Env[Any, Any]:
    return preprocess_env(env, PreprocessConfig(**settings), "film")


@pytest.mark.parametrize(
    ("before", "after"), [((210, 160), (84, 84)), ((120, 160), (36, 64)), ((30, 30), (10, 15)), ((7, 5), (7, 2))]
)
def test_pictures_are_made_small_as_opencv_does_it_by_area(before: tuple[int, int], after: tuple[int, int]) -> None:
    cv2 = pytest.importorskip("cv2")
    env = dressed(Film((*before, 3)), resize=after)
    observation, _ = env.reset(seed=1)
    expected = cv2.resize(env.unwrapped.last, after[::-1], interpolation=cv2.INTER_AREA)  # type: ignore[attr-defined]
    assert env.observation_space.contains(observation)
    assert np.abs(observation["picture"].astype(int) - expected).max() <= 1  # it rounds halves otherwise


def test_every_new_pixel_is_a_mean_of_old_ones() -> None:
    for before, after in ((210, 84), (84, 84), (5, 12), (160, 1)):
        np.testing.assert_allclose(area_weights(before, after).sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(area_weights(before, after).sum(axis=0), after / before, rtol=1e-5)


@pytest.mark.parametrize("shape", [(21, 16, 3), (3, 21, 16), (21, 16, 4)])
def test_colour_is_taken_out_as_opencv_does_it(shape: tuple[int, ...]) -> None:
    cv2 = pytest.importorskip("cv2")
    env = dressed(Film(shape), grey=True)
    observation, _ = env.reset(seed=1)
    picture = env.unwrapped.last  # type: ignore[attr-defined]
    expected = cv2.cvtColor(np.moveaxis(picture, 0, -1) if shape[0] == 3 else picture[..., :3], cv2.COLOR_RGB2GRAY)
    assert observation["picture"].shape == (21, 16, 1)
    assert np.abs(observation["picture"][..., 0].astype(int) - expected).max() <= 1


def test_stacked_observations_are_the_last_ones_oldest_first_as_gymnasium_stacks_them() -> None:
    ours, theirs = dressed(Film(), stack=3), gym.wrappers.FrameStackObservation(Film(), 3)
    pairs = [(ours.reset(seed=5)[0], theirs.reset(seed=5)[0])]
    pairs += [(ours.step(0)[0], theirs.step(0)[0]) for _ in range(4)]
    pairs += [(ours.reset()[0], theirs.reset()[0])]
    for mine, other in pairs:
        np.testing.assert_array_equal(mine["picture"], np.concatenate(list(other["picture"]), axis=-1))
        np.testing.assert_array_equal(mine["speed"], other["speed"])
        assert ours.observation_space.contains(mine)


def test_a_mask_is_left_alone_and_still_masks() -> None:
    env = dressed(Film(masked=True), grey=True, resize=(8, 8), stack=2)
    observation, _ = env.reset(seed=1)
    assert observation["action_mask"].tolist() == [1, 0]
    environments = LoopEnvironments("film", [env])
    environments.reset(1)
    assert environments.masked
    assert set(environments.observation_space.spaces) == {"picture", "speed"}  # type: ignore[attr-defined]
    flat = dressed(Film(masked=True), flatten=True)
    observation, _ = flat.reset(seed=1)
    assert flat.observation_space.contains(observation)
    assert observation["observation"].shape == (21 * 16 * 3 + 1,)


def test_a_flat_observation_holds_all_parts_as_gymnasium_orders_them() -> None:
    env, plain = dressed(Film(), flatten=True), Film()
    seen, expected = env.reset(seed=3)[0], plain.reset(seed=3)[0]
    flat: Any = gym.spaces.flatten(plain.observation_space, expected)
    np.testing.assert_allclose(seen, flat, rtol=1e-6)
    assert seen.dtype == np.float32


MISSION = Dict({"direction": Discrete(4), "image": Box(0, 10, (3,), np.float32), "mission": Text(40)})
"""What MiniGrid shows: a picture, a direction and a text."""


def test_a_dropped_part_is_in_neither_the_space_nor_the_observations() -> None:
    env = dressed(Random(MISSION, Discrete(2)), drop=["mission"])
    seen, _ = env.reset(seed=1)
    assert set(seen) == {"direction", "image"}
    assert env.observation_space.contains(seen)
    assert env.observation_space.contains(env.step(0)[0])
    outcome = LoopEnvironments("mission", [env]).reset(1)
    assert set(outcome.observation) == {"direction", "image"}


@pytest.mark.parametrize(
    ("space", "drop", "left"),
    [
        (Dict({"a": Dict({"b": Text(3), "c": Discrete(2)})}), "a.b", Dict({"a": Dict({"c": Discrete(2)})})),
        (Dict({"a": Dict({"b": Text(3)}), "c": Discrete(2)}), "a.b", Dict({"c": Discrete(2)})),
        (Tuple([Dict({"b": Text(3), "c": Discrete(2)}), Discrete(3)]), "0.b", Tuple([Dict({"c": Discrete(2)}), Discrete(3)])),
        (Tuple([Text(3), Discrete(3)]), "0", Tuple([Discrete(3)])),
        (
            Dict({"observation": Dict({"b": Text(3), "c": Discrete(2)}), "action_mask": MultiBinary(2)}),
            "b",
            Dict({"observation": Dict({"c": Discrete(2)}), "action_mask": MultiBinary(2)}),
        ),
    ],
)
def test_parts_are_dropped_under_the_name_that_the_error_gives_them(space: gym.Space[Any], drop: str, left: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Text space.*preprocess: {{drop: \[{drop}\]}}.*config\.wrappers"):
        LoopEnvironments("nested", [Random(space, Discrete(2))])
    env = dressed(Random(space, Discrete(2)), drop=[drop])
    assert env.observation_space == left
    assert left.contains(env.reset(seed=0)[0])


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (["misson"], "no part 'misson'; its parts are direction, image, mission"),
        (["direction", "image", "mission"], "nothing of the observation of film is left"),
    ],
)
def test_parts_that_cannot_be_dropped_are_refused(drop: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dressed(Random(MISSION, Discrete(2)), drop=drop)
    with pytest.raises(ConfigError, match="action_mask is not part of the observation"):
        dressed(Film(masked=True), drop=["action_mask"])


def test_skipped_frames_sum_their_rewards_and_stop_at_the_end() -> None:
    env = dressed(Film(lives=2), frame_skip=4)
    env.reset(seed=0)
    _, reward, terminated, _, _ = env.step(1)
    assert (reward, terminated) == (10 + 20 + 30 + 40, False)
    _, reward, terminated, _, _ = env.step(1)
    assert (reward, terminated) == (50 + 60, True)


def test_videos_with_skipped_frames_have_the_speed_of_the_game() -> None:
    film = Film()
    film.metadata = {"render_fps": 60}
    assert dressed(film, frame_skip=4).metadata["render_fps"] == 15
    assert film.metadata == {"render_fps": 60}
    film.metadata = {}
    assert "render_fps" not in dressed(film, frame_skip=4).metadata


def test_a_lost_life_ends_the_episode_and_not_the_game() -> None:
    env = dressed(Film(lives=2), episodic_life=True)
    env.reset(seed=0)
    ends = [env.step(1)[2] for _ in range(3)]
    assert ends == [False, False, True]
    env.reset()  # goes on with a step that does nothing
    assert env.unwrapped.resets == 1  # type: ignore[attr-defined]
    assert env.unwrapped.taken[-1] == 0  # type: ignore[attr-defined]
    assert [env.step(1)[2] for _ in range(2)] == [False, True]  # now it is over
    env.reset()
    assert env.unwrapped.resets == 2  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFault, match=r"episodic_life: film does not report infos\['lives'\]"):
        dressed(Film(tells=False), episodic_life=True).reset()


def test_a_limit_of_steps_ends_the_game_and_not_only_a_life() -> None:
    env = dressed(Film(lives=9), episodic_life=True, max_episode_steps=5)
    env.reset(seed=0)
    assert [env.step(1)[2:4] for _ in range(3)] == [(False, False), (False, False), (True, False)]
    env.reset()  # the next life; its first step, which does nothing, is the fourth of the game
    assert [env.step(1)[2:4]] == [(False, True)]
    env.reset()
    film: Any = env.unwrapped
    assert (film.resets, film.steps) == (2, 0)  # a game of its own
    assert [env.step(1)[2:4] for _ in range(3)] == [(False, False), (False, False), (True, False)]


def test_games_begin_with_a_random_number_of_actions_that_do_nothing() -> None:
    env = dressed(Film(lives=9), noop_max=5)
    begun = set()
    for seed in range(40):
        env.reset(seed=seed)
        begun.add(env.unwrapped.steps)  # type: ignore[attr-defined]
    assert begun == set(range(6))
    assert set(env.unwrapped.taken) == {0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("clip", "expected"), [("sign", 1), (True, 1), ([-1, 15], 10), ([-1, 5], 5), (False, 10), (None, 10)])
def test_rewards_are_clipped_as_asked_and_never_in_evaluations(clip: Any, expected: float) -> None:
    settings = PreprocessConfig(clip_reward=clip)
    env = preprocess_env(Film(), settings, "film")
    env.reset()
    assert env.step(0)[1] == expected
    judged = preprocess_env(Film(), for_evaluation(settings.model_copy(update={"episodic_life": True})), "film")
    judged.reset()
    assert [judged.step(0)[1:3] for _ in range(6)] == [(10.0 * i, i == 6) for i in range(1, 7)]


def test_bounded_numbers_are_scaled_and_unbounded_ones_refused() -> None:
    env = dressed(Film(), scale=True)
    observation, _ = env.reset(seed=0)
    assert observation["speed"] == 0.25  # −1 in −2 … 2
    assert observation["picture"].dtype == np.uint8
    with pytest.raises(ConfigError, match=r"scale: CartPole-v1 has observations without bounds.*MeanStdFilter"):
        make_environments("CartPole-v1", 1, preprocess=PreprocessConfig(scale=True))


def test_what_is_usual_is_known_of_some_families_only() -> None:
    with pytest.raises(ConfigError, match=r"CartPole-v1 has no standard preprocessing.*frame_skip"):
        make_environments("CartPole-v1", 1, preprocess=PreprocessConfig(standard=True))


@pytest.mark.parametrize("asked", [{"grey": True}, {"resize": (8, 8)}])
def test_pictures_that_are_not_there_are_not_preprocessed(asked: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"preprocess.{next(iter(asked))}: CartPole-v1 has no image observations, but .*Leave it out"
    ):
        make_environments("CartPole-v1", 1, preprocess=PreprocessConfig(**asked))


def test_a_native_vector_environment_stays_one_with_a_limit_of_steps_and_a_loop_does_the_rest() -> None:
    limited = make_environments("CartPole-v1", 2, preprocess=PreprocessConfig(max_episode_steps=3))
    assert isinstance(limited, VectorEnvironments)
    looped = make_environments("CartPole-v1", 2, preprocess=PreprocessConfig(max_episode_steps=3, stack=2))
    assert isinstance(looped, LoopEnvironments)
    assert looped.observation_space.shape == (8,)
    for environments in (limited, looped):
        environments.reset(0)
        cut = [environments.step(np.array([0, 1])).truncated.tolist() for _ in range(3)]
        assert cut == [[False, False], [False, False], [True, True]]
        environments.close()


def test_what_a_tuple_shows_is_preprocessed_part_by_part() -> None:
    env = Film()
    env.observation_space = Tuple([env.observation_space, Discrete(3)])
    seen = env._seen
    env._seen = lambda: (seen(), 2)  # type: ignore[method-assign]
    observation, _ = dressed(env, grey=True, stack=2).reset(seed=0)
    assert observation[0]["picture"].shape == (21, 16, 2)
    assert observation[1] == 2


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"normalize": True}, "observation_filter: MeanStdFilter"),
        ({"float32": True}, "always become float32"),
        ({"gray": True}, "Did you mean 'grey'"),
        ({"clip_reward": [1, -1]}, "the lowest comes first"),
        ({"resize": [84]}, r"resize"),
        ({"stack": 0}, "greater than or equal to 1"),
        ({"grey": True, "grayscale": False}, "Keep one"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could_be(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_algorithm_config(AlgorithmConfig, {"preprocess": section})


def test_a_rollout_has_the_training_observations_and_unclipped_rewards() -> None:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    settings = PreprocessConfig(grey=True, resize=(30, 40), stack=2, frame_skip=2, clip_reward="sign")
    game = make_one("VizdoomBasic-v1", preprocess=settings, render_mode="rgb_array")
    observation, _ = game.reset(seed=1)
    assert observation.shape == (30, 40, 2)
    assert game.step(0)[1] == pytest.approx(-0.02)
    picture: Any = game.render()
    assert picture.shape == (120, 160, 3)
    game.close()
    with pytest.raises(ConfigError, match="env_config sets width to 100, but preprocess sets it otherwise"):
        make_one("VizdoomBasic-v1", {"width": 100}, preprocess=settings)
