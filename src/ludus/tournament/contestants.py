"""Contestants of a battle: a run, checkpoint, version or export, an agent served over HTTP, a built-in player of the game, or a function.

contestant("runs/arena/PPO_…")            its newest checkpoint; also RUN/best, RUN/checkpoints/000120, s3://…
contestant("runs/arena/PPO_…@131")        version 131, of a checkpoint or kept in models/
contestant("agent.onnx")                  an exported policy, run by onnxruntime
contestant("http://10.0.0.5:8000")        an agent served there
contestant("rule:hard")                   a built-in player of the game; "rule": the game's default one
contestant("script:bots:centre_first")    a function of yours: (observation, action mask or None) → action
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ludus.config.schema import EXTERNAL
from ludus.config.validation import parse_external_config
from ludus.core import trust
from ludus.core.plugins import did_you_mean
from ludus.core.types import DEFAULT_MODEL
from ludus.errors import IncompatibleCheckpoint, NotFound, UsageError
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import agents_of
from ludus.experiments.runs.remote_runs import directory_of, display_path, is_remote, store_of
from ludus.experiments.validation.game_seats import seats_of, single_model_seats
from ludus.models.centralized_critic import actor_policy
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.weights import version_store
from ludus.sampling.league_policies import SCRIPT, Script, load_script
from ludus.sampling.trained_agent import TrainedAgent

RULE: Final = "rule"
_ARENA_RULES: Final = ("easy", "medium", "hard", "random", "nearest")
"""Suggested when a name is written without `rule:`."""
ONLY_SEAT: Final = ""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
_VERSION = re.compile(r"(.+)@0*([0-9]+)(\?.*)?")  # the version precedes the query of a store's URL
_WEIGHTS = ".safetensors"
_EXPORT = ".onnx"


@dataclass(frozen=True)
class ScriptedContestant:
    """A built-in player of the game. An empty `name` is the game's default player."""

    name: str

    @property
    def label(self) -> str:
        return f"{RULE}:{self.name}" if self.name else RULE

    def to_json(self) -> dict[str, Any]:
        return {"name": self.label, "kind": RULE}


@dataclass(frozen=True)
class ServedContestant:
    """An agent that is served over HTTP."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return self.url

    def to_json(self) -> dict[str, Any]:
        return {"name": self.url, "kind": "served"}


@dataclass(frozen=True)
class FunctionContestant:
    """A function of the user; `label` is its name, `script:module:function`. It plays in this process only."""

    label: str
    function: Script = field(repr=False)
    env: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`env` and `config:` of an experiment with the environment that it was written for; empty: unknown."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.label, "kind": "script"}


@dataclass(frozen=True)
class TrainedContestant:
    """A loaded policy and what is known of its training."""

    label: str
    policy: ActingPolicy
    version: int = 0
    where: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`config:` of its run."""
    seats: Mapping[str, ActingPolicy] = field(default_factory=dict)
    """Policies by the seat or agent names of the training; the key is empty if it was a single-agent environment."""
    env: str = ""
    several: tuple[str, ...] = ()
    """Models of the run if none was chosen: each plays only its own agents."""

    @property
    def every(self) -> int | None:
        """Ticks between decisions in training; None if not configured."""
        every = (self.settings.get("env_config") or {}).get("every")
        return every if isinstance(every, int) else None

    def to_json(self) -> dict[str, Any]:
        kind = "onnx" if isinstance(self.policy, OnnxPolicy) else "checkpoint"
        return {"name": self.label, "kind": kind, "where": self.where, "version": self.version}


Contestant = ScriptedContestant | ServedContestant | FunctionContestant | TrainedContestant
ContestantSource = str | Path | Result | TrainedAgent


def contestant(what: ContestantSource, *, model: str | None = None, token: str | None = None) -> Contestant:
    """Resolve a name. `model`: which model of a run. `token`: for a served address. Raises UsageError, Damaged, IncompatibleCheckpoint."""
    if isinstance(what, TrainedAgent):
        return TrainedContestant(
            f"agent@{what.version}", actor_policy(what.policy), what.version, seats={ONLY_SEAT: actor_policy(what.policy)}
        )
    text = str(what.run_dir if isinstance(what, Result) else what)
    if text == RULE or text.startswith(f"{RULE}:"):
        return ScriptedContestant(text.partition(":")[2])
    if text.startswith(SCRIPT):
        return FunctionContestant(text, load_script(None, text))
    if text.startswith(("http://", "https://")):
        return ServedContestant(text.rstrip("/"), token)
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        return ServedContestant(f"http://{text}", token)
    try:
        return _load_trained(text, model)
    except NotFound as error:
        raise UsageError(error.message, _hint(text) or error.hint) from error


def _hint(text: str) -> str:
    """Hint for a name that does not exist."""
    if "/" in text:
        return ""
    hint = did_you_mean(text.lower(), _ARENA_RULES)
    return hint.replace("'", f"'{RULE}:", 1) if hint.startswith("Did you mean") else f"{hint} {RULE}:NAME is a built-in player."


def _load_trained(text: str, model: str | None) -> TrainedContestant:
    if text.endswith(_WEIGHTS):
        return _load_file(text, model)
    if text.endswith(_EXPORT):
        return _load_export(Path(text))
    version = _VERSION.fullmatch(text)
    if version is not None and (is_remote(directory_of(text)) or not directory_of(text).exists()):
        return _load_version(directory_of(version[1] + (version[3] or "")), int(version[2]), model)
    run, stored = checkpoint.open_checkpoint(text)
    return _load_checkpoint(run, stored, model)


