"""Log lines of a job's pods, each once, from logs that are read again and again."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ludus.errors import LudusError, UsageError
from ludus.launch.kubernetes.objects import ROLE, Manifest
from ludus.launch.kubernetes.status import (
    JobRecord,
    JobSnapshot,
    container_state,
    job_container,
    pod_label,
    process_name,
    restart_count,
    seconds,
)

log = logging.getLogger(__name__)

_LINE = re.compile(r"(\S+)Z (.*)", re.DOTALL)


class ReadLog(Protocol):
    def __call__(self, pod: str, container: str, *, since: str = "", previous: bool = False) -> str:
        """Return lines with their times, from a whole second on."""
        ...


@dataclass
class LogCursor:
    """Position in a log. The server returns lines from whole seconds on: those that were read before are skipped."""

    since: str = ""
    restarts: int = 0
    last: str = ""
    at_last: list[str] = field(default_factory=list)
    """Lines with the time `last`."""

    def new_lines(self, text: str) -> Iterator[str]:
        repeated = list(self.at_last)
        for raw in text.split("\n"):
            found = _LINE.fullmatch(raw)
            if found is None:
                continue
            moment, line = _pad_fraction(found[1]), found[2].rstrip("\r")
            if moment < self.last:
                continue
            if moment == self.last and line in repeated:
                repeated.remove(line)
                continue
            if moment > self.last:
                self.last, self.at_last, repeated = moment, [], []
                self.since = f"{moment.partition('.')[0]}Z"
            self.at_last.append(line)
            yield line


class JobLogReader:
    """Reads the logs of a job. `role`: None: of all roles; with several processes each line has the name of its process."""

    def __init__(self, read_log: ReadLog, role: str | None = None) -> None:
        self._read_log, self._role = read_log, role
        self._cursors: dict[str, LogCursor] = {}

    def new_lines(self, snapshot: JobSnapshot) -> Iterator[str]:
        """Return the lines that were not returned before, pod by pod."""
        record = JobRecord.from_owner(snapshot.owner)
        wanted = [name for name in record.processes if self._role in (None, name)]
        several = sum(record.processes[name] for name in wanted) > 1
        for pod in sorted(snapshot.pods, key=lambda each: seconds(each["metadata"].get("creationTimestamp"))):
            name = process_name(pod).removeprefix(f"{snapshot.id}-")
            guests = [guest for guest, host in record.hosts.items() if host == name]
            if {pod_label(pod, ROLE), *map(role_of, guests)}.isdisjoint(wanted):
                continue
            for text in self._pod_lines(pod):
                author, line = author_of(text, name, guests)
                role = pod_label(pod, ROLE) if author == name else role_of(author)
                if role in wanted:
                    yield f"{author}: {line}" if several else line

    def _pod_lines(self, pod: Manifest) -> Iterator[str]:
        """Return new lines of a pod's container, after those of the instance that the kubelet has restarted."""
        name, container = str(pod["metadata"]["name"]), str(job_container(pod)["name"])
        restarts = restart_count(pod)
        cursor = self._cursors.setdefault(name, LogCursor())
        if restarts > cursor.restarts:
            cursor.restarts = restarts
            with contextlib.suppress(LudusError):  # the kubelet keeps the last one only, and not always
                yield from cursor.new_lines(self._read_log(name, container, since=cursor.since, previous=True))
        if not {"running", "terminated"} & container_state(pod).keys():
            return
        try:
            text = self._read_log(name, container, since=cursor.since)
        except UsageError as error:  # deleted, or not started after all
            log.debug("the log of %s cannot be read: %s", name, error)
            return
        yield from cursor.new_lines(text)


def author_of(text: str, name: str, guests: Sequence[str]) -> tuple[str, str]:
    """Return the process that wrote a line, and the line: processes in the container of another one have a prefix."""
    for guest in guests:
        if text.startswith(f"{guest}: "):
            return guest, text[len(guest) + 2 :]
    return name, text


def role_of(process: str) -> str:
    return process.rpartition("-")[0]


def _pad_fraction(moment: str) -> str:
    """Make times comparable as text: the server leaves out zeros at the end of a fraction."""
    whole, _, fraction = moment.partition(".")
    return f"{whole}.{fraction:0<9}"
