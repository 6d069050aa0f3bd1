"""Vectorised environments: many copies of one environment, stepped together.

`make_environments` uses the environment's own vector implementation if it has one, otherwise it steps copies in a loop. In both cases
the caller sees `Environments`: arrays in, arrays out, with the action mask separated from the observation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode

from ludus.config.schema import PreprocessConfig, SelfPlayConfig
from ludus.core import spaces, trust
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Array, Tree, copy_into, leaves, map_tree
from ludus.core.types import Bools, Floats, Ints
from ludus.envs import atari, vizdoom
from ludus.envs.faults import close_quietly, construction_errors, environment_errors
from ludus.envs.preprocessing import for_evaluation, is_plain, preprocess_env, preprocess_of
from ludus.envs.registry import accepts, call_factory, factory_of, makes_vector_env, spec_of, takes_mapping, version_notice
from ludus.envs.wrappers import WrapperList, load_wrappers
from ludus.errors import ConfigError, EnvironmentFault
from ludus.process.screen_choice import AUTO, EGL, XVFB, configure, screen_choice

if TYPE_CHECKING:
    from ludus.envs.opponents.opponent_rows import ChooseScript

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Observations:
    """Current observations of all rows."""

    observation: Tree  # [N, …]
    mask: Bools | None  # [N, M]
    raw: Sequence[Any] | None = None
    """By row, what the environment returned before conversion to arrays, for error messages. None: `observation` is what it
    returned.
    """

    def raw_value(self, row: int, path: str, index: Sequence[int]) -> float:
        """Return one number of an observation in its original precision; NaN if it is not found."""
        given = _plain(self.raw[row] if self.raw is not None else map_tree(lambda x: np.asarray(x)[row], self.observation))
        leaf = dict(leaves(given)).get(path)
        return math.nan if leaf is None else float(leaf[tuple(index)])


@dataclass
class StepResult:
    """Result of one step of all rows."""

    observations: Observations
    reward: Floats
    terminated: Bools
    truncated: Bools
    final_rows: Ints | None = None
    """Rows whose observation already belongs to the next episode (same-step autoreset); None for next-step autoreset."""
    final_observation: Tree = None
    lost: Bools | None = None
    """Rows whose environment failed in this step and was recreated; they show the next episode. None: no row."""
    results: Floats | None = None
    """[N, K, 2] for rows whose episodes ended: each of the environments' `results`, and 1 where it is present."""


