"""Jobs on a real Kubernetes of this machine (two nodes): what a pod costs, what a drained node loses, and what jobs leave behind.

    python -m bench.kubernetes --start        from `ludus submit` to the first training step; and `ludus train` as a bare process
    python -m bench.kubernetes --drain        from the eviction of a training to its checkpoint, and to its first step on the other node
    python -m bench.kubernetes --leftovers    objects, processes and volumes after each way in which a job ends
    … --rounds 3                              --smoke: one round of each, to see that it works

The cluster is that of `tests/system/kubernetes_rig.py`; it needs root, and is built the first time (6 to 30 minutes), like the image `cpu`
of Ludus. LUDUS_TESTS_IMAGE may name a docker-archive file of that image; the sources of this checkout are added to it. Whole measurements are kept with date
and commit in `bench/results/kubernetes-*`, others (--smoke) in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.launch import column, measured, median_range
from bench.train import Row
from bench.transport import keep
from tests.system.kubernetes.endings import ENDINGS, TTL_S
from tests.system.kubernetes.lab import LUDUS, KubernetesLab, kubernetes_lab, load_images
from tests.system.kubernetes_rig import KubernetesRig, kubernetes_rig
from tests.waiting import wait_until

POD, BARE = "ludus submit --on kubernetes", "ludus train"
FREQ = 10
"""Updates between two checkpoints."""

WITHIN_S = 300.0
TRAIN = ("train", "CartPole-v1", "--checkpoint-freq", str(FREQ), "--set", "evaluation_duration=0", "--quiet")
ENDLESS = (*TRAIN, "--stop", "timesteps=1000000000")


@contextlib.contextmanager
def new_lab(rig: KubernetesRig) -> Iterator[KubernetesLab]:
    with tempfile.TemporaryDirectory(prefix="b", dir="/var/tmp") as home, kubernetes_lab(rig, Path(home)) as lab:
        yield lab


def until(what: str, condition: Callable[[], object]) -> float:
    """Seconds until then."""
    began = time.monotonic()
    wait_until(condition, WITHIN_S, what=what, poll_s=0.02)
    return time.monotonic() - began


# -- the first training step ------------------------------------------------------------------------------------------------


def start(rig: KubernetesRig, rounds: int) -> list[Row]:
    """Interleaved; a first one of each is not counted."""
    rows = []
    for number in range(-1, rounds):
        for way, work in ((POD, _start_pod), (BARE, _start_bare)):
            row = measured("start", {"way": way, "round": number}, lambda work=work: work(rig))  # type: ignore[misc]
            rows += [row] if number >= 0 else []
    return rows


def _start_pod(rig: KubernetesRig) -> Row:
    with new_lab(rig) as lab:
        runs, file = lab.runs, lab.cluster_file(cpus=2)
        began = time.monotonic()
        job_id = lab.submit(file, *ENDLESS)
        submitted_s = time.monotonic() - began
        until("the first training step", lambda: first_report(runs))
        first_step_s = time.monotonic() - began
        lab.ludus("jobs", "cancel", job_id, "--wait")
        return {"submitted_s": submitted_s, "first_step_s": first_step_s}


def _start_bare(rig: KubernetesRig) -> Row:
    with tempfile.TemporaryDirectory(prefix="b", dir="/var/tmp") as home:
        began = time.monotonic()
        environment = {**os.environ, "LUDUS_STATE_DIR": f"{home}/state"}
        with subprocess.Popen([*LUDUS, *ENDLESS, "--local-dir", f"{home}/runs"], env=environment, cwd=home) as process:
            try:
                until("the first training step", lambda: first_report(Path(home, "runs")))
                first_step_s = time.monotonic() - began
            finally:
                process.send_signal(signal.SIGTERM)
        return {"first_step_s": first_step_s}


def first_report(runs: Path) -> bool:
    """Whether the metrics of a run in this directory have a row: the first update has been made."""
    return any(b"\n" in path.read_bytes() for path in runs.rglob("metrics.jsonl"))


# -- a node is drained --------------------------------------------------------------------------------------------------------


def drain(rig: KubernetesRig, rounds: int) -> list[Row]:
    return [measured("drain", {"round": number}, lambda: _drain(rig)) for number in range(rounds)]


def _drain(rig: KubernetesRig) -> Row:
    with new_lab(rig) as lab:
        job_id = lab.submit(lab.cluster_file(), *ENDLESS)
        until("some checkpoints", lambda: len(lab.rows()) > 3 * FREQ)
        (pod,) = lab.pods(job_id)
        node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
        began, began_at = time.monotonic(), time.time()
        with lab.drained(node):
            ended_s = time.monotonic() - began
            saved_s = last_checkpoint_at(lab) - began_at
            rows = lab.rows()
            reached, saved = int(rows[-1]["timesteps"]), lab.checkpoint_steps()
            until("a step on the other node", lambda: len(lab.rows()) > len(rows))
            resumed_s = time.monotonic() - began
            (pod,) = lab.pods(job_id)
            assert pod["metadata"]["name"] != name
            assert pod["spec"]["nodeName"] != node
        lab.ludus("jobs", "cancel", job_id, "--wait")
        interval = FREQ * int(rows[1]["timesteps"] - rows[0]["timesteps"])
        return {
            "saved_s": saved_s,
            "ended_s": ended_s,
            "resumed_s": resumed_s,
            "lost_timesteps": max(0, reached - saved),
            "interval": interval,
        }


def last_checkpoint_at(lab: KubernetesLab) -> float:
    """Time at which the newest checkpoint of the run was complete."""
    run = lab.run()
    assert run is not None
    return max(path.stat().st_mtime for path in (run / "checkpoints").rglob("*") if path.is_file())


# -- what is left -------------------------------------------------------------------------------------------------------------


def leftovers(rig: KubernetesRig, rounds: int) -> list[Row]:
    """One job for every three rounds: a count needs fewer than a time."""
    return [
        measured("leftovers", {"way": name, "round": number}, lambda end=end: _leave(rig, end))  # type: ignore[misc]
        for number in range(max(1, rounds // 3))
        for name, end in ENDINGS.items()
    ]


def _leave(rig: KubernetesRig, end: Callable[[KubernetesLab], None]) -> Row:
    with new_lab(rig) as lab:
        end(lab)
        began = time.monotonic()
        with contextlib.suppress(AssertionError):
            lab.wait_until_nothing_is_left()
        left = lab.left()
        return {"gone_s": time.monotonic() - began, "left": len(left), "names": left[:10]}


# -- tables -------------------------------------------------------------------------------------------------------------------


def start_table(rows: Sequence[Row]) -> str:
    lines = ["| | jobs | submit returns, s | first training step, s |", "|---|---:|---:|---:|"]
    for way in (POD, BARE):
        found = [column(rows, key, way=way) for key in ("submitted_s", "first_step_s")]
        lines.append(f"| {way} | {len(found[1])} | " + " | ".join(map(median_range, found)) + " |")
    pod, bare = (column(rows, "first_step_s", way=way) for way in (POD, BARE))
    if pod and bare:
        more = statistics.median(pod) - statistics.median(bare)
        lines += ["", f"The pod takes **{more:+.1f} s** (of medians); the target is at most +15 s."]
    return "\n".join(lines)


def drain_table(rows: Sequence[Row]) -> str:
    lines = [
        "| drains | drain → checkpoint, s | drain → pod ended, s | drain → first step on the other node, s | timesteps lost, most | interval |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    found = [column(rows, key) for key in ("saved_s", "ended_s", "resumed_s", "lost_timesteps", "interval")]
    if found[0]:
        cells = [*map(median_range, found[:3]), *(f"{max(values):,.0f}" for values in found[3:])]
        lines.append(f"| {len(found[0])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Targets: a checkpoint within 10 s, at most one interval between checkpoints lost."])


def leftovers_table(rows: Sequence[Row]) -> str:
    lines = ["| after | jobs | end → all gone, s | objects, processes and volumes left |", "|---|---:|---:|---:|"]
    for way in ENDINGS:
        gone, left = column(rows, "gone_s", way=way), column(rows, "left", way=way)
        lines.append(
            f"| {way} | {len(gone)} | {median_range(gone)} | {max(left, default=0):.0f} |" if gone else f"| {way} | 0 | – | – |"
        )
    return "\n".join(lines)


PARTS: dict[str, tuple[Callable[[KubernetesRig, int], list[Row]], Callable[[Sequence[Row]], str], str]] = {
    "start": (start, start_table, "From submit to the first training step"),
    "drain": (drain, drain_table, "A node is drained"),
    "leftovers": (leftovers, leftovers_table, "What is left"),
}

HOW = f"""\
A real Kubernetes {{version}} on this machine: etcd, API server, controller manager, scheduler, and two nodes with kubelet, kube-proxy and
containerd in network namespaces. All of it, the pods and the bare processes use {{cores}} of the machine's cores, which other work may share: the
JSON file has the load average of each measurement. The image is on the nodes. The training is CartPole by PPO with a
checkpoint every {FREQ} updates; its run is on a volume that both nodes mount.

