"""Training function of the user. It is called once in every learner process."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import ludus


def train_atari(model: str, buffer: str, batch_size: int, weights_publish_interval: int, num_steps: int) -> None:
    """Clipped policy gradients (PPO), one pass over the data that the actors push."""
    learner = ludus.learner()
    remote_model = ludus.RemoteModel(name=model)
    network = learner.wrap(remote_model.get_model())
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    batches = ludus.RemoteBuffer(name=buffer, batch_size=batch_size)
    for step, batch in zip(range(1, num_steps + 1), batches, strict=False):
        frames, action, before, advantage, target = (
            torch.as_tensor(batch[name]) for name in ("frames", "action", "log_prob", "advantage", "target")
        )
        logits, value = network(frames)
        log_probs = F.log_softmax(logits, dim=-1)
        ratio = (log_probs.gather(1, action[:, None]).squeeze(1) - before).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value_loss = F.mse_loss(value, target)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        for name, number in {"loss": loss, "value_loss": value_loss, "entropy": entropy}.items():
            learner.metric(name, float(number))
        if learner.rank == 0 and step % weights_publish_interval == 0:
            trained = getattr(network, "module", network)
            remote_model.publish_weights(ludus.get_torch_model_weights(trained))
