"""Reading experiment files (YAML, `<name>: {env, run, …}`). Values are not validated here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.errors import ConfigError
from ludus.io.yaml_documents import key_lines, parse_yaml

_MAX_YAML_BYTES = 1 << 20


def load_experiments(path: Path) -> dict[str, dict[str, Any]]:
    """Return the experiments of a YAML file by name, not yet validated. Raises ConfigError.

    Top-level keys that begin with a dot hold YAML anchors and are skipped.
    """
    data = parse_yaml(_read_text(path), str(path))
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


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_YAML_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        if len(content) <= _MAX_YAML_BYTES:
            raise ConfigError(f"{path} is not UTF-8 text.", "Save it as UTF-8.") from error
    if len(content) > _MAX_YAML_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_YAML_BYTES} bytes, the limit of an experiment file.")
    return text


def experiment_line_numbers(path: Path) -> dict[tuple[str, ...], int]:
    """Return (experiment, key, key …) → line number in the file."""
    return key_lines(_read_text(path))
