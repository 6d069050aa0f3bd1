"""Requests to start a game, parsed and validated. No value of a request becomes a command, a path or a program option."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ludus.core.plugins import did_you_mean
from ludus.errors import Refused
from ludus.gamecore.server.catalogue import NAME, STATE_NAME, Catalogue

ANY = "any"
"""Value of `start_from`: any saved state."""

MAX_CAMPS, MAX_HEROES, MAX_LIST = 16, 64, 64
MAX_FRAMES = 1_000_000_000
MAX_SEED = (1 << 63) - 1
MAX_TIMEOUT_S = 3600.0
DEFAULT_TIMEOUT_S = 30.0
_MAX_URL, _MAX_TOKEN, _MAX_TEXT = 512, 4096, 128
_MAX_INT = (1 << 53) - 1
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")

KEYS = (
    "runtime_id", "game", "mode", "heroes", "camps", "eval_mode", "seed", "max_frames", "timeout_s", "start_from", "must_resume", "task_id",
    "options",
)  # fmt: skip


@dataclass(frozen=True)
class CampActor:
    """The actor that plays a camp."""

    url: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class GameRequest:
    """A validated request. Two requests are equal if they describe the same match."""

    runtime_id: str
    game: str
    mode: str | None
    heroes: list[list[dict[str, Any]]]
    camps: tuple[CampActor | None, ...]
    options: dict[str, Any]
    eval_mode: bool = False
    seed: int | None = None
    max_frames: int | None = None
    timeout_s: float | None = None
    start_from: str | None = None
    must_resume: bool = False
    """With `start_from: any`: refuse the request if there is no saved state, instead of starting a new match."""
    task_id: str | None = None

    @property
    def kind(self) -> str:
        """Matches of the same kind can start from each other's saved states."""
        return self.mode or "v".join(str(len(camp)) for camp in self.heroes) or "usual"

    @property
    def plays_several(self) -> bool:
        """Whether the process plays further matches, which its actors announce."""
        return bool(self.options.get("together"))

    def game_config(self, seed: int, start_from: str | None) -> dict[str, Any]:
        """Content of the game's config file. Tokens are passed in environment variables instead."""
        return {
            "runtime_id": self.runtime_id,
            "game": self.game,
            "mode": self.mode,
            "heroes": self.heroes,
            "camps": [None if camp is None else {"url": camp.url, "timeout_s": camp.timeout_s} for camp in self.camps],
            "eval_mode": self.eval_mode,
            "seed": seed,
            "max_frames": self.max_frames,
            "start_from": start_from,
            "options": self.options,
        }


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object with finite numbers. Raises Refused."""
    try:
        data: Any = json.loads(body or b"{}", parse_constant=_reject_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, "bad_request", f"The body is not JSON: {problem[:200]}.") from error
    if not isinstance(data, dict):
        raise Refused(400, "bad_request", "The body is not a JSON object.", "Send {…}.")
    return data


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def parse_request(data: Mapping[str, Any], catalogue: Catalogue) -> GameRequest:
    """Validate a request. Raises Refused, whose message names the key and its value."""
    for key in data:
        if key not in KEYS:
            raise Refused(400, "bad_request", f"The key {quote(key)} is unknown.", did_you_mean(key[:64], KEYS))
    runtime_id = parse_id(data.get("runtime_id"))
    mode = _name(data, "mode")
    game = catalogue.choose_game(_text(data, "game"), mode)
    entry = catalogue.games[game]
    heroes = _heroes(data.get("heroes"))
    timeout_s = _number(data.get("timeout_s"), "timeout_s", 0.001, entry.limits.seconds)
    options = data.get("options")
    if options is not None and not isinstance(options, dict):
        raise _invalid("options", options, "an object is expected")
    return GameRequest(
        runtime_id=runtime_id,
        game=game,
        mode=mode,
        heroes=heroes,
        camps=_camps(data.get("camps"), len(heroes)),
        options=entry.resolve_options(options or {}),
        eval_mode=_bool(data, "eval_mode"),
        seed=_integer(data.get("seed"), "seed", 0, MAX_SEED),
        max_frames=_integer(data.get("max_frames"), "max_frames", 1, MAX_FRAMES),
        timeout_s=timeout_s,
        start_from=_name(data, "start_from", STATE_NAME),
        must_resume=_bool(data, "must_resume"),
        task_id=parse_task_id(data.get("task_id")),
    )


def parse_id(value: Any) -> str:
    """Validate a runtime id. Raises Refused."""
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        hint = "Letters, digits, '-', '_' and '.', at most 128 of them, the first a letter or a digit."
        raise Refused(400, "runtime_id", f"runtime_id is {quote(value)}, which is not an id.", hint)
    return value


def parse_task_id(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
        value = str(value)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise _invalid("task_id", value, "letters, digits, '-', '_' and '.' are expected, at most 128 of them")
    return value


def parse_url(value: Any, where: str) -> str:
    """Normalise http(s)://HOST[:PORT][/PATH]. Raises Refused."""
    expected = "http://HOST:PORT is expected"
    if not isinstance(value, str) or len(value) > _MAX_URL or not value.isascii() or not value.isprintable() or " " in value:
        raise _invalid(where, value, expected)
    try:
        parts = urlsplit(value)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _invalid(where, value, expected) from error
    extra = parts.username is not None or parts.password is not None or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or extra or not _is_host(host) or port == 0 or not _PATH.fullmatch(parts.path):
        raise _invalid(where, value, expected)
    bracketed = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{bracketed}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST.fullmatch(host) is not None
    return "%" not in host


