"""Options of `ludus train` as Coach has them: what each one is here, or a sentence that says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.config.aliases import rllib_keys
from ludus.errors import UsageError

WORDS = "ludus.words"
"""Where a command keeps the words that it was given, in `ctx.meta`."""

NOTED: Mapping[tuple[str, ...], str] = {
    ("-tb", "--tensorboard"): "numbers always go to TensorBoard, too: tensorboard --logdir runs",
    ("-ns", "--no_summary"): "there is no prompt at the end",
    ("-d", "--open_dashboard"): "there is none to open; look with  ludus status  or  tensorboard --logdir runs",
    ("--dump_worker_logs",): "the logs of all processes are always kept",
    ("--print_networks_summary",): "the network is described in models/ of the run",
    ("-onnx", "--export_onnx_graph"): "a run is exported when it is asked for: ludus export RUN",
    ("--nocolor",): "what is not shown on a terminal has no colours; NO_COLOR=1 removes the others",
}
"""Options that change nothing → why."""

REFUSED: Mapping[tuple[str, ...], str] = {
    ("-r", "--render"): "training is not rendered; use ludus rollout RUN --video",
    ("-dg", "--dump_gifs"): "training is not recorded; use ludus rollout RUN --video",
    ("-dm", "--dump_mp4"): "training is not recorded; use ludus rollout RUN --video",
    ("--play",): "playing by hand is not supported; connect your own game: docs/games.md",
    ("--evaluate",): "a run is evaluated by  ludus rollout RUN --episodes 20",
    ("-et", "--environment_type"): "an environment is named itself: -lvl ENV, or ludus train ENV",
    ("-crf", "--checkpoint_restore_file"): "a checkpoint is a directory here: -crd RUN/checkpoints/000120",
    ("-tfv", "--tf_verbosity"): "it is of TensorFlow, and networks are PyTorch's; leave it out",
    ("--verbosity",): "use -v for more log output, -vv for everything",
}
"""Options that cannot be → what to do."""


def names(table: Mapping[tuple[str, ...], str]) -> list[str]:
    return [name for row in table for name in row]


def remarks(words: Sequence[str]) -> list[str]:
    """About the options that change nothing. Raises UsageError for one that cannot be."""
    said = set(words)
    for row, why in REFUSED.items():
        for name in row:
            if name in said:
                raise UsageError(f"{name} is not here: {why}.")
    return [f"{name} changes nothing: {why}." for row, why in NOTED.items() for name in row if name in said]


@dataclass(frozen=True)
class Asked:
    """Options that change the experiment."""

    save_every_s: int | None = None
    until_solved: bool = False
    use_cpu: bool = False
    evaluation_worker: bool = False

    def overrides(self) -> list[str]:
        """As --set writes them."""
        return [
            *([f"checkpoint_time_s={self.save_every_s}"] if self.save_every_s is not None else []),
            *(["config.learner_device=cpu", "config.inference_device=cpu", "config.num_gpus=0"] if self.use_cpu else []),
            *(["config.evaluation_num_workers=1"] if self.evaluation_worker else []),
        ]

    def given(self) -> dict[str, Any]:
        """Option → value, or None."""
        flags = {"-asc": self.until_solved, "-c": self.use_cpu, "-ew": self.evaluation_worker}
        return {"-s": self.save_every_s} | {name: is_given or None for name, is_given in flags.items()}


def solved_at(data: Mapping[str, Any]) -> float:
    """The return at which an experiment has done its work: its own target, or that of its environment. Raises UsageError."""
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
    """Besides what ends it anyway. The same as --set writes it."""
    stop, wanted = data.get("stop"), solved_at(data)
    data["stop"] = {**(stop if isinstance(stop, Mapping) else {}), "episode_return_mean": wanted}
    return f"stop.episode_return_mean={wanted}"


# -- a fleet ------------------------------------------------------------------------------------------------------------

_DESCRIBING: Mapping[str, str] = {
    "env": "", "file": "-f", "preset": "-p", "level": "-lvl", "experiment": "--experiment", "env_option": "--env", "run": "--run",
    "stop": "--stop", "num_envs": "--num-envs", "num_gpus": "--num-gpus", "seed": "--seed", "config": "--config",
    "custom_parameter": "-cp", "set_": "--set", "checkpoint_freq": "--checkpoint-freq",
    "keep_checkpoints_num": "--keep-checkpoints-num",
}  # fmt: skip
"""Parameter of `ludus train` → option of `ludus fleet learner`, which describes the same experiment."""
_SAYING = {"quiet": "--quiet", "json_": "--json", "debug": "--debug", "verbose": "-v"}
_HANDLED = {
    "distributed", "distributed_config", "experiment_name", "num_workers", "num_cpus", "noted", "refused", "track", "temp_dir",
    "save_secs", "until_solved", "use_cpu", "evaluation_worker", "checkpoint_at_end", "queue_trials", "torch", "eager", "trace",
    "no_ray_ui", "redis_password", "ray_num_gpus", "trust",
}  # fmt: skip
"""What the fleet is told in another way, or need not be told."""
_NOT_WITH_A_FLEET: Mapping[str, str] = {
    "resume": "rerun the same command to resume",
    "restore": "a fleet starts a new run or resumes the existing one",
    "local_dir": "the location of the run is set in the -dcp file (data_store)",
    "project": "the location of the run is set in the -dcp file (data_store)",
    "trial": "-e names the run",
    "address": "its workers need no Ray",
    "local_mode": "it is many processes",
    "num_learners": "it has one learner",
    "num_samples": "it trains one run",
}


def learner_words(given: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The words of `ludus fleet learner` for the same experiment. `given`: parameter → value of those on the command line.

    Raises UsageError for one that a fleet cannot have.
    """
    for name, value in given.items():
        if name in _NOT_WITH_A_FLEET:
            raise UsageError(f"--{name.replace('_', '-')} {value} cannot stand beside -dc: {_NOT_WITH_A_FLEET[name]}.")
        if name not in _DESCRIBING and name not in _SAYING and name not in _HANDLED:
            raise UsageError(f"--{name.replace('_', '-').rstrip('-')} cannot stand beside -dc.", "Leave it out.")
    _check_overrides(given)
    at_end = given.get("checkpoint_at_end")
    more = [*overrides, *([] if at_end is None else [f"checkpoint_at_end={str(at_end).lower()}"])]
    words: list[str] = [word for assignment in more for word in ("--set", assignment)]
    for name, option in _DESCRIBING.items():
        value = given.get(name)
        for one in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            words += [*([option] if option else []), _absolute(name, str(one))]
    for name, option in _SAYING.items():
        words += [option] * int(given.get(name) or 0)
    if any(_PASSWORD.search(word) for word in words):
        raise UsageError(
            "There is a password in a URL among the words of this command, and a fleet's are written down.",
            "Give it in the environment, or in a file.",
        )
    return words


