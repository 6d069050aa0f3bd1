"""The production service: the gateway and the policies of a checkpoint, without a trainer. The same actor as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.actor.agent import Seat
from ludus.actor.builtin import BuiltinActor
from ludus.model import saved
from ludus.model.acting import Deciding
from ludus.model.policy import Policy


@dataclass(frozen=True)
class Fixed:
    """A policy that does not change any more."""

    policy: Policy
    version: int

    def newest(self) -> tuple[Policy, int]:
        return self.policy, self.version


@dataclass
class Served:
    """Makes the actors of a service. Travels to the workers as plain data; networks are built where they are used."""

    seats: Mapping[str, str]
    """Seat → model."""
    models: Mapping[str, tuple[bytes, bytes, int]]
    """Model → its description, its weights (safetensors), its version."""
    deterministic: bool = True
    _made: dict[str, Seat] = field(default_factory=dict, init=False, repr=False)

    def load(self) -> None:
        """Build the networks, once per process."""
        deciding = {}
        for name, (description, weights, version) in self.models.items():
            policy = saved.policy_from(description)
            policy.load_weights(saved.decode_weights(weights, name)[0])
            policy.network.freeze()  # it never learns again
            deciding[name] = Deciding(Fixed(policy, version), deterministic=self.deterministic)
        self._made.update({seat: Seat(deciding[model]) for seat, model in self.seats.items()})

    def __call__(self) -> BuiltinActor:
        return BuiltinActor(self._made)
