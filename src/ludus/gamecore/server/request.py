"""Requests to start a game, parsed and validated. No value of a request becomes a command, a path or a program option."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from ludus.core.plugins import did_you_mean
from ludus.errors import Refused
from ludus.gamecore.server.catalogue import NAME, STATE_NAME, Catalogue

ANY = "any"
"""Value of `start_from`: any saved state."""

MAX_CAMPS, MAX_HEROES, MAX_LIST = 16, 64, 64
_MAX_URL, _MAX_TOKEN, _MAX_TEXT = 512, 4096, 128
_MAX_INT = (1 << 53) - 1
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_ID_HINT = "Letters, digits, '-', '_' and '.', at most 128 of them, the first a letter or a digit."


# -- values


def _parse_url(value: str) -> str:
    """Normalise http(s)://HOST[:PORT][/PATH]."""
    wrong = ValueError("http://HOST:PORT is expected")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise wrong
    parts = urlsplit(value)
    host, port = parts.hostname or "", parts.port
    extra = parts.username is not None or parts.password is not None or parts.query or parts.fragment
    try:
        is_host = "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        is_host = _HOST.fullmatch(host) is not None
    if parts.scheme not in ("http", "https") or extra or not is_host or port == 0 or not _PATH.fullmatch(parts.path):
        raise wrong
    bracketed = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{bracketed}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _url_of_address(camp: Any) -> Any:
    """Accept {address: HOST:PORT} for {url: http://HOST:PORT}."""
    if not isinstance(camp, dict) or "address" not in camp:
        return camp
    address = camp["address"]
    if "url" in camp or not isinstance(address, str) or "/" in address:
        raise ValueError("an object with url, or with address (HOST:PORT), is expected")
    return {key: value for key, value in camp.items() if key != "address"} | {"url": f"http://{address}"}


def _check_hero(hero: dict[str, Any]) -> dict[str, Any]:
    for key, value in hero.items():
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"keys are lower-case words, not {quote(key)}")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST or not all(map(_is_plain, items)):
            raise ValueError(f"{key}: a number, a short text, true, false, or a list of such is expected")
    number = hero.get("hero_id", 0)
    if not isinstance(number, str) and (type(number) is not int or not 0 <= number < 1 << 31):
        raise ValueError("hero_id: a name, or an integer from 0, is expected")
    return hero


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and value.isprintable()
    return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) <= _MAX_INT)


def _number_to_text(value: Any) -> Any:
    return str(value) if type(value) is int and 0 <= value <= _MAX_INT else value


Name = Annotated[StrictStr, Field(pattern=f"^{NAME.pattern}$")]  # a Rust pattern: $ matches only at the end
StateName = Annotated[StrictStr, Field(pattern=f"^{STATE_NAME.pattern}$")]
TaskId = Annotated[Name, BeforeValidator(_number_to_text)]
Hero = Annotated[dict[str, Any], Field(min_length=1, max_length=MAX_LIST), AfterValidator(_check_hero)]
Seconds = Annotated[StrictFloat, Field(ge=0.001)]


# -- requests


@dataclass(frozen=True)
class CampActor:
    """The actor that plays a camp."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    url: Annotated[StrictStr, Field(max_length=_MAX_URL), AfterValidator(_parse_url)]
    timeout_s: Annotated[Seconds, Field(le=3600.0)] = 30.0
    token: Annotated[StrictStr, Field(pattern="^[!-~]+$", max_length=_MAX_TOKEN)] | None = field(default=None, repr=False)


Camp = Annotated[CampActor | None, BeforeValidator(_url_of_address)]


@dataclass(frozen=True)
class GameRequest:
    """A validated request. Two requests are equal if they describe the same match."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    runtime_id: Name
    game: Annotated[StrictStr, Field(min_length=1)] = ""
    mode: Name | None = None
    heroes: Annotated[list[Annotated[list[Hero], Field(max_length=MAX_HEROES)]], Field(max_length=MAX_CAMPS)] = field(
        default_factory=list
    )
    camps: Annotated[tuple[Camp, ...], Field(min_length=1, max_length=MAX_CAMPS)] = (None, None)
    options: dict[str, Any] = field(default_factory=dict)
    eval_mode: StrictBool = False
    seed: Annotated[StrictInt, Field(ge=0, lt=1 << 63)] | None = None
    max_frames: Annotated[StrictInt, Field(ge=1, le=1_000_000_000)] | None = None
    timeout_s: Seconds | None = None
    start_from: StateName | None = None
    must_resume: StrictBool = False
    """With `start_from: any`: refuse the request if there is no saved state, instead of starting a new match."""
    task_id: TaskId | None = None

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
            **{
                name: getattr(self, name)
                for name in ("runtime_id", "game", "mode", "heroes", "eval_mode", "max_frames", "options")
            },
            "camps": [None if camp is None else {"url": camp.url, "timeout_s": camp.timeout_s} for camp in self.camps],
            "seed": seed,
            "start_from": start_from,
        }


