"""Reads the experiments of a command, or of `ludus.train`, from a YAML file, a Coach preset file or a preset, and applies its options.

Validates nothing, and imports other modules only when they are used: every command imports this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.envs.registry import EnvLike

log = logging.getLogger(__name__)

Experiments = dict[str, dict[str, Any]]
_TENSORFLOW = ("tensorflow", "mxnet")


@dataclass(frozen=True)
class ExperimentSource:
    """Experiments that were read but not validated."""

    experiments: Experiments
    shown: str
    parent: Path
    """Directory in which custom models are searched."""
    preset: bool = False
    """Whether it is a named preset."""
    file: Path | None = None
    """The YAML file to which line numbers of errors refer."""

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of a command that change the experiments of its file; each replaces what the earlier ones set."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section `config`, of --config."""
    top: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the experiment itself, of single options; None: not given."""
    stop: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section `config`, of single options; None: not given."""
    custom: Sequence[str] = ()
    """Assignments of -cp, in the terms of Coach."""
    assignments: Sequence[str] = ()
    """Assignments of --set: `key=value`."""


def read_source(file: Path | None, preset: str | None, level: str | None = None) -> ExperimentSource | None:
    """Read the experiments of -f or -p; None if neither is given. Raises UsageError, ConfigError, NotFound."""
    if file is None and preset is None:
        return None
    from ludus.compat.coach import preset_file
    from ludus.config.experiment_file import load_experiments
    from ludus.experiments.source import preset_index

    if file is not None and str(file) in _TENSORFLOW and not file.exists():
        raise UsageError(f"-f {file}: -f takes a YAML file, and all networks use PyTorch.", "Leave it out.")
    if preset is not None and file is not None:
        raise UsageError(f"-f {file} and -p {preset} both name an experiment.", "Keep one.")
    if preset is not None and preset_file.split(preset) is not None:
        path, found = preset_file.load(preset)
        return _with_level(ExperimentSource(found, str(path), path.parent), level)
    if preset is not None and (preset.endswith((".yaml", ".yml")) or Path(preset).is_file()):
        file = Path(preset)
    if file is not None:
        return _with_level(ExperimentSource(load_experiments(file), str(file), file.parent, file=file), level)
    assert preset is not None
    return ExperimentSource(preset_index.experiments(preset, level), f"the preset {preset}", Path(), preset=True)


