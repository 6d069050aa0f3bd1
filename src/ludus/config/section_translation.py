"""Translation of one section of an experiment: other spellings of its keys become ours, with a notice for each key left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.config.aliases import sb3_cleanrl
from ludus.config.aliases.rllib_keys import CONFIG, RENAMED, TRANSLATED
from ludus.config.aliases.rllib_values import REPLACED, is_unset
from ludus.config.aliases.unsupported_keys import unsupported_keys
from ludus.config.problem import ConfigProblem
from ludus.config.search_values import is_search


@dataclass(frozen=True)
class KeyNotice:
    """A key that is rejected, redundant or ignored, and why."""

    path: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({_short(self.value)}) {self.why}".rstrip(".") + "."


@dataclass
class TranslatedSection:
    """A section with translated keys, and notices about the keys that were left out."""

    data: dict[str, Any] = field(default_factory=dict)
    spelled_as: dict[str, str] = field(default_factory=dict)
    """Key → its original spelling, where that differs."""
    rejected: list[KeyNotice] = field(default_factory=list)
    redundant: list[KeyNotice] = field(default_factory=list)
    """Keys left out because their value matches our behaviour."""
    ignored: list[KeyNotice] = field(default_factory=list)
    """Keys left out with a notice to the user."""
    conflicts: list[ConfigProblem] = field(default_factory=list)
    substitutions: list[ConfigProblem] = field(default_factory=list)
    """Notices about an algorithm that is replaced by another one."""
    other_sections: dict[str, Any] = field(default_factory=dict)
    """Values that belong to other sections: dotted path → value."""

    def problems(self) -> list[ConfigProblem]:
        return [*self.conflicts, *(ConfigProblem(str(refusal), refusal.path) for refusal in self.rejected)]

    def notices(self) -> list[ConfigProblem]:
        return [
            *self.substitutions,
            *(ConfigProblem(str(replace(each, why=f"is ignored: {each.why}")), each.path) for each in self.ignored),
        ]


def translate_section(section: str, data: Mapping[str, Any], known: Iterable[str]) -> TranslatedSection:
    """Translate one level of an experiment. `known`: keys of its schema, which take precedence over RLlib's meaning."""
    names, out = set(known), TranslatedSection()
    renamed, translated, foreign = RENAMED[section], TRANSLATED[section], unsupported_keys()[section]
    prefix = f"{section}." if section else ""
    scheduled = {
        renamed[key] for key, value in data.items() if key in renamed and key.endswith("_schedule") and value is not None
    }
    for key, value in data.items():
        name = renamed.get(key) or (resolve_name(key, names) if section == CONFIG else key)
        if section == CONFIG and key in REPLACED and is_unset(value):
            out.redundant.append(KeyNotice(prefix + key, value, "was not set in RLlib"))
        elif key.endswith("_schedule") and key in renamed and value is None:
            out.redundant.append(KeyNotice(prefix + key, value, "is no schedule"))
        elif key == name and name in scheduled:  # as it did in RLlib
            out.redundant.append(KeyNotice(prefix + key, value, "is overridden by its schedule"))
        elif is_search(value) and _changes_nothing(section, name, value, data, known=names):
            out.ignored.append(KeyNotice(prefix + key, value, "none of these values changes the training: it is one trial"))
        elif name in translated and not is_search(value):
            _translate(out, section, key, name, data)
        elif name not in names and name in foreign:
            same, why = foreign[name].matches_default(value), foreign[name].why
            target = out.redundant if same else out.ignored if foreign[name].ignored else out.rejected
            target.append(KeyNotice(prefix + key, value, _DEFAULT if same else why))
        else:
            _set_value(out, section, name, value, key)
    return out


def resolve_name(key: str, names: set[str]) -> str:
    """Return our name of a key whose meaning depends on the algorithm with the keys `names`; else the key itself."""
    return next((name for marker, name, _ in sb3_cleanrl.DEPENDING.get(key, ()) if marker in names), key)


_DEFAULT = "is already the default"


def _changes_nothing(section: str, name: str, value: Mapping[str, Any], data: Mapping[str, Any], *, known: set[str]) -> bool:
    """Whether all values of a searched key are left out, so that all trials would be the same."""
    ((kind, given),) = value.items()
    translate, foreign = TRANSLATED[section].get(name), unsupported_keys()[section].get(name)
    if kind not in ("grid_search", "choice") or not isinstance(given, list) or not given:
        return False
    if translate is None:
        return name not in known and foreign is not None and all(foreign.ignored or foreign.matches_default(one) for one in given)
    try:
        found = [translate(one, {**data, name: one}) for one in given]
    except ValueError:
        return False
    return all(isinstance(each, str) or not each for each in found)


def _translate(out: TranslatedSection, section: str, key: str, name: str, data: Mapping[str, Any]) -> None:
    path, value = f"{section}.{key}" if section else key, data[key]
    try:
        found = TRANSLATED[section][name](value, data)
    except ValueError as error:
        out.rejected.append(KeyNotice(path, value, str(error)))
        return
    if isinstance(found, str):
        out.ignored.append(KeyNotice(path, value, found))
        return
    if not found:
        out.redundant.append(KeyNotice(path, value, _DEFAULT))
    for target, given in found.items():
        _set_value(out, section, target, given, key)


def _set_value(out: TranslatedSection, section: str, path: str, value: Any, written: str) -> None:
    inside = section.removeprefix("config").removeprefix(".")
    name = path.removeprefix(f"{inside}.") if inside else path
    target = out.other_sections if "." in name else out.data
    if name in target and (target[name] != value or type(target[name]) is not type(value)):
        before = out.spelled_as.get(name, name)
        where = f"{section} sets" if section else "The experiment sets"
        sentence = f"{before!r} is {_short(target[name])}, and {written!r}, which means the same, is {_short(value)}. Keep one."
        out.conflicts.append(ConfigProblem(f"{where} {name!r} twice: {sentence}", f"{section}.{written}".lstrip(".")))
        return
    target[name] = value
    if written != name:
        out.spelled_as[name] = written


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
