"""Skirmishes of two teams of soldiers in 0 A.D.; many matches are fought on one map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core.types import Bools, Floats, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.errors import ConfigError
from ludus.games.zero_ad import observations as seen
from ludus.games.zero_ad.battlefield import MAX_MATCHES, Battlefield
from ludus.games.zero_ad.game_process import TURN_S, find_program
from ludus.games.zero_ad.scripts import attack_nearest, attack_weakest

ENV_NAME: Final = "ludus/ZeroAD-Skirmish-v0"
TEAM_NAMES: Final = ("blue", "red")
SCRIPTS: Final = {"nearest": attack_nearest, "weakest": attack_weakest}
UNITS: Final = {"champion_infantry": 3, "champion_ranged": 2}
MAX_SOLDIERS: Final = 8
_MOVE_M: Final = 10.0
_DISTANCE_M, _ROW_M, _JITTER_M = 25.0, 5.0, 3.0
"""Of a team from the centre, between its soldiers, and the largest random offset of a soldier."""


class SkirmishEnv(VectorMultiAgentEnv):
    """Every agent commands one soldier: it keeps its order, moves in one of eight directions, or attacks an enemy.

    A team earns the hitpoints that the enemies lose minus those that it loses, as a share of a whole team, and 1 for the last enemy (-1
    for its own last soldier). The dead do not act, and earn the reward of their team until the match ends. `units`: soldiers of each team,
    {template of the Athenians: number}. `opponent`: `self` (agents play both teams), `nearest`, `weakest`, or a list, from which a match
    draws one by its seed. `seconds`: limit of a match in game time. `turns`: turns of 0.2 s for each decision.

    `matches_per_game`: that many matches share one process and its random numbers. They are fast, but cannot be repeated exactly and do not
    pause. With 1, a match starts a new game with its seed, and depends on its seed and its actions alone.
    """

    metadata: Mapping[str, Any] = {"name": ENV_NAME, "render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(
        self,
        num_envs: int = 1,
        units: Mapping[str, int] | None = None,
        opponent: str | Sequence[str] = "self",
        seconds: float = 90.0,
        turns: int = 5,
        matches_per_game: int = 16,
        render_mode: str | None = None,
    ) -> None:
        self._templates = soldier_templates(UNITS if units is None else units)
        self._opponents = opponent_names(opponent)
        if not 1 <= matches_per_game <= MAX_MATCHES:
            raise ConfigError(f"{ENV_NAME}: matches_per_game is {matches_per_game!r}.", f"Use 1 to {MAX_MATCHES}.")
        if not 1 <= turns <= 50 or not seconds >= turns * TURN_S:
            raise ConfigError(
                f"{ENV_NAME}: a match of {seconds!r} s with decisions of {turns!r} turns of {TURN_S} s is not possible."
            )
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"{ENV_NAME} has no render_mode {render_mode!r}.", "It renders rgb_array.")
        self.num_envs, self._turns = num_envs, turns
        self._soldiers = len(self._templates)
        self._teams = 2 if self._opponents is None else 1
        self._steps_per_match = round(seconds / (turns * TURN_S))
        self.possible_agents = tuple(f"{team}_{i}" for team in TEAM_NAMES[: self._teams] for i in range(self._soldiers))
        size = seen.observation_size(self._soldiers)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.single_action_space = gym.spaces.Discrete(seen.action_count(self._soldiers))
        firsts = range(0, num_envs, matches_per_game)
        self._parts = [slice(first, min(first + matches_per_game, num_envs)) for first in firsts]
        self._repeatable = matches_per_game == 1 or num_envs == 1
        find_program()
        self._fields: list[Battlefield] = []
        self._pool = ThreadPoolExecutor(len(self._parts), "zero-ad")
        self._steps: Ints = np.zeros(num_envs, np.int64)
        self._scripts: list[str] = [""] * num_envs
        self._health: Floats = np.zeros((num_envs, 2, self._soldiers), np.float32)
        """At the last decision."""
        self._renderer: Any = None

    def _start_games(self) -> None:
        """The first reset starts them, not the constructor: a run makes an environment also to read its spaces."""

        def start(part: slice) -> None:
            self._fields.append(Battlefield(part.stop - part.start, self._templates))

        begun = [self._pool.submit(start, part) for part in self._parts]
        wait(begun)
        try:
            for one in begun:
                one.result()
        except BaseException:
            self._close_games()
            raise
        self._fields.sort(key=lambda field: -field.count)  # only the last part may be smaller

    @property
    def _facts(self) -> seen.Facts:
        return self._fields[0].facts

    # -- play -------------------------------------------------------------------------------------------------------------------

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        if not self._fields:
            self._start_games()
        places: Floats = np.zeros((self.num_envs, 2, self._soldiers, 2), np.float32)
        for number, seed in zip(matches.tolist(), seeds.tolist(), strict=True):
            random = np.random.default_rng(seed)
            places[number] = starting_places(self._soldiers, random)
            self._scripts[number] = "" if self._opponents is None else str(random.choice(self._opponents))
        seed_of = dict(zip(matches.tolist(), seeds.tolist(), strict=True))

        def deploy(index: int) -> None:
            part, field = self._parts[index], self._fields[index]
            numbers = [number for number in seed_of if part.start <= number < part.stop]
            if numbers:
                if self._repeatable:
                    field.restart(seed_of[numbers[0]] % (1 << 31))
                field.deploy([number - part.start for number in numbers], places[numbers])
                field.read()

        list(self._pool.map(deploy, range(len(self._fields))))
        self._steps[matches] = 0
        state = self._state()
        self._health[matches] = state.health[matches]
        return self._result(state, np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, np.bool_))

    def step(self, actions: Ints, playing: Bools) -> VectorMultiAgentStep:
        orders = actions.reshape(self.num_envs, self._teams, self._soldiers)
        if self._teams == 1:
            orders = np.concatenate([orders, self._script_actions(playing)[:, None]], axis=1)
        before = self._state()
        slots = np.stack([seen.enemy_slots(before, team) for team in (0, 1)], axis=1)

        def advance(index: int) -> None:
            part, field = self._parts[index], self._fields[index]
            numbers = [number for number in range(part.start, part.stop) if playing[number]]
            for number in numbers:
                _give_orders(field, number - part.start, orders[number], slots[number], before.alive[number])
            if numbers:
                field.advance(self._turns)

        list(self._pool.map(advance, range(len(self._fields))))
        self._steps[playing] += 1
        after = self._state()
        lost = (self._health - after.health).sum(axis=2) / self._facts.health.sum()  # [N, team]
        fell = (self._health.sum(axis=2) > 0) & (after.health.sum(axis=2) <= 0)
        lost = lost + fell
        self._health[playing] = after.health[playing]
        over = (after.health.sum(axis=2) <= 0).any(axis=1) | (self._steps >= self._steps_per_match)
        return self._result(after, (lost[:, ::-1] - lost).astype(np.float32), over)

    def _script_actions(self, playing: Bools) -> Ints:
        """[N, U] of the red team."""
        state = self._state()
        views, masks = seen.observe(state, self._facts, self._time_left(), 1)
        chosen: Ints = np.zeros((self.num_envs, self._soldiers), np.int64)
        for number in np.flatnonzero(playing).tolist():
            script = SCRIPTS[self._scripts[number]]
            for soldier in np.flatnonzero(state.alive[number, 1]).tolist():
                chosen[number, soldier] = script(views[number, soldier], masks[number, soldier])
        return chosen

    def _state(self) -> seen.Field:
        return seen.Field(
            np.concatenate([field.place for field in self._fields]),
            np.concatenate([field.health for field in self._fields]),
            np.concatenate([field.orders for field in self._fields]),
        )

    def _time_left(self) -> Floats:
        return (1 - self._steps / self._steps_per_match).astype(np.float32)

    def _result(self, state: seen.Field, earned: Floats, over: Bools) -> VectorMultiAgentStep:
        views = [seen.observe(state, self._facts, self._time_left(), team) for team in range(self._teams)]
        every = np.repeat(over[:, None], self._teams * self._soldiers, axis=1)
        return VectorMultiAgentStep(
            acting=state.alive[:, : self._teams].reshape(self.num_envs, -1) & ~every,
            observation=np.concatenate([view for view, _ in views], axis=1),
            reward=np.repeat(earned[:, : self._teams], self._soldiers, axis=1),
            terminated=every,
            truncated=np.zeros_like(every),
            action_mask=np.concatenate([mask for _, mask in views], axis=1),
        )

    def render(self) -> npt.NDArray[np.uint8]:
        """Match 0 from above."""
        if self._renderer is None:
            from ludus.games.zero_ad.renderer import SkirmishRenderer

            self._renderer = SkirmishRenderer(self._facts)
        state, seconds = self._state(), float(self._steps[0]) * self._turns * TURN_S
        picture: npt.NDArray[np.uint8] = self._renderer.draw(state.place[0], state.health[0], state.orders[0], seconds)
        return picture

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._close_games()

    def _close_games(self) -> None:
        for field in self._fields:
            field.close()
        self._fields = []


def _give_orders(field: Battlefield, match: int, orders: Ints, slots: Ints, alive: Bools) -> None:
    """`orders` [2, U] actions, `slots` [2, U] enemies by slot."""
    for team, soldier in np.argwhere(alive).tolist():
        action = int(orders[team, soldier])
        if action >= seen.FIRST_ATTACK:
            field.attack(match, team, soldier, int(slots[team, action - seen.FIRST_ATTACK]))
        elif action >= seen.FIRST_MOVE:
            field.move(match, team, soldier, seen.move_offset(action - seen.FIRST_MOVE, team, _MOVE_M))


# -- settings and places --------------------------------------------------------------------------------------------------------


def soldier_templates(units: Mapping[str, int]) -> list[str]:
    """Templates of the soldiers of a team. Raises ConfigError."""
    templates = [f"units/athen/{kind}" for kind, number in units.items() for _ in range(int(number))]
    if not 1 <= len(templates) <= MAX_SOLDIERS:
        raise ConfigError(f"{ENV_NAME}: units are {dict(units)!r}.", f"Give 1 to {MAX_SOLDIERS} soldiers.")
    return templates


def opponent_names(opponent: str | Sequence[str]) -> list[str] | None:
    """Scripts that play the other team; None if agents do. Raises ConfigError."""
    if opponent == "self":
        return None
    names = [opponent] if isinstance(opponent, str) else list(opponent)
    unknown = [name for name in names if name not in SCRIPTS]
    if unknown or not names:
        raise ConfigError(f"{ENV_NAME} has no opponent {opponent!r}.", f"Use self, {', '.join(SCRIPTS)}, or a list of scripts.")
    return names


def starting_places(soldiers: int, random: np.random.Generator) -> Floats:
    """[2, U, 2]: two rows that face each other, every soldier a little off."""
    along = (np.arange(soldiers) - (soldiers - 1) / 2) * _ROW_M
    places: Floats = np.zeros((2, soldiers, 2), np.float32)
    for team, side in enumerate((-1, 1)):
        places[team, :, 0], places[team, :, 1] = side * _DISTANCE_M, -side * along
    return places + random.uniform(-_JITTER_M, _JITTER_M, places.shape).astype(np.float32)
