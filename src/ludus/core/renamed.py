"""Names of modules and objects in earlier releases, as stored data (`model.json`, `config.yaml`, job directories) has them."""

from __future__ import annotations

from collections.abc import Mapping

MODULES: Mapping[str, str] = {
    "ludus.actor.gamecored": "ludus.gamecore.vector_env",
    "ludus.cluster.local": "ludus.launch.local",
    "ludus.cluster.slurm": "ludus.launch.slurm.backend",
    "ludus.cluster.ssh": "ludus.launch.ssh.backend",
    "ludus.game.toys": "ludus.envs.toy_envs",
    "ludus.games.arena.gym": "ludus.games.arena.env.gym_env",
    "ludus.games.arena.zoo": "ludus.games.arena.env.pettingzoo_env",
    "ludus.memory.local": "ludus.transport.local",
    "ludus.memory.redis": "ludus.transport.redis_stream",
    "ludus.memory.shared": "ludus.transport.shared_memory",
    "ludus.model.policy": "ludus.models.policy",
    "ludus.store.local": "ludus.storage.local",
    "ludus.store.s3": "ludus.storage.s3",
    "ludus.training.algorithms.appo": "ludus.algorithms.appo",
    "ludus.training.algorithms.dqn": "ludus.algorithms.dqn",
    "ludus.training.algorithms.impala": "ludus.algorithms.impala",
    "ludus.training.algorithms.ppo": "ludus.algorithms.ppo",
}
"""Old module → present module."""

OBJECTS: Mapping[str, str] = {
    "ludus.envs.toy_envs:WithoutVelocities": "ludus.envs.toy_envs:PositionsOnly",
    "ludus.launch.slurm.backend:SlurmReach": "ludus.launch.slurm.backend:SlurmStarter",
    "ludus.transport.redis_stream:RedisExchange": "ludus.transport.redis_stream:RedisMessageStream",
}
"""Old `module:Name` → present `module:Name`, where the name changed as well; the module is the present one."""


def current_name(path: str) -> str:
    """Return the present `module:Name` of an object that an earlier release named `path`; other names are returned unchanged."""
    module, colon, name = path.partition(":")
    present = f"{MODULES.get(module, module)}{colon}{name}"
    return OBJECTS.get(present, present)
