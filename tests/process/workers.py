"""Targets of the worker processes of test_supervisor.py. Each reports JSON lines on its first descriptor."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from ludus.process.workers.supervisor import Context


def say(context: Context, value: Any) -> None:
    os.write(context.fds[0], json.dumps(value).encode() + b"\n")


def serve(context: Context) -> None:
    """Ready at once, then beats until SIGTERM."""
    context.ready()
    while True:
        context.beat()
        time.sleep(0.01)


def introduce(context: Context, *args: Any, **kwargs: Any) -> None:
    say(context, [context.name, context.incarnation, len(context.fds), args, kwargs])


def introduce_and_serve(context: Context) -> None:
    say(context, [context.name, context.incarnation, os.getpid(), os.getppid()])
    serve(context)


def look_around(context: Context) -> None:
    say(context, [os.getcwd(), os.environ.get("LUDUS_TEST"), os.environ.get("OMP_WAIT_POLICY"), sys.path[-1]])


def throw_dice(context: Context) -> None:
    import numpy
    import torch

    say(context, [random.random(), numpy.random.random(), float(torch.rand(1, dtype=torch.float64))])


def multiply(context: Context) -> None:
    """Heavy enough that torch and numpy use their threads."""
    import numpy
    import torch

    ours, theirs = torch.ones(400, 400), numpy.ones((400, 400), dtype=numpy.float32)
    say(context, [float((ours @ ours).sum()), float((theirs @ theirs).sum())])


def fail(context: Context, *, ready: bool) -> None:
    if ready:
        context.ready()
    say(context, context.incarnation)
    raise ZeroDivisionError("the dice have no sides")


def fail_with_a_thread(context: Context) -> None:
    """A thread that is no daemon must not keep a failed worker half alive."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ZeroDivisionError


def leave(context: Context, how: str, code: Any) -> None:
    if how == "exit":
        sys.exit(code)
    os._exit(code)


def hold(context: Context, *, incarnations: int) -> None:
    """The first incarnations block their loop after a while."""
    context.ready()
    if context.incarnation <= incarnations:
        context.beat()
        time.sleep(60)
    serve(context)


def ignore_sigterm(context: Context) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.ready()
    time.sleep(60)


def stop_in_order(context: Context) -> None:
    stop = threading.Event()
    context.on_stop(stop.set)
    context.ready()
    stop.wait(60)
    late: list[str] = []
    context.on_stop(lambda: late.append("called"))
    say(context, [context.stopping, late])


def stop_a_loop(context: Context) -> None:
    """As a server would: an event loop that sleeps until it is stopped."""
    import uvloop

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        context.on_stop(lambda: loop.call_soon_threadsafe(stop.set))
        context.ready()
        await asyncio.wait_for(stop.wait(), 60)
        say(context, type(loop).__module__)

    uvloop.run(main())


def stop_together(context: Context) -> None:
    """Ends only if the other one was told to stop meanwhile."""
    hears, tells = context.fds
    stop = threading.Event()
    context.on_stop(stop.set)
    context.ready()
    stop.wait(60)
    os.write(tells, b"\0")
    os.read(hears, 1)


def start_a_program(context: Context) -> None:
    say(context, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    serve(context)


def measure(context: Context, *, data: bytes) -> None:
    say(context, [context.incarnation, len(data), data[:1].decode(), data[-1:].decode()])
    serve(context)


def write_logs(context: Context) -> None:
    print("to standard output")  # noqa: T201 - what a user would do
    print("to standard error", file=sys.stderr)  # noqa: T201
    logging.getLogger("ludus.anything").info("to the log")
    subprocess.run([sys.executable, "-c", "print('from a program')"], check=True)
    raise ZeroDivisionError("to the end")


def descriptors(context: Context) -> None:
    """Which kinds of files a fresh worker holds, and which of them a program it executes would inherit."""
    held = {
        int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    }
    say(context, {fd: [name, os.get_inheritable(fd)] for fd, name in held.items() if fd > 2})


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("made of smoke")
