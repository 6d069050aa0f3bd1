"""Coach's options of `ludus train`: their equivalent here, or the reason why an option is ignored or not supported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ludus.config.aliases import rllib_keys
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.experiments.source.experiment_source import Experiments, ExperimentSource

WORDS = "ludus.words"
"""Key of `ctx.meta` under which a command stores its command line."""

IGNORED: Mapping[tuple[str, ...], str] = {
    ("-tb", "--tensorboard"): "metrics are always written for TensorBoard: tensorboard --logdir runs",
    ("-ns", "--no_summary"): "there is no prompt at the end",
    ("-d", "--open_dashboard"): "there is no dashboard; use  ludus status  or  tensorboard --logdir runs",
    ("--dump_worker_logs",): "the logs of all processes are always kept",
    ("--print_networks_summary",): "the network is described in models/ of the run",
    ("-onnx", "--export_onnx_graph"): "runs are exported by a separate command: ludus export RUN",
    ("--nocolor",): "colours are used only on a terminal; NO_COLOR=1 removes them there",
}
"""Options that change nothing → reason."""

UNSUPPORTED: Mapping[tuple[str, ...], str] = {
    ("-r", "--render"): "training is not rendered; use ludus rollout RUN --video",
    ("-dg", "--dump_gifs"): "training is not recorded; use ludus rollout RUN --video",
    ("-dm", "--dump_mp4"): "training is not recorded; use ludus rollout RUN --video",
    ("--play",): "playing by hand is not supported; connect your own game: docs/games.md",
    ("--evaluate",): "a run is evaluated by  ludus rollout RUN --episodes 20",
    ("-et", "--environment_type"): "name the environment itself: -lvl ENV, or ludus train ENV",
    ("-crf", "--checkpoint_restore_file"): "a checkpoint is a directory here: -crd RUN/checkpoints/000120",
    ("-tfv", "--tf_verbosity"): "it is for TensorFlow, and networks use PyTorch; leave it out",
    ("--verbosity",): "use -v for more log output, -vv for everything",
}
"""Options that are not supported → alternative."""


def names(table: Mapping[tuple[str, ...], str]) -> list[str]:
    return [name for row in table for name in row]


def notices(words: Sequence[str]) -> list[str]:
    """One notice for each option that changes nothing. Raises UsageError for an unsupported one."""
    given = set(words)
    for row, why in UNSUPPORTED.items():
        for name in row:
            if name in given:
                raise UsageError(f"{name} is not supported: {why}.")
    return [f"{name} changes nothing: {why}." for row, why in IGNORED.items() for name in row if name in given]


@dataclass(frozen=True)
class CoachOverrides:
    """Coach's options that change the experiment."""

    save_every_s: int | None = None
    until_solved: bool = False
    use_cpu: bool = False
    evaluation_worker: bool = False

    def overrides(self) -> list[str]:
        """The same settings as values of --set."""
        return [
            *([f"checkpoint_time_s={self.save_every_s}"] if self.save_every_s is not None else []),
            *(["config.learner_device=cpu", "config.inference_device=cpu", "config.num_gpus=0"] if self.use_cpu else []),
            *(["config.evaluation_num_workers=1"] if self.evaluation_worker else []),
        ]

    def options(self) -> dict[str, Any]:
        """Option → value, or None if it was not given."""
        flags = {"-asc": self.until_solved, "-c": self.use_cpu, "-ew": self.evaluation_worker}
        return {"-s": self.save_every_s} | {name: is_given or None for name, is_given in flags.items()}


def target_return(data: Mapping[str, Any]) -> float:
    """The return at which an experiment counts as solved: its own target, or that of its environment. Raises UsageError."""
    from ludus.config.translation import translate_experiment

    found = translate_experiment(data).data
    target, env = found.get("target"), found.get("env")
    if isinstance(target, Mapping) and isinstance(target.get("return_mean"), (int, float)):
        return float(target["return_mean"])
    from ludus.envs.vector_env import reward_threshold

    known = reward_threshold(env) if isinstance(env, str) else None
    if known is None:
        raise UsageError(f"-asc: no target return is known for {env}.", "Set one: --stop episode_return_mean=…")
    return float(known)


def stop_when_solved(data: dict[str, Any]) -> str:
    """Add the solved return to the stop conditions of `data`; returns the same change as a value of --set."""
    stop, target = data.get("stop"), target_return(data)
    data["stop"] = {**(stop if isinstance(stop, Mapping) else {}), "episode_return_mean": target}
    return f"stop.episode_return_mean={target}"


# -- training as a fleet (-dc) ------------------------------------------------------------------------------------------

