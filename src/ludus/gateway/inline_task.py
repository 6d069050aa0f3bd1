"""An imitation of `asyncio.Task` that runs a coroutine in its caller's stack instead of scheduling it.

See docs.python.org/3/library/asyncio-extending.html for what asyncio expects of a custom task.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Coroutine
from typing import Any

from ludus.models.inference.micro_batcher import BatchFuture


class InlineTask:
    """Runs one coroutine at a time, without creating a task for it.

    Most ticks wait for nothing, or only for a batch of the model, which resumes them directly. While a coroutine runs, this
    object is the current task (`asyncio.current_task`), so that `asyncio.timeout`, task groups and the like work. Call `_step`
    and `resume` from callbacks of the loop only: inside another task asyncio refuses to change the current one.

    Subclasses set `_coroutine`, call `_step(None)`, and implement `_on_result` and `_on_error`.
    """

    __slots__ = (
        "__weakref__", "_cancel_message", "_cancels", "_context", "_coroutine", "_fut_waiter", "_loop", "_must_cancel",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._context = contextvars.copy_context()
        self._cancels = 0
        # Some libraries read these three attributes of asyncio.Task.
        self._must_cancel = False
        self._cancel_message: Any = None
        self._fut_waiter: Any = None

    def _on_result(self, result: Any) -> None:
        raise NotImplementedError

    def _on_error(self, error: BaseException) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        """Continue after the batch that the coroutine waits for. Called by the micro-batcher."""
        self._fut_waiter = None
        self._step(None)

    def _step(self, thrown: BaseException | None) -> None:
        coroutine, loop = self._coroutine, self._loop
        assert coroutine is not None
        resume: Any = coroutine.send if thrown is None else coroutine.throw
        task: Any = self
        _enter_task(loop, task)
        try:
            awaited = self._context.run(resume, thrown)
        except StopIteration as stop:
            _leave_task(loop, task)
            self._clear()
            self._on_result(stop.value)
        except BaseException as error:  # user code: any exception is the outcome of the coroutine
            _leave_task(loop, task)
            self._clear()
            self._on_error(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            _leave_task(loop, task)
            if awaited.__class__ is BatchFuture and awaited.waiter is None:
                awaited._asyncio_future_blocking = False
                awaited.waiter = self
                self._fut_waiter = awaited
            else:
                self._wait_for(awaited)
            if self._must_cancel and self._cancel_awaited():
                self._must_cancel = False

    def _clear(self) -> None:
        self._coroutine = None
        if self._cancels:  # the coroutine cancelled itself; the next one starts without pending cancellations
            self._cancels, self._must_cancel = 0, False

    def _wait_for(self, awaited: Any) -> None:
        """Wait as asyncio.Task does."""
        loop = self._loop
        if awaited is None:
            loop.call_soon(self._wake_up, None)
        elif not getattr(awaited, "_asyncio_future_blocking", False):
            loop.call_soon(self._step, RuntimeError(f"tick() cannot wait for {awaited!r}."))
        elif awaited.get_loop() is not loop:
            loop.call_soon(self._step, RuntimeError(f"tick() waits for {awaited!r} of another event loop."))
        else:
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._wake_up)
            self._fut_waiter = awaited

    def _wake_up(self, awaited: asyncio.Future[Any] | None) -> None:
        self._fut_waiter = None
        thrown: BaseException | None = None
        if self._must_cancel:
            self._must_cancel = False
            thrown = asyncio.CancelledError(*([] if self._cancel_message is None else [self._cancel_message]))
        elif awaited is not None:
            try:
                awaited.result()
            except BaseException as error:  # rethrown inside the coroutine
                thrown = error
        self._step(thrown)

    def _cancel_awaited(self) -> bool:
        awaited = self._fut_waiter
        if awaited is None:
            return False
        if awaited.__class__ is BatchFuture and awaited.waiter is self:
            awaited.waiter = None  # a batch does not report cancelled items, and must not resume this task later
            awaited.add_done_callback(self._wake_up)
        return bool(awaited.cancel(msg=self._cancel_message))

    # -- methods of asyncio.Task

    def cancel(self, msg: Any = None) -> bool:
        if self._coroutine is None:
            return False
        self._cancels += 1
        self._cancel_message = msg
        if not self._cancel_awaited():
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def done(self) -> bool:
        return self._coroutine is None

    def cancelled(self) -> bool:
        return False

    def get_name(self) -> str:
        raise NotImplementedError

    def get_coro(self) -> Coroutine[Any, Any, Any] | None:
        return self._coroutine

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop
