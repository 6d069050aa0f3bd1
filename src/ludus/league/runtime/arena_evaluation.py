"""Matches of the Arena between players that do not learn: battles, with the heroes and time limits of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ludus.core import spaces
from ludus.envs.opponents.lineups import Lineups
from ludus.envs.vector_env import vector_maker
from ludus.errors import MissingExtra
from ludus.league.runtime.pair_task import ModelUnusable, PairTask, load_players, play_battle
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import (
    ADDRESS,
    RULE,
    GiveUp,
    PolicySpaces,
    load_league_policies,
    load_league_policy,
    read_player_token,
)
from ludus.tournament.contestants import Contestant, ScriptedContestant, ServedContestant, TrainedContestant
from ludus.tournament.settings import BattleSettings, Heroes

if TYPE_CHECKING:
    from ludus.games.arena.env.seats import ArenaOptions


def is_arena(env: str) -> bool:
    """Whether the environment is the vector environment of the Arena. Raises UnknownName."""
    maker = vector_maker(env)
    try:
        from ludus.games.arena.env.gym_env import ArenaVectorEnv
    except MissingExtra:
        return False
    return isinstance(maker, type) and issubclass(maker, ArenaVectorEnv)


def battle_settings(env_config: Mapping[str, Any], games: int, seed: int) -> BattleSettings:
    """Battles as in training: its heroes, time limit and decision interval, and sampled actions. Raises ConfigError."""
    from ludus.games.arena.engine.layout import TICKS_PER_SECOND

    options = _options(env_config)
    return BattleSettings(
        games=games,
        mode=f"{options.size}v{options.size}",
        lineups=None if options.lineup is None else draw_lineups(options.lineups(), games, seed),
        every=options.every,
        seconds=max(1, round(options.limit() / TICKS_PER_SECOND)),
        seed=seed,
        deterministic=False,
    )


def _options(env_config: Mapping[str, Any]) -> ArenaOptions:
    from ludus.games.arena.env.seats import ArenaOptions

    known = {one.name for one in fields(ArenaOptions)} - {"opponent"}
    return ArenaOptions(**{key: value for key, value in env_config.items() if key in known})


class ArenaPairs:
    """Plays pairs of players in the Arena."""

    def __init__(self, league: Path, env_config: Mapping[str, Any], spool: ResultSpool) -> None:
        """`env_config`: keywords of the training environments. Raises ConfigError."""
        from ludus.games.arena.bots.bots import BOTS
        from ludus.games.arena.env.seats import action_space, observation_space

        self._league, self._spool, self._scripts, self._env_config = league, spool, BOTS, env_config
        size = _options(env_config).size
        self._like = PolicySpaces(spaces.split_mask(observation_space(size))[0], action_space(size))

    def play(self, task: PairTask, seed: int, interrupted: Callable[[], bool]) -> None:
        """Play the matches of a task, from both sides in turn, and report their results. Raises ModelUnusable."""
        a, b = load_players(task, self._load, self._spool)
        settings = battle_settings(self._env_config, task.matches, seed)
        play_battle((a, b), settings, None, task, self._spool, interrupted)

    def _load(self, model: str, token_file: str, give_up: GiveUp) -> Contestant:
        if model.startswith(ADDRESS):
            load_league_policies(
                self._league, model, self._like, give_up, token_file=token_file
            ).close()  # raises if it does not fit
            return ServedContestant(model, read_player_token(model, token_file))
        if model.startswith(RULE) and model.removeprefix(RULE) in self._scripts:
            return ScriptedContestant(model.removeprefix(RULE))

        def stop(reason: str) -> None:
            """End the battle when a script fails: the matches that are not over have no result."""
            give_up(reason)
            raise ModelUnusable(f"{model}: {reason}")

        policy = load_league_policy(self._league, model, self._like, stop)
        assert policy is not None  # rule:random is a script here
        return TrainedContestant(model, policy)


def draw_lineups(lineups: Lineups, matches: int, seed: int) -> tuple[Heroes, ...] | None:
    """Line-ups for so many matches, drawn as in training; None: the default one."""
    random = np.random.default_rng(seed)
    lineups.begin(seed)
    found = [lineups.next(random, lambda generator: int(generator.integers(lineups.choices)))[1] for _ in range(matches)]
    return tuple(lineup for lineup in found if lineup is not None) or None