class Environments(Protocol):
    """N copies of an environment. After an episode ends, either the next `step` only resets that row (its action is ignored, its
    reward is 0), or the row was reset in the same step and its final observation is in the result.
    """

    name: str
    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    same_step_autoreset: bool
    beat: Callable[[], None]
    """Heartbeat, called as often as the environments allow; shows a supervisor that they are not stuck."""

    @property
    def masked(self) -> bool:
        """Known after the first reset."""
        ...

    @property
    def restarts(self) -> int:
        """Number of environments that failed and were recreated."""
        ...

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results of episodes."""
        ...

    def reset(self, seed: int | None) -> Observations: ...
    def step(self, action: Tree) -> StepResult: ...

    def progress(self, timesteps: int) -> None:
        """Report the training progress to environments with `set_timesteps(timesteps)`."""
        ...

    def close(self) -> None: ...


# -- making -------------------------------------------------------------------------------------------------------------

_NO_PREPROCESSING = PreprocessConfig()


def make_environments(
    name: str,
    num: int,
    env_config: Mapping[str, Any] | None = None,
    *,
    preprocess: PreprocessConfig = _NO_PREPROCESSING,
    wrappers: WrapperList = (),
    forgiving: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> Environments:
    """Make N environments. `name` is a Gymnasium id, a name given to `register_env`, or `module:function`, called with `env_config`.

    A function with a parameter `num_envs` makes a whole vector environment; any other makes one environment. `forgiving`: an environment
    that raises is recreated and its row is lost at that step; EnvironmentFault is raised only after repeated failures.
    `beat` is called before every call of an environment, including its constructor.
    Raises UnknownName, MissingExtra, ConfigError.
    """
    builder = _EnvBuilder(name, env_config, preprocess, wrappers)
    if builder.is_vector:
        make = functools.partial(builder.vector, num)
        made = make()
        environments = VectorEnvironments(name, made, make if forgiving else None)
        environments.beat = beat
        opponents = _opponent_rows(made)
        if opponents is None:
            return environments
        from ludus.envs.opponents.opponent_rows import OpponentRows

        matches = getattr(made.unwrapped, "match_of_row", None)
        if matches is None:
            raise ConfigError(
                f"{name} has opponent_rows and no match_of_row.", "Add it: for each row the number of its match, as an array."
            )
        return OpponentRows(environments, opponents, np.asarray(matches))
    envs = []
    with contextlib.ExitStack() as made_so_far:
        for _ in range(num):
            beat()
            envs.append(builder.single())
            made_so_far.callback(close_quietly, envs[-1])
        made_so_far.pop_all()
    copies = LoopEnvironments(name, envs, builder.single if forgiving else None)
    copies.beat = beat
    return copies


def _opponent_rows(made: gym.vector.VectorEnv[Any, Any, Any]) -> Bools | None:
    rows: Bools | None = getattr(made.unwrapped, "opponent_rows", None)
    return None if rows is None or not rows.any() else rows


@dataclass(frozen=True)
class RowInfo:
    """Properties of the rows of a vector environment."""

    has_opponents: bool = False
    """Some rows are played by an external opponent."""
    group: int = 1
    """Number of neighbouring rows that form one side of a match and start and end together (`group_rows` of the environment)."""
    only_training: tuple[str, ...] = ()
    """Keywords of the environment that evaluations do not take over, such as where matches start."""


def row_info(
    name: str,
    num: int,
    env_config: Mapping[str, Any],
    *,
    preprocess: PreprocessConfig = _NO_PREPROCESSING,
    wrappers: WrapperList = (),
) -> RowInfo:
    """Make the environment if it can have such properties, and return them."""
    builder = _EnvBuilder(name, env_config, preprocess, wrappers)
    if builder.atari or not (builder.makes_vectors or builder.native) or not builder.is_vector:
        return RowInfo()
    made = builder.vector(num)
    try:
        env = made.unwrapped
        group, only_training = getattr(env, "group_rows", 1), getattr(env, "only_training", ())
        return RowInfo(_opponent_rows(made) is not None, int(group), tuple(only_training))
    finally:
        made.close()


def make_one(
    name: str,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    *,
    preprocess: PreprocessConfig = _NO_PREPROCESSING,
    wrappers: WrapperList = (),
) -> gym.Env[Any, Any]:
    """Make a single environment for rollouts: rewards are not clipped, episodes are whole games.

    An environment with only a vector implementation is used with one row; it cannot be rendered.
    """
    builder = _EnvBuilder(name, env_config, for_evaluation(preprocess), wrappers)
    as_in_training = builder.atari and render_mode is None and builder.is_vector
    if builder.makes_vectors or as_in_training or builder.vector_wrappers:
        return SingleRow(builder.vector(1, render_mode))
    one = builder.single(render_mode)
    if not isinstance(one, gym.Env):
        raise EnvironmentFault(f"{name} made a {type(one).__name__}, not a gymnasium.Env.")
    return one


def make_as_trained(
    state: Mapping[str, Any],
    *,
    env: str | None = None,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """Make a single environment from the saved config of a run; `env` and `env_config` override it."""
    config = state["config"]
    left_out = _only_training(env or state["env"])
    taken_over = {key: value for key, value in config.get("env_config", {}).items() if key not in left_out}
    keywords = {**taken_over, **(env_config or {})}
    preprocess, wrappers = preprocess_of(config), config.get("wrappers") or ()
    configure(config.get("display", AUTO))
    one = make_one(env or state["env"], keywords, render_mode, preprocess=preprocess, wrappers=wrappers)
    return without_central_state(one) if (config.get("model") or {}).get("centralized_value") else one


def _only_training(name: str) -> tuple[str, ...]:
    """Keywords of an environment that apply to training only."""
    return tuple(getattr(vector_maker(name), "only_training", ()))


def vector_maker(name: str) -> Any:
    """Return the class or function that makes the vector environment; None: there is none."""
    made_by: Any = factory_of(name)
    if made_by is None:
        entry = spec_of(name).vector_entry_point
        made_by = load_env_creator(entry) if isinstance(entry, str) else entry
    return made_by


def training_env_config(name: str, env_config: Mapping[str, Any], self_play: SelfPlayConfig) -> dict[str, Any]:
    """Return the keywords of training environments: in self-play by `opponents`, the other side of every match is opponent rows.

    Environments whose class has `self_play_keywords` are told so; others have opponent rows of their own. Raises ConfigError.
    """
    if self_play.opponents is None:
        return dict(env_config)
    keywords: Mapping[str, Any] = getattr(vector_maker(name), "self_play_keywords", {})
    if self_play.sides is not None:
        raise ConfigError(f"config.self_play.sides is {self_play.sides}, and {name} has two sides of its own.", "Leave it out.")
    if not self_play.swap_sides and "side" not in keywords:
        raise ConfigError(f"config.self_play.swap_sides is false, and {name} decides which side learns.", "Leave it out.")
    for key in keywords:
        if key in env_config:
            raise ConfigError(
                f"config.self_play.opponents is {self_play.opponents}, and config.env_config.{key} is {env_config[key]!r}.",
                f"Leave one of them out: with opponents, self_play decides about the {key} of every match.",
            )
    return {**env_config, **keywords, **({} if self_play.swap_sides else {"side": 0})}


def has_opponent_rows(
    name: str, num: int, env_config: Mapping[str, Any], preprocess: PreprocessConfig, wrappers: WrapperList
) -> bool:
    """Whether another player than the learner can play one side of every match. May make the environment. Raises like `row_info`."""
    if getattr(vector_maker(name), "self_play_keywords", None):
        return True
    return row_info(name, num, env_config, preprocess=preprocess, wrappers=wrappers).has_opponents


def script_names(name: str) -> tuple[str, ...]:
    """Scripts of an environment that can play its opponent rows. Raises UnknownName, MissingExtra."""
    return tuple(getattr(vector_maker(name), "script_names", ()))


class _EnvBuilder:
    """Makes, preprocesses and wraps one environment or a vector of them."""

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None,
        preprocess: PreprocessConfig,
        wrappers: WrapperList,
    ) -> None:
        self.name, self.config, self.preprocess = name, dict(config or {}), preprocess
        self.wrappers, self.vector_wrappers = load_wrappers(wrappers)
        if screen_choice() in (XVFB, EGL):
            from ludus.display import headless

            headless.provide_screen()
        self.factory = factory_of(name)
        self.spec = spec_of(name) if self.factory is None else None
        from_ale = self.spec is not None and str(self.spec.entry_point).startswith("ale_py")
        self.atari = self.spec is not None and atari.is_atari(self.spec, self.config, preprocess)
        # The vector implementation of ale-py always preprocesses.
        self.native = self.spec is not None and self.spec.vector_entry_point is not None and from_ale == self.atari
        self.makes_vectors = self.factory is not None and makes_vector_env(self.factory)
        self._doom = self.spec is not None and vizdoom.is_doom(self.spec, preprocess)
        if preprocess.standard and not self.atari and not self._doom:
            raise ConfigError(
                f"preprocess.standard: {name} has no standard preprocessing; it exists for images of Atari games and for ViZDoom.",
                "Set the steps explicitly: frame_skip, grey, resize, stack …",
            )
        if preprocess.agent_indicator:
            raise ConfigError(
                f"preprocess.agent_indicator: {name} has one agent; it marks the agents of an environment with several.",
                "Leave it out.",
            )
        if self.makes_vectors and (self.wrappers or not is_plain(preprocess)):
            what = self.wrappers[0].name if self.wrappers else "preprocess"
            raise ConfigError(
                f"{name} makes whole vector environments; {what} applies to single ones.",
                "Use a vector wrapper, or do it inside the environment.",
            )

    @property
    def is_vector(self) -> bool:
        """Whether a vector implementation is used: it supports the settings, or a vector wrapper needs one."""
        native = self.makes_vectors or self.atari or (self.native and self._limits_steps_only)
        return bool(self.vector_wrappers) or (native and not self.wrappers)

    @property
    def _limits_steps_only(self) -> bool:
        """Gymnasium's vector implementations support a step limit, and no other preprocessing."""
        return is_plain(self.preprocess.model_copy(update={"max_episode_steps": None}))

    def vector(self, num: int, render_mode: str | None = None) -> Any:
        with construction_errors(self.name):
            env = self._vector(num, render_mode)
        if not isinstance(env, gym.vector.VectorEnv):
            raise EnvironmentFault(
                f"{self.name} takes num_envs and made a {type(env).__name__}, not a gymnasium.vector.VectorEnv.",
                "Return a VectorEnv, or rename the parameter: then it makes one environment per call.",
            )
        for wrapper in self.vector_wrappers:
            env = wrapper.wrap(env)
        return env

    def _vector(self, num: int, render_mode: str | None) -> Any:
        if self.makes_vectors:
            assert self.factory is not None
            shown = {"render_mode": render_mode} if render_mode is not None and accepts(self.factory, "render_mode") else {}
            return self.factory(num_envs=num, **self.config, **shown)
        if self.wrappers or render_mode is not None or not (self.atari or (self.native and self._limits_steps_only)):
            return gym.vector.SyncVectorEnv([lambda: self.single(render_mode)] * num)
        if self.atari:
            assert self.spec is not None
            return atari.make_vector(self.spec, num, self.config, self.preprocess)
        config, limit = self.config, self.preprocess.max_episode_steps
        if limit is not None:
            own_limit = config.get("max_episode_steps") or (self.spec.max_episode_steps if self.spec is not None else None)
            config = config | {"max_episode_steps": min(limit, own_limit or limit)}
        return gym.make_vec(self.name, num, vectorization_mode="vector_entry_point", **config)

    def single(self, render_mode: str | None = None) -> Any:
        if render_mode is not None:
            from ludus.display import headless

            headless.prepare_rendering(str(self.spec.entry_point) if self.spec is not None else self.name)
        if self.factory is None:
            trust.check_config_files(self.config)
        with construction_errors(self.name):
            env = self._single(render_mode)
        for wrapper in self.wrappers:
            env = wrapper.wrap(env)
        return env

    def _single(self, render_mode: str | None) -> Any:
        if self.factory is not None:
            shows = {} if render_mode is None else {"render_mode": render_mode}
            takes_it = accepts(self.factory, "render_mode") or takes_mapping(self.factory, self.config)
            return preprocess_env(
                call_factory(self.factory, self.config | (shows if takes_it else {})), self.preprocess, self.name
            )
        assert self.spec is not None
        if self.atari:
            return atari.make_single(self.spec, self.config, self.preprocess, render_mode)
        shown = self.config if render_mode is None else self.config | {"render_mode": render_mode}
        if self._doom:
            return preprocess_env(*vizdoom.make_doom(self.spec, shown, self.preprocess), self.name)
        return preprocess_env(gym.make(self.name, **shown), self.preprocess, self.name)


