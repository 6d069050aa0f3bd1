"""Fakes for developing games and trainers independently: a model without a network, and a buffer that is always full.

ludus.fake.FakeModel("atari", outputs=np.zeros(6, np.float32))      # actors find it as RemoteModel(name="atari")
ludus.fake.FakeBuffer("replay", example={"observation": image})     # learners take from it as fast as they can
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.errors import LudusError, UsageError
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules
from ludus.remote.buffer import RemoteBuffer
from ludus.remote.context import current
from ludus.remote.model import RemoteModel, only_model

log = logging.getLogger(__name__)

_OTHER_MODULES = {"FakeActor": "ludus.remote.fake_peers", "FakeGamecore": "ludus.remote.fake_peers"}
_VARIETY = 16
_WAIT_S = 0.2


def __getattr__(name: str) -> Any:
    """The fakes of actor and game are in another module; `ludus.fake` provides all of them."""
    if name not in _OTHER_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_OTHER_MODULES[name]), name)


# -- a model ------------------------------------------------------------------------------------------------------------


class FakeNetwork(nn.Module):
    """Returns random outputs for any inputs. It has one parameter, so that a trainer has something to train."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._random(self.outputs, _batch_size((args, kwargs)))

    def _random(self, spec: Mapping[str, Any], rows: int) -> Any:
        if "dict" in spec:
            return {key: self._random(item, rows) for key, item in spec["dict"].items()}
        if "tuple" in spec:
            return tuple(self._random(item, rows) for item in spec["tuple"])
        dtype, shape = spec["array"]
        size = (rows, *shape)
        kind = np.dtype(dtype).kind
        if kind == "f":
            return torch.randn(size).to(getattr(torch, dtype)) + self.weight
        return torch.randint(0, 2 if kind == "b" else int(spec.get("below", 2)), size).to(getattr(torch, dtype))


def _batch_size(inputs: Any) -> int:
    if isinstance(inputs, Tensor):
        return int(inputs.shape[0])
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else ()
    sizes = [size for part in parts if (size := _batch_size(part))]
    return sizes[0] if sizes else 0


class FakeModel(RemoteModel):
    """A model without a network: random outputs shaped like `outputs`, which have no batch dimension.

        ludus.fake.FakeModel("atari", outputs=(np.zeros(6, np.float32), np.float32(0)))

    It is a model of the run: `RemoteModel(name="atari")` finds it. Integers are random from 0 up to the
    largest in the example.
    """

    def __init__(self, name: str, outputs: Tree, forward_args: tuple[Tree, ...] = (), **settings: Any) -> None:
        spec = modules.inputs_of((outputs,), {})["args"][0]
        _set_upper_bounds(spec, outputs)
        super().__init__(name, FakeNetwork, forward_args, model_args=[spec], **settings)


def _set_upper_bounds(spec: dict[str, Any], example: Tree) -> None:
    """Record the upper bounds of integers."""
    if "dict" in spec:
        for key, item in spec["dict"].items():
            _set_upper_bounds(item, example[key])
    elif "tuple" in spec:
        for item, part in zip(spec["tuple"], example, strict=True):
            _set_upper_bounds(item, part)
    elif np.dtype(spec["array"][0]).kind in "iu":
        spec["below"] = max(2, int(np.max(example, initial=0)) + 1)


# -- a buffer -----------------------------------------------------------------------------------------------------------