def _load_file(text: str, model: str | None) -> TrainedContestant:
    """RUN/models/NAME/000120.safetensors, or RUN/checkpoints/000120/NAME.safetensors."""
    path = directory_of(text)
    name = path.name.removesuffix(_WEIGHTS)
    above = path.parent.parent
    if above.name == "models" and name.isdecimal():
        return _load_version(above.parent, int(name), model or path.parent.name)
    if above.name == checkpoint.FOLDER and not name.endswith(".optimizer"):
        run, stored = checkpoint.open_checkpoint(path.parent)
        return _load_checkpoint(run, stored, model or name)
    raise UsageError(f"{text} is not in the versions or checkpoints of a run.", "Use RUN/models/NAME/000120.safetensors.")


def _load_export(path: Path) -> TrainedContestant:
    """Raises NotFound, Damaged, MissingExtra; UsageError if it is another kind of model."""
    if not path.expanduser().is_file():
        raise NotFound(f"There is no file {path}.", "`ludus export` writes such files.")
    policy = OnnxPolicy(path, value=False)
    settings = {"env_config": policy.facts.get("trained") or {}}
    return TrainedContestant(
        f"{path.stem}{_EXPORT}@{policy.version}", policy, policy.version, str(path), settings, {ONLY_SEAT: policy}
    )


def _load_version(run: Path, number: int, model: str | None) -> TrainedContestant:
    """From the newest checkpoint that has the version, else from the stored versions, as `ludus serve --version`. Raises NotFound."""
    trust.note_run(run)
    store = store_of(run)
    available: set[int] = set()
    for name in reversed(checkpoint.names(store)):
        versions = checkpoint.versions_of(store, name)
        available |= set(versions.values())
        if number in [version for key, version in versions.items() if model in (None, key)]:
            chosen = model or next(key for key, version in versions.items() if version == number)
            return _load_checkpoint(run, checkpoint.read(store, name), chosen, required=model is not None)
    for name in [model] if model is not None else store.list("models"):
        kept = version_store.list_versions(store, name)
        available |= set(kept)
        if number in kept:
            policy = actor_policy(version_store.load_version(store, name, number)[0])
            where = display_path(run / "models" / name / f"{number:06d}{_WEIGHTS}")
            newest = checkpoint.newest_name(store)
            experiment: Mapping[str, Any] = (
                {"env": "", "config": {}} if newest is None else checkpoint.read(store, newest).state["config"]
            )
            if model is None and set(agents_of(experiment["config"]).values()) - {name}:
                raise UsageError(
                    f"{display_path(run)} has version {number} of {name!r} but no checkpoint with all of its models.",
                    "Choose one: --model-a, --model-b.",
                )
            seats = dict.fromkeys(single_model_seats(experiment, name), policy)
            return TrainedContestant(
                f"{run.name}@{number}", policy, number, where, experiment["config"], seats, experiment["env"]
            )
    if not available and not is_remote(run) and not run.is_dir():
        raise NotFound(f"There is no run at {run}.", "`ludus runs list` lists the runs.")
    known = ", ".join(map(str, sorted(available))) or "none"
    raise NotFound(f"{display_path(run)} has no version {number}; it has {known}.", "A checkpoint is RUN/checkpoints/000120.")


def _config(stored: checkpoint.Checkpoint) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = stored.state["config"]["config"]
    return settings


def _load_checkpoint(
    run: Path, stored: checkpoint.Checkpoint, model: str | None, *, required: bool | None = None
) -> TrainedContestant:
    """`required`: `model` plays all agents; by default it does if it is given."""
    required = model is not None if required is None else required
    chosen = _choose_model(stored, model)
    several = () if required or not agents_of(_config(stored)) or len(stored.weights) == 1 else tuple(stored.weights)
    policies = {name: stored.policy(name) for name in stored.weights}
    version = int(stored.state["models"][chosen]["version"])
    where = display_path(run / checkpoint.FOLDER / stored.name)
    seats = {seat: policies[name] for seat, name in _seats(stored, chosen, required=required).items()}
    env = stored.state["config"]["env"]
    return TrainedContestant(f"{run.name}@{version}", policies[chosen], version, where, _config(stored), seats, env, several)


def _choose_model(stored: checkpoint.Checkpoint, model: str | None) -> str:
    """The model that plays, or the first one if each plays its own agents. Raises IncompatibleCheckpoint, UsageError."""
    names = list(stored.weights)
    if model is not None:
        if model not in names:
            raise IncompatibleCheckpoint(f"Checkpoint {stored.name} has no model {model!r}.", did_you_mean(model, names))
        return model
    if len(names) == 1 or DEFAULT_MODEL in names:
        return names[0] if len(names) == 1 else DEFAULT_MODEL
    if agents_of(_config(stored)):
        return names[0]
    raise UsageError(f"Checkpoint {stored.name} has the models {', '.join(names)}.", "Choose one: --model-a, --model-b.")


def _seats(stored: checkpoint.Checkpoint, chosen: str, *, required: bool) -> Mapping[str, str]:
    """Seat → model, as in training. `required`: the chosen model plays all seats."""
    config = stored.state["config"]
    if config["env"] == EXTERNAL:
        return seats_of(parse_external_config(config["config"]["env_config"])).seats
    mapping = agents_of(config["config"])
    if not mapping:
        return single_model_seats(config, chosen)
    return dict.fromkeys(mapping, chosen) if required else mapping
