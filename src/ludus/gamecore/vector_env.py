"""Vector environment whose rows are seats of matches on a gamecore server.

    env: gamecore
    env_config: {server: node1:23432, mode: 3v3, opponent: {self: 0.8, past: 0.2}}

The games call this process over HTTP: each instance runs a gateway with its own token, and orders its matches from the server.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.core.spaces import ACTION_MASK, array_spec
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Ints
from ludus.envs.opponents.opponent_mix import PAST, PAST_VERSION, RULE, assign_opponents, outcome_names
from ludus.envs.opponents.opponent_rows import ChooseScript
from ludus.envs.vector_env import LOST
from ludus.errors import ConfigError, EnvironmentFault
from ludus.gamecore.game_spec import ARENA, MAX_MATCHES_PER_PROCESS, GameSpec, resolve_game
from ludus.gamecore.live_matches import (
    LeafBytes,
    LiveMatch,
    LiveMatches,
    MatchActor,
    MatchSlot,
    ObservationBatcher,
    StepOutcome,
    StepParser,
)
from ludus.gamecore.match_scheduler import CAMP_S, MatchScheduler, OrderDefaults, make_slots
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.gateway.threaded_server import ThreadedGateway, own_address
from ludus.protocol.codec import SeatSpaces, seats_to_spec
from ludus.protocol.gamecore_client import GamecoreClient

log = logging.getLogger(__name__)

ADVERTISE: Final = "LUDUS_ADVERTISE"
"""Environment variable: the address by which games reach this machine."""
_TICK_S: Final = 7 * 24 * 3600.0
"""Time limit of a parked tick: long, because the learner may evaluate or be suspended; games have their own time limits."""
_SESSION_GRACE_S: Final = 60.0
_BEAT_S: Final = 0.2
_CHECK_S: Final = 0.5
"""Silence after which a game is checked, and the interval between checks."""
_FIRST_WAIT_S: Final = 5.0
"""The first step waits this long for all matches to begin."""
_MAX_FAILURES: Final = 6
"""Consecutive lost matches, plus two per slot, that raise EnvironmentFault."""


class GamecoreVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """`num_envs` learning seats, followed by the seats of past opponents (`opponent_rows`).

    `reset` starts no match and returns blank observations. The first step starts the matches and is lost (`infos["lost"]`), as is
    every step of a row whose match was lost or has not begun. The step after the end of a match only begins the next one
    (next-step autoreset).
    """

    only_training: Final = ("repeat", "start_from", "matchmaking")
    """Keywords that evaluations ignore."""
    self_play_keywords: Final[Mapping[str, Any]] = {"opponent": PAST, "side": "random"}
    """Keywords of training with `self_play.opponents`."""

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
        """`server`: default GAMECORE_SERVER_ADDR, then this machine. `advertise`: address by which games reach this machine; default
        LUDUS_ADVERTISE, then the local address of the route to the server. `options`: of the game, as declared in the server's
        catalogue. `start_from`: a saved state, or `any`. A match is lost if its game is silent for `timeout_s` or has not begun after
        `start_s`; a server unreachable for `away_s` is an error. `together`: maximum of concurrent matches per game process;
        0: one process per match; None: the game's default. Further keywords: see `resolve_game`. Raises ConfigError.
        """
        self.game: GameSpec = resolve_game(game, mode, options or {}, keywords)
        self._limits = _TimeLimits(timeout_s, start_s, away_s)
        if together is not None and (type(together) is not int or not 0 <= together <= MAX_MATCHES_PER_PROCESS):
            hint = f"Matches that one game process plays concurrently, up to {MAX_MATCHES_PER_PROCESS}; 0: one process per match."
            raise ConfigError(f"together is {together!r}.", hint)
        self._orders = OrderDefaults(start_from, eval_mode, self.game.matches_per_process if together is None else together)
        self._addresses = _Addresses(server, token_file, advertise or os.environ.get(ADVERTISE) or None)
        seats = len(self.game.seats)
        kinds = assign_opponents(max(1, num_envs // seats), self.game.opponent_shares, stand_in=RULE)
        self.slots, rows = make_slots(kinds, seats)
        self.num_envs = rows if num_envs % seats == 0 else num_envs
        self.opponent_rows: Bools = np.arange(self.num_envs) >= num_envs
        self.match_of_row: Ints = np.full(self.num_envs, -1, np.int64)
        """By row: the number of its slot; a slot plays one match after the other. -1: the row has none."""
        for slot in self.slots:
            self.match_of_row[[row for row in slot.rows if row < self.num_envs]] = slot.index
        self.group_rows = seats
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None
        self.single_observation_space, self.single_action_space = self.game.observation_space, self.game.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.beat: Callable[[], None] = lambda: None
        self.choose_script: ChooseScript = lambda match, match_id: None
        self._reports_result: Bools = ~self.opponent_rows & (np.arange(self.num_envs) % seats == 0)
        """One row per group reports whether the match was won."""
        outcomes = outcome_names(self.game.opponents)
        past = [PAST_VERSION] if self.game.opponent_shares.get(PAST) else []
        self.result_names = (*outcomes, *(["seconds"] if self.game.ticks_per_second else []), *self.game.statistics, *past)
        """Keys in `infos` of ended matches: wins and losses by opponent, duration, hero statistics."""
        self._timesteps = 0
        self._observations = _RowObservations(self.game, self.num_envs)
        self._seed: int | None = None
        self._backend: _Backend | None = None
        self._first_step = True

    @property
    def restarts(self) -> int:
        """Number of lost matches."""
        return 0 if self._backend is None else self._backend.matches.counts["lost"]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Abandon running matches and return blank observations."""
        self._close_backend()
        self._seed = None if seed is None else int(seed) if isinstance(seed, (int, np.integer)) else seed[0]
        return self._observations.reset()

    def step(self, actions: Any) -> tuple[Any, Floats, Bools, Bools, dict[str, Any]]:
        """Raises EnvironmentFault when matches cannot be played any more."""
        backend = self._backend or self._open_backend()
        backend.matches.answer(_row_actions(actions))
        self._wait(backend)
        outcome = backend.matches.collect()
        observation, infos = self._observations.update(outcome, backend.matches)
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for row, update in outcome.updates.items():
            reward[row], terminated[row], truncated[row] = update.reward, update.terminated, update.truncated
        if outcome.lost:
            lost = np.zeros(self.num_envs, np.bool_)
            lost[outcome.lost] = True
            reward[lost], terminated[lost], truncated[lost] = 0.0, False, False
            infos[LOST] = lost
        if outcome.ended:
            infos |= self._results(outcome.ended)
        return observation, reward, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._close_backend()

    # -- results

    def _results(self, ended: Sequence[LiveMatch]) -> dict[str, npt.NDArray[Any]]:
        """Return the results of ended matches, in the format of the Arena's environments."""
        numbers: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(self.num_envs, np.int64) for name in ("won", "camp", "ticks", *self.game.statistics)
        }
        over, against = np.zeros(self.num_envs, np.bool_), np.full(self.num_envs, "", object)
        for match in ended:
            result, winner = match.result, match.result.get("winner")
            heroes = result.get("heroes")
            for camp, rows in match.rows.items():
                won = 0 if type(winner) is not int else 1 if winner == camp else -1
                for seat, row in enumerate(rows):
                    over[row], against[row] = True, match.opponent
                    numbers["won"][row], numbers["camp"][row] = won, camp
                    numbers["ticks"][row] = _int_or_zero(result.get("ticks"))
                    place = camp * len(rows) + seat
                    hero = heroes[place] if isinstance(heroes, list) and place < len(heroes) else None
                    if isinstance(hero, dict):
                        for name in self.game.statistics:
                            numbers[name][row] = _int_or_zero(hero.get(name))
        results = numbers | {f"_{name}": over for name in numbers}
        if self.game.ticks_per_second:
            results |= {"seconds": numbers["ticks"] / self.game.ticks_per_second, "_seconds": over}
        for who in self.game.opponents:
            for how, won in (("win", 1), ("loss", -1)):
                results[f"{how}/{who}"] = (numbers["won"] == won).astype(np.float32)
                results[f"_{how}/{who}"] = over & self._reports_result & (against == who)
        if PAST_VERSION in self.result_names:
            results[PAST_VERSION] = np.zeros(self.num_envs)
            results[f"_{PAST_VERSION}"] = over & self._reports_result & (against == PAST)
        return results

    # -- scripts of the game as opponents

    def plays_script(self, name: str) -> bool:
        """Whether the game may have this script. Which ones a declared game has is not known here; `random` is not one of them."""
        return name != "random" if self.game.scripts is None else name in self.game.scripts

    @property
    def current_matches(self) -> list[str]:
        """By number of a match (`match_of_row`): the id of the one that has begun last; empty: none."""
        return [slot.match_id for slot in self._backend.matches.slots] if self._backend is not None else [""] * len(self.slots)

    def script_actions(self, rows: Ints, scripts: Sequence[str]) -> Tree:
        """Actions without effect: the game plays the rows itself."""
        return map_tree(lambda spec: spec.zeros(len(rows)), array_spec(self.single_action_space, "action"))

    def set_timesteps(self, timesteps: int) -> None:
        """Set the training timesteps, which determine the scheduled options of later matches."""
        self._timesteps = timesteps
        if self._backend is not None:
            self._backend.scheduler.timesteps = timesteps

    # -- waiting

    def _wait(self, backend: _Backend) -> None:
        """Wait until every current match is ready, and most starting ones have begun."""
        matches, began = backend.matches, time.monotonic()
        while True:
            with matches.condition:
                if backend.scheduler.fault is not None:
                    raise backend.scheduler.fault
                wait_for_all = self._first_step and time.monotonic() - began < _FIRST_WAIT_S
                if matches.ready_to_step(wait_for_all=wait_for_all):
                    self._first_step = False
                    return
                matches.condition.wait(_BEAT_S)
                silent = matches.silent_matches()
                failures, last = matches.consecutive_failures, matches.last_loss
            self.beat()
            self._check_silent(backend, silent)
            if failures > _MAX_FAILURES + 2 * len(self.slots):
                raise EnvironmentFault(
                    f"{failures} consecutive matches of {self.game.game!r} were lost; the last: {last}",
                    f"Run `ludus gamecore list` and `ludus gamecore logs ID` against {backend.client.server}.",
                )
            since = backend.scheduler.away_since
            if since is not None and time.monotonic() - since > self._limits.away_s:
                away = f"The gamecore server has been unreachable for {self._limits.away_s:g} s: {backend.scheduler.away}"
                raise EnvironmentFault(away)

    def _check_silent(self, backend: _Backend, silent: Sequence[LiveMatch]) -> None:
        now = time.monotonic()
        for match in silent:
            silent_s = now - match.last_activity
            begun = match.decisions > 0 or bool(match.updates)
            if not begun and match.process is not None and not match.process.accepted:
                continue  # the time limit begins when the server accepts the order
            if silent_s > (self._limits.timeout_s if begun else self._limits.start_s):
                problem = "its game has been silent for" if begun else "its game has not begun within"
                missing = "; a game must send the ticks of all seats at the same time, and some are missing"
                turns = missing if match.updates else ""
                backend.matches.lose(match, f"{problem} {silent_s:.1f} s{turns}")
            elif silent_s > _CHECK_S and now - match.checked_at > _CHECK_S:
                match.checked_at = now
                backend.scheduler.check(match)

    # -- backend

    def _open_backend(self) -> _Backend:
        seats, learning_rows = len(self.game.seats), int(np.sum(~self.opponent_rows))
        if learning_rows % seats:
            raise ConfigError(
                f"There are {learning_rows} environments, but {self.game.mode} has {seats} seats per side.",
                f"Set num_envs_per_worker to a multiple of {seats}.",
            )
        client = self._addresses.make_client(self.game)
        slots = [MatchSlot(slot.index, slot.kind, slot.groups) for slot in self.slots]
        self._backend = _Backend(client, self.game, slots, self._addresses.gateway_host(client), self._limits.session_s)
        self._backend.start(
            self._orders, self._seed, self._timesteps, lambda match, match_id: self.choose_script(match, match_id)
        )
        self._first_step = True
        return self._backend

    def _close_backend(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


@dataclass(frozen=True)
class _TimeLimits:
    """See `GamecoreVectorEnv`. Raises ConfigError."""

    timeout_s: float
    start_s: float
    away_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} is {value!r}.", "A number of seconds above 0.")

    @property
    def session_s(self) -> float:
        """Silence that ends a session of the gateway. Its match is lost before."""
        return max(self.timeout_s, self.start_s) + _SESSION_GRACE_S


