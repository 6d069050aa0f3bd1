"""Process that runs a Ray node: `python -P -m ludus.ray_cluster.node_process SPEC`, with a `NodeSpec` as JSON.

It does what `ray start` does, without dashboard, autoscaler, log monitor and client server; the latter listens and cannot be disabled
in `ray start`. It reports as lines of JSON on its output: waiting, ready, failed. It ends when Ray does; the kernel ends Ray with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.ray_cluster import dashboard_stub
from ludus.ray_cluster.cluster import HEALTH, RayHead, is_listening, ray_errors
from ludus.ray_cluster.node import NodeSpec

_QUERY_S, _PAUSE_S = 3.0, 0.1
_SETTINGS = HEALTH | {
    "prestart_worker_first_driver": False,  # else an idle Python of 60 MB per core, though only one agent will run
}


class HeadAbsent(WorkerFailed):
    """The head was not reachable in time."""


def main(words: Sequence[str]) -> int:
    out = os.dup(1)  # output of Ray goes to standard error
    os.dup2(2, 1)
    spec = NodeSpec.from_json(words[0])
    began = time.monotonic()

    def report(**message: Any) -> None:
        json_lines.write(out, message)

    try:
        head = RayHead(spec.head)  # imports Ray, while the head may still be starting
        if not spec.first:
            _wait_for_head(spec, head, lambda: report(waiting=spec.head))
        node = _start(spec)
    except HeadAbsent as error:
        report(failed=error.message, hint=error.hint, absent=True)
        return error.exit_code
    except LudusError as error:
        report(failed=error.message, hint=error.hint)
        return error.exit_code
    except ray_errors() as error:
        report(failed=f"Ray could not be started: {' '.join(str(error).split()) or type(error).__name__}", hint="")
        return 1
    report(ready=round(time.monotonic() - began, 2), logs=node.get_logs_dir_path())
    ended = os.waitid(os.P_ALL, 0, os.WEXITED)  # only Ray's processes are children; the guard adopts their orphans
    assert ended is not None
    names = {info.process.pid: name for name, infos in node.all_processes.items() for info in infos}
    how = f"{'code' if ended.si_code == os.CLD_EXITED else 'signal'} {ended.si_status}"
    report(failed=f"{names.get(ended.si_pid, 'a process of Ray')} ended with {how}", hint="")
    return 1


def _wait_for_head(spec: NodeSpec, head: RayHead, waiting: Callable[[], None]) -> None:
    """Wait until the head accepts us and is itself a node. Raises UsageError (token, versions), WorkerFailed at the deadline."""
    deadline = None if spec.wait_s is None else time.monotonic() + spec.wait_s
    announced = False
    while True:
        if is_listening(spec.head, _QUERY_S):
            reply = head.query(_QUERY_S)
            head.check(reply)
            if any(member["head"] and member["alive"] for member in reply.get("members", ())):
                return
        if deadline is not None and time.monotonic() > deadline:
            raise HeadAbsent(
                f"The head of this job's Ray at {spec.head} was not reachable within {spec.wait_s:g} s.",
                "Check that its node is running and that this machine can reach that port.",
            )
        if not announced:
            waiting()
            announced = True
        time.sleep(_PAUSE_S)  # there is no notification for a port that begins to listen


def _start(spec: NodeSpec) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.resource_isolation_config import ResourceIsolationConfig

    class NodeWithoutDashboard(Node):  # type: ignore[misc,unused-ignore]
        def start_api_server(self, **_: Any) -> None:
            """Do nothing: it would start a process of 100 MB even without a dashboard."""

    _replace_dashboard_agent()

    port = int(spec.head.rpartition(":")[2])
    given: dict[str, Any] = {"gcs_server_port": port, "_system_config": _SETTINGS} if spec.first else {"gcs_address": spec.head}
    given["include_log_monitor"] = False  # annotated as a string, but read as a bool
    params = RayParams(
        node_ip_address=spec.address,
        node_name=spec.name,
        num_cpus=spec.cpus,
        num_gpus=spec.gpus,
        memory=spec.memory,
        object_store_memory=spec.store_bytes,
        temp_dir=spec.directory,
        labels=dict(spec.labels),
        include_dashboard=False,
        no_monitor=True,
        resource_isolation_config=ResourceIsolationConfig(enable_resource_isolation=False),
        **given,
        **dict[str, Any](spec.ports),
    )
    return NodeWithoutDashboard(params, head=spec.first, shutdown_at_exit=False, spawn_reaper=True)


def _replace_dashboard_agent() -> None:
    from ray._private import ray_constants, services

    build = services._build_python_executable_command_memory_profileable

    def build_or_replace(component: str, *args: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(dashboard_stub.__file__)]
        return list(build(component, *args, **options))

    services._build_python_executable_command_memory_profileable = build_or_replace


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(str(error))
