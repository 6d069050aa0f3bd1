"""Sampling from environments with several agents: copies of one environment, one forward pass per model and tick for all of them.

Every agent is a seat whose turns are recorded as a sequence of their own, whoever else moved in between. Sampling and learning
take turns: when a model has its batch, its open segments are cut, so that what is learned from was done by the newest version.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ludus.buffers.collate import join_segments
from ludus.core.tree import Array, Tree, map_tree, stack
from ludus.core.types import Bools, Segments
from ludus.envs.pettingzoo import Leaving, Match, Moved, Turn, Whole, at_random
from ludus.errors import EnvironmentFault, Interrupted
from ludus.models.inference.batched_policy import Acts, ActsSource, Decision, State
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.sampling.episode_runner import EPISODE_STEPS, Score
from ludus.sampling.opponents import Opponent, Outcome, ZeroSum, win_shares
from ludus.sampling.segment_recorder import Recorder, RecorderStats
from ludus.sampling.trained_agent import State as AgentState
from ludus.sampling.trained_agent import TrainedAgent
from ludus.transport.base import Room
from ludus.transport.local import LocalMemory

log = logging.getLogger(__name__)

_AT_ONCE = 100  # matches in a row that are over before anybody acts, before we believe that it is always so
_FAULTS_IN_A_ROW = 5  # of one copy, without a step between them
_TURN_S = 0.25  # how long the others of the program wait at most for their turn

Told = TypeVar("Told", Turn, Leaving)


# -- copies of the environment ------------------------------------------------------------------------------------------


class Copies(list[Match]):
    """Copies of one environment, which are closed together. `forgiving`: one that fails is made anew.

    `beat` is called before every call of an environment, from its constructor on. It may raise Interrupted.
    """

    def __init__(
        self, make: Callable[[], Match], count: int, *, forgiving: bool = False, beat: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._make, self.forgiving, self.beat = make, forgiving, beat
        self.restarts = 0
        try:
            for _ in range(count):
                beat()
                self.append(make())
        except BaseException:
            self.close()
            raise

    def renew(self, number: int) -> None:
        self.restarts += 1
        with contextlib.suppress(Exception):  # it has failed already; that it cannot even close is no news
            self[number].close()
        self[number] = self._make()

    def close(self) -> None:
        for match in self:
            match.close()


@dataclass
class _Seat:
    """One agent of one copy."""

    agent: str
    recorder: Recorder | None
    state: State | None = None
    acted: bool = False
    gained: float = 0.0
    length: int = 0

    def forget(self) -> None:
        self.state, self.acted, self.gained, self.length = None, False, 0.0, 0


@dataclass(frozen=True)
class Finished:
    """A match that has ended."""

    returns: Mapping[str, float]
    """By agent, all that it was given."""
    steps: int

    @property
    def total(self) -> float:
        return sum(self.returns.values())


class _Table:
    """A match with its seats. All randomness of its resets comes from `seed`."""

    def __init__(self, copies: Copies, number: int, seats: Mapping[str, _Seat], seed: int, central: bool) -> None:
        self._copies, self._number, self.seats = copies, number, seats
        self._seeds = np.random.default_rng([seed, number])
        self.whole = Whole(self.match.agents, self.match.state_space) if central else None
        self.returns = dict.fromkeys(seats, 0.0)
        self.steps = 0
        self._faults = 0
        self.moved = Moved(over=True)

    @property
    def match(self) -> Match:
        return self._copies[self._number]

    def begin(self) -> None:
        """The next match, up to where somebody is to act. Raises EnvironmentFault."""
        for _ in range(_AT_ONCE):
            self._reset()
            if not self.moved.over:
                return
        raise EnvironmentFault(f"{self.match.name} is over before anybody has acted, {_AT_ONCE} times in a row.")

    def _reset(self) -> None:
        for seat in self.seats.values():
            seat.forget()
        self.returns, self.steps = dict.fromkeys(self.seats, 0.0), 0
        if self.whole is not None:
            self.whole.reset()
        while True:
            self._copies.beat()
            try:
                self.moved = self.match.reset(int(self._seeds.integers(1 << 31)))
                break
            except EnvironmentFault as fault:
                self.renew(fault)
        self._show_whole()

    def advance(self, actions: Mapping[str, Any]) -> None:
        self._copies.beat()
        self.moved = self.match.step(actions)
        self.steps, self._faults = self.steps + 1, 0
        self._show_whole()

    def pay(self, agent: str, reward: float) -> _Seat:
        seat = self.seats[agent]
        self.returns[agent] += reward
        seat.gained += reward
        return seat

    def _show_whole(self) -> None:
        """Put what a centralised value sees beside what the agents see."""
        moved, whole = self.moved, self.whole
        if whole is None:
            return
        whole.follow(moved)
        if moved.turns or any(left.observation is not None for left in moved.leaving):
            seen = whole.seen(self.match)
            turns = [_with_whole(turn, whole, seen) for turn in moved.turns]
            leaving = [left if left.observation is None else _with_whole(left, whole, seen) for left in moved.leaving]
            self.moved = Moved(turns, leaving, moved.over)
        whole.forget(moved)

    def renew(self, fault: EnvironmentFault) -> None:
        """Make the environment anew. Raises the fault when that is not wanted, or has not helped."""
        while True:
            if self._faults >= _FAULTS_IN_A_ROW or not self._copies.forgiving:
                raise fault
            self._faults += 1
            log.warning("%s It is recreated.", fault)
            try:
                self._copies.renew(self._number)
            except EnvironmentFault as another:
                fault = another
            else:
                return


def _with_whole(told: Told, whole: Whole, seen: Tree) -> Told:
    return replace(told, observation=whole.beside(told.agent, told.observation, seen))


# -- decisions ----------------------------------------------------------------------------------------------------------


class Minds:
    """The models of a run, deciding for any number of agents at once."""

    def __init__(self, sources: Mapping[str, ActsSource[Acts]], generator: torch.Generator, explore: bool) -> None:
        self._sources, self._generator, self._explore = sources, generator, explore

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stacked:
            for source in self._sources.values():
                policy = source.newest()[0]
                if isinstance(policy, Policy):  # one that was exported has no gradients
                    stacked.enter_context(policy.acting())
            yield

    def fresh_state(self, model: str) -> State:
        policy = self._sources[model].newest()[0]
        return tuple(spec.zeros() for spec in policy.state_spec()) if policy.recurrent else ()

    def decide(
        self, model: str, asked: Sequence[tuple[Tree, State | None, Bools | None]], noise: Array | None = None
    ) -> list[Decision]:
        """`noise`: a row for each; else, if it explores, it is drawn here."""
        policy, version = self._sources[model].newest()
        observation, states, masks = zip(*asked, strict=True)
        mask = _masks(masks)
        if noise is None and self._explore:
            noise = policy.draw_noise(len(asked), self._generator)
        acted = policy.act(stack(list(observation)), self._states(model, policy, states), mask, noise)
        if not (np.isfinite(acted.value).all() and np.isfinite(acted.log_prob).all()):
            raise EnvironmentFault(
                f"The model {model!r} answers an observation with what is not a number.",
                "Are all numbers of the observations of a usual size?",
            )
        n = len(asked)
        after = list(zip(*([row.copy() for row in part] for part in acted.state), strict=True)) if acted.state else [()] * n
        rows = (_rows(acted.action, n), _rows(acted.chosen, n), acted.log_prob.tolist(), acted.value.tolist(), after)
        return [Decision(*parts, version) for parts in zip(*rows, strict=True)]

    def values(self, model: str, asked: Sequence[tuple[Tree, State | None]]) -> list[float]:
        policy = self._sources[model].newest()[0]
        observation, states = zip(*asked, strict=True)
        found: list[float] = policy.act(stack(list(observation)), self._states(model, policy, states)).value.tolist()
        return found

    def _states(self, model: str, policy: Acts, states: Sequence[State | None]) -> State:
        if not policy.recurrent:
            return ()
        fresh = self.fresh_state(model)
        columns = zip(*(fresh if state is None else state for state in states), strict=True)
        return tuple(np.array(column) for column in columns)


def _masks(masks: Sequence[Bools | None]) -> Bools | None:
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    whole = np.ones((len(masks), len(given[0])), np.bool_)
    for row, mask in enumerate(masks):
        if mask is not None:
            whole[row] = mask
    return whole


def _rows(batch: Tree, n: int) -> list[Any]:
    return [map_tree(lambda x, row=row: x[row], batch) for row in range(n)]


def plain_action(action: Tree) -> Any:
    """An action as an environment takes it: a plain number where it is one."""
    return map_tree(_plain, action)


def _plain(x: Any) -> Any:
    array = np.asarray(x)
    return array.item() if array.ndim == 0 and array.dtype.kind in "iu" else array


# -- batches ------------------------------------------------------------------------------------------------------------


class MatchBatches:
    """What a trainer takes: all that a model has recorded since its last batch, once the sampler says that it is enough.

    With it come the matches that have ended since the batch before, of whichever model that was.
    """

    def __init__(self, memories: Mapping[str, LocalMemory]) -> None:
        self.memories = dict(memories)
        self._complete: deque[tuple[str, int | None]] = deque()
        self._finished: list[Finished] = []
        self._taken: set[int] = set()

    def ready(self) -> bool:
        return bool(self._complete)

    def complete(self, model: str, env_steps: int | None = None) -> None:
        """`env_steps`: of the environments, since the batch before, of whichever model that was; None: steps are decisions."""
        self._complete.append((model, env_steps))

    def finished(self, match: Finished) -> None:
        self._finished.append(match)

    def take(self, timeout_s: float) -> Segments | None:
        """Never waits: the sampler of the same process is the one who fills it."""
        if not self._complete:
            return None
        model, env_steps = self._complete.popleft()
        memory = self.memories[model]
        parts = []
        while (part := memory.take(0)) is not None:
            parts.append(part)
        batch = join_segments(parts)
        for part in parts:
            memory.release(part)
        batch.episode_return = np.array([match.total for match in self._finished], np.float32)
        batch.episode_length = np.array([match.steps for match in self._finished], np.int64)
        batch.env_steps = env_steps
        self._finished.clear()
        self._taken.add(id(batch))
        return batch

    def release(self, segments: Segments) -> None:
        if id(segments) not in self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken.remove(id(segments))

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()


# -- the sampler --------------------------------------------------------------------------------------------------------


@dataclass
class _Recent:
    """Of the last episodes of a model's agents, each for itself."""

    window: int
    returns: deque[float] = field(init=False)
    lengths: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.returns, self.lengths = deque(maxlen=self.window), deque(maxlen=self.window)


