"""A network of the user's own, in the form in which a policy uses it.

    class CustomModel(nn.Module):
        def __init__(self, obs_space, action_space, num_outputs, model_config, name, **custom_model_config): ...
        def forward(self, obs):                # [B, …] → outputs [B, num_outputs], value [B]
            return outputs, value              # or outputs alone, and value_function() → value

    recurrent:  initial_state(batch_size) → zeros [B, …];  forward(obs, state) → (outputs, value, state)

The model always sees one dimension of rows; the adapter here flattens, unrolls over time, and sets the state back where an
episode starts.
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
from ludus.models.custom.loader import find_class, told
from ludus.models.networks import NetworkConfig, PolicyNetwork, RunningNorm, _chw, _pick, _plan, _replace

GIVEN = ("obs_space", "action_space", "num_outputs", "model_config", "name")
"""What every constructor is given, in this order, before the keywords of `custom_model_config`."""

_PLAIN = "def forward(self, obs): … return outputs, value"
_RECURRENT = "def forward(self, obs, state): … return outputs, value, state"


class Answer(NamedTuple):
    """What a model said, as it said it."""

    outputs: Any
    value: Any
    """None when it does not contain values."""
    state: tuple[Any, ...]


class CustomNetwork(PolicyNetwork):
    """Around the user's module, which is `self.model`. Raises ConfigError and UnknownName with the remedy."""

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], num_outputs: int, config: NetworkConfig
    ) -> None:
        super().__init__()
        assert config.custom_model is not None
        self.shown = f"custom_model {config.custom_model}"
        if config.core is not None:
            raise ConfigError(
                f"model.{'use_lstm' if config.core == 'lstm' else 'core'} is set beside custom_model {config.custom_model!r}.",
                f"A model of your own has its recurrence inside: initial_state(batch_size), and {_RECURRENT}.",
            )
        if config.autoregressive:
            raise ConfigError(
                f"model.autoregressive is set beside custom_model {config.custom_model!r}.",
                "Leave one of them out: the parts of an action that a model of your own answers for are chosen each by itself.",
            )
        if config.central:
            raise ConfigError(
                f"centralized_value is set beside custom_model {config.custom_model!r}.",
                "Leave one of them out: a model of your own sees what its agent sees.",
            )
        self.num_outputs = num_outputs
        self._specs = array_spec(observation_space)
        plan = _plan(observation_space)
        self._vectors = [leaf for leaf in plan if leaf.kind == "vector" and np.issubdtype(leaf.space.dtype, np.floating)]
        self._categories = [
            (leaf.path, np.asarray(leaf.space.start)) for leaf in plan if leaf.kind == "onehot" and np.any(leaf.space.start)
        ]
        pictures = [_chw(leaf.space.shape) for leaf in plan if leaf.kind == "image"]
        self.pixels = sum(h * w for _, h, w in pictures)
        cls = find_class(config.custom_model)
        self.recurrent = _has(cls, "initial_state")
        _check_methods(cls, self.shown, self.recurrent)
        given = (observation_space, action_space, num_outputs, model_config_of(config, bool(pictures)), config.custom_model)
        self.model = _constructed(cls, self.shown, given, config.custom_model_config)
        self._lone = False
        """Whether the state is one tensor, outside of a tuple."""
        if self.recurrent:
            self._lone = isinstance(self._initial(1), Tensor)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.parameters()):
            self._materialise()

    # -- what a policy asks

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
        seen, lead = self._flat(observation)
        if 0 in lead:
            some = next(self.parameters())
            return some.new_zeros((*lead, self.num_outputs)), some.new_zeros(lead), state
        seen = self._prepared(seen)
        if not self.recurrent:
            outputs, value, _ = self._decided(seen, ())
            return outputs.unflatten(0, lead), value.unflatten(0, lead), state
        assert first is not None
        rows = lead[1]
        steps = []
        for t, begins in enumerate(first):
            state = tuple(torch.where(_beside(begins, part), 0.0, part) for part in state)
            now = map_tree(lambda x, t=t: x[t * rows : (t + 1) * rows], seen)
            outputs, value, state = self._decided(now, state)
            steps.append((outputs, value))
        return torch.stack([o for o, _ in steps]), torch.stack([v for _, v in steps]), state

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self._decided(self._prepared(observation), state)

    # -- what the model is shown

    def _flat(self, observation: Tree) -> tuple[Tree, tuple[int, ...]]:
        """All leading dimensions as one, and which they were."""
        spec, leaf = next(leaves(self._specs))[1], next(leaves(observation))[1]
        lead = tuple(leaf.shape[: leaf.ndim - len(spec.shape)])
        if len(lead) == 1:
            return observation, lead
        return map_tree(lambda x: x.flatten(0, len(lead) - 1), observation), lead

    def _prepared(self, seen: Tree) -> Tree:
        """Categories counted from 0, numbers normalised if they are to be."""
        for path, start in self._categories:
            value = _pick(seen, path)
            shifted = value - torch.as_tensor(start, device=value.device)
            seen = _replace(seen, path, shifted.clamp(min=0))  # padding is 0, whatever the first category is called
        if self.norm is None:
            return seen
        parts = self.norm(self._vector(seen)).split([leaf.size for leaf in self._vectors], dim=-1)
        for leaf, part in zip(self._vectors, parts, strict=True):
            seen = _replace(seen, leaf.path, part.reshape(-1, *leaf.space.shape))
        return seen

    def _vector(self, seen: Tree) -> Tensor:
        picked = [(_pick(seen, leaf.path), leaf.size) for leaf in self._vectors]
        return torch.cat([value.reshape(-1, size) for value, size in picked], dim=-1)

    # -- what the model says

    def _initial(self, rows: int) -> Any:
        try:
            return self.model.initial_state(rows)  # type: ignore[operator]
        except Exception as error:  # the user's code may raise anything
            raise told(f"{self.shown}: initial_state({rows}) failed", error) from error

    def answer(self, seen: Tree, state: tuple[Tensor, ...]) -> Answer:
        """One call of the model for N rows. Raises ConfigError when that is not the form of an answer."""
        if not self.recurrent:
            said = self.model(seen)
            if isinstance(said, Tensor):
                return Answer(said, self._own_value(), ())
            if isinstance(said, (tuple, list)) and len(said) == 2:
                return Answer(said[0], self._own_value() if _nothing(said[1]) else said[1], ())
            raise ConfigError(f"{self.shown}: forward returned {_told(said)}.", f"It returns (outputs, value): {_PLAIN}")
        said = self.model(seen, state[0] if self._lone else state)
        if isinstance(said, (tuple, list)) and len(said) == 3:
            return Answer(said[0], said[1], _tuple_of(said[2]))
        if isinstance(said, (tuple, list)) and len(said) == 2 and _has(type(self.model), "value_function"):
            return Answer(said[0], self._own_value(), _tuple_of(said[1]))
        raise ConfigError(f"{self.shown}: forward returned {_told(said)}.", f"It returns (outputs, value, state): {_RECURRENT}")

    def _own_value(self) -> Any:
        return self.model.value_function() if _has(type(self.model), "value_function") else None  # type: ignore[operator]

    def _decided(self, seen: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        said = self.answer(seen, state)
        outputs: Tensor = said.outputs.float()
        # A model of action values need not say more: a state is worth its best action.
        value: Tensor = outputs.amax(dim=-1) if said.value is None else said.value.reshape(-1).float()
        return outputs, value, tuple(part.float() for part in said.state)

    def _materialise(self) -> None:
        """Lazy layers take their sizes from the first observation they see."""
        seen = map_tree(lambda spec: torch.from_numpy(spec.zeros(2)), self._specs)
        try:
            with torch.no_grad():
                self.answer(self._prepared(seen), self.initial_state(2))
        except Exception as error:  # the user's code may raise anything
            raise told(f"{self.shown}: forward failed", error) from error
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.parameters()):
            raise ConfigError(f"{self.shown} has a lazy layer that forward does not use.", "Remove it.")


