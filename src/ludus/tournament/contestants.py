"""Who can take part in a battle, by name: a checkpoint, a version, a run, an export, a served address, or a built-in player.

contestant("runs/arena/PPO_…")            its newest checkpoint; also RUN/best, RUN/checkpoints/000120, s3://…
contestant("runs/arena/PPO_…@131")        version 131, of a checkpoint or kept in models/
contestant("agent.onnx")                  an exported policy, run by onnxruntime
contestant("http://10.0.0.5:8000")        whoever answers there
contestant("rule:hard")                   a built-in player of the game; "rule": the one that it plays by itself
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
from ludus.experiments.model_choice import agents_of
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import directory_of, is_remote, shown, store_of
from ludus.experiments.validation.game_seats import seats_of, single_model_seats
from ludus.models.centralized_critic import actor_policy
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.weights import version_store
from ludus.sampling.trained_agent import TrainedAgent

RULE: Final = "rule"
RULES: Final = ("easy", "medium", "hard", "random", "nearest")
"""Those of the Arena, for whoever forgets to write `rule:`."""
ONLY_SEAT: Final = ""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
_VERSION = re.compile(r"(.+)@0*([0-9]+)(\?.*)?")  # of a store, before what is said of it after the question mark
_WEIGHTS = ".safetensors"
_EXPORT = ".onnx"


@dataclass(frozen=True)
class Script:
    """A player that the game brings. `name` is empty: the one that it chooses itself."""

    name: str

    @property
    def label(self) -> str:
        return f"{RULE}:{self.name}" if self.name else RULE

    def to_json(self) -> dict[str, Any]:
        return {"name": self.label, "kind": RULE}


@dataclass(frozen=True)
class Served:
    """Somebody who answers games at an address."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return self.url

    def to_json(self) -> dict[str, Any]:
        return {"name": self.url, "kind": "served"}


