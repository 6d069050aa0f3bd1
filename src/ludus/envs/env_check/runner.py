"""Checks an environment in a child process with time limits: a crash, a hang or an exit() of the environment becomes a finding."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ludus import errors
from ludus.envs.env_check.call_marks import CallMark, create_marks, read_mark
from ludus.envs.env_check.child import JOURNAL, LOG, MARKS, TASK
from ludus.envs.env_check.findings import EnvFinding, EnvReport, FindingLog
from ludus.envs.env_check.session import CheckRequest
from ludus.envs.env_check.stages import SECOND_PROCESS, STAGES, VITAL
from ludus.errors import LudusError, UsageError
from ludus.io import json_lines
from ludus.process.children import send_signal
from ludus.process.commands.command import GameExit, GameProcess, Games

TIMEOUT_S = 30.0
"""Default limit of one call of the environment."""

_POLL_S = 0.05
_STACK_S = 0.5
_START_S = 60.0
"""Limit of the import of Ludus and of everything else outside of calls."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$')
_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_KIND_OF_CALL = {
    "step after the end of an episode": "after_end",
    "a step with a forbidden action": "illegal_action",
    "render": "render",
}
"""Calls that only harm if they are made: their crash or hang is a finding of another kind."""
ALL_STAGES = (*list(STAGES)[:4], SECOND_PROCESS, *list(STAGES)[4:])


def check_env(
    request: CheckRequest,
    *,
    stages: Sequence[str] = ALL_STAGES,
    timeout_s: float = TIMEOUT_S,
    on_finding: Callable[[EnvFinding], object] = lambda finding: None,
) -> EnvReport:
    """Check an environment. `on_finding` is called with the first finding of every kind. Raises UsageError: it cannot be made here."""
    run = _CheckRun(request, timeout_s, FindingLog(on_finding))
    with tempfile.TemporaryDirectory(prefix="ludus-check-env-") as directory, Games() as games:
        rest = list(stages)
        while rest:
            rest = run.run(games, Path(directory), rest)
    facts = {key: value for key, value in run.facts.items() if key != "trace_digests"}
    return EnvReport(request.env, dict(request.env_config), list(run.findings), facts, run.complete, request.reported_settings)


class _CheckRun:
    """What is known so far, over several child processes: one that dies is replaced for the stages that are left."""

    def __init__(self, request: CheckRequest, timeout_s: float, findings: FindingLog) -> None:
        self._request, self._timeout_s = request, timeout_s
        self.findings, self.facts, self.complete = findings, dict[str, Any](), list[str]()
        self._starts = 0

    def run(self, games: Games, folder: Path, stages: list[str]) -> list[str]:
        """Run stages in one child process; returns those that are left."""
        self._starts += 1
        folder = folder / str(self._starts)
        folder.mkdir()
        create_marks(folder / MARKS)
        task = {"request": asdict(self._request), "stages": stages, "facts": self.facts}
        (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "ludus.envs.env_check.child", str(folder)]
        game = games.start(command, log=folder / LOG, environment=dict(os.environ), directory=Path.cwd())
        journal = _Journal(folder / JOURNAL)
        hung = self._watch(game, folder, journal)
        ended = game.stop(0.2) if hung else game.exit
        journal.read(self._handle)
        if journal.stage is None and journal.ended:
            return self._rest(stages, journal)
        return self._handle_death(stages, journal, hung, ended, folder)

    def _watch(self, game: GameProcess, folder: Path, journal: _Journal) -> CallMark | None:
        """Wait for the end of the child; returns the call that has not returned in time."""
        last, since = CallMark(0, 0, ""), time.monotonic()
        while game.wait(_POLL_S) is None:
            journal.read(self._handle)
            mark = read_mark(folder / MARKS)
            if mark.serial != last.serial:
                last, since = mark, time.monotonic()
            if time.monotonic() - since > (self._timeout_s if mark.running else max(_START_S, self._timeout_s)):
                send_signal(game.pid, signal.SIGUSR1)  # it writes its stack to the log
                time.sleep(_STACK_S)
                return mark
        return None

    def _handle(self, entry: dict[str, Any]) -> None:
        if "finding" in entry:
            self.findings.add(entry["finding"], entry["seen"])
        elif "end" in entry:
            for finding in self.findings:
                finding.count = max(finding.count, entry["counts"].get(finding.check.kind, 0))
            self.facts.update(entry["facts"])
            if entry["complete"]:
                self.complete.append(entry["end"])
        elif "usage" in entry:
            kind = getattr(errors, entry["usage"], UsageError)
            raise kind(entry["message"], entry["hint"])
        elif "failed" in entry:
            raise LudusError(entry["failed"], entry["hint"])

    def _rest(self, stages: list[str], journal: _Journal) -> list[str]:
        return [] if self._lacks_vital(journal.ended) else [stage for stage in stages if stage not in journal.ended]

    def _lacks_vital(self, ended: Sequence[str]) -> bool:
        return any(stage in VITAL and stage not in self.complete for stage in ended)

    def _handle_death(
        self, stages: list[str], journal: _Journal, hung: CallMark | None, ended: GameExit | None, folder: Path
    ) -> list[str]:
        mark = hung or read_mark(folder / MARKS)
        place = _stack_place((folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else "")
        call = mark.call if mark.running else f"stage {journal.stage or stages[0]!r}"
        kind = _KIND_OF_CALL.get(
            call, "hang" if hung else "exits" if ended is not None and ended.code is not None and ended.code >= 0 else "crash"
        )
        if hung:
            text = f"{call} has not returned within {self._timeout_s:g} s{place}, step {mark.step}"
        else:
            text = f"its process {ended} in {call}{place}, step {mark.step}"
        self.findings.add(kind, text)
        stage = journal.stage or stages[0]
        if stage in VITAL:
            return []
        return [each for each in stages if each not in journal.ended and each != stage]


class _Journal:
    """Reads what a child has written so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self.stage: str | None = None
        self.ended: list[str] = []

    def read(self, handle: Callable[[dict[str, Any]], None]) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for entry in json_lines.decode_valid(whole.splitlines()):
            if "begin" in entry:
                self.stage = entry["begin"]
            elif "end" in entry:
                self.ended.append(entry["end"])
                self.stage = None
            handle(entry)


def _stack_place(log: str) -> str:
    """The innermost line of the user's code in the last stack that faulthandler has written, as ` (game.py:12, in step)`."""
    _, mark, stack = log.rpartition("(most recent call first):")
    frames = [found.groups() for found in map(_FRAME.match, stack.splitlines()) if found] if mark else []
    foreign = [frame for frame in frames if not frame[0].startswith((_OWN, "<"))]
    own = [frame for frame in foreign if not frame[0].startswith(_LIBRARIES)]
    for file, line, function in (own or foreign)[:1]:
        return f" ({file.removeprefix(f'{Path.cwd()}/')}:{line}, in {function})"
    return ""
