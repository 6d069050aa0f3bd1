"""Fuzz targets: every function that reads bytes from outside.

A target either returns or raises one of its expected errors, whatever the bytes are. Everything else, a Python warning included,
is a finding. `tests/fuzz/test_fuzz.py` drives the targets with Hypothesis for seconds, `bench/fuzz.py` with atheris for as long as
you like; inputs that once were findings are kept in `tests/fuzz/corpus/TARGET/` and tried by both.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np

from ludus.compat.coach.fleet_ini import read_fleet_file
from ludus.distributed.redis.messages import Presence, WeightsNotice, WorkerSpec, channel_in
from ludus.errors import ConfigError, Damaged, IncompatibleCheckpoint, Refused
from ludus.experiments.runs import checkpoint
from ludus.gamecore.server import catalogue, request
from ludus.gateway import builtin_actor
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import HttpConnection, HttpLimits
from ludus.gateway.raw_codec import RawCodec
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.io.yaml_documents import parse_yaml
from ludus.launch.hostfile import parse_hostfile
from ludus.models.weights import serialization
from ludus.protocol.step_message import decode_message
from ludus.storage.local import LocalStore
from ludus.transport.segment_codec import RejectedMessage, SegmentDecoder
from tests.gateway.scripted import RecordedSeat, tiny_policy
from tests.transport.test_segment_codec import LAYOUT, message

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Target:
    name: str
    run: Callable[[bytes], object]
    expected: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    """Valid inputs, the seeds of mutations."""

    def corpus(self) -> list[bytes]:
        return [*self.seeds, *(path.read_bytes() for path in sorted((CORPUS / self.name).glob("*")))]

    def check(self, data: bytes) -> bool:
        """Whether the input was accepted. Raises whatever is not expected."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                self.run(data)
            except self.expected:
                return False
        return True


# -- HTTP ---------------------------------------------------------------------------------------------------------------------


class Echo(Actor):
    async def tick(self, body: bytes) -> bytes:
        return body


