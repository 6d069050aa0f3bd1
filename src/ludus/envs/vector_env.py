"""Environments that we call: many copies of one environment, stepped together.

`make_environments` takes the environment's own vector implementation when it has one, otherwise it steps copies in a loop.
Either way the caller sees `Environments`: arrays in, arrays out, with the action mask already taken out of the observation.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode

from ludus.config.schema import PreprocessConfig
from ludus.core import spaces, trust
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Array, Tree, copy_into, leaves, map_tree
from ludus.core.types import Bools, Floats, Ints
from ludus.display import headless
from ludus.envs.atari import is_atari, make_single, make_vector
from ludus.envs.opponents.opponent_rows import Opposed
from ludus.envs.preprocessing import for_evaluation, is_plain, preprocess_of, preprocessed
from ludus.envs.registry import called, factory_of, makes_vectors, outdated, spec_of, takes, takes_mapping
from ludus.envs.vizdoom import is_doom, make_doom
from ludus.envs.wrappers import Named, Wrapper, wrappers_of
from ludus.errors import ConfigError, EnvironmentFault, LudusError, MissingExtra, user_frame

log = logging.getLogger(__name__)


@dataclass
class Seen:
    """What all rows observe now."""

    observation: Tree  # [N, …]
    mask: Bools | None  # [N, M]
    given: Sequence[Any] | None = None
    """By row what the environment returned, before it became an array of its space's type: for error messages. None: `observation`
    is what it returned."""

    def returned(self, row: int, path: str, index: Sequence[int]) -> float:
        """One number of an observation in the precision in which the environment returned it; NaN if it is not found."""
        given = _plain(self.given[row] if self.given is not None else map_tree(lambda x: np.asarray(x)[row], self.observation))
        leaf = dict(leaves(given)).get(path)
        return math.nan if leaf is None else float(leaf[tuple(index)])


@dataclass
class Outcome:
    """What one step of all rows brought."""

    seen: Seen
    reward: Floats
    terminated: Bools
    truncated: Bools
    final_rows: Ints | None = None
    """Rows whose `seen` already belongs to the next episode (same-step autoreset); None when that never happens."""
    final_observation: Tree = None
    lost: Bools | None = None
    """Rows whose environment failed in this step and was made anew: `seen` shows the next episode. None: no row."""
    results: Floats | None = None
    """[N, K, 2] of the rows whose episodes ended: each of the environments' `results`, and 1 where there is such a number."""


