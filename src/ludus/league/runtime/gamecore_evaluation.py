"""Matches of games on a gamecore server between players that do not learn: battles, as `ludus battle --server` plays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ludus.config.schema import GAMECORE, SelfPlayConfig
from ludus.envs.vector_env import training_env_config
from ludus.errors import EnvironmentFault
from ludus.gamecore.game_spec import ARENA
from ludus.gamecore.vector_env import GamecoreVectorEnv
from ludus.league.runtime.arena_evaluation import draw_lineups
from ludus.league.runtime.pair_task import PairTask, load_players, play_battle
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.protocol.gamecore_client import GamecoreClient
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import (
    RANDOM_RULE,
    GiveUp,
    PolicySpaces,
    load_league_policies,
    random_policy,
    read_player_token,
    script_name,
)
from ludus.tournament.contestants import Contestant, ScriptedContestant, ServedContestant, TrainedContestant
from ludus.tournament.gamecore_matches import GameLocation
from ludus.tournament.settings import BattleSettings


def is_arena_game(env_config: Mapping[str, Any]) -> bool:
    """Whether `env_config` of a gamecore environment means the Arena, whose battles need no server."""
    return env_config.get("game", ARENA) == ARENA and "observation_space" not in env_config


def game_location(env_config: Mapping[str, Any]) -> GameLocation:
    """Where the matches of a gamecore environment are played."""
    with GamecoreClient(env_config.get("server"), token_file=env_config.get("token_file")) as client:
        server = client.server
    return GameLocation(
        server,
        env_config.get("game", ARENA),
        env_config.get("token_file"),
        env_config.get("advertise"),
        options=env_config.get("options") or {},
    )


class GamecorePlayers:
    """The players of a league as contestants of battles in a game of a gamecore server."""

    def __init__(self, league: Path, env_config: Mapping[str, Any]) -> None:
        """`env_config`: keywords of the training environments. Raises ConfigError."""
        self._league = league
        keywords = training_env_config(GAMECORE, env_config, SelfPlayConfig(opponents="latest"))
        self.game = GamecoreVectorEnv(1, **keywords).game
        self._like = PolicySpaces(self.game.wire_space, self.game.action_space)

    def load(self, model: str, token_file: str, give_up: GiveUp, seed: int = 0) -> Contestant:
        """Raises LudusError, OSError."""
        if model == RANDOM_RULE:
            return self._trained(model, random_policy(self._like, seed))
        script = script_name(model)
        if script is not None:
            return ScriptedContestant(script)
        loaded = load_league_policies(self._league, model, self._like, give_up, token_file=token_file)
        if loaded.served is not None:
            loaded.close()  # games ask the server themselves
            return ServedContestant(model, read_player_token(model, token_file))
        return self._trained(model, loaded.by_agent[""])

    def _trained(self, model: str, policy: ActingPolicy) -> Contestant:
        return TrainedContestant(model, policy, seats=dict.fromkeys(self.game.seats, policy))


class GamecorePairs:
    """Plays pairs of players on a gamecore server."""

    def __init__(self, league: Path, env_config: Mapping[str, Any], spool: ResultSpool) -> None:
        """`env_config`: keywords of the training environments. Raises ConfigError."""
        self._spool, self._location, self._players = spool, game_location(env_config), GamecorePlayers(league, env_config)

    def play(self, task: PairTask, seed: int, interrupted: Callable[[], bool]) -> None:
        """Play the matches of a task, from both sides in turn, and report their results. Raises ModelUnusable, EnvironmentFault."""
        pair, game = load_players(task, self._players.load, self._spool), self._players.game
        settings = BattleSettings(
            games=task.matches,
            mode=game.mode,
            lineups=draw_lineups(game.lineups, task.matches, seed),
            seed=seed,
            deterministic=False,
        )
        failures = play_battle(pair, settings, self._location, task, self._spool, interrupted)
        if len(failures) == task.matches:
            raise EnvironmentFault(f"All matches of {task.player} against {task.opponent} failed; the last: {failures[-1]}.")
