"""Connection to the agent on another machine over the system's `ssh`: keys only, host keys checked, no secrets in command lines."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ludus
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.launch.agent_process import AgentProcess
from ludus.launch.ssh.remote_agent import MARK, MAX_LINE, PROTOCOL

AGENT_MODULE = "ludus.launch.ssh.remote_agent"
START_S = 60.0
"""Time limit for the start of the interpreter, which may be on a cold network drive."""
ANSWER_S = 120.0

_SETUP_FAILED = 97
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\$-]*")
_OPTION = re.compile(r"[A-Za-z0-9]+\s*=.*")
_MAX_SHOWN = 300


@dataclass(frozen=True)
class SshNode:
    """One machine. `slots`: number of processes it is meant for. `address`: for the other nodes, if it differs from `host`.

    `python`: its interpreter, if it differs from that of the settings. `user`: empty: as configured in SSH.
    """

    host: str
    user: str = ""
    port: int = 22
    slots: int = 1
    address: str = ""
    python: str = ""

    @property
    def node_address(self) -> str:
        """The address for connections from the other nodes."""
        return self.address or self.host


@dataclass(frozen=True)
class SshSettings:
    """`python`: the interpreter with Ludus on the machines; empty: the path of this process's interpreter.

    `setup`: shell lines to run first, such as `module load cuda`. `workdir`: working directory on the machines; `copy`: local files
    and directories to copy into it. `options`: further SSH options as `Name=value`; they cannot override the security options.
    `patience_s`: how long a part of a job runs on without a connection to the first machine. `program`: the SSH client.
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

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @staticmethod
    def from_json(text: str) -> SshSettings:
        data = json.loads(text)
        paths = {name: Path(data[name]) if data[name] else None for name in ("identity", "known_hosts")}
        tuples = {name: tuple(data[name]) for name in ("setup", "options")}
        return SshSettings(**{**data, **paths, **tuples, "copy": (), "nodes": tuple(SshNode(**node) for node in data["nodes"])})


def check_settings(settings: SshSettings) -> SshSettings:
    """Raises UsageError."""
    if not settings.nodes:
        raise UsageError("No machines are given.", "Add --iplist FILE, with a line `address user port slots` for each.")
    for node in settings.nodes:
        for what, value, form in (
            ("host", node.host, _HOST),
            ("address", node.node_address, _HOST),
            ("user", node.user or "x", _USER),
        ):
            if not form.fullmatch(value):
                raise UsageError(f"{value!r} is not a valid {what}.")
        if not 0 < node.port < 1 << 16:
            raise UsageError(f"{node.host} has port {node.port}.", "Use a number from 1 to 65535.")
    addresses = [node.node_address for node in settings.nodes]
    if twice := [address for address in addresses if addresses.count(address) > 1]:
        raise UsageError(f"{twice[0]} is listed twice.", "Give each machine one line, with its number of slots.")
    for option in settings.options:
        if not _OPTION.fullmatch(option) or "\n" in option:
            raise UsageError(f"{option!r} is not an SSH option.", "Write Name=value, as in ssh_config(5).")
    if not (0 < settings.connect_s < math.inf and 0 < settings.patience_s < math.inf):
        raise UsageError(f"connect_s={settings.connect_s} and patience_s={settings.patience_s} must be numbers of seconds > 0.")
    return settings


def ssh_words(settings: SshSettings, node: int, module: str = AGENT_MODULE, *words: str) -> list[str]:
    """Return the ssh command that runs `python -m module words` on a machine. Of repeated options, SSH takes the first."""
    at = settings.nodes[node]
    options = [
        "BatchMode=yes", "StrictHostKeyChecking=yes", "PasswordAuthentication=no", "KbdInteractiveAuthentication=no",
        "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes", "PermitLocalCommand=no", "ControlMaster=no",
        *([f"UserKnownHostsFile={_quote_path(settings.known_hosts)}", "UpdateHostKeys=no"] if settings.known_hosts else []),
        *settings.options,
        f"ConnectTimeout={max(1, math.ceil(settings.connect_s))}", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    ]  # fmt: skip
    command = [settings.program, "-T", *(word for option in options for word in ("-o", option))]
    if settings.identity is not None:
        command += ["-o", "IdentitiesOnly=yes", "-i", str(settings.identity)]
    if at.user:
        command += ["-l", at.user]
    return [*command, "-p", str(at.port), "--", at.host, _remote_command(settings, node, module, words)]