class Environments(Protocol):
    """N copies of an environment. After an episode ends, either the next call of `step` only resets that row (the reset row:
    its action is ignored, its reward 0), or the row was reset at once and its final observation is in the outcome."""

    name: str
    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    resets_at_once: bool
    beat: Callable[[], None]
    """Called as often as the environments allow: whoever looks on knows that they are not stuck."""

    @property
    def masked(self) -> bool:
        """Known after the first reset."""
        ...

    @property
    def restarts(self) -> int:
        """Environments that failed and were made anew."""
        ...

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the numbers that episodes end with."""
        ...

    def reset(self, seed: int | None) -> Seen: ...
    def step(self, action: Tree) -> Outcome: ...

    def progress(self, timesteps: int) -> None:
        """How far training has come: for environments that change with it. They have `set_timesteps(timesteps)`."""
        ...

    def close(self) -> None: ...


# -- making -------------------------------------------------------------------------------------------------------------

_NOTHING = PreprocessConfig()


def make_environments(
    name: str,
    num: int,
    env_config: Mapping[str, Any] | None = None,
    *,
    preprocess: PreprocessConfig = _NOTHING,
    wrappers: Named = (),
    forgiving: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> Environments:
    """`name` is a Gymnasium id, a name given to `register_env`, or `module:function`, called with `env_config`.

    A function that takes `num_envs` makes a whole vector environment; any other makes one environment. `forgiving`: one that
    raises is made anew, and its row is lost at that step; only one that fails again and again is an EnvironmentFault.
    `beat` is called before every call of an environment, from its constructor on.
    Raises UnknownName, MissingExtra, ConfigError.
    """
    recipe = _Recipe(name, dict(env_config or {}), preprocess, *wrappers_of(wrappers))
    if recipe.is_vector:

        def vector() -> Any:
            return recipe.vector(num)

        made = vector()
        environments = VectorEnvironments(name, made, vector if forgiving else None)
        environments.beat = beat
        opponents = _opponents(made)
        return environments if opponents is None else Opposed(environments, opponents)
    copies = LoopEnvironments(name, _copies(recipe, num, beat), recipe.single if forgiving else None)
    copies.beat = beat
    return copies


def _copies(recipe: _Recipe, num: int, beat: Callable[[], None]) -> list[gym.Env[Any, Any]]:
    """What was made is closed again when a later copy cannot be made, or the start is interrupted."""
    made: list[gym.Env[Any, Any]] = []
    try:
        for _ in range(num):
            beat()
            made.append(recipe.single())
    except BaseException:
        for env in made:
            _closed(env)
        raise
    return made


def _opponents(made: gym.vector.VectorEnv[Any, Any, Any]) -> Bools | None:
    rows: Bools | None = getattr(made.unwrapped, "opponent_rows", None)
    return None if rows is None or not rows.any() else rows


@dataclass(frozen=True)
class RowsSaid:
    """What a vector environment says of its rows."""

    opposed: bool = False
    """Some of them are played by somebody from outside."""
    group: int = 1
    """So many neighbours are one side of a match, and begin and end together: `group_rows` of the environment."""
    only_training: tuple[str, ...] = ()
    """Keywords of it that evaluations do not take over: where matches begin, say."""


def said_of_rows(
    name: str, num: int, env_config: Mapping[str, Any], *, preprocess: PreprocessConfig = _NOTHING, wrappers: Named = ()
) -> RowsSaid:
    """Of so many rows of it. Nothing is made of what cannot say anything."""
    recipe = _Recipe(name, dict(env_config), preprocess, *wrappers_of(wrappers))
    if recipe.atari or not (recipe.only_vectors or recipe.native) or not recipe.is_vector:
        return RowsSaid()
    made = recipe.vector(num)
    try:
        env = made.unwrapped
        group, only_training = getattr(env, "group_rows", 1), getattr(env, "only_training", ())
        return RowsSaid(_opponents(made) is not None, int(group), tuple(only_training))
    finally:
        made.close()


def make_one(
    name: str,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    *,
    preprocess: PreprocessConfig = _NOTHING,
    wrappers: Named = (),
) -> gym.Env[Any, Any]:
    """A single environment, as it is watched and recorded: rewards are those of the game, and episodes whole games.

    One that exists only as a vector implementation is played through that, with one row; it cannot be filmed.
    """
    recipe = _Recipe(name, dict(env_config or {}), for_evaluation(preprocess), *wrappers_of(wrappers))
    if recipe.only_vectors or (recipe.atari and render_mode is None and recipe.is_vector):  # exactly what was trained on
        return SingleRow(recipe.vector(1, render_mode))
    if recipe.vector_wrappers:
        return SingleRow(recipe.vector(1, render_mode))
    one = recipe.single(render_mode)
    if not isinstance(one, gym.Env):
        raise EnvironmentFault(f"{name} made a {type(one).__name__}, not a gymnasium.Env.")
    return one


def made_as_trained(
    state: Mapping[str, Any],
    *,
    env: str | None = None,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """A single environment as the saved config of a run describes it; another name, or further keywords, may be asked for."""
    config = state["config"]
    left_out = _only_training(env or state["env"])
    taken_over = {key: value for key, value in config.get("env_config", {}).items() if key not in left_out}
    keywords = {**taken_over, **(env_config or {})}
    preprocess, wrappers = preprocess_of(config), config.get("wrappers") or ()
    one = make_one(env or state["env"], keywords, render_mode, preprocess=preprocess, wrappers=wrappers)
    return own_part(one) if (config.get("model") or {}).get("centralized_value") else one


def _only_training(name: str) -> tuple[str, ...]:
    """Keywords of an environment that are for training: of the vector that trains."""
    made_by: Any = factory_of(name)
    if made_by is None:
        entry = spec_of(name).vector_entry_point
        made_by = load_env_creator(entry) if isinstance(entry, str) else entry
    return tuple(getattr(made_by, "only_training", ()))


class _Recipe:
    """How one environment, or many at once, come about: made, preprocessed, wrapped."""

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        preprocess: PreprocessConfig,
        wrappers: list[Wrapper],
        vector_wrappers: list[Wrapper],
    ) -> None:
        self.name, self.config, self.preprocess = name, config, preprocess
        self.wrappers, self.vector_wrappers = wrappers, vector_wrappers
        headless.provide()
        self.factory = factory_of(name)
        self.spec = spec_of(name) if self.factory is None else None
        self.atari = self.spec is not None and is_atari(self.spec, config, preprocess)
        self.only_vectors = self.factory is not None and makes_vectors(self.factory)
        doom = self.spec is not None and is_doom(self.spec, preprocess)
        if preprocess.standard and not self.atari and not doom:
            raise ConfigError(
                f"preprocess.standard: what is usual for {name} is not known; it is for pictures of Atari games and ViZDoom.",
                "Say what is wanted: frame_skip, grey, resize, stack …",
            )
        if self.only_vectors and (wrappers or not is_plain(preprocess)):
            what = wrappers[0].name if wrappers else "preprocess"
            raise ConfigError(
                f"{name} makes whole vector environments; {what} is for single ones.",
                "Give it a vector wrapper, or do it inside.",
            )

    @property
    def is_vector(self) -> bool:
        """A vector implementation that can do what is asked, or wrappers that want one."""
        native = self.only_vectors or self.atari or (self.native and self._limited_at_most)
        return bool(self.vector_wrappers) or (native and not self.wrappers)

    @property
    def native(self) -> bool:
        return self.spec is not None and self.spec.vector_entry_point is not None and not self._is_raw_atari

    @property
    def _is_raw_atari(self) -> bool:
        """ale-py's own vector implementation always preprocesses."""
        return self.spec is not None and str(self.spec.entry_point).startswith("ale_py") and not self.atari

    @property
    def _limited_at_most(self) -> bool:
        """Gymnasium's vector implementations know a limit of steps, and nothing else of preprocessing."""
        return is_plain(self.preprocess.model_copy(update={"max_episode_steps": None}))

    def vector(self, num: int, render_mode: str | None = None) -> Any:
        env = _made(self.name, lambda: self._vector(num, render_mode))
        if not isinstance(env, gym.vector.VectorEnv):
            raise EnvironmentFault(
                f"{self.name} takes num_envs and made a {type(env).__name__}, not a gymnasium.vector.VectorEnv.",
                "Return a VectorEnv, or rename the parameter: then it makes one environment per call.",
            )
        for wrapper in self.vector_wrappers:
            env = wrapper.around(env)
        return env

    def _vector(self, num: int, render_mode: str | None) -> Any:
        if self.only_vectors:
            assert self.factory is not None
            shown = {"render_mode": render_mode} if render_mode is not None and takes(self.factory, "render_mode") else {}
            return self.factory(num_envs=num, **self.config, **shown)
        if self.wrappers or render_mode is not None or not (self.atari or (self.native and self._limited_at_most)):
            return gym.vector.SyncVectorEnv([lambda: self.single(render_mode)] * num)
        if self.atari:
            assert self.spec is not None
            return make_vector(self.spec, num, self.config, self.preprocess)
        limit = self._limit()
        return gym.make_vec(self.name, num, vectorization_mode="vector_entry_point", **self.config | limit)

    def _limit(self) -> dict[str, int]:
        ours = self.preprocess.max_episode_steps
        theirs = self.config.get("max_episode_steps") or (self.spec.max_episode_steps if self.spec is not None else None)
        return {} if ours is None else {"max_episode_steps": min(ours, theirs or ours)}

    def single(self, render_mode: str | None = None) -> Any:
        if render_mode is not None:
            headless.prepare(str(self.spec.entry_point) if self.spec is not None else self.name)
        if self.factory is None:
            trust.check_config_files(self.config)
        env = _made(self.name, lambda: self._single(render_mode))
        for wrapper in self.wrappers:
            env = wrapper.around(env)
        return env

    def _single(self, render_mode: str | None) -> Any:
        if self.factory is not None:
            shows = {} if render_mode is None else {"render_mode": render_mode}
            takes_it = takes(self.factory, "render_mode") or takes_mapping(self.factory, self.config)
            return preprocessed(called(self.factory, self.config | (shows if takes_it else {})), self.preprocess, self.name)
        assert self.spec is not None
        if self.atari:
            return make_single(self.spec, self.config, self.preprocess, render_mode)
        shown = self.config if render_mode is None else self.config | {"render_mode": render_mode}
        if is_doom(self.spec, self.preprocess):
            return preprocessed(*make_doom(self.spec, shown, self.preprocess), self.name)
        return preprocessed(gym.make(self.name, **shown), self.preprocess, self.name)


