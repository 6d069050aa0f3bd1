"""Jobs on a list of machines that are reached by SSH. Each has a part of the job, which needs nobody to go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SshNode:
    """One machine. `slots`: processes that it is meant for. `address`: as the other nodes reach it, when that is not `host`.

    `python`: its interpreter, when it has another one than the rest. `user`: empty means what SSH is configured to.
    """

    host: str
    user: str = ""
    port: int = 22
    slots: int = 1
    address: str = ""
    python: str = ""

    @property
    def reached(self) -> str:
        return self.address or self.host


@dataclass(frozen=True)
class SshSettings:
    """`python`: the interpreter on the machines that has Ludus installed; empty means that of this process.

    `setup`: lines of shell that are run before it, such as `module load cuda`. `workdir`: where processes start, there; `copy`: files
    and directories of this machine that are sent into it first. `options`: further ones for SSH, each as `Name=value`.
    """

    nodes: tuple[SshNode, ...]
    identity: Path | None = None
    known_hosts: Path | None = None
    python: str = ""
    setup: tuple[str, ...] = ()
    workdir: str = ""
    copy: tuple[Path, ...] = ()
    connect_s: float = 10.0
    options: tuple[str, ...] = ()
