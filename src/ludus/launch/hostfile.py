"""Hostfile: the list of machines of a run, as lines (`learner.iplist`) or as YAML.

    10.0.0.2 root 36000 1            address or name, user, SSH port, slots; trailing values may be left out

    nodes:
      - {host: node2, user: root, port: 36000, slots: 1}
      - {host: node1, role: actor, actors: 6}

The first machine is the head. The file is data only, and holds no secrets.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError
from ludus.io.yaml_documents import parse_yaml, read_text
from ludus.launch.ssh.backend import SshNode

MachineRole = Literal["learner", "actor"]

COLUMNS = ("host", "user", "port", "slots")
KEYS: Mapping[str, str] = {
    "host": "the address or name of the machine",
    "user": "the user to log in as; default: as configured in SSH",
    "port": "the SSH port; default: 22",
    "slots": "the number of processes, on the first machine of learners; default: 1",
    "role": "learner or actor; the first is a learner",
    "actors": "the number of workers",
    "address": "the address for the other machines, if it differs from host",
    "python": "the interpreter, if it differs from the others'",
}
MAX_NODES = 1000
MAX_SLOTS = 4096

_MAX_BYTES = 200_000
_FORM = "A line is `address user port slots`, for example `10.0.0.2 root 22 1`."
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@\\-]{0,63}\$?")
_NUMBERS = re.compile(r"[0-9.]+")
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_PLACEHOLDERS = ("learner_ip", "node_ip", "your_ip", "ip")
"""Placeholders for an address in tutorials."""


@dataclass(frozen=True)
class HostEntry:
    """A machine of the list. `actors`: its number of workers; 0 if not given. `line`: its line number."""

    node: SshNode
    role: MachineRole = "learner"
    actors: int = 0
    line: int = 0


@dataclass(frozen=True)
class Hostfile:
    """At least one machine; the first is the head. `source`: the file name in messages."""

    entries: tuple[HostEntry, ...]
    source: str = "the list"

    @property
    def nodes(self) -> tuple[SshNode, ...]:
        return tuple(entry.node for entry in self.entries)

    @property
    def head(self) -> SshNode:
        return self.entries[0].node

    @property
    def actors(self) -> int:
        return sum(entry.actors for entry in self.entries)


def load_hostfile(path: Path) -> Hostfile:
    """Raises ConfigError that names the invalid line."""
    text = read_text(path, _MAX_BYTES, _FORM)
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "the list") -> Hostfile:
    """Parse YAML if the file name says so or the text begins with `nodes:`, else lines. Raises ConfigError."""
    is_yaml = source.endswith((".yaml", ".yml")) or re.match(r"(\s*(#[^\n]*)?\n|---[^\n]*\n)*nodes\s*:", text) is not None
    entries = _parse_yaml_list(text, source) if is_yaml else _parse_lines(text, source)
    if not entries:
        raise ConfigError(f"{source} names no machine.", _FORM)
    if len(entries) > MAX_NODES:
        raise ConfigError(f"{source} names {len(entries)} machines; at most {MAX_NODES} are possible.")
    known: dict[tuple[str, str, int], int] = {}
    for each in entries:
        same = (each.node.host.lower(), each.node.node_address.lower(), each.node.port)
        if same in known:
            raise ConfigError(
                f"{source}, line {each.line}: {each.node.host} is already in line {known[same]}.",
                "Name each machine once, with its number of slots.",
            )
        known[same] = each.line
    return Hostfile(tuple(entries), source)


# -- lines ----------------------------------------------------------------------------------------------------------------


def _parse_lines(text: str, source: str) -> list[HostEntry]:
    found: list[HostEntry] = []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        where = f"{source}, line {number}"
        if len(words) > len(COLUMNS):
            raise ConfigError(f"{where}: {len(words)} words, {' '.join(words)[:100]!r}.", _FORM)
        given: dict[str, str | int] = dict(zip(COLUMNS, words, strict=False))
        for name in ("port", "slots"):
            if name in given:
                given[name] = _parse_number(where, name, str(given[name]))
        found.append(_parse_entry(where, number, given, first=not found))
    return found


def _parse_number(where: str, name: str, word: str) -> int:
    if not (word.isascii() and word.isdigit()) or len(word) > 9:
        raise ConfigError(f"{where}: the {name} is {word[:100]!r}, which is not a number.", _FORM)
    return int(word)


# -- YAML -----------------------------------------------------------------------------------------------------------------


def _parse_yaml_list(text: str, source: str) -> list[HostEntry]:
    data = parse_yaml(text, source)
    form = "Write `nodes:` with a list of `{host: …, user: …, port: …, slots: …}`."
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise ConfigError(f"{source}, line 1: there is no list `nodes`.", form)
    for key in data:
        if key != "nodes":
            raise ConfigError(f"{source}: unknown key {key!r}.", did_you_mean(str(key), ["nodes"]))
    found: list[HostEntry] = []
    for number, entry in zip(_entry_lines(text), data["nodes"], strict=True):
        where = f"{source}, line {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: {entry!r} is not of the form {{host: …}}.", form)
        for key in entry:
            if key not in KEYS:
                raise ConfigError(f"{where}: unknown key {key!r}.", did_you_mean(str(key), KEYS))
        found.append(
            _parse_entry(where, number, {key: value for key, value in entry.items() if value is not None}, first=not found)
        )
    return found


def _entry_lines(text: str) -> list[int]:
    """Return the line numbers of the entries of `nodes`. The text must be valid."""
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in document.value:
        if key.value == "nodes":
            return [item.start_mark.line + 1 for item in value.value]
    return []


# -- one machine ----------------------------------------------------------------------------------------------------------


def _parse_entry(where: str, line: int, given: Mapping[str, Any], *, first: bool) -> HostEntry:
    if "host" not in given:
        raise ConfigError(f"{where}: the host is missing.", f"Add host: {KEYS['host']}.")
    node = SshNode(
        host=_check_address(where, "host", given["host"]),
        user=_check_word(where, "user", given.get("user", ""), lambda word: not word or _USER.fullmatch(word) is not None),
        port=_check_number(where, "port", given.get("port", 22), 1, 65535),
        slots=_check_number(where, "slots", given.get("slots", 1), 1, MAX_SLOTS),
        address=_check_address(where, "address", given["address"]) if given.get("address") else "",
        python=_check_word(where, "python", given.get("python", ""), lambda word: not word.startswith("-")),
    )
    role = given.get("role", "actor" if "actors" in given and not first else "learner")
    if role not in get_args(MachineRole):
        raise ConfigError(f"{where}: the role is {role!r}.", f"Use one of: {', '.join(get_args(MachineRole))}.")
    if first and role != "learner":
        raise ConfigError(f"{where}: the first machine is the head, where the learner runs, and its role is {role}.")
    actors = _check_number(where, "actors", given.get("actors", node.slots if role == "actor" else 0), 0, MAX_SLOTS)
    return HostEntry(node, role, actors, line)


def _check_address(where: str, name: str, given: object) -> str:
    word = given.strip() if isinstance(given, str) else ""
    bare = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    if bare.lower() in _PLACEHOLDERS:
        raise ConfigError(f"{where}: {bare} is the placeholder of the example.", "Replace it by the address of the machine.")
    if ":" in bare or _NUMBERS.fullmatch(bare):
        try:
            found = ipaddress.ip_address(bare)
        except ValueError:
            raise ConfigError(f"{where}: the {name} {bare[:100]!r} is not a valid address.", _FORM) from None
        if not is_single_host(found):
            raise ConfigError(f"{where}: the {name} {bare} is not the address of one machine.", _FORM)
        return str(found)
    # A leading dash would make it an option of ssh.
    if bare != word or len(bare) > 253 or not _HOST.fullmatch(bare):
        raise ConfigError(f"{where}: the {name} {str(given)[:100]!r} is neither an address nor the name of a machine.", _FORM)
    return bare


def is_single_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return False for unspecified, multicast and broadcast addresses."""
    return not (address.is_unspecified or address.is_multicast or address == _BROADCAST)


def _check_word(where: str, name: str, given: object, is_one: Callable[[str], bool]) -> str:
    if not isinstance(given, str) or not is_one(given) or not given.isprintable() or len(given) > 4096:
        raise ConfigError(f"{where}: the {name} is {str(given)[:100]!r}, which is invalid.", f"It is {KEYS[name]}.")
    return given


def _check_number(where: str, name: str, given: object, least: int, most: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        raise ConfigError(f"{where}: {name} is {str(given)[:100]}.", f"Use a number from {least} to {most}: {KEYS[name]}.")
    return given
