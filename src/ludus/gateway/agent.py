"""Agents: an agent chooses actions for one seat of a session and records them for training. Actors are built of agents."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Generator
from typing import Any, Protocol

from ludus.core.tree import Tree
from ludus.core.types import Bools
from ludus.errors import EnvironmentFault, Refused
from ludus.gateway.raw_codec import RawCodec
from ludus.models.inference.batched_policy import ActingPolicy, Decision, State
from ludus.protocol.step_message import MAX_MAGNITUDE, SeatParser, parse_reward, reward_before_action
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder
from ludus.transport.base import SegmentWriter


class Decider(Protocol):
    """A model that chooses actions: `ludus.models.inference.batched_policy.BatchedPolicy`, or a RemoteModel of a `ludus.Policy`."""

    @property
    def policy(self) -> ActingPolicy: ...

    def decide(
        self,
        observation: Tree,
        state: State | None = None,
        mask: Bools | None = None,
        temperature: float | None = None,
    ) -> asyncio.Future[Decision]: ...


class Seat(SeatParser):
    """Shared by all agents of one seat: the model, the memory for segments and the checks of observations."""

    def __init__(self, model: Decider, memory: SegmentWriter | None = None, *, first_origin: int = 0) -> None:
        policy = model.policy
        super().__init__(policy.observation_space, policy.action_space)
        self.model, self.memory = model, memory
        self.state_spec = policy.state_spec()
        self.raw = RawCodec(policy.observation_space, policy.action_space)
        self.origins = itertools.count(first_origin)
        self.stats = RecorderStats()


class SeatAgent:
    """Plays one seat of one session.

        agent = SeatAgent(seat)
        action = await agent.act(observation, mask, reward=0.5)     # reward of the previous action
        agent.reward(1.0)                                           # adds to it; may be called several times between actions
        agent.finish(terminated=True, reward=1.0)                   # or truncated=True, observation=last_observation

    Keeps the recurrent state. Writes segments with log-probabilities, values and versions if the seat has a memory.
    """

    def __init__(self, seat: Seat, temperature: float | None = None) -> None:
        """`temperature`: 0 takes the most probable action, 1 samples as in training; None uses the model's setting."""
        self._seat, self._temperature = seat, temperature
        self._state: State | None = None
        self._reward = 0.0
        self.total_reward = 0.0
        """Of all episodes so far."""
        self._acted = False
        self._closing: asyncio.Future[Decision] | None = None
        self._recorder = None if seat.memory is None else SegmentRecorder(seat.memory, next(seat.origins), seat.stats)

    @property
    def playing(self) -> bool:
        """Whether an action was chosen in an episode that has not ended."""
        return self._acted

    def move(self, seat: Seat, *, carry: bool) -> bool:
        """Continue with another model, between two calls. Returns whether the recurrent state was carried over.

        A state of other shapes cannot be carried over. The current recording ends: a recorded episode has one model.
        """
        if self._recorder is not None:
            self._recorder.discard_pending()
            self._recorder = None
        carried = carry and seat.state_spec == self._seat.state_spec
        self._seat = seat
        if not carried:
            self._state = None
        return carried

    async def act(self, observation: Any, mask: Any = None, reward: float = 0.0) -> Any:
        """Return the next action. Raises Refused (422) when the observation, mask or reward is invalid.

        `reward` belongs to the previous action. Unlike with `reward()`, it is added only if all arguments are valid, so that
        a game can correct its request and send it again.
        """
        checked, allowed = self._seat.observation(observation), self._seat.mask(mask)
        self.reward(reward)
        return await self.act_on(checked, allowed)

    async def act_on(self, checked: Tree, allowed: Bools | None) -> Any:
        """`act` for arguments already checked by `Seat`. Raises EnvironmentFault when the model returns non-finite values."""
        if self._closing is not None:
            await EpisodeEnd(self._closing)
        return self.take(checked, allowed, await self.ask(checked, allowed))

    @property
    def can_ask(self) -> bool:
        """Whether the previous episode is completely recorded, so that `ask` may be called."""
        return self._closing is None

    def ask(self, checked: Tree, allowed: Bools | None) -> asyncio.Future[Decision]:
        """Request a decision: the first half of `act_on`. The next call must be `take`."""
        return self._seat.model.decide(checked, self._state, allowed, self._temperature)

    def take(self, checked: Tree, allowed: Bools | None, decision: Decision) -> Any:
        """Raises EnvironmentFault; Refused (410) if there is no decision, so that the game gives the match up."""
        if decision.lost:
            raise Refused(410, "session_lost", "The policy of this seat has failed.", "End the match, and start another.")
        if not is_finite_decision(decision):
            raise EnvironmentFault(
                f"The model returned value {decision.value:g} and log-probability {decision.log_prob:g} for this observation.",
                "Check the observation for extremely large numbers.",
            )
        if self._recorder is not None:
            before = self._state
            if before is None:
                before = tuple(spec.zeros() for spec in self._seat.state_spec)
            self._recorder.step(checked, allowed, decision, self._reward, before)
        self._state, self._reward, self._acted = decision.state, 0.0, True
        return decision.action

    def reward(self, reward: float) -> None:
        """Add to the reward of the last action. Raises Refused (422) if it is not a finite number."""
        reward = parse_reward(reward)
        if self._acted:
            self._reward += reward
            self.total_reward += reward
        elif reward:
            raise reward_before_action(reward)

    def finish(
        self, terminated: bool = False, truncated: bool = False, observation: Any = None, reward: float = 0.0
    ) -> EpisodeEnd:
        """End the episode; the next `act` begins another. Await the result to wait until it is recorded.

        `reward` belongs to the last action. Without a last observation, the last step of a truncated episode is not recorded,
        because it has no bootstrap value. Raises Refused (422) without any change.
        """
        checked = None if observation is None else self._seat.observation(observation)
        self.reward(reward)
        if not self._acted:
            return EpisodeEnd(None)
        recorder, earned = self._recorder, self._reward
        state, self._state = self._state, None
        self._reward, self._acted = 0.0, False
        if recorder is None:
            return EpisodeEnd(None)
        if terminated or checked is None:
            recorder.finish(earned, terminated=terminated, truncated=truncated)
            return EpisodeEnd(None)
        closing = self._closing = self._seat.model.decide(checked, state)

        def close(decided: asyncio.Future[Decision]) -> None:
            self._closing = None
            if decided.cancelled() or decided.exception() is not None or not is_finite_decision(decided.result()):
                recorder.discard_pending()
            else:
                recorder.finish(earned, terminated=False, truncated=True, observation=checked, value=decided.result().value)

        closing.add_done_callback(close)
        return EpisodeEnd(closing)

    def break_off(self) -> None:
        """Abandon the episode: its last step is discarded and counted."""
        if self._acted and self._recorder is not None:
            self._recorder.discard_pending()
        self._state, self._reward, self._acted = None, 0.0, False


def is_finite_decision(decision: Decision) -> bool:
    """Check a decision: large but finite observations can make a network overflow."""
    return abs(decision.value) <= MAX_MAGNITUDE and math.isfinite(decision.log_prob)


class EpisodeEnd:
    """Awaitable that completes when the ended episode is recorded. Awaiting it is optional."""

    def __init__(self, closing: asyncio.Future[Decision] | None) -> None:
        self._closing = closing

    def __await__(self) -> Generator[Any, None, None]:
        if self._closing is not None:
            yield from asyncio.wait([self._closing]).__await__()
