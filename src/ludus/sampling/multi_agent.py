"""Sampling from environments with several agents: copies of one environment, one forward pass per model and tick for all of them.

Every agent is a seat whose turns are recorded as a separate sequence. Sampling and learning alternate: when a model has its batch, its
open segments are committed, so that a batch was sampled by the newest version.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ludus.buffers.collate import join_segments, pack_segments
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Segments, SegmentSpec
from ludus.envs.pettingzoo import CentralState, Departure, MatchStep, MultiAgentMatch, Turn, sample_action
from ludus.errors import EnvironmentFault, Interrupted
from ludus.models.inference.batched_policy import (
    ActingPolicy,
    ActingPolicySource,
    Decision,
    State,
    decide_rows,
    stack_rows,
    stack_states,
)
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota
from ludus.sampling.opponents import ZERO_SUM, MatchOutcome, Opponent, ZeroSum, is_zero_sum, win_shares
from ludus.sampling.sampler import NOT_INTERRUPTED, Interruption, SamplerTimes
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder
from ludus.sampling.trained_agent import State as AgentState
from ludus.sampling.trained_agent import TrainedAgent
from ludus.transport.base import SegmentWriter
from ludus.transport.local import LocalMemory

log = logging.getLogger(__name__)

_MAX_EMPTY_MATCHES = 100  # consecutive matches that end before any agent acts
_MAX_CONSECUTIVE_FAULTS = 5  # of one copy, without a successful step
_MAX_STEP_S = 0.25  # of MultiAgentSampler.step, so that other parts of the program can run
_OF_ACTIONS = 1  # the random stream of a copy for actions, apart from that of its resets

Observed = TypeVar("Observed", Turn, Departure)


# -- copies of the environment ------------------------------------------------------------------------------------------


class EnvCopies(list[MultiAgentMatch]):
    """Copies of one environment, closed together. `forgiving`: a failed copy is recreated.

    `beat` is called before every call of an environment, including its constructor. It may raise Interrupted.
    """

    def __init__(
        self, make: Callable[[], MultiAgentMatch], count: int, *, forgiving: bool = False, beat: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._make, self.forgiving, self.beat = make, forgiving, beat
        self.restarts = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(count):
                beat()
                self.append(make())
            undo.pop_all()

    def recreate(self, number: int) -> None:
        self.restarts += 1
        with contextlib.suppress(Exception):  # user code may raise anything, and it has failed already
            self[number].close()
        self[number] = self._make()

    def close(self) -> None:
        for match in self:
            match.close()


@dataclass(frozen=True)
class Seating:
    """Who plays the agents of one match. Fixed for the whole match."""

    models: Mapping[str, str | None]
    """Agent → model; None: random actions."""
    recorded: frozenset[str] | None = None
    """Agents whose steps are recorded; None: all whose model is."""
    opponent: str = ""
    """Name of the opponent, for results."""
    on_finished: Callable[[FinishedMatch], None] | None = None
    """Called with the match when it is over; not if it fails or is cut."""
    on_episode_end: Mapping[str, Callable[[State], None]] = field(default_factory=dict)
    """Agent → called with its last recurrent state when its episode is over in any way."""


SeatAgents = Callable[[int], Seating]
"""Number of a copy → who plays its next match. Called between two matches of that copy."""


@dataclass
class _Seat:
    """One agent of one copy."""

    agent: str
    own_recorder: SegmentRecorder | None
    learns: bool = True
    """False while an opponent plays this seat: its steps are not recorded, and its episodes not counted."""
    on_episode_end: Callable[[State], None] | None = None
    state: State | None = None
    acted: bool = False
    total_reward: float = 0.0
    length: int = 0

    @property
    def recorder(self) -> SegmentRecorder | None:
        return self.own_recorder if self.learns else None

    def reset(self) -> None:
        if self.on_episode_end is not None and self.state is not None:
            self.on_episode_end(self.state)
        self.state, self.acted, self.total_reward, self.length = None, False, 0.0, 0


@dataclass(frozen=True)
class FinishedMatch:
    """Returns and length of a match that has ended."""

    returns: Mapping[str, float]
    """By agent."""
    steps: int
    seating: Seating | None = None

    @property
    def total(self) -> float:
        return sum(self.returns.values())

    @property
    def score(self) -> float:
        """Score of the side that learned: 1 if its best return is above those of all others, 0 if below, 0.5 if equal."""
        assert self.seating is not None
        own_side = self.seating.recorded or frozenset()
        own = max(gained for agent, gained in self.returns.items() if agent in own_side)
        other = max(gained for agent, gained in self.returns.items() if agent not in own_side)
        return 0.5 + 0.5 * ((own > other) - (own < other))

    @property
    def gain(self) -> float:
        """Half of the difference between the total returns of the side that learned and the other one; its return in a zero-sum game."""
        assert self.seating is not None
        own_side = self.seating.recorded or frozenset()
        return 0.5 * sum(gained if agent in own_side else -gained for agent, gained in self.returns.items())

    def result(self, name: str) -> float | None:
        """`win/<opponent>` or `draw/<opponent>`: whether that is how the match ended; None for another opponent and for other names.

        ZERO_SUM: whether the returns add up to 0; None if all are 0.
        """
        if name == ZERO_SUM:
            return None if not any(self.returns.values()) else float(is_zero_sum(self.returns))
        kind, _, opponent = name.partition("/")
        if not opponent or self.seating is None or self.seating.opponent != opponent:
            return None
        return float(self.score == {"win": 1.0, "draw": 0.5}[kind])


class _MatchSlot:
    """One copy of the environment with its seats. All randomness of its resets comes from `seed` and the number of the copy, which is
    counted from `first_copy` on.
    """

    def __init__(
        self, copies: EnvCopies, number: int, seats: Mapping[str, _Seat], seed: int, *, central: bool, first_copy: int
    ) -> None:
        self._copies, self._number, self.seats = copies, number, seats
        self._seeds = np.random.default_rng([seed, number + first_copy])
        own_seeds = np.random.SeedSequence([seed, number + first_copy, _OF_ACTIONS])
        self.random = np.random.default_rng(own_seeds)
        """Of random actions."""
        self.generator = torch.Generator().manual_seed(int(own_seeds.generate_state(1, np.uint64)[0] >> 1))
        """Of the actions of policies, if every copy has its own."""
        self.central = CentralState(self.match.agents, self.match.state_space) if central else None
        self.returns = dict.fromkeys(seats, 0.0)
        self.seating = Seating({})
        self.steps = 0
        self._faults = 0
        self.current = MatchStep(over=True)

    @property
    def match(self) -> MultiAgentMatch:
        return self._copies[self._number]

    def begin(self, seating: Seating) -> None:
        """Start the next match, up to the first turn. Raises EnvironmentFault."""
        self.seating = seating
        for agent, seat in self.seats.items():
            seat.reset()  # before another player has the seat
            seat.learns = seating.recorded is None or agent in seating.recorded
            seat.on_episode_end = seating.on_episode_end.get(agent)
        for _ in range(_MAX_EMPTY_MATCHES):
            self._reset()
            if not self.current.over:
                return
        raise EnvironmentFault(f"{self.match.name} ended before any agent acted, {_MAX_EMPTY_MATCHES} times in a row.")

    def _reset(self) -> None:
        for seat in self.seats.values():
            seat.reset()
        self.returns, self.steps = dict.fromkeys(self.seats, 0.0), 0
        if self.central is not None:
            self.central.reset()
        while True:
            self._copies.beat()
            try:
                self.current = self.match.reset(int(self._seeds.integers(1 << 31)))
                break
            except EnvironmentFault as fault:
                self.recreate(fault)
        self._add_central_state()

    def advance(self, actions: Mapping[str, Any]) -> None:
        self._copies.beat()
        self.current = self.match.step(actions)
        self.steps, self._faults = self.steps + 1, 0
        self._add_central_state()

    def abandon(self) -> None:
        """End the match where it is; the outcome of the last actions is unknown and not recorded."""
        for seat in self.seats.values():
            if seat.recorder is not None:
                seat.recorder.discard_pending()
            seat.reset()
        self.current = MatchStep(over=True)

    def add_reward(self, agent: str, reward: float) -> _Seat:
        seat = self.seats[agent]
        self.returns[agent] += reward
        seat.total_reward += reward
        return seat

    def _add_central_state(self) -> None:
        """Add the input of a centralised critic to the agents' observations."""
        step, central = self.current, self.central
        if central is None:
            return
        central.update(step)
        if step.turns or any(left.observation is not None for left in step.departures):
            shared = central.shared_state(self.match)
            turns = [_with_central_state(turn, central, shared) for turn in step.turns]
            departures = [
                left if left.observation is None else _with_central_state(left, central, shared) for left in step.departures
            ]
            self.current = MatchStep(turns, departures, step.over)
        central.remove_departed(step)

    def recreate(self, fault: EnvironmentFault) -> None:
        """Recreate the environment. Raises the fault if restarts are disabled or have failed repeatedly."""
        while True:
            if self._faults >= _MAX_CONSECUTIVE_FAULTS or not self._copies.forgiving:
                raise fault
            self._faults += 1
            log.warning("%s It is recreated.", fault)
            try:
                self._copies.recreate(self._number)
            except EnvironmentFault as another:
                fault = another
            else:
                return