def training_data(
    env: EnvLike | None,
    run: str | None,
    stop: Mapping[str, float] | None,
    *,
    preset: str | None,
    file: str | Path | None,
    experiment: str | None,
    name: str | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The experiment of `ludus.train`, from a preset or file and the keyword arguments. Raises UsageError, ConfigError."""
    from ludus.config.aliases import rllib_keys
    from ludus.config.aliases.sb3_cleanrl import TOTALS
    from ludus.config.schema import ExperimentConfig
    from ludus.envs.registry import env_name

    top = rllib_keys.EXPERIMENT
    names = {key: rllib_keys.canonical_name(top, key) for key in settings}
    if preset is not None and file is not None:
        raise UsageError(f"preset={preset!r} and file={str(file)!r} both name an experiment.", "Keep one.")
    beside = {
        key: value
        for key, value in settings.items()
        if names[key] in ExperimentConfig.model_fields or key in rllib_keys.TRANSLATED[top]
    }
    config = {key: value for key, value in settings.items() if key not in beside}
    ends = {**(stop or {}), **{key: beside.pop(key) for key in TOTALS if key in beside}}
    named = None if env is None else env_name(env)
    source = read_source(None if file is None else Path(file), preset, None if preset is None else named)
    if source is None and named is None and "env" not in (names[key] for key in beside):
        raise UsageError("Which environment?", 'ludus.train("CartPole-v1"), or a preset=… or file=… that names one.')
    options = ExperimentOptions(config=config, top={"env": named, "run": run, **beside}, stop=ends)
    found = experiments_from(source, options, experiment=experiment, name=name)
    if len(found) > 1:
        raise UsageError(f"{source} holds {len(found)} experiments: {', '.join(found)}.", "Say which: experiment=…")
    if source is not None:
        from ludus.models.custom.loader import add_search_directory

        add_search_directory(source.parent)
    ((called, data),) = found.items()
    return {"name": called, **data}


def _with_level(source: ExperimentSource, level: str | None) -> ExperimentSource:
    if level is not None:
        for data in source.experiments.values():
            data.pop("environment", None)
            data["env"] = level
    return source


def experiments_from(
    source: ExperimentSource | Path | None,
    options: ExperimentOptions,
    *,
    experiment: str | None = None,
    name: str | None = None,
    say: Callable[[str], None] = log.warning,
) -> Experiments:
    """Return the experiments of the source, changed by the options. `experiment`: only this one; `name`: its new name."""
    from ludus.config.overrides import apply_override
    from ludus.config.translation import translate_experiment

    if isinstance(source, Path):
        source = read_source(source, None)
    found: Experiments = dict(source.experiments) if source is not None else {name or "default": {}}
    if experiment is not None:
        if experiment not in found:
            from ludus.core.plugins import did_you_mean

            raise UsageError(f"There is no experiment {experiment!r} in {source}.", did_you_mean(experiment, found))
        found = {experiment: found[experiment]}
    if name is not None and source is not None:
        if len(found) > 1:
            raise UsageError(f"--experiment-name is one name, and {source} holds {len(found)} experiments.", "Add --experiment.")
        found = {name: next(iter(found.values()))}
    for data in found.values():
        before, env = _batch_of(data), data.get("env")
        _apply(data, options)
        _customize(data, options.custom)
        for assignment in options.assignments:
            apply_override(data, assignment)
        if "env" not in translate_experiment(data).data and source is None:
            raise UsageError("Which environment?", "ludus train CartPole-v1   or   ludus train -f experiment.yaml")
        if source is not None and source.preset and data.get("env") != env:
            data.pop("target", None)  # it was measured in another environment
        if source is not None and source.preset and _batch_of(data) == before:
            _round_batch(data, source, say)
    from ludus.experiments.validation.validate import trust_names

    trust_names(found)
    return found


def _apply(data: dict[str, Any], options: ExperimentOptions) -> None:
    from ludus.config.overrides import remove_spellings

    given = {key: value for key, value in options.top.items() if value is not None}
    stop = {"stop": dict(options.stop)} if options.stop else {}
    remove_spellings(data, "", [*given, *stop])
    data |= given | stop
    inner = data.get("config")
    if inner is None or isinstance(inner, dict):
        data["config"] = inner = dict(inner or {})
        for given_keys in (options.config, {key: value for key, value in options.settings.items() if value is not None}):
            more = _canonical_keys(given_keys, data)
            remove_spellings(inner, "config", more)
            inner.update(more)


def _canonical_keys(settings: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename SB3 keys whose meaning depends on the algorithm, for the algorithm of `data`."""
    from ludus.config.aliases import sb3_cleanrl
    from ludus.config.section_translation import resolve_name
    from ludus.config.translation import key_names, translate_experiment
    from ludus.experiments.validation import validate

    run = translate_experiment(data).data.get("run", "PPO")
    if not sb3_cleanrl.DEPENDING.keys() & settings.keys() or not isinstance(run, str):
        return dict(settings)
    try:
        names = key_names(validate.algorithm_of(run).Config)
    except UsageError:  # an unknown algorithm, which validation reports
        return dict(settings)
    return {resolve_name(key, names): value for key, value in settings.items()}


def _customize(data: dict[str, Any], custom: Sequence[str]) -> None:
    if not custom:
        return
    from ludus.compat.coach.overrides import translate_assignments
    from ludus.config.overrides import set_value
    from ludus.config.translation import translate_experiment

    run = str(translate_experiment(data).data.get("run", "PPO"))
    for text in custom:
        for path, value in translate_assignments(text, run):
            set_value(data, path, value, f"-cp {path}")


def _batch_of(data: Mapping[str, Any]) -> Any:
    inner = data.get("config")
    return inner.get("train_batch_size") if isinstance(inner, Mapping) else None


def _round_batch(data: dict[str, Any], source: ExperimentSource, say: Callable[[str], None]) -> None:
    """Round the batch of a preset, which was written for one process, to a multiple of what its workers sample."""
    inner = data["config"]
    workers, batch = inner.get("num_workers"), inner.get("train_batch_size")
    envs, steps = inner.get("num_envs_per_worker", 1), inner.get("rollout_fragment_length") or 1
    numbers = (workers, batch, envs, steps)
    if data.get("run") == "DQN" or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        return
    unit = max(1, workers) * envs * steps
    if batch % unit:
        inner["train_batch_size"] = max(1, round(batch / unit)) * unit
        say(
            f"train_batch_size is {inner['train_batch_size']}, not {batch} as in {source}: a multiple of the steps that {workers} workers "
            f"with {envs} environments sample together"
        )
