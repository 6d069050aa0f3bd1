"""A node of Ray, held by this process: `python -P -m ludus.ray_cluster.node_process`, with `Orders` as one line of JSON on its input.

It does what `ray start` does, less what nobody here asks for: dashboard, autoscaler, log monitor, and a client server, which
`ray start` cannot be told to leave out and which listens. What it has to say are lines of JSON on its output: waiting, ready, failed.
It ends when Ray does. The kernel ends Ray when it ends, however that happens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.ray_cluster import dashboard_stub
from ludus.ray_cluster.cluster import HEALTH, Head, listens

_ASK_S, _PAUSE_S = 3.0, 0.1
_SETTINGS = HEALTH | {
    "prestart_worker_first_driver": False,  # an idle Python of 60 MB for every core, when one agent is all that will run
}


@dataclass(frozen=True)
class Orders:
    """`head`: HOST:PORT. `wait_s`: how long a node that joins waits for it; None: for ever. `ports`: by Ray's names for them."""

    first: bool
    head: str
    address: str
    name: str
    directory: str
    store_bytes: int
    wait_s: float | None
    cpus: int
    gpus: int | None = None
    memory: int | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> bytes:
        return json_lines.encode(asdict(self))

    @staticmethod
    def read(line: bytes | str) -> Orders:
        return Orders(**json_lines.decode(line))


def main() -> int:
    out = os.dup(1)  # what Ray prints goes where errors go
    os.dup2(2, 1)
    orders = Orders.read(sys.stdin.readline())
    began = time.monotonic()

    def say(**said: Any) -> None:
        json_lines.write(out, said)

    try:
        head = Head(orders.head)  # Ray is imported here, while the head may still be starting
        if not orders.first:
            _await_head(orders, head, lambda: say(waiting=orders.head))
        node = _start(orders)
    except LudusError as error:
        say(failed=error.message, hint=error.hint)
        return error.exit_code
    except Exception as error:  # Ray raises whatever its parts hand it
        say(failed=f"Ray could not be started: {' '.join(str(error).split()) or type(error).__name__}", hint="")
        return 1
    say(ready=round(time.monotonic() - began, 2), logs=node.get_logs_dir_path())
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    names = {info.process.pid: name for name, infos in node.all_processes.items() for info in infos}
    pid = -1 if ended is None else ended.si_pid
    say(failed=f"{names.get(pid, 'a process of Ray')} ended with {_spoken(ended)}", hint="")
    return 1


def _await_head(orders: Orders, head: Head, waiting: Callable[[], None]) -> None:
    """Until the head lets us in and is itself a node. Raises UsageError (token, versions), WorkerFailed at the deadline."""
    deadline = None if orders.wait_s is None else time.monotonic() + orders.wait_s
    told = False
    while True:
        if listens(orders.head, _ASK_S):
            answer = head.ask(_ASK_S)
            head.check(answer)
            if any(member["head"] and member["alive"] for member in answer.get("members", ())):
                return
        if deadline is not None and time.monotonic() > deadline:
            raise WorkerFailed(
                f"The head of this job's Ray at {orders.head} was not there within {orders.wait_s:g} s.",
                "Is its node running, and can this machine reach that port?",
            )
        if not told:
            waiting()
            told = True
        time.sleep(_PAUSE_S)  # nobody tells us that somebody begins to listen


def _start(orders: Orders) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.resource_isolation_config import ResourceIsolationConfig

    class Plain(Node):  # type: ignore[misc,unused-ignore]
        def start_api_server(self, **_: Any) -> None:
            """Starts a process of 100 MB also where no dashboard is wanted."""

    _leave_out_dashboard_agent()

    port = int(orders.head.rpartition(":")[2])
    given: dict[str, Any] = (
        {"gcs_server_port": port, "_system_config": _SETTINGS} if orders.first else {"gcs_address": orders.head}
    )
    given["include_log_monitor"] = False  # annotated as a string, and read as a bool
    params = RayParams(
        node_ip_address=orders.address,
        node_name=orders.name,
        num_cpus=orders.cpus,
        num_gpus=orders.gpus,
        memory=orders.memory,
        object_store_memory=orders.store_bytes,
        temp_dir=orders.directory,
        labels=dict(orders.labels),
        include_dashboard=False,
        no_monitor=True,
        resource_isolation_config=ResourceIsolationConfig(enable_resource_isolation=False),
        **given,
        **dict[str, Any](orders.ports),
    )
    return Plain(params, head=orders.first, shutdown_at_exit=False, spawn_reaper=True)


def _leave_out_dashboard_agent() -> None:
    from ray._private import ray_constants, services

    build = services._build_python_executable_command_memory_profileable

    def built(component: str, *args: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(dashboard_stub.__file__)]
        return list(build(component, *args, **options))

    services._build_python_executable_command_memory_profileable = built


def _spoken(ended: Any) -> str:
    if ended is None:
        return "no code"
    return f"code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"signal {ended.si_status}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(str(error))
