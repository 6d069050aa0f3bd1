"""`ludus.Agent`: chooses actions for one seat and pushes the resulting segments, for custom actors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ludus.core.tree import Tree, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.gateway.agent import Seat, SeatAgent
from ludus.remote.buffer import RemoteBuffer
from ludus.remote.context import current
from ludus.remote.model import RemoteModel
from ludus.sampling.segment_recorder import session_spec

STEPS = 64


class Agent(SeatAgent):
    """One seat of one session, played by a model that is a `ludus.Policy`.

        class Bot(ludus.Actor):
            def __init__(self, model: str, buffer: str) -> None:
                self.agent = ludus.Agent(model, buffer)

            async def tick(self, body: bytes) -> bytes:
                state = parse(body)
                return reply(await self.agent.act(state.features, mask=state.allowed, reward=state.reward))

            async def end(self, body: bytes) -> bytes:
                if self.ended_by == "game":
                    self.agent.finish(terminated=True, reward=parse(body).reward)
                else:
                    self.agent.break_off()                       # silent, timed out: the last step is left out
                return b""

    `model` and `buffer` are handles or names; without a buffer nothing is recorded, as for serving.
    Segments of `steps` steps are pushed as trees of arrays `[steps + 1, …]` (see `docs/games.md`).
    """

    def __init__(self, model: RemoteModel | str, buffer: RemoteBuffer | str | None = None, *, steps: int = STEPS) -> None:
        super().__init__(_seat(model, buffer, steps))


_making = threading.Lock()


def _seat(model: RemoteModel | str, buffer: RemoteBuffer | str | None, steps: int) -> Seat:
    """One per process, model, buffer and length: creating one costs more than many steps."""
    run = current("Agent")
    names = [each if isinstance(each, str) else getattr(each, "name", "") for each in (model, buffer)]
    key = ("seat", f"{names[0]} → {names[1]} × {steps}")
    with _making:
        found: Seat | None = run.shared.get(key)
        if found is None:
            remote_model = RemoteModel(model) if isinstance(model, str) else model
            remote_buffer = RemoteBuffer(buffer) if isinstance(buffer, str) else buffer
            memory = None
            if remote_buffer is not None:
                memory = BufferMemory(remote_buffer, session_spec(remote_model.policy, steps, remote_model.name))
            found = run.shared[key] = Seat(remote_model, memory)
        return found


class BufferMemory:
    """The writing half of a memory whose segments go to a RemoteBuffer, which bounds and drops them."""

    def __init__(self, buffer: RemoteBuffer, spec: SegmentSpec) -> None:
        self._buffer, self._spec = buffer, spec

    def reserve(self, timeout_s: float) -> Segments | None:
        return Segments.empty(self._spec, 1)  # always a new one: pushed segments may not have been sent yet

    def commit(self, segments: Segments) -> None:
        self._buffer.push(item_of(segments))

    def abandon(self, segments: Segments) -> None:
        pass


_WITH_ROWS = (
    *("observation", "action", "reward", "terminated", "truncated", "valid", "first"),
    *("log_prob", "value", "version", "action_mask"),
)


def item_of(segments: Segments) -> dict[str, Tree]:
    """A segment of one row as a tree of arrays of fixed shapes, which stack into batches."""
    item: dict[str, Any] = {name: map_tree(lambda x: x[:, 0], getattr(segments, name)) for name in _WITH_ROWS}
    if segments.spec.state_every:
        item["state"] = map_tree(lambda x: x[:, 0], segments.state)
    ended = len(segments.episode_return) > 0
    item["episode_return"] = np.float32(segments.episode_return[0] if ended else np.nan)
    item["episode_length"] = np.int64(segments.episode_length[0] if ended else 0)
    return item
