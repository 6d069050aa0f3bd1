"""A sentence about one key of an experiment, which knows where the key stands."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.errors import ConfigError


class Complaint(str):
    """The sentence. `path`: the key as it is written in the file, with dots; '' where it is about no single key."""

    path: str

    def __new__(cls, text: str, path: str = "") -> Complaint:
        out = super().__new__(cls, text)
        out.path = path
        return out

    def __reduce__(self) -> tuple[type[Complaint], tuple[str, str]]:
        return Complaint, (str(self), self.path)


class ConfigErrors(ConfigError):
    """All that is wrong with an experiment, a sentence for each key."""

    def __init__(self, complaints: str | Sequence[Complaint], hint: str = "") -> None:
        self.complaints = [Complaint(complaints)] if isinstance(complaints, str) else list(complaints)
        super().__init__("\n".join(self.complaints), hint)

    def __reduce__(self) -> tuple[type[ConfigErrors], tuple[list[Complaint], str]]:
        return ConfigErrors, (self.complaints, self.hint)
