"""Exported models run by onnxruntime: policies and arbitrary modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from ludus.core import plugins, spaces
from ludus.core.spaces import ArraySpec, array_spec
from ludus.core.tree import Array, Tree
from ludus.errors import Damaged, UsageError
from ludus.models.distributions import Distribution, make_distribution, make_q_distribution
from ludus.models.export import onnx_export
from ludus.models.export.onnx_export import Feed, named_leaves, unflatten_tree
from ludus.models.policy import VALUES, BatchDecision

_MAX_CACHED_SIZES = 256
"""Number of batch sizes whose default inputs are cached."""


def open_session(data: bytes, threads: int = 1) -> Any:
    """Return an onnxruntime session. Raises MissingExtra, Damaged."""
    _, runtime = onnx_export.require_onnx("ONNX inference")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # it warns about problems that it fixes itself
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leave the cores to the games
    try:
        return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no public base class
        raise Damaged(f"onnxruntime cannot load this model: {str(error).strip().splitlines()[0]}") from error


def read_metadata(data: bytes) -> dict[str, Any]:
    """Return the metadata written by the exporter. Raises Damaged, UsageError."""
    onnx, _ = onnx_export.require_onnx("ONNX inference")
    protobuf = plugins.require("google.protobuf.message", onnx_export.EXTRA, "ONNX inference")
    try:
        model = onnx.load_from_string(data)
    except protobuf.DecodeError as error:
        raise Damaged(f"These bytes are not an ONNX model: {error}.") from error
    return onnx_export.facts_of(model)


def read_model(source: str | Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {source}: {error.strerror}.", "`ludus export` writes such files.") from error


class OnnxPolicy:
    """An exported policy. Everything is batched: N rows first, as in `Policy.act`.

        policy = OnnxPolicy("agent.onnx")
        decision = policy.act(observations)                               # the most probable actions
        noise = policy.draw_noise(64, generator)
        decision = policy.act(observations, decision.state, mask, noise)  # sampled actions

    `value=False` removes the value from the graph, which halves the time of two-tower networks; it is then 0, as with
    `Network.freeze(values=False)`. Thread-safe.
    """

    def __init__(self, source: str | Path | bytes, *, threads: int = 1, value: bool = True) -> None:
        self._threads, self._value = threads, value
        self._data = read_model(source)
        facts = read_metadata(self._data)
        if facts.get("kind") != "policy":
            raise UsageError("This ONNX model is not a policy.", "Export a run of ludus, or a ludus Policy.")
        self.facts = facts
        self.model = str(facts["model"])
        self.version = int(facts["version"])
        self._observation_space = spaces.from_json(facts["observation_space"])
        self._action_space = spaces.from_json(facts["action_space"])
        make = make_q_distribution if facts.get("decides_by") == VALUES else make_distribution
        self.distribution: Distribution = make(self._action_space)
        self._state = tuple(ArraySpec(tuple(shape), np.dtype(np.float32)) for shape in facts["state"])
        self._specs = onnx_export.policy_inputs(self)
        self._defaults: dict[int, Feed] = {}
        self._single = not isinstance(self._observation_space, (gym.spaces.Dict, gym.spaces.Tuple))
        self._actions = array_spec(self._action_space, "action")
        self._count = len(named_leaves("action", self._actions))
        parts = {"action": self._actions, "chosen": self._actions, "log_prob": 0, "next_state": self._state}
        parts |= {"value": 0} if value else {}
        self._outputs = [name for prefix, tree in parts.items() for name, _ in named_leaves(prefix, tree)]
        self._session = self._open_session(self._data)

    def _open_session(self, data: bytes) -> Any:
        return open_session(data if self._value else onnx_export.without(data, ["value"]), self._threads)

    # -- properties

    @property
    def observation_space(self) -> gym.Space[Any]:
        return self._observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        return self._action_space

    @property
    def recurrent(self) -> bool:
        return bool(self._state)

    @property
    def precision(self) -> str:
        return str(self.facts["precision"])

    def state_spec(self) -> Tree:
        return self._state

    def initial_state(self, rows: int) -> tuple[Array, ...]:
        return tuple(spec.zeros(rows) for spec in self._state)

    def draw_noise(self, rows: int, generator: torch.Generator) -> Array:
        """As `Policy.draw_noise`."""
        noise: Array = self.distribution.noise((rows,), generator).numpy()
        return noise

    # -- acting

    def act(
        self,
        observation: Tree,
        state: tuple[Array, ...] = (),
        mask: Array | None = None,
        noise: Array | None = None,
    ) -> BatchDecision:
        """As `Policy.act`: arrays in, arrays out."""
        feed = self._make_feed(observation, state, mask, noise)
        flat = self._session.run(self._outputs, feed)
        count = self._count
        actions, chosens = flat[:count], flat[count : 2 * count]
        log_prob, rest = flat[2 * count], flat[2 * count + 1 :]
        value = rest.pop() if self._value else np.zeros_like(log_prob)
        if count == 1 and isinstance(self._actions, ArraySpec):
            return BatchDecision(actions[0], chosens[0], log_prob, value, tuple(rest))
        action, chosen = (unflatten_tree(self._actions, iter(part)) for part in (actions, chosens))
        return BatchDecision(action, chosen, log_prob, value, tuple(rest))

    def logits(self, observation: Tree, state: tuple[Array, ...] = ()) -> Array:
        """The inputs of the distribution, before masking: [N, outputs]."""
        (logits,) = self._session.run(["logits"], self._make_feed(observation, state, None, None))
        return logits  # type: ignore[no-any-return]

    def outputs(self, observation: Tree, state: tuple[Array, ...], mask: Array | None, noise: Array | None) -> dict[str, Array]:
        """All outputs of the graph by name."""
        names = [item.name for item in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, self._make_feed(observation, state, mask, noise)), strict=True))

    def _make_feed(self, observation: Tree, state: tuple[Array, ...], mask: Array | None, noise: Array | None) -> Feed:
        given: Feed = {"observation": observation} if self._single else dict(named_leaves("observation", observation))
        feed = self._default_inputs(len(next(iter(given.values())))) | given
        if mask is not None and "mask" in feed:
            feed["mask"] = mask
        if noise is not None and "noise" in feed:
            feed["noise"] = noise
        for i, part in enumerate(state):
            feed[f"state.{i}"] = part
        return feed

    def _default_inputs(self, rows: int) -> Feed:
        """Optional inputs: no mask, no noise, the initial state."""
        defaults = self._defaults.get(rows)
        if defaults is None:
            defaults = {name: spec.zeros(rows) for name, spec in self._specs.items() if not name.startswith("observation")}
            if "mask" in defaults:
                defaults["mask"] = np.ones_like(defaults["mask"])
            if len(self._defaults) >= _MAX_CACHED_SIZES:
                self._defaults.clear()
            self._defaults[rows] = defaults
        return defaults

    # -- weights

    def load_weights(self, weights: Mapping[str, Array], version: int | None = None) -> None:
        """Use these weights from the next call on. Raises IncompatibleCheckpoint; UsageError for an int8 model."""
        data = onnx_export.with_weights(self._data, weights, version)
        self._session, self._data = self._open_session(data), data
        self.version = self.version if version is None else version


class OnnxModule:
    """An exported module: called with inputs by name, it returns outputs in the structure of the original."""

    def __init__(self, source: str | Path | bytes, threads: int = 1) -> None:
        data = read_model(source)
        self.facts = read_metadata(data)
        self._session = open_session(data, threads)
        self._structure = _unskeleton(self.facts["outputs"])
        self._names = [name for name, _ in named_leaves("output", self._structure)]
        self.inputs = [item.name for item in self._session.get_inputs()]

    def __call__(self, feed: Feed) -> Tree:
        return unflatten_tree(self._structure, iter(self._session.run(self._names, feed)))


def _unskeleton(skeleton: Any) -> Tree:
    if isinstance(skeleton, dict):
        return {key: _unskeleton(item) for key, item in skeleton.items()}
    return tuple(map(_unskeleton, skeleton)) if isinstance(skeleton, list) else 0