class Tables:
    """Copies of an environment that are played together: who is to act, who has left, what was recorded."""

    def __init__(
        self,
        copies: Copies,
        cast: Mapping[str, str],
        minds: Minds,
        rooms: Mapping[str, Room],
        seed: int,
        *,
        central: bool = False,
        smoothing: int = 100,
    ) -> None:
        """`cast`: agent → model. Models without a room are not recorded."""
        self.cast, self._minds = dict(cast), minds
        self.stats = RecorderStats()
        self.finished: list[tuple[int, Finished]] = []
        """Matches that have ended, with the number of their table; whoever looks empties it."""
        self.known = dict.fromkeys(rooms, 0)
        """By model: recorded steps since its last batch of which one knows what came of them."""
        self.passed = dict.fromkeys(rooms, 0)
        """By model: steps of the environments since its last batch, whoever acted in them."""
        self.recent = {model: _Recent(smoothing) for model in dict.fromkeys(cast.values())}
        self.random: list[frozenset[str]] = [frozenset()] * len(copies)
        """Agents of each table that do not play for their model in its present match, but at random or for their rival."""
        self.rivals: Mapping[str, str] = {}
        """Agent → the model that plays it instead of chance."""
        self._chance = np.random.default_rng(seed)
        self.matches = 0
        self.env_steps = 0
        self.agent_steps = 0
        self._tables: list[_Table] = []
        for number, match in enumerate(copies):
            seats = {}
            for index, agent in enumerate(match.agents):
                room = rooms.get(cast[agent])
                origin = number * len(match.agents) + index
                seats[agent] = _Seat(agent, None if room is None else Recorder(room, origin, self.stats))
            self._tables.append(_Table(copies, number, seats, seed, central))

    @property
    def late_rewards(self) -> int:
        return sum(table.match.late_rewards for table in self._tables)

    def tick(self, playing: Callable[[int], bool] = lambda number: True) -> None:
        """One step of every copy that plays; one whose match is over begins the next. Inside `acting`."""
        here = [(number, table) for number, table in enumerate(self._tables) if playing(number)]
        for _, table in here:
            if table.moved.over:
                table.begin()
                self._go_on(table)
        actions = self._decided(here)
        here = [(number, table) for number, table in here if self._advanced(table, actions[number])]
        self.env_steps += len(here)
        self.agent_steps += sum(len(actions[number]) for number, _ in here)
        for model in self.passed:
            self.passed[model] += len(here)
        left: dict[str, list[tuple[_Seat, Leaving]]] = {}
        for _, table in here:
            for leaving in table.moved.leaving:
                seat = table.pay(leaving.agent, leaving.reward)
                left.setdefault(self.cast[leaving.agent], []).append((seat, leaving))
        for model, leavings in left.items():
            self._part(model, leavings)
        for number, table in here:
            self._go_on(table)
            if table.moved.over:
                self.matches += 1
                self.finished.append((number, Finished(dict(table.returns), table.steps)))

    def _advanced(self, table: _Table, actions: Mapping[str, Any]) -> bool:
        try:
            table.advance(actions)
        except EnvironmentFault as fault:
            self._lose(table, fault)
            return False
        return True

    def _go_on(self, table: _Table) -> None:
        """Those who are to act next know what came of their last action, if there was one."""
        for turn in table.moved.turns:
            seat, model = table.pay(turn.agent, turn.reward), self.cast[turn.agent]
            if seat.acted and model in self.known:
                self.known[model] += 1

    def _decided(self, here: Sequence[tuple[int, _Table]]) -> dict[int, dict[str, Any]]:
        actions: dict[int, dict[str, Any]] = {}
        asked: dict[str, list[tuple[int, _Seat, Turn]]] = {}
        for number, table in here:
            actions[number] = {}
            for turn in table.moved.turns:
                replaced = turn.agent in self.random[number]
                seat, model = table.seats[turn.agent], self.rivals.get(turn.agent) if replaced else self.cast[turn.agent]
                if model is None:
                    actions[number][turn.agent] = plain_action(
                        at_random(table.match.agents[turn.agent].action, turn.mask, self._chance)
                    )
                else:
                    asked.setdefault(model, []).append((number, seat, turn))
        for model, rows in asked.items():
            decisions = self._minds.decide(model, [(turn.observation, seat.state, turn.mask) for _, seat, turn in rows])
            fresh = self._minds.fresh_state(model)
            for (number, seat, turn), decision in zip(rows, decisions, strict=True):
                if seat.recorder is not None:
                    state = fresh if seat.state is None else seat.state
                    seat.recorder.step(turn.observation, turn.mask, decision, turn.reward, state)
                seat.state, seat.acted, seat.length = decision.state, True, seat.length + 1
                actions[number][seat.agent] = plain_action(decision.action)
        return actions

    def _part(self, model: str, leavings: Sequence[tuple[_Seat, Leaving]]) -> None:
        """Episodes end; those that were cut off go on in the value of their last observation."""
        valued = [(seat, left) for seat, left in leavings if left.observation is not None and seat.recorder and seat.acted]
        found = self._minds.values(model, [(left.observation, seat.state) for seat, left in valued]) if valued else []
        values = {id(seat): value for (seat, _), value in zip(valued, found, strict=True)}
        for seat, left in leavings:
            if seat.acted:
                self._end(model, seat, left, values.get(id(seat)))
            seat.forget()

    def _end(self, model: str, seat: _Seat, left: Leaving, value: float | None) -> None:
        recent = self.recent[model]
        recent.returns.append(seat.gained)
        recent.lengths.append(seat.length)
        if seat.recorder is None:
            return
        truncated = not left.terminated
        if left.terminated or value is not None:
            self.known[model] += 1
        seat.recorder.finish(
            left.reward, terminated=left.terminated, truncated=truncated, observation=left.observation, value=value
        )

    def _lose(self, table: _Table, fault: EnvironmentFault) -> None:
        """The environment failed: what came of the last actions is not known, and the match does not count."""
        table.renew(fault)
        for seat in table.seats.values():
            if seat.recorder is not None:
                seat.recorder.break_off()
            seat.forget()
        table.moved = Moved(over=True)

    def cut(self, model: str) -> None:
        """The model has its batch: hand in all that its agents have recorded. Inside `acting`, with the version that acted."""
        waiting: list[tuple[Recorder, State | None, Turn]] = []
        for table in self._tables:
            turns = {turn.agent: turn for turn in table.moved.turns}
            for agent, seat in table.seats.items():
                if self.cast[agent] != model or seat.recorder is None or not seat.recorder.open:
                    continue
                if agent in turns:
                    waiting.append((seat.recorder, seat.state, turns[agent]))
                    turns[agent] = replace(turns[agent], reward=0.0)
                else:
                    seat.recorder.hold_back()
            table.moved = replace(table.moved, turns=list(turns.values()))
        if waiting:
            values = self._minds.values(model, [(turn.observation, state) for _, state, turn in waiting])
            for (recorder, _, turn), value in zip(waiting, values, strict=True):
                recorder.cut(turn.reward, turn.observation, turn.mask, value)
        self.known[model] = self.passed[model] = 0

    def forget(self) -> None:
        """A tick was interrupted: what was recorded since the last batch is discarded, and every match begins anew."""
        for table in self._tables:
            for seat in table.seats.values():
                if seat.recorder is not None:
                    seat.recorder.break_off()
                seat.forget()
            table.moved = Moved(over=True)

    def steps_of(self, number: int) -> int:
        """How far the present match of a table has come."""
        return self._tables[number].steps

    def leave(self, number: int) -> Finished:
        """Break off the match of a table, which counts as far as it has come."""
        table = self._tables[number]
        for seat in table.seats.values():
            seat.forget()
        table.moved = Moved(over=True)
        return Finished(dict(table.returns), table.steps)


