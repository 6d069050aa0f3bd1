"""The programs of a Kubernetes cluster, built once and kept in the cache directory of the user."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import tools

CACHE = "LUDUS_TESTS_CACHE"
"""Environment variable: directory for what tests build and keep; the default is `ludus-tests` in the user's cache directory."""

_BUILD_S = 7200.0  # measured: 6 minutes on two quiet cores, half an hour on busy ones
_PROGRAM = Path(__file__).parent / "build.sh"


@dataclass(frozen=True)
class Programs:
    """Where the programs are. Nothing of it is installed on the system."""

    directory: Path

    def path(self, name: str) -> Path:
        """Absolute path of a program, for example `kubelet`, `etcd` or `kubectl`."""
        for folder in ("bin", "packages/usr/bin", "packages/usr/sbin", "packages/bin"):
            if (found := self.directory / folder / name).exists():
                return found
        raise FileNotFoundError(f"{name} is not below {self.directory}; remove that directory to build again")

    @property
    def search_path(self) -> str:
        """Value of PATH with which containerd finds its shim and runc."""
        folders = [str(self.directory / folder) for folder in ("bin", "packages/usr/bin", "packages/usr/sbin")]
        return ":".join([*folders, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])

    @property
    def network_plugins(self) -> Path:
        return self.directory / "packages/usr/lib/cni"

    @property
    def version(self) -> str:
        return (self.directory / "ready").read_text().strip()


def cache_directory() -> Path:
    given = os.environ.get(CACHE)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ludus-tests"


def build(directory: Path | None = None) -> Programs:
    """Build what is not there yet, which takes 6 to 30 minutes. Skips the test where that is impossible, with the reason;
    with LUDUS_TESTS_REQUIRE=1 the test fails.

    Several processes may ask at once: one builds, the others wait for it.
    """
    directory = directory or cache_directory() / "kubernetes"
    if (directory / "ready").exists():
        return Programs(directory)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        tools.skip("Kubernetes is built from Debian packages for Linux on x86-64")
    for program in ("apt-get", "dpkg-source", "make", "rsync", "jq"):
        tools.need(program)
    with _only_one(directory), open(directory / "build.log", "ab") as log:
        if not (directory / "ready").exists():
            sys.stderr.write(f"Building Kubernetes in {directory}, once; the log is {log.name}\n")
            try:
                done = subprocess.run(
                    ["nice", "-n", "15", _PROGRAM, directory], stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_BUILD_S
                )
            except subprocess.TimeoutExpired:
                tools.skip(f"Kubernetes was not built within {_BUILD_S:g} s; see {log.name}")
            if done.returncode != 0:
                tools.skip(f"Kubernetes could not be built; see {log.name}: {_last_line(Path(log.name))}")
    return Programs(directory)


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
