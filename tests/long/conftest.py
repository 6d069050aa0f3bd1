from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.kubernetes.lab import load_images
from tests.system.kubernetes_rig import KubernetesRig, kubernetes_rig


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[KubernetesRig]:
    """One cluster of two nodes for all tests; each test leaves no objects in it."""
    with kubernetes_rig(nodes=2) as rig:
        yield rig


@pytest.fixture(scope="session")
def ludus_kubernetes(kubernetes: KubernetesRig) -> KubernetesRig:
    """The same cluster, with the image of Ludus and that of Redis on its nodes."""
    load_images(kubernetes)
    return kubernetes
