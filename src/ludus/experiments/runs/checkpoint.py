"""Checkpoints: the full state of a trainer, stored completely or not at all, and read without executing code from the run.

checkpoints/000120/   <model>.safetensors            weights, with the statistics of the policy
                      <model>.optimizer.safetensors  state of the algorithm
                      sampler.safetensors            random state of the sampler
                      state.json                     counters, configuration, spaces, versions
                      manifest.json                  sizes and checksums of the above
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ludus
from ludus.algorithms.base import Algorithm
from ludus.core import trust
from ludus.core.tree import Array
from ludus.errors import AlreadyExists, Damaged, IncompatibleCheckpoint, NotFound, StoreError, StoreUnavailable, UsageError
from ludus.experiments.runs.remote_runs import directory_of, display_path, is_remote, store_of
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import PROBABILITIES, Policy, Weights
from ludus.models.weights import serialization
from ludus.models.weights.version_store import Claim, claims_after
from ludus.storage.base import Store, WriteGuard
from ludus.storage.safe_read import parse_json

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "checkpoints"
BEST = "best.json"
BEGUN_FROM = "from"
"""Key in the claim of an incarnation: the checkpoint that it started from, or null if there was none."""

_REFRESH_FILE = f"{FOLDER}/.look"
_NAME = re.compile(r"(\d{6,})(?:-(\d+))?")  # the iteration; a second one of the same iteration has a suffix


class Overtaken(StoreUnavailable):
    """Another trainer stored a checkpoint between our read of the run and our claim. Retrying the resume continues from there."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    name: str
    state: dict[str, Any]
    weights: dict[str, Weights]
    arrays: dict[str, dict[str, Array]]
    sampler: dict[str, Array]

    def policy(self, model: str) -> Policy:
        """The policy of one model for acting, without a centralised value. Raises IncompatibleCheckpoint."""
        description, weights = self.acting(model)
        policy = serialization.policy_from(description)
        policy.load_weights(weights)
        return policy

    def acting(self, model: str) -> tuple[dict[str, Any], Weights]:
        """Description and weights of a model for acting. Raises IncompatibleCheckpoint."""
        from ludus.models.centralized_critic import without_critic

        return without_critic(self._description(model), self.weights[model])

    def restore(self, model: str, algorithm: Algorithm) -> None:
        """Put weights, optimizer and random state of `model` into a freshly built algorithm."""
        mine, theirs = algorithm.policy.description(), self._description(model)
        for key in ("observation_space", "action_space", "network", "normalise_observations", "kind"):
            if _json_form(mine[key]) != _json_form(_with_defaults(key, theirs)):
                raise IncompatibleCheckpoint(
                    f"Checkpoint {self.name} was made with another {key.replace('_', ' ')}: {theirs.get(key)}, now it is {mine[key]}.",
                    "Use the environment and model settings of that run.",
                )
        algorithm.policy.load_weights(self.weights[model])
        algorithm.load_state(self.arrays[model], self.state["models"][model]["algorithm"])

    def byte_scales(self, model: str) -> tuple[tuple[str, float], ...]:
        """Divisors of uint8 observations by path, where they are not 255. Absent in checkpoints of early releases."""
        found = self._description(model)["network"].get("byte_scales", ())
        return tuple((str(path), float(divisor)) for path, divisor in found)

    def embed_above(self, model: str) -> int | None:
        """Number of values above which the network embeds categories. Absent in checkpoints of early releases."""
        found = self._description(model)["network"].get("embed_above")
        return None if found is None else int(found)

    def _description(self, model: str) -> dict[str, Any]:
        if model not in self.weights:
            raise IncompatibleCheckpoint(f"The checkpoint has no model {model!r}, only {', '.join(self.weights)}.")
        described: dict[str, Any] = self.state["models"][model]["description"]
        return described


def _with_defaults(key: str, description: Mapping[str, Any]) -> Any:
    """Fill in keys that the release of the checkpoint did not have."""
    if key == "network":
        return {**asdict(NetworkConfig()), **description[key]}
    return description.get(key, PROBABILITIES) if key == "kind" else description[key]


def _json_form(value: Any) -> Any:
    return json.loads(json.dumps(value))


