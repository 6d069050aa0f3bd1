from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from ludus import errors
from ludus.errors import LudusError


def tree_of(cls: type[LudusError]) -> Iterator[type[LudusError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from tree_of(child)


EVERY = sorted(set(tree_of(LudusError)), key=lambda cls: cls.__name__)


def made(cls: type[LudusError], message: str, hint: str = "") -> LudusError:
    return cls(422, "reward", message, hint) if issubclass(cls, errors.Refused) else cls(message, hint)


def test_a_refusal_keeps_its_status_and_when_to_try_again() -> None:
    again = pickle.loads(pickle.dumps(errors.Refused(429, "too_many_requests", "Too many.", "Slow down.", 2.5)))
    assert (again.status, again.error, again.retry_after_s) == (429, "too_many_requests", 2.5)


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_crosses_a_process_whole(cls: type[LudusError], protocol: int) -> None:
    error = made(cls, "gamma is 2.", "Use a number from 0 to 1.")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert (again.message, again.hint, again.exit_code) == ("gamma is 2.", "Use a number from 0 to 1.", cls.exit_code)
    assert str(again) == str(error) == "gamma is 2. Use a number from 0 to 1."


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_an_error_without_a_hint_reads_as_its_message(cls: type[LudusError]) -> None:
    again = copy.copy(pickle.loads(pickle.dumps(made(cls, "It broke."))))
    assert (str(again), again.hint) == ("It broke.", "")


def test_the_tree_drawn_in_the_module_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = {word for line in errors.__doc__.splitlines() if "─" in line for word in [line.split("─ ")[1].split()[0]]}
    assert drawn | {"LudusError"} == {cls.__name__ for cls in EVERY if cls.__module__ == errors.__name__}


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.LudusError, 1),
        (errors.UsageError, 2),
        (errors.ConfigError, 2),
        (errors.UnknownName, 2),
        (errors.MissingExtra, 2),
        (errors.IncompatibleCheckpoint, 2),
        (errors.EnvironmentFault, 1),
        (errors.TrainingDiverged, 1),
        (errors.Damaged, 1),
        (errors.Fenced, 1),
    ],
)
def test_exit_codes_tell_misuse_from_failure_and_from_being_stopped(cls: type[LudusError], code: int) -> None:
    assert cls("x").exit_code == code


@pytest.mark.parametrize("cls", [errors.NotFound, errors.AlreadyExists, errors.Damaged, errors.StoreFull])
def test_store_error_is_the_base_of_all_store_errors(cls: type[LudusError]) -> None:
    with pytest.raises(errors.StoreError):
        raise cls("x")