KEYS = tuple(one.name for one in dataclasses.fields(GameRequest))
_REQUEST = pydantic.TypeAdapter(GameRequest)
_TASK_ID = pydantic.TypeAdapter(TaskId)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object with finite numbers. Raises Refused."""
    try:
        data = parse_finite_json(body or b"{}")
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, "bad_request", f"The body is not JSON: {problem[:200]}.") from error
    if not isinstance(data, dict):
        raise Refused(400, "bad_request", "The body is not a JSON object.", "Send {…}.")
    return data


def parse_finite_json(text: bytes) -> Any:
    """Parse JSON without Infinity and NaN. Raises ValueError, RecursionError."""

    def parse_number(word: str) -> float:
        value = float(word)
        if not math.isfinite(value):
            raise ValueError(f"{word[:40]} is not a finite number")
        return value

    return json.loads(text, parse_constant=parse_number, parse_float=parse_number)


def parse_request(data: Mapping[str, Any], catalogue: Catalogue) -> GameRequest:
    """Validate a request. Raises Refused, whose message names the key and its value."""
    given = {key: value for key, value in data.items() if value is not None and (key, value) != ("task_id", "")}
    parse_id(given.get("runtime_id"))
    try:
        request = _REQUEST.validate_python(given)
    except pydantic.ValidationError as error:
        raise _to_refused(error) from error
    game = catalogue.choose_game(request.game or None, request.mode)
    entry = catalogue.games[game]
    if request.timeout_s is not None and request.timeout_s > entry.limits.seconds:
        message = f"timeout_s is {request.timeout_s:g}: a number up to {entry.limits.seconds:g} is expected."
        raise Refused(400, "bad_request", message)
    heroes, camps = len(request.heroes), request.camps
    if "camps" not in given:
        camps = (None,) * (heroes or 2)
    if heroes and len(camps) != heroes:
        message = f"There are {len(camps)} camps, but heroes for {heroes}."
        raise Refused(400, "bad_request", message, "Send one list of heroes per camp.")
    return dataclasses.replace(request, game=game, camps=camps, options=entry.resolve_options(request.options))


def parse_id(value: Any) -> str:
    """Validate a runtime id. Raises Refused."""
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise Refused(400, "runtime_id", f"runtime_id is {quote(value)}, which is not an id.", _ID_HINT)
    return value


def parse_task_id(value: Any) -> str | None:
    """Validate a task id, which may be a number. Raises Refused."""
    if value in (None, ""):
        return None
    try:
        return _TASK_ID.validate_python(value)
    except pydantic.ValidationError as error:
        raise Refused(400, "bad_request", f"task_id is {quote(value)}.", _ID_HINT) from error


def _to_refused(error: pydantic.ValidationError) -> Refused:
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "unexpected_keyword_argument":
        known = KEYS if len(first["loc"]) == 1 else ("url", "address", "timeout_s", "token")
        return Refused(400, "bad_request", f"The key {quote(where)} is unknown.", did_you_mean(str(first["loc"][-1])[:64], known))
    if first["type"] == "missing":
        return Refused(400, "bad_request", f"{where} is missing.")
    value = first["input"]
    if first["loc"][0] == "camps" and (isinstance(value, dict) or first["loc"][-1] == "token"):
        value = "…"  # it may contain a token
    message = first["msg"].removeprefix("Value error, ")
    return Refused(400, "bad_request", f"{where} is {quote(value)}: {message[:1].lower()}{message[1:]}.")


def quote(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or deeply nested lists
        text = f"of type {type(value).__name__}, too large to print"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
