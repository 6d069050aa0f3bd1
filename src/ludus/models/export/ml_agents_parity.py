"""Verification of a policy exported for ML-Agents: onnxruntime runs the file with Unity's tensor names, next to the original.

The deterministic outputs must equal the decisions of the policy, and recurrent memories must agree within 1e-4. Sampled outputs have no
counterpart: they must be allowed by the mask, and finite.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core import spaces
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.models.export import ml_agents, parity
from ludus.models.export.ml_agents import Sensor
from ludus.models.export.onnx_export import Feed
from ludus.models.export.parity import BATCH_SIZES, RECORDED_ROWS, UNROLL_ROWS, UNROLL_STEPS, ParityReport
from ludus.models.inference.onnx_policy import open_session, read_metadata
from ludus.models.policy import Policy

_LARGEST_STATE_DIFFERENCE = 1e-4
_NEEDED, _CONTINUOUS = 0.999, 1e-4


def verify(
    policy: Policy, model: bytes, recorded: Tree | None = None, sensors: list[Sensor] | None = None, seed: int = 0
) -> ParityReport:
    """Compare a file of `ml_agents.export_policy` with its policy; `recorded` are observations [N, …] from play. Raises Damaged."""
    comparison = _Comparison(policy, model, sensors or ml_agents.sensors_of(policy))
    report, rng = comparison.report, np.random.default_rng(seed)
    for rows in BATCH_SIZES:
        mask = parity.random_mask(policy.action_space, rows, rng) if rows % 2 else None
        observation = parity.observations_for(policy, rows, rng)
        report.random += comparison.compare(observation, parity.random_state(policy, rows, rng), mask)
    report.batch_sizes = list(BATCH_SIZES)
    for start in range(0, min(parity.count_rows(recorded), RECORDED_ROWS), BATCH_SIZES[-1]):
        chunk = map_tree(lambda x, at=start: x[at : at + BATCH_SIZES[-1]], recorded)
        report.recorded += comparison.compare(chunk, parity.random_state(policy, parity.count_rows(chunk), rng), None)
    if policy.recurrent:
        ours = theirs = tuple(spec.zeros(UNROLL_ROWS) for spec in policy.state_spec())
        for _ in range(UNROLL_STEPS):
            report.unrolled += comparison.compare(parity.observations_for(policy, UNROLL_ROWS, rng), ours, None, theirs)
            ours, theirs = comparison.states
        report.unroll_steps = UNROLL_STEPS
    comparison.judge()
    return report


class _Comparison:
    """Runs both sides and keeps the largest differences."""

    def __init__(self, policy: Policy, model: bytes, sensors: list[Sensor]) -> None:
        self._policy, self._session, self._sensors = policy, open_session(model), sensors
        self._names = [item.name for item in self._session.get_outputs()]
        self._leaves = spaces.space_leaves(policy.action_space)
        self._widths = parity.action_widths(policy.action_space)
        self._equal = 0
        facts = read_metadata(model)
        self.report = ParityReport(
            facts["model"], facts["version"], "float32", int(facts["opset"]), ml_agents.LAYOUT, versions=parity.tool_versions()
        )
        self.states: tuple[tuple[Array, ...], tuple[Array, ...]] = ((), ())
        policy.network.thaw()
        self._check_constants()

    def _check_constants(self) -> None:
        """Unity reads the constants from a run on zeros, in which every action is masked."""
        shapes = {item.name: [1, *item.shape[1:]] for item in self._session.get_inputs()}
        found = self._run({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        actions = ml_agents.actions_of(self._policy.action_space)
        wanted: dict[str, list[Any]] = {
            "version_number": [ml_agents.MODEL_VERSION],
            "memory_size": [ml_agents.memory_size(self._policy)],
        }
        if actions.continuous:
            wanted["continuous_action_output_shape"] = [actions.continuous]
        if actions.branches:
            wanted["discrete_action_output_shape"] = [list(actions.branches)]
        for name, value in wanted.items():
            if name not in found or found[name].tolist() != value:
                self.report.fail(f"{name} is {found[name].tolist() if name in found else 'missing'}, not {value}.")

    def compare(
        self, observation: Tree, state: tuple[Array, ...], mask: Bools | None, theirs: tuple[Array, ...] | None = None
    ) -> int:  # fmt: skip
        """Compare one batch; `theirs`: recurrent state of the export, if it has its own. Returns the number of rows."""
        mine = parity.policy_outputs(self._policy, observation, state, mask, None)
        found = self._run(ml_agents.feed_of(self._policy, self._sensors, observation, mask, state if theirs is None else theirs))
        rows = parity.count_rows(observation)
        self._equal += int(self._equal_rows(mine, found, rows).sum())
        self.report.decisions += rows
        self._check_sampled(found, mask)
        if state:
            after = np.concatenate([mine[f"next_state.{i}"].reshape(rows, -1) for i in range(len(state))], axis=1)
            worst = float(np.abs(after - found["recurrent_out"][:, 0]).max())
            self.report.max_state_difference = max(self.report.max_state_difference, worst if np.isfinite(worst) else np.inf)
            cells = np.cumsum([part.reshape(rows, -1).shape[1] for part in state])[:-1]
            parts = np.split(found["recurrent_out"][:, 0], cells, axis=1)
            other = tuple(part.reshape(old.shape) for part, old in zip(parts, state, strict=True))
            self.states = (tuple(mine[f"next_state.{i}"] for i in range(len(state))), other)
        return rows

    def _run(self, feed: Feed) -> Feed:
        return dict(zip(self._names, self._session.run(self._names, feed), strict=True))

    def _equal_rows(self, mine: Feed, found: Feed, rows: int) -> Bools:
        equal: Bools = np.ones(rows, np.bool_)
        number = branch = 0
        for path, leaf in self._leaves:
            suffix = f".{path}" if path else ""
            if isinstance(leaf, gym.spaces.Box):
                wanted = mine[f"action{suffix}"]
                size = int(np.prod(leaf.shape))
                part = found["deterministic_continuous_actions"][:, number : number + size].reshape(wanted.shape)
                number += size
                equal &= parity.equal_rows(wanted, part, self._widths[f"action{suffix}"], _CONTINUOUS)
            else:
                wanted = mine[f"chosen{suffix}"].reshape(rows, -1)
                part = found["deterministic_discrete_actions"][:, branch : branch + wanted.shape[1]]
                branch += wanted.shape[1]
                equal &= (wanted == part).all(axis=1)
        return equal

    def _check_sampled(self, found: Feed, mask: Bools | None) -> None:
        numbers, picks = found.get("continuous_actions"), found.get("discrete_actions")
        if numbers is not None and not np.isfinite(numbers).all() and "are not finite" not in self.report.reason:
            self.report.fail("The continuous_actions are not finite.")
        if picks is None:
            return
        branches = ml_agents.actions_of(self._policy.action_space).branches
        allowed = np.ones((len(picks), sum(branches)), np.bool_) if mask is None else mask
        starts = np.cumsum([0, *branches[:-1]])
        inside = (picks >= 0) & (picks < np.array(branches))
        taken = np.take_along_axis(allowed, starts + np.where(inside, picks, 0), axis=1)
        if not (inside & taken).all() and "are not allowed" not in self.report.reason:
            self.report.fail("Some discrete_actions are not allowed by the mask.")

    def judge(self) -> None:
        report = self.report
        report.equal_actions = self._equal / report.decisions
        if report.equal_actions < _NEEDED:
            report.fail(f"Only {report.equal_actions:.3%} of the actions are equal; {_NEEDED:.1%} are needed.")
        if report.max_state_difference > _LARGEST_STATE_DIFFERENCE:
            shown = f"{report.max_state_difference:.3g}; {_LARGEST_STATE_DIFFERENCE:g} is allowed"
            report.fail(f"The recurrent memories differ by up to {shown}.")
