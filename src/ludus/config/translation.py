"""Translation of experiments to the schema's key names: other spellings (RLlib, SB3, CleanRL, Coach) become ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin

from ludus.config.aliases import rllib_algorithms, rllib_keys
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.schema import (
    AlgorithmConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    MultiAgentConfig,
    PreprocessConfig,
    ReplayBufferConfig,
    SelfPlayConfig,
    StopConfig,
    TargetConfig,
    TrackConfig,
    TuneConfig,
)
from ludus.config.section import ConfigSection
from ludus.config.section_translation import KeyNotice, TranslatedSection, translate_section

SECTIONS: Mapping[str, type[ConfigSection]] = {
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


def section_schemas(schema: type[AlgorithmConfig] = AlgorithmConfig) -> dict[str, type[ConfigSection]]:
    """Return dotted path → schema of all sections of an experiment; `schema` is that of its algorithm."""
    return {**SECTIONS, rllib_keys.CONFIG: schema}


def translate_experiment(data: Mapping[str, Any]) -> TranslatedSection:
    """Translate all sections of an experiment but `config`; an `env` inside `config` moves to the top."""
    out = translate_section(rllib_keys.EXPERIMENT, data, ExperimentConfig.model_fields)
    _translate_subsections(out, "", {rllib_keys.STOP: StopConfig})
    inner = out.data.get("config")
    if isinstance(inner, Mapping) and "env" in inner:  # as in RLlib's `tune.run(…, config={"env": …})`
        env = inner["env"]
        out.data["config"] = {key: value for key, value in inner.items() if key != "env"}
        if env is not None and out.data.setdefault("env", env) != env:
            twice = f"The experiment sets env twice: {out.data['env']!r}, and {env!r} in config. Keep one."
            out.conflicts.append(ConfigProblem(twice, "config.env"))
    for name in ("stop", "tune", "track", "config"):
        if name in out.data and out.data[name] is None:  # a section that was left empty
            del out.data[name]
    _translate_algorithm(out)
    return out


def _translate_algorithm(out: TranslatedSection) -> None:
    """Replace an algorithm of RLlib that is a special case of ours (A2C, SimpleQ); keys that are given take precedence."""
    written, inner = out.data.get("run"), out.data.get("config", {})
    special = rllib_algorithms.find_special_case(written)
    if special is None or not isinstance(inner, Mapping):
        return
    given = {rllib_keys.canonical_name(rllib_keys.CONFIG, key): value for key, value in inner.items()}
    implied = {key: value for key, value in special.config(given).items() if key not in given or isinstance(value, Mapping)}
    rest = {key: value for key, value in inner.items() if key != "microbatch_size"}
    out.data |= {"run": special.run, "config": {**rest, **implied}}
    out.spelled_as["run"] = str(written)
    out.substitutions.append(ConfigProblem(f"run: {written} is trained as {special.notice}.", "run"))


def translate_config(data: Mapping[str, Any], schema: type[AlgorithmConfig] = AlgorithmConfig) -> TranslatedSection:
    """Translate the `config` section and the sections inside it."""
    out = translate_section(rllib_keys.CONFIG, data, key_names(schema))
    below = (rllib_keys.MODEL, rllib_keys.EVALUATION, rllib_keys.MULTIAGENT)
    _translate_subsections(out, "config.", {section.removeprefix("config."): SECTIONS[section] for section in below})
    for name in ("model", "evaluation_config", "env_config", "preprocess", "wrappers"):
        if name in out.data and out.data[name] is None:
            del out.data[name]
    if out.data.get("batch_mode") == "complete_episodes" and schema is not AlgorithmConfig:
        _translate_complete_episodes(out, schema)
    return out


def _translate_complete_episodes(out: TranslatedSection, schema: type[AlgorithmConfig]) -> None:
    """Adapt `batch_mode: complete_episodes`: replay buffers sample single steps; synchronous sampling uses this process."""
    if schema.replays:
        del out.data["batch_mode"]
        out.ignored.append(KeyNotice("config.batch_mode", "complete_episodes", "single steps are drawn from the replay buffer"))
        return
    workers, sampling = out.data.get("num_workers"), out.data.get("sampling", schema.model_fields["sampling"].default)
    if isinstance(workers, int) and not isinstance(workers, bool) and workers > 0 and sampling == "sync":
        out.data["num_workers"] = 0
        path = f"config.{out.spelled_as.get('num_workers', 'num_workers')}"
        out.ignored.append(KeyNotice(path, workers, "with batch_mode: complete_episodes one process samples and learns"))


def canonical_config(data: Mapping[str, Any], schema: type[AlgorithmConfig] | None = None) -> dict[str, Any]:
    """Return the `config` section with translated keys. Raises ConfigError if a key is set twice with different values.

    With a schema, unsupported keys are errors too; without, they are kept, since the algorithm may define them.
    """
    translated = translate_config(data, schema or AlgorithmConfig)
    problems = translated.conflicts if schema is None else translated.problems()
    if problems:
        raise ConfigErrors(problems)
    for notice in translated.rejected:
        section, _, key = notice.path.removeprefix("config.").rpartition(".")
        (translated.data.setdefault(section, {}) if section else translated.data)[key] = notice.value
    return translated.data


def _translate_subsections(out: TranslatedSection, prefix: str, below: Mapping[str, type[ConfigSection]]) -> None:
    """Translate the sections inside a section, and merge keys of the outer section that belong into them."""
    for name, schema in below.items():
        inner = out.data.get(name)
        if isinstance(inner, Mapping):
            found = translate_section(prefix + name, inner, key_names(schema))
            out.rejected += found.rejected
            out.redundant += found.redundant
            out.ignored += found.ignored
            out.conflicts += found.conflicts
            out.other_sections |= {path: value for path, value in found.other_sections.items() if "." in path}
            out.spelled_as |= {f"{name}.{key}": f"{name}.{written}" for key, written in found.spelled_as.items()}
            out.data[name] = found.data
    for path, value in out.other_sections.items():
        name, _, key = path.partition(".")
        inner = out.data.get(name) or {}
        if not isinstance(inner, Mapping):
            continue  # the section itself is wrong, which its schema reports
        section = out.data[name] = dict(inner)
        if section.setdefault(key, value) != value:
            written = f"{prefix}{out.spelled_as.get(path, path)}"
            twice = f"{prefix}{path} is {section[key]!r}, and {written}, which means the same, is {value!r}. Keep one."
            out.conflicts.append(ConfigProblem(twice, written))


def key_names(schema: type[ConfigSection]) -> set[str]:
    """Return the keys of a section and the aliases of its fields."""
    return {*schema.model_fields} | {field.alias for field in schema.model_fields.values() if field.alias}


def nested_schema(annotation: Any) -> type[ConfigSection] | None:
    """Return the section schema inside an annotation such as `dict[str, SeatConfig] | None`."""
    if get_origin(annotation) is None:
        return annotation if isinstance(annotation, type) and issubclass(annotation, ConfigSection) else None
    return next((found for part in get_args(annotation) if (found := nested_schema(part)) is not None), None)


def all_spellings(schema: type[ConfigSection]) -> list[str]:
    """Return every accepted spelling of every key of a section, for error messages."""
    names = key_names(schema) - {"lambda_"}
    kind = next((s for s, there in SECTIONS.items() if there is schema), "")
    if issubclass(schema, AlgorithmConfig):
        kind = rllib_keys.CONFIG
    renamed = rllib_keys.RENAMED.get(kind, {}) if kind or schema is ExperimentConfig else {}
    translated = rllib_keys.TRANSLATED.get(kind, {}) if renamed else {}
    return sorted(names | {key for key, name in renamed.items() if name in names and key != "lambda_"} | set(translated))
