"""Verification of exported models: thousands of decisions of the export and the original are compared.

A float32 model passes if no logit or recurrent state differs by more than 1e-4, no value or log-probability by more than 1e-3, and
99.9 % of the actions are equal; an int8 model if 99 % of the actions are equal. For large numbers, where float32 itself is coarser,
2e-6 of the largest logit of the row is allowed, and 1e-3 of the value. Continuous actions are equal if they differ by at most 0.01 %
(int8: 2 %) of the range of the Box, or of their size without bounds.

Rows of a batch belong to different players: no row may affect the outputs of another, even with extreme inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import ludus
from ludus.core import spaces
from ludus.core.spaces import array_spec
from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Bools
from ludus.models.distributions import MASKED
from ludus.models.export import onnx_export
from ludus.models.export.onnx_export import Arguments, Feed, named_leaves, plain_outputs
from ludus.models.export.quantize import quantize
from ludus.models.inference.onnx_policy import OnnxModule, OnnxPolicy
from ludus.models.policy import Policy

BATCH_SIZES = tuple(range(1, 65))
UNROLL_STEPS, UNROLL_ROWS = 100, 16
RECORDED_ROWS = 4096
_TOLERANCE, _ROUNDING = 1e-4, 2e-6
_ALLOWED = {
    "logits": (_TOLERANCE, _ROUNDING),
    "state": (_TOLERANCE, _ROUNDING),
    "value": (1e-3, 1e-3),
    "log_prob": (1e-3, 1e-3),
}
"""Tolerances: (absolute, relative to the largest number of the row)."""
_SHARE = {"float32": 0.999, "int8": 0.99}
_CONTINUOUS = {"float32": 1e-4, "int8": 0.02}
INT8_ERROR = 0.05
"""Maximum error of the outputs of an int8 model, relative to their spread (root mean squares)."""
INT8_DRIFT = 0.25
"""Maximum error of the recurrent states of an int8 model after an unroll, likewise."""
_UNBOUNDED = 1e6  # larger bounds count as unbounded
_EXTREME = (1e3, 1e6)
"""Extreme numbers in observations of a faulty game."""
_EXTREME_ROWS, _ALONE_ROWS = 4, 12  # of a batch


@dataclass
class ParityReport:
    """What was compared, and the result."""

    model: str
    version: int
    precision: str
    opset: int
    layout: str = "onnx"
    passed: bool = True
    reasons: list[str] = field(default_factory=list)
    """Why it did not pass."""
    decisions: int = 0
    random: int = 0
    """Decisions on observations drawn from the space."""
    recorded: int = 0
    """Decisions on recorded observations."""
    unrolled: int = 0
    """Decisions in unrolls, in which each side carries its own recurrent state."""
    unroll_steps: int = 0
    alone: int = 0
    """Rows evaluated alone and again in a batch with extreme rows."""
    batch_sizes: list[int] = field(default_factory=list)
    max_logit_difference: float = 0.0
    max_value_difference: float = 0.0
    max_state_difference: float = 0.0
    max_log_prob_difference: float = 0.0
    """For equal actions."""
    max_company_difference: float = 0.0
    """Between a row alone and in a batch with extreme rows, in units of the tolerance."""
    state_drift: float = 0.0
    """Error of the recurrent states after an unroll, relative to their spread."""
    equal_actions: float = 0.0
    """Share of decisions with equal actions."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Remarks for users of the export."""

    @property
    def reason(self) -> str:
        return " ".join(self.reasons)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def fail(self, reason: str) -> None:
        self.passed = False
        self.reasons.append(reason)


def artefact(policy: Policy, traced: bytes, *, int8: bool = False, recorded: Tree | None = None) -> tuple[bytes, ParityReport]:
    """Return the model to ship and its comparison with the original; check `passed` before use."""
    model = quantize(traced, calibration_of(policy, recorded)) if int8 else traced
    return model, verify(policy, model, recorded)