def _with_central_state(observed: Observed, central: CentralState, shared: Tree) -> Observed:
    return replace(observed, observation=central.combine(observed.agent, observed.observation, shared))


# -- decisions ----------------------------------------------------------------------------------------------------------


class PolicySet:
    """The models of a run, which decide for any number of agents at once."""

    def __init__(
        self, sources: Mapping[str, ActingPolicySource[ActingPolicy]], generator: torch.Generator, explore: bool
    ) -> None:
        self._sources, self._generator, self._explore = dict(sources), generator, explore

    def add_fixed(self, model: str, policy: ActingPolicy) -> None:
        """Add a policy whose weights do not change."""
        self._sources[model] = FixedSource(policy)

    def remove(self, model: str) -> None:
        del self._sources[model]

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for source in self._sources.values():
                policy = source.newest()[0]
                if isinstance(policy, Policy):  # an exported policy has no gradients
                    contexts.enter_context(policy.acting())
            yield

    def initial_state(self, model: str) -> State:
        policy = self._sources[model].newest()[0]
        return tuple(spec.zeros() for spec in policy.state_spec()) if policy.recurrent else ()

    def draw_noise(self, model: str, generator: torch.Generator) -> Array | None:
        """One row of noise for `decide`; None if not exploring."""
        return self._sources[model].newest()[0].draw_noise(1, generator) if self._explore else None

    def decide(
        self, model: str, requests: Sequence[tuple[Tree, State | None, Bools | None]], noise: Array | None = None
    ) -> list[Decision]:
        """Decide for all rows. `noise`: one row each; by default drawn here if exploring."""
        policy, version = self._sources[model].newest()
        observations, states, masks = zip(*requests, strict=True)
        if noise is None and self._explore:
            noise = policy.draw_noise(len(requests), self._generator)
        decisions = decide_rows(policy, version, observations, states, masks, noise)
        if not all(math.isfinite(decision.value) and math.isfinite(decision.log_prob) for decision in decisions):
            raise EnvironmentFault(
                f"The model {model!r} returned a value that is not finite.",
                "Check the observations for extremely large numbers.",
            )
        return decisions

    def values(self, model: str, requests: Sequence[tuple[Tree, State | None]]) -> list[float]:
        policy = self._sources[model].newest()[0]
        observations, states = zip(*requests, strict=True)
        values: list[float] = policy.act(stack_rows(observations), stack_states(policy, states)).value.tolist()
        return values


