"""Which names and models the players of a league may have; the same for its file and for `ludus league add`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ludus.core.plugins import did_you_mean
from ludus.errors import NotFound, UnknownName, UsageError
from ludus.models.policy import Policy
from ludus.sampling.league_policies import RANDOM_RULE, RULE, SCRIPT, ModelKind, kind_of_model, load_script, script_name
from ludus.tournament.contestants import TrainedContestant, contestant

EVALUATION: Final = "evaluation"
"""Name of the process that compares players; no player can have it."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w+-]*")


_MODELS: Final = (
    f"Name a run, RUN/best, RUN@VERSION or a checkpoint; or {RANDOM_RULE}, {SCRIPT}module:function, http://HOST:PORT."
)


def check_player_name(name: str) -> str:
    """Return the name. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError("a player's name is made of letters, digits and _ + -")
    if name == EVALUATION:
        raise ValueError("this name is taken by the evaluation of the league")
    return name


def check_fixed_model(model: str, league: Path, rules: Collection[str] | None, env: str) -> ModelKind:
    """Check the model of a fixed player, except that a stored policy can be loaded. Scripts are imported. Raises UsageError.

    `rules`: scripts that the environment `env` has; None: unknown.
    """
    kind = kind_of_model(model)
    rule = script_name(model)
    if rule is not None and rules is not None and rule not in rules:
        raise UnknownName(f"{env} has no such script.", did_you_mean(rule, rules))
    if kind is ModelKind.SCRIPT:
        load_script(league, model)
    if kind is ModelKind.SERVED:
        check_address(model)
    if kind is ModelKind.STORED and model in (rules or ()) and not Path(model).exists():
        raise UsageError(f"There is no run or checkpoint at {model}.", f"Did you mean '{RULE}{model}'?")
    return kind


def check_address(address: str) -> None:
    """Raises UsageError if it contains a secret, which the league would store."""
    if "@" in urlsplit(address).netloc:
        raise UsageError("An address has no user or password.", "Write the token to a file, and name it: token_file.")


def load_stored_model(model: str) -> tuple[TrainedContestant, Policy]:
    """Load a run, RUN/best, RUN@VERSION or a checkpoint. Raises UsageError, NotFound, Damaged, IncompatibleCheckpoint."""
    try:
        found = contestant(model)
    except UsageError as error:
        if isinstance(error.__cause__, NotFound) and "/" not in model:  # its hint names the players of the Arena
            raise UsageError(error.message, _MODELS) from error
        raise
    if not isinstance(found, TrainedContestant) or not isinstance(found.policy, Policy):
        raise UsageError(f"{model} cannot play in training: its policy is not in a checkpoint.", _MODELS)
    return found, found.policy
