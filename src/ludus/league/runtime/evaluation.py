"""Matches between players that do not learn. Results are reported to the coordinator like those of training matches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ludus.config.schema import GAMECORE
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.validation.validate import is_multi_agent
from ludus.league.runtime.arena_evaluation import ArenaPairs
from ludus.league.runtime.gamecore_evaluation import GamecorePairs, is_arena_game
from ludus.league.runtime.pair_task import ModelUnusable, PairTask, load_players
from ludus.league.runtime.player_models import EVALUATION
from ludus.sampling.episode_runner import episode_step_limit
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import GiveUp, LeaguePolicies, PolicySpaces, load_league_policies
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.seating import NOT_OVER, Seating, SideResult
from ludus.sampling.multi_agent.vector_copies import make_copies

_ROWS: Final = 32
"""Matches that are played at the same time."""
_OWN, _OTHER = "own", "other"


def play_pairs(
    league: Path, resolved: ResolvedExperiment, tasks: Sequence[PairTask], seed: int, interrupted: Callable[[], bool]
) -> None:
    """Play all tasks and report their results. A player whose model cannot be loaded is reported, and its matches are left out.

    `resolved`: the experiment of a training player, for environment and sides.
    """
    env, config = resolved.experiment.env, resolved.config
    with contextlib.closing(ResultSpool(league, EVALUATION)) as spool, contextlib.ExitStack() as stack:
        pairs: ArenaPairs | EnvPairs | GamecorePairs
        if is_multi_agent(env, config.model_dump()):
            pairs = stack.enter_context(EnvPairs(league, resolved, max((task.matches for task in tasks), default=1), spool))
        elif env == GAMECORE and not is_arena_game(config.env_config):
            pairs = GamecorePairs(league, config.env_config, spool)
        else:
            pairs = ArenaPairs(league, config.env_config, spool)
        for number, task in enumerate(tasks):
            with contextlib.suppress(ModelUnusable):
                pairs.play(task, (seed + number) % (1 << 31), interrupted)
            spool.flush()
            if interrupted():
                return


class EnvPairs:
    """Plays pairs of players in an environment with several agents. A context manager."""

    def __init__(self, league: Path, resolved: ResolvedExperiment, matches: int, spool: ResultSpool) -> None:
        """`matches`: most matches of a pair."""
        env, config = resolved.experiment.env, resolved.config
        self._league, self._spool = league, spool
        self._copies = make_copies(
            env,
            max(1, min(_ROWS, matches)),
            config.env_config,
            wrappers=config.wrappers,
            preprocess=config.preprocess,
            forgiving=config.restart_failed_sub_environments,
        )
        agents = self._copies.agents
        first, self._agents, self._failed = next(iter(agents.values())), list(agents), False
        self._like = PolicySpaces(first.observation, first.action)
        self._sides = [tuple(side) for side in config.self_play.sides or [[agent] for agent in agents]]
        self._max_steps = episode_step_limit(env)

    def __enter__(self) -> EnvPairs:
        return self

    def __exit__(self, *exc: object) -> None:
        self._copies.close()

    def play(self, task: PairTask, seed: int, interrupted: Callable[[], bool]) -> None:
        """Play the matches of a task and report their results; ends early if a player fails. Raises ModelUnusable."""
        self._failed = False
        with contextlib.ExitStack() as stack:
            players = load_players(task, functools.partial(self._load, stack), self._spool)
            seats = dict(zip((_OWN, _OTHER), players, strict=True))
            stop = lambda: self._failed or interrupted()  # noqa: E731
            _play(self._copies, self._sides, seats, task, self._spool, seed, self._max_steps, stop)

    def _load(self, stack: contextlib.ExitStack, model: str, token_file: str, give_up: GiveUp) -> LeaguePolicies:
        def fail(reason: str, temporary: bool = False) -> None:
            self._failed = True
            give_up(reason, temporary)

        loaded = load_league_policies(self._league, model, self._like, fail, token_file=token_file, agents=self._agents)
        stack.callback(loaded.close)
        return loaded


def _play(
    copies: MatchCopies,
    sides: Sequence[tuple[str, ...]],
    players: Mapping[str, LeaguePolicies],
    task: PairTask,
    spool: ResultSpool,
    seed: int,
    max_steps: int,
    interrupted: Callable[[], bool],
) -> None:
    """Each copy plays an equal share, from both sides in turn. A match longer than `max_steps` is stopped, and is a draw."""
    n = len(copies)
    left = [task.matches // n + (number < task.matches % n) for number in range(n)]
    loaded = PolicySet({}, torch.Generator().manual_seed(seed), explore=True)
    for seat, player in players.items():
        for agent, policy in player.by_agent.items():
            loaded.add_fixed(f"{seat} {agent}", policy)

    def model_of(seat: str, agent: str) -> str | None:
        known = players[seat].by_agent
        return next((f"{seat} {name}" for name in (agent, "") if name in known), None)

    def seat_agents(number: int) -> Seating:
        own = sides[(number + left[number]) % len(sides)]
        seat_of = {agent: _OWN if agent in own else _OTHER for side in sides for agent in side}
        models = {agent: model_of(seat, agent) for agent, seat in seat_of.items()}
        ends = {agent: served.end_episode for agent, seat in seat_of.items() if (served := players[seat].served) is not None}
        return Seating(models, frozenset(own), task.opponent, on_episode_end=ends)

    def count(number: int, result: SideResult) -> None:
        left[number] -= 1
        spool.add(task.player, task.opponent, 0, *result)

    all_agents = dict.fromkeys((agent for side in sides for agent in side), _OWN)
    matches = MatchRunner(copies, all_agents, loaded, {}, seed, seat_agents=seat_agents)
    with loaded.acting():
        while any(left) and not interrupted():
            matches.tick(np.array(left) > 0)
            over = {number for number, _ in matches.finished}
            long = [
                number for number in range(n) if left[number] > 0 and number not in over and matches.steps_of(number) >= max_steps
            ]
            for number, match in matches.finished:
                count(number, match.side_result)
            for number in long:
                matches.stop_match(number)
                count(number, NOT_OVER)
            matches.finished.clear()