class PlainTransport(asyncio.Transport):
    """A transport that stores what is written and never blocks."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.ended = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def talk_http(data: bytes) -> bytes:
    """Feed a gateway connection. The first two bytes determine fragmentation and whether a token is required."""
    if len(data) < 2:
        return b""
    return _loop().run_until_complete(_talk_http(data[2:], 1 + data[0] + (data[1] & 0x7F) * 64, bool(data[1] & 0x80)))


async def _talk_http(data: bytes, piece: int, with_token: bool) -> bytes:
    limits = HttpLimits(header_bytes=2048, headers=16, body_bytes=4096, pipelined=4)
    gateway = Gateway(Echo, GatewaySettings(http=limits, token="secret" if with_token else None))
    connection, transport = HttpConnection(gateway), PlainTransport()
    connection.connection_made(transport)
    failures: list[Exception] = []

    def receive(piece: bytes) -> None:
        try:
            connection.data_received(piece)
        except Exception as error:
            failures.append(error)

    for at in range(0, len(data), piece):
        if transport.ended:
            break
        gateway.loop.call_soon(receive, data[at : at + piece])  # outside of any task, as a real event loop does
        await asyncio.sleep(0)
        if failures:
            raise failures[0]
    for _ in range(4):  # the actors answer
        await asyncio.sleep(0)
    connection.sweep(gateway.loop.time() + 1.0)
    connection.connection_lost(None)
    await gateway.close(0.0)
    assert not gateway.connections
    _check_replies(bytes(transport.written), with_token and b"secret" not in data)
    return bytes(transport.written)


def _check_replies(written: bytes, stranger: bool) -> None:
    """Check that the output is whole replies, and without the token only refusals and public pages."""
    while written:
        head, separator, written = written.partition(b"\r\n\r\n")
        assert separator, head
        first, *lines = head.split(b"\r\n")
        status = int(first.split(b" ")[1])
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        assert status in (100, 200, 400, 401, 404, 405, 408, 409, 410, 413, 417, 422, 429, 431, 500, 501, 503, 505), status
        assert status != 500
        length = int(fields.get(b"content-length", b"0"))
        assert not (stranger and status == 200 and fields[b"content-type"] == b"application/octet-stream")
        written = written[length:] if written[:1] in (b"{", b"") or length == 0 or status == 200 else written


def _request(kind: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /step HTTP/1.1", b"session: m-1", b"step_kind: " + kind, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_HTTP_SEEDS = (
    b"\xff\x00" + _request(b"start", b"") + _request(b"tick", b"hello") * 3 + _request(b"end", b""),
    b"\x07\x00" + _request(b"start", b"{}", b"seq: 0", b"match: x", b"temperature: 0.5") + _request(b"tick", b"1", b"seq: 1"),
    b"\xff\x80" + _request(b"start", b"", b"Authorization: Bearer secret") + b"GET /health HTTP/1.1\r\n\r\n",
    b"\x20\x00POST /step HTTP/1.1\r\nsession: a\r\nstep-kind: start\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"\x20\x00POST /step/blue HTTP/1.1\r\nsession: a\r\nstep_kind: start\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    b"\xff\x00GET /spec HTTP/1.1\r\n\r\nHEAD /ready HTTP/1.0\r\n\r\n",
)


# -- bodies of games ----------------------------------------------------------------------------------------------------------

NESTED = gym.spaces.Dict(
    {
        "vector": gym.spaces.Box(-10.0, 10.0, (3,), np.float32),
        "kind": gym.spaces.Discrete(5),
        "flags": gym.spaces.MultiBinary(4),
        "picture": gym.spaces.Box(0, 255, (2, 2), np.uint8),
    }
)
ACTIONS = gym.spaces.MultiDiscrete([3, 2])


@functools.cache
def _actors() -> list[builtin_actor.BuiltinActor]:
    nested = RecordedSeat(tiny_policy(NESTED, ACTIONS)).seat
    plain = RecordedSeat(tiny_policy()).seat
    return [
        builtin_actor.BuiltinActor({"": nested}),
        builtin_actor.BuiltinActor({"": plain}),
        builtin_actor.BuiltinActor({"a": plain, "b": nested}),
    ]


def read_body(data: bytes) -> None:
    """A step as JSON or msgpack, of a game with one seat and of one with two."""
    read = []
    for actor in _actors():
        try:
            step, _ = decode_message(data)
            step.pop("info", None)
            read.append(actor._check_steps(step))
        except Refused:
            continue
    if not read:
        raise Refused(422, "none", "No actor accepts it.")


def read_raw(data: bytes) -> None:
    """A step as raw arrays."""
    for form, seat in _raw_forms():
        step = form.read(data)
        builtin_actor.BuiltinActor({"": seat})._check_step("", builtin_actor._step_fields(step))


@functools.cache
def _raw_forms() -> list[tuple[RawCodec, Any]]:
    seat = RecordedSeat(tiny_policy()).seat
    return [(RawCodec(gym.spaces.Box(-10.0, 10.0, (3,), np.float32), gym.spaces.Discrete(4)), seat)]


_STEP = {"vector": [0.5, 1, 2], "kind": 3, "flags": [0, 1, 0, 1], "picture": [[1, 2], [3, 255]]}
_INFINITIES = np.array([np.inf, -np.inf, 1.0], np.float32).tobytes()
_BODIES: tuple[dict[str, Any], ...] = (
    {"observation": _STEP, "reward": 0.0, "action_mask": [1, 1, 0, 1, 0]},
    {"observation": [0.0, 1.5, -2], "terminated": True},
    {"seats": {"a": {"observation": [0, 1, 2]}, "b": {"observation": _STEP, "truncated": False}}},
    {"observation": [1e308, -1e39, 3e38], "info": {"time": 3}},
    {"observation": _STEP | {"kind": 2**63}},
)


# -- experience between machines ----------------------------------------------------------------------------------------------


def read_segment(data: bytes) -> None:
    SegmentDecoder(LAYOUT, "plan").decode(data)


def read_notice(data: bytes) -> None:
    """Messages and weights that a fleet reads from Redis and its store."""
    readers: tuple[Callable[[bytes], object], ...] = (WeightsNotice.decode, Presence.decode, WorkerSpec.decode, channel_in)
    accepted = 0
    for read in readers:
        try:
            read(data)
            accepted += 1
        except (Damaged, IncompatibleCheckpoint):
            continue
    if not accepted:
        raise Damaged("no reader accepts it")


# -- checkpoints --------------------------------------------------------------------------------------------------------------


def read_weights(data: bytes) -> None:
    serialization.decode_weights(data, "weights")


def read_model(data: bytes) -> None:
    serialization.policy_from(data)


@functools.cache
def _run_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="ludus-fuzz-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


_PARTS = ("state.json", "manifest.json", "default.safetensors")


def read_checkpoint(data: bytes) -> None:
    """The first byte selects the checkpoint file that the rest overwrites."""
    if not data:
        return
    directory, store = _stored_checkpoint()
    part = directory / _PARTS[data[0] % len(_PARTS)]
    before = part.read_bytes()
    try:
        part.write_bytes(data[1:])
        checkpoint.read(store, "000001").policy("default")
    finally:
        part.write_bytes(before)


@functools.cache
def _stored_checkpoint() -> tuple[Path, LocalStore]:
    policy = tiny_policy()
    weights = serialization.encode_weights(policy.weights())
    state = {"format": 1, "models": {"default": {"description": policy.description(), "version": 1}}, "timesteps": 5}
    empty = serialization.encode_weights({})
    store = LocalStore(_run_directory())
    store.put_bundle(
        "checkpoints/000001",
        {
            "state.json": json.dumps(state).encode(),
            "default.safetensors": weights,
            "default.optimizer.safetensors": empty,
            "sampler.safetensors": empty,
        },
    )
    return _run_directory() / "checkpoints" / "000001", store


def _checkpoint_seeds() -> tuple[bytes, ...]:
    directory, _ = _stored_checkpoint()
    return tuple(bytes([number]) + (directory / name).read_bytes() for number, name in enumerate(_PARTS))


# -- files and orders ---------------------------------------------------------------------------------------------------------

_CATALOGUE = """
games:
  arena: {command: [sleep, "1"], modes: [1v1, 3v3], options: {speed: {type: integer, minimum: 0, maximum: 9},
    hue: {type: string, default: dark, pattern: "[a-z]*"}, gain: {type: number, minimum: 0, maximum: 1}}}
