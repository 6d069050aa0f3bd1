"""Parser for Coach's `-cp "a.b=c; …"` assignments. Values are parsed as data, never evaluated as Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.config.aliases import coach_schedule, rllib_keys
from ludus.config.aliases.unsupported_keys import unsupported_keys
from ludus.config.overrides import translate_schedule
from ludus.config.schema import ExperimentConfig
from ludus.config.translation import key_names
from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError
from ludus.io.yaml_documents import parse_yaml

_MAX_CHARACTERS = 20_000
_OPTION = "-cp"


@dataclass(frozen=True)
class Assignment:
    path: str
    """Dotted; `['main']` is `.main`."""
    value: Any


def parse_assignments(text: str) -> list[Assignment]:
    """Parse assignments separated by semicolons. Raises ConfigError."""
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{_OPTION} has {len(text)} characters; the maximum is {_MAX_CHARACTERS}.")
    return [_parse_assignment(part) for part in _split_statements(text) if part.strip()]


def translate_assignments(text: str, run: str) -> list[tuple[str, Any]]:
    """Parse assignments to (dotted path in the experiment, value). `run`: name of the algorithm. Raises ConfigError."""
    return [found for each in parse_assignments(text) for found in _translate(each, run).items()]


# -- reading ------------------------------------------------------------------------------------------------------------

_OPENING, _CLOSING = "([{", ")]}"


def _top_level(text: str) -> Iterator[tuple[int, str]]:
    """Yield (index, character) outside of quotes and brackets. Raises ConfigError for an unclosed one."""
    quote, open_ = "", list[str]()
    escaped = False
    for at, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\" and quote == '"':
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            open_.append(character)
        elif character in _CLOSING:
            if not open_ or _OPENING.index(open_.pop()) != _CLOSING.index(character):
                raise ConfigError(f"{_OPTION} {_short(text)}: {character!r} closes nothing.")
        elif not open_:
            yield at, character
    if quote or open_:
        raise ConfigError(f"{_OPTION} {_short(text)}: {(quote or open_[-1])!r} is not closed.")


def _split_statements(text: str) -> Iterator[str]:
    begin = 0
    for at, character in _top_level(text):
        if character == ";":
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\s*(?:'\w+'|\"\w+\"|\d+)\s*\])*")


def _parse_assignment(part: str) -> Assignment:
    at = next((at for at, character in _top_level(part) if character == "="), None)
    if at is None:
        raise ConfigError(
            f"{_OPTION} {_short(part.strip())} is not an assignment.", "Write  path.to.key=value; another.key=value"
        )
    path, value = part[:at].strip(), part[at + 1 :].strip()
    if not _PATH.fullmatch(path):
        raise ConfigError(f"{_OPTION}: {_short(path)} is not the name of a key.", "Names have letters, digits, _ and dots.")
    plain = re.sub(r"\[\s*['\"]?(\w+)['\"]?\s*\]", r".\1", path)
    return Assignment(plain.removeprefix("graph_manager."), _parse_value(value, path))


_NUMBER = r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
_LINEAR = re.compile(rf"LinearSchedule\({_NUMBER},{_NUMBER},{_NUMBER}\)")
_CONSTANT = re.compile(rf"ConstantSchedule\({_NUMBER}\)")
_SIZE = re.compile(r"\(\s*MemoryGranularity\.Transitions\s*,\s*(\d[\d_]*)\s*\)")
_SYNCHRONIZATION = re.compile(r"DistributedCoachSynchronizationType\.(SYNC|ASYNC)")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"")


def _parse_value(text: str, path: str) -> Any:
    if not text:
        raise ConfigError(f"{_OPTION} {path}= has no value.")
    if coach_schedule.parse_count(text) is not None:
        return text  # translated together with its key
    if found := _LINEAR.fullmatch(text):
        first, last, steps = (float(number) for number in found.groups())
        return [[0, first], [int(steps), last]]
    if found := _CONSTANT.fullmatch(text):
        return float(found[1])
    if found := _SIZE.fullmatch(text):
        return int(found[1])
    if found := _SYNCHRONIZATION.fullmatch(text):
        return found[1].lower()
    if text == "None":
        return None
    unquoted = _QUOTED.sub("", text)
    if re.search(r"[()`]|__|\blambda\b|\w\s*\.\s*[A-Za-z_]", unquoted):
        raise ConfigError(
            f"{_OPTION} {path}={_short(text)}: values are not evaluated as Python.",
            "They are numbers, words, [lists], {mappings}, EnvironmentSteps(n), EnvironmentEpisodes(n), TrainingSteps(n), "
            "LinearSchedule(from, to, steps) or ConstantSchedule(x); put any other text in quotes: 'my.game:make'.",
        )
    return parse_yaml(text, f"{_OPTION} {path}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")


# -- Coach's names ------------------------------------------------------------------------------------------------------

KeyMeaning = Callable[[Any, str], Mapping[str, Any]]
"""(value, algorithm) → our keys and values. Raises ValueError with the reason why it is not supported."""


def _choice(why: str, *known: tuple[Any, Mapping[str, Any]]) -> KeyMeaning:
    """Translate the known values; `why`: the reason why others are not supported."""

    def meaning(value: Any, _: str) -> Mapping[str, Any]:
        for one, translated in known:
            if type(value) is type(one) and value == one:
                return translated
        raise ValueError(why)

    return meaning


def _only(*same: Any, why: str) -> KeyMeaning:
    """Accept only values that match our behaviour."""
    return _choice(why, *((one, {}) for one in same))


def _number_of_steps(path: str, dqn: str) -> KeyMeaning:
    """Translate a number of environment steps in any of Coach's forms."""

    def meaning(value: Any, run: str) -> Mapping[str, Any]:
        found = coach_schedule.parse_count(value)
        if found is None or found[0] != "timesteps":
            raise ValueError("is counted in steps of the environment here: EnvironmentSteps(…)")
        return {dqn if run == "DQN" else path: found[1]}

    return meaning