def plain_action(action: Tree) -> Any:
    """Convert an action to what an environment takes: a Python int for a scalar integer."""
    if isinstance(action, np.integer):
        return action.item()
    arrays = map_tree(np.asarray, action)
    return map_tree(lambda array: array.item() if array.ndim == 0 and array.dtype.kind in "iu" else array, arrays)


# -- batches ------------------------------------------------------------------------------------------------------------


class MatchBatches:
    """Batches for the trainer: everything that a model has recorded since its last batch, once the sampler marks it complete.

    A batch also carries the matches that have ended since the previous batch of any model.
    """

    def __init__(self, memories: Mapping[str, LocalMemory]) -> None:
        self.memories = dict(memories)
        self._complete: deque[tuple[str, int | None]] = deque()
        self._finished: list[FinishedMatch] = []
        self._taken: set[int] = set()

    def ready(self) -> bool:
        return bool(self._complete)

    def complete(self, model: str, env_steps: int | None = None) -> None:
        """`env_steps`: environment steps since the previous batch of any model; None: steps are counted as decisions."""
        self._complete.append((model, env_steps))

    def add_finished(self, match: FinishedMatch) -> None:
        self._finished.append(match)

    def take(self, timeout_s: float) -> Segments | None:
        """Return the next complete batch or None. Never blocks: the sampler runs in the same process."""
        if not self._complete:
            return None
        model, env_steps = self._complete.popleft()
        with self._take_parts(model) as parts:
            batch = join_segments(parts)
        self._describe_matches(batch, env_steps)
        self._taken.add(id(batch))
        return batch

    @property
    def next_model(self) -> str:
        """The model of the next complete batch."""
        return self._complete[0][0]

    def take_into(self, block: Segments, *, separate: bool = False) -> None:
        """Pack the next complete batch into a block of its model. Raises ValueError if the block is too small.

        `separate`: every segment has a row of its own, as a replay buffer needs it.
        """
        model, env_steps = self._complete.popleft()
        with self._take_parts(model) as parts:
            pack_segments(parts, block, separate=separate)
        self._describe_matches(block, env_steps)

    def discard(self) -> None:
        """Drop the next complete batch. The matches that have ended are reported with the one after it."""
        model, _ = self._complete.popleft()
        with self._take_parts(model):
            pass

    @contextlib.contextmanager
    def _take_parts(self, model: str) -> Iterator[list[Segments]]:
        """All segments that a model has recorded since its last batch, inside the block."""
        memory, parts = self.memories[model], []
        while (part := memory.take(0)) is not None:
            parts.append(part)
        yield parts
        for part in parts:
            memory.release(part)

    def _describe_matches(self, batch: Segments, env_steps: int | None) -> None:
        """Add the matches that have ended since the previous batch of any model."""
        batch.episode_return = np.array([match.total for match in self._finished], np.float32)
        batch.episode_length = np.array([match.steps for match in self._finished], np.int64)
        batch.env_steps = env_steps
        for column, name in enumerate(batch.spec.results):
            scores = [value for match in self._finished if (value := match.result(name)) is not None]
            batch.results[0, column] = sum(scores), len(scores)
        self._finished.clear()

    def release(self, segments: Segments) -> None:
        if id(segments) not in self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken.remove(id(segments))

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()


