"""Adapter of a user's network to the interface of a policy.

    class CustomModel(nn.Module):
        def __init__(self, obs_space, action_space, num_outputs, model_config, name, **custom_model_config): ...
        def forward(self, obs):                # [B, …] → outputs [B, num_outputs], value [B]
            return outputs, value              # or outputs alone, and value_function() → value

    recurrent:  initial_state(batch_size) → zeros [B, …];  forward(obs, state) → (outputs, value, state)

The model always gets one batch dimension; the adapter flattens, unrolls over time, and resets the state where an episode starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.plugins import did_you_mean
from ludus.core.spaces import array_spec
from ludus.core.tree import Tree, leaves, map_tree
from ludus.errors import ConfigError
from ludus.models.custom.loader import find_class, translate_user_errors
from ludus.models.image_encoder import chw
from ludus.models.layers import RunningNorm
from ludus.models.network_config import NetworkConfig
from ludus.models.networks import PolicyNetwork
from ludus.models.observation_encoder import pick_leaf, plan_encoders, replace_leaf

CONSTRUCTOR_ARGUMENTS = ("obs_space", "action_space", "num_outputs", "model_config", "name")
"""Positional arguments of every constructor, in this order, before the keywords of `custom_model_config`."""

_PLAIN = "def forward(self, obs): … return outputs, value"
_RECURRENT = "def forward(self, obs, state): … return outputs, value, state"


class ModelOutput(NamedTuple):
    """The unchecked output of a model."""

    outputs: Any
    value: Any
    """None if the model returns no value."""
    state: tuple[Any, ...]


class CustomNetwork(PolicyNetwork):
    """Wraps the user's module `self.model`. Raises ConfigError and UnknownName with the remedy."""

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], num_outputs: int, config: NetworkConfig
    ) -> None:
        super().__init__()
        assert config.custom_model is not None
        self.label = f"custom_model {config.custom_model}"
        recurrence = f"A custom model implements its own recurrence: initial_state(batch_size), and {_RECURRENT}."
        for is_set, key, remedy in (
            (config.core, "model.use_lstm" if config.core == "lstm" else "model.core", recurrence),
            (
                config.autoregressive,
                "model.autoregressive",
                "Leave one of them out: a custom model chooses the parts of an action independently.",
            ),
            (
                config.central,
                "centralized_value",
                "Leave one of them out: a custom model gets the observation of its agent only.",
            ),
        ):
            if is_set:
                raise ConfigError(f"{key} is set together with custom_model {config.custom_model!r}.", remedy)
        self.num_outputs = num_outputs
        self._specs = array_spec(observation_space)
        plan = plan_encoders(observation_space)
        self._vectors = [leaf for leaf in plan if leaf.kind == "vector" and np.issubdtype(leaf.space.dtype, np.floating)]
        self._categories = [
            (leaf.path, np.asarray(leaf.space.start)) for leaf in plan if leaf.kind == "onehot" and np.any(leaf.space.start)
        ]
        images = [chw(leaf.space.shape) for leaf in plan if leaf.kind == "image"]
        self.pixels = sum(h * w for _, h, w in images)
        cls = find_class(config.custom_model)
        self.recurrent = _has(cls, "initial_state")
        _check_methods(cls, self.label, self.recurrent)
        given = (observation_space, action_space, num_outputs, model_config_of(config, bool(images)), config.custom_model)
        self.model = _construct(cls, self.label, given, config.custom_model_config)
        self._single_state = self.recurrent and isinstance(self._initial(1), Tensor)  # not a tuple
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.parameters()):
            self._initialize_lazy_layers()

    # -- PolicyNetwork

    def normalise_observations(self) -> None:
        size = sum(leaf.size for leaf in self._vectors)
        if size:
            self.norm = RunningNorm(size)

    @torch.no_grad()
    def observe(self, observation: Tree) -> None:
        if self.norm is not None:
            self.norm.update(self._vector(self._flat(observation)[0]))

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        if not self.recurrent:
            return ()
        return tuple(part.detach() for part in _tuple_of(self._initial(rows)))

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        observation, lead = self._flat(observation)
        if 0 in lead:
            some = next(self.parameters())
            return some.new_zeros((*lead, self.num_outputs)), some.new_zeros(lead), state
        observation = self._prepare(observation)
        if not self.recurrent:
            outputs, value, _ = self._decide(observation, ())
            return outputs.unflatten(0, lead), value.unflatten(0, lead), state
        assert first is not None
        rows = lead[1]
        steps = []
        for t, begins in enumerate(first):
            state = tuple(torch.where(begins.reshape(-1, *(1 for _ in part.shape[1:])), 0.0, part) for part in state)
            now = map_tree(lambda x, t=t: x[t * rows : (t + 1) * rows], observation)
            outputs, value, state = self._decide(now, state)
            steps.append((outputs, value))
        return torch.stack([o for o, _ in steps]), torch.stack([v for _, v in steps]), state

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self._decide(self._prepare(observation), state)

    # -- inputs

    def _flat(self, observation: Tree) -> tuple[Tree, tuple[int, ...]]:
        """Merge all leading dimensions into one; also return them."""
        spec, leaf = next(leaves(self._specs))[1], next(leaves(observation))[1]
        lead = tuple(leaf.shape[: leaf.ndim - len(spec.shape)])
        if len(lead) == 1:
            return observation, lead
        return map_tree(lambda x: x.flatten(0, len(lead) - 1), observation), lead

    def _prepare(self, observation: Tree) -> Tree:
        """Count categories from 0, and normalise numbers if configured."""
        for path, start in self._categories:
            value = pick_leaf(observation, path)
            shifted = value - torch.as_tensor(start, device=value.device)
            observation = replace_leaf(
                observation, path, shifted.clamp(min=0)
            )  # padding is 0, which may be below the first category
        if self.norm is None:
            return observation
        parts = self.norm(self._vector(observation)).split([leaf.size for leaf in self._vectors], dim=-1)
        for leaf, part in zip(self._vectors, parts, strict=True):
            observation = replace_leaf(observation, leaf.path, part.reshape(-1, *leaf.space.shape))
        return observation

    def _vector(self, observation: Tree) -> Tensor:
        picked = [(pick_leaf(observation, leaf.path), leaf.size) for leaf in self._vectors]
        return torch.cat([value.reshape(-1, size) for value, size in picked], dim=-1)

    # -- outputs

    def _initial(self, rows: int) -> Any:
        with translate_user_errors(f"{self.label}: initial_state({rows}) failed"):
            return self.model.initial_state(rows)  # type: ignore[operator]

    def call_model(self, observation: Tree, state: tuple[Tensor, ...]) -> ModelOutput:
        """Call the model for N rows. Raises ConfigError if the output has the wrong form."""
        if not self.recurrent:
            output = self.model(observation)
            if isinstance(output, Tensor):
                return ModelOutput(output, self._value_function(), ())
            if isinstance(output, (tuple, list)) and len(output) == 2:
                no_value = output[1] is None or (isinstance(output[1], (list, tuple)) and not output[1])  # RLlib: `outputs, []`
                return ModelOutput(output[0], self._value_function() if no_value else output[1], ())
            raise ConfigError(
                f"{self.label}: forward returned {_describe_type(output)}.", f"It returns (outputs, value): {_PLAIN}"
            )
        output = self.model(observation, state[0] if self._single_state else state)
        if isinstance(output, (tuple, list)) and len(output) == 3:
            return ModelOutput(output[0], output[1], _tuple_of(output[2]))
        if isinstance(output, (tuple, list)) and len(output) == 2 and _has(type(self.model), "value_function"):
            return ModelOutput(output[0], self._value_function(), _tuple_of(output[1]))
        raise ConfigError(
            f"{self.label}: forward returned {_describe_type(output)}.", f"It returns (outputs, value, state): {_RECURRENT}"
        )

    def _value_function(self) -> Any:
        return self.model.value_function() if _has(type(self.model), "value_function") else None  # type: ignore[operator]

    def _decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        output = self.call_model(observation, state)
        outputs: Tensor = output.outputs.float()
        # A Q-network need not return a value: the state value is that of the best action.
        value: Tensor = outputs.amax(dim=-1) if output.value is None else output.value.reshape(-1).float()
        return outputs, value, tuple(part.float() for part in output.state)

    def _initialize_lazy_layers(self) -> None:
        """Lazy layers take their sizes from the first observation."""
        observation = map_tree(lambda spec: torch.from_numpy(spec.zeros(2)), self._specs)
        with translate_user_errors(f"{self.label}: forward failed"), torch.no_grad():
            self.call_model(self._prepare(observation), self.initial_state(2))
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.parameters()):
            raise ConfigError(f"{self.label} has a lazy layer that forward does not use.", "Remove it.")