def reward_threshold(name: str) -> float | None:
    """The return at which Gymnasium counts an environment as solved, if it says so."""
    return None if factory_of(name) is not None else spec_of(name).reward_threshold


def check_exists(name: str) -> None:
    """Raise UnknownName or MissingExtra now, rather than after other parts have started."""
    if outdated(name):  # which `env_names.current_name` says once
        warnings.filterwarnings("ignore", r".*is out of date", DeprecationWarning)  # Gymnasium says it again for every copy


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except LudusError:
        raise
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        family = "mujoco" if "mujoco" in str(error).lower() else "box2d" if "box2d" in str(error).lower() else "all"
        raise MissingExtra(f"{name} needs more packages: {error}.", f"pip install 'ludus[{family}]'") from error
    except TypeError as error:
        raise EnvironmentFault(f"{name} could not be made: {error}{user_frame(error)}.", "Check config.env_config.") from error
    except gym.error.Error as error:
        raise EnvironmentFault(f"{name} could not be made: {error}.") from error
    except Exception as error:
        raise EnvironmentFault(f"{name} raised {type(error).__name__} while it was made: {error}{user_frame(error)}.") from error


_GYMNASIUM_STEP = (
    "Gymnasium wants (observation, reward, terminated, truncated, info); Gym before 0.26 had `done` for the third and fourth."
)
_FAULTS_IN_A_ROW = 5  # without a step between them, before we believe that it will not work again


