"""The list of machines of a run: `learner.iplist` as it has always been, or the same as YAML.

    10.0.0.2 root 36000 1            address or name, user, port of SSH, slots; what is missing at the end has a default

    nodes:
      - {host: node2, user: root, port: 36000, slots: 1}
      - {host: node1, role: actor, actors: 6}

The first machine is the head. It is read, never executed, and holds no secrets.
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

Part = Literal["learner", "actor"]

COLUMNS = ("host", "user", "port", "slots")
KEYS: Mapping[str, str] = {
    "host": "its address or name",
    "user": "who logs in there; default: what SSH is configured to",
    "port": "of its SSH; default: 22",
    "slots": "processes that it is meant for: on the first machine, learners; default: 1",
    "role": "learner or actor; the first is a learner",
    "actors": "workers that it has room for",
    "address": "as the other machines reach it, when that is not its host",
    "python": "its interpreter, when it has another one than the rest",
}
MAX_NODES = 1000
MAX_SLOTS = 4096

_MAX_BYTES = 200_000
_FORM = "A line is `address user port slots`, for example `10.0.0.2 root 22 1`."
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@\\-]{0,63}\$?")
_NUMBERS = re.compile(r"[0-9.]+")
_EVERYBODY = ipaddress.IPv4Address("255.255.255.255")
_EXAMPLES = ("learner_ip", "node_ip", "your_ip", "ip")
"""What tutorials have in the place of an address."""


@dataclass(frozen=True)
class Listed:
    """A machine of the list. `actors`: workers that it has room for, where the list says so. `line`: where it stands."""

    node: SshNode
    role: Part = "learner"
    actors: int = 0
    line: int = 0


@dataclass(frozen=True)
class NodeList:
    """At least one machine; the first is the head. `source`: the file, for messages."""

    entries: tuple[Listed, ...]
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


def load_iplist(path: Path) -> NodeList:
    """Raises ConfigError with the line that is wrong."""
    text = read_text(path, _MAX_BYTES, _FORM)
    return read_iplist(text, str(path))


def read_iplist(text: str, source: str = "the list") -> NodeList:
    """YAML where the file is called so, or begins with `nodes:`. Raises ConfigError."""
    is_yaml = source.endswith((".yaml", ".yml")) or re.match(r"(\s*(#[^\n]*)?\n|---[^\n]*\n)*nodes\s*:", text) is not None
    listed = _from_yaml(text, source) if is_yaml else _from_lines(text, source)
    if not listed:
        raise ConfigError(f"{source} names no machine.", _FORM)
    if len(listed) > MAX_NODES:
        raise ConfigError(f"{source} names {len(listed)} machines; at most {MAX_NODES} are possible.")
    known: dict[tuple[str, str, int], int] = {}
    for each in listed:
        same = (each.node.host.lower(), each.node.reached.lower(), each.node.port)
        if same in known:
            raise ConfigError(
                f"{source}, line {each.line}: {each.node.host} stands in line {known[same]} already.",
                "Name each machine once; its slots say how many processes it is meant for.",
            )
        known[same] = each.line
    return NodeList(tuple(listed), source)


# -- lines ----------------------------------------------------------------------------------------------------------------


def _from_lines(text: str, source: str) -> list[Listed]:
    found: list[Listed] = []
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
                given[name] = _digits(where, name, str(given[name]))
        found.append(_listed(where, number, given, first=not found))
    return found


def _digits(where: str, name: str, word: str) -> int:
    if not (word.isascii() and word.isdigit()) or len(word) > 9:
        raise ConfigError(f"{where}: the {name} is {word[:100]!r}, which is no number.", _FORM)
    return int(word)


# -- YAML -----------------------------------------------------------------------------------------------------------------


def _from_yaml(text: str, source: str) -> list[Listed]:
    data = parse_yaml(text, source)
    form = "It is `nodes:` with a list of `{host: …, user: …, port: …, slots: …}`."
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise ConfigError(f"{source}, line 1: there is no list `nodes`.", form)
    for key in data:
        if key != "nodes":
            raise ConfigError(f"{source}: unknown key {key!r}.", did_you_mean(str(key), ["nodes"]))
    found: list[Listed] = []
    for number, entry in zip(_lines_of(text), data["nodes"], strict=True):
        where = f"{source}, line {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: {entry!r} is not of the form {{host: …}}.", form)
        for key in entry:
            if key not in KEYS:
                raise ConfigError(f"{where}: unknown key {key!r}.", did_you_mean(str(key), KEYS))
        found.append(_listed(where, number, {key: value for key, value in entry.items() if value is not None}, first=not found))
    return found


def _lines_of(text: str) -> list[int]:
    """Where the entries of `nodes` begin; the text has been found to be sound."""
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in document.value:
        if key.value == "nodes":
            return [item.start_mark.line + 1 for item in value.value]
    return []


# -- one machine ----------------------------------------------------------------------------------------------------------


def _listed(where: str, line: int, given: Mapping[str, Any], *, first: bool) -> Listed:
    if "host" not in given:
        raise ConfigError(f"{where}: it has no host.", f"It is {KEYS['host']}.")
    node = SshNode(
        host=_address(where, "host", given["host"]),
        user=_word(where, "user", given.get("user", ""), lambda word: not word or _USER.fullmatch(word) is not None),
        port=_number(where, "port", given.get("port", 22), 1, 65535),
        slots=_number(where, "slots", given.get("slots", 1), 1, MAX_SLOTS),
        address=_address(where, "address", given["address"]) if given.get("address") else "",
        python=_word(where, "python", given.get("python", ""), lambda word: not word.startswith("-")),
    )
    role = given.get("role", "actor" if "actors" in given and not first else "learner")
    if role not in get_args(Part):
        raise ConfigError(f"{where}: the role is {role!r}.", f"It is one of: {', '.join(get_args(Part))}.")
    if first and role != "learner":
        raise ConfigError(f"{where}: the first machine is the head, where the learner runs, and its role is {role}.")
    actors = _number(where, "actors", given.get("actors", node.slots if role == "actor" else 0), 0, MAX_SLOTS)
    return Listed(node, role, actors, line)


def _address(where: str, name: str, given: object) -> str:
    word = given.strip() if isinstance(given, str) else ""
    bare = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    if bare.lower() in _EXAMPLES:
        raise ConfigError(f"{where}: {bare} is still what the example says.", "Put the address of the machine in its place.")
    if ":" in bare or _NUMBERS.fullmatch(bare):
        try:
            found = ipaddress.ip_address(bare)
        except ValueError:
            raise ConfigError(f"{where}: the {name} {bare[:100]!r} is no address.", _FORM) from None
        if not is_of_one(found):
            raise ConfigError(f"{where}: the {name} {bare} is not the address of one machine.", _FORM)
        return str(found)
    # What begins with a dash would be an option of ssh.
    if bare != word or len(bare) > 253 or not _HOST.fullmatch(bare):
        raise ConfigError(f"{where}: the {name} {str(given)[:100]!r} is neither an address nor the name of a machine.", _FORM)
    return bare


def is_of_one(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Not all addresses of whoever listens, nor a group of machines, nor everybody."""
    return not (address.is_unspecified or address.is_multicast or address == _EVERYBODY)


def _word(where: str, name: str, given: object, is_one: Callable[[str], bool]) -> str:
    if not isinstance(given, str) or not is_one(given) or not given.isprintable() or len(given) > 4096:
        raise ConfigError(f"{where}: the {name} is {str(given)[:100]!r}, which is none.", f"It is {KEYS[name]}.")
    return given


def _number(where: str, name: str, given: object, least: int, most: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        raise ConfigError(f"{where}: {name} is {str(given)[:100]}.", f"It is a number from {least} to {most}: {KEYS[name]}.")
    return given
