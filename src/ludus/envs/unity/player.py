"""A running Unity player, or the editor in play mode: started, connected and stepped through ML-Agents' protocol (API 1.5).

The player begins: its first message describes itself, the second is empty, and every later one has what the agents observe. Each is
answered with what the player shall do next, so there is always one request that waits for its answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.core.tree import Tree
from ludus.envs.player_process import PlayerProcess, open_screen
from ludus.envs.unity.behaviors import Behavior
from ludus.envs.unity.exchange_server import Disconnected, ExchangeServer
from ludus.envs.unity.messages import OK, QUIT, RESET, SHUT_DOWN, STEP, UnityMessage
from ludus.envs.unity.side_channels import SideChannels
from ludus.envs.unity.unity_config import UnityConfig
from ludus.errors import ConfigError, EnvironmentFault

log = logging.getLogger(__name__)

API_VERSION = "1.5.0"
PACKAGE_VERSION = "1.1.0"
"""Version of mlagents-envs whose messages these are; some players compare it."""

_HYBRID_SINCE = (1, 3)
"""API version in which actions got their present fields."""

QUIT_S = 10.0
"""Time that a player has to end after it was asked to; then its process is ended."""

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""

_SUFFIXES = ("", ".x86_64", ".x86")
_HINT = (
    "It must start without a user, the Behavior Type of its agents must be Default, and on a machine without a screen it needs"
    " no_graphics: true or a server build."
)


class UnityPlayer:
    """One player with its connection. The constructor returns when it has introduced itself. Raises EnvironmentFault, ConfigError.

    `environment`: variables of its process; None: those of this process. `recorded`: `frame` is wanted, so it has graphics.
    """

    def __init__(
        self, config: UnityConfig, name: str, environment: Mapping[str, str] | None = None, *, recorded: bool = False
    ) -> None:
        self.config, self.name = config, name
        self.behaviors: dict[str, Behavior] = {}
        """By full name, in the order in which they appeared."""
        self.agents: dict[str, list[Any]] = {}
        """Full name → AgentInfos of the last message."""
        self.exchanges = 0
        self._process: PlayerProcess | None = None
        self._deprecated_actions = self._failed = False
        command = None if config.file_name is None else find_executable(config.file_name)
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(_bind(config))
            self.port = self._server.port
            self.seed = config.seed + self.port - config.first_port
            self.channels = SideChannels(config, self.seed)
            if command is None:
                log.warning("Waiting for the Unity editor on port %d: press Play.", self.port)  # shown to the user
            else:
                self._process = stack.enter_context(self._launch(command, environment, recorded))
            self._connect()
            self._resources = stack.pop_all()

    @property
    def process(self) -> PlayerProcess | None:
        """None: the player is the editor."""
        return self._process

    def reset(self) -> dict[str, list[Any]]:
        """Start the scene anew. Returns `agents`; the lists contain agents that act next, and those whose episode has ended."""
        return self._exchange(RESET, {})

    def step(self, actions: Mapping[str, Sequence[Tree | None]]) -> dict[str, list[Any]]:
        """Take the actions of all agents that act, by behaviour, in the order in which the agents were sent; None: zeros."""
        return self._exchange(STEP, actions)

    def close(self) -> None:
        """Ask the player to end, and end its process."""
        if self._server.is_connected and not self._failed:
            self._send_quit()
            if self._process is not None and self._process.exit is None:
                self._wait_for_end()
        self._resources.close()

    # -- start ----------------------------------------------------------------------------------------------------------

    def _launch(self, command: Path, environment: Mapping[str, str] | None, recorded: bool) -> PlayerProcess:
        screen = None
        if recorded or not self.config.no_graphics:
            screen = open_screen(command.name, recorded=recorded, environment=environment)
        config, number = self.config, self.port - (self.config.first_port - self.config.worker_id)
        arguments = ["-nographics", "-batchmode"] if screen is None else []
        arguments += ["--mlagents-port", str(self.port)]
        if "-logfile" not in (each.lower() for each in config.additional_args):
            arguments += ["-logFile", "-"]  # to its standard output, where the guard counts repeated lines
        folder = None if config.log_folder is None else Path(config.log_folder).expanduser()
        return PlayerProcess(
            [str(command), *arguments, *config.additional_args],
            name=f"{self.name} ({command.name}, port {self.port})",
            log=None if folder is None else folder / f"Player-{number}.log",
            environment=environment,
            grace_s=GRACE_S,
            screen=screen,
        )

    def _connect(self) -> None:
        first = self._receive("connect").unity_output.rl_initialization_output
        if not first.communication_version:
            raise self._fault(f"{self.name} began without a description of itself.", "Its build has no ML-Agents academy.")
        version = _version(first.communication_version)
        if version is None or version[0] != 1:
            self._send_quit()
            raise self._fault(
                f"{self.name} speaks version {first.communication_version} of ML-Agents' protocol (Unity package"
                f" {first.package_version or 'unknown'}), Ludus speaks {API_VERSION}.",
                "Build it with a Unity package of ML-Agents between 1.0 and 4.",
            )
        self._deprecated_actions = version < _HYBRID_SINCE
        log.info("%s has connected: %s, Unity package %s", self.name, first.name or "player", first.package_version)
        answer = UnityMessage()
        answer.header.status = OK
        start = answer.unity_input.rl_initialization_input
        start.seed, start.num_areas = self.seed, self.config.num_areas
        start.communication_version, start.package_version = API_VERSION, PACKAGE_VERSION
        for field in start.capabilities.DESCRIPTOR.fields:
            setattr(start.capabilities, field.name, True)
        self._reply(answer)
        self._receive("accept its initialisation")
        if self._process is not None:
            self._process.check_threads()

    # -- messages -------------------------------------------------------------------------------------------------------

    def _exchange(self, command: int, actions: Mapping[str, Sequence[Tree | None]]) -> dict[str, list[Any]]:
        message = UnityMessage()
        message.header.status = OK
        given = message.unity_input.rl_input
        given.command = command
        for name, each in actions.items():
            behavior, listed = self.behaviors[name], given.agent_actions[name]
            for action in each:
                behavior.add_action(listed, action, deprecated=self._deprecated_actions)
        outgoing = self.channels.take_outgoing()
        if outgoing:
            given.side_channel = outgoing
        self._reply(message)
        self.exchanges += 1
        what = "reset" if command == RESET else "make a step"
        output = self._receive(what).unity_output
        if output.HasField("rl_initialization_output"):
            for parameters in output.rl_initialization_output.brain_parameters:
                self._add_behavior(parameters, output.rl_output)
        result = output.rl_output
        if result.side_channel:
            self.channels.receive(result.side_channel)
        self.agents = {name: list(listed.value) for name, listed in result.agentInfos.items() if listed.value}
        for name in self.agents.keys() - self.behaviors.keys():
            raise self._fault(f"{self.name} sent agents of {name!r} without the parameters of that behaviour.")
        return self.agents

    def _add_behavior(self, parameters: Any, output: Any) -> None:
        name = parameters.brain_name
        if name not in output.agentInfos or not output.agentInfos[name].value:
            return
        found = Behavior.of(parameters, output.agentInfos[name].value[0])
        known = self.behaviors.get(name)
        if known is not None and not known.same_spaces(found):
            raise self._fault(
                f"The spaces of {name!r} have changed: {known.observation_space} and {known.action_space} were"
                f" {found.observation_space} and {found.action_space} in the last message."
            )
        self.behaviors.setdefault(name, found)

    def _send_quit(self) -> None:
        message = UnityMessage()
        message.header.status = SHUT_DOWN
        message.unity_input.rl_input.command = QUIT
        with contextlib.suppress(Disconnected, TimeoutError, EnvironmentFault):
            self._server.reply(message.SerializeToString(), 1.0)

    def _reply(self, message: Any) -> None:
        try:
            self._server.reply(message.SerializeToString(), self.config.timeout_wait, self._check)
        except (Disconnected, TimeoutError) as error:
            raise self._connection_fault("take a message", error) from error

    def _receive(self, what: str) -> Any:
        try:
            data = self._server.receive(self.config.timeout_wait, self._check)
        except (Disconnected, TimeoutError) as error:
            raise self._connection_fault(what, error) from error
        try:
            message = UnityMessage.FromString(data)
        except Exception as error:  # DecodeError, which has no common base class in all versions of protobuf
            raise self._fault(f"{self.name} sent {len(data)} bytes that are no message of ML-Agents: {error}.") from error
        if message.HasField("header") and message.header.status not in (0, OK):
            reason = f": {message.header.message}" if message.header.message else ""
            raise self._fault(f"{self.name} ended the connection with status {message.header.status}{reason}.")
        return message

    def _check(self) -> None:
        if self._process is not None and self._process.exit is not None:
            raise self._fault(f"{self.name} {self._process.exit}.")

    def _connection_fault(self, what: str, error: Exception) -> EnvironmentFault:
        if isinstance(error, TimeoutError):
            if not self._server.is_connected:
                whom = "The Unity editor" if self._process is None else self.name
                hint = "Press Play in the editor." if self._process is None else _HINT
                return self._fault(
                    f"{whom} did not connect to port {self.port} within {self.config.timeout_wait:g} s (timeout_wait).", hint
                )
            return self._fault(f"{self.name} did not {what} within {self.config.timeout_wait:g} s (timeout_wait).")
        if self._process is not None:
            self._process.wait(1.0)  # its last lines and its exit code belong into the message
        return self._fault(f"{self.name} did not {what}: {error}.")

    def _fault(self, message: str, hint: str = "") -> EnvironmentFault:
        self._failed = True
        return EnvironmentFault(message, hint) if self._process is None else self._process.fault(message, hint)

    def _wait_for_end(self) -> None:
        """Wait until the process ends or sends a request, which is answered: some players make one more call."""
        assert self._process is not None
        deadline = time.monotonic() + QUIT_S
        while self._process.exit is None and time.monotonic() < deadline:
            try:
                self._server.receive(0.0)
                self._send_quit()
            except TimeoutError:
                self._process.wait(0.05)
            except Disconnected:
                self._process.wait(max(0.0, deadline - time.monotonic()))


def _bind(config: UnityConfig) -> ExchangeServer:
    if config.file_name is not None:
        return ExchangeServer.bind(config.first_port)
    try:
        return ExchangeServer.bind(config.first_port, tries=1)
    except EnvironmentFault as error:
        raise EnvironmentFault(
            f"Port {config.first_port}, to which the Unity editor connects, is taken on this machine.",
            "End the other training (one at a time can use the editor), or set env_config.base_port and the same port in the"
            " project.",
        ) from error


def find_executable(file_name: str) -> Path:
    """Raises ConfigError."""
    given = Path(file_name).expanduser()
    if sys.platform == "darwin":
        bundle = given if given.suffix == ".app" else given.with_name(f"{given.name}.app")
        for candidate in sorted((bundle / "Contents/MacOS").glob("*")):
            return candidate.absolute()
    for suffix in _SUFFIXES:
        candidate = given.with_name(given.name + suffix)
        if candidate.is_file():
            if not os.access(candidate, os.X_OK):
                raise ConfigError(f"config.env_config.file_name: {candidate} is not executable.", f"Run `chmod +x {candidate}`.")
            return candidate.absolute()
    tried = ", ".join(f"{given}{suffix}" for suffix in _SUFFIXES)
    raise ConfigError(f"config.env_config.file_name: there is no player {given}.", f"Looked for {tried} in {Path.cwd()}.")


def _version(text: str) -> tuple[int, ...] | None:
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