def verify(policy: Policy, model: bytes, recorded: Tree | None = None, seed: int = 0) -> ParityReport:
    """Compare an exported policy with its original; `recorded` are observations [N, …] from play. Raises Damaged, UsageError."""
    tally = _make_comparison(policy, model)
    report = tally.report
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    for noisy in (False, True):
        for rows in BATCH_SIZES:
            observation = observations_for(policy, rows, rng)
            noise = policy.draw_noise(rows, generator) if noisy else None
            mask = random_mask(policy.action_space, rows, rng) if rows % 2 else None
            report.random += tally.compare(observation, random_state(policy, rows, rng), mask, noise)
    report.batch_sizes = list(BATCH_SIZES)
    for start in range(0, min(count_rows(recorded), RECORDED_ROWS), BATCH_SIZES[-1]):
        chunk = map_tree(lambda x, at=start: x[at : at + BATCH_SIZES[-1]], recorded)
        for noise in (None, policy.draw_noise(count_rows(chunk), generator)):
            report.recorded += tally.compare(chunk, random_state(policy, count_rows(chunk), rng), None, noise)
    for size in _EXTREME:
        report.random += _mix(policy, tally, size, rng)
    if policy.recurrent:
        _unroll(policy, tally, recorded, rng, generator)
    tally.judge()
    return report


def independent(policy: Policy, model: bytes, seed: int = 0) -> list[str]:
    """Return reasons why the rows of a batch are not independent or not finite; empty if they are."""
    tally, rng = _make_comparison(policy, model), np.random.default_rng(seed)
    for size in _EXTREME:
        _mix(policy, tally, size, rng)
    tally.judge_rows()
    return tally.report.reasons


def _make_comparison(policy: Policy, model: bytes) -> _Comparison:
    exported = OnnxPolicy(model)
    report = ParityReport(
        exported.model, exported.version, exported.precision, int(exported.facts["opset"]), versions=tool_versions()
    )  # fmt: skip
    policy.network.thaw()
    return _Comparison(policy, exported, report)


def _mix(policy: Policy, tally: _Comparison, size: float, rng: np.random.Generator) -> int:
    """Compare a batch with a few extreme rows: the others with the original, and all with themselves alone."""
    rows = BATCH_SIZES[-1]
    observation, state = observations_for(policy, rows, rng), random_state(policy, rows, rng)
    order = rng.permutation(rows)
    extreme, usual = order[:_EXTREME_ROWS], np.sort(order[_EXTREME_ROWS:])
    observation = _make_extreme(policy.observation_space, observation, extreme, size)
    count = tally.compare(observation, state, None, None, only=usual)
    tally.compare_alone(observation, state, extreme, usual[:_ALONE_ROWS])
    return count