The *first training step* is the moment at which the first row is in the run's metrics.jsonl: the first update has been made. The bare
process is the same `ludus train` on this machine, with the Python of this checkout. Both alternate, and a first one of each is not
counted. *Drain* is `kubectl drain` of the node with the training. The time of the checkpoint is that of its last file; the pod has ended
when it has no process. For *what is left* the job is a fleet: a learner, a worker, and Redis with a volume. Kubernetes deletes it {TTL_S} s after its
end. All objects in the namespace of the job and all volumes are counted, except those of the runs, and all processes of pods. The kubelet
of this version removes the containers of a deleted pod up to 60 s later. Median [least–most].
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, _, title) in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=title)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one round, kept elsewhere")
    args = parser.parse_args(argv)
    chosen = [name for name in PARTS if getattr(args, name)] or list(PARTS)
    rounds = 1 if args.smoke else args.rounds
    failed = 0
    with kubernetes_rig(nodes=2) as rig:
        load_images(rig)
        for name in chosen:
            work, table, title = PARTS[name]
            rows = work(rig, rounds)
            body = f"## {title}\n\n{table(rows)}"
            errors = [f"- {row.get('way', name)}, round {row['round']}: {row['error'][:300]}" for row in rows if "error" in row]
            if errors:
                body += "\n\n## What did not work\n\n" + "\n".join(errors)
            keep(
                f"kubernetes-{name}",
                rounds >= 3,
                rows,
                body,
                HOW.format(version=rig.programs.version, cores=len(os.sched_getaffinity(0))),
            )
            failed += len(errors)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
