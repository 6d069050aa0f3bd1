"""The images of the project, really built, and containers from them: buildah and podman with a storage of their own, without a registry.

The base image is a minimal Debian, made from the distribution's packages and reduced as its `slim` images are. Images and layers are
kept below LUDUS_CONTAINERS, by default ~/.cache/ludus/containers: the first build takes several minutes and 15 GB, the next one seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ludus
from ludus.process import identity
from ludus.process.children import start_child
from tests.tools import need
from tests.waiting import wait_until

PROJECT = Path(__file__).parents[2]
DOCKERFILE = PROJECT / "docker" / "Dockerfile"
BASE = "localhost/debian:bookworm-slim"
SERVICES = "localhost/ludus-services"
"""Stands for the public images of Redis and SeaweedFS, which a machine without a registry cannot pull; the tag is the service."""
READ_ONLY = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
"""How Kubernetes and compose.yaml run the images."""

_LABEL, _PROJECT = "ludus-rig", "ludus-rig-"
_SUITE = "bookworm"
_BUILD_S = 3600.0
_RUN_S = 300.0
_COMMAND_S = 120.0
_CONTAINERS_CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]
"""
_SERVICES_FILE = f"""\
FROM {BASE} AS redis
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
RUN install --directory --owner 999 --group 999 /data
VOLUME /data
WORKDIR /data

FROM {BASE} AS s3
COPY --chmod=755 weed /usr/bin/weed
COPY --chmod=644 filer.toml /etc/seaweedfs/filer.toml
RUN install --directory --owner 1000 --group 1000 /data /data/filerldb2
VOLUME /data
WORKDIR /data
"""
_FILER_TOML = '[leveldb2]\nenabled = true\ndir = "/data/filerldb2"\n'
"""Like the public images: /data is a volume that belongs to a user of the image, and SeaweedFS has its database of files there."""
_UNUSED_FOR = "168h"
"""Age at which images without a name are removed. Younger ones are the layers of build stages, which the next build takes."""
_EXCLUDED = ("doc", "info", "locale", "man")
"""Below /usr/share; a slim image has no documentation and no translations."""


