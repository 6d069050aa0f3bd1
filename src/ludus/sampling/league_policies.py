"""Policies of league players: stored versions, scripts, served addresses, and random actions.

<league>/code/opponents.py       copies of the modules that the league's file names, for machines that do not have them
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

import gymnasium as gym
import numpy as np
import torch

from ludus.core import spaces, trust
from ludus.core.plugins import import_object
from ludus.core.tree import Array, Tree, leaves, map_tree, stack
from ludus.core.types import Bools
from ludus.envs.pettingzoo import sample_action
from ludus.errors import Damaged, IncompatibleCheckpoint, UnknownName, Untrusted, UsageError
from ludus.models.centralized_critic import actor_policy
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy, Decision, State
from ludus.models.inference.served_policy import ServedAgent
from ludus.models.policy import BatchDecision, Policy
from ludus.models.weights.version_store import load_version
from ludus.protocol.codec import SeatSpaces
from ludus.protocol.spec import read_token
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

RULE: Final = "rule:"
"""Prefix of a script of the environment."""
RANDOM_RULE: Final = "rule:random"
DEFAULT_RULE: Final = "rule"
"""The default player of a game of a gamecore server."""
SCRIPT: Final = trust.SCRIPT
ADDRESS: Final = ("http://", "https://")
"""Prefixes of a served address."""
CODE: Final = "code"
"""Folder of a league with copies of modules."""


class ModelKind(Enum):
    """What the model of a player can be."""

    RULE = "rule"
    """`rule:random`, or another script of the environment."""
    SCRIPT = "script"
    """`script:module:function`."""
    STORED = "stored"
    """A run, RUN/best, RUN@VERSION or a checkpoint; the league has a copy of it."""
    SERVED = "served"
    """The address of a served agent, `http://HOST:PORT`."""


def kind_of_model(model: str) -> ModelKind:
    """The kind of a player's model. Raises UsageError if no player of a league can have it."""
    if model == DEFAULT_RULE or model.startswith(RULE):
        return ModelKind.RULE
    if model.startswith(SCRIPT):
        return ModelKind.SCRIPT
    if model.startswith(ADDRESS):
        return ModelKind.SERVED
    if model.endswith(".onnx"):
        raise UsageError(
            f"{model} is an export, which cannot play in training.",
            f"Name a run, RUN/best, RUN@VERSION or a checkpoint; {RANDOM_RULE}, {SCRIPT}module:function, or http://HOST:PORT.",
        )
    return ModelKind.STORED


class WithSpaces(Protocol):
    """Anything with the spaces of a policy."""

    @property
    def observation_space(self) -> gym.Space[Any]: ...
    @property
    def action_space(self) -> gym.Space[Any]: ...


