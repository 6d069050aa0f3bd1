"""Matches between players that do not learn. Results are reported to the coordinator like those of training matches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import torch

from ludus.errors import LudusError
from ludus.experiments.assembly.match_evaluation import make_match
from ludus.experiments.resolve import ResolvedExperiment
from ludus.league.runtime.league_file import EVALUATION
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.sampling.episode_runner import episode_step_limit
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import load_league_policy
from ludus.sampling.multi_agent import EnvCopies, FinishedMatch, MatchBatch, PolicySet, Seating

log = logging.getLogger(__name__)

_ROWS: Final = 32
"""Matches that are played at the same time."""
_OWN, _OTHER = "own", "other"


@dataclass(frozen=True)
class PairTask:
    """Matches to play between two players. Models are named as in the files of matchmaking."""

    player: str
    model: str
    opponent: str
    opponent_model: str
    matches: int


@dataclass(frozen=True)
class _Spaces:
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


def play_pairs(
    league: Path, resolved: ResolvedExperiment, tasks: Sequence[PairTask], seed: int, interrupted: Callable[[], bool]
) -> None:
    """Play all tasks and report their results. A player whose model cannot be loaded is reported, and its matches are left out.

    `resolved`: the experiment of a training player, for environment and sides.
    """
    env, config = resolved.experiment.env, resolved.config
    rows = max(1, min(_ROWS, max((task.matches for task in tasks), default=1)))
    copies = EnvCopies(lambda: make_match(env, config), rows, forgiving=config.restart_failed_sub_environments)
    spool = ResultSpool(league, EVALUATION)
    try:
        agents = copies[0].agents
        first = next(iter(agents.values()))
        like = _Spaces(first.observation, first.action)
        sides = [tuple(side) for side in config.self_play.sides or [[agent] for agent in agents]]
        limit = episode_step_limit(env)
        for number, task in enumerate(tasks):
            try:
                policies = _load(league, task, like, spool)
            except (LudusError, OSError):
                continue
            _play(copies, sides, policies, task, spool, (seed + number) % (1 << 31), limit, interrupted)
            spool.flush()
            if interrupted():
                return
    finally:
        spool.close()
        copies.close()


def _load(league: Path, task: PairTask, like: _Spaces, spool: ResultSpool) -> dict[str, ActingPolicy | None]:
    found = {}
    for seat, player, model in ((_OWN, task.player, task.model), (_OTHER, task.opponent, task.opponent_model)):
        give_up = functools.partial(spool.report_unusable, player, model)
        try:
            found[seat] = load_league_policy(league, model, like, give_up)
        except (LudusError, OSError) as error:
            log.warning("the player %s cannot be evaluated: %s", player, error)
            give_up(str(error))
            raise
    return found


def _play(
    copies: EnvCopies,
    sides: Sequence[tuple[str, ...]],
    policies: Mapping[str, ActingPolicy | None],
    task: PairTask,
    spool: ResultSpool,
    seed: int,
    max_steps: int,
    interrupted: Callable[[], bool],
) -> None:
    """Each copy plays an equal share, from both sides in turn. A match longer than `max_steps` is cut and scored as it is."""
    n = len(copies)
    left = [task.matches // n + (number < task.matches % n) for number in range(n)]
    loaded = PolicySet({}, torch.Generator().manual_seed(seed), explore=True)
    for seat, policy in policies.items():
        if policy is not None:
            loaded.add_fixed(seat, policy)
    names = {seat: seat if policy is not None else None for seat, policy in policies.items()}

    def seat_agents(number: int) -> Seating:
        own = sides[(number + left[number]) % len(sides)]
        models = {agent: names[_OWN if agent in own else _OTHER] for side in sides for agent in side}
        return Seating(models, frozenset(own), task.opponent)

    def count(number: int, match: FinishedMatch) -> None:
        left[number] -= 1
        spool.add(task.player, task.opponent, 0, match.score, match.gain)

    all_agents = dict.fromkeys((agent for side in sides for agent in side), _OWN)
    matches = MatchBatch(copies, all_agents, loaded, {}, seed, seat_agents=seat_agents)
    with loaded.acting():
        while any(left) and not interrupted():
            matches.tick(lambda number: left[number] > 0)
            over = {number for number, _ in matches.finished}
            long = [
                number for number in range(n) if left[number] > 0 and number not in over and matches.steps_of(number) >= max_steps
            ]
            for number, match in [*matches.finished, *((number, matches.stop_match(number)) for number in long)]:
                count(number, match)
            matches.finished.clear()