class ContainerRig:
    """Builds and runs images. Every container has the label of this rig and is removed by `close`; images stay for the next rig.

    The label names this process: what a killed one has left behind is removed by the next rig.
    """

    def __init__(self, directory: Path) -> None:
        for program in ("buildah", "podman", "runc", "debootstrap", "iptables"):
            need(program)
        self.directory = directory
        self.name = f"{os.getpid()}-{identity.start_ticks(os.getpid()) or 0}-{uuid.uuid4().hex[:6]}"
        self.label = f"{_LABEL}={self.name}"
        for name in ("etc", "graph", "run", "tmp", "wheels"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "etc" / "containers.conf").write_text(_CONTAINERS_CONF, encoding="utf-8")
        storage = f'[storage]\ndriver = "overlay"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
        (directory / "etc" / "storage.conf").write_text(storage, encoding="utf-8")
        self._remove_stale()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which podman and buildah use the storage of this rig."""
        etc = self.directory / "etc"
        return {
            "CONTAINERS_CONF": str(etc / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(etc / "storage.conf"),
            "TMPDIR": str(self.directory / "tmp"),
        }

    # -- images ------------------------------------------------------------------------------------------------------------

    def build(self, target: str, arguments: Mapping[str, str] | None = None) -> str:
        """Build a target of the Dockerfile and return the name of the image. Unchanged layers are taken from the storage."""
        with self._lock():
            self._make_base()
            image = f"localhost/ludus:{target}"
            given = {"BASE": BASE, "TORCH_INDEX": "", "VERSION": ludus.__version__, "REVISION": revision(), **(arguments or {})}
            words = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
            self._buildah(
                *(
                    "bud",
                    "--layers",
                    "--isolation",
                    "chroot",
                    "--format",
                    "docker",
                    "--file",
                    str(DOCKERFILE),
                    "--target",
                    target,
                ),
                *words,
                *("--build-context", f"wheelhouse={self._wheelhouse()}", *self._secrets(), "--tag", image, str(PROJECT)),
            )
        return image

    def build_services(self, weed: str) -> dict[str, str]:
        """Service → image: Redis of the distribution, and the given program of SeaweedFS; mount points are those of the public images."""
        context = self.directory / "services"
        context.mkdir(exist_ok=True)
        shutil.copy2(weed, context / "weed")
        (context / "filer.toml").write_text(_FILER_TOML, encoding="utf-8")
        (context / "Containerfile").write_text(_SERVICES_FILE, encoding="utf-8")
        images = {name: f"{SERVICES}:{name}" for name in ("redis", "s3")}
        with self._lock():
            self._make_base()
            for name, image in images.items():
                words = ("--layers", "--isolation", "chroot", "--format", "docker", "--target", name, "--tag", image)
                self._buildah("bud", *words, str(context))
        return images

    def inspect(self, image: str) -> dict[str, Any]:
        (found,) = json.loads(self._podman("image", "inspect", image) or "[]")
        return dict(found)

    def size(self, image: str) -> int:
        """Bytes of all layers, uncompressed: what `docker images` shows."""
        return int(self.inspect(image)["Size"])

    def compressed_size(self, image: str) -> int:
        """Bytes of the layers as a registry stores and transfers them, compressed by gzip."""
        archive = self.directory / "tmp" / "archive"
        shutil.rmtree(archive, ignore_errors=True)
        try:
            self._podman("push", "--quiet", "--compress", image, f"dir:{archive}", timeout_s=_BUILD_S)
            layers = json.loads((archive / "manifest.json").read_text(encoding="utf-8"))["layers"]
            return sum(int(layer["size"]) for layer in layers)
        finally:
            shutil.rmtree(archive, ignore_errors=True)

    def export(self, image: str, path: Path) -> None:
        """Write a docker-archive, which `docker load` and `ctr images import` read."""
        path.unlink(missing_ok=True)
        self._podman("save", "--quiet", "--format", "docker-archive", "--output", str(path), image, timeout_s=_BUILD_S)

    def _make_base(self) -> None:
        if self._podman("image", "exists", BASE, check=False) is not None:
            return
        root = self.directory / "tmp" / "root"
        shutil.rmtree(root, ignore_errors=True)
        self._run(["debootstrap", "--variant=minbase", _SUITE, str(root), mirror()], _BUILD_S)
        excludes = [f"path-exclude /usr/share/{name}/*\n" for name in _EXCLUDED]
        (root / "etc/dpkg/dpkg.cfg.d/slim").write_text("".join([*excludes, "path-include /usr/share/doc/*/copyright\n"]))
        for name in (*(f"usr/share/{name}" for name in _EXCLUDED), "var/cache/apt", "var/lib/apt/lists", "var/log"):
            for path in (root / name).iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        tar = self.directory / "tmp" / "root.tar"
        self._run(["tar", "--directory", str(root), "--create", "--file", str(tar), "."], _BUILD_S)
        self._podman("import", "--quiet", str(tar), BASE, timeout_s=_BUILD_S)
        tar.unlink()
        shutil.rmtree(root)

    def _wheelhouse(self) -> Path:
        """The build of torch that pip installs on this machine: the one of the tests."""
        wheels = self.directory / "wheels"
        wanted = set(wheels.glob(f"torch-{pinned_version('torch')}[-+]*.whl"))
        for other in set(wheels.glob("torch-*.whl")) - wanted:
            other.unlink()
        if not wanted:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
            self._run([*pip, "--constraint", str(PROJECT / "constraints.txt"), "torch"], _BUILD_S)
        return wheels

    def _secrets(self) -> list[str]:
        """The certificates with which pip verifies its index on this machine."""
        authorities = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
        config = self.directory / "etc" / "pip.conf"
        config.write_text("[global]\ncert = /run/secrets/ca.crt\n", encoding="utf-8")
        return ["--secret", f"id=pip.conf,src={config}", "--secret", f"id=ca.crt,src={authorities}"]

    # -- containers --------------------------------------------------------------------------------------------------------

    def run(
        self, image: str, *words: str, options: Sequence[str] = READ_ONLY, timeout_s: float = _RUN_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the image to its end."""
        command = ["podman", "run", "--rm", "--label", self.label, "--no-healthcheck", *options, image, *words]
        return self._execute(command, timeout_s)

    def start(self, image: str, *words: str, options: Sequence[str] = READ_ONLY) -> str:
        """Start a container in the background and return its id."""
        return self._podman_output("run", "--detach", "--label", self.label, *options, image, *words)

    def execute(self, container: str, *words: str, timeout_s: float = _RUN_S) -> subprocess.CompletedProcess[str]:
        return self._execute(["podman", "exec", container, *words], timeout_s)

    def is_healthy(self, container: str) -> bool:
        """Run the image's health check once; podman repeats it only where systemd runs."""
        return self._execute(["podman", "healthcheck", "run", container], _COMMAND_S).returncode == 0

    def logs(self, container: str) -> str:
        done = self._execute(["podman", "logs", container], _COMMAND_S)
        return done.stdout + done.stderr

    def stop(self, container: str, grace_s: int = 60) -> int:
        """Send SIGTERM and return the exit code."""
        self._podman("stop", "--time", str(grace_s), container, timeout_s=grace_s + _COMMAND_S)
        return int(self._podman_output("inspect", "--format", "{{.State.ExitCode}}", container))

    def remove(self, container: str) -> None:
        self._podman("rm", "--force", "--time", "5", "--volumes", container)

    def close(self) -> None:
        for container in self._podman_output("ps", "--all", "--quiet", "--filter", f"label={self.label}").split():
            self.remove(container)

    def _remove_stale(self) -> None:
        """Remove containers, volumes and networks of rigs whose process has ended."""
        containers = json.loads(self._podman("ps", "--all", "--filter", f"label={_LABEL}", "--format", "json") or "[]")
        for one in containers:
            if is_stale(one["Labels"][_LABEL]):
                self.remove(one["Id"])
        for kind in ("volume", "network"):
            names = self._podman_output(kind, "ls", "--format", "{{.Name}}").split()
            for name in names:
                if name.startswith(_PROJECT) and is_stale(name.removeprefix(_PROJECT)):
                    self._podman(kind, "rm", "--force", name)

    @property
    def project(self) -> str:
        """Name of a Compose project of this rig."""
        return f"{_PROJECT}{self.name}"

    def fill_volume(self, volume: str, image: str, directory: str) -> None:
        """Copy what an image has in a directory into a new volume.

        Docker does this when it creates a container, before other containers of a Compose project start; podman when one starts.
        """
        self._podman("run", "--rm", "--label", self.label, "--volume", f"{volume}:{directory}", "--entrypoint", "true", image)

    def leftovers(self, project: str) -> str:
        """Containers, volumes and networks of a Compose project."""
        listings = (
            ("ps", "--all", "--format", "{{.Names}}"),
            ("volume", "ls", "--format", "{{.Name}}"),
            ("network", "ls", "--format", "{{.Name}}"),
        )
        names = [name for words in listings for name in self._podman_output(*words).split()]
        return " ".join(name for name in names if name.startswith(project))

    @contextlib.contextmanager
    def docker_socket(self) -> Iterator[str]:
        """Podman's implementation of the Docker API, for Docker Compose; yields its address."""
        path = self.directory / "tmp" / f"{self.name}.sock"
        with open(self.directory / "tmp" / "service.log", "ab") as log:
            command = ["podman", "system", "service", "--time", "0", f"unix://{path}"]
            environment = os.environ | self.environment
            service = start_child(
                command, death_signal=signal.SIGTERM, env=environment, cwd=self.directory, stdout=log, stderr=log
            )
        try:
            wait_until(path.exists, _COMMAND_S, what="the socket of podman", failed=service.poll)
            yield f"unix://{path}"
        finally:
            service.terminate()
            service.wait(_COMMAND_S)
            path.unlink(missing_ok=True)

    # -- programs ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One build at a time in this storage."""
        with open(self.directory / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _buildah(self, *words: str) -> None:
        self._run(["buildah", *words], _BUILD_S)
        self._podman("image", "prune", "--force", "--filter", f"until={_UNUSED_FOR}", timeout_s=_RUN_S)

    def _podman(self, *words: str, check: bool = True, timeout_s: float = _COMMAND_S) -> str | None:
        done = self._execute(["podman", *words], timeout_s)
        if check and done.returncode != 0:
            raise AssertionError(f"podman {' '.join(words)} failed: {done.stderr[-2000:]}")
        return done.stdout if done.returncode == 0 else None

    def _podman_output(self, *words: str) -> str:
        return (self._podman(*words) or "").strip()

    def _run(self, command: Sequence[str], timeout_s: float) -> None:
        done = self._execute(command, timeout_s)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command[:2])} … failed:\n{(done.stdout + done.stderr)[-4000:]}")

    def _execute(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=os.environ | self.environment, cwd=self.directory, capture_output=True, text=True, timeout=timeout_s
        )


def is_stale(name: str) -> bool:
    """Whether the process of a rig with this name (`PID-START-…`) has ended; False for any other name."""
    found = re.match(r"(\d+)-(\d+)-", name)
    return found is not None and not identity.is_alive_since(int(found[1]), int(found[2]))


def pinned_version(package: str) -> str:
    """The version in constraints.txt."""
    found = re.search(rf"^{package}==(\S+)$", (PROJECT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert found is not None, package
    return found[1]


@functools.cache
def mirror() -> str:
    """The Debian mirror that apt uses on this machine."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, text=True, check=True
    )
    sites = [site for site in done.stdout.split() if re.search(r"/debian/?$", site)]
    return sites[0] if sites else "http://deb.debian.org/debian"


def revision() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def default_directory() -> Path:
    own = os.environ.get("LUDUS_CONTAINERS")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ludus" / "containers"


def targets() -> list[str]:
    """The images of the Dockerfile: stages that set the user of the container."""
    found, stage = [], ""
    for line in DOCKERFILE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            stage = match[1]
        elif line.startswith("USER "):
            found.append(stage)
    return found
