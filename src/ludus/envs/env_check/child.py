"""The process in which an environment is checked. `runner` starts it and reads its journal.

python -m ludus.envs.env_check.child FOLDER            run the stages of FOLDER/task.json
python -m ludus.envs.env_check.child --trace TASK      print the digests of a trace, for the stage `second process`
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from ludus.core import trust
from ludus.envs.env_check.call_marks import SharedCallMarks
from ludus.envs.env_check.findings import EnvFinding, FindingLog
from ludus.envs.env_check.seeding import trace_digests
from ludus.envs.env_check.session import CheckRequest, CheckSession
from ludus.envs.env_check.stages import VITAL, run_stage
from ludus.errors import LudusError, UsageError
from ludus.io import json_lines
from ludus.process import screen_choice
from ludus.process.children import adopt_orphans

TASK, JOURNAL, MARKS, PRINTED, LOG = "task.json", "journal", "marks", "printed", "log"
"""Files of the folder."""


def main(folder: Path) -> NoReturn:
    adopt_orphans()  # so that orphaned processes of the environment are counted
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the runner asks for the stack of a call that hangs
    sys.path.insert(0, "")  # `module:function` is searched in the working directory too, as by `ludus train`
    task = json_lines.decode((folder / TASK).read_bytes())
    journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    printed = os.open(folder / PRINTED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(printed, 1)  # what the environment prints is a finding
    os.close(printed)
    try:
        _run_stages(task, folder, journal)
    except UsageError as error:
        json_lines.write(journal, {"usage": type(error).__name__, "message": error.message, "hint": error.hint})
    except LudusError as error:
        json_lines.write(journal, {"failed": error.message, "hint": error.hint})
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # do not wait for threads of the environment


def _run_stages(task: dict[str, Any], folder: Path, journal: int) -> None:
    def report(finding: EnvFinding) -> None:
        json_lines.write(journal, {"finding": finding.check.kind, "seen": finding.seen})

    session = CheckSession(_request_of(task), FindingLog(report), SharedCallMarks(folder / MARKS))
    _provide_screen(session.request)
    session.facts.update(task["facts"])
    session.drop = tuple(task["facts"].get("drop", ()))
    for stage in task["stages"]:
        json_lines.write(journal, {"begin": stage})
        complete = run_stage(session, stage)
        sys.stdout.flush()
        counts = {finding.check.kind: finding.count for finding in session.findings}
        json_lines.write(journal, {"end": stage, "complete": complete, "counts": counts, "facts": session.facts})
        if not complete and stage in VITAL:
            return


def print_trace(task_file: Path) -> NoReturn:
    sys.path.insert(0, "")
    reply = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json_lines.decode(task_file.read_bytes())
    findings: list[str] = []
    session = CheckSession(_request_of(task), FindingLog(lambda finding: findings.append(finding.seen)))
    session.drop = tuple(task["drop"])
    try:
        _provide_screen(session.request)
        json_lines.write(reply, {"digests": trace_digests(session)})
    except Exception as error:  # of the environment, or already a finding
        json_lines.write(reply, {"failed": findings[0] if findings else f"{type(error).__name__}: {error}"})
    os._exit(0)


def _request_of(task: dict[str, Any]) -> CheckRequest:
    trust.allow(task["request"])  # the user gave these names to the command
    return CheckRequest(**{**task["request"], "wrappers": tuple(task["request"]["wrappers"])})


def _provide_screen(request: CheckRequest) -> None:
    """Start the screen before the environment is made: its time and its process are not those of the environment."""
    screen_choice.configure(request.display)
    if screen_choice.screen_choice() in (screen_choice.XVFB, screen_choice.EGL):
        from ludus.display import headless

        headless.provide_screen()


if __name__ == "__main__":
    if sys.argv[1] == "--trace":
        print_trace(Path(sys.argv[2]))
    main(Path(sys.argv[1]))
