"""The config schema of an experiment: `<name>: {env, run, stop, …, config: {…}}`.

`ExperimentConfig` is the experiment, `AlgorithmConfig` its `config:` section; each algorithm extends the latter by its own
keys. `translation` maps other spellings to these keys, `validation` checks values, `experiment_file` and `overrides` read
YAML files and command-line values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ludus.config.aliases.rllib_values import buffer_type
from ludus.config.env_sections import (
    EXTERNAL,
    GAMECORE,
    EvaluationConfig,
    ExternalConfig,
    MultiAgentConfig,
    PreprocessConfig,
    SeatConfig,
    SelfPlayConfig,
)
from ludus.config.model_section import BranchConfig, ModelConfig
from ludus.config.section import ConfigSection, ExperimentName, Schedule
from ludus.config.tracking_sections import MlflowConfig, TrackConfig, WandbConfig
from ludus.errors import ConfigError

__all__ = [
    "EMBEDDED",
    "EXTERNAL",
    "GAMECORE",
    "AlgorithmConfig",
    "BranchConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "ExternalConfig",
    "MlflowConfig",
    "ModelConfig",
    "MultiAgentConfig",
    "PreprocessConfig",
    "ReplayBufferConfig",
    "Schedule",
    "SeatConfig",
    "SelfPlayConfig",
    "StopConfig",
    "TargetConfig",
    "TrackConfig",
    "TuneConfig",
    "WandbConfig",
]

EMBEDDED = "embedded"
"""Value of `memory` without a server: memory of this process or of processes on this machine."""

_REPLAY_DEFAULTS: Mapping[str, Sequence[Any]] = {
    "storage_unit": ("timesteps", "fragments"),
    "replay_sequence_length": (1, None),
    "replay_burn_in": (0,),
    "replay_zero_init_states": (True, False),
    "replay_mode": ("independent",),
    "worker_side_prioritization": (False,),
}
"""Keys of RLlib's buffers that are accepted with the values that match this implementation."""


class ReplayBufferConfig(ConfigSection):
    """The `replay_buffer_config:` section."""

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
    def _translate_rllib_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        out: dict[str, Any] = {}
        for key, value in data.items():
            name = str(key).removeprefix("prioritized_replay_")
            if name in out and out[name] != value:
                raise ValueError(f"{name} and prioritized_replay_{name} mean the same, and have different values; keep one")
            out[name] = value
        for key, accepted in _REPLAY_DEFAULTS.items():
            if out.pop(key, accepted[0]) not in accepted:
                raise ValueError(f"{key}: steps are stored and sampled one by one; leave it out")
        kind = buffer_type(out.get("type"))
        if kind:
            out["type"] = kind
        prioritized = out.pop("prioritized_replay", None)
        if prioritized is not None:
            if not isinstance(prioritized, bool):
                raise ValueError("prioritized_replay is true or false")
            kind = "PrioritizedReplayBuffer" if prioritized else "ReplayBuffer"
            if out.setdefault("type", kind) != kind:
                raise ValueError(f"prioritized_replay is {str(prioritized).lower()}, and type is {out['type']}; keep one")
        return out


class AlgorithmConfig(ConfigSection):
    """The `config:` section: keys that all algorithms have in common."""

    learns: ClassVar[str] = "probabilities"
    """What the policy network outputs: probabilities of the actions, or their values."""
    replays: ClassVar[bool] = False
    """Whether the algorithm samples its batches of `train_batch_size` from a replay buffer."""
    report_s: ClassVar[float] = 0.0
    """Default minimum seconds between reports."""
    iteration_s: ClassVar[float] = 0.0
    iteration_timesteps: ClassVar[int] = 0
    """Default minimum seconds and steps of a `training_iteration`, as in RLlib."""

    seed: int = Field(0, ge=0, lt=1 << 30, description="Random seed of weights, exploration and environments.")
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Number of sampling processes; 0 = sample in this process; auto = measure the environment briefly and choose.",
    )
    min_nodes: int = Field(
        1,
        ge=1,
        description="With a Ray cluster: machines that must be able to sample when the run starts; with fewer the run ends and names the others.",
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
        description="Opponents of a game with two sides: the newest version, or earlier ones.",
    )
    multiagent: MultiAgentConfig | None = Field(None, description="Multi-agent settings.")
    observation_filter: Literal["NoFilter", "MeanStdFilter"] = Field(
        "NoFilter", description="Observation normalisation: MeanStdFilter keeps a running mean and standard deviation."
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment's constructor.")
    display: Literal["auto", "xvfb", "egl", "none"] = Field(
        "auto",
        description="Screen of environments and games: auto = the X server of DISPLAY if it answers, else a private one (Xvfb) for what "
        "needs one; xvfb = a private one for each process; egl = OpenGL without an X server; none = no screen. LUDUS_SCREEN overrides it.",
    )
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
        """Steps per segment of one environment."""
        return self.rollout_fragment_length or max(1, self.train_batch_size // self.num_envs_per_worker)

    @property
    def workers(self) -> int:
        """Number of sampling processes; `auto` must have been replaced by a number."""
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
        """Minimum (steps, seconds) of a `training_iteration`; (0, 0) = one update."""
        steps, seconds = self.min_sample_timesteps_per_iteration, self.min_time_s_per_iteration
        return self.iteration_timesteps if steps is None else steps, self.iteration_s if seconds is None else seconds


class StopConfig(ConfigSection):
    """The `stop:` section: the first condition that is reached ends the run."""

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


class TargetConfig(ConfigSection):
    """The `target:` section: a known result of the experiment."""

    return_mean: float = Field(description="Mean episode return.")
    timesteps: int = Field(ge=1, description="Environment steps to reach it.")


class TuneConfig(ConfigSection):
    """The `tune:` section: settings of a sweep."""

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


def _reject_password(url: str) -> str:
    if re.search(r"//[^/@]*:.*@", url, re.DOTALL) or re.search(r"[?&](password|username)=", url):
        raise ConfigError(
            "memory contains a password, and configs are saved with their runs.",
            "Remove it from the URL; set LUDUS_MEMORY_PASSWORD, or pass a file with --memory-password-file.",
        )
    return url


class ExperimentConfig(ConfigSection):
    """One experiment. `config` is validated later, against the schema of the algorithm `run`."""

    name: ExperimentName = Field("default", description="Experiment name, the directory of its runs.")
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
    memory: Annotated[str, AfterValidator(_reject_password)] = Field(
        EMBEDDED,
        description="Transport of experience to the learner: embedded (its own worker processes), or redis://HOST:PORT/DB for `ludus fleet worker` on any machine. Set the password in LUDUS_MEMORY_PASSWORD or a file, not here.",
    )
    num_samples: int = Field(1, ge=1, description="Number of trials with different seeds.")
    tune: TuneConfig = Field(default_factory=TuneConfig, description="Sweep settings.")
    track: TrackConfig = Field(default_factory=TrackConfig, description="Trackers for metrics.")
    config: Annotated[dict[str, Any], BeforeValidator(lambda v: {} if v is None else v)] = Field(
        default_factory=dict, description="Settings of the algorithm."
    )
