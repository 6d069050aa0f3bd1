"""An agent: chooses for one seat and records what came of it. Actors are built of agents; the built-in one too."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import numbers
import reprlib
from collections.abc import Generator
from typing import Any, Protocol

from ludus.core import spaces
from ludus.core.tree import Tree
from ludus.core.types import Bools
from ludus.errors import ConfigError, EnvironmentFault, Refused
from ludus.gateway.raw_codec import RawForm
from ludus.models.inference.batched_policy import ActingPolicy, Decision, State
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder
from ludus.transport.base import SegmentWriter

_LARGEST = 1e15
"""Of a reward or value: squares of what such numbers add up to still fit into the float32 in which losses are computed."""
_SHOWN = 300  # characters of a complaint that quotes the game


class Decider(Protocol):
    """A model that can choose actions: `ludus.models.inference.batched_policy.BatchedPolicy`, or a RemoteModel made of a `ludus.Policy`."""

    @property
    def policy(self) -> ActingPolicy: ...

    def decide(
        self,
        observation: Tree,
        state: State | None = None,
        mask: Bools | None = None,
        temperature: float | None = None,
    ) -> asyncio.Future[Decision]: ...


class Seat:
    """What all agents of one seat share: the model, where segments go, and how observations are checked."""

    def __init__(self, model: Decider, memory: SegmentWriter | None = None, *, first_origin: int = 0) -> None:
        policy = model.policy
        self.model, self.memory = model, memory
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.fit = spaces.Fit(policy.observation_space)
        self.choices = spaces.choices(policy.action_space)
        self.state_spec = policy.state_spec()
        self.raw = RawForm(policy.observation_space, policy.action_space)
        self.origins = itertools.count(first_origin)
        self.stats = RecorderStats()

    def observation(self, given: Any) -> Tree:
        """Raises Refused (422)."""
        try:
            return self.fit(given)
        except ValueError as error:
            what = str(error)[:_SHOWN]
            raise Refused(422, "observation", f"The observation does not fit: {what}.", "GET /spec shows the space.") from None

    def mask(self, given: Any) -> Bools | None:
        if given is None:
            return None
        try:
            flat = spaces.flat_mask(given, self.action_space)
        except (ConfigError, ValueError, TypeError) as error:
            what = str(error)[:_SHOWN]
            raise Refused(422, "action_mask", f"The action mask does not fit: {what}", "One 0 or 1 per option.") from None
        for part in self.choices:
            if not flat[part].any():
                raise Refused(
                    422,
                    "action_mask",
                    f"The action mask forbids every action (options {part.start} to {part.stop - 1}).",
                    "Leave at least one option of every choice allowed.",
                )
        return flat

    def number(self, given: Any) -> float:
        """A reward. Raises Refused (422)."""
        if not isinstance(given, bool) and isinstance(given, numbers.Real):
            with contextlib.suppress(OverflowError):  # a whole number of hundreds of digits
                reward = float(given)
                if abs(reward) <= _LARGEST:
                    return reward
        hint = f"It is a number up to {_LARGEST:g}, better around 1."
        raise Refused(422, "reward", f"The reward is {reprlib.repr(given)}.", hint)


class Agent:
    """One seat of one session.

        agent = Agent(seat)
        action = await agent.act(observation, mask, reward=0.5)     # of the action before; none before the first
        agent.reward(1.0)                                           # more of it, as often as you like between two actions
        agent.finish(terminated=True, reward=1.0)                   # or truncated=True, observation=last_observation

    Keeps the recurrent state, and writes segments with log-probabilities, values and versions when the seat has a memory.
    """

    def __init__(self, seat: Seat, temperature: float | None = None) -> None:
        """`temperature`: 0 takes the most probable action, 1 draws as in training; by default as the model was told."""
        self._seat, self._temperature = seat, temperature
        self._state: State | None = None
        self._reward = 0.0
        self._acted = False
        self._closing: asyncio.Future[Decision] | None = None
        self._recorder = None if seat.memory is None else SegmentRecorder(seat.memory, next(seat.origins), seat.stats)

    @property
    def playing(self) -> bool:
        """An action was chosen, and its episode is not over."""
        return self._acted

    def move(self, seat: Seat, *, carry: bool) -> bool:
        """Go on with another model, between two calls: with the same recurrent state, or from a fresh one. True: carried.

        A state of other shapes cannot be carried. What was being recorded ends here: an episode of a recording has one model.
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
        """The action, as the game takes it. Raises Refused (422) when the observation, mask or reward does not fit.

        `reward` is that of the action before. Given here, and not by `reward()` earlier, it counts only when all of it fits:
        a game may then correct its request and send it again as a whole.
        """
        seen, allowed = self._seat.observation(observation), self._seat.mask(mask)
        self.reward(reward)
        return await self.act_on(seen, allowed)

    async def act_on(self, seen: Tree, allowed: Bools | None) -> Any:
        """The same for what `Seat.observation` and `Seat.mask` have checked. Raises EnvironmentFault: the model is at a loss."""
        if self._closing is not None:
            await Finished(self._closing)
        return self.take(seen, allowed, await self.ask(seen, allowed))

    @property
    def settled(self) -> bool:
        """Nothing of the episode before is still being computed: `ask` may be called."""
        return self._closing is None

    def ask(self, seen: Tree, allowed: Bools | None) -> asyncio.Future[Decision]:
        """The first half of `act_on`; the second is `take`, and nothing else comes between them."""
        return self._seat.model.decide(seen, self._state, allowed, self._temperature)

    def take(self, seen: Tree, allowed: Bools | None, decision: Decision) -> Any:
        """Raises EnvironmentFault."""
        if not usable(decision):
            raise EnvironmentFault(
                f"The model answers this observation with value {decision.value:g}, log-probability {decision.log_prob:g}.",
                "Are all numbers of the observation of a usual size?",
            )
        if self._recorder is not None:
            self._recorder.step(seen, allowed, decision, self._reward, self._kept(self._state))
        self._state, self._reward, self._acted = decision.state, 0.0, True
        return decision.action

    def reward(self, reward: float) -> None:
        """Adds to what the last action has earned. Raises Refused (422) on what is not a finite number."""
        reward = self._seat.number(reward)
        if not self._acted:
            if reward:
                raise Refused(422, "reward", f"A reward of {reward} came before any action.", "Reward what an action did.")
            return
        self._reward += reward

    def finish(self, terminated: bool = False, truncated: bool = False, observation: Any = None, reward: float = 0.0) -> Finished:
        """The episode is over; the next `act` begins another. Await the result to know that it is recorded.

        `reward` is that of the last action. Truncated without a last observation: the last step is left out of learning,
        because nothing is known after it. Raises Refused (422), and then nothing has changed.
        """
        seen = None if observation is None else self._seat.observation(observation)
        self.reward(reward)
        if not self._acted:
            return Finished(None)
        recorder, earned = self._recorder, self._reward
        state, self._state = self._state, None
        self._reward, self._acted = 0.0, False
        if recorder is None:
            return Finished(None)
        if terminated or seen is None:
            recorder.finish(earned, terminated=terminated, truncated=truncated)
            return Finished(None)
        closing = self._closing = self._seat.model.decide(seen, state)

        def close(decided: asyncio.Future[Decision]) -> None:
            self._closing = None
            if decided.cancelled() or decided.exception() is not None or not usable(decided.result()):
                recorder.discard_pending()
            else:
                recorder.finish(earned, terminated=False, truncated=True, observation=seen, value=decided.result().value)

        closing.add_done_callback(close)
        return Finished(closing)

    def break_off(self) -> None:
        """Nothing more will come of this episode: the last step is left out and counted."""
        if self._acted and self._recorder is not None:
            self._recorder.discard_pending()
        self._state, self._reward, self._acted = None, 0.0, False

    def _kept(self, state: State | None) -> State:
        if state is None and self._seat.state_spec:
            return tuple(spec.zeros() for spec in self._seat.state_spec)
        return state or ()


def usable(decision: Decision) -> bool:
    """Finite observations may still be too large for a network; what is not a number must not reach a learner or a game."""
    return abs(decision.value) <= _LARGEST and math.isfinite(decision.log_prob)


class Finished:
    """Await it, or leave it."""

    def __init__(self, closing: asyncio.Future[Decision] | None) -> None:
        self._closing = closing

    def __await__(self) -> Generator[Any, None, None]:
        if self._closing is not None:
            yield from asyncio.wait([self._closing]).__await__()