_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_OVERRIDDEN = {"memory": "Redis is set in the -dcp file (redis_url)", "num_workers": "the number of workers is set by -n"}


def _check_overrides(given: Mapping[str, Any]) -> None:
    """--set and -cp are stronger than what the fleet itself says."""
    for option, path in _overridden(given):
        key = path.removeprefix("config.")
        present = rllib_keys.canonical_name(rllib_keys.EXPERIMENT if key == "memory" else rllib_keys.CONFIG, key)
        if present in _OVERRIDDEN:  # its value is not shown: it may be a URL with a password
            raise UsageError(f"{option} {path} cannot stand beside -dc: {_OVERRIDDEN[present]}.", "Leave it out.")


def _overridden(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from ludus.compat.coach.overrides import assignments

    yield from (("--set", assignment.partition("=")[0].strip()) for assignment in given.get("set_") or ())
    yield from (("-cp", each.path) for text in given.get("custom_parameter") or () for each in assignments(text))


def _absolute(name: str, word: str) -> str:
    """Files are found from wherever a process begins."""
    from ludus.compat.coach import preset_file

    path, rest = (preset_file.split(word) if name == "preset" else None) or (Path(word), "")
    return f"{path.resolve()}{rest}" if name in ("file", "preset") and path.is_file() else word


def workers_of_fleet(workers: int | str | None) -> int:
    if workers is None:
        return 1
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(f"-n {workers}: a fleet has 1 worker or more.")
    return workers


def hand_over(
    data: Mapping[str, Any],
    given: Mapping[str, Any],
    overrides: Sequence[str],
    name: str | None,
    workers: int | str | None,
    config_path: Path | None,
    quiet: bool,
    models: Path | None = None,
) -> None:
    """Train it as a fleet. `models`: where models of the user's own are. Raises what `run_distributed` raises, typer.Exit at its end among them."""
    from ludus.cli.training.distributed import run_distributed
    from ludus.cli.training.train import is_sweep

    words = learner_words(given, overrides)
    if is_sweep(data):
        raise UsageError("This experiment is a sweep, and -dc trains one run.", "Give every key one value.")
    number, as_json = workers_of_fleet(workers), bool(given.get("json_"))
    run_distributed(
        arguments=words, name=name, workers=number, config_path=config_path, quiet=quiet, as_json=as_json, models=models
    )
