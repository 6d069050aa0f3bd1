"""Container images without a registry and without a build tool: docker-archive files, as `podman save` and `docker save` write them."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BUSYBOX = "localhost/busybox:1"
REDIS = "localhost/redis:7"
PAUSE = "localhost/pause:1"
"""The image of the process that holds the namespaces of a pod."""

_APPLETS = (
    "cat", "chmod", "cut", "date", "df", "dd", "echo", "env", "false", "grep", "head", "hostname", "httpd", "id", "ip", "kill", "ls",
    "mkdir", "mount", "nc", "nproc", "od", "printf", "ps", "rm", "sed", "seq", "sh", "sleep", "stat", "tail", "test", "touch", "tr",
    "true", "uname", "wc", "wget",
)  # fmt: skip
_LINKS = {f"bin/{applet}": "busybox" for applet in _APPLETS}
_USERS = {"etc/passwd": b"root:x:0:0::/:/bin/sh\nludus:x:10001:10001::/:/bin/sh\n"}
_CALL_S = 10.0


def write_busybox_image(path: Path, busybox: Path) -> None:
    """An image of a statically linked busybox, under the names `BUSYBOX` and `PAUSE`; its default command sleeps."""
    write_image(
        path, (BUSYBOX, PAUSE), {"bin/busybox": busybox.read_bytes(), **_USERS}, _LINKS, command=("/bin/sleep", "2147483647")
    )


def write_redis_image(path: Path, busybox: Path, redis: Path) -> None:
    """An image of this machine's Redis server, with a shell, under the name `REDIS`."""
    shown = subprocess.run(["ldd", redis], capture_output=True, text=True, check=True, timeout=_CALL_S).stdout
    libraries = [Path(word) for word in shown.split() if word.startswith("/")]
    files = {str(it).lstrip("/"): it.read_bytes() for it in libraries}
    files |= {"bin/redis-server": redis.read_bytes(), "bin/busybox": busybox.read_bytes(), **_USERS}
    write_image(path, (REDIS,), files, _LINKS, command=("/bin/redis-server",))


def write_image(
    path: Path, names: Sequence[str], files: Mapping[str, bytes], links: Mapping[str, str], command: Sequence[str]
) -> None:
    """One layer with these files (all executable) and symbolic links."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
        for name, data in files.items():
            _add(tar, name, data, 0o755)
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    with tarfile.open(path, "w") as archive:
        _add(archive, f"{digest}.tar", layer.getvalue())
        _add_manifest(archive, config, names, [f"{digest}.tar"])


def add_layer(archive: Path, path: Path, name: str, layer: Path) -> None:
    """Write an image that is the first one of `archive` with one more layer, the tar file `layer`."""
    with tarfile.open(archive) as before, tarfile.open(path, "w") as after:
        (old, *_) = _load(before, "manifest.json")
        config = _load(before, old["Config"])
        for member in before:
            if member.name not in ("manifest.json", "repositories", old["Config"]):
                after.addfile(member, before.extractfile(member) if member.isfile() else None)
        with open(layer, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        config.setdefault("history", []).append({"created_by": "tests"})
        after.add(layer, f"{digest}.tar")
        _add_manifest(after, config, (name,), [*old["Layers"], f"{digest}.tar"])


def _add_manifest(archive: tarfile.TarFile, config: Mapping[str, Any], names: Sequence[str], layers: Sequence[str]) -> None:
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    _add(archive, config_name, text)
    _add(
        archive, "manifest.json", json.dumps([{"Config": config_name, "RepoTags": list(names), "Layers": list(layers)}]).encode()
    )


def _load(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None, f"not a docker-archive file: it has no {name}"
    return json.load(file)


def names_in(path: Path) -> list[str]:
    """Names of the images of a docker-archive file."""
    with tarfile.open(path) as archive:
        return [name for image in _load(archive, "manifest.json") for name in image["RepoTags"] or ()]


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))
