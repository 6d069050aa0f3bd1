"""Trainings on the cluster of the rig by the command line: `ludus submit`, `ludus jobs`, and what they leave in the cluster."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ludus.errors import LudusError
from ludus.experiments.runs import checkpoint
from ludus.storage.base import open_store
from tests import s3
from tests.redis_server import require_redis
from tests.system.kubernetes.images import REDIS, write_redis_image
from tests.system.kubernetes.product_image import IMAGE, write_product_image
from tests.system.kubernetes_rig import KubernetesRig
from tests.waiting import wait_until

CALL_S = 120.0
GONE_S = 120.0
LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")


@dataclass
class KubernetesLab:
    """A namespace of its own, a volume claim `runs`, a bucket on S3, and a directory in which the commands run."""

    rig: KubernetesRig
    namespace: str
    home: Path

    # -- commands

    @property
    def environment(self) -> dict[str, str]:
        """Of a user's shell. The variables of S3 are for reading runs here; pods have the file of credentials."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "LUDUS_"))}
        own = {"LUDUS_STATE_DIR": str(self.home / "state"), "XDG_CACHE_HOME": str(self.home / "cache"), "HOME": str(self.home)}
        return {**kept, **self.rig.environment, **own}

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """`ludus` with these arguments, in the background."""
        return subprocess.Popen([*LUDUS, *map(str, words)], env=self.environment, cwd=self.home, text=True, **options)

    def ludus(self, *words: str | Path, code: int = 0, timeout_s: float = CALL_S) -> str:
        """What the command prints. An exit code other than `code` is an AssertionError with its messages."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == code, f"ludus {' '.join(map(str, words))} ended with {process.returncode}: {out}{err}"
        return out

    def cluster_file(self, **keys: Any) -> Path:
        """A cluster.yaml for small pods with runs on the volume, and the given keys."""
        base = {
            "on": "kubernetes", "namespace": self.namespace, "image": IMAGE, "image_pull_policy": "Never", "redis_image": REDIS,
            "cpus": 1, "memory": "1500Mi", "shm": "256Mi", "storage": "pvc:runs", "grace_s": 30,
        }  # fmt: skip
        path = self.home / f"cluster-{uuid.uuid4().hex[:6]}.yaml"
        path.write_text(yaml.safe_dump({**base, **keys}))
        return path

    def s3_keys(self) -> dict[str, str]:
        """Keys of the cluster file for runs on S3."""
        credentials = self.home / "credentials"
        credentials.write_text(f"[default]\naws_access_key_id = {s3.KEY_ID}\naws_secret_access_key = {s3.SECRET}\n")
        credentials.chmod(0o600)
        server = s3.server(self.rig.machine_address)
        return {"storage": server.url(self.namespace), "storage_credentials": str(credentials)}

    def submit(self, file: Path, *words: str, options: tuple[str, ...] = ()) -> str:
        """The id of the job."""
        return self.ludus("submit", "-f", file, *options, "--quiet", "--", *words).split()[-1]

    def status(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ludus("jobs", "status", job_id, "--json").splitlines()[-1])
        return found

    # -- runs on the volume

    @property
    def runs(self) -> Path:
        """Directory of the volume on this machine."""
        volume = self.rig.get("persistentvolumeclaim", "runs", f"--namespace={self.namespace}")["spec"]["volumeName"]
        path = self.rig.get("persistentvolume", volume)["spec"]["hostPath"]["path"]
        return self.rig.volumes / Path(path).name

    def run(self) -> Path | None:
        """The only run on the volume; None: there is none yet."""
        found = {path.parent for path in self.runs.rglob("metrics.jsonl")}
        assert len(found) <= 1, found
        return next(iter(found), None)

    def rows(self) -> list[dict[str, Any]]:
        """Reports of that run."""
        run = self.run()
        if run is None:
            return []
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def checkpoint_steps(self) -> int:
        """Timesteps of the newest checkpoint; 0: there is none."""
        run = self.run()
        if run is None:
            return 0
        with contextlib.suppress(LudusError):
            return int(checkpoint.newest(open_store(str(run))).state["progress"]["timesteps"])
        return 0

    # -- the cluster

    def pods(self, job_id: str, role: str = "") -> list[dict[str, Any]]:
        """Pods of the job that have not been ended."""
        selector = f"ludus.dev/job={job_id}" + (f",ludus.dev/role={role}" if role else "")
        found = self.rig.get("pods", f"--namespace={self.namespace}", f"--selector={selector}")["items"]
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        ]

    def job_ids(self) -> list[str]:
        """Jobs of the namespace, from the objects that own all others."""
        found = self.rig.get("jobs", f"--namespace={self.namespace}")["items"]
        names = [(job["metadata"]["name"], job["metadata"]["labels"].get("ludus.dev/job")) for job in found]
        return [name for name, job_id in names if name == job_id]

    def kill_pod(self, name: str) -> None:
        """Kill a pod without grace."""
        self.rig.kubectl("delete", "pod", name, f"--namespace={self.namespace}", "--grace-period=0", "--force", "--wait=false")

    @contextlib.contextmanager
    def drained(self, node: str) -> Iterator[None]:
        """Drain the node on which the pods of this lab run. The block begins when their processes have ended, and other pods may already start.

        The kubelet of this version takes up to a minute more to delete a pod, for which `kubectl drain` waits.
        """
        processes = self.rig.pod_processes()
        with ThreadPoolExecutor(1) as pool:
            drain = pool.submit(self.rig.drain, node, GONE_S)
            try:
                wait_until(lambda: not any(process.is_running() for process in processes), GONE_S, what="the end of the pods")
                yield
                drain.result()
            finally:
                self.rig.uncordon(node)

    def left(self) -> list[str]:
        """Objects of jobs in the namespace, volumes and processes of pods. The volume of the runs is meant to stay."""
        kept = ("persistentvolumeclaim/runs", "persistentvolume/")
        objects = [name for name in self.rig.objects(self.namespace) if not name.startswith(kept)]
        claims = [volume["spec"]["claimRef"] for volume in self.rig.get("persistentvolumes")["items"]]
        volumes = [
            f"volume of {claim['name']}" for claim in claims if claim["namespace"] == self.namespace and claim["name"] != "runs"
        ]
        return [*objects, *volumes, *map(str, self.rig.pod_processes())]

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.left(), GONE_S, what=self.left, poll_s=0.5)


@contextlib.contextmanager
def kubernetes_lab(rig: KubernetesRig, home: Path) -> Iterator[KubernetesLab]:
    """At the end the namespace is deleted, and no process of its pods is left."""
    lab = KubernetesLab(rig, f"test-{uuid.uuid4().hex[:8]}", home)
    rig.kubectl("create", "namespace", lab.namespace)
    try:
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "runs", "namespace": lab.namespace},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        rig.kubectl("create", "--filename=-", stdin=json.dumps(claim))
        yield lab
    finally:
        rig.kubectl("delete", "namespace", lab.namespace, "--wait=false")
        wait_until(lambda: not rig.pod_processes(), GONE_S, what=rig.pod_processes, poll_s=0.5)


def load_images(rig: KubernetesRig) -> None:
    """Load the image of Ludus, with the sources of this checkout, and that of Redis into the nodes."""
    archive = rig.base / "image.tar"
    write_redis_image(archive, rig.programs.path("busybox"), Path(require_redis()))
    rig.load_image(archive)
    write_product_image(archive)
    rig.load_image(archive)
    archive.unlink()
