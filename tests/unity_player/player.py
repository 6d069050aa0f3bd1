"""The program: connects to Python, shows its scene, and fails as it was asked to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.unity_player import messages
from tests.unity_player.grpc_client import ConnectionEnded, GrpcClient
from tests.unity_player.messages import Behaviour, Infos, Orders
from tests.unity_player.scenes import SCENES
from tests.unity_player.scenes.area import Scene, record
from tests.unity_player.scenes.sensors import Hybrid

VERSION = "1.5.0"
LIFETIME_S = 900
FRAME_LINE = "RenderTexture.Create failed: format unsupported for random writes - RGBA8 sRGB, fallback to software"
FLOOD_LINES = 2_000  # of a step
FAULTS = {
    "crash": "ends with a signal at a step",
    "exit": "ends with code 3 at a step",
    "hang": "stops answering at a step",
    "refuse": "ends before it connects",
    "never": "does not connect",
    "twice": "opens a second connection that introduces itself, too",
    "slow": "connects after some seconds",
    "old": "speaks version 0.9.0",
    "new": "speaks version 2.0.0",
    "minor": "speaks version 1.0.0, with its fields for actions",
    "nan": "sends an observation that is not a number at a step",
    "infinite": "sends an infinite reward at a step",
    "shape": "sends observations of another shape at a step",
    "short": "sends fewer numbers than the shape says at a step",
    "late": "adds another behaviour at a step",
    "unknown": "sends agents of a behaviour that it has not introduced at a step",
    "stubborn": "ignores the order to quit",
    "immortal": "ignores the order to quit and SIGTERM",
    "threads": "starts that many threads",
    "flood": "writes thousands of log lines at each step",
    "garbage": "sends bytes that are no message at a step",
}


def log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Faults:
    """What goes wrong, and when. Written as NAME or NAME=NUMBER: a step, seconds or a count."""

    def __init__(self, words: Sequence[str]) -> None:
        self._when: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in FAULTS:
                raise SystemExit(f"unknown fault {name}; choose from {', '.join(FAULTS)}")
            self._when[name] = float(number or 0)

    def __contains__(self, name: str) -> bool:
        return name in self._when

    def __getitem__(self, name: str) -> float:
        return self._when[name]

    def at_step(self, step: int) -> list[str]:
        return [name for name, when in self._when.items() if when == step and name in _AT_A_STEP]

    def due(self, name: str, step: int) -> bool:
        return self._when.get(name) == step

    @property
    def version(self) -> str:
        return next(
            (version for name, version in (("old", "0.9.0"), ("new", "2.0.0"), ("minor", "1.0.0")) if name in self), VERSION
        )


class Player:
    """A scene behind a connection."""

    def __init__(self, client: GrpcClient, scene: str, areas: int, faults: Faults, parameters: Mapping[str, float]) -> None:
        self._client, self._faults = client, faults
        self._known: set[str] = set()
        self._old = "minor" in faults
        self._step = 0
        told = messages.read_hello(client.call(messages.hello(faults.version)))
        if "twice" in faults:
            threading.Thread(target=_second_connection, args=(client.port,), daemon=True).start()
        log(f"Connected to trainer: {told}")
        wanted = int(told.get("num_areas", 1))
        self._scene = Scene(SCENES[scene], max(areas, wanted), int(told.get("seed", 0)), parameters)

    def run(self) -> None:
        """Return when Python wants the player to end, and is obeyed."""
        orders = self._exchange(messages.message())
        while True:
            self._read_side_channel(orders.side_channel)
            if (orders.stopped or orders.command == messages.QUIT) and not self._obstinate:
                return
            reset = orders.command == messages.RESET
            infos = self._scene.reset() if reset else self._scene.step(orders.actions)
            orders = self._exchange(self._message(infos))
            self._step += 1

    @property
    def _obstinate(self) -> bool:
        return "stubborn" in self._faults or "immortal" in self._faults

    def run_recorded(self) -> None:
        """Like `run`, with messages that were made before and do not depend on the actions: the player takes hardly any time."""
        first, others = record(self._scene)
        known = list(self._scene.behaviours.values())
        begin, replies = messages.step(first, known), [messages.step(infos) for infos in others]
        orders = self._exchange(messages.message())
        while not (orders.stopped or orders.command == messages.QUIT):
            if orders.command == messages.RESET:
                message, rest = begin, iter(replies)
            elif (message := next(rest, b"")) == b"":
                rest = iter(replies)
                message = next(rest)
            orders = messages.read_orders(self._client.call(message), actions=False)

    def _exchange(self, message: bytes) -> Orders:
        return messages.read_orders(self._client.call(message), old=self._old)

    def _read_side_channel(self, received: bytes) -> None:
        for channel, payload in messages.read_side_messages(received):
            if channel == messages.ENGINE_CONFIGURATION:
                log("Engine configuration: {} {}".format(*messages.read_engine_configuration(payload)))
            elif channel == messages.ENVIRONMENT_PARAMETERS:
                parameter = messages.read_environment_parameter(payload)
                if parameter is not None:
                    self._scene.world.parameters[parameter[0]] = parameter[1]
                log(f"Environment parameter: {parameter}")
            else:
                log(f"Side channel {channel}: {payload!r}")

    def _message(self, infos: Infos) -> bytes:
        for fault in self._faults.at_step(self._step):
            infos = _AT_A_STEP[fault](infos)
        if "flood" in self._faults:
            sys.stdout.write(f"{FRAME_LINE}\n" * FLOOD_LINES)
            sys.stdout.flush()
        if self._faults.due("garbage", self._step):
            return b"\xff\xff\xff not a message"
        new = self._new_behaviours(infos) if infos.keys() - self._known else []
        world = self._scene.world
        statistics = b"".join(messages.statistic(*each) for each in world.statistics) if world.statistics else b""
        world.statistics.clear()
        return messages.step(infos, new, statistics, old=self._old)

    def _new_behaviours(self, infos: Infos) -> list[Behaviour]:
        known = [*self._scene.behaviours.values(), *([LATE] if "late" in self._faults else [])]
        new = [behaviour for behaviour in known if behaviour.name in infos and behaviour.name not in self._known]
        self._known |= {behaviour.name for behaviour in new}
        return new


# -- faults at a step -----------------------------------------------------------------------------------------------------------

LATE = Behaviour("Late?team=0", continuous=2, branches=(2, 3))


def _crash(infos: Infos) -> Infos:
    log("Caught fatal signal - signo:6 code:-6")
    os.abort()


def _exit(infos: Infos) -> Infos:
    log("Quitting because of a missing asset")
    os._exit(3)


def _hang(infos: Infos) -> Infos:
    while True:
        time.sleep(60)


def _nan(infos: Infos) -> Infos:
    return _with_first(infos, floats=float("nan"))


def _short(infos: Infos) -> Infos:
    return _with_first(infos, cut=1)


def _shape(infos: Infos) -> Infos:
    name = next(iter(infos))
    for info in infos[name]:
        info.observations = [messages.Sensor("Other", (3,)).floats((1.0, 2.0, 3.0))]
    return infos


def _with_first(infos: Infos, floats: float = 0.0, cut: int = 0) -> Infos:
    name = next(iter(infos))
    first = infos[name][0]
    size = 8
    first.observations = [messages.Sensor("VectorSensor_size8", (size,)).floats([floats] * (size - cut))]
    return infos


def _infinite(infos: Infos) -> Infos:
    infos[next(iter(infos))][0].reward = float("inf")
    return infos


def _late(infos: Infos) -> Infos:
    info = messages.AgentInfo(1_000_000, [Hybrid.sensor.floats((0.5, -0.5))])
    return {**infos, LATE.name: [info]}


def _unknown(infos: Infos) -> Infos:
    info = messages.AgentInfo(1_000_001, [Hybrid.sensor.floats((0.5, -0.5))])
    return {**infos, "Unknown?team=0": [info]}


_AT_A_STEP: dict[str, Callable[[Infos], Infos]] = {
    "crash": _crash,
    "exit": _exit,
    "hang": _hang,
    "nan": _nan,
    "infinite": _infinite,
    "shape": _shape,
    "short": _short,
    "late": _late,
    "unknown": _unknown,
}


def _second_connection(port: int) -> None:
    try:
        GrpcClient("127.0.0.1", port, messages.METHOD).call(messages.hello(VERSION))
        log("The second connection was answered")
    except (OSError, ConnectionEnded) as error:
        log(f"The second connection was refused: {error}")


# -- the program ----------------------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="player", description=__doc__, allow_abbrev=False)
    parser.add_argument("--mlagents-port", type=int, required=True)
    parser.add_argument("-nographics", action="store_true")
    parser.add_argument("-batchmode", action="store_true")
    parser.add_argument("-logFile", default="-", metavar="FILE")
    parser.add_argument("--scene", choices=SCENES, default="ball")
    parser.add_argument("--areas", type=int, default=1)
    parser.add_argument("--parameter", action="append", default=[], metavar="NAME=NUMBER", help="of the environment")
    parser.add_argument("--recorded", action="store_true", help="send messages that were made before")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=NUMBER]", help=", ".join(FAULTS))
    asked, ignored = parser.parse_known_args(words)
    signal.alarm(LIFETIME_S)  # nothing stays behind when a test fails
    if asked.logFile != "-":
        _log_to(Path(asked.logFile))
    log("Mono path[0] = 'stand-in'\nInitialize engine version: 6000.0.23f1 (stand-in)")
    log(f"Arguments: {asked}; ignored: {ignored}")
    faults = Faults(asked.fault)
    parameters = {name: float(value) for name, _, value in (word.partition("=") for word in asked.parameter)}
    _prepare(faults)
    client = _connect(asked.mlagents_port)
    if client is None:
        log(f"Couldn't connect to trainer on port {asked.mlagents_port} using API version {VERSION}.")
        _hang({})
    assert client is not None
    try:
        player = Player(client, asked.scene, asked.areas, faults, parameters)
        if asked.recorded:
            player.run_recorded()
        else:
            player.run()
    except ConnectionEnded as error:
        log(f"Communication with the trainer ended: {error}")
        if "stubborn" in faults or "immortal" in faults:
            _hang({})
    log("Goodbye")
    return 0


def _prepare(faults: Faults) -> None:
    if "refuse" in faults:
        log("Failed to load mono")
        raise SystemExit(1)
    if "immortal" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "slow" in faults:
        time.sleep(faults["slow"])
    if "never" in faults:
        _hang({})
    if "threads" in faults:
        for _ in range(int(faults["threads"])):
            threading.Thread(target=_hang, args=({},), daemon=True).start()


def _connect(port: int) -> GrpcClient | None:
    for host in ("127.0.0.1", "::1"):
        try:
            return GrpcClient(host, port, messages.METHOD)
        except OSError:
            continue
    return None


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