@dataclass(frozen=True)
class _Addresses:
    """Where the gamecore server is, and where its games find this process; None: see `GamecoreVectorEnv`."""

    server: str | None
    token_file: str | None
    advertise: str | None

    def make_client(self, game: GameSpec) -> GamecoreClient:
        return GamecoreClient(self.server, max_frame_num=game.max_frames or -1, token_file=self.token_file)

    def gateway_host(self, client: GamecoreClient) -> str:
        at = urlsplit(client.server)
        return self.advertise or own_address(at.hostname or "", at.port or 80)


class _RowObservations:
    """The latest observation and action mask of every row."""

    def __init__(self, game: GameSpec, rows: int) -> None:
        self._game, self._batcher = game, ObservationBatcher(game)
        self._leaves: list[LeafBytes] = [self._batcher.blank] * rows
        self._masks: list[bytes] = [self._batcher.open] * rows

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Return blank observations, and infos."""
        rows = len(self._leaves)
        self._leaves, self._masks = [self._batcher.blank] * rows, [self._batcher.open] * rows
        arrays, _ = self._batcher.show(self._leaves)
        return self._format(arrays, self._batcher.allow(self._masks)[0])

    def update(self, outcome: StepOutcome, matches: LiveMatches) -> tuple[Any, dict[str, Any]]:
        """Return observations and infos after a step. Matches with invalid values are lost; their rows keep the previous values."""
        before = [(row, self._leaves[row], self._masks[row]) for row in outcome.updates]
        for row, update in outcome.updates.items():
            if update.observation is not None:
                self._leaves[row] = update.observation
            self._masks[row] = update.mask or self._batcher.open
        arrays, wrong = self._batcher.show(self._leaves)
        mask, closed = self._batcher.allow(self._masks)
        if wrong or closed:
            rows = matches.discard_invalid(wrong | closed, outcome)
            for row, leaves, allowed in before:
                if row in rows:
                    self._leaves[row], self._masks[row] = leaves, allowed
            arrays, _ = self._batcher.show(self._leaves)
            mask, _ = self._batcher.allow(self._masks)
        return self._format(arrays, mask)

    def _format(self, arrays: Sequence[Array], mask: Bools) -> tuple[Any, dict[str, Any]]:
        """Arrange arrays as the observation space requires; the mask goes there or into infos."""
        game, observation = self._game, self._batcher.tree(arrays)
        if not game.mask_inside:
            return observation, {ACTION_MASK: mask} if game.masked else {}
        parts: Any = mask.view(np.int8)
        if game.mask_splits:
            parts = tuple(np.split(parts, game.mask_splits, axis=1))
        named = observation if isinstance(game.wire_space, gym.spaces.Dict) else {"observation": observation}
        return named | {ACTION_MASK: parts}, {}


class _Backend:
    """The running matches, their gateway and their scheduler."""

    def __init__(self, client: GamecoreClient, game: GameSpec, slots: Sequence[MatchSlot], host: str, silent_s: float) -> None:
        """`host`: of the gateway; `silent_s`: seconds without a request after which a session ends."""
        self.client, self._game = client, game
        self.matches, parser = LiveMatches(game, slots), StepParser(game)
        self.token = secrets.token_urlsafe(24)
        settings = GatewaySettings(
            token=self.token,
            sessions=SessionLimits(tick_s=_TICK_S, silent_s=silent_s, retry_s=10.0),
            spec=seats_to_spec({seat: SeatSpaces(game.wire_space, game.action_space) for seat in game.seats}),
        )
        self.gateway = ThreadedGateway(host, lambda: MatchActor(self.matches, parser), settings)

    def start(self, orders: OrderDefaults, seed: int | None, timesteps: int, choose_script: ChooseScript) -> None:
        actor = {"url": self.gateway.url, "token": self.token, "timeout_s": CAMP_S}
        self._game.lineups.begin(seed or 0)
        self.scheduler = MatchScheduler(self.client, self.matches, actor, orders, seed)
        self.scheduler.timesteps, self.scheduler.choose_script = timesteps, choose_script
        self.scheduler.start()

    def close(self) -> None:
        self.matches.closed = True
        self.scheduler.close()
        self.gateway.close()


def _int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _row_actions(actions: Any) -> Callable[[int], Any]:
    """Return a function from a row to its action as plain lists and numbers."""
    if isinstance(actions, np.ndarray):
        rows = actions.tolist()
        return lambda row: rows[row]
    return lambda row: map_tree(lambda x: np.asarray(x)[row].tolist(), actions)
