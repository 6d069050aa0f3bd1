"""Matches that run as processes below a gamecore server, as one vector environment whose rows are seats.

    env: gamecore
    env_config: {server: node1:23432, mode: 3v3, opponent: {self: 0.8, past: 0.2}}

A sampler steps it like any other; what is behind it, games that call us over HTTP, it need not know. Each worker has a gateway of its
own, with a token of its own, and orders its matches from the server.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Array, map_tree
from ludus.core.types import Bools, Floats
from ludus.envs.opponents.opponent_mix import PAST, PAST_VERSION, RULE, assign_opponents
from ludus.envs.vector_env import LOST
from ludus.errors import ConfigError, EnvironmentFault
from ludus.gamecore.game_spec import ARENA, MAX_TOGETHER, Playable, playable
from ludus.gamecore.live_matches import Leaves, Outcome, Reading, Sight, Slot, Table, TableActor, Tables
from ludus.gamecore.match_scheduler import CAMP_S, Matchmaker, Terms, slots_of
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.gateway.threaded_server import Door, own_address
from ludus.protocol.codec import SeatSpaces, plain_spec
from ludus.protocol.gamecore_client import GamecoreClient

log = logging.getLogger(__name__)

ADVERTISE: Final = "LUDUS_ADVERTISE"
"""The variable that says by which address games reach this machine."""
_TICK_S: Final = 7 * 24 * 3600.0
"""A parked tick waits for the learner, which may evaluate or be suspended; the games decide how long they wait."""
_FORGOTTEN_S: Final = 60.0
_BEAT_S: Final = 0.2
_LOOK_S: Final = 0.5
"""A game that is silent for so long is looked after, so often."""
_PATIENCE_S: Final = 5.0
"""At the very beginning all matches are waited for, unless that takes longer."""
_FAILURES: Final = 6
"""Matches in a row that come to nothing, and two for every slot, before we believe that none will."""


class GamecoreVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """`num_envs` seats that are learned from; those of past opponents come after them (`opponent_rows`).

    `reset` needs no match and shows nothing: the first step begins the matches, and is lost (`infos["lost"]`), as is every step of a row
    whose match was lost or has not begun yet. After the end of a match the next step only begins another (next-step autoreset).
    """

    only_training: Final = ("repeat", "start_from", "matchmaking")
    """Evaluations play whole matches, and those that were asked for."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        game: str = ARENA,
        mode: str | int | None = None,
        options: Mapping[str, Any] | None = None,
        server: str | None = None,
        token_file: str | None = None,
        advertise: str | None = None,
        start_from: str | None = None,
        eval_mode: bool = False,
        timeout_s: float = 30.0,
        start_s: float = 120.0,
        away_s: float = 600.0,
        together: int | None = None,
        **keywords: Any,
    ) -> None:
        """`server`: else GAMECORE_SERVER_ADDR, else this machine. `advertise`: by which address games reach us; else LUDUS_ADVERTISE,
        else the one that this machine has towards the server. `options`: of the game, as the server's catalogue declares them.
        `start_from`: a saved state, or `any`. A game that is silent for `timeout_s`, or has not begun after `start_s`, costs its match; a server that
        is away for `away_s` is an error. `together`: so many matches at most are played by one game process,
        which goes on with others; 0: each has its own; else what is good for the game.
        Keywords: `playable`. Raises ConfigError.
        """
        self.game: Playable = playable(game, mode, options or {}, keywords)
        for name, value in (("timeout_s", timeout_s), ("start_s", start_s), ("away_s", away_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} is {value!r}.", "A number of seconds above 0.")
        if together is not None and (type(together) is not int or not 0 <= together <= MAX_TOGETHER):
            hint = f"How many matches a game process plays side by side, up to {MAX_TOGETHER}; 0: each has a process of its own."
            raise ConfigError(f"together is {together!r}.", hint)
        self._together = self.game.together if together is None else together
        self._where = (server, token_file, advertise or os.environ.get(ADVERTISE) or None)
        self._start_from, self._eval_mode = start_from, eval_mode
        self._timeout_s, self._start_s, self._away_s = timeout_s, start_s, away_s
        seats, self._asked = len(self.game.seats), num_envs
        dealt = assign_opponents(max(1, num_envs // seats), self.game.shares, stand_in=RULE)
        self.slots, rows = slots_of(dealt, seats)
        self.num_envs = rows if num_envs % seats == 0 else num_envs
        self.opponent_rows: Bools = np.arange(self.num_envs) >= num_envs
        self.group_rows = seats
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None
        self.single_observation_space, self.single_action_space = self.game.observation_space, self.game.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.beat: Callable[[], None] = lambda: None
        self._tells: Bools = ~self.opponent_rows & (np.arange(self.num_envs) % seats == 0)
        """Whether a match was won is told once by each group, however many seats it has."""
        told = [f"{how}/{who}" for who in self.game.against for how in ("win", "loss")]
        past = [PAST_VERSION] if self.game.shares.get(PAST) else []
        self.result_names = (*told, *(["seconds"] if self.game.ticks_a_second else []), *self.game.statistics, *past)
        """What `infos` says of matches that are over: against whom they were won or lost, how long they took, and of heroes."""
        self._timesteps = 0
        self._sight = Sight(self.game)
        self._seen: list[Leaves] = [self._sight.blank] * self.num_envs
        self._masks: list[bytes] = [self._sight.open] * self.num_envs
        self._seed: int | None = None
        self._house: _House | None = None
        self._all_of_them = True

    @property
    def restarts(self) -> int:
        """Matches that were lost."""
        return 0 if self._house is None else self._house.tables.counts["lost"]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Matches that go on are given up."""
        self._leave()
        self._seed = None if seed is None else int(seed) if isinstance(seed, (int, np.integer)) else seed[0]
        self._seen, self._masks = [self._sight.blank] * self.num_envs, [self._sight.open] * self.num_envs
        arrays, _ = self._sight.show(self._seen)
        return self._shown(arrays, self._sight.allow(self._masks)[0])

    def step(self, actions: Any) -> tuple[Any, Floats, Bools, Bools, dict[str, Any]]:
        """Raises EnvironmentFault when there is nothing to wait for any more."""
        house = self._house or self._move_in()
        house.tables.answer(_by_row(actions))
        self._wait(house)
        outcome = house.tables.collect()
        observation, infos = self._look(house, outcome)
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for row, said in outcome.said.items():
            reward[row], terminated[row], truncated[row] = said.reward, said.terminated, said.truncated
        if outcome.lost:
            lost = np.zeros(self.num_envs, np.bool_)
            lost[outcome.lost] = True
            reward[lost], terminated[lost], truncated[lost] = 0.0, False, False
            infos[LOST] = lost
        if outcome.ended:
            infos |= self._results(outcome.ended)
        return observation, reward, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._leave()

    # -- what rows see

    def _look(self, house: _House, outcome: Outcome) -> tuple[Any, dict[str, Any]]:
        """What the rows see now, and infos. Matches that show what is no number are lost."""
        before = [(row, self._seen[row], self._masks[row]) for row in outcome.said]
        for row, said in outcome.said.items():
            if said.seen is not None:
                self._seen[row] = said.seen
            self._masks[row] = said.mask or self._sight.open
        arrays, wrong = self._sight.show(self._seen)
        mask, closed = self._sight.allow(self._masks)
        if wrong or closed:
            rows = house.tables.spoilt(wrong | closed, outcome)
            for row, seen, allowed in before:
                if row in rows:
                    self._seen[row], self._masks[row] = seen, allowed
            arrays, _ = self._sight.show(self._seen)
            mask, _ = self._sight.allow(self._masks)
        return self._shown(arrays, mask)

    def _shown(self, arrays: Sequence[Array], mask: Bools) -> tuple[Any, dict[str, Any]]:
        """The observation as its space has it, and infos."""
        seen = self._sight.tree(arrays)
        if not self.game.mask_inside:
            return seen, {ACTION_MASK: mask} if self.game.masked else {}
        parts: Any = mask.view(np.int8)
        if self.game.heads:
            parts = tuple(np.split(parts, self.game.heads, axis=1))
        return (seen if isinstance(self.game.seen_space, gym.spaces.Dict) else {"observation": seen}) | {ACTION_MASK: parts}, {}

    def _results(self, ended: Sequence[Table]) -> dict[str, npt.NDArray[Any]]:
        """As the Arena's own environments tell them."""
        numbers: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(self.num_envs, np.int64) for name in ("won", "camp", "ticks", *self.game.statistics)
        }
        over, against = np.zeros(self.num_envs, np.bool_), np.full(self.num_envs, "", object)
        for table in ended:
            result, winner = table.result, table.result.get("winner")
            heroes = result.get("heroes")
            for camp, rows in table.rows.items():
                won = 0 if type(winner) is not int else 1 if winner == camp else -1
                for seat, row in enumerate(rows):
                    over[row], against[row] = True, table.against
                    numbers["won"][row], numbers["camp"][row], numbers["ticks"][row] = won, camp, _whole(result.get("ticks"))
                    place = camp * len(rows) + seat
                    hero = heroes[place] if isinstance(heroes, list) and place < len(heroes) else None
                    if isinstance(hero, dict):
                        for name in self.game.statistics:
                            numbers[name][row] = _whole(hero.get(name))
        told = numbers | {f"_{name}": over for name in numbers}
        if self.game.ticks_a_second:
            told |= {"seconds": numbers["ticks"] / self.game.ticks_a_second, "_seconds": over}
        for who in self.game.against:
            for how, won in (("win", 1), ("loss", -1)):
                told[f"{how}/{who}"] = (numbers["won"] == won).astype(np.float32)
                told[f"_{how}/{who}"] = over & self._tells & (against == who)
        if PAST_VERSION in self.result_names:
            told |= {PAST_VERSION: np.zeros(self.num_envs), f"_{PAST_VERSION}": over & self._tells & (against == PAST)}
        return told

    def set_timesteps(self, timesteps: int) -> None:
        """Of training: matches that begin from now on may be rewarded otherwise."""
        self._timesteps = timesteps
        if self._house is not None:
            self._house.matchmaker.timesteps = timesteps

    # -- waiting

    def _wait(self, house: _House) -> None:
        """Until every game in play has spoken, and most of those that begin."""
        tables, began = house.tables, time.monotonic()
        while True:
            with tables.changed:
                if house.matchmaker.fault is not None:
                    raise house.matchmaker.fault
                in_no_hurry = self._all_of_them and time.monotonic() - began < _PATIENCE_S
                if tables.settled(all_of_them=in_no_hurry):
                    self._all_of_them = False
                    return
                tables.changed.wait(_BEAT_S)
                silent = tables.waited_for()
                failures, last = tables.failures_in_a_row, tables.last_loss
            self.beat()
            self._look_after(house, silent)
            if failures > _FAILURES + 2 * len(self.slots):
                raise EnvironmentFault(
                    f"{failures} matches of {self.game.game!r} in a row came to nothing; the last: {last}",
                    f"`ludus gamecore list` and `ludus gamecore logs ID` on {house.client.server} say more.",
                )
            since = house.matchmaker.away_since
            if since is not None and time.monotonic() - since > self._away_s:
                raise EnvironmentFault(f"The gamecore server has been away for {self._away_s:g} s: {house.matchmaker.away}")

    def _look_after(self, house: _House, silent: Sequence[Table]) -> None:
        now = time.monotonic()
        for table in silent:
            silent_s = now - table.since
            begun = table.decisions > 0 or bool(table.said)
            if not begun and table.venue is not None and not table.venue.accepted:
                continue  # its time begins when its server has said that it starts it
            if silent_s > (self._timeout_s if begun else self._start_s):
                what = "its game has been silent for" if begun else "its game has not begun within"
                turns = "; all seats have to be asked at the same time, and some were not" if table.said else ""
                house.tables.lose(table, f"{what} {silent_s:.1f} s{turns}")
            elif silent_s > _LOOK_S and now - table.looked > _LOOK_S:
                table.looked = now
                house.matchmaker.look(table)

    # -- the house

    def _move_in(self) -> _House:
        seats = len(self.game.seats)
        if self._asked % seats:
            raise ConfigError(
                f"{self._asked} environments, and {self.game.mode} has {seats} seats a side.",
                f"Set num_envs_per_worker to a multiple of {seats}.",
            )
        server, token_file, advertise = self._where
        client = GamecoreClient(server, max_frame_num=self.game.max_frames or -1, token_file=token_file)
        slots = [Slot(slot.index, slot.kind, slot.groups) for slot in self.slots]
        silent_s = max(self._timeout_s, self._start_s) + _FORGOTTEN_S  # by then their match is lost
        self._house = _House(client, self.game, slots, advertise, silent_s)
        self._house.begin(self._start_from, self._eval_mode, self._together, self._seed, self._timesteps)
        self._all_of_them = True
        return self._house

    def _leave(self) -> None:
        house, self._house = self._house, None
        if house is not None:
            house.close()


class _House:
    """What stands behind the rows while there are matches: the tables, the door to them, and who orders matches."""

    def __init__(
        self, client: GamecoreClient, game: Playable, slots: Sequence[Slot], advertise: str | None, silent_s: float
    ) -> None:
        """`silent_s`: sessions whose game says nothing for so long are forgotten."""
        self.client, self._game = client, game
        self.tables, reading = Tables(game, slots), Reading(game)
        at = urlsplit(client.server)
        host = advertise or own_address(at.hostname or "", at.port or 80)
        self.token = secrets.token_urlsafe(24)
        settings = GatewaySettings(
            token=self.token,
            sessions=SessionLimits(tick_s=_TICK_S, silent_s=silent_s, retry_s=10.0),
            spec=plain_spec({seat: SeatSpaces(game.seen_space, game.action_space) for seat in game.seats}),
        )
        self.door = Door(host, lambda: TableActor(self.tables, reading), settings)

    def begin(self, start_from: str | None, eval_mode: bool, together: int, seed: int | None, timesteps: int) -> None:
        actor = {"url": self.door.url, "token": self.token, "timeout_s": CAMP_S}
        terms = Terms(actor, f"ludus-{secrets.token_hex(4)}", start_from, eval_mode, together)
        self._game.lineups.begin(seed or 0)
        self.matchmaker = Matchmaker(self.client, self.tables, self._game, terms, seed)
        self.matchmaker.timesteps = timesteps
        self.matchmaker.start()

    def close(self) -> None:
        self.tables.closed = True
        self.matchmaker.close()
        self.door.close()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _by_row(actions: Any) -> Callable[[int], Any]:
    """Actions as messages say them."""
    if isinstance(actions, np.ndarray):
        rows = actions.tolist()
        return lambda row: rows[row]
    return lambda row: map_tree(lambda x: np.asarray(x)[row].tolist(), actions)
