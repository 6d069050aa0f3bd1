"""What the stages of a check share: how the environment is made and called, and where findings and facts go."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludus.config.schema import PreprocessConfig
from ludus.envs.env_check.findings import FindingLog
from ludus.errors import EnvironmentFault, UsageError, user_frame
from ludus.process.screen_choice import AUTO


class CallFailed(Exception):
    """A call of the environment failed, and that was reported as a finding. Ends the stage."""


@dataclass(frozen=True)
class CheckRequest:
    """What to check, and how thoroughly. Can be written as JSON."""

    env: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Any, ...] = ()
    display: str = AUTO
    """`config.display`: the screen of the environment."""
    seconds: float = 4.0
    """Duration of random play."""
    steps: int = 20_000
    """Most steps of random play."""
    seed: int = 0
    measure_s: float = 0.4
    """Duration of a measurement of several copies."""

    @property
    def preprocessing(self) -> PreprocessConfig:
        return PreprocessConfig.model_validate(dict(self.preprocess))

    @property
    def reported_settings(self) -> dict[str, Any]:
        """What a recommended configuration must keep."""
        return {"preprocess": dict(self.preprocess), "wrappers": list(self.wrappers), "display": self.display}


class CallMarks(Protocol):
    """Receives which call of the environment is running, for the process that watches this one."""

    def enter(self, call: str, step: int) -> None: ...
    def leave(self) -> None: ...


class NoMarks:
    def enter(self, call: str, step: int) -> None:
        pass

    def leave(self) -> None:
        pass


class CheckSession:
    """State of one check. Not thread-safe."""

    def __init__(self, request: CheckRequest, findings: FindingLog | None = None, marks: CallMarks | None = None) -> None:
        self.request = request
        self.findings = findings or FindingLog()
        self.facts: dict[str, Any] = {}
        self.marks = marks or NoMarks()
        self.drop: tuple[str, ...] = ()
        """Parts of the observation that cannot be learned from."""
        self.step = 0
        """Number of the current step, for messages."""
        self.last_call_s = 0.0
        self.last_call_preempted = False
        """Another process got the core during the last call: its time says nothing about the environment."""

    @property
    def preprocessing(self) -> PreprocessConfig:
        """As requested, without the parts that cannot be learned from."""
        asked = self.request.preprocessing
        return asked.model_copy(update={"drop": [*(asked.drop or ()), *self.drop]}) if self.drop else asked

    def deadline(self) -> float:
        """End of a stage that plays until something happens, in seconds of time.perf_counter."""
        return time.perf_counter() + self.request.seconds

    def call(self, what: str, function: Callable[..., Any], *arguments: Any, kind: str = "raises", **keywords: Any) -> Any:
        """Call the environment. A failure is reported as a finding of `kind`; raises CallFailed, or UsageError."""
        self.marks.enter(what, self.step)
        preemptions, began = _preemptions(), time.perf_counter()
        try:
            return function(*arguments, **keywords)
        except UsageError:
            raise
        except SystemExit as error:
            self.findings.add("exits", f"{what} called exit({error.code}){user_frame(error)}, step {self.step}")
            raise CallFailed(what) from error
        except EnvironmentFault as error:
            self.findings.add(kind_of_fault(error, kind), str(error))
            raise CallFailed(what) from error
        except Exception as error:  # user code may raise anything
            self.findings.add(kind, f"{what} raised {type(error).__name__}: {error}{user_frame(error)}, step {self.step}")
            raise CallFailed(what) from error
        finally:
            self.last_call_s = time.perf_counter() - began
            self.last_call_preempted = _preemptions() != preemptions
            self.marks.leave()

    def beat(self, what: str) -> Callable[[], None]:
        """A function that shows that a call of many copies goes on."""
        return lambda: self.marks.enter(what, self.step)

    def try_call(self, what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, str]:
        """Call the environment where an exception is allowed. Returns (result, "") or (None, description of the exception)."""
        self.marks.enter(what, self.step)
        try:
            return function(*arguments, **keywords), ""
        except (Exception, SystemExit) as error:  # user code may raise anything
            return None, f"{type(error).__name__}: {error}"[:200]
        finally:
            self.marks.leave()


_KINDS_OF_FAULTS = (
    ("forbids every action", "mask_empty"),
    ("action_mask", "mask"),
    ("action mask", "mask"),
    ("the reward", "reward"),
    ("possible_agents", "agents"),
    ("is not finite", "finite"),
    ("contains nan", "finite"),
    ("contains inf", "finite"),
    ("contains -inf", "finite"),
    ("categories", "bounds"),
    ("has shape", "structure"),
    ("the keys are", "structure"),
    ("as observation", "structure"),
    ("does not fit into", "dtype"),
    ("has changed its", "spaces_change"),
    ("values from", "interface"),
    ("not a gymnasium", "construct"),
)
"""Text of an error of `ludus.envs` → kind of the finding."""


def kind_of_fault(fault: EnvironmentFault, otherwise: str) -> str:
    """The kind of finding for an error that the environments of Ludus have raised about what they got from the user's code."""
    if " raised " in fault.message:
        return otherwise
    return next((kind for text, kind in _KINDS_OF_FAULTS if text in fault.message), otherwise)


def _preemptions() -> int:
    """Times that the kernel has taken the core away from this thread."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(
        getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    ).ru_nivcsw  # macOS counts for processes only


def printed_bytes() -> int:
    """Bytes that were written to the standard output so far, if it is a file; otherwise 0."""
    try:
        status = os.fstat(1)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
