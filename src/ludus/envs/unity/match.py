"""A Unity scene as an environment with several agents: `env: unity`.

An agent of the scene gets a new id with every episode. Here it takes a *slot*, `Striker_blue_0`, which is free again when the episode
ends: slots are the agents that policies are assigned to.

A scene goes on after an episode, so a match has no end of its own. It is over when no agent is in an episode: when all have ended it
with one message, as teams do at the end of their game. Agents of independent areas never do; a match is also over when each agent has
ended an episode, or EPISODES of them where there are teams. Agents that are in another one by then continue it in the next match.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.core.tree import Tree
from ludus.envs.pettingzoo import MAX_IDLE_STEPS, MAX_REWARD, AgentSpaces, Departure, MatchStep, Turn
from ludus.envs.unity.behaviors import Behavior
from ludus.envs.unity.player import UnityPlayer, find_executable
from ludus.envs.unity.unity_config import UnityConfig, parse_unity_config
from ludus.errors import ConfigError, EnvironmentFault, UnknownName

log = logging.getLogger(__name__)

FAMILY = "unity"

EPISODES = 10
"""Episodes of each agent after which a match with teams or groups is over: its areas are independent."""

_VIDEO_SIZE = 640, 480
"""Smallest window of a player that is recorded, in pixels."""

_MAX_LAYOUTS = 16


@dataclass(frozen=True)
class SceneLayout:
    """The behaviours of a scene, sorted by their full names, and the slots of each."""

    behaviors: Mapping[str, Behavior]
    slots: Mapping[str, Sequence[str]]
    has_teams: bool
    """Agents belong together: there are several behaviours, teams or groups."""

    @classmethod
    def of(cls, behaviors: Mapping[str, Behavior], present: Mapping[str, Sequence[Any]], config: UnityConfig) -> SceneLayout:
        """`present`: agents by full name. Raises ConfigError for settings that do not fit."""
        known = {name: behaviors[name] for name in sorted(behaviors)}
        teams = {behavior.team for behavior in known.values()}
        if config.teams and max(teams) >= len(config.teams):
            raise ConfigError(
                f"config.env_config.teams has no name for team {max(teams)} of the scene, which has the teams"
                f" {', '.join(map(str, sorted(teams)))}.",
                "Name all teams, or leave teams out.",
            )
        if isinstance(config.max_agents, dict) and (unknown := config.max_agents.keys() - known.keys()):
            raise ConfigError(f"config.env_config.max_agents names {min(unknown)!r}.", f"The behaviours are {', '.join(known)}.")
        by_name = len({behavior.name for behavior in known.values()}) > 1
        by_team = bool(config.teams) or len(teams) > 1
        slots = {}
        for full_name, behavior in known.items():
            most = config.max_agents.get(full_name) if isinstance(config.max_agents, dict) else config.max_agents
            parts = [behavior.name] if by_name or not by_team else []
            parts += [config.teams[behavior.team] if config.teams else f"team{behavior.team}"] if by_team else []
            slots[full_name] = [f"{'_'.join(parts)}_{number}" for number in range(most or len(present.get(full_name, ())))]
        has_groups = any(agent.group_id for agents in present.values() for agent in agents)
        return cls(known, slots, has_groups or len(known) > 1)

    def agents(self) -> dict[str, AgentSpaces]:
        """Slot → spaces."""
        return {
            slot: AgentSpaces(behavior.observation_space, behavior.action_space, masked=bool(behavior.branches))
            for full_name, behavior in self.behaviors.items()
            for slot in self.slots[full_name]
        }


_layouts: OrderedDict[str, SceneLayout] = OrderedDict()
"""Settings → layout of the scenes that this process has seen: a player starts in seconds, and only its layout may be needed."""


_connected_editors: dict[str, tuple[UnityPlayer, Mapping[str, list[Any]]]] = {}
"""Settings → editor in play mode whose layout was read, with its agents. It would leave play mode when it is closed."""


def _layout_key(config: UnityConfig) -> str:
    key: list[Any] = [config.model_dump(mode="json")]
    if config.file_name is not None:
        found = find_executable(config.file_name).stat()
        key += [found.st_ino, found.st_mtime_ns, found.st_size]
    return json.dumps(key, sort_keys=True)


class UnityMatch:
    """One player, whose matches follow each other. It is started when it is needed: for the layout of an unknown scene, or to play.

    Implements MultiAgentMatch. Frames for `render_mode` rgb_array are pictures of its window; it then has graphics.
    """

    state_space: gym.Space[Any] | None = None
    metadata: Mapping[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, name: str, env_config: Mapping[str, Any] | None = None, render_mode: str | None = None) -> None:
        self.check_exists(name)
        self.name = name
        self._config = parse_unity_config(env_config or {})
        self._recorded = render_mode == "rgb_array"
        self._player: UnityPlayer | None = None
        self._waiting: Mapping[str, list[Any]] | None = None
        """Agents of the last message with which the next match begins; None: the scene has to be reset."""
        self._has_begun = False
        self.late_rewards = 0
        self._slot_of: dict[tuple[str, int], str] = {}  # (behaviour, id) → slot
        self._free: dict[str, deque[str]] = {}
        self._order: dict[str, list[str]] = {}  # behaviour → slots in the order in which the player expects their actions
        self._acted: dict[str, bool] = {}  # slot → whether it has acted in its present episode
        self._turns: dict[str, Turn] = {}  # slot → its last one
        self._episodes: dict[str, int] = {}  # slot → episodes that it has ended in this match
        self._key = key = _layout_key(self._config)
        if key in _connected_editors:
            self._player, self._waiting = _connected_editors.pop(key)
        known = _layouts.get(key)
        if known is None:
            try:
                known = self._read_layout()
            except BaseException:
                self.close()
                raise
            _layouts[key] = known
            while len(_layouts) > _MAX_LAYOUTS:
                _layouts.popitem(last=False)
        self._layout = known
        self.agents: Mapping[str, AgentSpaces] = known.agents()

    @staticmethod
    def check_exists(name: str) -> None:
        """Raises UnknownName."""
        if name != FAMILY:
            raise UnknownName(f"Unknown environment {name!r}.", f"Use env: {FAMILY} and config.env_config.file_name.")

    def _read_layout(self) -> SceneLayout:
        player = self._start()
        acting = player.reset()
        for _ in range(MAX_IDLE_STEPS):
            if any(not agent.done for agents in acting.values() for agent in agents):
                break
            acting = player.step({})
        else:
            raise EnvironmentFault(f"No agent of {self.name} has requested a decision in {MAX_IDLE_STEPS} steps after the reset.")
        present = {name: [agent for agent in agents if not agent.done] for name, agents in acting.items()}
        self._waiting = acting
        layout = SceneLayout.of(player.behaviors, present, self._config)
        for full_name, behavior in layout.behaviors.items():
            sensors = ", ".join(f"{sensor.name or 'unnamed'} {list(sensor.shape)}" for sensor in behavior.sensors)
            slots = layout.slots[full_name]
            if not slots:
                raise EnvironmentFault(
                    f"No agent of {full_name} acts at the reset of {self.name}, so the number of its agents is not known.",
                    f"Set env_config.max_agents: {{{full_name!r}: …}}.",
                )
            log.info("%s: behaviour %s, agents %s to %s, sensors %s", self.name, full_name, slots[0], slots[-1], sensors)
        return layout

    def _start(self) -> UnityPlayer:
        if self._player is None:
            config = self._config
            if self._recorded:
                size = {"width": max(config.width, _VIDEO_SIZE[0]), "height": max(config.height, _VIDEO_SIZE[1])}
                config = config.model_copy(update=size)
            self._player = UnityPlayer(config, self.name, recorded=self._recorded)
        return self._player

    # -- matches --------------------------------------------------------------------------------------------------------

    def reset(self, seed: int) -> MatchStep:
        """`seed` has no effect: the scene has the seed of its player."""
        agents, self._waiting = self._waiting, None
        self._has_begun, goes_on = True, agents is not None
        if agents is None:
            agents = self._start().reset()
            self._check_layout()
            self._slot_of.clear()
        if not self._slot_of:
            self._free = {name: deque(slots) for name, slots in self._layout.slots.items()}
        self._acted.clear()
        self._episodes.clear()
        late = self.late_rewards
        turns = self._read(agents, [])
        if goes_on:  # these rewards belong to the match before
            self.late_rewards = late
        return self._advance(turns, [])

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        for slot in actions:
            self._acted[slot] = True
        departures: list[Departure] = []
        turns = self._exchange(actions, departures)
        return self._advance(turns, departures)

    def truncate(self) -> list[Departure]:
        departures = []
        for slot, acted in self._acted.items():
            if acted:
                turn = self._turns.get(slot)
                reward, observation = (0.0, None) if turn is None else (turn.reward, turn.observation)
                departures.append(Departure(slot, reward, terminated=False, truncated=True, observation=observation))
        self._acted.clear()
        return departures

    def _advance(self, turns: list[Turn], departures: list[Departure]) -> MatchStep:
        """Go on until an agent acts, or the match is over."""
        for _ in range(MAX_IDLE_STEPS):
            if departures and self._is_over():
                return self._end(departures)
            if turns:
                return MatchStep(turns, departures)
            turns = self._exchange({}, departures)
        raise EnvironmentFault(f"No agent of {self.name} has requested a decision for {MAX_IDLE_STEPS} steps.")

    def _is_over(self) -> bool:
        """Whether no agent is in an episode, or each has ended as many as a match has."""
        most = EPISODES if self._layout.has_teams else 1
        return not any(self._acted.values()) or min(self._episodes.values()) >= most

    def _end(self, departures: list[Departure]) -> MatchStep:
        """End the match. Agents in another episode leave it here, and continue the episode in the next match."""
        assert self._player is not None
        departures += self.truncate()
        self._waiting = {name: [agent for agent in agents if not agent.done] for name, agents in self._player.agents.items()}
        return MatchStep((), departures, over=True)

    def _exchange(self, actions: Mapping[str, Any], departures: list[Departure]) -> list[Turn]:
        assert self._player is not None
        order = self._order.items()
        return self._read(self._player.step({name: [actions.get(slot) for slot in slots] for name, slots in order}), departures)

    # -- agents of the scene --------------------------------------------------------------------------------------------

    def _read(self, agents: Mapping[str, list[Any]], departures: list[Departure]) -> list[Turn]:
        """Turns of the agents that act next; those whose episode has ended are added to `departures`."""
        self._order, self._turns = {}, {}
        for full_name in agents.keys() - self._layout.behaviors.keys():
            raise EnvironmentFault(
                f"The behaviour {full_name!r} of {self.name} appeared after the start of the scene, which has the behaviours"
                f" {', '.join(self._layout.behaviors)}.",
                "Every behaviour needs a policy before the run starts: give it an agent that requests a decision at the reset.",
            )
        for full_name, behavior in self._layout.behaviors.items():
            present = agents.get(full_name, ())
            for agent in present:  # first, since new agents take their slots
                if agent.done:
                    self._leave(behavior, agent, departures)
            deciding = [agent for agent in present if not agent.done]
            if deciding:
                seen = behavior.observations(deciding)
                self._order[full_name] = [self._turn(behavior, *each) for each in zip(deciding, seen, strict=True)]
        return list(self._turns.values())

    def _leave(self, behavior: Behavior, agent: Any, departures: list[Departure]) -> None:
        slot = self._slot_of.pop((behavior.full_name, agent.id), None)
        reward = behavior.reward(agent, MAX_REWARD)
        if slot is not None:
            self._free[behavior.full_name].append(slot)
            self._episodes[slot] = self._episodes.get(slot, 0) + 1
            if self._acted.pop(slot, False):
                truncated = bool(agent.max_step_reached)
                last = behavior.observation(agent) if truncated else None
                departures.append(Departure(slot, reward, not truncated, truncated, last))
                return
        self.late_rewards += bool(reward)

    def _turn(self, behavior: Behavior, agent: Any, observation: Tree) -> str:
        """Add the turn of an agent; returns its slot."""
        name, key = behavior.full_name, (behavior.full_name, agent.id)
        slot = self._slot_of.get(key)
        if slot is None:
            if not self._free[name]:
                raise EnvironmentFault(
                    f"A further agent of {name!r} (id {agent.id}) has appeared in {self.name}, where {len(self._layout.slots[name])}"
                    " are present already, as many as at its start.",
                    f"Set env_config.max_agents: {{{name!r}: N}} to the largest number at the same time.",
                )
            slot = self._slot_of[key] = self._free[name].popleft()
        if slot in self._turns:
            raise EnvironmentFault(f"{self.name} sent the agent {agent.id} of {name!r} twice in one message.")
        reward = behavior.reward(agent, MAX_REWARD)
        if not self._acted.setdefault(slot, False):
            self.late_rewards += bool(reward)
            reward = 0.0
        self._episodes.setdefault(slot, 0)
        self._turns[slot] = Turn(slot, observation, behavior.mask(agent), reward)
        return slot

    def _check_layout(self) -> None:
        """The player may have been started after the layout was read, from another build."""
        assert self._player is not None
        for full_name, found in self._player.behaviors.items():
            known = self._layout.behaviors.get(full_name)
            if known is not None and not known.same_spaces(found):
                raise EnvironmentFault(
                    f"The spaces of {full_name!r} differ from those at the start of the run: {found.observation_space} and"
                    f" {found.action_space}, they were {known.observation_space} and {known.action_space}.",
                    "Do not replace the build during a run.",
                )

    # -- the rest of MultiAgentMatch ------------------------------------------------------------------------------------

    def take_statistics(self) -> dict[str, float]:
        """What the game and the side channels have reported since the last call."""
        found = {} if self._player is None else self._player.channels.take_statistics()
        return {f"{FAMILY}/{name}": value for name, value in found.items()}

    def state(self) -> Tree:
        raise NotImplementedError(f"{self.name} has no global state")

    def render(self) -> Any:
        process = self._start().process
        if process is None:
            raise ConfigError(
                f"{self.name} in the editor cannot be recorded.", "Build the scene: env_config: {file_name: PLAYER}."
            )
        return process.frame()

    def close(self) -> None:
        if self._player is not None and self._waiting is not None and not self._has_begun and self._config.file_name is None:
            _connected_editors[self._key] = self._player, self._waiting
            self._player = self._waiting = None
        player, self._player, self._waiting = self._player, None, None
        if player is not None:
            player.close()
