"""Copies of one environment that are stepped together: one forward pass per model and tick for all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ludus.core.tree import Array
from ludus.envs.pettingzoo import Departure, Turn, sample_action
from ludus.errors import EnvironmentFault
from ludus.models.inference.batched_policy import State
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.match_slot import MatchSlot, Seat
from ludus.sampling.multi_agent.policy_set import PolicySet, plain_action
from ludus.sampling.multi_agent.seating import FinishedMatch, SeatAgents, Seating
from ludus.sampling.sampler import SamplerTimes
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder
from ludus.transport.base import SegmentWriter


@dataclass
class _EpisodeWindow:
    """Returns and lengths of the last episodes of a model's agents, each agent on its own."""

    window: int
    returns: deque[float] = field(init=False)
    lengths: deque[int] = field(init=False)
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of all episodes: their number, and the sums of their returns and lengths."""

    def __post_init__(self) -> None:
        self.returns, self.lengths = deque(maxlen=self.window), deque(maxlen=self.window)

    def add(self, total: float, length: int) -> None:
        self.returns.append(total)
        self.lengths.append(length)
        for i, value in enumerate((1.0, total, length)):
            self.totals[i] += value


class MatchRunner:
    """Several copies of an environment that are stepped together, with their seats and recorders."""

    def __init__(
        self,
        copies: EnvCopies,
        policy_mapping: Mapping[str, str],
        policies: PolicySet,
        writers: Mapping[str, SegmentWriter],
        seed: int,
        *,
        central: bool = False,
        smoothing: int = 100,
        seat_agents: SeatAgents | None = None,
        first_copy: int = 0,
        independent: bool = False,
    ) -> None:
        """`policy_mapping`: agent → model. Models without a writer are not recorded. `seat_agents`: by default every agent is played by
        its model. `first_copy`: number of the first copy among those of all processes. `independent`: every copy draws the actions of
        policies from its own random stream, so that its matches do not depend on those of other copies.
        """
        self.policy_mapping, self._policies, self._independent = dict(policy_mapping), policies, independent
        self.stats = RecorderStats()
        self.finished: list[tuple[int, FinishedMatch]] = []
        """Matches that have ended, with the number of their copy; the reader clears it."""
        self.complete_steps = dict.fromkeys(writers, 0)
        """By model: recorded steps since its last batch whose outcome is known."""
        self.steps_since_batch = dict.fromkeys(writers, 0)
        """By model: environment steps since its last batch."""
        self.recent = {model: _EpisodeWindow(smoothing) for model in dict.fromkeys(policy_mapping.values())}
        everybody = Seating(self.policy_mapping)
        self.seat_agents: SeatAgents = seat_agents or (lambda copy: everybody)
        self.matches = 0
        self.env_steps = 0
        self.agent_steps = 0
        self.times = SamplerTimes()
        self._slots: list[MatchSlot] = []
        for number, match in enumerate(copies):
            seats = {}
            for index, agent in enumerate(match.agents):
                writer = writers.get(policy_mapping[agent])
                origin = (first_copy + number) * len(match.agents) + index
                seats[agent] = Seat(agent, None if writer is None else SegmentRecorder(writer, origin, self.stats))
            self._slots.append(MatchSlot(copies, number, seats, seed, central=central, first_copy=first_copy))

    @property
    def late_rewards(self) -> int:
        return sum(slot.match.late_rewards for slot in self._slots)

    def tick(self, playing: Callable[[int], bool] = lambda number: True) -> None:
        """Step every copy for which `playing` is true; a copy whose match is over starts the next one. Inside `acting`."""
        clock = time.perf_counter
        active = [(number, slot) for number, slot in enumerate(self._slots) if playing(number)]
        began = clock()
        for number, slot in active:
            if slot.current.over:
                slot.begin(self.seat_agents(number))
                self._add_turn_rewards(slot)
        started = clock()
        actions = self._decide(active)
        decided = clock()
        active = [(number, slot) for number, slot in active if self._advance(slot, actions[number])]
        stepped = clock()
        self.times.environment_s += started - began + stepped - decided
        self.times.policy_s += decided - started
        self.env_steps += len(active)
        self.agent_steps += sum(len(actions[number]) for number, _ in active)
        for model in self.steps_since_batch:
            self.steps_since_batch[model] += len(active)
        left: dict[str, list[tuple[Seat, Departure]]] = {}
        for _, slot in active:
            for departure in slot.current.departures:
                seat = slot.add_reward(departure.agent, departure.reward)
                left.setdefault(self.policy_mapping[departure.agent], []).append((seat, departure))
        for model, leavings in left.items():
            self._end_episodes(model, leavings)
        for number, slot in active:
            self._add_turn_rewards(slot)
            if slot.current.over:
                self.matches += 1
                match = FinishedMatch(dict(slot.returns), slot.steps, slot.seating)
                self.finished.append((number, match))
                if slot.seating.on_finished is not None:
                    slot.seating.on_finished(match)
        self.times.policy_s += clock() - stepped

    def _advance(self, slot: MatchSlot, actions: Mapping[str, Any]) -> bool:
        try:
            slot.advance(actions)
        except EnvironmentFault as fault:
            self._discard_match(slot, fault)
            return False
        return True

    def _add_turn_rewards(self, slot: MatchSlot) -> None:
        """Add the rewards of the agents that act next; the outcome of their previous action is now known."""
        for turn in slot.current.turns:
            seat, model = slot.add_reward(turn.agent, turn.reward), self.policy_mapping[turn.agent]
            if seat.acted and seat.learns and model in self.complete_steps:
                self.complete_steps[model] += 1

    def _decide(self, active: Sequence[tuple[int, MatchSlot]]) -> dict[int, dict[str, Any]]:
        actions: dict[int, dict[str, Any]] = {}
        requests: dict[str, list[tuple[int, Seat, Turn]]] = {}
        noise: dict[str, list[Array]] = {}
        for number, slot in active:
            actions[number] = {}
            for turn in slot.current.turns:
                model = slot.seating.models[turn.agent]
                if model is None:
                    action = sample_action(slot.match.agents[turn.agent].action, turn.mask, slot.random)
                    actions[number][turn.agent] = plain_action(action)
                else:
                    requests.setdefault(model, []).append((number, slot.seats[turn.agent], turn))
                    row = self._policies.draw_noise(model, slot.generator) if self._independent else None
                    if row is not None:
                        noise.setdefault(model, []).append(row)
        for model, rows in requests.items():
            drawn = noise.get(model)
            decisions = self._policies.decide(
                model,
                [(turn.observation, seat.state, turn.mask) for _, seat, turn in rows],
                None if drawn is None else np.concatenate(drawn),
            )
            fresh = self._policies.initial_state(model)
            for (number, seat, turn), decision in zip(rows, decisions, strict=True):
                if seat.recorder is not None:
                    state = fresh if seat.state is None else seat.state
                    seat.recorder.step(turn.observation, turn.mask, decision, turn.reward, state)
                seat.state, seat.acted, seat.length = decision.state, True, seat.length + 1
                actions[number][seat.agent] = plain_action(decision.action)
        return actions

    def _end_episodes(self, model: str, leavings: Sequence[tuple[Seat, Departure]]) -> None:
        """End the episodes of departing agents; truncated ones bootstrap from the value of their last observation."""
        valued = [(seat, left) for seat, left in leavings if left.observation is not None and seat.recorder and seat.acted]
        estimates = self._policies.values(model, [(left.observation, seat.state) for seat, left in valued]) if valued else []
        values = {id(seat): value for (seat, _), value in zip(valued, estimates, strict=True)}
        for seat, left in leavings:
            if seat.acted and seat.learns:
                self._end_episode(model, seat, left, values.get(id(seat)))
            seat.reset()

    def _end_episode(self, model: str, seat: Seat, left: Departure, value: float | None) -> None:
        self.recent[model].add(seat.total_reward, seat.length)
        if seat.recorder is None:
            return
        truncated = not left.terminated
        if left.terminated or value is not None:
            self.complete_steps[model] += 1
        seat.recorder.finish(
            left.reward, terminated=left.terminated, truncated=truncated, observation=left.observation, value=value
        )

    def _discard_match(self, slot: MatchSlot, fault: EnvironmentFault) -> None:
        """The environment failed: the outcome of the last actions is unknown, and the match does not count."""
        slot.recreate(fault)
        slot.abandon()

    def cut(self, model: str) -> None:
        """Commit everything that the agents of a model have recorded for its batch. Inside `acting`, with the version that acted."""
        waiting: list[tuple[SegmentRecorder, State | None, Turn]] = []
        for slot in self._slots:
            turns = {turn.agent: turn for turn in slot.current.turns}
            for agent, seat in slot.seats.items():
                if self.policy_mapping[agent] != model or seat.recorder is None or not seat.recorder.open:
                    continue
                if agent in turns:
                    waiting.append((seat.recorder, seat.state, turns[agent]))
                    turns[agent] = replace(turns[agent], reward=0.0)
                else:
                    seat.recorder.cut_before_pending()
            slot.current = replace(slot.current, turns=list(turns.values()))
        if waiting:
            values = self._policies.values(model, [(turn.observation, state) for _, state, turn in waiting])
            for (recorder, _, turn), value in zip(waiting, values, strict=True):
                recorder.cut(turn.reward, turn.observation, turn.mask, value)
        self.complete_steps[model] = self.steps_since_batch[model] = 0

    def reset(self) -> None:
        """Discard what was recorded since the last batch after an interrupted tick; every match starts anew."""
        for slot in self._slots:
            slot.abandon()

    def steps_of(self, number: int) -> int:
        """Return the number of steps of the current match of a copy."""
        return self._slots[number].steps

    def models_in_use(self) -> frozenset[str]:
        """Models that play in matches which are not over."""
        models: set[str | None] = set()
        for slot in self._slots:
            if not slot.current.over:
                models.update(slot.seating.models.values())
        return frozenset(model for model in models if model is not None)

    def stop_match(self, number: int) -> FinishedMatch:
        """Stop the match of a copy and return its result so far."""
        slot = self._slots[number]
        slot.abandon()
        return FinishedMatch(dict(slot.returns), slot.steps, slot.seating)