def _camps(value: Any, heroes: int) -> tuple[CampActor | None, ...]:
    if value is None:
        return (None,) * (heroes or 2)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CAMPS:
        raise _invalid("camps", value, f"a list of 1 to {MAX_CAMPS} is expected, each null or {{url: …}}")
    if heroes and len(value) != heroes:
        raise Refused(
            400, "bad_request", f"There are {len(value)} camps, but heroes for {heroes}.", "Send one list of heroes per camp."
        )
    return tuple(_camp(one, f"camps[{index}]") for index, one in enumerate(value))


def _camp(value: Any, where: str) -> CampActor | None:
    if value is None:
        return None
    if not isinstance(value, dict) or ("url" in value) == ("address" in value):
        raise _invalid(where, _without_token(value), "null is expected, or an object with url or address")
    for key in value:
        if key not in ("url", "address", "timeout_s", "token"):
            hint = did_you_mean(key[:64], ("url", "address", "timeout_s", "token"))
            raise Refused(400, "bad_request", f"{where} has an unknown key {quote(key)}.", hint)
    address = value.get("address")
    if address is not None and (not isinstance(address, str) or "/" in address):
        raise _invalid(f"{where}.address", address, "HOST:PORT is expected")
    url = parse_url(value["url"], f"{where}.url") if address is None else parse_url(f"http://{address}", f"{where}.address")
    timeout_s = _number(value.get("timeout_s"), f"{where}.timeout_s", 0.001, MAX_TIMEOUT_S)
    token = value.get("token")
    if token is not None and not (isinstance(token, str) and 0 < len(token) <= _MAX_TOKEN and _is_token(token)):
        raise Refused(400, "bad_request", f"{where}.token is not one printable word.")
    return CampActor(url, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s, token)


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _without_token(value: Any) -> Any:
    return {key: "…" if key == "token" else inner for key, inner in value.items()} if isinstance(value, dict) else value


def _heroes(value: Any) -> list[list[dict[str, Any]]]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_CAMPS:
        raise _invalid("heroes", value, f"a list for each camp is expected, of at most {MAX_CAMPS} camps")
    for camp, heroes in enumerate(value):
        if not isinstance(heroes, list) or len(heroes) > MAX_HEROES:
            raise _invalid(f"heroes[{camp}]", heroes, f"a list of at most {MAX_HEROES} heroes is expected")
        for index, hero in enumerate(heroes):
            _check_hero(hero, f"heroes[{camp}][{index}]")
    return value


def _check_hero(hero: Any, where: str) -> None:
    if not isinstance(hero, dict) or not 1 <= len(hero) <= MAX_LIST:
        raise _invalid(where, hero, "an object like {hero_id: 190} is expected")
    for key, value in hero.items():
        if _KEY.fullmatch(key) is None:
            raise Refused(400, "bad_request", f"{where} has a key {quote(key)}.", "Keys are lower-case words.")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST or not all(_is_plain(item) for item in items):
            raise _invalid(f"{where}.{key}", value, "a number, a short text, true, false, or a list of such is expected")
    given = hero.get("hero_id")
    if "hero_id" in hero and not isinstance(given, str):
        _integer(given, f"{where}.hero_id", 0, (1 << 31) - 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and value.isprintable()
    return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) <= _MAX_INT)


# -- single values ------------------------------------------------------------------------------------------------------


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise _invalid(key, value, "a name is expected")
    return value


def _name(data: Mapping[str, Any], key: str, pattern: re.Pattern[str] = NAME) -> str | None:
    value = _text(data, key)
    if value is not None and pattern.fullmatch(value) is None:
        raise _invalid(key, value, "letters, digits, '-', '_' and '.' are expected, not too many, the first a letter or a digit")
    return value


def _bool(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false is expected")
    return value


def _integer(value: Any, where: str, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(where, value, f"an integer from {least} to {most} is expected")
    return value


def _number(value: Any, where: str, least: float, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _invalid(where, value, f"a number from {least:g} to {most:g} is expected")
    return float(value)


def _invalid(where: str, value: Any, expected: str) -> Refused:
    return Refused(400, "bad_request", f"{where} is {quote(value)}: {expected}.")


def quote(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or deeply nested lists
        text = f"of type {type(value).__name__}, too large to print"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
