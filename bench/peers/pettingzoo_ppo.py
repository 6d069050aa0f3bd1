"""PPO for several agents as a plain loop: one process, copies of a PettingZoo environment, one forward pass a step for all agents.

The update is that of Stable-Baselines3: advantages are normalised in each minibatch, and episodes that were cut are bootstrapped.
Every agent of every copy is a seat. In the tasks here, the same number of seats acts in every step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import matches
import numpy as np
import torch
from report import Args, Run, parse_args
from torch import nn


class ActorCritic(nn.Module):
    """Separate tanh networks for vectors, shared convolutions for pictures."""

    def __init__(self, task: matches.MatchTask, shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.shared: nn.Module = nn.Flatten()
        self.images, width = task.images, int(np.prod(shape))
        if task.images:
            layers: list[nn.Module] = []
            channels, side = shape[-1], shape[0]
            for filters, kernel, stride in matches.CONVOLUTIONS:
                layers += [nn.Conv2d(channels, filters, kernel, stride), nn.ReLU()]
                channels, side = filters, (side - kernel) // stride + 1
            self.shared = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, matches.DENSE), nn.ReLU())
            width, hidden = matches.DENSE, ()
        else:
            hidden = (matches.HIDDEN, matches.HIDDEN)
        self.actor, self.critic = _mlp(width, hidden, actions, 0.01), _mlp(width, hidden, 1, 1.0)

    def forward(self, observed: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities of the actions, and values."""
        features = self.shared(observed.permute(0, 3, 1, 2) / 255 if self.images else observed.float())
        logits = self.actor(features).masked_fill(~allowed, -1e9)
        return logits.log_softmax(-1), self.critic(features).squeeze(-1)


