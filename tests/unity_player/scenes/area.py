"""What a scene consists of: a world with one or more areas, which are copies of the same environment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tests.unity_player.messages import Action, AgentInfo, Behaviour, Infos


class World:
    """What the areas of a scene share."""

    def __init__(self, seed: int, parameters: Mapping[str, float]) -> None:
        self.random = random.Random(seed)
        self.parameters = dict(parameters)
        """Of the command line, and those that Python sets."""
        self.statistics: list[tuple[str, float]] = []
        """Values for the metrics, until the next message."""
        self._ids = self._groups = 0

    def new_id(self) -> int:
        """Return the id of a new episode of an agent."""
        self._ids += 1
        return self._ids - 1

    def new_group(self) -> int:
        self._groups += 1
        return self._groups


class Area(Protocol):
    """One copy of an environment."""

    @property
    def behaviours(self) -> Sequence[Behaviour]: ...

    def reset(self) -> None:
        """Begin anew. Agents keep their ids, as in Unity."""
        ...

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        """Yield behaviour and state of the agents that want a decision."""
        ...

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        """Move on until the next decisions; return the agents that finished. `actions` by the id of the agent."""
        ...


class Scene:
    """Many areas as one program. Actions come in the order in which the agents were sent."""

    def __init__(self, make: Callable[[World], Area], areas: int, seed: int, parameters: Mapping[str, float]) -> None:
        self.world = World(seed, parameters)
        self._areas = [make(self.world) for _ in range(areas)]
        self.behaviours = {behaviour.name: behaviour for area in self._areas for behaviour in area.behaviours}
        self._waiting: dict[str, list[tuple[int, int]]] = {}  # behaviour → area and agent

    def reset(self) -> Mapping[str, Sequence[AgentInfo]]:
        for area in self._areas:
            area.reset()
        return self._with_decisions({name: [] for name in self.behaviours})

    def step(self, actions: Mapping[str, Sequence[Action]]) -> Mapping[str, Sequence[AgentInfo]]:
        by_area: list[dict[int, Action]] = [{} for _ in self._areas]
        for name, waiting in self._waiting.items():
            for (area, agent), action in zip(waiting, actions.get(name, ()), strict=False):
                by_area[area][agent] = action
        messages: dict[str, list[AgentInfo]] = {name: [] for name in self.behaviours}
        for copy, chosen in zip(self._areas, by_area, strict=True):
            for name, info in copy.step(chosen):
                messages[name].append(info)
        return self._with_decisions(messages)

    def _with_decisions(self, messages: dict[str, list[AgentInfo]]) -> Mapping[str, Sequence[AgentInfo]]:
        self._waiting = {name: [] for name in messages}
        for place, area in enumerate(self._areas):
            for name, info in area.infos():
                messages[name].append(info)
                self._waiting[name].append((place, info.id))
        return {name: infos for name, infos in messages.items() if infos}


def record(scene: Scene, most: int = 2000) -> tuple[Infos, list[Infos]]:
    """Play with actions of zeros until all agents finish at the same step. Return the first infos and the ones after it.

    The last ones have the ids of the first ones, so that they can be sent again from the beginning. Raises ValueError if there is no
    such step.
    """
    first = scene.reset()
    actions = {
        name: Action((0.0,) * behaviour.continuous, (0,) * len(behaviour.branches))
        for name, behaviour in scene.behaviours.items()
    }
    infos, recorded = first, []
    for _ in range(most):
        infos = scene.step({name: [actions[name]] * len(agents) for name, agents in infos.items()})
        recorded.append(infos)
        begun = {name: [info for info in agents if not info.done] for name, agents in infos.items()}
        finished = {name: len(agents) - len(begun[name]) for name, agents in infos.items()}
        if finished == {name: len(agents) for name, agents in first.items()}:
            for name, agents in begun.items():
                for info, earlier in zip(agents, first[name], strict=True):
                    info.id = earlier.id
            return first, recorded
    raise ValueError(f"the agents do not finish together within {most} steps")