def _on_cpu(value: Any, _: str) -> Mapping[str, Any]:
    if value is not True:
        return {}
    return {"learner_device": "cpu", "num_gpus": 0}


def _schedule_key(key: str) -> KeyMeaning:
    return lambda value, _: translate_schedule(key, value) or {}


_VIDEO = "is done afterwards: ludus rollout RUN --video"
_LAYERS = "is written  config.model.fcnet_hiddens: [64, 64]  here"
_SCHEDULE = (*coach_schedule.COACH_SCHEDULE, "improve_steps")
_MAIN = "agent_params.network_wrappers.main"

COACH: Mapping[str, str | KeyMeaning] = {
    # -- the schedule
    **{key: _schedule_key(key) for key in _SCHEDULE},
    **{f"schedule_params.{key}": _schedule_key(key) for key in _SCHEDULE},
    # -- algorithms
    "agent_params.algorithm.discount": "gamma",
    "agent_params.algorithm.gae_lambda": "lambda",
    "agent_params.algorithm.clip_likelihood_ratio_using_epsilon": "clip_param",
    "agent_params.algorithm.beta_entropy": "entropy_coeff",
    "agent_params.algorithm.optimization_epochs": "num_epochs",
    "agent_params.algorithm.initial_kl_coefficient": "kl_coeff",
    "agent_params.algorithm.target_kl_divergence": "kl_target",
    "agent_params.algorithm.num_consecutive_playing_steps": _number_of_steps("train_batch_size", "rollout_fragment_length"),
    "agent_params.algorithm.num_steps_between_copying_online_weights_to_target": _number_of_steps(
        "target_network_update_freq", "target_network_update_freq"
    ),
    "agent_params.algorithm.rate_for_copying_weights_to_target": "tau",
    "agent_params.algorithm.n_step": "n_step",
    "agent_params.algorithm.distributed_coach_synchronization_type": _choice(
        "is DistributedCoachSynchronizationType.SYNC or .ASYNC",
        ("sync", {"sampling": "sync"}),
        ("async", {"sampling": "async"}),
    ),
    "agent_params.algorithm.estimate_state_value_using_gae": _only(True, why="is always on: lambda: 1 gives the plain return"),
    "agent_params.algorithm.normalization_stats": _only(why="is config.observation_filter: MeanStdFilter here"),
    "agent_params.algorithm.heatup_using_network_decisions": _only(
        True, why="is always on: the initial policy plays the warm-up"
    ),
    "agent_params.algorithm.clipping_decay_schedule": _only(1.0, 1, why="is not supported: clip_param is a number"),
    # -- networks
    f"{_MAIN}.learning_rate": "lr",
    f"{_MAIN}.batch_size": lambda value, run: {"train_batch_size" if run == "DQN" else "minibatch_size": value},
    f"{_MAIN}.clip_gradients": "grad_clip",
    f"{_MAIN}.optimizer_epsilon": "adam_epsilon",
    f"{_MAIN}.optimizer_type": _only("Adam", "adam", "ADAM", why="is Adam here: lr, adam_epsilon"),
    f"{_MAIN}.replace_mse_with_huber_loss": _choice(
        "is true or false", (True, {"td_error_loss_fn": "huber"}), (False, {"td_error_loss_fn": "mse"})
    ),
    f"{_MAIN}.l2_regularization": _only(0, 0.0, why="is not supported"),
    f"{_MAIN}.force_cpu": _on_cpu,
    f"{_MAIN}.middleware_parameters.activation_function": "model.fcnet_activation",
    f"{_MAIN}.input_embedders_parameters.observation.activation_function": "model.fcnet_activation",
    f"{_MAIN}.middleware_parameters.scheme": _only(why=_LAYERS),
    f"{_MAIN}.input_embedders_parameters.observation.scheme": _only(why=_LAYERS),
    f"{_MAIN}.adam_optimizer_beta1": _only(0.9, why="is 0.9 here"),
    f"{_MAIN}.adam_optimizer_beta2": _only(0.999, why="is 0.999 here"),
    # -- replay and exploration
    "agent_params.memory.max_size": "replay_buffer_config.capacity",
    "agent_params.memory.alpha": "replay_buffer_config.alpha",
    "agent_params.memory.beta": "replay_buffer_config.beta",
    "agent_params.memory.epsilon": "replay_buffer_config.eps",
    "agent_params.exploration.epsilon_schedule": "epsilon",
    "agent_params.exploration.evaluation_epsilon": _only(0, 0.0, why="is 0 here; or config.evaluation_config.explore: true"),
    # -- environments
    "env_params.level": "env",
    "env_params.seed": "seed",
    "env_params.frame_skip": "preprocess.frame_skip",
    "env_params.random_initialization_steps": "preprocess.noop_max",
    "env_params.additional_simulator_parameters": "env_config",
    "env_params.custom_reward_threshold": "stop.episode_return_mean",
    "env_params.target_success_rate": _only(why="is a return here: stop.episode_return_mean, or -asc"),
    # -- the rest
    "task_parameters.seed": "seed",
    "task_parameters.use_cpu": _on_cpu,
    "task_parameters.checkpoint_save_secs": "checkpoint_time_s",
    "task_parameters.checkpoint_restore_path": _only(why="is the option -crd here"),
    "visualization_parameters.tensorboard": lambda value, _: {},
    "visualization_parameters.dump_csv": "track.csv",
    "visualization_parameters.render": _only(False, why=_VIDEO),
    "visualization_parameters.dump_gifs": _only(False, why=_VIDEO),
    "visualization_parameters.dump_mp4": _only(False, why=_VIDEO),
    "visualization_parameters.print_summary": _only(False, why="is in config.yaml of the run"),
    "preset_validation_params.min_reward_threshold": "target.return_mean",
    "preset_validation_params.test": lambda value, _: {},
}
"""Path in Coach → our key with the same value, or a function that translates the value."""