class MultiSampler:
    """Fills one batch of one model per `step()`. Reproducible: all randomness comes from `seed`."""

    def __init__(
        self,
        copies: Copies,
        cast: Mapping[str, str],
        sources: Mapping[str, PolicySource],
        batches: MatchBatches,
        batch_steps: int,
        seed: int,
        *,
        central: bool = False,
        explore: bool = True,
        smoothing: int = 100,
        by_env_steps: bool = False,
        beat: Callable[[], None] | None = None,
        interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`by_env_steps`: `batch_steps` are steps of the environments; else decisions of the agents of a model.

        `beat` is called before every call of an environment. It may raise Interrupted: then what was sampled since the last
        batch is discarded. Inside `interruptible` it may be raised at any point.
        """
        self._interruptible = interruptible
        self._batches, self._batch_steps, self._by_env_steps = batches, batch_steps, by_env_steps
        self._generator = torch.Generator().manual_seed(seed)
        self._minds = Minds(sources, self._generator, explore)
        self._copies = copies
        self.zero_sum = ZeroSum()
        if beat is not None:
            copies.beat = beat
        self._counted = 0  # steps of the environments that have been told with a batch
        self._batched = 0  # steps of the environments when the last batch was complete
        self._tables = Tables(copies, cast, self._minds, batches.memories, seed, central=central, smoothing=smoothing)

    def step(self) -> bool:
        """Play until a model has its batch, or a moment has passed; False while there are batches to learn from."""
        if self._batches.ready():
            return False
        tables, until = self._tables, time.monotonic() + _TURN_S
        with self._minds.acting():
            while not self._batches.ready() and time.monotonic() < until:
                try:
                    with self._interruptible():
                        tables.tick()
                except Interrupted:
                    tables.forget()
                    break
                for _, match in tables.finished:
                    self._batches.finished(match)
                    self.zero_sum.add(match.returns)
                tables.finished.clear()
                for model in tables.known:
                    if self._has_its_batch(model):
                        tables.cut(model)
                        self._batched = tables.env_steps
                        self._batches.complete(model, self._since_last() if self._by_env_steps else None)
        return True

    def _since_last(self) -> int:
        since = self._tables.env_steps - self._counted
        self._counted += since
        return since

    def _has_its_batch(self, model: str) -> bool:
        tables = self._tables
        if not self._by_env_steps:
            return tables.known[model] >= self._batch_steps
        if tables.passed[model] < self._batch_steps:
            return False
        if not tables.known[model]:  # its agents were away: it has its share of the next
            tables.passed[model] = 0
            return False
        return True

    def metrics(self) -> dict[str, float]:
        tables = self._tables
        report: dict[str, float] = {"matches": float(tables.matches), "late_rewards": float(tables.late_rewards)}
        report |= {"env_steps": float(tables.env_steps), "agent_steps": float(tables.agent_steps)}
        if self.zero_sum:
            report["zero_sum"] = 1.0
        for model, recent in tables.recent.items():
            if recent.returns:
                report[f"{model}/episode_return_mean"] = float(np.mean(recent.returns))
                report[f"{model}/episode_length_mean"] = float(np.mean(recent.lengths))
        report |= {"discarded_steps": float(tables.stats.discarded), "unrecorded_steps": float(tables.stats.unrecorded)}
        return report | ({"env_restarts": float(self._copies.restarts)} if self._copies.forgiving else {})

    def unlearned_steps(self) -> int:
        return self._tables.env_steps - self._batched

    def state(self) -> dict[str, Array]:
        """What a resumed run needs of it; matches begin anew."""
        tables = self._tables
        counted = np.array([tables.matches, tables.env_steps, tables.agent_steps], np.int64)
        return {"generator": self._generator.get_state().numpy(), "counted": counted}

    def load_state(self, state: dict[str, Array]) -> None:
        self._generator.set_state(torch.from_numpy(np.array(state["generator"])))
        if "counted" in state:
            tables = self._tables
            tables.matches, tables.env_steps, tables.agent_steps = (int(count) for count in state["counted"])
            self._counted = self._batched = tables.env_steps


# -- playing without recording ------------------------------------------------------------------------------------------


def play_matches(
    copies: Copies,
    cast: Mapping[str, str],
    sources: Mapping[str, PolicySource],
    episodes: int,
    seed: int,
    *,
    deterministic: bool = True,
    opponent: Opponent | None = None,
    max_steps: int = EPISODE_STEPS,
    interrupted: Callable[[], bool] = lambda: False,
) -> Score:
    """Whole matches, each copy playing its equal share; scored by the sum of what all agents earn.

    `opponent`: one agent plays for its model and the opponent plays all others, the agents taking turns; scored by what that one
    earns, with the shares of matches that it won, drew and lost.
    A match that is not over after `max_steps` is cut there and counts as it is, and its copy plays no further one.
    """
    agents, n = list(copies[0].agents), len(copies)
    quota = [episodes // n + (number < episodes % n) for number in range(n)]
    rivals = {} if opponent is None else {f"opponent {agent}": policy for agent, policy in opponent.policies.items()}
    everybody = {**sources, **{name: FixedSource(policy) for name, policy in rivals.items()}}
    minds = Minds(everybody, torch.Generator().manual_seed(seed), explore=not deterministic)
    tables = Tables(copies, cast, minds, {}, seed)
    tables.rivals = {name.removeprefix("opponent "): name for name in rivals}
    played = list(range(n))  # the number of the match, over all tables
    chosen = [agents[number % len(agents)] for number in played]
    returns: list[float] = []
    lengths: list[int] = []
    outcomes: list[Outcome] = []
    cut = 0
    with minds.acting():
        while any(quota) and not interrupted():
            if opponent is not None:
                tables.random = [frozenset(agents) - {agent} for agent in chosen]
            tables.tick(lambda number: quota[number] > 0)
            too_long = [number for number in range(n) if quota[number] and tables.steps_of(number) >= max_steps]
            over = {number for number, _ in tables.finished}
            left = [(number, tables.leave(number)) for number in too_long if number not in over]
            cut += len(left)
            for number, match in [*tables.finished, *left]:
                quota[number] = quota[number] - 1 if number in over else 0
                returns.append(match.total if opponent is None else match.returns[chosen[number]])
                outcomes.append((chosen[number], match.returns))
                lengths.append(match.steps)
                played[number] += n
                chosen[number] = agents[played[number] % len(agents)]
            tables.finished.clear()
    shares = {} if opponent is None else win_shares(opponent.name, outcomes)
    return Score(tuple(returns), tuple(lengths), complete=not any(quota), cut=cut, results=shares)


@dataclass(frozen=True)
class Step:
    """One step of a match, as it is watched and written down: what everybody saw, did and was given."""

    number: int
    observations: Mapping[str, Tree]
    actions: Mapping[str, Any]
    rewards: Mapping[str, float]
    """Since the last time that this agent was heard of: of those who act next, or leave."""
    terminated: frozenset[str]
    truncated: frozenset[str]
    over: bool
    final: Mapping[str, Tree] = field(default_factory=dict)
    """What those who leave saw last, where it was shown."""


def play_episode(
    match: Match,
    agents: Mapping[str, TrainedAgent],
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int | None = None,
    before_step: Callable[[], None] = lambda: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Finished | None:
    """One match of trained agents (agent → who plays it); None when it was not over within `max_steps`.

    `before_step` is called whenever all is still, for a picture of it (`match.render()`); `on_step` with what a step brought.
    """
    states: dict[str, AgentState | None] = {}
    returns = dict.fromkeys(match.agents, 0.0)
    moved, number = match.reset(seed), 0
    while not moved.over:
        if max_steps is not None and number >= max_steps:
            return None
        before_step()
        seen = {turn.agent: turn.observation for turn in moved.turns}
        actions: dict[str, Any] = {}
        for turn in moved.turns:
            action, states[turn.agent] = agents[turn.agent].act(
                turn.observation, states.get(turn.agent), turn.mask, deterministic=deterministic
            )
            actions[turn.agent] = plain_action(action)
        moved = match.step(actions)
        step = step_of(number, seen, actions, moved)
        for agent, reward in step.rewards.items():
            returns[agent] += reward
        for left in moved.leaving:
            states.pop(left.agent, None)
        on_step(step)
        number += 1
    return Finished(returns, number)


def step_of(number: int, seen: Mapping[str, Tree], actions: Mapping[str, Any], moved: Moved) -> Step:
    """What became of `actions`, which answered `seen`."""
    rewards: dict[str, float] = {}
    for agent, reward in [(t.agent, t.reward) for t in moved.leaving] + [(t.agent, t.reward) for t in moved.turns]:
        rewards[agent] = rewards.get(agent, 0.0) + reward
    ended = frozenset(left.agent for left in moved.leaving if left.terminated)
    cut = frozenset(left.agent for left in moved.leaving if not left.terminated)
    final = {left.agent: left.observation for left in moved.leaving if left.observation is not None}
    return Step(number, seen, actions, rewards, ended, cut, moved.over, final)