def write(
    store: Store,
    number: int,
    algorithms: Mapping[str, Algorithm],
    versions: Mapping[str, int],
    sampler: Mapping[str, Array],
    state: Mapping[str, Any],
    *,
    incarnations: Mapping[str, int] | None = None,
    guard: WriteGuard | None = None,
) -> str:
    """Store a checkpoint under its iteration number and return its name. Never replaces an existing one.

    `incarnations`: of the models' owner; they identify checkpoints of a fenced trainer. `guard` is called last before the checkpoint
    becomes visible.
    """
    files: dict[str, bytes] = {"sampler.safetensors": serialization.encode_weights(sampler)}
    models: dict[str, Any] = {}
    for name, algorithm in algorithms.items():
        arrays, plain = algorithm.state()
        files[f"{name}.safetensors"] = serialization.encode_weights(
            algorithm.policy.weights(), {"model": name, "version": str(versions[name])}
        )
        files[f"{name}.optimizer.safetensors"] = serialization.encode_weights(arrays)
        models[name] = {"version": versions[name], "description": algorithm.policy.description(), "algorithm": plain}
        if incarnations is not None:
            models[name]["incarnation"] = incarnations[name]
    whole = {"format": FORMAT, "ludus": ludus.__version__, "models": models, **state}
    files["state.json"] = json.dumps(whole, indent=1).encode()
    for again in range(100):
        name = f"{number:06d}" if not again else f"{number:06d}-{again}"
        try:
            store.put_bundle(f"{FOLDER}/{name}", files, guard=guard)
        except AlreadyExists:  # a damaged one that resume skipped keeps its name
            continue
        return name
    raise AlreadyExists(f"There are too many checkpoints numbered {number}.")


def read(store: Store, name: str) -> Checkpoint:
    """Read and check everything. Raises NotFound, Damaged, IncompatibleCheckpoint."""
    files = store.get_bundle(f"{FOLDER}/{name}")
    try:
        state = parse_json(files["state.json"], f"state.json of checkpoint {name}")
        if state["format"] != FORMAT:
            raise IncompatibleCheckpoint(
                f"Checkpoint {name} has format {state['format']}; this is ludus {ludus.__version__}, format {FORMAT}."
            )
        models = list(state["models"])
        weights = {m: serialization.decode_weights(files[f"{m}.safetensors"], f"{name}/{m}")[0] for m in models}
        arrays = {
            m: serialization.decode_weights(files[f"{m}.optimizer.safetensors"], f"{name}/{m}.optimizer")[0] for m in models
        }
        sampler = serialization.decode_weights(files["sampler.safetensors"], f"{name}/sampler")[0]
        _check_state(state)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise Damaged(f"Checkpoint {name} is damaged: {error!r}.", "Use an older checkpoint.") from error
    return Checkpoint(name, state, weights, arrays, sampler)


def _check_state(state: Mapping[str, Any]) -> None:
    """Check the keys and types that commands rely on. Raises Damaged, KeyError, TypeError, ValueError."""
    config = state.get("config", {})
    if not isinstance(config.get("env", ""), str) or not isinstance(config.get("config", {}), Mapping):
        raise ValueError("its config is not one of a run")
    for entry in state["models"].values():
        int(entry["version"])
        serialization.check_description(entry["description"])


def names(store: Store) -> list[str]:
    """Complete checkpoints, oldest first."""
    return sorted((name for name in store.list(FOLDER) if _NAME.fullmatch(name)), key=_sort_key)


def newest(store: Store) -> Checkpoint:
    """The newest readable checkpoint from which the run continues; others are skipped with a warning. Raises NotFound."""
    for name in reversed(names(store)):
        try:
            found = read(store, name)
        except (Damaged, NotFound) as error:
            log.warning("checkpoint %s cannot be used: %s", name, error)
            continue
        if not _skip_superseded(store, name, found.state):
            return found
    raise NotFound("There is no complete checkpoint.", "Train again, or name another run.")


def newest_name(store: Store) -> str | None:
    """As `newest`, but reads only the state; weights may be damaged. One with an unreadable state is returned only if there is no other."""
    unreadable = None
    for name in reversed(names(store)):
        state = _read_state(store, name)
        if not state:
            unreadable = unreadable or name
        elif not _skip_superseded(store, name, state):
            if unreadable is not None:
                _warn_unreadable(store.url, unreadable, name)
            return name
    return unreadable


def refresh_listing(store: Store) -> None:
    """Force a fresh listing of the checkpoints before a run is taken over.

    A client of a network file system may list a directory as it was up to a minute ago, until it changes the directory itself.
    """
    store.put(_REFRESH_FILE, b"")
    store.delete(_REFRESH_FILE)


# -- selection for resume ------------------------------------------------------------------------------------------------


def resume_origin(store: Store, before: Checkpoint | None) -> str | None:
    """The checkpoint of this store that corresponds to `before`, which may come from another run (--restore)."""
    if before is None:
        return None
    reached = int(before.state["progress"]["iterations"])
    found = [name for name in names(store) if _sort_key(name)[0] <= reached]
    return before.name if before.name in found and _sort_key(before.name)[0] == reached else found[-1] if found else None


