"""docs/protocol.md is what the server does: its examples are run, its tables compared with the code."""

from __future__ import annotations

import ast
import asyncio
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import yaml

import ludus
from ludus.config.validation import parse_external_config
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.models.inference.batched_policy import Decision
from ludus.protocol import spec
from ludus.protocol.client import Client
from ludus.protocol.codec import SeatSpaces, parse_seats, seats_to_spec
from ludus.protocol.conformance import Conformance
from ludus.remote.fake_peers import FakeActor
from tests.local_servers import LIMIT_S, Served, checking, gateway, received

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ONE = {"": SeatSpaces(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4))}
TWO = {"blue": ONE[""], "red": ONE[""]}


class Constant:
    """Decides for 1, always."""

    def __init__(self, seat: SeatSpaces) -> None:
        self.policy = cast(
            Any, SimpleNamespace(observation_space=seat.observation, action_space=seat.action, state_spec=lambda: ())
        )

    def decide(self, observation: Any, state: Any = None, mask: Any = None, temperature: Any = None) -> asyncio.Future[Decision]:
        decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        decided.set_result(Decision(np.int64(1), np.int64(1), 0.0, 0.0, (), 1))
        return decided


@pytest.fixture(params=["fake actor", "built-in actor", "two seats"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    name = str(request.param)
    if name == "fake actor":
        with gateway(FakeActor) as served:
            yield name, served
        return
    seats = ONE if name == "built-in actor" else TWO
    shared = {seat: Seat(Constant(spaces)) for seat, spaces in seats.items()}
    with gateway(lambda: BuiltinActor(shared), GatewaySettings(spec=seats_to_spec(seats))) as served:
        yield name, served


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_curl_line_answers_as_printed(place: tuple[str, Served]) -> None:
    name, served = place
    blocks = [text for info, text in BLOCKS if info == f'console title="{name}"']
    assert blocks
    for block in blocks:
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = example.partition("\n")
            expected = expected.replace('"ludus": "0.1.0"', f'"ludus": "{ludus.__version__}"')
            here = command.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")
            said = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=LIMIT_S).stdout
            assert said.rstrip("\n") == expected.rstrip("\n"), command


def test_every_printed_request_is_answered_with_the_printed_reply() -> None:
    raw = [(info, _on_the_wire(text)) for info, text in BLOCKS if info.startswith("http ")]
    assert [info for info, _ in raw] == ['http title="request"', 'http title="reply"'] * (len(raw) // 2)
    with gateway(FakeActor) as served, socket.create_connection(("127.0.0.1", served.port), LIMIT_S) as connection:
        for (_, request), (_, reply) in zip(raw[::2], raw[1::2], strict=True):
            connection.sendall(request)
            assert received(connection) == reply


def _on_the_wire(text: str) -> bytes:
    head, _, body = text.partition("\n\n")
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body.removesuffix("\n").encode()


def test_the_python_client_plays_without_a_finding_and_hears_the_same_again() -> None:
    (code,) = (text for info, text in BLOCKS if info == "python")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/protocol.md", "exec"), names)
    with checking(Conformance()) as checked:
        bot = names["Bot"](port=checked.port, timeout_s=LIMIT_S)
        for _ in range(2):
            bot.start()
            assert [bot.tick(b"one"), bot.tick(b"two")] == [b"one", b"two"]
            bot.seq -= 1
            assert bot.tick(b"two") == b"two"
            bot.end()
        bot.connection.close()
    summary = checked.server.summary
    assert (summary.matches, summary.retries, summary.mistakes, summary.warnings, checked.findings) == (2, 2, 0, 0, [])


def test_the_yaml_declares_spaces_for_the_check_and_for_training() -> None:
    (text,) = (text for info, text in BLOCKS if info == "yaml")
    data = yaml.safe_load(text)
    assert parse_seats(data) == ONE
    assert parse_external_config(data["mygame"]["config"]["env_config"]).all_seats().keys() == {""}


def test_every_option_of_a_printed_command_exists() -> None:
    lines = [line.partition("#")[0].split() for info, text in BLOCKS if info == "sh" for line in text.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        words = line[1 : next(i for i, word in enumerate(line) if word.startswith("--"))]
        asked = [sys.executable, "-m", "ludus.cli.main", *words, "--help"]
        known = subprocess.run(asked, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200", "PATH": ""}).stdout
        for option in (word for word in line if word.startswith("--")):
            assert option in known, line


# -- tables


def rows(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in section.splitlines() if line.startswith("|")
    ]
    return [row for row in table[2:] if not set("".join(row)) <= set("-")]


def test_every_refusal_in_the_code_is_on_the_page_and_no_other() -> None:
    refusals = {
        (int(status), word) for status, words, *_ in rows("Replies") if status.isdigit() for word in re.findall(r"`(\w+)`", words)
    }
    flags = {(422, "terminated"), (422, "truncated")}  # the code names the key that was wrong
    assert refusals == set(_refusals_in_code()) | flags


def _refusals_in_code() -> Iterator[tuple[int, str]]:
    source = Path(ludus.__file__).parent
    packages = (path for package in ("gateway", "gamecore", "serving") for path in (source / package).glob("*.py"))
    for path in (*packages, source / "protocol" / "step_message.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refused":
                status, word = node.args[:2]
                if isinstance(status, ast.Constant) and isinstance(word, ast.Constant):
                    assert isinstance(status.value, int)
                    yield status.value, str(word.value)


def test_limits_are_those_of_the_code() -> None:
    printed = {setting.strip("`"): float(re.split(r"[ (]", default)[0]) for _, default, setting in rows("Limits")}
    real = {f"http.{f.name}": float(getattr(HttpLimits(), f.name)) for f in fields(HttpLimits)}
    real |= {f"sessions.{f.name}": float(getattr(SessionLimits(), f.name)) for f in fields(SessionLimits)}
    assert printed == real
    assert f"up to {spec.MAX_NAME_BYTES} bytes" in PAGE
    assert f"without a request for {SessionLimits().silent_s:g} s" in PAGE
    assert f"longer than {SessionLimits().tick_s:g} s" in " ".join(PAGE.split())


def test_every_spelling_of_a_header_is_on_the_page_and_works() -> None:
    spelled = {word.lower().encode() for row in rows("Requests") for word in re.findall(r"`([\w-]+)`", " ".join(row[:2]))}
    known = spec.SESSION_HEADERS | spec.KIND_HEADERS | spec.SEQ_HEADERS | spec.MATCH_HEADERS
    known |= spec.MODEL_HEADERS | spec.VERSION_HEADERS | spec.TEMPERATURE_HEADERS
    assert known <= spelled
    kinds = {word.encode() for row in rows("Requests") if row[0] == "`step_kind`" for word in re.findall(r"`(\w+)`", row[2])}
    assert kinds == set(spec.KINDS)


def test_the_version_is_that_of_the_code() -> None:
    assert PAGE.startswith(f"# The game protocol, version {spec.VERSION}\n")
    with gateway(FakeActor) as served, Client(served.url) as client:
        assert client.spec()["protocol"] == spec.VERSION