_EXPERIMENT_OPTIONS: Mapping[str, str] = {
    "env": "", "file": "-f", "preset": "-p", "level": "-lvl", "experiment": "--experiment", "env_option": "--env", "run": "--run",
    "stop": "--stop", "num_envs": "--num-envs", "num_gpus": "--num-gpus", "seed": "--seed", "config": "--config",
    "custom_parameter": "-cp", "set_": "--set", "checkpoint_freq": "--checkpoint-freq",
    "keep_checkpoints_num": "--keep-checkpoints-num",
}  # fmt: skip
"""Parameter of `ludus train` → the equivalent option of `ludus fleet learner`."""
_OUTPUT_OPTIONS = {"quiet": "--quiet", "json_": "--json", "debug": "--debug", "verbose": "-v"}
_HANDLED_ELSEWHERE = {
    "distributed", "distributed_config", "experiment_name", "num_workers", "num_cpus", "noted", "refused", "track", "temp_dir",
    "save_secs", "until_solved", "use_cpu", "evaluation_worker", "checkpoint_at_end", "queue_trials", "torch", "eager", "trace",
    "no_ray_ui", "redis_password", "ray_num_gpus", "trust",
}  # fmt: skip
"""Parameters that reach the fleet in another way, or that it does not need."""
_NOT_WITH_A_FLEET: Mapping[str, str] = {
    "resume": "rerun the same command to resume",
    "restore": "a fleet starts a new run or resumes the existing one",
    "local_dir": "the location of the run is set in the -dcp file (data_store)",
    "project": "the location of the run is set in the -dcp file (data_store)",
    "trial": "-e names the run",
    "address": "the workers of a fleet do not use Ray",
    "local_mode": "a fleet has several processes",
    "num_learners": "a fleet has one learner",
    "num_samples": "a fleet trains one run",
}


def learner_words(given: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The arguments of `ludus fleet learner` for the same experiment. `given`: parameter → value of those on the command line.

    Raises UsageError for an option that a fleet does not support.
    """
    for name, value in given.items():
        if name in _NOT_WITH_A_FLEET:
            raise UsageError(f"--{name.replace('_', '-')} {value} cannot be combined with -dc: {_NOT_WITH_A_FLEET[name]}.")
        if name not in _EXPERIMENT_OPTIONS and name not in _OUTPUT_OPTIONS and name not in _HANDLED_ELSEWHERE:
            raise UsageError(f"--{name.replace('_', '-').rstrip('-')} cannot be combined with -dc.", "Leave it out.")
    from ludus.compat.coach import preset_file

    _check_overrides(given)
    at_end = given.get("checkpoint_at_end")
    more = [*overrides, *([] if at_end is None else [f"checkpoint_at_end={str(at_end).lower()}"])]
    words: list[str] = [word for assignment in more for word in ("--set", assignment)]
    for name, option in _EXPERIMENT_OPTIONS.items():
        value = given.get(name)
        for one in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            path, rest = (preset_file.split(str(one)) if name == "preset" else None) or (Path(str(one)), "")
            is_file = name in ("file", "preset") and path.is_file()  # absolute: the fleet starts in other directories
            words += [*([option] if option else []), f"{path.resolve()}{rest}" if is_file else str(one)]
    for name, option in _OUTPUT_OPTIONS.items():
        words += [option] * int(given.get(name) or 0)
    if any(_PASSWORD.search(word) for word in words):
        raise UsageError(
            "The command line contains a URL with a password, and a fleet stores its command lines in files.",
            "Pass the password in the environment or in a file.",
        )
    return words


_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SET_BY_FLEET = {"memory": "Redis is set in the -dcp file (redis_url)", "num_workers": "the number of workers is set by -n"}


def _check_overrides(given: Mapping[str, Any]) -> None:
    """Raise UsageError where --set or -cp would override a setting of the fleet."""
    from ludus.compat.coach.overrides import parse_assignments

    set_ = (("--set", assignment.partition("=")[0].strip()) for assignment in given.get("set_") or ())
    custom = (("-cp", each.path) for text in given.get("custom_parameter") or () for each in parse_assignments(text))
    for option, path in (*set_, *custom):
        key = path.removeprefix("config.")
        present = rllib_keys.canonical_name(rllib_keys.EXPERIMENT if key == "memory" else rllib_keys.CONFIG, key)
        if present in _SET_BY_FLEET:  # the value is not printed: it may be a URL with a password
            raise UsageError(f"{option} {path} cannot be combined with -dc: {_SET_BY_FLEET[present]}.", "Leave it out.")


def fleet_workers(workers: int | str | None) -> int:
    if workers is None:
        return 1
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(f"-n {workers}: a fleet needs at least 1 worker.")
    return workers


def train_as_fleet(
    ctx: typer.Context,
    found: Experiments,
    source: ExperimentSource | None,
    overrides: Sequence[str],
    workers: int | str | None,
) -> NoReturn:
    """Train the experiment of this `ludus train` command with a learner and workers connected by Redis."""
    from ludus.cli.training.distributed import run_distributed
    from ludus.config.search_space import is_sweep

    if len(found) > 1:
        raise UsageError(f"There are {len(found)} experiments, and -dc trains one.", "Add --experiment.")
    given = {
        name: value for name, value in ctx.params.items() if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    words = learner_words(given, overrides)
    if is_sweep(next(iter(found.values()))):
        raise UsageError("This experiment is a sweep, and -dc trains one run.", "Give every key one value.")
    run_distributed(
        arguments=words,
        name=given.get("experiment_name"),
        workers=fleet_workers(workers),
        config_path=given.get("distributed_config"),
        quiet=bool(given.get("quiet")),
        as_json=bool(given.get("json_")),
        models=source.parent if source is not None else None,
    )
