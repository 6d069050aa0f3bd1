"""Matches that are stepped together: one forward pass per model and tick for all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ludus.core.tree import Array, map_tree
from ludus.core.types import Bools, Ints, SegmentSpec
from ludus.envs.matches.rows import Returns, RowStep
from ludus.envs.pettingzoo import sample_action
from ludus.models.inference.batched_policy import State
from ludus.models.policy import BatchDecision
from ludus.sampling.multi_agent.copies import MatchCopies, MatchStreams
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.row_recorder import RowRecorder
from ludus.sampling.multi_agent.seating import FinishedMatch, SeatAgents, Seating
from ludus.sampling.sampler import SamplerTimes
from ludus.sampling.segment_recorder import RecorderStats
from ludus.transport.base import SegmentWriter


class RecordedMemory(SegmentWriter, Protocol):
    """A memory of segments with one row, with their spec."""

    @property
    def spec(self) -> SegmentSpec: ...


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
    """Several matches of an environment that are stepped together, with the state and the recorders of their rows.

    A row is one agent of one match: row = match × number of agents + agent.
    """

    def __init__(
        self,
        copies: MatchCopies,
        policy_mapping: Mapping[str, str],
        policies: PolicySet,
        writers: Mapping[str, RecordedMemory],
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

        self._agents = list(copies.agents)
        self._action_spaces = [copies.agents[agent].action for agent in self._agents]
        self._streams = [MatchStreams(seed, first_copy + number) for number in range(len(copies))]
        self._source = copies.open_source(self._streams, central=central)
        self._steps: Ints = np.zeros(len(copies), np.int64)  # of the current matches
        self._seatings = [Seating({})] * len(copies)
        self._given_up: set[int] = set()  # matches to abandon in this tick
        count = len(copies) * len(self._agents)
        self._rows = _Rows(count)
        self._models: list[str | None] = [None]  # _Rows.model counts them
        self._model_numbers: dict[str | None, int] = {None: 0}
        self._states: dict[str, State] = {}  # model → recurrent states [rows, …]; only those of its own rows are used
        self._owners: Ints = np.array([self._model_number(policy_mapping[agent]) for agent in self._agents] * len(copies))
        self._recorders: dict[str, tuple[RowRecorder, Ints]] = {}  # with row → index in the recorder
        for model, writer in writers.items():
            own = np.flatnonzero(self._owners == self._model_number(model))
            index: Ints = np.full(count, -1)
            index[own] = np.arange(len(own))
            origins = own + first_copy * len(self._agents)
            self._recorders[model] = RowRecorder(writer, writer.spec, origins, self.stats), index

    @property
    def late_rewards(self) -> int:
        return self._source.late_rewards

    # -- one tick -------------------------------------------------------------------------------------------------------

    def tick(self, playing: Bools | None = None) -> None:
        """Step all copies or those that are `playing` [N]; a copy whose match is over starts the next one. Inside `acting`."""
        clock, source = time.perf_counter, self._source
        began = clock()
        over = np.flatnonzero(source.over if playing is None else source.over & playing)
        if len(over):
            self._begin(over.tolist())
        started = clock()
        rows = source.acting_rows(playing)
        self._decide(rows)
        if self._given_up:  # a player has no decision for these matches
            self._abandon(sorted(self._given_up))
            self._given_up.clear()
        decided = clock()
        active = ~source.over if playing is None else playing & ~source.over
        rows = rows[active[rows // len(self._agents)]]
        step = source.step(playing) if active.any() else RowStep()
        stepped = clock()
        self.times.environment_s += started - began + stepped - decided
        self.times.policy_s += decided - started
        if step.lost:
            self._abandon(step.lost)
            active[step.lost] = False
            rows = rows[active[rows // len(self._agents)]]
        count = int(np.count_nonzero(active))
        self._steps[active] += 1
        self.env_steps += count
        self.agent_steps += len(rows)
        for model in self.steps_since_batch:
            self.steps_since_batch[model] += count
        if len(step.departures):
            self._end_episodes(step)
        self._add_turn_rewards(step)
        for number in np.flatnonzero(source.over & active).tolist():
            self.matches += 1
            match = self._finished_match(number)
            self.finished.append((number, match))
            if match.seating is not None and match.seating.on_finished is not None:
                match.seating.on_finished(match)
        self.times.policy_s += clock() - stepped

    def _begin(self, numbers: Sequence[int]) -> None:
        width = len(self._agents)
        for number in numbers:
            rows = slice(number * width, (number + 1) * width)
            self._reset_rows(np.arange(rows.start, rows.stop))  # before other players have the rows
            seating = self._seatings[number] = self.seat_agents(number)
            self._rows.model[rows] = [self._model_number(seating.models[agent]) for agent in self._agents]
            self._rows.learns[rows] = [seating.recorded is None or agent in seating.recorded for agent in self._agents]
            self._rows.gained[rows] = 0.0
            self._steps[number] = 0
            self._source.over[number] = False
        step = self._source.begin(numbers)
        if step.lost:
            self._abandon(step.lost)
        self._add_turn_rewards(step)

    def _model_number(self, model: str | None) -> int:
        number = self._model_numbers.setdefault(model, len(self._models))
        if number == len(self._models):
            self._models.append(model)
        return number

    def _decide(self, rows: Ints) -> None:
        """Choose and record the actions of rows, with one forward pass per model."""
        numbers = self._rows.model[rows]
        self._rows.waits[rows] = False
        if len(rows) and (numbers == numbers[0]).all():
            self._decide_model(self._models[numbers[0]], rows)
            return
        for number in dict.fromkeys(numbers.tolist()):  # in the order of their first rows, which noise is drawn in
            self._decide_model(self._models[number], rows[numbers == number])

    def _decide_model(self, model: str | None, rows: Ints) -> None:
        source, width = self._source, len(self._agents)
        if model is None:
            for row in rows.tolist():
                one = np.array([row])
                mask, random = source.mask(one), self._streams[row // width].random
                action = sample_action(self._action_spaces[row % width], None if mask is None else mask[0], random)
                source.set_actions(one, map_tree(lambda part: np.asarray(part)[None], action))
            return
        noise = self._draw_noise(model, rows) if self._independent else None
        observation, mask, state = source.observation(rows), source.mask(rows), self._state(model, rows)
        acted, version = self._policies.act(model, observation, state, mask, len(rows), noise)
        if model in self._recorders:
            recorder, index = self._recorders[model]
            own = np.flatnonzero(self._rows.learns[rows] & (index[rows] >= 0))
            if len(own) == len(rows):
                recorder.step(index[rows], observation, mask, acted, version, self._rows.reward[rows], state)
            elif len(own):
                own_mask, own_state = None if mask is None else mask[own], tuple(part[own] for part in state)
                own_observation = map_tree(lambda part: part[own], observation)
                reward = self._rows.reward[rows[own]]
                recorder.step(index[rows[own]], own_observation, own_mask, _select(acted, own), version, reward, own_state)
        for stored, after in zip(self._states.get(model, ()), acted.state, strict=True):
            stored[rows] = after
        self._rows.acted[rows] = True
        self._rows.length[rows] += 1
        source.set_actions(rows, acted.action)
        if acted.lost is not None:
            self._given_up.update((rows[acted.lost] // width).tolist())

    def _draw_noise(self, model: str, rows: Ints) -> Array | None:
        width = len(self._agents)
        drawn = [self._policies.draw_noise(model, self._streams[row // width].generator) for row in rows.tolist()]
        return None if drawn[0] is None else np.concatenate(drawn)  # type: ignore[arg-type]

    def _state(self, model: str, rows: Ints) -> State:
        """The recurrent states of rows that a model plays."""
        if model not in self._states:
            specs = self._policies.state_spec(model)
            self._states = {known: parts for known, parts in self._states.items() if known in self._policies.models()}
            self._states[model] = tuple(spec.zeros(len(self._rows.model)) for spec in specs)
        return tuple(part[rows] for part in self._states[model])

    def _add_turn_rewards(self, step: RowStep) -> None:
        """Add the rewards of the rows that act next; the outcome of their previous actions is now known."""
        rows, turns = self._rows, step.turns
        rows.gained[turns] += step.turn_reward
        rows.total[turns] += step.turn_reward
        rows.reward[turns], rows.waits[turns] = step.turn_reward, True
        self._count_known(turns, 1)

    def _count_known(self, rows: Ints, sign: int) -> None:
        """Count the last actions of rows that act next: their outcome is known."""
        known = rows[self._rows.acted[rows] & self._rows.learns[rows]]
        for model, (_, index) in self._recorders.items():
            self.complete_steps[model] += sign * int(np.count_nonzero(index[known] >= 0))

    # -- ends of episodes -----------------------------------------------------------------------------------------------

    def _end_episodes(self, step: RowStep) -> None:
        """End the episodes of departing rows; truncated ones bootstrap from the value of their last observation."""
        rows, departures = self._rows, step.departures
        rows.gained[departures] += step.departure_reward
        rows.total[departures] += step.departure_reward
        owners = self._owners[departures]
        for number in dict.fromkeys(owners.tolist()):
            model = self._models[number]
            assert model is not None
            ended = np.flatnonzero((owners == number) & rows.acted[departures] & rows.learns[departures])
            for row in departures[ended].tolist():
                self.recent[model].add(float(rows.total[row]), int(rows.length[row]))
            if model in self._recorders and len(ended):
                self._finish_segments(model, step, ended)
        self._reset_rows(departures)

    def _finish_segments(self, model: str, step: RowStep, ended: Ints) -> None:
        """`ended`: which departures of the step are episodes of the model that are recorded."""
        recorder, index = self._recorders[model]
        rows, terminated = step.departures[ended], step.terminated[ended]
        valued = np.flatnonzero(step.observed[ended])
        observation = value = None
        if len(valued):
            observation = self._source.final_observation(rows[valued])
            value = self._policies.values(model, observation, self._state(model, rows[valued]))
        self.complete_steps[model] += int(np.count_nonzero(terminated | step.observed[ended]))
        recorder.finish(index[rows], step.departure_reward[ended], terminated, valued, observation, value)

    def _reset_rows(self, rows: Ints) -> None:
        self._report_ends(rows)
        state = self._rows
        state.acted[rows], state.waits[rows], state.total[rows], state.length[rows] = False, False, 0.0, 0
        for parts in self._states.values():
            for part in parts:
                part[rows] = 0

    def _report_ends(self, rows: Ints) -> None:
        """Call `on_episode_end` for the rows whose episodes have begun."""
        width = len(self._agents)
        for row in rows[self._rows.acted[rows]].tolist():
            report = self._seatings[row // width].on_episode_end.get(self._agents[row % width])
            if report is not None:
                model = self._models[self._rows.model[row]]
                report(tuple(part[row] for part in self._states.get(model or "", ())))

    def _abandon(self, numbers: Sequence[int]) -> None:
        """End matches where they are; the outcome of their last actions is unknown and not recorded."""
        width = len(self._agents)
        rows = np.concatenate([np.arange(number * width, (number + 1) * width) for number in numbers])
        self._count_known(rows[self._rows.waits[rows]], -1)
        learning = rows[self._rows.learns[rows]]
        for recorder, index in self._recorders.values():
            recorder.discard_pending(index[learning[index[learning] >= 0]])
        self._reset_rows(rows)
        self._source.abandon(numbers)

    def cut(self, model: str) -> None:
        """Commit everything that the agents of a model have recorded for its batch. Inside `acting`, with the version that acted."""
        recorder, index = self._recorders[model]
        own = np.flatnonzero((index >= 0) & self._rows.learns)
        own = own[recorder.open[index[own]]]
        waits = self._rows.waits[own]
        recorder.cut_before_pending(index[own[~waits]])
        waiting = own[waits]
        if len(waiting):
            observation, mask = self._source.observation(waiting), self._source.mask(waiting)
            values = self._policies.values(model, observation, self._state(model, waiting))
            recorder.cut(index[waiting], self._rows.reward[waiting], observation, mask, values)
            self._rows.reward[waiting] = 0.0
        self.complete_steps[model] = self.steps_since_batch[model] = 0

    def reset(self) -> None:
        """Discard what was recorded since the last batch after an interrupted tick; every match starts anew."""
        self._abandon(range(len(self._seatings)))

    # -- matches --------------------------------------------------------------------------------------------------------

    def steps_of(self, number: int) -> int:
        """Return the number of steps of the current match of a copy."""
        return int(self._steps[number])

    def models_in_use(self) -> frozenset[str]:
        """Models that play in matches which are not over."""
        playing = self._rows.model[np.repeat(~self._source.over, len(self._agents))]
        models = [self._models[number] for number in np.unique(playing).tolist()]
        return frozenset(model for model in models if model is not None)

    def stop_match(self, number: int) -> FinishedMatch:
        """Stop the match of a copy and return its result so far."""
        self._abandon([number])
        return self._finished_match(number)

    def _finished_match(self, number: int) -> FinishedMatch:
        width = len(self._agents)
        gained = self._rows.gained[number * width : (number + 1) * width].tolist()
        return FinishedMatch(dict(zip(self._agents, gained, strict=True)), int(self._steps[number]), self._seatings[number])


class _Rows:
    """The state of all rows."""

    def __init__(self, count: int) -> None:
        self.model: Ints = np.zeros(count, np.int64)
        """Number of the model that plays; 0: random actions."""
        self.learns: Bools = np.ones(count, np.bool_)
        """False while an opponent plays: its steps are not recorded, and its episodes not counted."""
        self.acted: Bools = np.zeros(count, np.bool_)
        self.waits: Bools = np.zeros(count, np.bool_)
        """Rows that act in the next tick."""
        self.reward: Returns = np.zeros(count)
        """Of rows that act now: since their last action."""
        self.total: Returns = np.zeros(count)
        """Return of the present episode of the agent."""
        self.length: Ints = np.zeros(count, np.int64)
        self.gained: Returns = np.zeros(count)
        """Rewards in the whole match."""


def _select(decision: BatchDecision, rows: Ints) -> BatchDecision:
    return BatchDecision(
        map_tree(lambda part: part[rows], decision.action),
        map_tree(lambda part: part[rows], decision.chosen),
        decision.log_prob[rows],
        decision.value[rows],
        tuple(part[rows] for part in decision.state),
    )