class FakeBuffer:
    """Keeps the buffer `name` full, so that a trainer can be developed and measured without games.

        ludus.fake.FakeBuffer("replay", example={"observation": image, "reward": 0.0})

    Items are copies of `example` with noise on its floating-point values. Without an example they are segments of `steps` steps
    made from the inputs of the model `model` (or of the only model of the run): `observation` [T+1, …], `action`, `reward`,
    `terminated`, `truncated`, `valid`, `log_prob`, `version` [T], `value` [T+1].
    """

    def __init__(
        self,
        name: str,
        example: Tree | None = None,
        *,
        model: str | RemoteModel | None = None,
        steps: int = 32,
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        if example is not None and model is not None:
            raise UsageError("FakeBuffer got an example and a model.", "Give one of them.")
        run = current("FakeBuffer")
        generator = np.random.default_rng(seed)
        if example is None:
            source = only_model(run) if model is None else RemoteModel(model) if isinstance(model, str) else model
            make = segments_of(source, steps, generator)
        else:
            make = _make_noisy_copies(example, generator)
        self.name = name
        self._buffer = RemoteBuffer(name, size)
        self._items = [make() for _ in range(_VARIETY)]
        self._stopping = False
        self._thread = threading.Thread(target=self._fill, name=f"fake-{name}", daemon=True)
        self._thread.start()
        run.on_close(self.close)

    def __repr__(self) -> str:
        return f"FakeBuffer({self.name!r})"

    def stats(self) -> dict[str, int]:
        return self._buffer.stats()

    def close(self) -> None:
        """Stop pushing."""
        self._stopping = True
        self._thread.join(5.0)

    def _fill(self) -> None:
        try:
            while not self._stopping:
                pushed = self._buffer.push(*self._items, drop=False)
                while not self._stopping and not pushed.done:
                    with contextlib.suppress(TimeoutError):
                        pushed.wait(_WAIT_S)
        except LudusError as error:
            if not self._stopping:
                log.error("the fake buffer %s stops: %s", self.name, error)


def _make_noisy_copies(example: Tree, generator: np.random.Generator) -> Callable[[], Tree]:
    def leaf(value: Any) -> Array:
        array = np.asarray(value)
        if array.dtype.kind != "f":
            return array.copy()
        noise = generator.standard_normal(array.shape) * 0.01 * (1.0 + np.abs(array))
        return np.asarray(array + noise, array.dtype)

    return lambda: map_tree(leaf, example)


def segments_of(model: RemoteModel, steps: int, generator: np.random.Generator) -> Callable[[], Tree]:
    """Function that makes segments like those of games that play with this model."""
    network = model.get_model()
    if isinstance(network, Policy):
        observation, action = network.observation_space, network.action_space
        observation.seed(int(generator.integers(1 << 30)))
        action.seed(int(generator.integers(1 << 30)))
        return lambda: _segment(
            _stack_time([_to_float32(observation.sample()) for _ in range(steps + 1)]),
            _stack_time([_to_float32(action.sample()) for _ in range(steps)]),
            steps,
            model.version,
            generator,
        )
    inputs = model.inputs
    if not inputs:
        log.warning("%s declares no inputs (forward_args): its fake observations are single numbers.", model)
        inputs = {"args": [{"array": ["float32", [1]]}], "kwargs": {}}
        choices = 2
    else:
        choices = _choices(network, inputs)
    args = [modules.example_of(spec, steps + 1) for spec in inputs["args"]]
    kwargs = {key: modules.example_of(spec, steps + 1) for key, spec in inputs["kwargs"].items()}
    examples = ({"observation": args[0] if len(args) == 1 else tuple(args)} if args else {}) | kwargs

    def random_like(array: Array) -> Array:
        if array.dtype.kind == "f":
            return generator.standard_normal(array.shape).astype(array.dtype)
        return generator.integers(0, 2, array.shape).astype(array.dtype)

    def make() -> Tree:
        observed = map_tree(random_like, examples)
        action = generator.integers(0, choices, steps)
        rest = _segment(observed.pop("observation", np.zeros(steps + 1, np.float32)), action, steps, model.version, generator)
        return rest | observed

    return make


def _segment(observation: Tree, action: Tree, steps: int, version: int, generator: np.random.Generator) -> dict[str, Tree]:
    terminated = generator.random(steps) < 0.01
    return {
        "observation": observation,
        "action": action,
        "reward": generator.standard_normal(steps).astype(np.float32),
        "terminated": terminated,
        "truncated": np.zeros(steps, np.bool_),
        "valid": np.ones(steps, np.bool_),
        "log_prob": -generator.exponential(size=steps).astype(np.float32),
        "value": generator.standard_normal(steps + 1).astype(np.float32),
        "version": np.full(steps, version, np.int64),
    }


def _stack_time(values: list[Tree]) -> Tree:
    return map_tree(lambda *items: np.stack(items), values[0], *values[1:])


def _to_float32(value: Any) -> Tree:
    """A sample of a space, with floating-point values as float32."""

    def leaf(item: Any) -> Array:
        array = np.asarray(item)
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    return map_tree(leaf, value)


def _choices(network: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Number of actions, taken from the size of the model's first output."""
    args = [map_tree(torch.from_numpy, modules.example_of(spec, 1)) for spec in inputs["args"]]
    kwargs = {key: map_tree(torch.from_numpy, modules.example_of(spec, 1)) for key, spec in inputs["kwargs"].items()}
    with torch.inference_mode():
        outputs = network.eval()(*args, **kwargs)
    found = next((leaf for _, leaf in leaves(outputs) if isinstance(leaf, Tensor)), None)
    return max(2, int(found.shape[-1])) if found is not None and found.ndim > 1 else 2
