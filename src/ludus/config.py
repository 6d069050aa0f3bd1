"""The one config schema: `<name>: {env, run, stop, …, config: {…}}`, from YAML, keywords or the command line.

Every key is known here (or in the algorithm's own `Config`, which extends `AlgorithmConfig`); an unknown key is an error with
the nearest known one, before any process starts. Nothing else in the package parses configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ludus.errors import ConfigError
from ludus.plugins import did_you_mean


def _rising(points: Any) -> Any:
    if isinstance(points, list):
        times = [time for time, _ in points]
        if not points or times != sorted(set(times)):
            raise ValueError("the points of a schedule are [timestep, value] pairs with rising timesteps")
    if not all(0 <= value < math.inf for value in ([v for _, v in points] if isinstance(points, list) else [points])):
        raise ValueError("a scheduled value is a finite number from 0 upwards")
    return points


Schedule = Annotated[float | list[tuple[int, float]], AfterValidator(_rising)]
"""A number, or [[timestep, value], …] joined by straight lines."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())


S = TypeVar("S", bound=_Strict)
_Size = Annotated[int, Field(ge=1)]


class ModelConfig(_Strict):
    """The `model:` section: sizes and kinds of the default networks."""

    fcnet_hiddens: list[_Size] | None = Field(None, description="Dense layers; null = 64, 64 (512 behind convolutions).")
    fcnet_activation: Literal["tanh", "relu", "elu", "silu", "swish", "gelu", "linear"] = Field(
        "tanh", description="tanh, relu, elu, silu, gelu or linear."
    )
    conv: Literal["nature", "resnet"] = Field("nature", description="Convolutions for images: Nature CNN or a small ResNet.")
    conv_filters: list[tuple[_Size, _Size, _Size]] | None = Field(
        None, description="Own convolutions: [[channels, kernel, stride], …]."
    )
    entity_dim: int = Field(64, ge=1, description="Width of the encoder for lists of entities.")
    vf_share_layers: bool | None = Field(
        None, description="One trunk for policy and value; null = for images and recurrence only."
    )
    core: Literal["lstm", "gru"] | None = Field(None, description="A recurrent layer.")
    use_lstm: bool = Field(False, description="The same as core: lstm.")
    cell_size: int = Field(128, ge=1, alias="lstm_cell_size", description="Units of the recurrent layer.")
    max_seq_len: int = Field(16, ge=1, description="Steps through which a recurrent layer is differentiated.")
    free_log_std: bool = Field(True, description="One learned deviation per continuous action, the same in every state.")
    custom_model: str | None = Field(
        None, description="A network of your own: the name of its file in model/ (class CustomModel), or module:Class."
    )
    custom_model_config: dict[str, Any] = Field(default_factory=dict, description="Further keywords of its constructor.")

    @model_validator(mode="after")
    def _recurrence_is_shared(self) -> ModelConfig:
        if self.vf_share_layers is False and (self.core or self.use_lstm):
            raise ValueError("a recurrent model shares its layers; leave out vf_share_layers: false")
        return self


_ELSEWHERE = {
    **dict.fromkeys(
        ("normalize", "normalise", "normalize_observation", "observation_filter", "mean_std"),
        "running mean and deviation of observations are config.observation_filter: MeanStdFilter",
    ),
    **dict.fromkeys(("normalize_reward", "normalise_reward"), "it is config.normalize_reward"),
    **dict.fromkeys(("float32", "dtype"), "observations of floating-point numbers always become float32"),
    **dict.fromkeys(
        ("repeat_action_probability", "full_action_space", "fire_reset"), "it is a keyword of the game: config.env_config"
    ),
}


