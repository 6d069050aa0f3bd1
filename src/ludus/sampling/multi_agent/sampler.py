"""Sampling from environments with several agents: copies of one environment, one forward pass per model and tick for all of them.

Every agent is a seat whose turns are recorded as a separate sequence. Sampling and learning alternate: when a model has its batch, its
open segments are committed, so that a batch was sampled by the newest version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ludus.core.tree import Array
from ludus.errors import Interrupted
from ludus.models.weights.version_store import PolicySource
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.seating import SeatAgents
from ludus.sampling.opponents import ZeroSum
from ludus.sampling.sampler import NOT_INTERRUPTED, Interruption

_MAX_STEP_S = 0.25  # of MultiAgentSampler.step, so that other parts of the program can run


class MultiAgentSampler:
    """Fills one batch of one model per `step()`. Reproducible: all randomness comes from `seed`."""

    def __init__(
        self,
        copies: MatchCopies,
        policy_mapping: Mapping[str, str],
        sources: Mapping[str, PolicySource],
        batches: MatchBatches,
        settings: MultiAgentSettings,
        seed: int,
        *,
        interruption: Interruption | None = None,
        make_seating: Callable[[MatchRunner, PolicySet], SeatAgents] | None = None,
        first_copy: int = 0,
    ) -> None:
        """`policy_mapping`: agent → model. An interruption discards what was sampled since the last batch. `first_copy`: see MatchRunner."""
        self._batches, self._settings = batches, settings
        self._generator = torch.Generator().manual_seed(seed)
        self._policies = PolicySet(sources, self._generator, settings.explore)
        self._copies = copies
        self.zero_sum = ZeroSum()
        self._interruption = interruption or NOT_INTERRUPTED
        if interruption is not None:
            copies.beat = interruption.beat
        self._statistics: dict[str, float] = {}  # of the games, as last reported
        self._reported_steps = 0  # environment steps that were reported with a batch
        self._batched_steps = 0  # environment steps when the last batch was complete
        self.matches = MatchRunner(
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
        self._statistics |= self._copies.take_statistics()
        report |= self._statistics
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
