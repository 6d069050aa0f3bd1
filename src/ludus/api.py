"""Python API: train, tune, evaluate and play agents; the functions behind `ludus.train` and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core import trust as trusts
from ludus.core.types import DEFAULT_MODEL
from ludus.envs.registry import EnvLike, env_name
from ludus.experiments import runner
from ludus.experiments.control.callbacks import Callback, ReportFunction, TrainingObservers
from ludus.experiments.resolve import cluster_of
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import directory_of
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.source.experiment_source import training_data
from ludus.sampling.trained_agent import TrainedAgent

if TYPE_CHECKING:
    from ludus.core.tree import Array
    from ludus.experiments.evaluation.rollout import RolloutResult
    from ludus.sampling.episode_runner import Score
    from ludus.tournament.result import BattleResult
    from ludus.tuning.report import SweepResult


def train(
    env: EnvLike | None = None,
    run: str | None = None,
    stop: Mapping[str, float] | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    experiment: str | None = None,
    name: str | None = None,
    local_dir: str | Path = "runs",
    project: str | Path | None = None,
    trial: str | None = None,
    restore: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback | ReportFunction] = (),
    address: str | None = None,
    **settings: Any,
) -> Result:
    """Train an agent and return it (`.agent`), with its run directory, last metrics and history.

    `env`: a name, or a class or function that creates an environment. `preset` (see `ludus presets`) or `file` (YAML;
    `experiment` selects one of several) provides the settings that are not given here. `settings` are keys of `config:`
    (`lr=3e-4, num_envs=64, model={"use_lstm": True}, …`) and other keys of the experiment (`checkpoint_freq=10,
    track={"csv": True}, total_timesteps=100_000, …`), in any of their spellings; unknown keys are errors.

    `progress`: whether to show progress; None = in terminals and notebooks. `callbacks`: `ludus.Callback` objects, or functions
    that are called as (run, metrics) with every report. With `num_workers=N`, N other processes step the environments; with
    `address`, on all machines of a Ray cluster. `local_dir` and `project` may be URLs of a store: `s3://bucket/prefix`.
    Raises UsageError for invalid arguments, before anything starts.
    """
    data = training_data(env, run, stop, preset=preset, file=file, experiment=experiment, name=name, settings=settings)
    trusts.allow(data, str(local_dir), str(project))
    with TrainingObservers(callbacks, progress) as observers:
        result = runner.train(
            data, local_dir=local_dir, project=project, trial=trial, restore=restore,
            cluster=cluster_of(address), on_directory=observers.start, **observers.arguments,
        )  # fmt: skip
        return observers.conclude(result)


def resume(
    directory: str | Path,
    stop: Mapping[str, float] | None = None,
    *,
    progress: bool | None = None,
    callbacks: Sequence[Callback | ReportFunction] = (),
    address: str | None = None,
    trust: bool = False,
) -> Result:
    """Continue a run that was stopped or killed, in its directory or URL; `stop` replaces its stop conditions.

    `trust`: import any code that the stored run names; otherwise only code of your project (docs/security.md).
    """
    with trusts.consent(trust, str(directory)), TrainingObservers(callbacks, progress) as observers:
        observers.start(directory_of(directory))
        cluster = cluster_of(address)
        return observers.conclude(runner.resume(directory, stop=stop, cluster=cluster, **observers.arguments))


def load(where: str | Path, model: str | None = None, seed: int = 0, *, trust: bool = False) -> RunAgent:
    """Load the agent of a checkpoint, a run (its newest checkpoint), or `RUN/best`, from a path or the URL of a store.

    `model`: name of the model, for a run with several. `trust`: import any code that it names; otherwise only code of your
    project (docs/security.md). Raises NotFound, Damaged, UsageError.
    """
    from ludus.experiments.runs.checkpoint import choose_model

    trusts.allow(str(where))
    run, found = checkpoint.open_checkpoint(where)
    if trust:
        trusts.allow(found.state)
    chosen = DEFAULT_MODEL if model is None and DEFAULT_MODEL in found.weights else choose_model(found, model)
    version = int(found.state["models"][chosen]["version"])
    return RunAgent(found.policy(chosen), seed, version, run_dir=run, model=chosen)


def tune(
    run: str = "PPO",
    name: str = "default",
    stop: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    num_samples: int = 1,
    *,
    local_dir: str | Path = "runs",
    scheduler: str | None = None,
    metric: str = "episode_return_mean",
    mode: str = "max",
    max_concurrent: int | None = None,
    max_failures: int | None = None,
    checkpoint_freq: int = 0,
    keep_checkpoints_num: int | None = None,
    address: str | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    **settings: Any,
) -> SweepResult:
    """Train many trials of one experiment in parallel and return their results: `.best_config`, `.best_run`, `.results`.

    `config`: `env` and the keys of `config:`; values may be search values such as `{"lr": {"loguniform": [1e-5, 1e-2]}}` or
    `ray.tune.loguniform(1e-5, 1e-2)`. `settings`: other keys of `tune:` (`grace_period=…`). Trials run in the Ray cluster that
    this process is connected to, else in the one at `address`, else in a temporary local one. `resume` continues an
    interrupted sweep of that name; the same call may be repeated.
    """
    from ludus.tuning import sweep

    options = sweep.SweepOptions(Path(local_dir), cluster_of(address), max_concurrent, retry_failed)
    if resume and (Path(local_dir).expanduser() / name / sweep.STATE).exists():
        return sweep.resume_sweep(Path(local_dir) / name, options)
    inner = dict(config or {})
    data: dict[str, Any] = {"run": inner.pop("run", run), "stop": dict(stop or {}), "num_samples": num_samples}
    if "env" in inner:
        data["env"] = env_name(inner.pop("env"))
    data |= {"config": inner, "checkpoint_freq": checkpoint_freq, "keep_checkpoints_num": keep_checkpoints_num}
    data |= {} if max_failures is None else {"max_failures": max_failures}
    data["tune"] = {"scheduler": scheduler, "metric": metric, "mode": mode, **settings}
    trusts.allow(data)
    return sweep.run_sweep({name: data}, options)[0]


def trainable(run: str = "PPO", *, env: EnvLike | None = None, stop: Mapping[str, float] | None = None, **settings: Any) -> Any:
    """Return a trainable for `ray.tune`: `Tuner(ludus.trainable("PPO"), param_space={"env": "CartPole-v1", "lr": …})`.

    The config of a trial has `env`, `run`, `stop` and the keys of `config:`; `settings` are their defaults. Every trial is a
    run in Tune's trial directory, and reserves one core plus one per worker. It reports about once per second; each report
    increases Tune's `training_iteration` by one, while `iterations` and `timesteps` are counted by Ludus.
    """
    from ludus.tuning import sweep

    data: dict[str, Any] = {"run": run, "config": settings}
    data |= {"env": env_name(env)} if env is not None else {}
    data |= {"stop": dict(stop)} if stop else {}
    trusts.allow(data)
    return sweep.plain_trainable(data)


def evaluate(
    what: str | Path | Result | TrainedAgent,
    episodes: int = 100,
    *,
    env: EnvLike | None = None,
    env_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    deterministic: bool = True,
    num_workers: int = 0,
    trust: bool = False,
) -> Score:
    """Play episodes and return the score: `.mean`, its 95 % interval `.low` and `.high`, `.returns` and `.lengths`.

    `what`: a run, `RUN/best`, a checkpoint, the result of a training, or an agent; `env`: another environment with the same
    spaces. Episode i starts from `seed + i` for any number of workers. `trust`: import any code that a stored run names
    (docs/security.md).
    """
    from ludus.experiments.evaluation import rollout as rollouts

    name = None if env is None else env_name(env)
    with trusts.consent(trust, str(what)):
        return rollouts.evaluate(
            what, episodes, env=name, env_config=env_config, seed=seed, deterministic=deterministic, workers=num_workers
        )


def rollout(
    where: str | Path,
    episodes: int = 10,
    *,
    out: str | Path | None = None,
    video: str | Path | None = None,
    video_grid: bool = False,
    depth: bool = False,
    steps: int | None = None,
    env: EnvLike | None = None,
    env_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    deterministic: bool = True,
    save_info: bool = False,
    num_workers: int = 0,
    trust: bool = False,
) -> RolloutResult:
    """Play a run or checkpoint; return returns and lengths, and write every step to `out` (see `read_rollout`) and a video.

    `trust`: import any code that the stored run names (docs/security.md).
    """
    from ludus.experiments.evaluation import rollout as rollouts

    options = {"seed": seed, "deterministic": deterministic, "save_info": save_info, "depth": depth}
    name = None if env is None else env_name(env)
    files = rollouts.RolloutFiles(None if out is None else Path(out), None if video is None else Path(video), video_grid)
    with trusts.consent(trust, str(where)):
        *_, stage = rollouts.rollout_spec(where, env=name, env_config=env_config, **options)
        return rollouts.rollout(stage, episodes, max_steps=steps, files=files, workers=num_workers)


def battle(
    a: str | Path | Result | TrainedAgent,
    b: str | Path | Result | TrainedAgent,
    games: int = 200,
    *,
    swap_sides: bool = True,
    mode: str | None = None,
    lineup: str | Sequence[Any] | None = None,
    every: int | None = None,
    seconds: int | None = None,
    seed: int = 0,
    deterministic: bool = True,
    record: str | Path | None = None,
    video: int = 0,
    server: str | None = None,
    game: str | None = None,
    trust: bool = False,
    **place: Any,
) -> BattleResult:
    """Play matches between two players; return `.win_rate` of `a` with `.interval`, `.sides`, `.heroes` and `.games`.

    A player is a run, a checkpoint, `RUN@VERSION`, the result of `ludus.train` or `ludus.load`, `http://host:port`,
    `rule:hard`, or `script:module:function`. `place`: further settings of the environment (`env`, `camps`, `options`, `parallel`) or of the server
    (`token_file`, `advertise`, `limit_s`). `trust`: import any code that stored runs name (docs/security.md).
    """
    from ludus.tournament import battle as battles
    from ludus.tournament.contestants import contestant
    from ludus.tournament.gamecore_matches import GameLocation
    from ludus.tournament.settings import BattleSettings, RecordingSettings, read_lineups

    settings = BattleSettings(games, swap_sides, mode, read_lineups(lineup), every, seconds, seed, deterministic)
    recording_settings = RecordingSettings(None if record is None else Path(record), videos=video)
    with trusts.consent(trust, a, b):
        return battles.battle(contestant(a), contestant(b), settings, recording_settings, GameLocation(server, game, **place))


def read_rollout(path: str | Path) -> list[dict[str, Array]]:
    """Read the episodes of a rollout file, each as a dict of columns: `observation`, `action`, `reward` …, `final_observation`."""
    from ludus.experiments.evaluation import rollout_file as steps

    return steps.read_rollout(path)