class PreprocessConfig(_Strict):
    """The `preprocess:` section: what happens to an environment before anybody sees it; null = nothing, or what is usual for
    Atari and ViZDoom. Evaluations do not clip rewards, and play whole games."""

    standard: bool | None = Field(
        None,
        description="What is usual for the family, which the other keys change. Atari: 84×84, grey, 4 stacked, every 4th frame, up "
        "to 30 no-ops, rewards clipped; ViZDoom: 72×128, every 4th frame. null = where there is such; false = as it comes.",
    )
    frame_skip: int | None = Field(None, ge=1, description="Repeat every action so often; their rewards are summed.")
    grey: bool | None = Field(None, alias="grayscale", description="Pictures without colour.")
    resize: tuple[_Size, _Size] | None = Field(None, description="Height and width of pictures.")
    stack: _Size | None = Field(None, alias="framestack", description="Show so many of the last observations together.")
    clip_reward: Literal["sign"] | bool | tuple[float, float] | None = Field(
        None, alias="clip_rewards", description="sign (or true): −1, 0 or 1; or [lowest, highest]; false = not."
    )
    episodic_life: bool | None = Field(
        None, alias="terminal_on_life_loss", description="A lost life ends an episode; the game goes on with the next one."
    )
    noop_max: int | None = Field(None, ge=0, description="Begin with up to so many actions that do nothing.")
    max_episode_steps: int | None = Field(None, ge=1, alias="horizon", description="Truncate episodes after so many steps.")
    scale: bool | None = Field(None, description="Bring numbers with bounds into 0 … 1; networks do that to uint8 by themselves.")
    flatten: bool | None = Field(None, description="All parts of an observation in one vector.")

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key in _ELSEWHERE:
                raise ValueError(f"{key} does not belong here; {_ELSEWHERE[key]}")
        return data

    @model_validator(mode="after")
    def _bounds_rise(self) -> PreprocessConfig:
        if isinstance(self.clip_reward, tuple) and not self.clip_reward[0] < self.clip_reward[1]:
            raise ValueError(f"clip_reward is {list(self.clip_reward)}; the lowest comes first")
        return self


class MultiAgentConfig(_Strict):
    """The `multiagent:` section: who plays which agent."""

    policies: list[str] | dict[str, dict[str, Any]] | None = Field(
        None, description="Names of the models, or name → keys of `config:` in which it differs; null = one for all."
    )
    policy_mapping: dict[str, str] | str | None = Field(
        None, alias="policy_mapping_fn", description="agent (or pattern like red_*) → model; or module:function(agent) → model."
    )
    policies_to_train: list[str] | None = Field(None, description="The others play and do not learn; null = all learn.")
    centralized_value: bool = Field(False, description="The value sees what all agents see; the policy does not (MAPPO).")


class EvaluationConfig(_Strict):
    """The `evaluation_config:` section: how evaluations differ from training."""

    explore: bool = Field(False, description="Draw actions as in training; false = the most probable one.")
    env_config: dict[str, Any] | None = Field(None, description="Other keywords of the environment; null = as in training.")