def check_newest(store: Store, begun_from: str | None) -> None:
    """Raises Overtaken if there is a complete checkpoint, not of a fenced trainer, after the one from which a run starts."""
    refresh_listing(store)
    for name in reversed(names(store)):
        if not is_after(name, begun_from):
            return
        try:
            state = read(store, name).state
        except (Damaged, NotFound):
            continue  # was skipped before, too
        if not _skip_superseded(store, name, state):
            raise Overtaken(
                f"Another trainer stored checkpoint {name} of {store.url} while this one was about to continue from "
                f"{begun_from or 'the beginning'}.",
                "Resume the run again: it continues from there.",
            )


def superseding_claim(state: Mapping[str, Any], name: str, claims: Callable[[str, int], Iterable[Claim]]) -> Claim | None:
    """The claim of a later owner that started before this checkpoint: the checkpoint is of a fenced trainer.

    `claims(model, number)`: claims of a model above a number. Checkpoints and claims of early releases lack the information.
    """
    for model, entry in state.get("models", {}).items():
        number = entry.get("incarnation") if isinstance(entry, Mapping) else None
        for claim in claims(model, number) if isinstance(number, int) else ():
            began = claim.content.get(BEGUN_FROM, name)
            if began is None or (isinstance(began, str) and _NAME.fullmatch(began) and _sort_key(name) > _sort_key(began)):
                return claim
    return None


def is_superseded(store: Store, name: str) -> bool:
    """Whether a checkpoint was written by a fenced trainer."""
    return superseding_claim(_read_state(store, name), name, functools.partial(claims_after, store)) is not None


def active_names(store: Store) -> list[str]:
    """All checkpoints that are not superseded, oldest first, unreadable ones included. Reads the state of each."""
    return [name for name in names(store) if not is_superseded(store, name)]


def is_after(name: str, begun_from: str | None) -> bool:
    """Whether a checkpoint comes after the one from which a run started."""
    return begun_from is None or _sort_key(name) > _sort_key(begun_from)


def _skip_superseded(store: Store, name: str, state: Mapping[str, Any]) -> bool:
    claim = superseding_claim(state, name, functools.partial(claims_after, store))
    if claim is not None:
        _warn_superseded(store.url, name, claim.who, claim.content.get(BEGUN_FROM) or "the beginning")
    return claim is not None


@functools.lru_cache(maxsize=256)  # warn once: a server that follows a run polls every second
def _warn_superseded(url: str, name: str, who: str, begun_from: str) -> None:
    log.warning("checkpoint %s is skipped: its trainer had lost the run (%s took over from %s)", name, who, begun_from)


@functools.lru_cache(maxsize=256)
def _warn_unreadable(url: str, name: str, instead: str) -> None:
    log.warning("checkpoint %s of %s is skipped: its state cannot be read; the newest is %s", name, url, instead)


def _read_state(store: Store, name: str) -> dict[str, Any]:
    """The state of a checkpoint; empty if it cannot be read."""
    try:
        state = parse_json(store.get_file(f"{FOLDER}/{name}", "state.json"), "state.json")
        return state if isinstance(state, dict) and isinstance(state.get("models"), dict) else {}
    except (NotFound, Damaged, ValueError):
        return {}


def _sort_key(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} is not the name of a checkpoint.")
    return int(match[1]), int(match[2] or 0)


@dataclass(frozen=True)
class BestRecord:
    """Content of best.json. `by`: the metric of the score."""

    checkpoint: str
    score: float
    by: str


def read_best(store: Store) -> BestRecord | None:
    try:
        record = parse_json(store.get(f"{FOLDER}/{BEST}"), BEST)
        return BestRecord(str(record["checkpoint"]), float(record["score"]), str(record.get("by", "")))
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{FOLDER}/{BEST} is damaged: {error}.") from error


def best_name(store: Store) -> str | None:
    try:
        return str(parse_json(store.get(f"{FOLDER}/{BEST}"), BEST)["checkpoint"])
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{FOLDER}/{BEST} is damaged: {error}.") from error


def mark_best(store: Store, name: str, score: float, by: str, incarnation: int | None = None) -> None:
    """`incarnation`: of the trainer that writes the record."""
    record = {"checkpoint": name, "score": score, "by": by} | ({} if incarnation is None else {"incarnation": incarnation})
    store.put(f"{FOLDER}/{BEST}", json.dumps(record).encode())


def best_score(store: Store) -> float:
    try:
        return float(parse_json(store.get(f"{FOLDER}/{BEST}"), BEST)["score"])
    except (NotFound, Damaged, ValueError, KeyError, TypeError):
        return float("-inf")