_ROOTS = {path.partition(".")[0] for path in COACH}


def _translate(given: Assignment, run: str) -> Mapping[str, Any]:
    path = re.sub(r"^visualization(?=\.)", "visualization_parameters", given.path.removeprefix("agent_params."))
    path = path if path in COACH or path.startswith("visualization_parameters.") else given.path
    if path in COACH:
        meaning = COACH[path]
        if isinstance(meaning, str):
            return {meaning: given.value}
        try:
            return meaning(given.value, run)
        except ValueError as error:
            raise ConfigError(f"{_OPTION} {given.path} ({given.value!r}) {error}.") from error
    if given.path.partition(".")[0] in _ROOTS - set(_SCHEDULE):
        raise ConfigError(f"{_OPTION}: Coach's key {given.path!r} has no equivalent.", _nearest(given.path))
    keys, first, *rest = _all_keys(), *given.path.split(".")
    if first not in keys or (first == "config" and rest and rest[0] not in keys):  # deeper keys are checked with the experiment
        raise ConfigError(f"{_OPTION}: there is no key {given.path!r}.", _nearest(given.path))
    count = coach_schedule.parse_count(given.value)
    if count is not None and not isinstance(given.value, int):
        raise ConfigError(f"{_OPTION} {given.path}={given.value}: it is a number.", f"Write  {given.path}={count[1]}")
    return {given.path: given.value}


def _all_keys() -> set[str]:
    """Return all keys of experiments and algorithms in all spellings, without the prefix `config`."""
    from ludus.algorithms.base import config_schemas

    found = {name for schema in config_schemas().values() for name in key_names(schema)} - {"lambda_"}
    for section in (rllib_keys.EXPERIMENT, rllib_keys.CONFIG):
        found |= {*rllib_keys.RENAMED[section], *rllib_keys.TRANSLATED[section], *unsupported_keys()[section]}
    return found | {"lambda", *key_names(ExperimentConfig)}


def _nearest(path: str) -> str:
    last = path.rpartition(".")[2]
    tails = {known.rpartition(".")[2]: known for known in COACH}
    if last in tails:
        return f"Did you mean {tails[last]!r}?"
    near = did_you_mean(path, COACH) if "." in path else did_you_mean(last, _all_keys())
    return near if near.startswith("Did") else did_you_mean(last, [*_all_keys(), *tails])