@dataclass(frozen=True)
class Trained:
    """A policy of ours, ready to act, and the experiment that it comes from as far as that is known."""

    label: str
    policy: ActingPolicy
    version: int = 0
    where: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`config:` of its run."""
    seats: Mapping[str, ActingPolicy] = field(default_factory=dict)
    """By the names that games of its training call them; one without a name if it was trained in environments."""
    env: str = ""
    several: tuple[str, ...] = ()
    """Models among which nobody has chosen: each plays its own agents, and none of them a game that has others."""

    @property
    def every(self) -> int | None:
        """Ticks from decision to decision in its training, where it was said."""
        said = (self.settings.get("env_config") or {}).get("every")
        return said if isinstance(said, int) else None

    def to_json(self) -> dict[str, Any]:
        kind = "onnx" if isinstance(self.policy, OnnxPolicy) else "checkpoint"
        return {"name": self.label, "kind": kind, "where": self.where, "version": self.version}


Contestant = Script | Served | Trained
Named = str | Path | Result | TrainedAgent


def contestant(what: Named, *, model: str | None = None, token: str | None = None) -> Contestant:
    """`model`: which one, of a run with several. `token`: for a served address. Raises UsageError, Damaged, IncompatibleCheckpoint."""
    if isinstance(what, TrainedAgent):
        return Trained(
            f"agent@{what.version}", actor_policy(what.policy), what.version, seats={ONLY_SEAT: actor_policy(what.policy)}
        )
    text = str(what.run_dir if isinstance(what, Result) else what)
    if text == RULE or text.startswith(f"{RULE}:"):
        return Script(text.partition(":")[2])
    if text.startswith(("http://", "https://")):
        return Served(text.rstrip("/"), token)
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        return Served(f"http://{text}", token)
    try:
        return _trained(text, model)
    except NotFound as error:
        raise UsageError(error.message, _hint(text) or error.hint) from error


def _hint(text: str) -> str:
    """For a name that leads nowhere."""
    if "/" in text:
        return ""
    meant = did_you_mean(text.lower(), RULES)
    return (
        meant.replace("'", f"'{RULE}:", 1) if meant.startswith("Did you mean") else f"{meant} {RULE}:NAME is a built-in player."
    )


def _trained(text: str, model: str | None) -> Trained:
    if text.endswith(_WEIGHTS):
        return _of_file(text, model)
    if text.endswith(_EXPORT):
        return _exported(Path(text))
    asked = _VERSION.fullmatch(text)
    if asked is not None and (is_remote(directory_of(text)) or not directory_of(text).exists()):
        return _of_version(directory_of(asked[1] + (asked[3] or "")), int(asked[2]), model)
    run, found = checkpoint.open_checkpoint(text)
    return _of_checkpoint(run, found, model)


def _of_file(text: str, model: str | None) -> Trained:
    """RUN/models/NAME/000120.safetensors, or RUN/checkpoints/000120/NAME.safetensors."""
    path = directory_of(text)
    name = path.name.removesuffix(_WEIGHTS)
    above = path.parent.parent
    if above.name == "models" and name.isdecimal():
        return _of_version(above.parent, int(name), model or path.parent.name)
    if above.name == checkpoint.FOLDER and not name.endswith(".optimizer"):
        run, found = checkpoint.open_checkpoint(path.parent)
        return _of_checkpoint(run, found, model or name)
    raise UsageError(f"{text} is not among the versions or checkpoints of a run.", "RUN/models/NAME/000120.safetensors is meant.")


def _exported(path: Path) -> Trained:
    """Raises NotFound, Damaged, MissingExtra; UsageError if it is another kind of model."""
    if not path.expanduser().is_file():
        raise NotFound(f"There is no file {path}.", "`ludus export` writes such files.")
    policy = OnnxPolicy(path, value=False)
    settings = {"env_config": policy.facts.get("trained") or {}}
    return Trained(f"{path.stem}{_EXPORT}@{policy.version}", policy, policy.version, str(path), settings, {ONLY_SEAT: policy})


def _of_version(run: Path, number: int, model: str | None) -> Trained:
    """As `ludus serve --version`: of whichever checkpoint has it, or as the run has kept it. Raises NotFound."""
    trust.note_run(run)
    store = store_of(run)
    there: set[int] = set()
    for name in reversed(checkpoint.names(store)):
        versions = checkpoint.versions_of(store, name)
        there |= set(versions.values())
        if number in [version for key, version in versions.items() if model in (None, key)]:
            chosen = model or next(key for key, version in versions.items() if version == number)
            return _of_checkpoint(run, checkpoint.read(store, name), chosen, asked=model is not None)
    for name in [model] if model is not None else store.list("models"):
        kept = version_store.stored_versions(store, name)
        there |= set(kept)
        if number in kept:
            policy = actor_policy(version_store.load_version(store, name, number)[0])
            where = shown(run / "models" / name / f"{number:06d}{_WEIGHTS}")
            newest = checkpoint.newest_name(store)
            experiment: Mapping[str, Any] = (
                {"env": "", "config": {}} if newest is None else checkpoint.read(store, newest).state["config"]
            )
            if model is None and set(agents_of(experiment["config"]).values()) - {name}:
                raise UsageError(
                    f"{shown(run)} has kept version {number} of {name!r}, and no checkpoint with all of its models.",
                    "Choose one: --model-a, --model-b.",
                )
            seats = dict.fromkeys(single_model_seats(experiment, name), policy)
            return Trained(f"{run.name}@{number}", policy, number, where, experiment["config"], seats, experiment["env"])
    if not there and not is_remote(run) and not run.is_dir():
        raise NotFound(f"There is no run at {run}.", "`ludus runs list` shows what there is.")
    known = ", ".join(map(str, sorted(there))) or "none"
    raise NotFound(f"{shown(run)} has no version {number}; it has {known}.", "A checkpoint is RUN/checkpoints/000120.")


def _config(found: checkpoint.Checkpoint) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = found.state["config"]["config"]
    return settings


def _of_checkpoint(run: Path, found: checkpoint.Checkpoint, model: str | None, *, asked: bool | None = None) -> Trained:
    """`asked`: somebody wants this model and no other; if it is not said, whoever names one does."""
    asked = model is not None if asked is None else asked
    chosen = _chosen(found, model)
    several = () if asked or not agents_of(_config(found)) or len(found.weights) == 1 else tuple(found.weights)
    policies = {name: found.policy(name) for name in found.weights}
    version = int(found.state["models"][chosen]["version"])
    where = shown(run / checkpoint.FOLDER / found.name)
    seats = {seat: policies[name] for seat, name in _seats(found, chosen, asked=asked).items()}
    env = found.state["config"]["env"]
    return Trained(f"{run.name}@{version}", policies[chosen], version, where, _config(found), seats, env, several)


def _chosen(found: checkpoint.Checkpoint, model: str | None) -> str:
    """The model that plays; the first, where each plays agents of its own."""
    names = list(found.weights)
    if model is not None:
        if model not in names:
            raise IncompatibleCheckpoint(f"Checkpoint {found.name} has no model {model!r}.", did_you_mean(model, names))
        return model
    if len(names) == 1 or DEFAULT_MODEL in names:
        return names[0] if len(names) == 1 else DEFAULT_MODEL
    if agents_of(_config(found)):
        return names[0]
    raise UsageError(f"Checkpoint {found.name} has the models {', '.join(names)}.", "Choose one: --model-a, --model-b.")


def _seats(found: checkpoint.Checkpoint, chosen: str, *, asked: bool) -> Mapping[str, str]:
    """Seat → model, as its games were told in training. `asked`: somebody wants this model and no other."""
    config = found.state["config"]
    if config["env"] == EXTERNAL:
        return seats_of(parse_external_config(config["config"]["env_config"])).seats
    mapping = agents_of(config["config"])
    if not mapping:
        return single_model_seats(config, chosen)
    return dict.fromkeys(mapping, chosen) if asked else mapping
