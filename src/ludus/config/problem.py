"""Problems found in a config, each with the path of its key, and the error that carries all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.errors import ConfigError


class ConfigProblem(str):
    """A message about one key. `path`: the dotted key as written in the file; '' if no single key is concerned."""

    path: str

    def __new__(cls, text: str, path: str = "") -> ConfigProblem:
        out = super().__new__(cls, text)
        out.path = path
        return out

    def __reduce__(self) -> tuple[type[ConfigProblem], tuple[str, str]]:
        return ConfigProblem, (str(self), self.path)


class ConfigErrors(ConfigError):
    """All problems of an experiment."""

    def __init__(self, problems: str | Sequence[ConfigProblem], hint: str = "") -> None:
        self.problems = [ConfigProblem(problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint)

    def __reduce__(self) -> tuple[type[ConfigErrors], tuple[list[ConfigProblem], str]]:
        return ConfigErrors, (self.problems, self.hint)