def _mlp(width: int, hidden: tuple[int, ...], out: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [_linear(width, size, 2**0.5), nn.Tanh()]
        width = size
    return nn.Sequential(*layers, _linear(width, out, gain))


def _linear(width: int, out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(width, out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Copies:
    """Copies of the environment. `acting` are the seats (copy × agent) that act next, with their observations and masks."""

    def __init__(self, task: matches.MatchTask, seed: int) -> None:
        self._turns = task.turns
        self._envs = [matches.MAKERS[task.name]() for _ in range(task.copies)]
        self._names = list(self._envs[0].possible_agents)
        space = self._envs[0].observation_space(self._names[0])
        self._masked = "action_mask" in getattr(space, "spaces", {})
        board = space["observation"] if self._masked else space
        self.shape, self.dtype = board.shape, board.dtype
        self.actions = int(self._envs[0].action_space(self._names[0]).n)
        self._index = {name: index for index, name in enumerate(self._names)}
        self.seats = len(self._envs) * len(self._names)
        self.acting: list[tuple[int, Any, np.ndarray | None]] = []
        for number, env in enumerate(self._envs):
            self._reset(number, env, seed * 1000 + number)

    def _reset(self, number: int, env: Any, seed: int | None = None) -> None:
        observations = env.reset(seed=seed)
        if self._turns:
            self._add(number, env.agent_selection, env.observe(env.agent_selection))
        else:
            for name, observation in observations[0].items():
                self._add(number, name, observation)

    def _add(self, number: int, name: str, observation: Any) -> None:
        mask = None
        if self._masked:
            observation, mask = observation["observation"], observation["action_mask"]
        self.acting.append((number * len(self._names) + self._index[name], observation, mask))

    def step(self, actions: list[int]) -> list[tuple[int, float, bool, Any]]:
        """What became of earlier actions: seat, reward, whether its episode is over, and the last observation if it was cut."""
        chosen: dict[int, dict[str, int]] = {}
        for (seat, _, _), action in zip(self.acting, actions, strict=True):
            chosen.setdefault(seat // len(self._names), {})[self._names[seat % len(self._names)]] = action
        self.acting = []
        outcomes: list[tuple[int, float, bool, Any]] = []
        for number, env in enumerate(self._envs):
            first = number * len(self._names)
            if self._turns:
                outcomes += self._step_in_turn(number, env, next(iter(chosen[number].values())))
                continue
            observations, rewards, terminated, truncated, _ = env.step(chosen[number])
            for name, reward in rewards.items():
                over = terminated[name] or truncated[name]
                last = observations[name] if truncated[name] and not terminated[name] else None
                outcomes.append((first + self._index[name], reward, over, last))
                if not over:
                    self._add(number, name, observations[name])
            if not env.agents:
                self._reset(number, env)
        return outcomes

    def _step_in_turn(self, number: int, env: Any, action: int) -> Iterator[tuple[int, float, bool, Any]]:
        env.step(action)
        while env.agents:
            name = env.agent_selection
            observation, reward, terminated, truncated, _ = env.last()
            over = terminated or truncated
            last = observation["observation"] if truncated and not terminated else None
            yield number * len(self._names) + self._index[name], reward, over, last
            if not over:
                self._add(number, name, observation)
                return
            env.step(None)
        self._reset(number, env)


class Trainer:
    def __init__(self, task: matches.MatchTask, seed: int) -> None:
        self.task, self.copies = task, Copies(task, seed)
        copies = self.copies
        self.model = ActorCritic(task, copies.shape, copies.actions)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.lr, eps=task.adam_eps)
        self.ticks, rows = task.batch // len(copies.acting), len(copies.acting)
        shape = (self.ticks, rows)
        self.observed = np.zeros((*shape, *copies.shape), copies.dtype)
        self.allowed = np.ones((*shape, copies.actions), np.bool_)
        self.action, self.seat = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.log_prob, self.value, self.reward = (np.zeros(shape, np.float32) for _ in range(3))
        self.over, self.known = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)

    def observations(self) -> tuple[np.ndarray, np.ndarray]:
        acting = self.copies.acting
        allowed = np.ones((len(acting), self.copies.actions), np.bool_)
        if acting[0][2] is not None:
            allowed[:] = [mask for _, _, mask in acting]
        return np.stack([observation for _, observation, _ in acting]), allowed

    @torch.inference_mode()
    def values(self, observed: np.ndarray) -> np.ndarray:
        allowed = np.ones((len(observed), self.copies.actions), np.bool_)
        return self.model(torch.from_numpy(observed), torch.from_numpy(allowed))[1].numpy()

    @torch.inference_mode()
    def sample(self) -> np.ndarray:
        """Fill the rollout, and return its advantages."""
        self.reward.fill(0)
        self.over.fill(False)
        self.known.fill(False)
        newest: dict[int, tuple[int, int]] = {}  # seat → place of its last action
        for t in range(self.ticks):
            observed, allowed = self.observations()
            log_probs, value = self.model(torch.from_numpy(observed), torch.from_numpy(allowed))
            action = torch.multinomial(log_probs.exp(), 1)
            self.observed[t], self.allowed[t], self.action[t] = observed, allowed, action[:, 0].numpy()
            self.log_prob[t], self.value[t] = log_probs.gather(1, action)[:, 0].numpy(), value.numpy()
            for row, (seat, _, _) in enumerate(self.copies.acting):
                self.seat[t, row] = seat
                newest[seat] = t, row
            cut: list[tuple[tuple[int, int], np.ndarray]] = []
            for seat, reward, over, last in self.copies.step(self.action[t].tolist()):
                place = newest.get(seat)
                if place is None:  # its last action belongs to the previous rollout
                    continue
                self.reward[place], self.over[place], self.known[place] = reward, over, True
                if last is not None:
                    cut.append((place, last))
            if cut:
                for (place, _), after in zip(cut, self.values(np.stack([last for _, last in cut])), strict=True):
                    self.reward[place] += self.task.gamma * after
        return self.advantages()

    def advantages(self) -> np.ndarray:
        """GAE of every seat's own steps. A last action whose outcome is unknown is left out."""
        task, n = self.task, self.copies.seats
        carry, after = np.zeros(n, np.float32), np.zeros(n, np.float32)
        after[[seat for seat, _, _ in self.copies.acting]] = self.values(self.observations()[0])
        advantage = np.zeros_like(self.value)
        for t in reversed(range(self.ticks)):
            seat, alive = self.seat[t], ~self.over[t]
            delta = self.reward[t] + task.gamma * after[seat] * alive - self.value[t]
            advantage[t] = np.where(self.known[t], delta + task.gamma * task.gae_lambda * alive * carry[seat], 0.0)
            carry[seat], after[seat] = advantage[t], self.value[t]
        return advantage

    def learn(self, advantage: np.ndarray) -> None:
        task, rows = self.task, torch.from_numpy(np.flatnonzero(self.known))
        columns = (self.observed, self.allowed, self.action, self.log_prob, advantage, advantage + self.value)
        whole = [torch.from_numpy(column.reshape(-1, *column.shape[2:])) for column in columns]
        for _ in range(task.epochs):
            for part in rows[torch.randperm(len(rows))].split(task.minibatch):
                observed, allowed, action, old_log_prob, gain, target = (column[part] for column in whole)
                log_probs, value = self.model(observed, allowed)
                ratio = (log_probs.gather(1, action[:, None])[:, 0] - old_log_prob).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - task.clip, 1 + task.clip)).mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + task.vf_coef * nn.functional.mse_loss(value, target) - task.ent_coef * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), task.max_grad_norm)
                self.optimizer.step()


def main(args: Args) -> None:
    task = matches.TASKS[args.task]
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    run = Run("pettingzoo_loop", args, asdict(task))
    trainer, steps = Trainer(task, args.seed), 0
    run.begin()
    while not run.over:
        trainer.learn(trainer.sample())
        steps += trainer.action.size
        run.iteration(steps)
    run.finish()


if __name__ == "__main__":
    main(parse_args())