def _remote_command(settings: SshSettings, node: int, module: str, words: tuple[str, ...]) -> str:
    """Return one line for any login shell. Setup lines neither read requests from stdin nor write to stdout."""
    command = shlex.join([settings.interpreter(node), "-P", "-m", module, *words])
    if not settings.setup:
        return f"exec {command}"
    lines = "\n".join(settings.setup)
    script = f"{{\n{lines}\n}} </dev/null >&2 || exit {_SETUP_FAILED}\nexec {command}"
    return f"exec bash -lc {shlex.quote(script)}"


def _quote_path(path: Path) -> str:
    """Quote a path with blanks for ssh_config."""
    return f'"{path}"' if " " in str(path) else str(path)


def explain_failure(settings: SshSettings, node: int, code: int | None, output: str) -> LudusError:
    """Translate the exit code and output of ssh into an error with a remedy."""
    at = settings.nodes[node]
    where = f"{at.user}@{at.host}" if at.user else at.host
    scan = f"ssh-keyscan -p {at.port} {at.host} >> {settings.known_hosts or '~/.ssh/known_hosts'}"
    python = settings.interpreter(node)
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")[:_MAX_SHOWN]
    if "IDENTIFICATION HAS CHANGED" in output:
        return UsageError(
            f"{at.host} has a different host key than the known one: the connection may be intercepted.",
            f"If it was reinstalled, remove the old key (ssh-keygen -R {at.host}), and compare the new one: {scan}",
        )
    if "Host key verification failed" in output:
        return UsageError(
            f"The host key of {at.host} is not known.", f"Compare its fingerprint with that on its console, then: {scan}"
        )
    if "Permission denied" in output and code == 255:
        key = f"with {settings.identity}" if settings.identity else "with your keys"
        return UsageError(
            f"{where} rejects the login {key}.", f"Is it the right user? Add your key there: ssh-copy-id -p {at.port} {where}"
        )
    if "Could not resolve" in output:
        return UsageError(f"The host name {at.host} cannot be resolved.", "Write its address, or add it to /etc/hosts.")
    if "No module named" in output and "ludus" in output:
        return UsageError(
            f"{python} on {at.host} has no Ludus.", f"Install it there ({python} -m pip install ludus), or set python."
        )
    if "Unknown option: -P" in output:
        return UsageError(f"{python} on {at.host} is older than Python 3.11.", "Set python to another one.")
    if code in (126, 127):
        return UsageError(f"{python} cannot be run on {at.host}: {last}", "Set python to the interpreter that has Ludus there.")
    if code == _SETUP_FAILED:
        return UsageError(f"The setup lines failed on {at.host}: {last}", "The last of them must succeed.")
    if code is None:
        return WorkerFailed(f"{at.host} does not answer{': ' if last else ''}{last}.", "Is it on, and its network?")
    return WorkerFailed(f"{at.host} does not answer: {last or f'SSH ended with code {code}'}", "Is it on, and its network?")


class AgentConnection(AgentProcess):
    """One `ssh` process with a `remote_agent`."""

    def __init__(self, settings: SshSettings, node: int, *words: str) -> None:
        self._hello: dict[str, Any] = {}
        self._hello_deadline = time.monotonic() + settings.connect_s + START_S
        command = ssh_words(settings, node, AGENT_MODULE, *words)
        super().__init__(command, MARK, settings.nodes[node].host, functools.partial(explain_failure, settings, node), MAX_LINE)

    def await_hello(self) -> dict[str, Any]:
        """Wait for the agent's first message. Raises LudusError."""
        if not self._hello:
            found = self.receive(self._hello_deadline).get("hello")
            if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
                hint = f"Install {ludus.__version__} there, as it is here."
                raise UsageError(f"Ludus on {self.host} has another protocol version.", hint)
            self._hello = found
        return self._hello

    def receive_result(self, deadline: float) -> dict[str, Any]:
        """Raises LudusError: the agent's error, or a lost connection."""
        result = self.receive(deadline).get("ok")
        return result if isinstance(result, dict) else {}

    def next_answer(self) -> dict[str, Any]:
        """Return a received answer. Raises LudusError if it is an error of the agent."""
        answer = super().next_answer()
        if isinstance(answer.get("error"), dict):
            error = answer["error"]
            kind = UsageError if error.get("kind") == "usage" else WorkerFailed
            raise kind(f"{self.host}: {error.get('message')}", str(error.get("hint", "")))
        return answer