def reward_threshold(name: str) -> float | None:
    """The return at which Gymnasium considers the environment solved, if defined."""
    return None if factory_of(name) is not None else spec_of(name).reward_threshold


def check_exists(name: str) -> None:
    """Raise UnknownName or MissingExtra early, before other components start."""
    if version_notice(name):  # already reported by `legacy_names.current_name`
        warnings.filterwarnings("ignore", r".*is out of date", DeprecationWarning)  # Gymnasium repeats it for every copy


# -- stepping -----------------------------------------------------------------------------------------------------------

_GYMNASIUM_STEP = (
    "Gymnasium expects (observation, reward, terminated, truncated, info); Gym before 0.26 had `done` for the third and fourth."
)
_MAX_CONSECUTIVE_FAULTS = 5  # without a successful step, before the fault is raised


def _set_timesteps(env: Any, timesteps: int | None) -> None:
    if timesteps is not None and hasattr(env.unwrapped, "set_timesteps"):
        env.unwrapped.set_timesteps(timesteps)


class _RestartingEnvironments:
    """Spaces, action mask and restarts, which both kinds of environments have in common."""

    def __init__(self, name: str, num: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.name, self.num, self.action_space = name, num, action_space
        self.observation_space, mask_space = spaces.split_mask(observation_space)
        self._mask_inside = mask_space is not None
        self._unwrap = self._mask_inside and not isinstance(self.observation_space, gym.spaces.Dict)
        self.masked = self._mask_inside
        self._steps = 0
        self._timesteps: int | None = None
        self._restarts = 0
        self._consecutive_faults: Counter[int] = Counter()

    @property
    def restarts(self) -> int:
        return self._restarts

    def _restart(self, part: int, fault: EnvironmentFault, recreate: Callable[[], T] | None) -> T:
        """Call `recreate`, which makes and resets the environment, until it succeeds. Raises the fault if `recreate` is None or has
        failed repeatedly. `part`: the environment whose faults are counted."""
        while recreate is not None and self._consecutive_faults[part] < _MAX_CONSECUTIVE_FAULTS:
            self._consecutive_faults[part] += 1
            self._restarts += 1
            log.warning("%s It is recreated.", fault)
            try:
                return recreate()
            except EnvironmentFault as another:
                fault = another
        raise fault


# -- an environment's own vector implementation -------------------------------------------------------------------------


LOST: Final = "lost"
"""Key in the infos of a vector environment's step: rows [N] whose step failed and which start anew. Such an environment may have the
attributes `beat`, which it calls while it waits, and `restarts`, the number of recreated parts.
"""


class VectorEnvironments(_RestartingEnvironments):
    """A Gymnasium vector environment, in next-step or same-step autoreset mode."""

    def __init__(
        self,
        name: str,
        env: gym.vector.VectorEnv[Any, Any, Any],
        recreate: Callable[[], gym.vector.VectorEnv[Any, Any, Any]] | None = None,
    ) -> None:
        super().__init__(name, env.num_envs, env.single_observation_space, env.single_action_space)
        self._env, self._make = env, recreate
        self._beat: Callable[[], None] = lambda: None
        self._choose_script: ChooseScript = lambda match, match_id: None
        mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        if mode is AutoresetMode.DISABLED:
            raise EnvironmentFault(f"{name} does not reset by itself.", "Make it with autoreset_mode NEXT_STEP or SAME_STEP.")
        self.same_step_autoreset = mode is AutoresetMode.SAME_STEP

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
        if hasattr(env, "beat"):  # it waits for other processes and reports a heartbeat
            env.beat = beat

    @property
    def restarts(self) -> int:
        """With those that the environment has done itself."""
        return self._restarts + int(getattr(self._env.unwrapped, "restarts", 0))

    def reset(self, seed: int | None) -> Observations:
        with environment_errors(self.name, "reset", 0):
            observation, infos = self._env.reset(seed=seed)
        self.masked = self._mask_inside or ACTION_MASK in infos
        return self._observe(observation, infos)

    def step(self, action: Tree) -> StepResult:
        self._steps += 1
        try:
            with environment_errors(self.name, "step", self._steps):
                observation, reward, terminated, truncated, infos = self._env.step(action)
        except EnvironmentFault as fault:
            observations = self._restart(0, fault, None if self._make is None else self._recreate)
            nothing = np.zeros(self.num, np.bool_)
            return StepResult(
                observations, np.zeros(self.num, np.float32), nothing, nothing, np.zeros(0, np.int64), None, ~nothing
            )
        self._consecutive_faults.clear()
        observations = self._observe(observation, infos)
        lost = infos.get(LOST)
        results = self._results(infos) if self.results and (terminated | truncated).any() else None
        if not self.same_step_autoreset:
            return StepResult(observations, reward, terminated, truncated, lost=lost, results=results)
        rows = np.flatnonzero(terminated | truncated)
        return StepResult(observations, reward, terminated, truncated, rows, self._finals(infos, rows), lost, results)

    def progress(self, timesteps: int) -> None:
        self._timesteps = timesteps
        _set_timesteps(self._env, timesteps)

    def plays_script(self, name: str) -> bool:
        """Whether a script of this name can play rows."""
        env: Any = self._env.unwrapped
        return bool(env.plays_script(name)) if hasattr(env, "plays_script") else name in getattr(env, "script_names", ())

    @property
    def current_matches(self) -> list[str] | None:
        """By number of a match: the id of the one that has begun last. None: the environment does not tell; episodes are matches."""
        return getattr(self._env.unwrapped, "current_matches", None)

    def choose_scripts_by(self, choose: ChooseScript) -> None:
        """Let `choose` decide about the opponents of matches, if the environment orders them in advance."""
        self._choose_script = choose
        env: Any = self._env.unwrapped
        if hasattr(env, "choose_script"):
            env.choose_script = choose

    def script_actions(self, rows: Ints, scripts: Sequence[str]) -> Tree:
        """Return the actions of scripts in these rows now. Raises EnvironmentFault."""
        env: Any = self._env.unwrapped
        with environment_errors(self.name, "script_actions", self._steps):
            return env.script_actions(rows, scripts)

    def _results(self, infos: Mapping[str, Any]) -> Floats:
        """Read Gymnasium's vector infos: values, and under `_name` a mask of the rows that have one. NaN counts as absent."""
        values = np.zeros((self.num, len(self.results), 2), np.float32)
        for k, name in enumerate(self.results):
            present = infos.get(f"_{name}")
            if present is not None:
                numbers = np.asarray(infos[name], np.float64)
                present = present & np.isfinite(numbers)
                values[present, k, 0], values[present, k, 1] = numbers[present], 1
        return values

    def _recreate(self) -> Observations:
        assert self._make is not None
        self._restarts = self.restarts  # also those that the previous environment has counted
        close_quietly(self._env)
        self._env = self._make()
        self.beat = self._beat
        self.choose_scripts_by(self._choose_script)
        _set_timesteps(self._env, self._timesteps)
        return self.reset(None)

    def _finals(self, infos: Mapping[str, Any], rows: Ints) -> Tree:
        if not rows.size:
            return None
        finals = infos.get("final_obs", infos.get("final_observation"))
        if finals is None:
            raise EnvironmentFault(f"{self.name} has same-step autoreset but returns no 'final_obs' in its infos.")
        if isinstance(finals, np.ndarray) and finals.dtype == object:
            picked = map_tree(lambda *items: np.stack(items), *(_plain(finals[i]) for i in rows))
        else:
            picked = map_tree(lambda x: np.asarray(x)[rows], finals)
        return spaces.without_mask(picked, self._unwrap) if self._mask_inside else picked

    def _observe(self, observation: Tree, infos: Mapping[str, Any]) -> Observations:
        if not self.masked:
            return Observations(observation, None)
        try:
            given = observation[ACTION_MASK] if self._mask_inside else infos[ACTION_MASK]
            mask = spaces.flat_mask(given, self.action_space, self.num)
        except (TypeError, ValueError, KeyError, ConfigError) as error:
            where = f"{self.name} at step {self._steps}"
            raise EnvironmentFault(f"{where} returned no usable {ACTION_MASK}: {error}.") from error
        return Observations(spaces.without_mask(observation, self._unwrap) if self._mask_inside else observation, mask)

    def close(self) -> None:
        self._env.close()


def _plain(value: Any) -> Tree:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else np.asarray(value)


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def too_large_for_float32(value: Any) -> bool:
    """Return whether a finite number becomes infinite as float32, in which observations and rewards are stored."""
    return _LARGEST_FLOAT32 < abs(float(value)) < math.inf


def without_central_state(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Reduce {observation, state}, made for a centralised critic, to `observation`; other environments are returned unchanged."""
    space = env.observation_space
    shown = set(space.spaces) - {ACTION_MASK} if isinstance(space, gym.spaces.Dict) else set()
    return WithoutCentralState(env) if shown == {"observation", "state"} else env


class WithoutCentralState(gym.ObservationWrapper[Any, Any, Any]):
    """Returns `observation`, with the action mask as `spaces.split_mask` expects it."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, gym.spaces.Dict)
        parts = env.observation_space.spaces
        own = parts["observation"]
        self._named = isinstance(own, gym.spaces.Dict)
        shown = self._combine({**parts, "observation": own.spaces if isinstance(own, gym.spaces.Dict) else own})
        self.observation_space = gym.spaces.Dict(shown) if isinstance(shown, dict) else shown

    def observation(self, observation: Any) -> Any:
        return self._combine(observation)

    def _combine(self, parts: Mapping[str, Any]) -> Any:
        own = parts["observation"]
        if ACTION_MASK not in parts:
            return own
        return {**(own if self._named else {"observation": own}), ACTION_MASK: parts[ACTION_MASK]}


class SingleRow(gym.Env[Any, Any]):
    """A vector environment with one row, as an ordinary environment."""

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        """Raises ConfigError."""
        if _opponent_rows(env) is not None:
            raise ConfigError(
                "The opponent would be an earlier version, but none is available here.", "Use a script as the opponent."
            )
        group = int(getattr(env.unwrapped, "group_rows", 1))
        if group > 1:
            log.warning(
                "One row of a side of %d is played here; the environment's own players play the others. "
                "Evaluations during training and battles play whole sides.", group,
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
        final = infos.get("final_obs") if over else None  # with same-step autoreset the observation is of the next episode
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


class _RowBuffers:
    """Preallocated arrays [N, …] into which LoopEnvironments writes the result of a step."""

    def __init__(self, spec: Tree, num: int, mask_size: int) -> None:
        self.observation: Tree = map_tree(lambda leaf: leaf.zeros(num), spec)
        self.rows = [map_tree(lambda x, i=i: x[i], self.observation) for i in range(num)]
        """Views of `observation`, one per row."""
        self.raw: list[Any] = [None] * num
        """Observations as returned by the environments."""
        self.has_scalars = any(leaf.shape == () for _, leaf in leaves(spec))
        """Whether a leaf of the observation is a scalar, which a view per row cannot be written to."""
        self.mask: Bools = np.ones((num, mask_size), np.bool_)
        self.reward: Floats = np.zeros(num, np.float32)
        self.terminated: Bools = np.zeros(num, np.bool_)
        self.truncated: Bools = np.zeros(num, np.bool_)
        self.over: Bools = np.zeros(num, np.bool_)
        """Rows that only reset in the next step."""
        self.lost: Bools = np.zeros(num, np.bool_)

    def set_outcome(self, i: int, reward: Any, terminated: Any, truncated: Any) -> None:
        self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated


class LoopEnvironments(_RestartingEnvironments):
    """Copies of a single environment, stepped one after the other into preallocated arrays; next-step autoreset."""

    same_step_autoreset = False

    def __init__(self, name: str, envs: list[gym.Env[Any, Any]], recreate: Callable[[], gym.Env[Any, Any]] | None = None) -> None:
        env = envs[0]
        if not isinstance(env, gym.Env):
            raise EnvironmentFault(f"{name} made a {type(env).__name__}, not a gymnasium.Env.")
        super().__init__(name, len(envs), env.observation_space, env.action_space)
        self._envs, self._make = envs, recreate
        self.beat: Callable[[], None] = lambda: None
        self.results: tuple[str, ...] = ()
        self._spaces = env.observation_space, env.action_space
        self._spec = spaces.array_spec(self.observation_space)
        self._buffers = _RowBuffers(self._spec, self.num, spaces.mask_size(self.action_space))

    def reset(self, seed: int | None) -> Observations:
        for i in range(self.num):
            self.beat()
            self._reset(i, None if seed is None else seed + i)
        self._buffers.over[:] = False
        return self._observe()

    def step(self, action: Tree) -> StepResult:
        self._steps += 1
        plain = action if isinstance(action, np.ndarray) else None
        lost, beat = False, self.beat
        for i, env in enumerate(self._envs):
            beat()
            try:
                if self._buffers.over[i]:
                    self._reset(i, None)
                    self._buffers.set_outcome(i, 0.0, False, False)
                    continue
                one = plain[i] if plain is not None else map_tree(lambda x, i=i: x[i], action)
                self._step(i, env, one)
                self._consecutive_faults[i] = 0
            except EnvironmentFault as fault:
                self._restart(i, fault, None if self._make is None else functools.partial(self._recreate, i))
                self._buffers.set_outcome(i, 0.0, False, False)
                self._buffers.lost[i] = lost = True
        np.logical_or(self._buffers.terminated, self._buffers.truncated, out=self._buffers.over)
        outcome = StepResult(self._observe(), self._buffers.reward, self._buffers.terminated, self._buffers.truncated)
        if lost:
            outcome.lost, self._buffers.lost = self._buffers.lost, np.zeros(self.num, np.bool_)
        return outcome

    def _step(self, i: int, env: gym.Env[Any, Any], action: Any) -> None:
        with environment_errors(self.name, "step", self._steps, i):
            made = env.step(action)
        try:
            observation, reward, terminated, truncated, info = made
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self._wrong_return(i, "step", made), _GYMNASIUM_STEP) from error
        self._store(i, observation, info, ended=bool(terminated or truncated))
        try:
            self._buffers.set_outcome(i, reward, terminated, truncated)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFault(
                f"{self._where(i)} returned the reward {reward}, terminated {terminated}, truncated {truncated}."
            ) from error
        if math.isinf(self._buffers.reward[i]) and too_large_for_float32(reward):
            raise EnvironmentFault(f"{self._where(i)} returned the reward {reward}, which is too large for float32.", "Scale it.")

    def _recreate(self, i: int) -> None:
        assert self._make is not None
        close_quietly(self._envs[i])
        self._envs[i] = self._make()
        _set_timesteps(self._envs[i], self._timesteps)
        self._reset(i, None)

    def _reset(self, i: int, seed: int | None) -> None:
        with environment_errors(self.name, "reset", self._steps, i):
            made = self._envs[i].reset(seed=seed)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
            raise EnvironmentFault(
                self._wrong_return(i, "reset", made),
                "Gymnasium expects (observation, info); Gym before 0.26 returned the observation alone.",
            )
        observation, info = made
        self._check_spaces(i)
        if ACTION_MASK in info:
            self.masked = True
        self._store(i, observation, info)
        self._check_integers(i, observation)

    def _wrong_return(self, i: int, call: str, made: Any) -> str:
        values = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        return f"{self._where(i)} returned {values} from {call}()."

    def _check_spaces(self, i: int) -> None:
        """The networks are built for the initial spaces; a later change is an error."""
        env = self._envs[i]
        for what, now, before in (
            ("observation", env.observation_space, self._spaces[0]),
            ("action", env.action_space, self._spaces[1]),
        ):
            if now is not before and now != before:
                raise EnvironmentFault(
                    f"{self._where(i)} has changed its {what} space from {before} to {now}.",
                    "Spaces are fixed: make them large enough for all episodes, and mask unavailable actions.",
                )

    def _check_integers(self, i: int, observation: Any) -> None:
        """Detect integers that would overflow their type silently. Only at resets: it is too slow for every step."""
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
                    f"{self._where(i)} returned {got.dtype} with values from {got.min()} to {got.max()}; its space has {spec.dtype}."
                )

    def _store(self, i: int, observation: Any, info: Mapping[str, Any], ended: bool = False) -> None:
        try:
            if self._mask_inside:
                self._buffers.mask[i] = spaces.flat_mask(observation[ACTION_MASK], self.action_space)
            elif self.masked:
                missing = ended and ACTION_MASK not in info  # no action follows the end of an episode
                self._buffers.mask[i] = True if missing else spaces.flat_mask(info[ACTION_MASK], self.action_space)
            seen = spaces.without_mask(observation, self._unwrap) if self._mask_inside else observation
        except (TypeError, ValueError, KeyError, AttributeError, ConfigError) as error:
            raise EnvironmentFault(f"{self._where(i)} returned no usable {ACTION_MASK} or observation: {error}.") from error
        self._buffers.raw[i] = seen
        try:
            if self._buffers.has_scalars:
                _set_row(self._buffers.observation, i, seen)
            else:
                copy_into(self._buffers.rows[i], seen)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise EnvironmentFault(self._describe_mismatch(i, seen)) from error

    def _where(self, i: int) -> str:
        return f"environment {i} of {self.name} at step {self._steps}"

    def _describe_mismatch(self, i: int, seen: Any) -> str:
        where = self._where(i)
        try:
            given = dict(leaves(_plain(seen)))
        except (TypeError, ValueError):
            return f"{where} returned a {type(seen).__name__} that does not fit its observation space."
        for path, spec in leaves(self._spec):
            if path not in given:
                return f"{where} returned an observation without {path or 'a value'!r}."
            got = given[path]
            if got.shape != spec.shape or not np.can_cast(got.dtype, spec.dtype, "same_kind"):
                key = f" for {path!r}" if path else ""
                return f"{where} returned {got.dtype}{list(got.shape)}{key}; its space has {spec.dtype}{list(spec.shape)}."
        return f"{where} returned an observation that does not fit its space."

    def _observe(self) -> Observations:
        return Observations(self._buffers.observation, self._buffers.mask if self.masked else None, self._buffers.raw)

    def progress(self, timesteps: int) -> None:
        self._timesteps = timesteps
        for env in self._envs:
            _set_timesteps(env, timesteps)

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