class AlgorithmConfig(_Strict):
    """The keys of `config:` that every algorithm has."""

    learns: ClassVar[str] = "probabilities"
    """The kind of policy: probabilities of the actions, or their values."""
    replays: ClassVar[bool] = False
    """Learns from a store of earlier steps: `train_batch_size` is drawn from it, whatever was sampled last."""

    seed: int = Field(0, ge=0, lt=1 << 30, description="Of everything random: weights, exploration, environments.")
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0, description="Processes that sample; 0 = this one; auto = measure the environment for a moment and choose."
    )
    sampling: Literal["sync", "pipelined", "async"] = Field(
        "sync",
        description="sync: sample, learn, sample …; pipelined: sample the next batch while learning, one version behind; "
        "async: samplers never wait.",
    )
    blocks_ahead: int = Field(2, ge=1, description="Segments that a worker may have waiting for the learner.")
    max_lag: int | None = Field(
        None, ge=1, description="Experience that is more updates old than this is dropped, and counted; null = as it comes."
    )
    num_learners: int = Field(1, ge=0, description="Processes that share the gradient of every minibatch; 0 is 1.")
    gradient_accumulation: int = Field(1, ge=1, description="Compute the gradient of a minibatch in so many pieces.")
    mixed_precision: Literal["bf16", "fp16"] | None = Field(None, description="Learn in half precision where it is safe.")
    learner_device: str = Field("auto", description="auto (an accelerator if num_gpus says so), cpu, cuda or cuda:1.")
    inference_device: str = Field("cpu", description="Where workers compute their decisions: cpu, cuda or cuda:1.")
    num_gpus: float = Field(0, ge=0, description="Accelerators for the learner.")
    restart_failed_sub_environments: bool = Field(
        False, description="An environment that raises is made anew; its episode is cut there and not scored."
    )
    max_worker_restarts: int | None = Field(1000, ge=0, description="Replacements of one worker, in all; null = no limit.")
    worker_restart_backoff_s: float = Field(0.05, ge=0, description="Wait before the first replacement; doubles up to 5 s.")
    worker_hang_s: float = Field(60.0, gt=0, description="A worker whose environment takes longer for a step is replaced.")
    num_envs_per_worker: int = Field(64, ge=1, description="Environments stepped together.")
    rollout_fragment_length: int | None = Field(
        None, ge=1, description="Steps of a segment; null = train_batch_size / environments."
    )
    train_batch_size: int = Field(4096, ge=1, description="Environment steps per update.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    explore: bool = Field(True, description="Draw actions from the policy; false = always the most probable one.")
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = Field(
        "truncate_episodes", description="Learn from pieces of episodes, or only from whole ones."
    )
    preprocess: PreprocessConfig = Field(default_factory=PreprocessConfig, description="Frame skip, greyscale, stacking …")
    wrappers: list[str | dict[str, Any]] = Field(
        default_factory=list, description="module:Wrapper, or {module:Wrapper: {keywords}}, from the inside to the outside."
    )
    multiagent: MultiAgentConfig | None = Field(None, description="Several agents in one environment.")
    observation_filter: Literal["NoFilter", "MeanStdFilter"] = Field(
        "NoFilter", description="MeanStdFilter keeps running mean and deviation."
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="Keywords for the environment's constructor.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The network.")
    evaluation_interval: int = Field(0, ge=0, description="Evaluate every so many iterations; 0 = with each checkpoint.")
    evaluation_duration: int = Field(10, ge=0, description="Episodes of an evaluation; 0 = never evaluate.")
    evaluation_num_workers: int = Field(0, ge=0, description="Processes that evaluate while training goes on; 0 = inline.")
    evaluation_config: EvaluationConfig = Field(default_factory=EvaluationConfig, description="How evaluations differ.")
    metrics_num_episodes_for_smoothing: int = Field(100, ge=1, description="Episodes behind episode_return_mean.")
    min_time_s_per_iteration: float = Field(0.0, ge=0, description="Report at most once in so many seconds.")
    learner_threads: int = Field(
        0, ge=0, description="Threads that share the gradient of a minibatch; 0 = 1 for vectors, all cores for images."
    )
    torch_threads: int = Field(
        0, ge=0, description="Threads of PyTorch in this process; 0 = 1 for vectors, all cores for images."
    )

    @property
    def steps(self) -> int:
        """Length of a segment."""
        return self.rollout_fragment_length or max(1, self.train_batch_size // self.num_envs_per_worker)

    @property
    def workers(self) -> int:
        """Processes that sample, once `auto` has been replaced by a number."""
        assert self.num_workers != "auto"
        return self.num_workers

    @property
    def learners(self) -> int:
        return max(1, self.num_learners)


EXTERNAL = "external"
"""The environment of an experiment whose games call us."""


class SeatConfig(_Strict):
    """One seat of a game that calls us. Spaces are written as `GET /spec` shows them."""

    observation_space: dict[str, Any] = Field(description="What this seat sees: {type: Box, shape: [4]} …")
    action_space: dict[str, Any] = Field(description="What it may do: {type: Discrete, n: 2} …")
    model: Annotated[str, AfterValidator(lambda name: _model_name(name))] = Field(
        "model", description="Which model plays it; seats of one model have the same spaces."
    )


class ExternalConfig(_Strict):
    """The `env_config:` of `env: external`: where games find us, and what they send."""

    host: str = Field("127.0.0.1", description="Address to listen on; beyond this machine only with a token.")
    port: int = Field(8000, ge=0, le=65535, description="0 = any free one.")
    token_file: str | None = Field(None, description="A file with the token that games must send.")
    observation_space: dict[str, Any] | None = Field(None, description="Of a game with one seat.")
    action_space: dict[str, Any] | None = Field(None, description="Of a game with one seat.")
    seats: dict[str, SeatConfig] | None = Field(None, description="Of a game with several: name → spaces and model.")
    max_sessions: int = Field(20_000, ge=1, description="Open at the same time, in one worker.")
    max_body_bytes: int = Field(8 << 20, ge=1, description="Of one request.")
    tick_timeout_s: float = Field(30.0, gt=0, description="Longest time that an answer may take.")
    silent_s: float = Field(60.0, gt=0, description="A session without a request for so long is truncated.")

    @model_validator(mode="after")
    def _one_or_several(self) -> ExternalConfig:
        lone = self.observation_space is not None and self.action_space is not None
        if bool(self.seats) == lone or (self.seats and (self.observation_space or self.action_space)):
            raise ValueError("give observation_space and action_space, or seats with their own")
        return self

    def all_seats(self) -> dict[str, SeatConfig]:
        """Name → seat; the seat of a game that has one is called ''."""
        if self.seats:
            return dict(self.seats)
        return {"": SeatConfig(observation_space=self.observation_space or {}, action_space=self.action_space or {})}


class StopConfig(_Strict):
    """Whichever comes first ends the run."""

    timesteps: int | None = Field(None, ge=1, alias="timesteps_total", description="Environment steps.")
    episode_return_mean: float | None = Field(None, alias="episode_reward_mean", description="Mean return of recent episodes.")
    iterations: int | None = Field(None, ge=1, alias="training_iteration", description="Updates.")
    time_s: float | None = Field(None, gt=0, alias="time_total_s", description="Seconds of training.")


class TargetConfig(_Strict):
    """The `target:` section: what an experiment is known to reach, and within what."""

    return_mean: float = Field(description="Mean return of its episodes.")
    timesteps: int = Field(ge=1, description="Environment steps within which it is reached.")


class TuneConfig(_Strict):
    """The `tune:` section: how a sweep is run."""

    metric: str = Field("episode_return_mean", description="What is compared.")
    mode: Literal["max", "min"] = Field("max", description="Whether more of it is better.")
    scheduler: Literal["asha", "pbt"] | None = Field(None, description="Who stops or changes trials; null = nobody.")


def _switch(value: Any) -> Any:
    """A section may be switched on and off as a whole: true is all of its defaults."""
    return ({} if value else None) if isinstance(value, bool) else value


def _without_password(uri: str | None) -> str | None:
    if uri is not None and re.search(r"//[^/@]*:[^/@]*@", uri):  # raised as it is: pydantic's complaint would show the value
        raise ConfigError(
            "track.mlflow.tracking_uri holds a password, and configs are saved with their runs.",
            "Give it as MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment.",
        )
    return uri


class WandbConfig(_Strict):
    """The `track.wandb:` section. The key is never written here: `wandb login`, or WANDB_API_KEY in the environment."""

    project: str = Field("ludus", min_length=1, description="Project in Weights & Biases.")
    entity: str | None = Field(None, description="User or team; null = that of the key.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes files for `wandb sync`; null = WANDB_MODE, else online with a key and offline without."
    )
    group: str | None = Field(None, description="Runs that belong together; null = the name of the experiment.")
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")


class MlflowConfig(_Strict):
    """The `track.mlflow:` section."""

    tracking_uri: Annotated[str | None, AfterValidator(_without_password)] = Field(
        None, description="Where the server is; null = MLFLOW_TRACKING_URI, else mlflow.db beside the runs of the experiment."
    )
    experiment: str | None = Field(None, description="Experiment in MLflow; null = the name of the experiment.")
    tags: dict[str, str] = Field(default_factory=dict, description="Further tags of the run.")


class TrackConfig(_Strict):
    """The `track:` section: where numbers go besides metrics.jsonl."""

    tensorboard: Literal[True] = Field(True, description="Always: `tensorboard --logdir runs`.")
    csv: bool = Field(False, description="Also write metrics.csv.")
    wandb: Annotated[WandbConfig | None, BeforeValidator(_switch)] = Field(
        None, description="Weights & Biases: true, or its settings."
    )
    mlflow: Annotated[MlflowConfig | None, BeforeValidator(_switch)] = Field(None, description="MLflow: true, or its settings.")


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ValueError("an experiment's name is made of letters, digits and _ . + -")
    return name


def _model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w+-]*", name) or name == "sampler":  # beside which its files lie in a checkpoint
        raise ValueError("a model's name is made of letters, digits and _ + -, and is not 'sampler'")
    return name


class ExperimentConfig(_Strict):
    """One experiment. `config` is checked against the schema of the algorithm named by `run`."""

    name: Annotated[str, AfterValidator(_plain_name)] = Field("default", description="Names the directory of its runs.")
    env: str = Field(description="A Gymnasium id, module:function that makes an environment, or external: games call us.")
    run: str = Field("PPO", description="The algorithm, or module:Class.")
    description: str = Field("", description="What it is, in a sentence, for people.")
    stop: StopConfig = Field(default_factory=StopConfig, description="Whichever comes first ends the run.")
    target: TargetConfig | None = Field(None, description="What it is known to reach; the presets are held to theirs.")
    checkpoint_freq: int = Field(0, ge=0, description="Checkpoint every so many iterations; 0 = only at the end.")
    checkpoint_time_s: float = Field(300.0, ge=0, description="Also checkpoint every so many seconds; 0 = not by time.")
    checkpoint_at_end: bool = Field(True, description="Checkpoint when the run ends.")
    max_failures: int = Field(
        5, ge=0, description="A learner that dies goes on from its newest checkpoint, so often without progress in between."
    )
    keep_checkpoints_num: int | None = Field(None, ge=1, description="Keep so many newest ones besides the best; null = all.")
    num_samples: int = Field(1, ge=1, description="Trials of the experiment, each with a seed of its own.")
    tune: TuneConfig = Field(default_factory=TuneConfig, description="How a sweep is run.")
    track: TrackConfig = Field(default_factory=TrackConfig, description="Where numbers go.")
    config: Annotated[dict[str, Any], BeforeValidator(lambda v: {} if v is None else v)] = Field(
        default_factory=dict, description="Keys of the algorithm."
    )


SEARCHES = ("grid_search", "choice", "uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint", "randn")
"""Words that, as the only key of a mapping, make a value one that a sweep chooses."""


def is_search(value: Any) -> bool:
    """Whether a value of a config is one that a sweep chooses: `{grid_search: […]}`, `{uniform: [a, b]}` …"""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in SEARCHES


ASYNC_STEPS = 32
"""Steps of a segment when nothing is said and workers sample without waiting: short ones are fresh."""

REPLAYED_STEPS = 4
"""Steps of a segment when nothing is said and the algorithm learns from a store of earlier steps."""

COLLATED_STEPS = 64
"""Steps of a segment when nothing is said and batches are collated."""

ALIASES: Mapping[str, str] = {
    "num_envs": "num_envs_per_worker",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "num_env_runners": "num_workers",
    "sgd_minibatch_size": "minibatch_size",
    "num_sgd_iter": "num_epochs",
    "lr_schedule": "lr",
    "entropy_coeff_schedule": "entropy_coeff",
    "evaluation_num_episodes": "evaluation_duration",
    "evaluation_num_env_runners": "evaluation_num_workers",
    "target_update_frequency": "target_network_update_freq",
}
"""Other spellings of keys in `config:`; they mean what they meant."""


def experiment(data: Mapping[str, Any]) -> ExperimentConfig:
    """Check one experiment's mapping (without its algorithm's keys). Raises ConfigError."""
    return _validated(ExperimentConfig, data, "")


def algorithm_config(schema: type[AlgorithmConfig], data: Mapping[str, Any], *, collated: bool = False) -> AlgorithmConfig:
    """Check `config:` against an algorithm's schema, older spellings included. Raises ConfigError.

    `collated`: segments of any number make up a batch, as with games that call us; else one of every environment.
    """
    checked = _validated(schema, canonical(data), "config")
    if collated:
        return checked.model_copy(update={"rollout_fragment_length": checked.rollout_fragment_length or COLLATED_STEPS})
    steps, batch = _segment_steps(checked)
    return checked.model_copy(update={"rollout_fragment_length": steps, "train_batch_size": batch})


def _segment_steps(config: AlgorithmConfig) -> tuple[int, int]:
    """(steps of a segment, steps of a batch): a batch is a whole number of segments of all environments, or the config is wrong.

    Where sampling and learning take turns, an update learns from one segment of every environment of every worker.
    """
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    if config.replays:  # a batch is drawn from what is stored: it has nothing to do with what a segment brings
        return steps or REPLAYED_STEPS, batch
    workers = 1 if config.num_workers == "auto" else max(1, config.num_workers)
    if config.batch_mode == "complete_episodes":  # a batch is what whole episodes add up to
        return steps or max(1, round(batch / (envs * workers))), batch
    turns = config.sampling != "async" or not config.num_workers
    given = "train_batch_size" in config.model_fields_set
    if not turns:
        steps = steps or (batch // envs if given and batch % envs == 0 and batch // envs < ASYNC_STEPS else ASYNC_STEPS)
        if not given:
            return steps, max(1, round(batch / (envs * steps))) * envs * steps
        if batch % (envs * steps) == 0:
            return steps, batch
        near = max(1, round(batch / (envs * steps))) * envs * steps
        raise ConfigError(
            f"config.train_batch_size is {batch}, which is not a multiple of {envs} environments × {steps} steps.",
            f"Set train_batch_size to {near}, or rollout_fragment_length to something that fits.",
        )
    rows = envs * workers
    if not given:
        steps = steps or max(1, round(batch / rows))
        return steps, steps * rows
    if steps is None and batch % rows == 0:
        return batch // rows, batch
    if steps is not None and steps * rows == batch:
        return steps, batch
    shown = f"{workers} workers × " * (workers > 1) + f"{envs} environments"
    shown += f" × {steps} steps (rollout_fragment_length)" if steps else ""
    near = max(1, round(batch / rows)) * rows if steps is None else steps * rows
    raise ConfigError(
        f"config.train_batch_size is {batch}, which is not a multiple of {shown}."
        if steps is None
        else f"config.train_batch_size is {batch}, but {shown} are {near}.",
        f"Set train_batch_size to {near}, or leave one of them out.",
    )


def external_config(data: Mapping[str, Any]) -> ExternalConfig:
    return _validated(ExternalConfig, data, "config.env_config")


def canonical(data: Mapping[str, Any]) -> dict[str, Any]:
    """`config:` with every key in its present spelling. Raises ConfigError for one that is there twice."""
    return _canonical(data, ALIASES, "config")


def _canonical(data: Mapping[str, Any], aliases: Mapping[str, str], where: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    schedules = {aliases[key] for key in data if key.endswith("_schedule") and key in aliases and data[key] is not None}
    for key, value in data.items():
        name = aliases.get(key, key)
        if key.endswith("_schedule") and name != key and value is None:
            continue
        if name == key and name in schedules:
            continue  # a schedule overrides the constant beside it, as it did in RLlib
        if name in out and out[name] != value:
            raise ConfigError(f"{where} sets {name!r} twice, as {out[name]!r} and (as {key!r}) as {value!r}.", "Keep one.")
        out[name] = value
    return out


def _validated(schema: type[S], data: Mapping[str, Any], where: str) -> S:
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(schema, error, where))) from error


_TYPE_NAME = re.compile(r"^(float|int|bool|str|none|(list|tuple|dict|function|constrained|literal)\b.*)$")
"""What pydantic appends to a path to say which branch of a union it tried."""


def _complaints(schema: type[_Strict], error: ValidationError, where: str) -> list[str]:
    lines: dict[str, str] = {}
    for item in error.errors():
        path = [str(p) for p in item["loc"] if not _TYPE_NAME.match(str(p))]
        shown = ".".join([where, *path] if where else path)
        if item["type"] == "extra_forbidden":
            owner = _schema_at(schema, path[:-1])
            if path[-1] in owner.model_fields:
                other = owner.model_fields[path[-1]].alias
                lines[shown] = f"{shown!r} stands beside {other!r}, which means the same. Keep one."
                continue
            lines[shown] = f"Unknown key {shown!r}. {did_you_mean(path[-1], known_keys(owner))}".strip()
        elif item["type"] == "missing":
            lines[shown] = f"{shown!r} is missing."
        else:
            found = item["input"]
            lines.setdefault(shown, f"{shown} is {found!r}: {item['msg'].removeprefix('Value error, ')}.")
    return list(lines.values())


def _schema_at(schema: type[_Strict], path: list[str]) -> type[_Strict]:
    for name in path:
        for field_name, field in schema.model_fields.items():
            if name in (field_name, field.alias):
                schema = _section(field.annotation) or schema
    return schema


def _section(annotation: Any) -> type[_Strict] | None:
    """The schema in an annotation, which may be inside `dict[str, …] | None`."""
    if get_origin(annotation) is None:
        return annotation if isinstance(annotation, type) and issubclass(annotation, _Strict) else None
    return next((found for part in get_args(annotation) if (found := _section(part)) is not None), None)


def known_keys(schema: type[_Strict]) -> list[str]:
    names = [field.alias or name for name, field in schema.model_fields.items()]
    own = {name for name, field in schema.model_fields.items() if not name.endswith("_")}
    aliases = [key for key, name in ALIASES.items() if name in own] if issubclass(schema, AlgorithmConfig) else []
    return sorted({*names, *own, *aliases})


# -- YAML and the command line ------------------------------------------------------------------------------------------

_MAX_YAML_BYTES = 1 << 20
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and aliases (a bomb needs them), and reads 3e-4 as a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ConfigError(f"line {line}: YAML aliases (*name) are not read.", "Write it out.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not a word.")
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice.", "Keep one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets the last four out for a date that is none, !!bool maybe, !!timestamp soon, and [[[[…
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}, {error.message}", error.hint) from error


def load_experiments(path: Path) -> dict[str, dict[str, Any]]:
    """The experiments of a YAML file, by name, unchecked. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text.") from error
    if len(text) > _MAX_YAML_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_YAML_BYTES} bytes; that is no experiment.")
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not all(isinstance(value, dict) for value in data.values()) or not data:
        raise ConfigError(f"{path} does not hold an experiment.", "The layout is  <name>: {env: …, run: …, stop: …, config: …}")
    return data


def override(data: dict[str, Any], assignment: str) -> None:
    """Apply `path.to.key=VALUE` in place. A path that names no experiment key is meant inside `config`."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {assignment!r} is not of the form path.to.key=VALUE.")
    if keys[0] not in ExperimentConfig.model_fields:
        keys.insert(0, "config")
    for key in keys[:-1]:
        if data.get(key) is None:  # absent, or a section left empty in the YAML
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise ConfigError(f"--set {assignment!r}: {key!r} is not a section.")
    if len(keys) == 2 and keys[0] == "config":  # another spelling of the same key gives way
        name = ALIASES.get(keys[1], keys[1])
        for other in [key for key in data if ALIASES.get(key, key) == name]:
            del data[other]
    data[keys[-1]] = parse_yaml(text, f"--set {path}")


def stop_values(pairs: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` of --stop. Numbers only."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        value = parse_yaml(text, f"--stop {key}")
        if not equals or isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
            raise ConfigError(f"--stop {pair!r} is not of the form KEY=NUMBER.")
        out[key.strip()] = value
    return out


def dump_yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