def apply_retention(
    store: Store, keep: int | None, fresh: str | None = None, *, spared: Collection[str] = (), surplus: Collection[str] = ()
) -> dict[str, dict[str, int]]:
    """Delete all but the newest `keep`, the best and the `fresh` checkpoint; returns the deleted names with their versions by model.

    The fresh one need not have the highest number: a damaged one that resume skipped may follow it. `spared` ones are kept too;
    `surplus` ones are neither deleted nor counted.
    """
    if keep is None:
        return {}
    stays = {best_name(store), fresh, *spared}
    counted = [name for name in names(store) if name not in surplus]
    return {name: delete_checkpoint(store, name) for name in counted[:-keep] if name not in stays}


def delete_checkpoint(store: Store, name: str) -> dict[str, int]:
    """Delete a checkpoint; returns its versions by model."""
    versions = versions_of(store, name)
    store.delete(f"{FOLDER}/{name}")
    return versions


def versions_of(store: Store, name: str) -> dict[str, int]:
    try:
        models = parse_json(store.get_file(f"{FOLDER}/{name}", "state.json"), "state.json")["models"]
        return {model: int(entry["version"]) for model, entry in models.items()}
    except (NotFound, Damaged, ValueError, KeyError, TypeError, AttributeError):
        return {}


def locate(where: str | Path) -> tuple[Path, str]:
    """(run directory, checkpoint name) of a run, `RUN/best`, `RUN/latest`, or a checkpoint; paths and URLs alike. Raises NotFound."""
    path = directory_of(where)
    if path.name in ("", ".."):
        path = path.resolve()
    trust.note_run(path)
    remote = is_remote(path)
    word = path.name if path.name in ("best", "latest") and (remote or not path.is_dir()) else None
    run = path.parent if word else path
    if run.parent.name == FOLDER and _is_checkpoint(run, remote):
        return run.parent.parent, run.name
    if run.name == FOLDER:
        run = run.parent
    store = store_of(run)
    found = best_name(store) if word == "best" else newest_name(store)
    if found is not None:
        return run, found
    if not remote and not run.is_dir():
        raise NotFound(f"There is no run or checkpoint at {path}.", "`ludus runs list` shows what there is.")
    if not {FOLDER, "config.yaml"} & set(store.list("")):
        raise NotFound(
            f"{display_path(run)} is not the directory of a run or checkpoint.", "`ludus runs list` shows what there is."
        )
    if word == "best":
        raise NotFound(f"{display_path(run)} has no best checkpoint yet.", "Leave out /best for the newest one.")
    raise NotFound(f"{display_path(run)} has no complete checkpoint.", "Train with --checkpoint-freq, or let the run end.")


def _is_checkpoint(path: Path, remote: bool) -> bool:
    has_name = _NAME.fullmatch(path.name) is not None
    return has_name if remote else path.is_dir() and (has_name or (path / "state.json").exists())


def open_checkpoint(where: str | Path) -> tuple[Path, Checkpoint]:
    run, name = locate(where)
    store = store_of(run)
    try:
        return run, read(store, name)
    except StoreUnavailable:
        raise
    except StoreError as error:
        others = [n for n in names(store) if n != name]
        hint = f"Others in this run: {', '.join(others[-3:])}." if others else error.hint
        raise type(error)(error.message, hint) from error


# -- checkpoints with several models ---------------------------------------------------------------------------------------


def agents_of(settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Agent → model, from the `config:` of a multi-agent run; empty for a single-agent run."""
    mapping = (settings.get("multiagent") or {}).get("policy_mapping")
    return mapping if isinstance(mapping, Mapping) else {}


def choose_model(stored: Checkpoint, model: str | None) -> str:
    """The named model, or the only one. Raises UsageError, which lists the models and their agents."""
    names = list(stored.weights)
    if model is None and len(names) > 1:
        shown = []
        for name in names:
            agents = agents_playing(stored.state["config"], name)
            listed = ", ".join(agents[:3]) + ", …" * (len(agents) > 3)
            shown.append(f"{name} ({listed})" if agents else name)
        raise UsageError(
            f"The checkpoint has {len(names)} models: {', '.join(shown)}.", "Choose one with --model, in Python model=…."
        )
    if model is not None and model not in names:
        if played_by := agents_of(stored.state["config"]["config"]).get(model):
            raise UsageError(f"{model!r} is an agent, played by the model {played_by}.", f"Choose the model {played_by}.")
        raise UsageError(f"The checkpoint has no model {model!r}.", f"It has {', '.join(names)}.")
    return model or names[0]


def agents_playing(experiment: Mapping[str, Any], model: str) -> list[str]:
    """The agents that a model plays; empty for a single-agent run."""
    return [agent for agent, plays in agents_of(experiment["config"]).items() if plays == model]
