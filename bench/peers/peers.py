"""The libraries we compare with: what each one needs installed and which script drives it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ASYNC_MODES = ("appo", "impala")
AGENTS_MODE = "agents"

# Installed on its own before everything else: a bare `torch` requirement may resolve to a CUDA build.
TORCH = "torch==2.13.0"

_COMMON = (TORCH, "numpy==2.4.6", "psutil==7.2.2")
_GYM = ("gymnasium==1.4.0", "ale-py==0.12.1")
_CV2 = "opencv-python-headless==4.13.0.92"
_DOOM = "vizdoom==1.3.2"
_AGENTS = ("pettingzoo[butterfly,classic]==1.27.0", "mpe2==1.1.1")


@dataclass(frozen=True)
class Peer:
    """One library. `scripts` are file names next to this module; the first one is PPO, the last one trains asynchronously.

    `source_builds` come last and are compiled against the environment, not in isolation: in isolation pip
    would fetch a second, unpinned torch for them.
    """

    name: str
    requirements: tuple[str, ...]
    scripts: tuple[str, ...]
    note: str = ""
    source_builds: tuple[str, ...] = ()
    agents_script: str = ""
    """Trains several agents; empty: this library does not."""
    interpreter: str = ""
    """Program in which the library is supported, for example `python3.10`; without it, or if it is empty: the one that runs this."""
    pinned: tuple[str, ...] = ()
    """Installed without dependencies, and whatever Python they ask for."""
    uses_torch: bool = True

    @property
    def venv(self) -> Path:
        return venv_root() / self.name

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def script(self, mode: str) -> Path:
        if mode == AGENTS_MODE:
            return HERE / self.agents_script
        return HERE / self.scripts[-1 if mode in ASYNC_MODES else 0]

    @property
    def failure_file(self) -> Path:
        """Holds the reason of the last failed install; absent when the peer is installed."""
        return venv_root() / f"{self.name}.failed"


def venv_root() -> Path:
    override = os.environ.get("LUDUS_BENCH_VENVS")
    return Path(override).resolve() if override else HERE.parent / ".venvs"


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="cleanrl",
            requirements=(*_COMMON, *_GYM, _DOOM, *_AGENTS),
            scripts=("cleanrl_ppo.py",),
            note="our own single-file PPO in CleanRL's style, not CleanRL's code",
            agents_script="pettingzoo_ppo.py",
        ),
        Peer(
            name="sb3",
            requirements=(*_COMMON, *_GYM, _CV2, "stable-baselines3==2.9.2"),
            scripts=("sb3_ppo.py",),
            note="tuned settings are those of RL Baselines3 Zoo",
        ),
        Peer(
            name="skrl",
            requirements=(*_COMMON, *_GYM, "skrl==2.1.1"),
            scripts=("skrl_ppo.py",),
        ),
        Peer(
            name="rllib",
            requirements=(*_COMMON, "gymnasium==1.2.2", "ale-py==0.12.1", _CV2, "ray[rllib]==2.60.0", _DOOM, *_AGENTS),
            scripts=("rllib_ppo.py", "rllib_appo.py"),
            note="Ray pins gymnasium 1.2.2",
            agents_script="rllib_agents.py",
        ),
        Peer(
            name="sample_factory",
            requirements=(
                TORCH,
                "numpy==1.26.4",
                "psutil==7.2.2",
                "gymnasium==0.29.1",
                "ale-py==0.10.2",
                "opencv-python-headless==4.11.0.86",
                "sample-factory==2.1.1",
                _DOOM,
            ),
            scripts=("sample_factory_ppo.py", "sample_factory_appo.py"),
            note="needs gymnasium < 1.0; ale-py 0.10 is the first to bring its ROMs along",
        ),
        Peer(
            name="tianshou",
            requirements=(*_COMMON, *_GYM, "tianshou==2.0.1"),
            scripts=("tianshou_ppo.py",),
        ),
        Peer(
            name="torchrl",
            requirements=(*_COMMON, *_GYM, "tensordict==0.14.3", "torchrl==0.14.1"),
            scripts=("torchrl_ppo.py",),
        ),
        Peer(
            name="pufferlib",
            requirements=(TORCH, "numpy==1.26.4", "psutil==7.2.2", "gymnasium==0.29.1", "setuptools==80.9.0"),
            scripts=("pufferlib_ppo.py",),
            note="its source build downloads raylib and box2d, so it needs an open network",
            source_builds=("pufferlib==3.0.0",),
        ),
    )
}


GAME_CLIENTS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="mlagents_envs",
            requirements=(
                "cloudpickle==3.1.2",
                "filelock==3.20.0",
                "grpcio==1.48.2",
                "gym==0.26.2",
                "numpy==1.23.5",
                "pettingzoo==1.15.0",
                "pillow==11.3.0",
                "protobuf==3.20.3",
                "pyyaml==6.0.3",
            ),
            scripts=("unity_steps.py",),
            note="says that it needs Python ≤ 3.10.12; protobuf 3.20.3 is pure Python from 3.11 on",
            interpreter="python3.10",
            pinned=("mlagents-envs==1.1.0",),
            uses_torch=False,
        ),
        Peer(
            name="godot_rl",
            requirements=("gymnasium==1.0.0", "numpy==2.4.6"),
            scripts=("godot_rl_steps.py",),
            note="without the packages that only its trainings need",
            pinned=("godot-rl==0.8.2",),
            uses_torch=False,
        ),
    )
}
"""Libraries that step games and train nothing."""