# -- the sampler --------------------------------------------------------------------------------------------------------


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


class MatchBatch:
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
        self._slots: list[_MatchSlot] = []
        for number, match in enumerate(copies):
            seats = {}
            for index, agent in enumerate(match.agents):
                writer = writers.get(policy_mapping[agent])
                origin = (first_copy + number) * len(match.agents) + index
                seats[agent] = _Seat(agent, None if writer is None else SegmentRecorder(writer, origin, self.stats))
            self._slots.append(_MatchSlot(copies, number, seats, seed, central=central, first_copy=first_copy))

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
        active = [(number, slot) for number, slot in active if number in actions and self._advance(slot, actions[number])]
        stepped = clock()
        self.times.environment_s += started - began + stepped - decided
        self.times.policy_s += decided - started
        self.env_steps += len(active)
        self.agent_steps += sum(len(actions[number]) for number, _ in active)
        for model in self.steps_since_batch:
            self.steps_since_batch[model] += len(active)
        left: dict[str, list[tuple[_Seat, Departure]]] = {}
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

    def _advance(self, slot: _MatchSlot, actions: Mapping[str, Any]) -> bool:
        try:
            slot.advance(actions)
        except EnvironmentFault as fault:
            self._discard_match(slot, fault)
            return False
        return True

    def _add_turn_rewards(self, slot: _MatchSlot) -> None:
        """Add the rewards of the agents that act next; the outcome of their previous action is now known."""
        for turn in slot.current.turns:
            seat, model = slot.add_reward(turn.agent, turn.reward), self.policy_mapping[turn.agent]
            if seat.acted and seat.learns and model in self.complete_steps:
                self.complete_steps[model] += 1

    def _decide(self, active: Sequence[tuple[int, _MatchSlot]]) -> dict[int, dict[str, Any]]:
        """Actions by copy and agent. A match of which a player has no decision is given up and left out."""
        actions: dict[int, dict[str, Any]] = {}
        given_up: set[int] = set()
        requests: dict[str, list[tuple[int, _Seat, Turn]]] = {}
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
                if decision.lost:
                    given_up.add(number)
        for number in given_up:
            self._slots[number].abandon()
            del actions[number]
        return actions

    def _end_episodes(self, model: str, leavings: Sequence[tuple[_Seat, Departure]]) -> None:
        """End the episodes of departing agents; truncated ones bootstrap from the value of their last observation."""
        valued = [(seat, left) for seat, left in leavings if left.observation is not None and seat.recorder and seat.acted]
        estimates = self._policies.values(model, [(left.observation, seat.state) for seat, left in valued]) if valued else []
        values = {id(seat): value for (seat, _), value in zip(valued, estimates, strict=True)}
        for seat, left in leavings:
            if seat.acted and seat.learns:
                self._end_episode(model, seat, left, values.get(id(seat)))
            seat.reset()

    def _end_episode(self, model: str, seat: _Seat, left: Departure, value: float | None) -> None:
        self.recent[model].add(seat.total_reward, seat.length)
        if seat.recorder is None:
            return
        truncated = not left.terminated
        if left.terminated or value is not None:
            self.complete_steps[model] += 1
        seat.recorder.finish(
            left.reward, terminated=left.terminated, truncated=truncated, observation=left.observation, value=value
        )

    def _discard_match(self, slot: _MatchSlot, fault: EnvironmentFault) -> None:
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


