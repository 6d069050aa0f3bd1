"""Control groups of a cluster: one directory in every hierarchy of version 1, below which kubelets make those of their pods.

A machine with the unified hierarchy (version 2) alone cannot run the cluster. `systemd.unified_cgroup_hierarchy=0
systemd.legacy_systemd_cgroup_controller` on the kernel's command line switches most distributions to version 1.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.tools import skip
from tests.waiting import wait_until

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
_GONE_S = 20.0


def require() -> None:
    if not (_ROOT / "memory" / "cgroup.procs").exists():
        skip("the nodes of this Kubernetes need control groups of version 1 (/sys/fs/cgroup/memory)")


def stale(is_stale: Callable[[str], bool]) -> list[Path]:
    """Groups with such a name, in all hierarchies."""
    return [path for path in _ROOT.glob("*/*") if path.is_dir() and is_stale(path.name)]


class Cgroups:
    """Groups of a cluster of that name."""

    def __init__(self, name: str, nodes: Sequence[str]) -> None:
        self._name = name
        self._hierarchies = sorted({(_ROOT / it).resolve() for it in _CONTROLLERS if (_ROOT / it / "cgroup.procs").exists()})
        for hierarchy in self._hierarchies:
            for path in (hierarchy / self._name, *(hierarchy / self._name / node for node in nodes)):
                path.mkdir()
                if (path / "cpuset.cpus").exists():  # empty in a new group; no process can join it then
                    (path / "cpuset.cpus").write_text(",".join(map(str, sorted(os.sched_getaffinity(0)))))  # with taskset: fewer
                    (path / "cpuset.mems").write_text((path.parent / "cpuset.mems").read_text())

    def path(self, node: str) -> str:
        """The group of a node, as kubelet's option `--cgroup-root` names it."""
        return f"/{self._name}/{node}"

    def processes(self) -> list[psutil.Process]:
        """All processes of pods."""
        found = []
        for group in (_ROOT / "memory" / self._name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids = [int(word) for word in group.read_text().split()]
                for pid in pids:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found.append(psutil.Process(pid))
        return found

    def remove(self) -> None:
        """After the nodes have ended."""
        left = [hierarchy / self._name for hierarchy in self._hierarchies]
        # The kernel takes a moment until a group whose processes have ended is empty.
        for path in left:
            wait_until(functools.partial(remove_group, path), _GONE_S, what=f"removing {path}")


def remove_group(path: Path) -> bool:
    """Remove a group and those below it, as far as they have no processes. Whether all are gone."""
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not path.exists()