def _nothing() -> None:
    pass


def _tell(env: Any, timesteps: int | None) -> None:
    if timesteps is not None and hasattr(env.unwrapped, "set_timesteps"):
        env.unwrapped.set_timesteps(timesteps)


def _closed(env: Any) -> None:
    try:
        env.close()
    except Exception:  # it has failed already; that it cannot even close is no news
        log.debug("closing a failed environment failed", exc_info=True)


# -- an environment's own vector implementation -------------------------------------------------------------------------


LOST: Final = "lost"
"""In the infos of a vector environment's step: rows [N] whose step came to nothing, and which begin anew. It may have attributes
`beat`, which it calls while it waits, and `restarts`, how often something of its own failed and was begun anew."""


class VectorEnvironments:
    """A Gymnasium vector environment, in next-step or same-step autoreset mode."""

    def __init__(
        self,
        name: str,
        env: gym.vector.VectorEnv[Any, Any, Any],
        again: Callable[[], gym.vector.VectorEnv[Any, Any, Any]] | None = None,
    ) -> None:
        self.name, self.num, self._env, self._again = name, env.num_envs, env, again
        self._beat: Callable[[], None] = _nothing
        self._restarts, self._in_a_row = 0, 0
        self._timesteps: int | None = None
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        mode = AutoresetMode(mode)
        if mode is AutoresetMode.DISABLED:
            raise EnvironmentFault(f"{name} does not reset by itself.", "Make it with autoreset_mode NEXT_STEP or SAME_STEP.")
        self.resets_at_once = mode is AutoresetMode.SAME_STEP
        self.action_space = env.single_action_space
        self.observation_space, mask_space = spaces.split_mask(env.single_observation_space)
        self._mask_inside = mask_space is not None
        self._unwrap = self._mask_inside and not isinstance(self.observation_space, gym.spaces.Dict)
        self.masked = self._mask_inside
        self._steps = 0

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(getattr(self._env.unwrapped, "result_names", ()))

    @property
    def beat(self) -> Callable[[], None]:
        return self._beat

    @beat.setter
    def beat(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        env: Any = self._env.unwrapped
        if hasattr(env, "beat"):  # it waits for others, and says so
            env.beat = beat

    @property
    def restarts(self) -> int:
        return self._restarts + int(getattr(self._env.unwrapped, "restarts", 0))

    def reset(self, seed: int | None) -> Seen:
        with translated(self.name, "reset", 0):
            observation, infos = self._env.reset(seed=seed)
        self.masked = self._mask_inside or ACTION_MASK in infos
        return self._seen(observation, infos)

    def step(self, action: Tree) -> Outcome:
        self._steps += 1
        try:
            with translated(self.name, "step", self._steps):
                observation, reward, terminated, truncated, infos = self._env.step(action)
        except EnvironmentFault as fault:
            return self._begun_again(fault)
        self._in_a_row = 0
        seen = self._seen(observation, infos)
        lost = infos.get(LOST)
        results = self._results(infos) if self.results and (terminated | truncated).any() else None
        if not self.resets_at_once:
            return Outcome(seen, reward, terminated, truncated, lost=lost, results=results)
        rows = np.flatnonzero(terminated | truncated)
        return Outcome(seen, reward, terminated, truncated, rows, self._finals(infos, rows), lost, results)

    def progress(self, timesteps: int) -> None:
        self._timesteps = timesteps
        _tell(self._env, timesteps)

    def _results(self, infos: Mapping[str, Any]) -> Floats:
        """Gymnasium's way for a vector: what was said, and under the same name with a line before it, by whom. A NaN says nothing."""
        found = np.zeros((self.num, len(self.results), 2), np.float32)
        for k, name in enumerate(self.results):
            told = infos.get(f"_{name}")
            if told is not None:
                numbers = np.asarray(infos[name], np.float64)
                told = told & np.isfinite(numbers)
                found[told, k, 0], found[told, k, 1] = numbers[told], 1
        return found

    def _begun_again(self, fault: EnvironmentFault) -> Outcome:
        """All rows are lost, and start anew. Raises the fault when that is not wanted, or has not helped."""
        while True:
            if self._again is None or self._in_a_row >= _FAULTS_IN_A_ROW:
                raise fault
            self._in_a_row += 1
            self._restarts = self.restarts + 1
            log.warning("%s It is recreated.", fault)
            _closed(self._env)
            try:
                self._env = self._again()
                self.beat = self._beat
                _tell(self._env, self._timesteps)
                seen = self.reset(None)
            except EnvironmentFault as another:
                fault = another
            else:
                break
        nothing = np.zeros(self.num, np.bool_)
        return Outcome(seen, np.zeros(self.num, np.float32), nothing, nothing, np.zeros(0, np.int64), None, ~nothing)

    def _finals(self, infos: Mapping[str, Any], rows: Ints) -> Tree:
        if not rows.size:
            return None
        finals = infos.get("final_obs", infos.get("final_observation"))
        if finals is None:
            raise EnvironmentFault(f"{self.name} resets at once but gives no 'final_obs' in its infos.")
        if isinstance(finals, np.ndarray) and finals.dtype == object:
            picked = map_tree(lambda *items: np.stack(items), *(_plain(finals[i]) for i in rows))
        else:
            picked = map_tree(lambda x: np.asarray(x)[rows], finals)
        return spaces.without_mask(picked, self._unwrap) if self._mask_inside else picked

    def _seen(self, observation: Tree, infos: Mapping[str, Any]) -> Seen:
        if not self.masked:
            return Seen(observation, None)
        try:
            given = observation[ACTION_MASK] if self._mask_inside else infos[ACTION_MASK]
            mask = spaces.flat_mask(given, self.action_space, self.num)
        except (TypeError, ValueError, KeyError, ConfigError) as error:
            where = f"{self.name} at step {self._steps}"
            raise EnvironmentFault(f"{where} returned no usable {ACTION_MASK}: {error}.") from error
        return Seen(spaces.without_mask(observation, self._unwrap) if self._mask_inside else observation, mask)

    def close(self) -> None:
        self._env.close()


def _plain(value: Any) -> Tree:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else np.asarray(value)


@contextlib.contextmanager
def translated(name: str, call: str, step: int, row: int | None = None) -> Any:
    """The user's exception, once, as an EnvironmentFault that says where."""
    try:
        yield
    except Exception as error:
        who = name if row is None else f"environment {row} of {name}"
        raise EnvironmentFault(
            f"{who} raised {type(error).__name__} in {call} (step {step}): {error}{user_frame(error)}."
        ) from error


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def too_large_for_float32(value: Any) -> bool:
    """Whether a finite number becomes infinite as a float32, in which observations and rewards are stored."""
    return _LARGEST_FLOAT32 < abs(float(value)) < math.inf


def own_part(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Of an environment that shows {observation, state} for a centralised value: what its agent sees, for whoever only plays."""
    space = env.observation_space
    shown = set(space.spaces) - {ACTION_MASK} if isinstance(space, gym.spaces.Dict) else set()
    return OwnPart(env) if shown == {"observation", "state"} else env


class OwnPart(gym.ObservationWrapper[Any, Any, Any]):
    """Shows `observation`, with the mask beside its parts if there is one: as `spaces.split_mask` takes it apart."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, gym.spaces.Dict)
        parts = env.observation_space.spaces
        own = parts["observation"]
        self._named = isinstance(own, gym.spaces.Dict)
        shown = self._joined({**parts, "observation": own.spaces if isinstance(own, gym.spaces.Dict) else own})
        self.observation_space = gym.spaces.Dict(shown) if isinstance(shown, dict) else shown

    def observation(self, observation: Any) -> Any:
        return self._joined(observation)

    def _joined(self, parts: Mapping[str, Any]) -> Any:
        own = parts["observation"]
        if ACTION_MASK not in parts:
            return own
        return {**(own if self._named else {"observation": own}), ACTION_MASK: parts[ACTION_MASK]}


class SingleRow(gym.Env[Any, Any]):
    """The one row of a vector environment, as an ordinary environment."""

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        """Raises ConfigError."""
        if _opponents(env) is not None:
            raise ConfigError(
                "Its opponent would be an earlier version, and nobody here has one.", "Name a script as its opponent."
            )
        group = int(getattr(env.unwrapped, "group_rows", 1))
        if group > 1:
            log.warning(
                "One row of a side of %d is played here, and what the environment has plays the others. "
                "Whole sides play in evaluations of a training, and in battles.", group,
            )  # fmt: skip
        self._env = env
        self.metadata, self.render_mode = env.metadata, getattr(env, "render_mode", None)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, infos = self._env.reset(seed=seed)
        return _first_row(observation), _first_row(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        batched = map_tree(lambda x: np.asarray(x)[None], action)
        observation, reward, terminated, truncated, infos = self._env.step(batched)
        over = bool(terminated[0] or truncated[0])
        final = infos.get("final_obs") if over else None  # same-step autoreset already shows the next episode
        seen = _first_row(observation) if final is None else final[0] if isinstance(final, np.ndarray) else _first_row(final)
        return seen, float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first_row(infos)

    def render(self) -> Any:
        frames: Any = self._env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self._env.close()


def _first_row(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _first_row(item) for key, item in value.items() if not key.startswith("_")}
    if isinstance(value, tuple):
        return tuple(map(_first_row, value))
    return value[0] if isinstance(value, np.ndarray) and value.ndim else value


# -- copies in a loop ---------------------------------------------------------------------------------------------------


class LoopEnvironments:
    """Copies of a single environment, stepped one after the other into preallocated arrays; next-step autoreset."""

    resets_at_once = False

    def __init__(self, name: str, envs: list[gym.Env[Any, Any]], again: Callable[[], gym.Env[Any, Any]] | None = None) -> None:
        self.name, self.num, self._envs, self._again = name, len(envs), envs, again
        self.beat: Callable[[], None] = _nothing
        self.restarts, self._in_a_row = 0, [0] * len(envs)
        self.results: tuple[str, ...] = ()
        self._lost = np.zeros(self.num, np.bool_)
        env = envs[0]
        if not isinstance(env, gym.Env):
            raise EnvironmentFault(f"{name} made a {type(env).__name__}, not a gymnasium.Env.")
        self.action_space = env.action_space
        self._spaces = env.observation_space, env.action_space
        self.observation_space, mask_space = spaces.split_mask(env.observation_space)
        self._mask_inside = mask_space is not None
        self._unwrap = self._mask_inside and not isinstance(self.observation_space, gym.spaces.Dict)
        self.masked = self._mask_inside
        self._spec = spaces.array_spec(self.observation_space)
        self._observation = map_tree(lambda s: s.zeros(self.num), self._spec)
        self._given: list[Any] = [None] * self.num
        self._rows = [
            map_tree(
                lambda x, i=i: x[i],
                self._observation,
            )
            for i in range(self.num)
        ]
        self._scalars = any(spec.shape == () for _, spec in leaves(self._spec))
        self._mask = np.ones((self.num, spaces.mask_size(self.action_space)), np.bool_)
        self._reward = np.zeros(self.num, np.float32)
        self._terminated = np.zeros(self.num, np.bool_)
        self._truncated = np.zeros(self.num, np.bool_)
        self._over = np.zeros(self.num, np.bool_)
        self._steps = 0
        self._timesteps: int | None = None

    def reset(self, seed: int | None) -> Seen:
        for i in range(self.num):
            self.beat()
            self._reset(i, None if seed is None else seed + i)
        self._over[:] = False
        return self._seen()

    def step(self, action: Tree) -> Outcome:
        self._steps += 1
        plain = action if isinstance(action, np.ndarray) else None
        lost, beat = False, self.beat
        for i, env in enumerate(self._envs):
            beat()
            try:
                if self._over[i]:
                    self._reset(i, None)
                    self._reward[i], self._terminated[i], self._truncated[i] = 0.0, False, False
                    continue
                one = plain[i] if plain is not None else map_tree(lambda x, i=i: x[i], action)
                self._step(i, env, one)
                self._in_a_row[i] = 0
            except EnvironmentFault as fault:
                self._begin_again(i, fault)
                lost = True
        np.logical_or(self._terminated, self._truncated, out=self._over)
        outcome = Outcome(self._seen(), self._reward, self._terminated, self._truncated)
        if lost:
            outcome.lost, self._lost = self._lost, np.zeros(self.num, np.bool_)
        return outcome

    def _step(self, i: int, env: gym.Env[Any, Any], action: Any) -> None:
        with translated(self.name, "step", self._steps, i):
            made = env.step(action)
        try:
            observation, reward, terminated, truncated, info = made
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self._not_of_gymnasium(i, "step", made), _GYMNASIUM_STEP) from error
        self._store(i, observation, info, ended=bool(terminated or truncated))
        try:
            self._reward[i], self._terminated[i], self._truncated[i] = reward, terminated, truncated
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFault(
                f"{self._where(i)} returned the reward {reward}, terminated {terminated}, truncated {truncated}."
            ) from error
        if math.isinf(self._reward[i]) and too_large_for_float32(reward):
            raise EnvironmentFault(f"{self._where(i)} returned the reward {reward}, which is too large for float32.", "Scale it.")

    def _begin_again(self, i: int, fault: EnvironmentFault) -> None:
        """The row is lost, and starts anew. Raises the fault when that is not wanted, or has not helped."""
        while True:
            if self._again is None or self._in_a_row[i] >= _FAULTS_IN_A_ROW:
                raise fault
            self._in_a_row[i] += 1
            self.restarts += 1
            log.warning("%s It is recreated.", fault)
            _closed(self._envs[i])
            try:
                self._envs[i] = self._again()
                _tell(self._envs[i], self._timesteps)
                self._reset(i, None)
            except EnvironmentFault as another:
                fault = another
            else:
                break
        self._lost[i] = True
        self._reward[i], self._terminated[i], self._truncated[i] = 0.0, False, False

    def _reset(self, i: int, seed: int | None) -> None:
        with translated(self.name, "reset", self._steps, i):
            made = self._envs[i].reset(seed=seed)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
            raise EnvironmentFault(
                self._not_of_gymnasium(i, "reset", made),
                "Gymnasium wants (observation, info); Gym before 0.26 had the observation alone.",
            )
        observation, info = made
        self._check_spaces(i)
        if ACTION_MASK in info:
            self.masked = True
        self._store(i, observation, info)
        self._check_integers(i, observation)

    def _not_of_gymnasium(self, i: int, call: str, made: Any) -> str:
        found = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        return f"{self._where(i)} returned {found} from {call}()."

    def _check_spaces(self, i: int) -> None:
        """They are looked at once, when the networks are made; whoever changes them later means something else by them."""
        env = self._envs[i]
        for what, now, before in (
            ("observation", env.observation_space, self._spaces[0]),
            ("action", env.action_space, self._spaces[1]),
        ):
            if now is not before and now != before:
                raise EnvironmentFault(
                    f"{self._where(i)} has changed its {what} space from {before} to {now}.",
                    "Spaces are fixed: make them wide enough for all episodes, and mask what is not there.",
                )

    def _check_integers(self, i: int, observation: Any) -> None:
        """A number that is too big for its type would be wrapped around in silence. At resets only: it costs too much."""
        try:
            given = dict(leaves(_plain(observation)))
        except (TypeError, ValueError):
            return
        for path, spec in leaves(self._spec):
            got = given.get(path, given.get(f"observation.{path}" if path else "observation"))
            if got is None or spec.dtype.kind not in "iu" or got.dtype == spec.dtype or not got.size:
                continue
            bounds = np.iinfo(spec.dtype)
            if got.min() < bounds.min or got.max() > bounds.max:
                raise EnvironmentFault(
                    f"{self._where(i)} returned {got.dtype} with values from {got.min()} to {got.max()}; its space says {spec.dtype}."
                )

    def _store(self, i: int, observation: Any, info: Mapping[str, Any], ended: bool = False) -> None:
        try:
            if self._mask_inside:
                self._mask[i] = spaces.flat_mask(observation[ACTION_MASK], self.action_space)
            elif self.masked:
                forgotten = ended and ACTION_MASK not in info  # after the end there is nothing to forbid
                self._mask[i] = True if forgotten else spaces.flat_mask(info[ACTION_MASK], self.action_space)
            seen = spaces.without_mask(observation, self._unwrap) if self._mask_inside else observation
        except (TypeError, ValueError, KeyError, AttributeError, ConfigError) as error:
            raise EnvironmentFault(f"{self._where(i)} returned no usable {ACTION_MASK} or observation: {error}.") from error
        self._given[i] = seen
        try:
            if self._scalars:
                _set_row(self._observation, i, seen)
            else:
                copy_into(self._rows[i], seen)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise EnvironmentFault(self._misfit(i, seen)) from error

    def _where(self, i: int) -> str:
        return f"environment {i} of {self.name} at step {self._steps}"

    def _misfit(self, i: int, seen: Any) -> str:
        where = self._where(i)
        try:
            given = dict(leaves(_plain(seen)))
        except Exception:  # whatever it is, it is not a tree of arrays
            return f"{where} returned a {type(seen).__name__} that does not fit its observation space."
        for path, spec in leaves(self._spec):
            if path not in given:
                return f"{where} returned an observation without {path or 'a value'!r}."
            got = given[path]
            if got.shape != spec.shape or not np.can_cast(got.dtype, spec.dtype, "same_kind"):
                key = f" for {path!r}" if path else ""
                return f"{where} returned {got.dtype}{list(got.shape)}{key}; its space says {spec.dtype}{list(spec.shape)}."
        return f"{where} returned an observation that does not fit its space."

    def _seen(self) -> Seen:
        return Seen(self._observation, self._mask if self.masked else None, self._given)

    def progress(self, timesteps: int) -> None:
        self._timesteps = timesteps
        for env in self._envs:
            _tell(env, timesteps)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _set_row(target: Tree, i: int, source: Any) -> None:
    if isinstance(target, dict):
        for key, leaf in target.items():
            _set_row(leaf, i, source[key])
    elif isinstance(target, tuple):
        for leaf, item in zip(target, source, strict=True):
            _set_row(leaf, i, item)
    else:
        value: Array = np.asarray(source)
        if value.shape != target.shape[1:] or not np.can_cast(value.dtype, target.dtype, "same_kind"):
            raise ValueError(value.shape)
        target[i] = value