@dataclass(frozen=True)
class MultiAgentSettings:
    """What a MultiAgentSampler puts into a batch."""

    batch_steps: int
    by_env_steps: bool = False
    """`batch_steps` are environment steps; otherwise decisions of the agents of a model."""
    central: bool = False
    """Record the state for a centralised critic."""
    explore: bool = True
    smoothing: int = 100
    """Number of episodes over which returns are averaged."""
    joint: bool = False
    """Complete the batches of all models at the same time, when they have `batch_steps` steps on average. For samplers of workers: a
    learner waits for all of them, so they must agree on which batch comes next.
    """


def recorded_bound(settings: MultiAgentSettings, agents: int, models: int, copies: int) -> int:
    """Maximum number of steps that are recorded for one model until its batch is complete."""
    steps_counted_once = agents if settings.by_env_steps else models if settings.joint else 1
    return settings.batch_steps * steps_counted_once + 2 * copies * agents


def match_batches(specs: Sequence[SegmentSpec], settings: MultiAgentSettings, copies: EnvCopies) -> MatchBatches:
    """Batches of the models that are trained, with memory for all that may be recorded, even in segments of one step."""
    agents = len(copies[0].agents)
    blocks = recorded_bound(settings, agents, len(specs), len(copies)) + 2 * len(copies) * agents + 16
    return MatchBatches({spec.model: LocalMemory(spec, 1, blocks) for spec in specs})


