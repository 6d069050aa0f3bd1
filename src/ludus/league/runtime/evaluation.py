"""Matches between players that do not learn. Results are reported to the coordinator like those of training matches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.validation.validate import is_multi_agent
from ludus.league.runtime.arena_evaluation import ArenaPairs
from ludus.league.runtime.pair_task import ModelUnusable, PairTask, load_players
from ludus.league.runtime.player_models import EVALUATION
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.sampling.episode_runner import episode_step_limit
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import PolicySpaces, load_league_policy
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.seating import FinishedMatch, Seating
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
        pairs: ArenaPairs | EnvPairs
        if is_multi_agent(env, config.model_dump()):
            pairs = stack.enter_context(EnvPairs(league, resolved, max((task.matches for task in tasks), default=1), spool))
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
        first = next(iter(agents.values()))
        self._like = PolicySpaces(first.observation, first.action)
        self._sides = [tuple(side) for side in config.self_play.sides or [[agent] for agent in agents]]
        self._max_steps = episode_step_limit(env)

    def __enter__(self) -> EnvPairs:
        return self

    def __exit__(self, *exc: object) -> None:
        self._copies.close()

    def play(self, task: PairTask, seed: int, interrupted: Callable[[], bool]) -> None:
        """Play the matches of a task and report their results. Raises ModelUnusable."""
        own, other = load_players(
            task, lambda model, give_up: load_league_policy(self._league, model, self._like, give_up), self._spool
        )
        policies = {_OWN: own, _OTHER: other}
        _play(self._copies, self._sides, policies, task, self._spool, seed, self._max_steps, interrupted)


def _play(
    copies: MatchCopies,
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
    matches = MatchRunner(copies, all_agents, loaded, {}, seed, seat_agents=seat_agents)
    with loaded.acting():
        while any(left) and not interrupted():
            matches.tick(np.array(left) > 0)
            over = {number for number, _ in matches.finished}
            long = [
                number for number in range(n) if left[number] > 0 and number not in over and matches.steps_of(number) >= max_steps
            ]
            for number, match in [*matches.finished, *((number, matches.stop_match(number)) for number in long)]:
                count(number, match)
            matches.finished.clear()
