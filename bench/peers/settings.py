"""The one set of PPO settings that `--mode equal` gives every library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PPO:
    envs: int
    steps: int
    """Rollout length per environment."""
    epochs: int
    minibatch: int
    lr: float
    clip: float
    ent_coef: float
    gamma: float = 0.99
    gae_lambda: float = 0.95
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5

    @property
    def batch(self) -> int:
        return self.envs * self.steps


# Separate policy and value networks, two tanh layers of 64 each.
CARTPOLE = PPO(envs=64, steps=64, epochs=4, minibatch=1024, lr=1e-3, clip=0.2, ent_coef=0.0)

# One Nature CNN (Mnih et al. 2015) with a 512-unit layer, shared by policy and value.
PONG = PPO(envs=8, steps=128, epochs=4, minibatch=256, lr=2.5e-4, clip=0.1, ent_coef=0.01)

# Asynchronous training, and a plain loop to compare it with: every step is learned from once, 1024 of them in one gradient step.
# Two workers of 16 environments. Pong as above; Doom with the same network on 72×128 in colour.
WORKERS = 2
ASYNC = PPO(envs=32, steps=32, epochs=1, minibatch=1024, lr=2.5e-4, clip=0.1, ent_coef=0.01)

HIDDEN = 64
