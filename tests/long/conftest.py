from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import require_redis
from tests.system.kubernetes.images import write_redis_image
from tests.system.kubernetes.product_image import write_product_image
from tests.system.kubernetes_rig import KubernetesRig, kubernetes_rig


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[KubernetesRig]:
    """One cluster of two nodes for all tests; each test leaves no objects in it."""
    with kubernetes_rig(nodes=2) as rig:
        yield rig


@pytest.fixture(scope="session")
def ludus_kubernetes(kubernetes: KubernetesRig) -> KubernetesRig:
    """The same cluster, with the image of Ludus and that of Redis on its nodes."""
    archive = kubernetes.base / "image.tar"
    write_redis_image(archive, kubernetes.programs.path("busybox"), Path(require_redis()))
    kubernetes.load_image(archive)
    write_product_image(archive)
    kubernetes.load_image(archive)
    archive.unlink()
    return kubernetes
