"""The seats of an external game (`env: external`), and the models that play them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.config.schema import GAMECORE, ExternalConfig, SelfPlayConfig
from ludus.core import spaces
from ludus.errors import ConfigError
from ludus.sampling.session_opponents import seats_are_sides


@dataclass(frozen=True)
class GameSeats:
    """`models`: model → its observation and action space. `seats`: seat → model."""

    models: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]
    seats: Mapping[str, str]

    def spec(self) -> dict[str, Any]:
        """The answer to `GET /spec`."""
        by_seat = {}
        for seat, model in self.seats.items():
            observation, action = self.models[model]
            by_seat[seat] = {"observation_space": spaces.to_json(observation), "action_space": spaces.to_json(action)}
        return by_seat[""] if set(by_seat) == {""} else {"seats": by_seat}


def single_model_seats(experiment: Mapping[str, Any], model: str) -> dict[str, str]:
    """Seat → model, for an experiment with one model. Seats have names if its matches run on a gamecore server."""
    declared = (experiment["config"].get("env_config") or {}).get("seats") if experiment["env"] == GAMECORE else None
    return dict.fromkeys(declared or ("",), model)


def check_self_play(self_play: SelfPlayConfig, seats: GameSeats) -> None:
    """Raises ConfigError if the seats cannot be the two sides of a match."""
    if self_play.opponents is None:
        return
    if len(seats.models) > 1:
        raise ConfigError(
            f"config.self_play needs one model for both sides; the seats have {', '.join(seats.models)}.",
            "Give all seats the same model, or leave self_play out.",
        )
    if self_play.sides is None:
        return
    named = [name for side in self_play.sides for name in side]
    if len(self_play.sides) != 2 or not all(self_play.sides) or len(set(named)) < len(named):
        raise ConfigError(f"config.self_play.sides is {self_play.sides}.", "Two lists of names, each name once: [[blue], [red]].")
    if not seats.seats.keys().isdisjoint(named) and seats.seats.keys() != set(named):
        raise ConfigError(
            f"config.self_play.sides is {self_play.sides}; the seats are {', '.join(seats.seats)}.",
            "Name all seats, or the sides that sessions send as Ludus-Side.",
        )


def check_match_processes(self_play: SelfPlayConfig, seats: GameSeats, workers: int) -> None:
    """Raises ConfigError if the sessions of a match in a league may be in different processes, which do not share its result."""
    if workers > 1 and not seats_are_sides(self_play, list(seats.seats)):
        raise ConfigError(
            f"config.num_workers is {workers}; in a league one process serves both sides of a match, if each has its own session.",
            "Set num_workers to 1 or 0, or let one session play the seats of both sides.",
        )


def seats_of(config: ExternalConfig) -> GameSeats:
    """Raises ConfigError for an invalid space, and for seats of one model with different spaces."""
    models: dict[str, tuple[gym.Space[Any], gym.Space[Any]]] = {}
    seats: dict[str, str] = {}
    for name, seat in config.all_seats().items():
        both = (spaces.from_json(seat.observation_space), spaces.from_json(seat.action_space))
        spaces.array_spec(both[0])
        if spaces.split_mask(both[0])[1] is not None:
            raise ConfigError(
                f"The observation_space of {f'seat {name!r}' if name else 'the game'} holds {spaces.ACTION_MASK!r}.",
                "Leave it out: every game may send action_mask next to the observation.",
            )
        if models.setdefault(seat.model, both) != both:
            raise ConfigError(f"Seat {name!r} has other spaces than the rest of model {seat.model!r}.", "Give it its own model.")
        seats[name] = seat.model
    return GameSeats(models, seats)