def model_config_of(config: NetworkConfig, images: bool) -> dict[str, Any]:
    """Return the `model:` section as a plain dict with all keys."""
    section = {key: _to_lists(value) for key, value in asdict(config).items()}
    if section["fcnet_hiddens"] is None:
        section["fcnet_hiddens"] = [512] if images else [64, 64]
    if section["vf_share_layers"] is None:
        section["vf_share_layers"] = images
    section["lstm_cell_size"], section["use_lstm"] = section.pop("cell_size"), False
    del section["central"], section["byte_scales"]
    return section


def _to_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_lists(item) for key, item in value.items()}
    return [_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tuple_of(state: Any) -> tuple[Any, ...]:
    return tuple(state) if isinstance(state, (tuple, list)) else (state,)


def _describe_type(output: Any) -> str:
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {len(output)}"
    return f"a {type(output).__name__}"


# -- the class ----------------------------------------------------------------------------------------------------------


def _has(cls: type, method: str) -> bool:
    return callable(getattr(cls, method, None))


def _check_methods(cls: type[nn.Module], label: str, recurrent: bool) -> None:
    """Check without running the model whether it is written for this interface or for another."""
    if cls.forward is nn.Module.forward:
        raise ConfigError(f"{label}: {cls.__name__} has no forward.", f"Write  {_PLAIN}")
    if _has(cls, "get_initial_state") and not recurrent:
        raise ConfigError(
            f"{label}: {cls.__name__} has get_initial_state, which is never called.",
            f"Write  def initial_state(self, batch_size): return torch.zeros(batch_size, …)  and  {_RECURRENT}",
        )
    wanted = _RECURRENT if recurrent else _PLAIN
    parameters = inspect.signature(cls.forward).parameters.values()
    names = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    needed = [p.name for p in names if p.default is p.empty]
    if "input_dict" in needed or "seq_lens" in needed:
        raise ConfigError(
            f"{label}: forward({', '.join(needed)}) is the form of an RLlib ModelV2.",
            f'Write  {wanted}  (obs is what input_dict["obs"] was; without obs_flat, in the structure of obs_space)'
            + ("" if recurrent else "; if it is recurrent, also initial_state(batch_size)."),
        )
    taken = 2 if recurrent else 1
    variable = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > taken or (len(names) < taken and not variable):
        why = "it has initial_state, so it is recurrent" if recurrent else "it has no initial_state, so it keeps no state"
        raise ConfigError(f"{label}: forward takes ({', '.join(p.name for p in names)}), and {why}.", f"Write  {wanted}")


def _construct(cls: type[nn.Module], label: str, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> nn.Module:
    _check_signature(cls, label, keywords)
    with translate_user_errors(f"{label} cannot be built"):
        model = cls(*given, **_to_lists(keywords))
    if "_parameters" not in vars(model):
        raise ConfigError(f"{label}: __init__ does not call super().__init__().", "Call it first.")
    return model


def _check_signature(cls: type[nn.Module], label: str, keywords: Mapping[str, Any]) -> None:
    """Check that the constructor accepts its arguments, in terms of `custom_model_config`."""
    whole = f"def __init__(self, {', '.join(CONSTRUCTOR_ARGUMENTS)}, **custom_model_config)"
    if cls.__init__ is nn.Module.__init__:
        raise ConfigError(f"{label}: {cls.__name__} has no __init__.", f"Write  {whole}")
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < len(CONSTRUCTOR_ARGUMENTS) and not takes_any:
        raise ConfigError(f"{label}: __init__ takes ({', '.join(p.name for p in positional)}).", f"Write  {whole}")
    own = [p for p in parameters[len(CONSTRUCTOR_ARGUMENTS) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in own if p.default is p.empty and p.name not in keywords]
    if missing:
        raise ConfigError(
            f"{label} needs {', '.join(map(repr, missing))}, which custom_model_config does not give.",
            f"Add  custom_model_config: {{{missing[0]}: …}}  or give it a default.",
        )
    for key in keywords:
        if key in (*CONSTRUCTOR_ARGUMENTS, *(p.name for p in positional[: len(CONSTRUCTOR_ARGUMENTS)])):
            raise ConfigError(f"custom_model_config.{key}: every model gets {key} already.", "Use another name.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in own]
    for key in keywords:
        if key not in known:
            near = did_you_mean(key, known) if known else f"Its __init__ takes nothing beyond {', '.join(CONSTRUCTOR_ARGUMENTS)}."
            raise ConfigError(f"custom_model_config.{key} is not an argument of {label}.", near)
