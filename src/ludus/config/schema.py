"""The one config schema: `<name>: {env, run, stop, …, config: {…}}`, from YAML, keywords or the command line.

Every key is known here (or in the algorithm's own `Config`, which extends `AlgorithmConfig`); an unknown key is an error with
the nearest known one, before any process starts. Nothing else in the package parses configuration.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ludus.config.aliases import rllib_keys, rllib_values
from ludus.config.aliases.rllib_keys import SEARCHES as SEARCHES
from ludus.config.aliases.rllib_keys import Reading, Refusal
from ludus.config.aliases.rllib_keys import has_search as has_search
from ludus.config.aliases.rllib_keys import is_search as is_search
from ludus.config.aliases.sb3_cleanrl import TOTALS
from ludus.config.batch_shape import REPLAYED_STEPS as REPLAYED_STEPS
from ludus.config.batch_shape import shape_of_batch
from ludus.config.problem import Complaint, ConfigErrors
from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError
from ludus.io.yaml_documents import dump_yaml as dump_yaml
from ludus.io.yaml_documents import key_lines
from ludus.io.yaml_documents import parse_yaml as parse_yaml


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


def _name_of_class(value: Any) -> Any:
    """A class given in Python is written down by its name, which is how other processes find it."""
    if not isinstance(value, type):
        return value
    if "<" in value.__qualname__ or "." in value.__qualname__:
        raise ValueError(
            "a class inside another or inside a function cannot be found by name; move it to the top level of a file"
        )
    return f"{value.__module__}:{value.__qualname__}"


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """What can be written down, as it reads afterwards: tuples are lists."""
    try:
        return dict(json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it cannot be written down ({error}); use numbers, words, booleans, lists and dicts") from error


class BranchConfig(_Strict):
    """One entry of `model.autoregressive`: a part of an action that is chosen after its first part, and only where it matters."""

    part: int = Field(ge=1, description="Index of a part of a MultiDiscrete action; part 0 is chosen first.")
    after: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=1, description="Options of the first part for which this part is chosen; each option has its own output."
    )
    points_at: str | None = Field(
        None, description="Entity list of the observation from which the part chooses one entry (a pointer)."
    )
    mask: str | None = Field(
        None, description="With points_at: key of the observation with the mask of valid entries, one row per option of `after`."
    )

    @model_validator(mode="after")
    def _masks_are_of_entities(self) -> BranchConfig:
        if self.mask is not None and self.points_at is None:
            raise ValueError("mask is for a part that points at entities; other parts are masked by action_mask")
        return self


class ModelConfig(_Strict):
    """The `model:` section: sizes and kinds of the default networks."""

    fcnet_hiddens: list[_Size] | None = Field(None, description="Dense layers; null = 64, 64 (512 after convolutions).")
    fcnet_activation: Literal["tanh", "relu", "elu", "silu", "swish", "gelu", "linear"] = Field(
        "tanh", description="tanh, relu, elu, silu, gelu or linear."
    )
    conv: Literal["nature", "resnet"] = Field("nature", description="Convolutions for images: Nature CNN or a small ResNet.")
    conv_filters: list[tuple[_Size, _Size, _Size]] | None = Field(
        None, description="Custom convolutions: [[channels, kernel, stride], …]."
    )
    entity_dim: int = Field(64, ge=1, description="Width of the encoder for lists of entities.")
    entity_present: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="For entity lists without a <name>_mask: {name: index of the feature that is above 0 for present entities}.",
    )
    autoregressive: list[BranchConfig] = Field(
        default_factory=list,
        description="Autoregressive parts of a MultiDiscrete action: chosen after the first part and used only for some of its options: [{part, after, points_at, mask}, …].",
    )
    centralized_value: bool = Field(
        False,
        description="The observation is {observation, state}; the policy sees only the first part, the value function both (MAPPO).",
    )
    vf_share_layers: bool | None = Field(
        None,
        description="Share layers between policy and value; null = only for images and recurrent models, never with a centralised value.",
    )
    core: Literal["lstm", "gru"] | None = Field(None, description="Recurrent layer: lstm, gru or null.")
    use_lstm: bool = Field(False, description="Alias of core: lstm.")
    cell_size: int = Field(128, ge=1, description="Units of the recurrent layer.")
    max_seq_len: int = Field(16, ge=1, description="Sequence length for backpropagation through time.")
    free_log_std: bool = Field(True, description="Learn one standard deviation per continuous action, independent of the state.")
    log_std_init: float = Field(
        0.0, ge=-10, le=2, description="Initial log of that standard deviation; −1 explores less than half as widely as 0."
    )
    custom_model: Annotated[str | None, BeforeValidator(_name_of_class)] = Field(
        None, description="Custom network: the name of its file in model/ (class CustomModel), or module:Class."
    )
    custom_model_config: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Keyword arguments of its constructor."
    )

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


class SelfPlayConfig(_Strict):
    """The `self_play:` section: which of its earlier versions a policy meets, where the environment has opponents from the `past`."""

    every: int = Field(20, ge=1, description="Snapshot the policy as an opponent every N versions.")
    keep: int = Field(50, ge=1, description="Number of newest snapshots to keep; all are equally likely opponents.")
    period: int = Field(2_000, ge=1, description="Environment steps after which a worker draws another snapshot.")


class PreprocessConfig(_Strict):
    """The `preprocess:` section: what happens to an environment before anybody sees it; null = nothing, or what is usual for
    Atari and ViZDoom. Evaluations do not clip rewards, and play whole games."""

    standard: bool | None = Field(
        None,
        description="Use the standard preprocessing of the environment family, which other keys override. Atari: 84×84, grey, 4 stacked, every 4th frame, up to 30 no-ops, clipped rewards; ViZDoom: 72×128, every 4th frame. null = if there is one; false = none.",
    )
    frame_skip: int | None = Field(None, ge=1, description="Number of times to repeat each action; rewards are summed.")
    grey: bool | None = Field(None, alias="grayscale", description="Convert images to greyscale.")
    resize: tuple[_Size, _Size] | None = Field(None, description="Image size: [height, width].")
    stack: _Size | None = Field(None, alias="framestack", description="Number of last observations to stack.")
    clip_reward: Literal["sign"] | bool | tuple[float, float] | None = Field(
        None, alias="clip_rewards", description="Clip rewards: sign (or true) = −1, 0 or 1; [lowest, highest]; false = no."
    )
    episodic_life: bool | None = Field(
        None,
        alias="terminal_on_life_loss",
        description="End an episode when a life is lost; the game continues with the next life.",
    )
    noop_max: int | None = Field(None, ge=0, description="Maximum number of no-op actions at the start of an episode.")
    max_episode_steps: int | None = Field(None, ge=1, alias="horizon", description="Truncate episodes after N steps.")
    scale: Annotated[float, Field(gt=0)] | bool | None = Field(
        None,
        description="Divisor of uint8 observations: null = 255 for images, the largest value for grids of small integers (printed at "
        "the start); false = no division; true = as null, and other bounded numbers are scaled to 0 … 1.",
    )
    flatten: bool | None = Field(None, description="Flatten the observation into one vector.")
    drop: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, description="Parts of a Dict observation to remove, such as [mission]; a nested part is written outer.inner."
    )

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key in _ELSEWHERE:
                raise ValueError(f"{key} does not belong here; {_ELSEWHERE[key]}")
        return data

    @property
    def changes_environment(self) -> bool:
        """Whether anything is done to the environment itself; a divisor of uint8 is part of the network."""
        return self != PreprocessConfig(scale=None if self.scale is True else self.scale)

    @model_validator(mode="after")
    def _bounds_rise(self) -> PreprocessConfig:
        if isinstance(self.clip_reward, tuple) and not self.clip_reward[0] < self.clip_reward[1]:
            raise ValueError(f"clip_reward is {list(self.clip_reward)}; the lowest comes first")
        return self


class MultiAgentConfig(_Strict):
    """The `multiagent:` section: who plays which agent."""

    policies: (
        list[Annotated[str, AfterValidator(lambda name: _model_name(name))]]
        | dict[Annotated[str, AfterValidator(lambda name: _model_name(name))], dict[str, Any] | None]
        | None
    ) = Field(None, description="Policy names, or name → keys of `config:` that differ for it; null = one policy for all agents.")
    policy_mapping: dict[str, str] | str | None = Field(
        None,
        description="Agent (or pattern such as red_*) → policy; one name for all; or module:function(agent) → policy. Evaluated once per agent before the run starts; exact names take precedence over patterns.",
    )
    policies_to_train: list[str] | None = Field(None, description="Policies that learn; the others only play. null = all.")
    centralized_value: bool = Field(
        False,
        description="Centralised value function: it sees the global state (state() of the environment, or all observations); the policy does not (MAPPO).",
    )
    count_steps_by: Literal["env_steps", "agent_steps"] = Field(
        "env_steps",
        description="What `timesteps` and `train_batch_size` count: environment steps (all agents together), or agent steps per policy.",
    )
    evaluation_opponents: str | None = Field(
        None,
        min_length=1,
        description="Opponents in evaluations. policies: the score is the sum over all agents; random: one agent plays against random "
        "opponents, and the score is its return, with its win rate; a run or checkpoint: its policies play the other agents; "
        "null = policies, but random in zero-sum environments.",
    )

    def names(self) -> list[str]:
        """Of the policies, as far as they are listed."""
        return list(self.policies or ())

    def own_keys(self, policy: str) -> dict[str, Any]:
        """In which a policy differs from the others."""
        return dict(self.policies.get(policy) or {}) if isinstance(self.policies, dict) else {}


class EvaluationConfig(_Strict):
    """The `evaluation_config:` section: how evaluations differ from training."""

    explore: bool = Field(False, description="Sample actions as in training; false = take the most probable one.")
    env_config: dict[str, Any] | None = Field(
        None, description="Environment keyword arguments that differ from training; null = none."
    )


_USUAL_REPLAY: Mapping[str, Sequence[Any]] = {
    "storage_unit": ("timesteps", "fragments"),
    "replay_sequence_length": (1, None),
    "replay_burn_in": (0,),
    "replay_zero_init_states": (True, False),
    "replay_mode": ("independent",),
    "worker_side_prioritization": (False,),
}
"""What older files say of a buffer beside the keys below, and is so anyway."""


class ReplayBufferConfig(_Strict):
    """The `replay_buffer_config:` section: what an algorithm that replays keeps, and how it is drawn."""

    type: Literal["ReplayBuffer", "PrioritizedReplayBuffer"] = Field(
        "PrioritizedReplayBuffer", description="ReplayBuffer: uniform sampling; PrioritizedReplayBuffer: by TD error."
    )
    capacity: int = Field(50_000, ge=1, description="Number of steps to keep; the oldest are replaced.")
    max_bytes: int = Field(4 << 30, ge=1, description="Memory limit of the buffer, checked before training starts.")
    alpha: float = Field(0.6, ge=0, description="Priority exponent α; 0 = uniform.")
    beta: Schedule = Field(0.4, description="Importance-sampling exponent β; 1 = full correction. A number or a schedule.")
    eps: float = Field(1e-6, gt=0, description="Constant added to the TD error so that every step can be sampled.")

    @property
    def prioritized(self) -> bool:
        return self.type == "PrioritizedReplayBuffer"

    @model_validator(mode="before")
    @classmethod
    def _as_others_write_it(cls, data: Any) -> Any:
        """RLlib has a class for each way to store steps; here there is one way, and the question is how they are drawn."""
        if not isinstance(data, dict):
            return data
        out: dict[str, Any] = {}
        for key, value in data.items():
            name = str(key).removeprefix("prioritized_replay_")
            if name in out and out[name] != value:
                raise ValueError(f"{name} and prioritized_replay_{name} mean the same, and have different values; keep one")
            out[name] = value
        for key, usual in _USUAL_REPLAY.items():
            if out.pop(key, usual[0]) not in usual:
                raise ValueError(f"{key}: steps are kept and drawn one by one; leave it out")
        kind = rllib_keys.buffer_kind(out.get("type"))
        if kind:
            out["type"] = kind
        wanted = out.pop("prioritized_replay", None)
        if wanted is not None:
            if not isinstance(wanted, bool):
                raise ValueError("prioritized_replay is true or false")
            meant = "PrioritizedReplayBuffer" if wanted else "ReplayBuffer"
            if out.setdefault("type", meant) != meant:
                raise ValueError(f"prioritized_replay is {str(wanted).lower()}, and type is {out['type']}; keep one")
        return out


class AlgorithmConfig(_Strict):
    """The keys of `config:` that every algorithm has."""

    learns: ClassVar[str] = "probabilities"
    """The kind of policy: probabilities of the actions, or their values."""
    replays: ClassVar[bool] = False
    """Learns from a store of earlier steps: `train_batch_size` is drawn from it, whatever was sampled last."""
    report_s: ClassVar[float] = 0.0
    """Report at most once in so many seconds, unless the config says otherwise."""
    iteration_s: ClassVar[float] = 0.0
    iteration_timesteps: ClassVar[int] = 0
    """The least of a `training_iteration` in RLlib, unless the config says otherwise."""

    seed: int = Field(0, ge=0, lt=1 << 30, description="Random seed of weights, exploration and environments.")
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Number of sampling processes; 0 = sample in this process; auto = measure the environment briefly and choose.",
    )
    sampling: Literal["sync", "pipelined", "async"] = Field(
        "sync",
        description="sync: sample and learn in turn; pipelined: sample the next batch while learning, one version behind; async: workers never wait.",
    )
    blocks_ahead: int = Field(2, ge=1, description="Maximum number of segments of one worker waiting for the learner.")
    max_lag: int | None = Field(
        None, ge=1, description="Drop (and count) experience older than this many updates; null = keep all."
    )
    num_learners: int = Field(1, ge=0, description="Number of learner processes that average their gradients; 0 means 1.")
    gradient_accumulation: int = Field(1, ge=1, description="Split each minibatch into N parts and accumulate the gradient.")
    mixed_precision: Literal["bf16", "fp16"] | None = Field(None, description="Train with automatic mixed precision.")
    learner_device: str = Field("auto", description="Device of the learner: auto (a GPU if num_gpus > 0), cpu, cuda or cuda:1.")
    inference_device: str = Field("cpu", description="Device for inference in workers: cpu, cuda or cuda:1.")
    num_gpus: float = Field(0, ge=0, description="Number of GPUs for the learner.")
    restart_failed_sub_environments: bool = Field(
        False, description="Recreate an environment that raises an exception; its episode is truncated and not counted."
    )
    max_worker_restarts: int | None = Field(1000, ge=0, description="Maximum number of restarts of one worker; null = no limit.")
    worker_restart_backoff_s: float = Field(
        0.05, ge=0, description="Delay before the first restart of a worker; doubles up to 5 s."
    )
    worker_hang_s: float = Field(
        60.0, gt=0, description="Restart a worker whose environment takes longer than this for one step."
    )
    start_timeout_s: float | None = Field(
        None,
        ge=0,
        description="Seconds within which the workers must sample their first step, otherwise the run fails; 0 = no limit; "
        "null = 300, or `stop.time_s` with env: external and with fleets.",
    )
    num_envs_per_worker: int = Field(
        64,
        ge=1,
        description="Environments stepped together by each worker. If only train_batch_size is given: as many as fit it, up to 64.",
    )
    rollout_fragment_length: int | None = Field(
        None, ge=1, description="Steps per segment of one environment; null: derived from train_batch_size."
    )
    train_batch_size: int = Field(
        4096,
        ge=1,
        description="Environment steps per update = workers × environments × rollout_fragment_length; rounded up to whole fragments.",
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    explore: bool = Field(True, description="Sample actions from the policy; false = always take the most probable one.")
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = Field(
        "truncate_episodes", description="Train on truncated segments, or only on complete episodes."
    )
    preprocess: PreprocessConfig = Field(default_factory=PreprocessConfig, description="Frame skip, greyscale, stacking …")
    wrappers: list[str | dict[str, Any]] = Field(
        default_factory=list, description="Gymnasium wrappers: module:Wrapper or {module:Wrapper: {keywords}}, innermost first."
    )
    self_play: SelfPlayConfig = Field(
        default_factory=SelfPlayConfig,
        description="Earlier versions as opponents, for environments with `past` opponents.",
    )
    multiagent: MultiAgentConfig | None = Field(None, description="Multi-agent settings.")
    observation_filter: Literal["NoFilter", "MeanStdFilter"] = Field(
        "NoFilter", description="Observation normalisation: MeanStdFilter keeps a running mean and standard deviation."
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment's constructor.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Network settings.")
    evaluation_interval: Annotated[int, Field(ge=1)] | Literal["checkpoint"] = Field(
        "checkpoint", description="Evaluate every N iterations; checkpoint = with each checkpoint; 0 or null = never."
    )
    evaluation_interval_unit: Literal["iterations", "timesteps", "episodes"] = Field(
        "iterations",
        description="Unit of evaluation_interval; the evaluation runs at the first update that reaches it.",
    )
    evaluation_duration: int = Field(10, ge=0, description="Episodes or steps per evaluation; 0 = never evaluate.")
    evaluation_duration_unit: Literal["episodes", "timesteps"] = Field(
        "episodes",
        description="Unit of evaluation_duration; with timesteps, complete episodes until at least that many steps.",
    )
    evaluation_num_workers: int = Field(
        0,
        ge=0,
        description="Number of processes that evaluate checkpoints during training; 0 = evaluate inline while training waits.",
    )
    evaluation_video: int = Field(
        0,
        ge=0,
        le=100,
        description="Number of episodes of each evaluation recorded as videos (run directory, TensorBoard, W&B, MLflow); 0 = none.",
    )
    evaluation_config: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="Settings that differ in evaluations."
    )
    metrics_num_episodes_for_smoothing: int = Field(
        100, ge=1, description="Number of recent episodes averaged in episode_return_mean."
    )
    min_time_s_per_iteration: float | None = Field(
        None,
        ge=0,
        description="Minimum seconds between reports; null = report every update (DQN: twice a second). Also the minimum "
        "duration of a `training_iteration`; null = as in RLlib: 10 (APPO, IMPALA), else 0.",
    )
    min_sample_timesteps_per_iteration: int | None = Field(
        None, ge=0, description="Minimum steps of a `training_iteration`; null = as in RLlib: 1000 (DQN), else 0."
    )
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

    @property
    def report_every_s(self) -> float:
        return self.report_s if self.min_time_s_per_iteration is None else self.min_time_s_per_iteration

    @property
    def least_iteration(self) -> tuple[int, float]:
        """(steps, seconds) that a `training_iteration` takes at least; (0, 0): it is one update."""
        steps, seconds = self.min_sample_timesteps_per_iteration, self.min_time_s_per_iteration
        return self.iteration_timesteps if steps is None else steps, self.iteration_s if seconds is None else seconds


EXTERNAL = "external"
"""The environment of an experiment whose games call us."""
GAMECORE = "gamecore"
"""Of one whose matches are ordered from a gamecore server."""


class SeatConfig(_Strict):
    """One seat of a game that calls us. Spaces are written as `GET /spec` shows them."""

    observation_space: dict[str, Any] = Field(description="Observation space of the seat: {type: Box, shape: [4]} …")
    action_space: dict[str, Any] = Field(description="Action space of the seat: {type: Discrete, n: 2} …")
    model: Annotated[str, AfterValidator(lambda name: _model_name(name))] = Field(
        "model", description="Model that plays the seat; seats of one model have the same spaces."
    )


class ExternalConfig(_Strict):
    """The `env_config:` of `env: external`: where games find us, and what they send."""

    host: str = Field("127.0.0.1", description="Address to listen on; one beyond this machine requires a token.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 = any free port.")
    token_file: str | None = Field(None, description="File with the token that games must send.")
    observation_space: dict[str, Any] | None = Field(None, description="Observation space of a game with one seat.")
    action_space: dict[str, Any] | None = Field(None, description="Action space of a game with one seat.")
    seats: dict[str, SeatConfig] | None = Field(None, description="For a game with several seats: name → spaces and model.")
    max_sessions: int = Field(20_000, ge=1, description="Maximum number of open sessions of one worker.")
    max_body_bytes: int = Field(8 << 20, ge=1, description="Maximum body size of a request.")
    tick_timeout_s: float = Field(30.0, gt=0, description="Time limit of a reply, in seconds.")
    silent_s: float = Field(60.0, gt=0, description="Seconds without a request after which a session is truncated.")

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
    """Stop conditions; the first one that is reached ends the run."""

    timesteps: int | None = Field(None, ge=1, description="Environment steps.")
    episode_return_mean: float | None = Field(None, description="Mean return of recent episodes.")
    iterations: int | None = Field(None, ge=1, description="Updates.")
    training_iteration: int | None = Field(
        None,
        ge=1,
        description="Iterations as counted by RLlib: updates until min_sample_timesteps_per_iteration and min_time_s_per_iteration "
        "are reached. One update with PPO's defaults.",
    )
    episodes: int | None = Field(None, ge=1, description="Episodes.")
    time_s: float | None = Field(None, gt=0, description="Seconds of training, counted from the first sampled step.")


class TargetConfig(_Strict):
    """The `target:` section: what an experiment is known to reach, and within what."""

    return_mean: float = Field(description="Mean episode return.")
    timesteps: int = Field(ge=1, description="Environment steps to reach it.")


class TuneConfig(_Strict):
    """The `tune:` section: how a sweep is run."""

    metric: str = Field("episode_return_mean", min_length=1, description="Metric to optimise: any name of metrics.jsonl.")
    mode: Literal["max", "min"] = Field("max", description="Whether to maximise or minimise it.")
    scheduler: Literal["asha", "pbt"] | None = Field(
        None, description="asha stops bad trials early, pbt replaces them by mutations of good ones; null = neither."
    )
    time_attr: Literal["timesteps", "iterations", "training_iteration", "time_s"] | None = Field(
        None, description="Time unit of the scheduler; null = as in `stop:`."
    )
    max_concurrent: int | None = Field(None, ge=1, description="Trials to run at once; null = as many as fit.")
    cpus_per_trial: int | None = Field(None, ge=1, description="CPUs per trial, workers included; null = 1 plus 1 per worker.")
    report_s: float = Field(1.0, gt=0, description="Seconds between reports of a trial to the scheduler.")
    grace_period: float | None = Field(
        None, gt=0, description="asha: grace period before a trial can be stopped; null = a hundredth of the maximum."
    )
    reduction_factor: float = Field(4.0, gt=1, description="asha: reduction factor; one of N trials continues at each rung.")
    perturbation_interval: float | None = Field(
        None, gt=0, description="pbt: time between perturbations; null = a tenth of the maximum."
    )
    quantile_fraction: float = Field(
        0.25, gt=0, le=0.5, description="pbt: fraction of trials that is replaced by copies of the best ones."
    )
    resample_probability: float = Field(
        0.25, ge=0, le=1, description="pbt: probability of resampling a value instead of perturbing it."
    )
    hyperparam_mutations: dict[str, Any] = Field(
        default_factory=dict, description="pbt: key of `config:` → search values; empty = all searched keys."
    )


def _switch(value: Any) -> Any:
    """A section may be switched on and off as a whole: true is all of its defaults."""
    return ({} if value else None) if isinstance(value, bool) else value


_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")


def _memory_without_password(url: str) -> str:
    if re.search(r"//[^/@]*:.*@", url, re.DOTALL) or re.search(r"[?&](password|username)=", url):
        raise ConfigError(
            "memory holds a password, and configs are saved with their runs.",
            "Leave it out of the URL, and put it into LUDUS_MEMORY_PASSWORD, or into the file that --memory-password-file names.",
        )
    return url


def _without_password(uri: str | None) -> str | None:
    if uri is not None and _PASSWORD.search(uri):  # raised as it is: pydantic's complaint would show the value
        raise ConfigError(
            "track.mlflow.tracking_uri holds a password, and configs are saved with their runs.",
            "Give it as MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment.",
        )
    return uri


class WandbConfig(_Strict):
    """The `track.wandb:` section. The key is never written here: `wandb login`, or WANDB_API_KEY in the environment."""

    project: str = Field("ludus", min_length=1, description="Project in Weights & Biases.")
    entity: str | None = Field(None, description="User or team; null = default of the API key.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes files for `wandb sync`; null = WANDB_MODE, else online with a key and offline without."
    )
    group: str | None = Field(None, description="Group of the run; null = the experiment's name.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")

    @model_validator(mode="before")
    @classmethod
    def _no_key(cls, data: Any) -> Any:
        for key in ("api_key", "key") if isinstance(data, Mapping) else ():
            if key in data:  # raised as it is: pydantic's complaint would show the value
                raise ConfigError(
                    f"track.wandb.{key}: a key is no part of a config, which is saved with its runs.",
                    "Run `wandb login`, or set WANDB_API_KEY in the environment.",
                )
        return data


class MlflowConfig(_Strict):
    """The `track.mlflow:` section."""

    tracking_uri: Annotated[str | None, AfterValidator(_without_password)] = Field(
        None, description="Tracking server; null = MLFLOW_TRACKING_URI, else mlflow.db next to the runs of the experiment."
    )
    experiment: str | None = Field(None, description="Experiment in MLflow; null = the name of the experiment.")
    tags: dict[str, str] = Field(default_factory=dict, description="Additional tags of the run.")


class TrackConfig(_Strict):
    """The `track:` section: where numbers go besides metrics.jsonl."""

    tensorboard: Literal[True] = Field(True, description="Always on: `tensorboard --logdir runs`.")
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


def check_model_name(name: str, where: str) -> None:
    """Raises ConfigError."""
    try:
        _model_name(name)
    except ValueError as error:
        raise ConfigError(f"{where} names {name!r}: {error}.") from error


class ExperimentConfig(_Strict):
    """One experiment. `config` is checked against the schema of the algorithm named by `run`."""

    name: Annotated[str, AfterValidator(_plain_name)] = Field(
        "default", description="Experiment name, the directory of its runs."
    )
    env: str = Field(
        description="Gymnasium id, module:function that creates an environment, or external (a game that connects over HTTP)."
    )
    run: str = Field("PPO", description="Algorithm, or module:Class.")
    description: str = Field("", description="Description in one sentence.")
    stop: StopConfig = Field(
        default_factory=StopConfig, description="Stop conditions; the first one that is reached ends the run."
    )
    target: TargetConfig | None = Field(None, description="Known result of the experiment; presets are tested against it.")
    checkpoint_freq: int = Field(0, ge=0, description="Save a checkpoint every N iterations; 0 = only at the end.")
    checkpoint_time_s: float = Field(300.0, ge=0, description="Save a checkpoint every N seconds as well; 0 = never.")
    checkpoint_at_end: bool = Field(True, description="Save a checkpoint when the run ends.")
    max_failures: int = Field(5, ge=0, description="Maximum number of consecutive learner restarts without progress.")
    keep_checkpoints_num: int | None = Field(
        None, ge=1, description="Number of newest checkpoints to keep besides the best; null = all."
    )
    memory: Annotated[str, AfterValidator(_memory_without_password)] = Field(
        "embedded",
        description="Transport of experience to the learner: embedded (its own worker processes), or redis://HOST:PORT/DB for `ludus fleet worker` on any machine. Set the password in LUDUS_MEMORY_PASSWORD or a file, not here.",
    )
    num_samples: int = Field(1, ge=1, description="Number of trials with different seeds.")
    tune: TuneConfig = Field(default_factory=TuneConfig, description="Sweep settings.")
    track: TrackConfig = Field(default_factory=TrackConfig, description="Trackers for metrics.")
    config: Annotated[dict[str, Any], BeforeValidator(lambda v: {} if v is None else v)] = Field(
        default_factory=dict, description="Settings of the algorithm."
    )


COLLATED_STEPS = 64
"""Steps of a segment when nothing is said and batches are collated."""

Owners = Callable[[str], Sequence[str]]
"""Names of the algorithms that have a key; asked only when another one was given it."""


# -- checking -----------------------------------------------------------------------------------------------------------


def experiment(data: Mapping[str, Any]) -> ExperimentConfig:
    """Check one experiment's mapping (without its algorithm's keys). Raises ConfigError with all that is wrong."""
    return check_experiment(read_experiment(data))


def check_experiment(reading: Reading) -> ExperimentConfig:
    """Check an experiment that is already in current names. Raises ConfigError with all that is wrong."""
    return _validated(ExperimentConfig, reading, "")


def algorithm_config(
    schema: type[AlgorithmConfig],
    data: Mapping[str, Any],
    *,
    collated: bool = False,
    run: str = "",
    owners: Owners | None = None,
) -> AlgorithmConfig:
    """Check `config:` against an algorithm's schema, older spellings included. Raises ConfigError with all that is wrong.

    `collated`: segments of any number make up a batch, as with games that call us; else one of every environment. `run` is
    the name of the algorithm, `owners` knows those that have a key.
    """
    return check_algorithm_config(schema, read_config(data, schema), collated=collated, run=run, owners=owners)


def check_algorithm_config(
    schema: type[AlgorithmConfig], reading: Reading, *, collated: bool = False, run: str = "", owners: Owners | None = None
) -> AlgorithmConfig:
    """Check a `config:` that is already in current names, as `algorithm_config` does."""
    checked = _validated(schema, reading, "config", run, owners)
    if collated:
        return checked.model_copy(update={"rollout_fragment_length": checked.rollout_fragment_length or COLLATED_STEPS})
    envs, steps, batch = shape_of_batch(checked)
    return checked.model_copy(update={"num_envs_per_worker": envs, "rollout_fragment_length": steps, "train_batch_size": batch})


def external_config(data: Mapping[str, Any]) -> ExternalConfig:
    return _validated(ExternalConfig, Reading(dict(data)), "config.env_config")


def dumped(config: AlgorithmConfig) -> dict[str, Any]:
    """As `config:` is saved with a run: every key by its present name."""
    plain = config.model_dump(mode="json")
    return {"lambda" if name == "lambda_" else name: value for name, value in plain.items()}


# -- spellings ----------------------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, type[_Strict]] = {
    rllib_keys.EXPERIMENT: ExperimentConfig,
    rllib_keys.STOP: StopConfig,
    rllib_keys.CONFIG: AlgorithmConfig,
    rllib_keys.MODEL: ModelConfig,
    rllib_keys.EVALUATION: EvaluationConfig,
    rllib_keys.MULTIAGENT: MultiAgentConfig,
    "config.preprocess": PreprocessConfig,
    "config.self_play": SelfPlayConfig,
    "config.replay_buffer_config": ReplayBufferConfig,
    "tune": TuneConfig,
    "track": TrackConfig,
    "target": TargetConfig,
}


def sections(schema: type[AlgorithmConfig] = AlgorithmConfig) -> dict[str, type[_Strict]]:
    """Dotted path → schema of all sections of an experiment whose algorithm has this one."""
    return {**_SECTIONS, rllib_keys.CONFIG: schema}


def read_experiment(data: Mapping[str, Any]) -> Reading:
    """One experiment in present names, but for its `config`, out of which `env` is lifted."""
    out = rllib_keys.read(rllib_keys.EXPERIMENT, data, ExperimentConfig.model_fields)
    _descend(out, "", {rllib_keys.STOP: StopConfig})
    inner = out.data.get("config")
    if isinstance(inner, Mapping) and "env" in inner:  # as `tune.run(…, config={"env": …})` had it
        named = inner["env"]
        out.data["config"] = {key: value for key, value in inner.items() if key != "env"}
        if named is not None and out.data.setdefault("env", named) != named:
            twice = f"The experiment sets env twice: {out.data['env']!r}, and {named!r} in config. Keep one."
            out.clashes.append(Complaint(twice, "config.env"))
    for name in ("stop", "tune", "track", "config"):
        if name in out.data and out.data[name] is None:  # a section that was left empty
            del out.data[name]
    _read_setting(out)
    return out


def _read_setting(out: Reading) -> None:
    """An algorithm of RLlib that is another one with certain keys: both are what it stands for, but for keys that are given."""
    written, inner = out.data.get("run"), out.data.get("config", {})
    setting = rllib_values.setting_of(written)
    if setting is None or not isinstance(inner, Mapping):
        return
    given = {rllib_keys.present(rllib_keys.CONFIG, key): value for key, value in inner.items()}
    made = {key: value for key, value in setting.config(given).items() if key not in given or isinstance(value, Mapping)}
    rest = {key: value for key, value in inner.items() if key != "microbatch_size"}
    out.data |= {"run": setting.run, "config": {**rest, **made}}
    out.written["run"] = str(written)
    out.stands_for.append(Complaint(f"run: {written} is trained as {setting.notice}.", "run"))


def read_config(data: Mapping[str, Any], schema: type[AlgorithmConfig] = AlgorithmConfig) -> Reading:
    """`config:` in present names."""
    out = rllib_keys.read(rllib_keys.CONFIG, data, names_of(schema))
    below = (rllib_keys.MODEL, rllib_keys.EVALUATION, rllib_keys.MULTIAGENT)
    _descend(out, "config.", {section.removeprefix("config."): _SECTIONS[section] for section in below})
    for name in ("model", "evaluation_config", "env_config", "preprocess", "wrappers"):
        if name in out.data and out.data[name] is None:
            del out.data[name]
    if out.data.get("batch_mode") == "complete_episodes" and schema is not AlgorithmConfig:
        _read_complete_episodes(out, schema)
    return out


def _read_complete_episodes(out: Reading, schema: type[AlgorithmConfig]) -> None:
    """An algorithm that replays draws single steps; where sampling and learning take turns, this process samples episodes."""
    if schema.replays:
        del out.data["batch_mode"]
        out.ignored.append(Refusal("config.batch_mode", "complete_episodes", "single steps are drawn from the replay buffer"))
        return
    workers, sampling = out.data.get("num_workers"), out.data.get("sampling", schema.model_fields["sampling"].default)
    if isinstance(workers, int) and not isinstance(workers, bool) and workers > 0 and sampling == "sync":
        out.data["num_workers"] = 0
        path = f"config.{out.written.get('num_workers', 'num_workers')}"
        out.ignored.append(Refusal(path, workers, "with batch_mode: complete_episodes one process samples and learns"))


def canonical(data: Mapping[str, Any], schema: type[AlgorithmConfig] | None = None) -> dict[str, Any]:
    """`config:` with every key in its present spelling. Raises ConfigError for one that is there twice.

    With a schema also for one that is not here at all; without, such keys stay as they are, for whoever knows the algorithm.
    """
    reading = read_config(data, schema or AlgorithmConfig)
    wrong = reading.clashes if schema is None else reading.complaints()
    if wrong:
        raise ConfigErrors(wrong)
    for refusal in reading.refusals:
        section, _, key = refusal.path.removeprefix("config.").rpartition(".")
        (reading.data.setdefault(section, {}) if section else reading.data)[key] = refusal.value
    return reading.data


def _descend(out: Reading, prefix: str, below: Mapping[str, type[_Strict]]) -> None:
    """Read the sections inside of a section, together with what the section itself says about them."""
    for name, schema in below.items():
        inner = out.data.get(name)
        if isinstance(inner, Mapping):
            found = rllib_keys.read(prefix + name, inner, names_of(schema))
            out.refusals += found.refusals
            out.implied += found.implied
            out.ignored += found.ignored
            out.clashes += found.clashes
            out.elsewhere |= {path: value for path, value in found.elsewhere.items() if "." in path}
            out.written |= {f"{name}.{key}": f"{name}.{written}" for key, written in found.written.items()}
            out.data[name] = found.data
    for path, value in out.elsewhere.items():
        name, _, key = path.partition(".")
        section = out.data[name] = dict(out.data.get(name) or {})
        if section.setdefault(key, value) != value:
            written = f"{prefix}{out.written.get(path, path)}"
            twice = f"{prefix}{path} is {section[key]!r}, and {written}, which means the same, is {value!r}. Keep one."
            out.clashes.append(Complaint(twice, written))


def names_of(schema: type[_Strict]) -> set[str]:
    """The keys of a section, with the aliases that its fields have."""
    return {*schema.model_fields} | {field.alias for field in schema.model_fields.values() if field.alias}


# -- complaints ---------------------------------------------------------------------------------------------------------


def _validated(schema: type[S], reading: Reading, where: str, run: str = "", owners: Owners | None = None) -> S:
    complaints = reading.complaints()
    try:
        checked = schema.model_validate(reading.data)
    except ValidationError as error:
        complaints += _complaints(schema, error, where, reading.written, run, owners)
    complaints += _truths(schema, reading.data, f"{where}." if where else "")
    if complaints:
        raise ConfigErrors(complaints)
    return checked


def _truths(schema: type[_Strict], data: Mapping[str, Any], prefix: str) -> Iterator[Complaint]:
    """true and false where a number is meant, which pydantic takes for 1 and 0."""
    for name, field in schema.model_fields.items():
        key = field.alias if field.alias is not None and field.alias in data else name
        value, below = data.get(key), schema_of(field.annotation)
        if isinstance(value, bool) and _takes_number(field.annotation) and not _takes_bool(field.annotation):
            yield Complaint(f"{prefix}{key} is {value}: a number is meant.", f"{prefix}{key}")
        elif isinstance(value, Mapping) and below is not None and get_origin(field.annotation) is not dict:
            yield from _truths(below, value, f"{prefix}{key}.")


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(part in (True, False) or _takes_bool(part) for part in get_args(annotation))


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_takes_number, get_args(annotation)))


_TYPE_NAME = re.compile(r"^(float|int|bool|str|none|(list|tuple|dict|function|constrained|literal)\b.*)$")
"""What pydantic appends to a path to say which branch of a union it tried."""


def _complaints(
    schema: type[_Strict],
    error: ValidationError,
    where: str,
    written: Mapping[str, str],
    run: str,
    owners: Owners | None,
) -> list[Complaint]:
    lines: dict[str, str] = {}
    for item in error.errors():
        path = [str(p) for p in item["loc"] if not _TYPE_NAME.match(str(p))]
        seen = written.get(".".join(path), ".".join(path))  # as it stands in the file
        shown = f"{where}.{seen}" if where and seen else where or seen
        if item["type"] == "extra_forbidden":
            lines[shown] = _unknown(schema, path, shown, run, owners)
        elif item["type"] == "missing":
            lines[shown] = f"{shown!r} is missing."
        elif isinstance(item["input"], Mapping) and is_search(item["input"]):
            lines[shown] = f"{shown} is searched over ({next(iter(item['input']))}), and this is a single run. Use ludus tune -f."
        else:
            meant = "it is a section, {key: value, …}" if item["type"] in ("model_type", "dict_type") else item["msg"]
            lines.setdefault(shown, f"{shown} is {item['input']!r}: {meant.removeprefix('Value error, ')}.")
    return [Complaint(line, shown) for shown, line in lines.items()]


def _unknown(schema: type[_Strict], path: list[str], shown: str, run: str, owners: Owners | None) -> str:
    """A sentence for a key that is not there: whose it is, where it belongs, or what comes nearest."""
    owner, key = _schema_at(schema, path[:-1]), path[-1]
    if key in owner.model_fields:
        other = owner.model_fields[key].alias
        return f"{shown!r} stands beside {other!r}, which means the same. Keep one."
    if issubclass(owner, AlgorithmConfig):
        having = [name for name in owners(key) if name != run] if owners is not None else []
        if having:
            return f"{shown!r} is a key of {_listed(having)}; this is {run}."
        if key in ExperimentConfig.model_fields:
            return f"{shown!r} stands too deep: {key} belongs beside config, not into it."
    homes = [section for section, there in _SECTIONS.items() if section != shown.rpartition(".")[0] and key in names_of(there)]
    if not homes and owners is not None and owners(key) and not issubclass(owner, AlgorithmConfig):
        homes = [rllib_keys.CONFIG]
    if homes:
        return f"{shown!r} is in the wrong place: {key} belongs into {_listed(homes)}."
    near = did_you_mean(key, known_keys(owner))
    if near.startswith("Known"):  # nothing is near: present names are enough
        near = did_you_mean(key, names_of(owner) - {"lambda_"})
    return f"Unknown key {shown!r}. {near}".strip()


def _listed(names: Sequence[str]) -> str:
    shown = [name or "the experiment" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _schema_at(schema: type[_Strict], path: list[str]) -> type[_Strict]:
    for name in path:
        for field_name, field in schema.model_fields.items():
            if name in (field_name, field.alias):
                schema = schema_of(field.annotation) or schema
    return schema


def schema_of(annotation: Any) -> type[_Strict] | None:
    """The schema in an annotation, which may be inside `dict[str, …] | None`."""
    if get_origin(annotation) is None:
        return annotation if isinstance(annotation, type) and issubclass(annotation, _Strict) else None
    return next((found for part in get_args(annotation) if (found := schema_of(part)) is not None), None)


def known_keys(schema: type[_Strict]) -> list[str]:
    """Every spelling of every key of a section, for people."""
    names = names_of(schema) - {"lambda_"}
    kind = next((s for s, there in _SECTIONS.items() if there is schema), "")
    if issubclass(schema, AlgorithmConfig):
        kind = rllib_keys.CONFIG
    renamed = rllib_keys.RENAMED.get(kind, {}) if kind or schema is ExperimentConfig else {}
    translated = rllib_keys.TRANSLATED.get(kind, {}) if renamed else {}
    return sorted(names | {key for key, name in renamed.items() if name in names and key != "lambda_"} | set(translated))


# -- files and the command line -----------------------------------------------------------------------------------------

_MAX_YAML_BYTES = 1 << 20


def load_experiments(path: Path) -> dict[str, dict[str, Any]]:
    """The experiments of a YAML file, by name, unchecked. Raises ConfigError.

    What has a name that begins with a dot is none: a place for values that others refer to by alias.
    """
    data = parse_yaml(_text_of(path), str(path))
    if (
        isinstance(data, dict)
        and isinstance(data.get("env"), str)
        and not any(isinstance(v, dict) and "env" in v for v in data.values())
    ):
        raise ConfigError(
            f"{path} does not hold an experiment by name.", "Write  my-experiment:  in the first line, and indent the rest."
        )
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if not name.startswith(".")}
    if not isinstance(data, dict) or not all(isinstance(value, dict) for value in data.values()) or not data:
        raise ConfigError(f"{path} does not hold an experiment.", "The layout is  <name>: {env: …, run: …, stop: …, config: …}")
    return data


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(_MAX_YAML_BYTES + 1)
        text = read.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        if len(read) <= _MAX_YAML_BYTES:
            raise ConfigError(f"{path} is not UTF-8 text.", "Save it as UTF-8.") from error
    if len(read) > _MAX_YAML_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_YAML_BYTES} bytes; that is no experiment.")
    return text


def lines_of_experiments(path: Path) -> dict[tuple[str, ...], int]:
    """(experiment, key, key …) → its line in a file that `load_experiments` has read."""
    return key_lines(_text_of(path))


def override(data: dict[str, Any], assignment: str) -> None:
    """Apply `path.to.key=VALUE` in place. A path that names no experiment key is meant inside `config`."""
    path, equals, text = assignment.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"--set {assignment!r} is not of the form path.to.key=VALUE.")
    assign(data, path.strip(), parse_yaml(text, f"--set {path}"), f"--set {assignment!r}")


def assign(data: dict[str, Any], path: str, value: Any, shown: str) -> None:
    """The same with a value that is read already. `shown`: who wants it, for complaints."""
    keys = path.split(".")
    if rllib_keys.present(rllib_keys.EXPERIMENT, keys[0]) not in {*ExperimentConfig.model_fields, *_SCHEDULES}:
        keys.insert(0, "config")
    for key in keys[:-1]:
        if data.get(key) is None:  # absent, or a section left empty in the YAML
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise ConfigError(f"{shown}: {key!r} is not a section.")
    found: Mapping[str, Any] | None = None
    if keys[:-1] == (["config"] if keys[-1] in rllib_keys.SCHEDULE else []):
        with contextlib.suppress(ValueError):  # which is said when the experiment is checked
            found = scheduled(keys[-1], value)
    for key, one in (found or {keys[-1]: value}).items():
        give_way(data, ".".join(keys[:-1]), [key])
        data[key] = one


def scheduled(key: str, value: Any) -> Mapping[str, Any] | None:
    """What a part of Coach's schedules, or SB3's total_timesteps, is under present names, so that it replaces what is there.

    None: it is neither. Keys of `config`, or `stop` as a whole. Raises ValueError with what is wrong with the value.
    """
    if key == "improve_steps":
        ((path, number),) = rllib_keys.improve(value, {}).items()
        return {"stop": {path.removeprefix("stop."): number}}
    if key in TOTALS:
        return {"stop": {"timesteps": value}}
    return rllib_keys.SCHEDULE[key](value, {}) if key in rllib_keys.SCHEDULE else None


_SCHEDULES = ("improve_steps", *TOTALS)
"""Keys beside `config` that are none of ours."""


def give_way(data: dict[str, Any], section: str, keys: Iterable[str]) -> None:
    """Remove all spellings of these keys from a section, in place."""
    names = {rllib_keys.present(section, key) for key in keys}
    if section == rllib_keys.CONFIG and "num_gpus" in names:
        names |= set(rllib_values.PER_LEARNER_GPUS)
    for other in [key for key in data if rllib_keys.present(section, key) in names]:
        del data[other]


def stop_values(pairs: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` of --stop, numbers only; or all of them as one `{"key": value, …}`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        if pair.lstrip().startswith("{"):
            found = parse_yaml(pair, "--stop")
            items = list(found.items()) if isinstance(found, dict) else []
        else:
            key, equals, text = pair.partition("=")
            items = [(key.strip(), parse_yaml(text, f"--stop {key}"))] if equals else []
        for key, value in items or [("", None)]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise ConfigError(f"--stop {pair!r} is not of the form KEY=NUMBER.")
            out[key] = value
    return out