def _unroll(
    policy: Policy, tally: _Comparison, recorded: Tree | None, rng: np.random.Generator, generator: torch.Generator
) -> None:
    """Unroll each side from the initial state with its own state, so that small differences may accumulate."""
    ours = theirs = tuple(spec.zeros(UNROLL_ROWS) for spec in policy.state_spec())
    seen = count_rows(recorded)
    for step in range(UNROLL_STEPS):
        if recorded is not None and seen >= UNROLL_STEPS:  # rows start at different positions of the recording, in its order
            at = (step + np.arange(UNROLL_ROWS) * (seen // UNROLL_ROWS)) % seen
            observation = map_tree(lambda x, at=at: x[at], recorded)
        else:
            observation = observations_for(policy, UNROLL_ROWS, rng)
        noise = policy.draw_noise(UNROLL_ROWS, generator)
        tally.report.unrolled += tally.compare(observation, ours, None, noise, theirs)
        ours, theirs = tally.states
    tally.report.unroll_steps = UNROLL_STEPS
    tally.report.state_drift = max((_relative_error(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _relative_error(mine: Array, theirs: Array) -> float:
    """Root mean square of the difference, divided by that of the spread of the rows."""
    with np.errstate(all="ignore"):  # handled by _finite
        error, spread = np.sqrt(np.mean((mine - theirs) ** 2)), np.sqrt(np.mean((mine - mine.mean(axis=0)) ** 2))
        return _finite(error / (spread + 1e-12))


def _without_hidden(*sides: Array) -> list[Array]:
    """Replace logits that all sides mask by 0: the mask constant would dominate every difference."""
    hidden = np.logical_and.reduce([side < MASKED / 2 for side in sides])
    return [np.where(hidden, np.float32(0), side) for side in sides]


class _Comparison:
    """Evaluates both sides and keeps the largest differences."""

    def __init__(self, policy: Policy, exported: OnnxPolicy, report: ParityReport) -> None:
        self._policy, self._exported, self.report = policy, exported, report
        self._equal = 0
        self._worst = dict.fromkeys(_ALLOWED, 0.0)
        """The largest difference by kind, in units of the tolerance."""
        self._share = _CONTINUOUS[report.precision]
        self._widths = action_widths(policy.action_space)
        self._not_numbers: set[str] = set()
        self.states: tuple[tuple[Array, ...], tuple[Array, ...]] = ((), ())

    def compare(
        self,
        observation: Tree,
        state: tuple[Array, ...],
        mask: Bools | None,
        noise: Array | None,
        other_state: tuple[Array, ...] | None = None,
        only: Array | None = None,
    ) -> int:
        """Return the number of decisions. `only`: compare these rows; the others only have to be finite where the original is."""
        mine = policy_outputs(self._policy, observation, state, mask, noise)
        theirs = self._exported.outputs(observation, state if other_state is None else other_state, mask, noise)
        if mine.keys() != theirs.keys() or any(
            mine[k].shape != theirs[k].shape or mine[k].dtype != theirs[k].dtype for k in mine
        ):
            shown = {key: [str(value.dtype), list(value.shape)] for key, value in theirs.items()}
            self.report.fail(f"The outputs have other names, types or shapes than the policy's: {shown}.")
            return 0
        names = [name for name in mine if name.startswith("next_state.")]
        for name in ("logits", "value", "log_prob", *names):
            if (np.isfinite(mine[name]) & ~np.isfinite(theirs[name])).any():
                self._not_numbers.add(name)
        if only is not None:
            mine, theirs = ({name: array[only] for name, array in side.items()} for side in (mine, theirs))
        with np.errstate(all="ignore"):  # handled by _finite and `judge`
            self._compare(mine, theirs, names)
        self.states = tuple(mine[name] for name in names), tuple(theirs[name] for name in names)
        return len(mine["log_prob"])

    def _compare(self, mine: Feed, theirs: Feed, states: Sequence[str]) -> None:
        report = self.report
        self._not_numbers |= {k for k in ("logits", "value", "log_prob", *states) if not np.isfinite(theirs[k]).all()}
        logits = _without_hidden(mine["logits"], theirs["logits"])
        report.max_logit_difference = max(report.max_logit_difference, self._differ("logits", *logits))
        report.max_value_difference = max(report.max_value_difference, self._differ("value", mine["value"], theirs["value"]))
        for name in states:
            report.max_state_difference = max(report.max_state_difference, self._differ("state", mine[name], theirs[name]))
        equal = np.ones(len(mine["log_prob"]), np.bool_)
        for name, width in self._widths.items():
            equal &= equal_rows(mine[name], theirs[name], width, self._share)
        if equal.any():  # different actions have different probabilities
            apart = self._differ("log_prob", mine["log_prob"][equal], theirs["log_prob"][equal])
            report.max_log_prob_difference = max(report.max_log_prob_difference, apart)
        self._equal += int(equal.sum())
        report.decisions += len(equal)

    def _differ(self, kind: str, mine: Array, theirs: Array) -> float:
        mine, theirs = (side.reshape(len(side), -1) for side in (mine, theirs))
        apart = np.abs(mine - theirs).max(axis=-1)
        least, share = _ALLOWED[kind]
        allowed = np.maximum(least, share * np.abs(mine).max(axis=-1))
        self._worst[kind] = max(self._worst[kind], _finite((apart / allowed).max()))
        return _finite(apart.max())

    def compare_alone(self, observation: Tree, state: tuple[Array, ...], extreme: Array, usual: Array) -> None:
        """Evaluate rows alone and in the batch: the outputs of a row must not depend on the others."""
        together = self._exported.outputs(observation, state, None, None)
        kinds = {"logits": "logits", "value": "value"} | {f"next_state.{i}": "state" for i in range(len(state))}
        for row in (*extreme, *usual):
            one = slice(row, row + 1)
            parts = tuple(part[one] for part in state)
            alone = self._exported.outputs(map_tree(lambda x, one=one: x[one], observation), parts, None, None)
            for name, kind in kinds.items():
                self._compare_row(kind, alone[name][0], together[name][row], together[name][usual], row in extreme)
            self.report.alone += 1

    def _compare_row(self, kind: str, alone: Array, together: Array, usual: Array, extreme: bool) -> None:
        least, share = _ALLOWED[kind]
        if kind == "logits":
            (alone, together), (usual,) = _without_hidden(alone, together), _without_hidden(usual)
        with np.errstate(all="ignore"):
            if self.report.precision == "int8":  # a sum in another order may round to the next integer
                least, share = max(least, INT8_ERROR * float(np.std(usual))), INT8_ERROR if extreme else 0.0
            elif extreme:  # intermediate values may be larger than the outputs, and are rounded accordingly
                share = max(share, 1e-3)
            allowed = max(least, share * float(np.abs(alone).max(initial=0)))
            worst = _finite(np.abs(alone - together).max(initial=0) / allowed)
        self.report.max_company_difference = max(self.report.max_company_difference, worst)

    def judge(self) -> None:
        report = self.report
        if not report.decisions:
            return
        report.equal_actions = self._equal / report.decisions
        needed = _SHARE[report.precision]
        if report.equal_actions < needed:
            report.fail(
                f"Only {report.equal_actions:.3%} of the actions are equal; {needed:.1%} are needed.{self._int8_advice()}"
            )
        self.judge_rows()
        if report.precision == "float32":
            for kind, worst in self._worst.items():
                if worst > 1:
                    report.fail(f"The {kind} differ by up to {worst:.3g} times what is allowed ({_ALLOWED[kind][0]:g}).")
        elif report.state_drift > INT8_DRIFT:
            shown = f"{report.state_drift:.0%} of how much they vary; {INT8_DRIFT:.0%} are allowed"
            report.fail(f"After {report.unroll_steps} steps the states differ by {shown}.")

    def judge_rows(self) -> None:
        report = self.report
        for name in sorted(self._not_numbers):
            report.fail(f"The {name} are not always numbers.")
        if report.max_company_difference > 1:
            shown = f"{report.max_company_difference:.3g} times what is allowed"
            report.fail(f"The answers to an observation depend on the others in its batch, by up to {shown}.")

    def _int8_advice(self) -> str:
        if self.report.precision != "int8":
            return ""
        return (
            " A policy that has hardly been trained prefers no action clearly, so that rounding decides; otherwise use float32."
        )


def policy_outputs(policy: Policy, observation: Tree, state: tuple[Array, ...], mask: Bools | None, noise: Array | None) -> Feed:
    """Compute all outputs of the graph with PyTorch."""
    with torch.inference_mode():
        tensors = map_tree(torch.from_numpy, observation)
        logits, value, after = policy._outputs(tensors, tuple(map(torch.from_numpy, state)), None)
        masks = None if mask is None else torch.from_numpy(mask)
        noises = None if noise is None else torch.from_numpy(noise)
        chosen, log_prob = policy.distribution.sample(logits, masks, noises)
        value = policy.state_value(logits, value, masks)
    kept = map_tree(Tensor.numpy, chosen)
    whole = {"log_prob": log_prob.numpy(), "value": value.numpy(), "logits": logits.numpy()}
    trees = {"action": policy.distribution.to_environment(kept), "chosen": kept, "next_state": tuple(s.numpy() for s in after)}
    return whole | {name: leaf for prefix, tree in trees.items() for name, leaf in named_leaves(prefix, tree)}


def action_widths(space: gym.Space[Any]) -> dict[str, Array | None]:
    """Return name of each leaf of `action` and `chosen` → range of its numbers, 0 if unbounded; None for integers."""
    found: dict[str, Array | None] = {}
    for name, leaf in spaces.space_leaves(space, "action"):
        chosen = name.replace("action", "chosen", 1)
        found[name] = found[chosen] = None
        if isinstance(leaf, gym.spaces.Box):
            low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
            found[name] = np.where(_has_bounds(low, high), high - low, 0.0)
            found[chosen] = np.where(leaf.bounded_below & leaf.bounded_above, 2.0, 0.0)  # scaled to -1 … 1
    return found


def _has_bounds(low: Array, high: Array) -> Bools:
    """Return where bounds are meant: the largest number of a type is often used for "unbounded"."""
    return np.asarray((np.abs(low) < _UNBOUNDED) & (np.abs(high) < _UNBOUNDED))


def equal_rows(mine: Array, theirs: Array, width: Array | None, share: float) -> Bools:
    if width is None:
        equal: Bools = mine == theirs
    else:
        sizes = np.where(width > 0, width, np.maximum(1.0, np.abs(mine.astype(np.float64))))
        equal = np.abs(mine.astype(np.float64) - theirs) <= share * sizes
    return np.asarray(equal.reshape(len(equal), -1).all(axis=1))


def _finite(value: Any) -> float:
    """Map NaN and infinity to the largest float32, because JSON has neither."""
    return float(value) if np.isfinite(value) else float(np.finfo(np.float32).max)


def count_rows(tree: Tree | None) -> int:
    return 0 if tree is None else len(next(leaves(tree))[1])


def tool_versions() -> dict[str, str]:
    onnx, runtime = onnx_export.require_onnx("verification")
    return {"ludus": ludus.__version__, "torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": runtime.__version__}


# -- inputs -------------------------------------------------------------------------------------------------------------


def observations_for(policy: Policy, rows: int, rng: np.random.Generator) -> Tree:
    """Return random observations that fit the policy: symbol bytes stay within its byte scales."""
    drawn = random_observations(policy.observation_space, rows, rng)
    for path, divisor in policy.config.byte_scales:
        for found, part in leaves(drawn):
            if found == path:
                np.remainder(part, min(255, round(divisor)) + 1, out=part)
    return drawn


def random_observations(space: gym.Space[Any], rows: int, rng: np.random.Generator) -> Tree:
    """Return random observations of a space: uniform within its bounds, normal without bounds."""
    if isinstance(space, gym.spaces.Dict):
        return {key: random_observations(item, rows, rng) for key, item in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(random_observations(item, rows, rng) for item in space.spaces)
    spec = array_spec(space)
    shape = (rows, *spec.shape)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(int(space.start), int(space.start + space.n), shape)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return rng.integers(np.asarray(space.start), np.asarray(space.start) + space.nvec, shape)
    if isinstance(space, gym.spaces.Box):
        return _in_box(space, shape, rng).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)


def _in_box(space: gym.spaces.Box, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if space.dtype == np.uint8 and space.low.min() == 0 and space.high.max() == 255:  # images: fast path
        return rng.integers(0, 256, shape, np.uint8)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    known = _has_bounds(low, high)
    inside = np.where(known, low, 0.0) + rng.random(shape) * np.where(known, high - low, 0.0)
    values = np.clip(np.where(known, inside, rng.normal(size=shape)), low, high)
    return values if space.dtype is not None and space.dtype.kind == "f" else np.rint(values)


def _make_extreme(space: gym.Space[Any], observations: Tree, rows: Array, size: float) -> Tree:
    """Fill these rows with numbers of this size, or with the limits of their type or bounds."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _make_extreme(item, observations[key], rows, size) for key, item in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_make_extreme(item, observations[i], rows, size) for i, item in enumerate(space.spaces))
    if not isinstance(space, gym.spaces.Box):
        return observations
    changed: Array = observations.copy()
    signs = np.where(np.arange(len(rows)) % 2, -1.0, 1.0).reshape(-1, *(1 for _ in space.shape))
    if changed.dtype.kind == "f":  # games may send values outside of the bounds
        changed[rows] = size * signs
    else:
        lowest, highest = spaces.dtype_bounds(changed.dtype)
        changed[rows] = np.clip(np.clip(size * signs, space.low, space.high), lowest, highest).astype(changed.dtype)
    return changed


def random_mask(space: gym.Space[Any], rows: int, rng: np.random.Generator) -> Bools | None:
    """Return masks that allow about half of the options, and at least one of each choice."""
    size = spaces.mask_size(space)
    if not size:
        return None
    mask = rng.random((rows, size)) < 0.5
    for part in spaces.choices(space):
        mask[np.arange(rows), rng.integers(part.start, part.stop, rows)] = True
    return mask


def random_state(policy: Policy, rows: int, rng: np.random.Generator) -> tuple[Array, ...]:
    return tuple(np.tanh(rng.normal(size=(rows, *spec.shape))).astype(np.float32) for spec in policy.state_spec())


def calibration_of(policy: Policy, recorded: Tree | None = None, seed: int = 0, batches: int = 8, rows: int = 32) -> list[Feed]:
    """Return typical inputs for `quantize`: recorded observations if there are enough, else random ones."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        observation = observations_for(policy, rows, rng)
        if recorded is not None and count_rows(recorded) >= rows:
            at = rng.integers(0, count_rows(recorded), rows)
            observation = map_tree(lambda x, at=at: x[at], recorded)
        feed: Feed = dict(named_leaves("observation", observation)) | dict(named_leaves("state", random_state(policy, rows, rng)))
        for name, spec in onnx_export.policy_inputs(policy).items():
            feed.setdefault(name, np.ones((rows, *spec.shape), np.bool_) if name == "mask" else spec.zeros(rows))
        found.append(feed)
    return found


# -- any module ---------------------------------------------------------------------------------------------------------


def module_feeds(args: Sequence[Tree], kwargs: Mapping[str, Tree], seed: int = 0, batches: int = 16) -> list[Feed]:
    """Return batches around the examples of a module's inputs: floats varied, image bytes random, categories unchanged."""
    rng = np.random.default_rng(seed)
    examples = [*named_leaves("args", tuple(args)), *named_leaves("kwargs", dict(kwargs))]
    sizes = [1, 2, 3, 64, *rng.integers(1, 65, batches).tolist()][:batches]
    return [{name: _vary(np.asarray(value), rows, rng) for name, value in examples} for rows in sizes]


def _vary(example: Array, rows: int, rng: np.random.Generator) -> Array:
    shape = (rows, *example.shape)
    if example.dtype.kind == "f":
        return (example + rng.normal(size=shape)).astype(example.dtype)
    if example.dtype == np.bool_:
        return rng.random(shape) < 0.5
    if example.dtype == np.uint8 and example.ndim > 1:
        return rng.integers(0, 256, shape, np.uint8)
    return np.broadcast_to(example, shape).copy()


def verify_module(module: nn.Module, model: bytes, feeds: Sequence[Feed], arguments: Arguments) -> list[str]:
    """Return reasons why the exported module differs from the original; empty if it does not. `arguments`: see `arguments_of`.

    float32: no output differs by more than 1e-4; integers are equal. int8: differences are below 5 % of the spread of the outputs.
    """
    exported, wrong = OnnxModule(model), []
    is_int8 = exported.facts["precision"] == "int8"
    for feed in feeds:
        with torch.inference_mode():
            args, kwargs = arguments(iter([torch.from_numpy(feed[name].copy()) for name in feed]))
            mine = dict(named_leaves("output", map_tree(Tensor.numpy, plain_outputs(module(*args, **kwargs)))))
        theirs = dict(named_leaves("output", exported({name: feed[name] for name in exported.inputs})))
        wrong += list(_differences(mine, theirs, is_int8))
    return list(dict.fromkeys(wrong))


def _differences(mine: Mapping[str, Array], theirs: Mapping[str, Array], is_int8: bool) -> Iterator[str]:
    for name, ours in mine.items():
        other = theirs.get(name)
        if other is None or other.shape != ours.shape or other.dtype != ours.dtype:
            shown = "is missing" if other is None else f"is {other.dtype}{list(other.shape)}, not {ours.dtype}{list(ours.shape)}"
            yield f"{name} {shown}"
        elif ours.dtype.kind != "f":
            if not is_int8 and not np.array_equal(ours, other):
                yield f"{name}, whole numbers, differs"
        elif is_int8:
            error, spread = np.sqrt(np.mean((ours - other) ** 2)), np.sqrt(np.mean((ours - ours.mean(axis=0)) ** 2))
            if len(ours) >= 16 and not error <= INT8_ERROR * spread + 1e-3:
                yield f"{name} differs by more than {INT8_ERROR:.0%} of how much it varies"
        elif not np.abs(ours - other).max(initial=0) <= max(_TOLERANCE, _ROUNDING * float(np.abs(ours).max(initial=0))):
            yield f"{name} differs by more than {_TOLERANCE:g}"


def rounding_error(policy: Policy, model: bytes, seed: int = 0) -> float:
    """Return the error of the logits of an int8 policy relative to their spread. Unlike the share of equal actions this is also
    meaningful for an untrained policy.
    """
    exported, rng = OnnxPolicy(model), np.random.default_rng(seed)
    pairs = []
    for _ in range(8):
        observation = observations_for(policy, BATCH_SIZES[-1], rng)
        state = random_state(policy, BATCH_SIZES[-1], rng)
        pairs.append((policy_outputs(policy, observation, state, None, None)["logits"], exported.logits(observation, state)))
    mine, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return _relative_error(*_without_hidden(mine, theirs))