class MultiAgentSampler:
    """Fills one batch of one model per `step()`. Reproducible: all randomness comes from `seed`."""

    def __init__(
        self,
        copies: EnvCopies,
        policy_mapping: Mapping[str, str],
        sources: Mapping[str, PolicySource],
        batches: MatchBatches,
        settings: MultiAgentSettings,
        seed: int,
        *,
        interruption: Interruption | None = None,
        make_seating: Callable[[MatchBatch, PolicySet], SeatAgents] | None = None,
        first_copy: int = 0,
    ) -> None:
        """`policy_mapping`: agent → model. An interruption discards what was sampled since the last batch. `first_copy`: see MatchBatch."""
        self._batches, self._settings = batches, settings
        self._generator = torch.Generator().manual_seed(seed)
        self._policies = PolicySet(sources, self._generator, settings.explore)
        self._copies = copies
        self.zero_sum = ZeroSum()
        self._interruption = interruption or NOT_INTERRUPTED
        if interruption is not None:
            copies.beat = interruption.beat
        self._reported_steps = 0  # environment steps that were reported with a batch
        self._batched_steps = 0  # environment steps when the last batch was complete
        self.matches = MatchBatch(
            copies,
            policy_mapping,
            self._policies,
            batches.memories,
            seed,
            central=settings.central,
            smoothing=settings.smoothing,
            first_copy=first_copy,
        )
        if make_seating is not None:
            self.matches.seat_agents = make_seating(self.matches, self._policies)

    def step(self) -> bool:
        """Play until a model has its batch, or for a short time; return False while there are batches to learn from."""
        if self._batches.ready():
            return False
        matches, until = self.matches, time.monotonic() + _MAX_STEP_S
        with self._policies.acting():
            while not self._batches.ready() and time.monotonic() < until:
                try:
                    with self._interruption.interruptible():
                        matches.tick()
                except Interrupted:
                    matches.reset()
                    break
                for _, match in matches.finished:
                    self._batches.add_finished(match)
                    self.zero_sum.add(match.returns)
                matches.finished.clear()
                for model in self._complete_models():
                    matches.cut(model)
                    self._batched_steps = matches.env_steps
                    self._batches.complete(model, self._take_unreported_steps() if self._settings.by_env_steps else None)
        return True

    def _complete_models(self) -> list[str]:
        """Models whose batch is complete."""
        steps, settings = self.matches.complete_steps, self._settings
        if not settings.joint:
            return [model for model in steps if self._batch_is_complete(model)]
        counted = max(self.matches.steps_since_batch.values()) if settings.by_env_steps else sum(steps.values()) / len(steps)
        return list(steps) if counted >= settings.batch_steps else []

    def _take_unreported_steps(self) -> int:
        since = self.matches.env_steps - self._reported_steps
        self._reported_steps += since
        return since

    def _batch_is_complete(self, model: str) -> bool:
        matches = self.matches
        if not self._settings.by_env_steps:
            return matches.complete_steps[model] >= self._settings.batch_steps
        if matches.steps_since_batch[model] < self._settings.batch_steps:
            return False
        if not matches.complete_steps[model]:  # its agents were absent: count again from here
            matches.steps_since_batch[model] = 0
            return False
        return True

    def metrics(self) -> dict[str, float]:
        matches = self.matches
        report: dict[str, float] = {"matches": float(matches.matches), "late_rewards": float(matches.late_rewards)}
        report |= {"env_steps": float(matches.env_steps), "agent_steps": float(matches.agent_steps)}
        if self.zero_sum:
            report["zero_sum"] = 1.0
        for model, recent in matches.recent.items():
            if recent.returns:
                report[f"{model}/episode_return_mean"] = float(np.mean(recent.returns))
                report[f"{model}/episode_length_mean"] = float(np.mean(recent.lengths))
        report |= {"discarded_steps": float(matches.stats.discarded), "unrecorded_steps": float(matches.stats.unrecorded)}
        return report | ({"env_restarts": float(self._copies.restarts)} if self._copies.forgiving else {})

    def close(self) -> None:
        """Close the seating, which may have results to report. The environments belong to the caller."""
        close = getattr(self.matches.seat_agents, "close", None)
        if close is not None:
            close()

    def unlearned_steps(self) -> int:
        return self.matches.env_steps - self._batched_steps

    def state(self) -> dict[str, Array]:
        """State for a resumed run; matches start anew."""
        matches = self.matches
        counted = np.array([matches.matches, matches.env_steps, matches.agent_steps], np.int64)
        return {"generator": self._generator.get_state().numpy(), "counted": counted}

    def load_state(self, state: dict[str, Array]) -> None:
        self._generator.set_state(torch.from_numpy(np.array(state["generator"])))
        if "counted" in state:
            matches = self.matches
            matches.matches, matches.env_steps, matches.agent_steps = (int(count) for count in state["counted"])
            self._reported_steps = self._batched_steps = matches.env_steps


# -- playing without recording ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopyShare:
    """Which copies of an evaluation are played here: those from number `first` on, of `count` in all processes; None: all of them."""

    first: int = 0
    count: int | None = None


ALL_COPIES = CopyShare()


def play_matches(
    copies: EnvCopies,
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
    agents, n = list(copies[0].agents), len(copies)
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

    matches = MatchBatch(
        copies, policy_mapping, policies, {}, seed, seat_agents=seat_agents, first_copy=share.first, independent=True
    )
    ended: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    outcomes: list[MatchOutcome] = []
    cut = 0
    with policies.acting():
        while any(quota) and not interrupted():
            matches.tick(lambda number: quota[number] > 0)
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
