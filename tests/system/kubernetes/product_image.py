"""The image of Ludus for pods: a built one with the sources of this checkout as its last layer, so that a given one may be older."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import tarfile
import tempfile
from pathlib import Path

from tests.system.containers import ContainerRig, default_directory
from tests.system.kubernetes.images import add_layer

IMAGE = "localhost/ludus:test"
ARCHIVE = "LUDUS_TESTS_IMAGE"
"""Environment variable: docker-archive file of the image `cpu`, as `podman save` writes it. Without it, the image is built."""

_SOURCES = Path(__file__).parents[3] / "src" / "ludus"
_PACKAGE = "opt/ludus/lib/python3.11/site-packages/ludus"
_OPAQUE = ".wh..wh..opq"
"""In a layer: hides the content that the layers below have in that directory."""


def write_product_image(path: Path) -> None:
    """Write the image `IMAGE` as a docker-archive file. Skips the test where it can be neither found nor built."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        package = Path(directory, "ludus")
        shutil.copytree(_SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(package, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        (package / _OPAQUE).touch()
        layer = Path(directory, "layer.tar")
        with tarfile.open(layer, "w") as tar:
            tar.add(package, _PACKAGE, filter=_readable)
        given = os.environ.get(ARCHIVE)
        add_layer(Path(given) if given else _build_image(Path(directory, "cpu.tar")), path, IMAGE, layer)


def _build_image(archive: Path) -> Path:
    rig = ContainerRig(default_directory())
    rig.export(rig.build("cpu"), archive)
    return archive


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.mode = 0o755 if member.isdir() else 0o644
    return member