def model_config_of(config: NetworkConfig, pictures: bool) -> dict[str, Any]:
    """The `model:` section as a plain dict of the model's own, every key with its value."""
    section = {key: _listed(value) for key, value in asdict(config).items()}
    if section["fcnet_hiddens"] is None:
        section["fcnet_hiddens"] = [512] if pictures else [64, 64]
    if section["vf_share_layers"] is None:
        section["vf_share_layers"] = pictures
    section["lstm_cell_size"], section["use_lstm"] = section.pop("cell_size"), False
    del section["central"], section["byte_scales"]
    return section


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _beside(begins: Tensor, part: Tensor) -> Tensor:
    return begins.reshape(-1, *(1 for _ in part.shape[1:]))


def _tuple_of(state: Any) -> tuple[Any, ...]:
    return tuple(state) if isinstance(state, (tuple, list)) else (state,)


def _nothing(said: Any) -> bool:
    return said is None or (isinstance(said, (list, tuple)) and not said)  # `outputs, []` is how others write it


def _told(said: Any) -> str:
    if isinstance(said, (tuple, list)):
        return f"a {type(said).__name__} of {len(said)}"
    return f"a {type(said).__name__}"


# -- the class ----------------------------------------------------------------------------------------------------------


def _has(cls: type, method: str) -> bool:
    return callable(getattr(cls, method, None))