@dataclass(frozen=True)
class PolicySpaces:
    """The spaces that the policies of players have to have."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


Script = Callable[[Tree, Any], Any]
"""(observation, action mask or None) → action."""


def script_name(model: str) -> str | None:
    """The name of a script of the environment, empty for the default one; None: the model is something else."""
    if model == DEFAULT_RULE:
        return ""
    return model.removeprefix(RULE) if model.startswith(RULE) else None


def is_game_script(model: str) -> bool:
    """Whether the model is a script of the environment, other than random actions."""
    return script_name(model) is not None and model != RANDOM_RULE


class GiveUp(Protocol):
    """Called with the reason when a loaded policy cannot be used any more. `temporary`: that may change by itself."""

    def __call__(self, reason: str, temporary: bool = False) -> None: ...


@dataclass(frozen=True)
class LeaguePolicies:
    """The policies of one player."""

    by_agent: Mapping[str, ActingPolicy]
    """Agent → policy; "" plays all agents without one. Empty: random actions."""
    served: ServedAgent | None = None

    def close(self) -> None:
        if self.served is not None:
            self.served.close()


def load_league_policies(
    league: Path, model: str, like: WithSpaces, give_up: GiveUp, *, token_file: str = "", agents: Sequence[str] = ()
) -> LeaguePolicies:
    """Load the policies of a player. `agents`: names of all agents, which may be seats of a served address.

    `token_file`: of a served address. Raises LudusError, OSError; of these Unreachable if a served address does not answer.
    """
    if model.startswith(ADDRESS):
        game = SeatSpaces(like.observation_space, like.action_space)
        served = ServedAgent(model, read_player_token(model, token_file), game, agents, give_up)
        return LeaguePolicies(served.policies, served)
    policy = load_league_policy(league, model, like, give_up)
    return LeaguePolicies({} if policy is None else {"": policy})


def read_player_token(address: str, token_file: str) -> str | None:
    """The token of a served address; None: it needs none. The journal or another process may have named both.

    Raises Untrusted unless the user gave them together, UsageError if the file cannot be read.
    """
    if not token_file:
        return None
    trust.check_token(address, token_file)
    return read_token(token_file)


def load_league_policy(
    league: Path, model: str, like: WithSpaces, on_failure: Callable[[str], None] = lambda reason: None
) -> ActingPolicy | None:
    """Load the policy of a player; None: random actions. `like`: has the spaces that the policy must have.

    `model`: `rule:random`, `script:module:function`, or `RUN@VERSION` with a run directory relative to the league. `on_failure` is
    called with the reason when a script raises an exception later. Raises LudusError, OSError.
    """
    if model == RANDOM_RULE:
        return None
    if model.startswith(SCRIPT):
        return ScriptedPolicy(load_script(league, model), like, on_failure)
    if model.startswith(RULE):
        raise UnknownName(
            f"The environment has no script {model.removeprefix(RULE)!r}.", f"Use {RANDOM_RULE}, or {SCRIPT}module:function."
        )
    run, _, version = model.rpartition("@")
    if not run or not version.isdecimal():
        raise IncompatibleCheckpoint(
            f"{model!r} does not name a policy.", f"Write RUN@VERSION, {RANDOM_RULE} or {SCRIPT}module:function."
        )
    store = LocalStore(league / run)
    names = store.list("models")
    if len(names) != 1:
        raise IncompatibleCheckpoint(f"{league / run} has the models {', '.join(names) or '(none)'}; a player has one.")
    with torch.random.fork_rng(devices=[]):
        policy = actor_policy(load_version(store, names[0], int(version))[0])
    if not all(bool(torch.isfinite(part).all()) for part in policy.state_dict().values() if part.is_floating_point()):
        raise Damaged(f"{model} has weights that are not finite.")
    for kind in ("observation_space", "action_space"):
        mine, theirs = getattr(like, kind), getattr(policy, kind)
        if spaces.array_spec(mine) != spaces.array_spec(theirs):
            raise IncompatibleCheckpoint(f"{model} has the {kind.replace('_', ' ')} {theirs}; here it is {mine}.")
    return policy


def load_script(league: Path | None, model: str) -> Script:
    """Import the function of `script:module:function`; with `league` also from its copies. Raises UsageError."""
    name = model.removeprefix(SCRIPT)
    if league is not None:
        make_importable(league, name)
    function = import_object(name, "player", lambda target, project: callable(target))
    if not callable(function):
        raise UsageError(
            f"{name!r} is a {type(function).__name__}, not a function.",
            "A script is called with an observation and an action mask.",
        )
    script: Script = function
    return script


def make_importable(league: Path, name: str) -> None:
    """If the module of `module:function` is not on the import path but the league has a copy of it, import it from there from now on.

    Copies are stored data, even if the user gave the name, and any other module is then found among them too: they are used only if the
    user trusts all names. Raises Untrusted.
    """
    module = name.partition(":")[0]
    try:
        trust.find_module(module, name)
    except UnknownName:
        if not _has_copy(league, module):
            return
        if not trust.is_allowed(trust.EVERYTHING):
            raise Untrusted(
                f"{module} is not on the import path. The league has a copy in {league / CODE}, which is stored data: nothing was imported.",
                f"Run the command where {module} can be imported, or add --trust to import the copies. docs/security.md has the rules.",
            ) from None
        import_copies(league)


def _has_copy(league: Path, module: str) -> bool:
    path = league / CODE / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def import_copies(league: Path) -> None:
    """Search modules also in the copies of the league, after all other places. The user has to have consented."""
    code = str((league / CODE).absolute())
    if code not in sys.path:
        sys.path.append(code)


def freeze_weights(policy: ActingPolicy) -> None:
    """Prepare a policy whose weights never change for acting."""
    if isinstance(policy, Policy):
        with torch.inference_mode():
            policy.network.freeze(values=False)  # never thawed


def random_policy(like: WithSpaces, seed: int) -> ScriptedPolicy:
    """Uniformly random actions among those that are allowed."""
    random = np.random.default_rng(seed)
    return ScriptedPolicy(lambda seen, mask: sample_action(like.action_space, mask, random), like, lambda reason: None)


class ScriptedPolicy:
    """A script as a policy. After an exception of the script it has no decisions any more: all rows are `lost`."""

    recurrent = False

    def __init__(self, script: Script, like: WithSpaces, on_failure: Callable[[str], None]) -> None:
        self._script, self._on_failure, self._failed = script, on_failure, False
        self.observation_space: gym.Space[Any] = like.observation_space
        self.action_space: gym.Space[Any] = like.action_space
        self._parse = spaces.SpaceParser(like.action_space, "the action of the script")
        self._random = np.random.default_rng(0)

    def state_spec(self) -> Tree:
        return ()

    def draw_noise(self, rows: int, generator: torch.Generator) -> Array:
        return np.zeros((rows, 0), np.float32)

    def act(
        self, observation: Tree, state: State = (), mask: Array | None = None, noise: Array | None = None
    ) -> BatchDecision:  # fmt: skip
        """Lost rows have a random action."""
        rows = len(next(leaf for _, leaf in leaves(observation)))
        actions, lost = [], np.zeros(rows, np.bool_)
        for row in range(rows):
            one = map_tree(lambda part: np.asarray(part)[row], observation)  # noqa: B023 - called at once
            allowed = None if mask is None else np.asarray(mask)[row]
            chosen = self._call_script(one, allowed)
            lost[row] = chosen is None
            actions.append(self._parse(sample_action(self.action_space, allowed, self._random)) if chosen is None else chosen)
        action, zeros = stack(actions), np.zeros(rows, np.float32)
        return BatchDecision(action, action, zeros, zeros, (), lost if lost.any() else None)

    def _call_script(self, observation: Tree, mask: Array | None) -> Tree | None:
        """The action of the script; None after its first exception, which is reported."""
        if self._failed:
            return None
        try:
            return self._parse(self._script(observation, mask))
        except Exception as error:  # code of the user; the training player must not stop because of it
            self._failed = True
            log.exception("the script %s failed", self._script)
            self._on_failure(f"its script failed: {error!r}")
            return None


class ScriptDecider:
    """A script for the sessions of one match. If it fails, games are refused (410) by the actor."""

    def __init__(self, policy: BatchedPolicy[ScriptedPolicy]) -> None:
        self._batched = policy
        self.lost = False
        """Whether the script has failed: the match must not be counted."""

    @property
    def policy(self) -> ScriptedPolicy:
        return self._batched.policy

    def decide(
        self, observation: Tree, state: State | None = None, mask: Bools | None = None, temperature: float | None = None
    ) -> asyncio.Future[Decision]:
        decided = self._batched.decide(observation, state, mask, temperature)
        decided.add_done_callback(self._note)
        return decided

    def _note(self, decided: asyncio.Future[Decision]) -> None:
        self.lost |= not decided.cancelled() and decided.exception() is None and decided.result().lost

    def close(self) -> None:
        """The match is over."""
