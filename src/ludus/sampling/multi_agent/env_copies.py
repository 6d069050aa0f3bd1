"""Copies of one environment with several agents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ludus.envs.pettingzoo import MultiAgentMatch


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
