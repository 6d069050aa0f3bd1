"""Playing matches without recording: evaluation and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ludus.core.tree import Tree
from ludus.envs.pettingzoo import MatchStep, MultiAgentMatch
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet, plain_action
from ludus.sampling.multi_agent.seating import FinishedMatch, Seating
from ludus.sampling.opponents import MatchOutcome, Opponent, win_shares
from ludus.sampling.trained_agent import State as AgentState
from ludus.sampling.trained_agent import TrainedAgent


@dataclass(frozen=True)
class CopyShare:
    """Which copies of an evaluation are played here: those from number `first` on, of `count` in all processes; None: all of them."""

    first: int = 0
    count: int | None = None


ALL_COPIES = CopyShare()


def play_matches(
    copies: MatchCopies,
    policy_mapping: Mapping[str, str],
    sources: Mapping[str, PolicySource],
    episodes: int | EpisodePlan,
    seed: int,
    *,
    deterministic: bool = True,
    opponent: Opponent | None = None,
    share: CopyShare = ALL_COPIES,
    interrupted: Callable[[], bool] = lambda: False,
) -> Score:
    """Play whole matches, each copy an equal share unless the plan says otherwise; the score is the sum of all agents' returns.

    `opponent`: one agent is played by its model, in turn, and all others by the opponent; the score is the return of that agent, with the
    shares of matches that it won, drew and lost.
    A match that reaches the step limit is cut there and counts as it is; its copy plays no further one.
    The matches of a copy depend on `seed` and its number alone. The score lists them copy by copy.
    """
    plan = EpisodePlan(episodes) if isinstance(episodes, int) else episodes
    agents, n = list(copies.agents), len(copies)
    stride = n if share.count is None else share.count
    quota = (episode_quota(plan.amount, n) if isinstance(plan.amount, int) else np.array(plan.amount)).tolist()
    opponents = {} if opponent is None else {f"opponent {agent}": policy for agent, policy in opponent.policies.items()}
    all_sources = {**sources, **{name: FixedSource(policy) for name, policy in opponents.items()}}
    policies = PolicySet(all_sources, torch.Generator(), explore=not deterministic)
    played = [share.first + number for number in range(n)]  # the number of the current match of each copy, over all copies

    def evaluated_agent(number: int) -> str:
        return agents[played[number] % len(agents)]

    def seat_agents(number: int) -> Seating:
        if opponent is None:
            return Seating(policy_mapping)
        others = {agent: f"opponent {agent}" if agent in opponent.policies else None for agent in agents}
        return Seating({**others, evaluated_agent(number): policy_mapping[evaluated_agent(number)]})

    matches = MatchRunner(
        copies, policy_mapping, policies, {}, seed, seat_agents=seat_agents, first_copy=share.first, independent=True
    )
    ended: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    outcomes: list[MatchOutcome] = []
    cut = 0
    with policies.acting():
        while any(quota) and not interrupted():
            matches.tick(np.array(quota) > 0)
            too_long = [number for number in range(n) if quota[number] and matches.steps_of(number) >= plan.max_steps]
            over = {number for number, _ in matches.finished}
            left = [(number, matches.stop_match(number)) for number in too_long if number not in over]
            cut += len(left)
            for number, match in [*matches.finished, *left]:
                quota[number] = max(0, quota[number] - (match.steps if plan.by_steps else 1)) if number in over else 0
                ended[number].append((match.total if opponent is None else match.returns[evaluated_agent(number)], match.steps))
                outcomes.append((evaluated_agent(number), match.returns))
                played[number] += stride
            matches.finished.clear()
    shares = {} if opponent is None else win_shares(opponent.name, outcomes)
    whole = [match for copy in ended for match in copy]
    returns, lengths = tuple(gained for gained, _ in whole), tuple(steps for _, steps in whole)
    return Score(returns, lengths, complete=not any(quota), cut=cut, results=shares)


@dataclass(frozen=True)
class Step:
    """One step of a match for recordings: observations, actions and rewards of all agents."""

    number: int
    observations: Mapping[str, Tree]
    actions: Mapping[str, Any]
    rewards: Mapping[str, float]
    """Reward since the agent's last appearance, for agents that act next or leave."""
    terminated: frozenset[str]
    truncated: frozenset[str]
    over: bool
    final: Mapping[str, Tree] = field(default_factory=dict)
    """Last observations of agents that leave, where available."""


def play_episode(
    match: MultiAgentMatch,
    agents: Mapping[str, TrainedAgent],
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int | None = None,
    before_step: Callable[[], None] = lambda: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> FinishedMatch | None:
    """Play one match with trained agents (agent → player); return None if it is not over within `max_steps`.

    `before_step` is called between steps, for rendering (`match.render()`); `on_step` with the result of each step.
    """
    states: dict[str, AgentState | None] = {}
    returns = dict.fromkeys(match.agents, 0.0)
    result, number = match.reset(seed), 0
    while not result.over:
        if max_steps is not None and number >= max_steps:
            return None
        before_step()
        observations = {turn.agent: turn.observation for turn in result.turns}
        actions: dict[str, Any] = {}
        for turn in result.turns:
            action, states[turn.agent] = agents[turn.agent].act(
                turn.observation, states.get(turn.agent), turn.mask, deterministic=deterministic
            )
            actions[turn.agent] = plain_action(action)
        result = match.step(actions)
        step = step_of(number, observations, actions, result)
        for agent, reward in step.rewards.items():
            returns[agent] += reward
        for left in result.departures:
            states.pop(left.agent, None)
        on_step(step)
        number += 1
    return FinishedMatch(returns, number)


def step_of(number: int, observations: Mapping[str, Tree], actions: Mapping[str, Any], result: MatchStep) -> Step:
    """Build the record of a step from observations, actions and result."""
    rewards: dict[str, float] = {}
    for agent, reward in [(t.agent, t.reward) for t in result.departures] + [(t.agent, t.reward) for t in result.turns]:
        rewards[agent] = rewards.get(agent, 0.0) + reward
    ended = frozenset(left.agent for left in result.departures if left.terminated)
    cut = frozenset(left.agent for left in result.departures if not left.terminated)
    final = {left.agent: left.observation for left in result.departures if left.observation is not None}
    return Step(number, observations, actions, rewards, ended, cut, result.over, final)
