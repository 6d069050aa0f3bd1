"""A conversation with the far side of a machine, over the system's own `ssh`: keys only, host keys checked, nothing secret in its words."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ludus
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader, LineTooLong
from ludus.launch.ssh.remote_agent import MARK, MAX_LINE, PROTOCOL

FAR = "ludus.launch.ssh.remote_agent"
START_S = 60.0
"""How long an interpreter may take until it answers, after the connection is there: on a cold network drive it does."""
ANSWER_S = 120.0

_SETUP_FAILED = 97
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\$-]*")
_OPTION = re.compile(r"[A-Za-z0-9]+\s*=.*")
_SHOWN = 300


@dataclass(frozen=True)
class SshNode:
    """One machine. `slots`: processes that it is meant for. `address`: as the other nodes reach it, when that is not `host`.

    `python`: its interpreter, when it has another one than the rest. `user`: empty means what SSH is configured to.
    """

    host: str
    user: str = ""
    port: int = 22
    slots: int = 1
    address: str = ""
    python: str = ""

    @property
    def reached(self) -> str:
        return self.address or self.host


@dataclass(frozen=True)
class SshSettings:
    """`python`: the interpreter on the machines that has Ludus installed; empty means that of this process.

    `setup`: lines of shell that are run before it, such as `module load cuda`. `workdir`: where processes start, there; `copy`: files
    and directories of this machine that are sent into it first. `options`: further ones for SSH, each as `Name=value`; those that
    make it safe cannot be changed. `patience_s`: how long a part goes on that cannot reach the first machine. `program`: SSH itself.
    """

    nodes: tuple[SshNode, ...]
    identity: Path | None = None
    known_hosts: Path | None = None
    python: str = ""
    setup: tuple[str, ...] = ()
    workdir: str = ""
    copy: tuple[Path, ...] = ()
    connect_s: float = 10.0
    options: tuple[str, ...] = ()
    patience_s: float = 120.0
    program: str = "ssh"

    def interpreter(self, node: int) -> str:
        return self.nodes[node].python or self.python or sys.executable


def checked_settings(settings: SshSettings) -> SshSettings:
    """Raises UsageError."""
    if not settings.nodes:
        raise UsageError("No machines are named.", "Add --iplist FILE, with a line `address user port slots` for each.")
    for node in settings.nodes:
        for what, value, form in (
            ("host", node.host, _HOST),
            ("address", node.reached, _HOST),
            ("user", node.user or "x", _USER),
        ):
            if not form.fullmatch(value):
                raise UsageError(f"{value!r} is no {what} of a machine.")
        if not 0 < node.port < 1 << 16:
            raise UsageError(f"{node.host} has port {node.port}.", "It is a number from 1 to 65535.")
    addresses = [node.reached for node in settings.nodes]
    if twice := [address for address in addresses if addresses.count(address) > 1]:
        raise UsageError(f"{twice[0]} is listed twice.", "Each machine has one line; its slots say how much it takes.")
    for option in settings.options:
        if not _OPTION.fullmatch(option) or "\n" in option:
            raise UsageError(f"{option!r} is no option of SSH.", "Write Name=value, as in ssh_config(5).")
    if not (0 < settings.connect_s < math.inf and 0 < settings.patience_s < math.inf):
        raise UsageError(f"connect_s={settings.connect_s} and patience_s={settings.patience_s} are numbers of seconds.")
    return settings


def ssh_words(settings: SshSettings, node: int, module: str = FAR, *words: str) -> list[str]:
    """What is run here so that `python -m module words` runs there, with its input and output. SSH takes the first of two values."""
    at = settings.nodes[node]
    options = [
        "BatchMode=yes", "StrictHostKeyChecking=yes", "PasswordAuthentication=no", "KbdInteractiveAuthentication=no",
        "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes", "PermitLocalCommand=no", "ControlMaster=no",
        *([f"UserKnownHostsFile={_quoted(settings.known_hosts)}", "UpdateHostKeys=no"] if settings.known_hosts else []),
        *settings.options,
        f"ConnectTimeout={max(1, math.ceil(settings.connect_s))}", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    ]  # fmt: skip
    said = [settings.program, "-T", *(word for option in options for word in ("-o", option))]
    if settings.identity is not None:
        said += ["-o", "IdentitiesOnly=yes", "-i", str(settings.identity)]
    if at.user:
        said += ["-l", at.user]
    return [*said, "-p", str(at.port), "--", at.host, _remote(settings, node, module, words)]


def _remote(settings: SshSettings, node: int, module: str, words: tuple[str, ...]) -> str:
    """One line for the login shell there, whichever that is. Setup neither reads our requests nor writes among the answers."""
    command = shlex.join([settings.interpreter(node), "-P", "-m", module, *words])
    if not settings.setup:
        return f"exec {command}"
    lines = "\n".join(settings.setup)
    script = f"{{\n{lines}\n}} </dev/null >&2 || exit {_SETUP_FAILED}\nexec {command}"
    return f"exec bash -lc {shlex.quote(script)}"


def _quoted(path: Path) -> str:
    """As ssh_config wants a path that may have blanks."""
    return f'"{path}"' if " " in str(path) else str(path)


def explained(settings: SshSettings, node: int, code: int | None, said: str) -> LudusError:
    """Why a machine does not answer, in words that say what to do."""
    at = settings.nodes[node]
    where = f"{at.user}@{at.host}" if at.user else at.host
    scan = f"ssh-keyscan -p {at.port} {at.host} >> {settings.known_hosts or '~/.ssh/known_hosts'}"
    python = settings.interpreter(node)
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")[:_SHOWN]
    if "IDENTIFICATION HAS CHANGED" in said:
        return UsageError(
            f"{at.host} has a different host key than the known one: the connection may be intercepted.",
            f"If it was reinstalled, remove the old key (ssh-keygen -R {at.host}), and compare the new one: {scan}",
        )
    if "Host key verification failed" in said:
        return UsageError(
            f"The host key of {at.host} is not known.", f"Compare its fingerprint with what its console says, then: {scan}"
        )
    if "Permission denied" in said and code == 255:
        key = f"with {settings.identity}" if settings.identity else "with your keys"
        return UsageError(
            f"{where} does not let us in {key}.", f"Is it the right user? Add your key there: ssh-copy-id -p {at.port} {where}"
        )
    if "Could not resolve" in said:
        return UsageError(f"{at.host} is not a name that is known here.", "Write its address, or add it to /etc/hosts.")
    if "No module named" in said and "ludus" in said:
        return UsageError(
            f"{python} on {at.host} has no Ludus.", f"Install it there ({python} -m pip install ludus), or set python."
        )
    if "Unknown option: -P" in said:
        return UsageError(f"{python} on {at.host} is older than Python 3.11.", "Set python to another one.")
    if code in (126, 127):
        return UsageError(f"{python} cannot be run on {at.host}: {last}", "Set python to the interpreter that has Ludus there.")
    if code == _SETUP_FAILED:
        return UsageError(f"The setup lines failed on {at.host}: {last}", "The last of them has to succeed.")
    if code is None:
        return WorkerFailed(f"{at.host} does not answer{': ' if last else ''}{last}.", "Is it on, and its network?")
    return WorkerFailed(f"{at.host} does not answer: {last or f'SSH ended with code {code}'}", "Is it on, and its network?")


class Conversation:
    """One `ssh`, from the first request to `close`. It ends with this process, too: its input does. For one thread."""

    def __init__(self, settings: SshSettings, node: int, *words: str) -> None:
        self._settings, self._node = settings, node
        self._said: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the conversation
        self._noise: deque[str] = deque(maxlen=5)
        self._answers: deque[dict[str, Any]] = deque()
        self.hello: dict[str, Any] = {}
        self._begun = time.monotonic()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                ssh_words(settings, node, FAR, *words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,  # an interrupt at the keyboard is ours; we say what becomes of it
            )
        except OSError as error:
            self._said.close()
            raise UsageError(f"{settings.program} cannot be run: {error.strerror}.", "Install the OpenSSH client.") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._reader = LineReader(self._output.fileno(), MAX_LINE)

    def fileno(self) -> int:
        return self._output.fileno()

    def greet(self) -> dict[str, Any]:
        """Wait until it is there. Raises LudusError."""
        if not self.hello:
            found = self.receive(self._begun + self._settings.connect_s + START_S).get("hello")
            if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
                host = self._settings.nodes[self._node].host
                raise UsageError(
                    f"Ludus on {host} speaks another protocol.", f"Install {ludus.__version__} there, as it is here."
                )
            self.hello = found
        return self.hello

    def send(self, request: Mapping[str, Any]) -> None:
        """Raises WorkerFailed, UsageError."""
        try:
            self.input.write(json_lines.encode(request))
            self.input.flush()
        except OSError as error:
            raise self._why() from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next answer. Raises LudusError: that of the far side, or that it is not there any more."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not self._answers:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise self._why(silent=True)
                if not self.pull():
                    raise self._why()
        return self.next()

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        self.send(request)
        return self.result(deadline)

    def result(self, deadline: float) -> dict[str, Any]:
        found = self.receive(deadline).get("ok")
        return found if isinstance(found, dict) else {}

    def pull(self) -> bool:
        """Take what has come; False when that was the end."""
        try:
            for line in self._reader.read():
                self._hear(line)
        except LineTooLong as error:
            raise WorkerFailed(f"{self._settings.nodes[self._node].host} says things without end.") from error
        return not self._reader.at_end

    @property
    def waiting(self) -> bool:
        return bool(self._answers)

    def next(self) -> dict[str, Any]:
        """One that has come. Raises LudusError when the far side says one."""
        answer = self._answers.popleft()
        if isinstance(answer.get("error"), dict):
            error = answer["error"]
            kind = UsageError if error.get("kind") == "usage" else WorkerFailed
            raise kind(f"{self._settings.nodes[self._node].host}: {error.get('message')}", str(error.get("hint", "")))
        return answer

    def close(self, within_s: float = 1.0) -> None:
        """It ends when its input does; one that does not is killed."""
        with contextlib.suppress(OSError):
            self.input.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._said.close()

    def _hear(self, line: bytes) -> None:
        found = json_lines.decode_marked(line, MARK)
        if found is None:
            self._noise.append(line.decode(errors="replace"))
        else:
            self._answers.append(found)

    def _why(self, *, silent: bool = False) -> LudusError:
        code: int | None = None
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5)
        said = os.pread(self._said.fileno(), 100_000, 0).decode(errors="replace")  # it still writes there, at the same position
        return explained(self._settings, self._node, code, said or "\n".join(self._noise))
