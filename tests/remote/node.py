"""Another machine of a run, played by a process: it does what a test tells it, and answers with JSON.

`Node` is the test's side. The process has its own temporary directories and shared memory, so that it can share nothing with
the hub but a connection. `python -m tests.remote.node` is the other side: functions below whose names begin with `do_`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ludus
from ludus.errors import LudusError
from ludus.protocol.client import Client
from ludus.remote.context import init
from tests.remote import parts

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """What the node raised: `kind` is its class."""

    def __init__(self, kind: str, message: str, seconds: float) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.seconds = kind, seconds


Start = Callable[[list[str]], "subprocess.Popen[bytes]"]


class Node:
    """A process on its own "machine", which is the directory `base`. Several may share one.

    `start` puts it on a machine that really is another one: it is given the command, and connects its output.
    """

    def __init__(self, base: Path, start: Start | None = None, **env: str) -> None:
        for name in ("tmp", "shm", "runs"):
            (base / name).mkdir(parents=True, exist_ok=True)
        self.base = base
        orders = base / f"orders-{len(list(base.glob('orders-*')))}"
        os.mkfifo(orders)
        there = {"TMPDIR": str(base / "tmp"), "LUDUS_SHM": str(base / "shm"), **env}
        argv = [sys.executable, "-m", "tests.remote.node", str(orders)]
        if start is not None:
            self.process = start(argv)
        else:
            kept = {key: value for key, value in os.environ.items() if key != "LUDUS_TOKEN_FILE"}
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT, env=kept | there)
        self._orders = os.fdopen(os.open(orders, os.O_RDWR), "w")

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self._orders.close()
        self.process.kill()
        self.process.communicate()

    def ask(self, what: str, *args: Any) -> Any:
        self.tell(what, *args)
        return self.answer()

    def tell(self, what: str, *args: Any) -> None:
        self._orders.write(json.dumps([what, *args]) + "\n")
        self._orders.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the node is gone"
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"], reply["message"], reply["seconds"])
        return reply["value"]

    def join(self, address: str, trial: str = "t") -> Any:
        return self.ask("join", str(self.base / "runs"), trial, address)


# -- the other side -----------------------------------------------------------------------------------------------------

held: dict[str, Any] = {}


def model(name: str) -> ludus.RemoteModel:
    key = f"model {name}"
    if key not in held:
        held[key] = ludus.RemoteModel(name)
    found: ludus.RemoteModel = held[key]
    return found


def buffer(name: str, batch_size: int | None = None) -> ludus.RemoteBuffer:
    key = f"buffer {name} {batch_size}"
    if key not in held:
        held[key] = ludus.RemoteBuffer(name, batch_size=batch_size)
    found: ludus.RemoteBuffer = held[key]
    return found


def row(value: float) -> Any:
    return np.full(3, value, np.float32)


def do_version_of_python() -> str:
    return sys.version


def do_join(project: str, trial: str, address: str) -> dict[str, Any]:
    session = init(project=project, trial=trial, address=address)
    held["session"] = session
    return {
        "hub": session.hub is not None,
        "home": session.location.is_local,
        "mirror": session.location.mirror,
        "pid": os.getpid(),
    }


def do_fork(name: str, into: str) -> int:
    """A copy of this process asks and pushes on its own connections; returns its exit code."""
    asked = model(name)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            buffer(into).push(float(asked(row(2))[0]), drop=False).wait(10)
            held["session"] = None
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def do_where() -> str:
    return str(held["session"].location.mirror)


def do_open(project: str, trial: str) -> dict[str, Any]:
    """Become a hub for other machines, at a free port."""
    session = held["session"] = init(project=project, trial=trial, address="tcp://127.0.0.1:0")
    assert session.hub is not None
    ludus.RemoteModel("m", parts.Scale(), forward_args=(row(1),))
    ludus.RemoteBuffer("b", size=8)
    return {"address": session.hub.address, "token_file": session.location.token_file}


def do_crew(name: str, count: int) -> list[str]:
    made = ludus.RemoteModel(name, parts.Scale(), forward_args=(row(1),), num_workers=count)
    return list(made._shared_model.workers)


def do_make(name: str, start: float) -> int:
    return ludus.RemoteModel(name, parts.Scale, model_args=(start,), forward_args=(row(1),)).version


def do_call(name: str, value: float) -> float:
    return float(model(name)(row(value))[0])


def do_workers(name: str) -> list[str]:
    return list(model(name)._shared_model.workers)


def do_gather(name: str, count: int) -> list[float]:
    async def play() -> list[float]:
        return [float(y[0]) for y in await asyncio.gather(*(model(name).forward(row(i + 20)) for i in range(count)))]

    return asyncio.run(play())


def do_play_for(name: str, seconds: float) -> dict[str, float]:
    """Ask without pause; every answer must be right."""
    asked, longest, until = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        assert float(model(name)(row(100 + asked % 100))[0]) == 100 + asked % 100
        longest = max(longest, time.monotonic() - began)
        asked += 1
    return {"asked": asked, "longest": longest}


def do_version(name: str) -> int:
    return model(name).version


def do_until_version(name: str, version: int) -> int:
    deadline = time.monotonic() + 30
    while model(name).version < version:
        assert time.monotonic() < deadline, f"version {version} never came"
        time.sleep(0.005)
    return model(name).version


def do_decide(name: str) -> dict[str, Any]:
    async def play() -> Any:
        return await model(name).decide(row(0))

    decision = asyncio.run(play())
    mirrors = held["session"]._weight_caches
    copies = [] if mirrors is None else [mirror._name for mirror in mirrors._caches.values()]
    return {"action": int(decision.action), "version": decision.version, "copies": copies}


def do_onnx(name: str, made_here: str) -> list[list[float]]:
    """Of a model that was traced at home, and of one that is traced here."""
    x = np.arange(4, dtype=np.float32)
    mine = ludus.RemoteModel(made_here, parts.Two(), forward_args=(x,), use_onnx=True)
    assert model(name)._shared_model.graph
    return [model(name)(x).tolist(), mine(x).tolist()]


def do_publish(name: str, value: float) -> int:
    return model(name).publish_weights(parts.scaled(value))


def do_large(name: str) -> list[int]:
    """Publish a network of several parts, and read it back."""
    network = model(name).get_model()
    weights = ludus.get_torch_model_weights(network)
    weights["factor"] = weights["factor"] * 0 + 7
    version = model(name).publish_weights(weights)
    return [version, sum(int(w.nbytes) for w in weights.values())]


def do_clone(name: str) -> float:
    return float(model(name).clone()(row(1))[0])


def do_leads(name: str) -> bool:
    mirrors = held["session"]._weight_caches
    return any(mirror.is_fetching for mirror in mirrors._caches.values() if mirror._name == name)


def do_push(name: str, values: list[float]) -> None:
    buffer(name).push(*values, drop=False).wait(10)


def do_take(name: str, count: int) -> list[float]:
    taken: list[float] = buffer(name, count).take(20).tolist()
    return taken


def do_take_for_ever(name: str) -> None:
    buffer(name, 1).take(60)


def do_metric(name: str, value: float) -> None:
    ludus.metric(name, value)
    held["session"].client.flush()


def do_serve(name: str, into: str) -> list[float]:
    """A gateway on this machine, and a game that plays against it."""
    actor = ludus.RemoteActor(port=0)
    actor.serve(parts.Echo, name, into)
    host, port = actor.address
    with Client(f"http://{host}:{port}") as client:
        client.start("one")
        answers = [float(np.frombuffer(client.tick("one", row(i).tobytes()), np.float32)[0]) for i in (2, 3)]
        client.end("one")
    held["actor"] = actor
    return answers


def do_stop_serving() -> None:
    held.pop("actor").close()


def do_train(name: str, into: str, out: str) -> None:
    trainer = ludus.RemoteTrainer()
    trainer.train(parts.publish_one, model=model(name), buffer=buffer(into), out=out)
    assert trainer.wait(60)


def do_peers() -> int:
    """Connections of other machines to the hub in this process."""
    return sum(peer.is_remote for peer in list(held["session"].hub._peers))


def do_wait_for_the_end() -> None:
    ludus.run_until_asked_to_stop()


def do_leave() -> list[str]:
    session = held.pop("session")
    session.close()
    held.clear()
    return sorted(path.name for path in Path(os.environ.get("LUDUS_SHM", "/dev/shm")).glob("ludus-*"))


def main() -> None:
    functions: dict[str, Callable[..., Any]] = {k[3:]: v for k, v in globals().items() if k.startswith("do_")}
    for line in open(sys.argv[1]):  # noqa: SIM115 - until the process ends
        what, *args = json.loads(line)
        began = time.monotonic()
        try:
            reply = {"value": functions[what](*args)}
        except (LudusError, AssertionError, TimeoutError, OSError) as error:
            reply = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