"""


@functools.cache
def _catalogue() -> catalogue.Catalogue:
    path = _run_directory() / "games.yaml"
    path.write_text(_CATALOGUE)
    return catalogue.read(path)


def read_game_order(data: bytes) -> None:
    request.parse_request(request.parse_json(data), _catalogue())


def read_catalogue(data: bytes) -> None:
    path = _run_directory() / "fuzzed.yaml"
    path.write_bytes(data)
    catalogue.read(path)


def read_yaml(data: bytes) -> None:
    parse_yaml(data.decode("utf-8", "replace"), "the file")


def read_ini(data: bytes) -> None:
    read_fleet_file(data.decode("utf-8", "replace"))


def read_hosts(data: bytes) -> None:
    parse_hostfile(data.decode("utf-8", "replace"))


_ORDER = {
    "runtime_id": "m-1", "game": "arena", "mode": "1v1", "heroes": [[{"hero_id": 1}], [{"hero_id": 2}]], "seed": 3, "timeout_s": 9.5,
    "camps": [{"url": "http://127.0.0.1:8000", "token": "abc"}, None], "options": {"speed": 3, "hue": "dark", "gain": 0.5},
}  # fmt: skip
_YAML = b"a: &x {env: CartPole-v1, config: {lr: [1.0e-3, 3_0]}}\nb:\n  <<: *x\n  run: PPO\n  stop: {timesteps: 100}\n"
_INI = b"[coach]\nimage = x\nmemory_backend = redispubsub\ndata_store = s3\ns3_end_point = s3.example.org\ns3_bucket_name = b\n"


def targets() -> dict[str, Target]:
    policy = tiny_policy()
    described = json.dumps(policy.description()).encode()
    refused: tuple[type[Exception], ...] = (Refused,)
    orders = WorkerSpec("c", 1, "CartPole-v1", {}, {}, (), 1, 1, policy.description(), False, 0, False)
    notices = (WeightsNotice(1, 2, 3, "o").encode(), Presence("h", 1, "sampling").encode(), orders.encode())
    found = [
        Target("http", talk_http, (), _HTTP_SEEDS),
        Target("body", read_body, refused, tuple(form(body) for body in _BODIES for form in (_as_json, msgpack.packb))),
        Target(
            "raw",
            read_raw,
            refused,
            (
                bytes(8 + 12),
                b"\0\0\x80?\x04\0\0\0" + bytes(12) + b"\1\1\0\1",
                b"\xff" * 20,
                bytes(8) + b"\x7f" * 12,
                bytes(8) + _INFINITIES,
            ),
        ),
        Target("segment", read_segment, (RejectedMessage,), (message(), message("lz4"), message("zstd"))),
        Target("notice", read_notice, (Damaged,), notices),
        Target(
            "weights",
            read_weights,
            (Damaged,),
            (serialization.encode_weights(policy.weights()), serialization.encode_weights({}, {"a": "b"})),
        ),
        Target("model", read_model, (Damaged, IncompatibleCheckpoint), (described,)),
        Target("checkpoint", read_checkpoint, (Damaged, IncompatibleCheckpoint), _checkpoint_seeds()),
        Target("game_order", read_game_order, refused, (_as_json(_ORDER), b"{}")),
        Target("catalogue", read_catalogue, (ConfigError,), (_CATALOGUE.encode(),)),
        Target("yaml", read_yaml, (ConfigError,), (_YAML,)),
        Target("ini", read_ini, (ConfigError,), (_INI, b"[ludus]\norchestrator = local\n")),
        Target("hosts", read_hosts, (ConfigError,), (b"127.0.0.1 root 36000 2\n10.0.0.2 me 22 8\n", b"- {address: 10.0.0.1}\n")),
    ]
    return {target.name: target for target in found}


def _as_json(data: Any) -> bytes:
    return json.dumps(data).encode()
