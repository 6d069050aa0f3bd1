"""Ways in which a job on Kubernetes ends. After each of them, none of its objects, processes and volumes may be left.

The job is a fleet: a learner, a worker, and Redis with a volume. Kubernetes deletes it `TTL_S` seconds after its end.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.system.kubernetes.lab import KubernetesLab
from tests.waiting import wait_until

TTL_S = 5
FLEET = ("fleet", "learner", "-p", "CartPole_ClippedPPO", "--checkpoint-freq", "5", "--quiet")
ENDLESS = (*FLEET, "--stop", "timesteps=1000000000")
_WITHIN_S = 300.0


def fleet_file(lab: KubernetesLab) -> Path:
    return lab.cluster_file(workers=1, ttl_s=TTL_S, redis_storage="100Mi", redis_memory="128Mi")


def _submit(lab: KubernetesLab, *words: str) -> str:
    return lab.submit(fleet_file(lab), *(words or ENDLESS))


def _submit_and_train(lab: KubernetesLab) -> str:
    job_id = _submit(lab)
    wait_until(lab.rows, _WITHIN_S, what="the first update")
    return job_id


def _cancel_job(lab: KubernetesLab, job_id: str, *options: str) -> None:
    lab.ludus("jobs", "cancel", job_id, "--on", "kubernetes", "--wait", *options, timeout_s=_WITHIN_S)


def succeed(lab: KubernetesLab) -> None:
    lab.ludus("jobs", "wait", _submit(lab, *FLEET, "--stop", "iterations=5"), timeout_s=_WITHIN_S)


def fail(lab: KubernetesLab) -> None:
    lab.ludus("jobs", "wait", _submit(lab, "fleet", "learner", "NoSuchEnvironment-v1"), code=2, timeout_s=_WITHIN_S)


def cancel(lab: KubernetesLab) -> None:
    _cancel_job(lab, _submit_and_train(lab))


def cancel_now(lab: KubernetesLab) -> None:
    _cancel_job(lab, _submit_and_train(lab), "--now")


def cancel_while_it_starts(lab: KubernetesLab) -> None:
    _cancel_job(lab, _submit(lab))


def kill_submission(lab: KubernetesLab) -> None:
    """Kill `ludus submit` when some of the objects exist, then cancel the job."""
    with lab.start("submit", "-f", fleet_file(lab), "--", *ENDLESS, stdout=subprocess.DEVNULL) as launcher:
        job_id = wait_until(lambda: next(iter(lab.job_ids()), None), _WITHIN_S, what="the Job", poll_s=0.01)
        launcher.send_signal(signal.SIGKILL)
    _cancel_job(lab, job_id)


def kill_waiting_launcher(lab: KubernetesLab) -> None:
    """Kill `ludus submit --wait`. The job continues, and is then cancelled."""
    with lab.start("submit", "-f", fleet_file(lab), "--wait", "--", *ENDLESS, stdout=subprocess.DEVNULL) as launcher:
        wait_until(lab.rows, _WITHIN_S, what="the first update")
        launcher.send_signal(signal.SIGKILL)
    rows = len(lab.rows())
    wait_until(lambda: len(lab.rows()) > rows, _WITHIN_S, what="further updates")
    (job_id,) = lab.job_ids()
    _cancel_job(lab, job_id)


def cancel_service(lab: KubernetesLab) -> None:
    """Cancel `ludus gamecore serve`, a Deployment, which the first command after its TTL deletes."""
    job_id = lab.submit(lab.cluster_file(ttl_s=TTL_S), "gamecore", "serve", "--max-games", "1")
    _cancel_job(lab, job_id)
    time.sleep(TTL_S)
    lab.ludus("jobs", "list", "--on", "kubernetes")


def delete_main_object(lab: KubernetesLab) -> None:
    lab.rig.kubectl("delete", "job", _submit_and_train(lab), f"--namespace={lab.namespace}", "--wait=false")


def kill_main_pod(lab: KubernetesLab) -> None:
    """Kill the pod of the learner without grace. It is replaced, and the job is then cancelled."""
    job_id = _submit_and_train(lab)
    (pod,) = lab.pods(job_id, "learner")
    lab.kill_pod(pod["metadata"]["name"])
    rows = len(lab.rows())
    wait_until(lambda: len(lab.rows()) > rows, _WITHIN_S, what="further updates")
    _cancel_job(lab, job_id)


ENDINGS: dict[str, Callable[[KubernetesLab], None]] = {
    "success": succeed,
    "failure of the training": fail,
    "cancel": cancel,
    "cancel --now": cancel_now,
    "cancel while the pods start": cancel_while_it_starts,
    "kill -9 of `ludus submit` half way, then cancel": kill_submission,
    "kill -9 of `ludus submit --wait`, then cancel": kill_waiting_launcher,
    "cancel of a service": cancel_service,
    "kubectl delete of the main object": delete_main_object,
    "loss of the main pod, then cancel": kill_main_pod,
}