def _check_methods(cls: type[nn.Module], shown: str, recurrent: bool) -> None:
    """What can be seen without running anything: whether it is written for this contract or for another."""
    if cls.forward is nn.Module.forward:
        raise ConfigError(f"{shown}: {cls.__name__} has no forward.", f"Write  {_PLAIN}")
    if _has(cls, "get_initial_state") and not recurrent:
        raise ConfigError(
            f"{shown}: {cls.__name__} has get_initial_state, which is never called.",
            f"Write  def initial_state(self, batch_size): return torch.zeros(batch_size, …)  and  {_RECURRENT}",
        )
    wanted = _RECURRENT if recurrent else _PLAIN
    names = [
        p for p in inspect.signature(cls.forward).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = names[1:]
    needed = [p.name for p in names if p.default is p.empty]
    if "input_dict" in needed or "seq_lens" in needed:
        raise ConfigError(
            f"{shown}: forward({', '.join(needed)}) is the form of an RLlib ModelV2.",
            f'Write  {wanted}  (obs is what input_dict["obs"] was; without obs_flat, in the structure of obs_space)'
            + ("" if recurrent else "; if it is recurrent, also initial_state(batch_size)."),
        )
    taken = 2 if recurrent else 1
    variable = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(cls.forward).parameters.values())
    if len(needed) > taken or (len(names) < taken and not variable):
        why = "it has initial_state, so it is recurrent" if recurrent else "it has no initial_state, so it keeps no state"
        raise ConfigError(f"{shown}: forward takes ({', '.join(p.name for p in names)}), and {why}.", f"Write  {wanted}")


def _constructed(cls: type[nn.Module], shown: str, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> nn.Module:
    _check_signature(cls, shown, keywords)
    try:
        model = cls(*given, **_listed(keywords))
    except Exception as error:  # the user's code may raise anything
        hint = "Call super().__init__() first." if "before Module.__init__() call" in str(error) else ""
        raise told(f"{shown} cannot be built", error, hint) from error
    if "_parameters" not in vars(model):
        raise ConfigError(f"{shown}: __init__ does not call super().__init__().", "Call it first.")
    return model


def _check_signature(cls: type[nn.Module], shown: str, keywords: Mapping[str, Any]) -> None:
    """That the constructor takes what it will be given, said in terms of `custom_model_config`."""
    whole = f"def __init__(self, {', '.join(GIVEN)}, **custom_model_config)"
    if cls.__init__ is nn.Module.__init__:
        raise ConfigError(f"{shown}: {cls.__name__} has no __init__.", f"Write  {whole}")
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < len(GIVEN) and not takes_any:
        raise ConfigError(f"{shown}: __init__ takes ({', '.join(p.name for p in positional)}).", f"Write  {whole}")
    own = [p for p in parameters[len(GIVEN) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in own if p.default is p.empty and p.name not in keywords]
    if missing:
        raise ConfigError(
            f"{shown} needs {', '.join(map(repr, missing))}, which custom_model_config does not give.",
            f"Add  custom_model_config: {{{missing[0]}: …}}  or give it a default.",
        )
    for key in keywords:
        if key in (*GIVEN, *(p.name for p in positional[: len(GIVEN)])):
            raise ConfigError(f"custom_model_config.{key}: every model is given {key} anyway.", "Call yours another name.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in own]
    for key in keywords:
        if key not in known:
            near = did_you_mean(key, known) if known else f"Its __init__ takes nothing beyond {', '.join(GIVEN)}."
            raise ConfigError(f"custom_model_config.{key} is not an argument of {shown}.", near)
