"""Games that use the plugin of Godot RL Agents, as environments with several agents: `env: godot_rl`.

    this process: port ◀── the game connects
                  handshake, env_info ──▶ env_info: its agents and their spaces
                  reset ──▶ observations        action ──▶ observations, rewards, done

An agent of the game whose episode is over starts its next one by itself; the observation of that step is already the first one of the
new episode. The protocol has no seed per episode, no action masks and no truncation: `done` terminates.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from ludus.config.validation import parse_section
from ludus.core.tree import Tree
from ludus.envs.godot_rl import connection
from ludus.envs.godot_rl.agents import GodotAgent, read_agents
from ludus.envs.godot_rl.connection import GameConnection
from ludus.envs.godot_rl.settings import GodotSettings
from ludus.envs.pettingzoo import MAX_REWARD, AgentSpaces, Departure, MatchStep, Turn
from ludus.envs.player_process import PlayerProcess, open_screen
from ludus.errors import ConfigError, EnvironmentFault, UnknownName

FAMILY = "godot_rl"
VERSION = ("0", "7")
"""Version of the protocol, as the plugin expects it in the handshake. It warns about another one and goes on."""

_CLOSE_S = 2.0
"""Time in which a game should end after the message `close`, or after its connection."""


class GodotGame:
    """One running game with its connection. Started and connected by the constructor, which raises EnvironmentFault, ConfigError.

    `recorded`: pictures of its window are wanted.
    """

    def __init__(self, settings: GodotSettings, *, recorded: bool = False) -> None:
        program = settings.program()
        self.name = FAMILY if program is None else f"{FAMILY} {program.name}"
        self.player: PlayerProcess | None = None
        self.steps = 0
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(connection.bind_port(settings.port, 1 if program is None else connection.MAX_PORTS))
            self.port: int = listener.getsockname()[1]
            if program is not None:
                command = settings.command(program, self.port, settings.seed + self.port - settings.port)
                log = None if settings.log_folder is None else Path(settings.log_folder) / f"{program.stem}-{self.port}.log"
                screen = open_screen(program.name, recorded=recorded) if settings.show_window else None
                self.player = stack.enter_context(
                    PlayerProcess(command, name=program.name, log=log, directory=program.parent, screen=screen)
                )
            stream = connection.accept(listener, settings.timeout, self._check)
            if stream is None:
                raise self.fault(
                    f"It did not connect to port {self.port} within {settings.timeout:g} s.",
                    "Press Play in the editor while Ludus waits."
                    if program is None
                    else "Does its scene have a Sync node of Godot RL Agents?",
                )
            stack.enter_context(stream)
            self.messages = GameConnection(stream, settings.timeout, self.fault)
            self.messages.send({"type": "handshake", "major_version": VERSION[0], "minor_version": VERSION[1]})
            self.messages.send({"type": "env_info"})
            try:
                self.agents = read_agents(self.messages.receive("env_info"))
            except ValueError as error:
                raise self.fault(
                    f"It does not describe its agents as Godot RL Agents {'.'.join(VERSION)} does: {error}."
                ) from error
            self._resources = stack.pop_all()

    def fault(self, message: str, hint: str = "", *, gone: bool = False) -> EnvironmentFault:
        if gone and self.player is not None:
            self.player.wait(_CLOSE_S)  # so that the error says how it ended
        at = f" at step {self.steps}" if self.steps else ""
        told = f"{self.name}{at}: {message}"
        return EnvironmentFault(told, hint) if self.player is None else self.player.fault(told, hint)

    def close(self) -> None:
        """Ask the game to end, and end it if it does not."""
        self.messages.close()
        if self.player is not None:
            self.player.wait(_CLOSE_S)
        self._resources.close()

    def _check(self) -> None:
        if self.player is not None:
            self.player.check()


class _EditorGames:
    """Games of the editor that no match uses. A game ends when its connection is closed, and only a person can start it again."""

    def __init__(self) -> None:
        self._games: dict[int, GodotGame] = {}
        self._owner = os.getpid()

    def put(self, game: GodotGame) -> None:
        if not self._games:
            atexit.register(self.close)
        self._games[game.port] = game
        self._owner = os.getpid()

    def take(self, port: int) -> GodotGame | None:
        return self._games.pop(port, None) if self._owner == os.getpid() else None

    def close(self) -> None:
        while self._owner == os.getpid() and self._games:
            self._games.popitem()[1].close()


_editor_games = _EditorGames()


class GodotMatch:
    """One game, all of whose agents act at the same time. Implements MultiAgentMatch.

    Frames for `render_mode` rgb_array are pictures of its window: the protocol has none besides observations.
    """

    state_space: gym.Space[Any] | None = None
    late_rewards = 0
    metadata: Mapping[str, Any] = {}

    def __init__(self, name: str, env_config: Mapping[str, Any] | None = None, render_mode: str | None = None) -> None:
        self.check_exists(name)
        settings = parse_section(GodotSettings, env_config or {}, "config.env_config")
        self.name = name
        self._settings = settings
        self._editor = settings.env_path is None
        recorded = render_mode == "rgb_array"
        if recorded:
            settings = settings.model_copy(update={"show_window": True})
        self._game = (_editor_games.take(settings.port) if self._editor else None) or GodotGame(settings, recorded=recorded)
        self._broken = False
        self.agents: Mapping[str, AgentSpaces] = {
            agent.name: AgentSpaces(agent.observation_space, agent.action_space, masked=False) for agent in self._game.agents
        }
        self._observations: list[Tree] = []
        self._fresh = False
        """The present observations are the first ones of new episodes of all agents."""
        self._playing: set[str] = set()
        self._ended: set[str] = set()
        """Agents that have ended an episode in this match."""

    @staticmethod
    def check_exists(name: str) -> None:
        """Raises UnknownName."""
        if name != FAMILY:
            raise UnknownName(f"Unknown environment {name!r}.", f"Use env: {FAMILY} and config.env_config.env_path.")

    def reset(self, seed: int) -> MatchStep:
        """The game draws its numbers from the seed that it was started with; `seed` has no effect."""
        if not self._fresh:
            self._observations, _ = self._exchange({"type": "reset"}, "reset")
        self._fresh = False
        self._playing, self._ended = set(self.agents), set()
        return MatchStep(
            [Turn(agent.name, seen, None) for agent, seen in zip(self._game.agents, self._observations, strict=True)]
        )

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        game = self._game
        game.steps += 1
        chosen = [agent.action(actions[agent.name]) if agent.name in actions else agent.rest for agent in game.agents]
        self._observations, reply = self._exchange({"type": "action", "action": chosen}, "step")
        rewards, done = self._list(reply, "reward"), self._list(reply, "done")
        turns, departures = [], []
        for agent, seen, given, ended in zip(game.agents, self._observations, rewards, done, strict=True):
            if agent.name not in self._playing:
                continue
            reward = self._reward(agent, given)
            if not ended:
                turns.append(Turn(agent.name, seen, None, reward))
                continue
            departures.append(Departure(agent.name, reward, terminated=True, truncated=False))
            self._ended.add(agent.name)
            if self._settings.done_agents == "continue":
                turns.append(Turn(agent.name, seen, None))
            else:
                self._playing.discard(agent.name)
        if len(self._ended) < len(self.agents):
            return MatchStep(turns, departures)
        self._fresh = all(done) or self._settings.done_agents == "continue"
        left = {departure.agent for departure in departures}
        departures += [
            Departure(turn.agent, turn.reward, terminated=False, truncated=True, observation=turn.observation)
            for turn in turns
            if turn.agent not in left
        ]
        self._playing.clear()
        return MatchStep((), departures, over=True)

    def truncate(self) -> Sequence[Departure]:
        left = [
            Departure(agent.name, 0.0, terminated=False, truncated=True, observation=seen)
            for agent, seen in zip(self._game.agents, self._observations, strict=True)
            if agent.name in self._playing
        ]
        self._playing.clear()
        return left

    def call(self, method: str) -> list[Any]:
        """Call a method of every agent of the game, and return what they return."""
        try:
            self._game.messages.send({"type": "call", "method": method})
            returned = self._game.messages.receive("call").get("returns")
        except EnvironmentFault:
            self._broken = True
            raise
        return list(returned) if isinstance(returned, list) else [returned]

    def state(self) -> Tree:
        raise NotImplementedError(f"{self.name} has no global state")

    def render(self) -> Any:
        player = self._game.player
        if player is None or player.screen is None:
            raise ConfigError(f"{self.name} in the editor cannot be recorded.", "Export the game: env_config: {env_path: GAME}.")
        return player.frame()

    def close(self) -> None:
        if self._editor and not self._broken:
            _editor_games.put(self._game)
        else:
            self._game.close()

    def _exchange(self, message: Mapping[str, Any], kind: str) -> tuple[list[Tree], dict[str, Any]]:
        try:
            self._game.messages.send(message)
            reply = self._game.messages.receive(kind)
            seen = self._list(reply, "obs")
            try:
                return [agent.observation(own) for agent, own in zip(self._game.agents, seen, strict=True)], reply
            except (ValueError, TypeError) as error:
                raise self._game.fault(f"{error}.") from error
        except EnvironmentFault:
            self._broken = True
            raise

    def _list(self, reply: Mapping[str, Any], key: str) -> list[Any]:
        found = reply.get(key)
        if not isinstance(found, list) or len(found) != len(self._game.agents):
            raise self._game.fault(f"{key!r} of its message is not a list of {len(self._game.agents)} values: {found!r:.200}.")
        return found

    def _reward(self, agent: GodotAgent, given: Any) -> float:
        if isinstance(given, (int, float)) and abs(given) <= MAX_REWARD:  # false for NaN
            return float(given)
        raise self._game.fault(f"It gave {agent.name} the reward {given!r:.100}.")
