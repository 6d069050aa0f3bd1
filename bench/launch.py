"""Jobs in a real Slurm of this machine (slurmctld, three slurmd): what our launcher costs, and what its jobs leave behind.

    python -m bench.launch --start        from the start of the job to the first training step: ours, and a script written by hand
    python -m bench.launch --cancel       from `ludus jobs cancel` and from `scancel` to the end of the last process
    python -m bench.launch --limit        a job that comes to its time limit is queued again, and goes on: what is lost
    python -m bench.launch --leftovers    processes and files after success, failure, and kill -9 of whatever looks after the job
    … --rounds 3                          --smoke: one round of each, to see that it works

The job is a CartPole training with a worker on each of three nodes, joined by Ray. Needs root, Slurm and munge (`scripts/tools.sh`).
Everything runs in namespaces of its own, with an empty /tmp and /dev/shm, so that what a job leaves can be counted. Whole
measurements are kept with date and commit in `bench/results/launch-*`, others (--smoke) in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from bench.launches import jobs
from bench.launches.jobs import Lab, Late, Seen, Submitted
from bench.train import Row
from bench.transport import keep
from ludus.experiments.runs import checkpoint
from ludus.storage.local import LocalStore
from tests.system.slurm_rig import free_ports

OURS, BARE = "ludus submit", "sbatch script by hand"
STEPS_PER_UPDATE = jobs.NODES * 4 * 64
FREQ = 5
"""Updates between two checkpoints."""

INTERVAL = FREQ * STEPS_PER_UPDATE
LIMIT, SIGNAL_S = "00:02:00", 30
GONE_S = 60.0


def measured(what: str, row: Row, work: Callable[[], Row]) -> Row:
    row = {"what": what, **row, "load": round(os.getloadavg()[0], 1)}
    try:
        row |= work()
    except (Late, AssertionError, subprocess.SubprocessError, OSError, StopIteration) as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:1500]}
    print(
        " ".join(f"{key}={value if not isinstance(value, float) else round(value, 2)}" for key, value in row.items()), flush=True
    )
    return row


def cleared(lab: Lab, before: Seen) -> None:
    """Whatever a measurement that failed has left must not disturb the next one."""
    if Seen.now().more(before)[0]:
        lab.rig.ask("scancel", "--user=root")
        try:
            lab.gone(before, 30)
        except Late:
            for pid in Seen.now().processes - before.processes:
                try:
                    jobs.kill(pid)
                except ProcessLookupError:
                    continue


# -- from its start to its first step, and from the order to end to its end --------------------------------------------------


def start(lab: Lab, rounds: int) -> list[Row]:
    """Interleaved; a first one of each is not counted. How a job is ended alternates, and is measured too."""
    rows = []
    for number in range(-1, rounds):
        for way in (OURS, BARE):
            row = measured("start", {"way": way, "round": number}, lambda way=way: _started(lab, way))  # type: ignore[misc]
            rows += [row] if number >= 0 else []
    return rows


def _started(lab: Lab, way: str) -> Row:
    before = Seen.now()
    try:
        job = jobs.submit(lab) if way == OURS else jobs.submit_bare(lab, free_ports(1 + 40 * jobs.NODES))
        found: Row = dict(job.first_step())
        lab.rig.ask("scancel", job.slurm)
        found["gone_s"] = lab.gone(before, GONE_S)
        return found
    finally:
        cleared(lab, before)


def cancel(lab: Lab, rounds: int) -> list[Row]:
    rows = []
    for number in range(rounds):
        for way in ("ludus jobs cancel", "scancel"):
            row = measured("cancel", {"way": way, "round": number}, lambda way=way: _cancelled(lab, way))  # type: ignore[misc]
            rows.append(row)
    return rows


def _cancelled(lab: Lab, way: str) -> Row:
    before = Seen.now()
    try:
        job = jobs.submit(lab, "--stop", "timesteps=1000000000", "--checkpoint-freq", str(FREQ))
        job.first_step()
        time.sleep(2.0)  # at work, not starting
        reported = int(job.last_row()["timesteps"])
        began = time.monotonic()
        if way == "scancel":
            lab.rig.ask("scancel", job.slurm)
        else:
            lab.ludus("jobs", "cancel", job.id)
        lab.gone(before, GONE_S)
        took_s = time.monotonic() - began
        return {"gone_s": took_s, "lost_timesteps": max(0, reported - kept(job)), **left(lab, before)}
    finally:
        cleared(lab, before)


def kept(job: Submitted) -> int:
    """The timesteps of its newest checkpoint."""
    return int(checkpoint.newest(LocalStore(job.run)).state["progress"]["timesteps"])


def left(lab: Lab, before: Seen) -> Row:
    processes, files = Seen.now().more(before)
    return {"processes": len(processes), "files": len(files), "names": [*processes, *files][:10]}


# -- the time limit -------------------------------------------------------------------------------------------------------


def limit(lab: Lab, rounds: int) -> list[Row]:
    return [measured("limit", {"round": number}, lambda: _limited(lab)) for number in range(rounds)]


def _limited(lab: Lab) -> Row:
    before = Seen.now()
    options = ["--time", LIMIT, "--signal-s", str(SIGNAL_S), "--grace-s", str(SIGNAL_S // 2)]
    try:
        job = jobs.submit(lab, "--stop", "timesteps=1000000000", "--checkpoint-freq", str(FREQ), options=options)
        job.first_step()
        lives = job.started.read_text().count("\n")
        reached = 0
        deadline = time.monotonic() + 300
        while job.started.read_text().count("\n") == lives:
            reached = int(job.last_row()["timesteps"])
            if time.monotonic() > deadline or job.over():
                raise Late(f"it was not queued again: {job.last_words()}")
            time.sleep(0.05)
        reached = max(reached, int(job.last_row()["timesteps"]))
        again = float(job.started.read_text().split()[-1])
        resumed_from = kept(job)
        rows = (job.run / "metrics.jsonl").read_bytes().count(b"\n")
        jobs.until("a training step after the limit", lambda: job.rows(rows + 1), 180)
        found: Row = {
            "reached": reached, "resumed_from": resumed_from, "lost_timesteps": max(0, reached - resumed_from), "interval": INTERVAL,
            "first_step_again_s": time.time() - again,
        }  # fmt: skip
        lab.ludus("jobs", "cancel", job.id)
        lab.gone(before, GONE_S)
        return found | left(lab, before)
    finally:
        cleared(lab, before)


# -- what is left -----------------------------------------------------------------------------------------------------------

FEW = ("--stop", "iterations=20")


def leftovers(lab: Lab, rounds: int) -> list[Row]:
    ways: dict[str, Callable[[Lab, Seen], None]] = {
        "success": lambda lab, before: _to_the_end(lab, 0),
        "failure of the training": lambda lab, before: _to_the_end(lab, 1),
        "cancel while it starts": _cancel_early,
        "kill -9 of the launcher": _kill_launcher,
        "kill -9 of the supervisor": lambda lab, before: _kill_watcher(lab, "supervisor"),
        "kill -9 of the keeper": lambda lab, before: _kill_watcher(lab, "keeper"),
        "kill -9 of the training": lambda lab, before: _kill_role(lab, "main"),
        "kill -9 of a Ray node": lambda lab, before: _kill_role(lab, "ray"),
    }
    return [
        measured("leftovers", {"way": name, "round": number}, lambda work=work: _leaving(lab, work))  # type: ignore[misc]
        for number in range(rounds)
        for name, work in ways.items()
    ]


def _leaving(lab: Lab, work: Callable[[Lab, Seen], None]) -> Row:
    before = Seen.now()
    try:
        work(lab, before)
        took_s = lab.gone(before, GONE_S)
        return {"gone_s": took_s, **left(lab, before)}
    finally:
        cleared(lab, before)


def _to_the_end(lab: Lab, code: int) -> None:
    once = ("--set", "max_worker_restarts=0", "--set", "max_failures=0")  # else it would be tried again and again
    failing = "bench.launches.failing:make_failing"
    job = jobs.submit(lab, *FEW) if code == 0 else jobs.submit(lab, *FEW, *once, environment=failing)
    jobs.until("the end of the job", job.over)
    found = job.record()["status"]
    if found["exit_code"] != code:
        raise Late(f"it ended with {found['exit_code']} ({found['reason']}), not {code}: {job.last_words()}")


def _cancel_early(lab: Lab, before: Seen) -> None:
    job = jobs.submit(lab)
    jobs.until("the script", lambda: job.started.exists() and job.started.read_text())
    time.sleep(2.0)  # Ray is being started
    lab.ludus("jobs", "cancel", job.id)
    jobs.until("the end of the job", job.over)


def _kill_launcher(lab: Lab, before: Seen) -> None:
    """Whoever has submitted it and waits for it: the job goes on without him."""
    with jobs.waiting(lab) as (launcher, job):
        job.first_step()
        jobs.kill(launcher.pid)
        launcher.wait(10)
        rows = (job.run / "metrics.jsonl").read_bytes().count(b"\n")
        jobs.until("further steps", lambda: job.rows(rows + 3), 30)
        lab.ludus("jobs", "cancel", job.id)
        jobs.until("the end of the job", job.over)


def _kill_watcher(lab: Lab, name: str) -> None:
    job = jobs.submit(lab)
    job.first_step()
    jobs.kill(int(job.record()[name]["pid"]))
    jobs.until("the end of the job", job.over)


def _kill_role(lab: Lab, role: str) -> None:
    """Started again, whatever it was; then the job is cancelled."""
    job = jobs.submit(lab, "--stop", "timesteps=1000000000", "--checkpoint-freq", "1")
    job.first_step()
    processes = [each for each in job.record()["status"]["processes"] if each["role"] == role]
    jobs.kill(int(processes[-1]["pid"]))
    jobs.until("its next life", lambda: _restarts(job, role), 30)
    rows = (job.run / "metrics.jsonl").read_bytes().count(b"\n")
    jobs.until("further steps", lambda: job.rows(rows + 1), 120)
    lab.ludus("jobs", "cancel", job.id)
    jobs.until("the end of the job", job.over)


def _restarts(job: Submitted, role: str) -> int:
    return sum(each["restarts"] for each in job.record()["status"]["processes"] if each["role"] == role)


# -- saying it --------------------------------------------------------------------------------------------------------------


def column(rows: Sequence[Row], key: str, **having: str) -> list[float]:
    return [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in having.items())]


def median_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} [{min(values):.1f}–{max(values):.1f}]" if values else "–"


def start_table(rows: Sequence[Row]) -> str:
    lines = ["| | jobs | job start → first step, s | submit → first step, s | scancel → gone, s |", "|---|---:|---:|---:|---:|"]
    for way in (OURS, BARE):
        found = [column(rows, key, what="start", way=way) for key in ("from_start_s", "from_submit_s", "gone_s")]
        lines.append(f"| {way} | {len(found[0])} | " + " | ".join(map(median_range, found)) + " |")
    ours, bare = (column(rows, "from_start_s", what="start", way=way) for way in (OURS, BARE))
    if ours and bare:
        more = [one - other for one, other in zip(ours, bare, strict=False)]
        lines += ["", f"Ours takes **{statistics.median(ours) - statistics.median(bare):+.1f} s** (of medians; by rounds "
                  f"{', '.join(f'{each:+.1f}' for each in more)}); the target is at most +5 s."]  # fmt: skip
    return "\n".join(lines)


def cancel_table(rows: Sequence[Row]) -> str:
    lines = ["| | jobs | order → all gone, s | processes left | files left | timesteps lost |", "|---|---:|---:|---:|---:|---:|"]
    for way in dict.fromkeys(row["way"] for row in rows if row["what"] == "cancel"):
        took = column(rows, "gone_s", what="cancel", way=way)
        counts = [_most(column(rows, key, what="cancel", way=way)) for key in ("processes", "files", "lost_timesteps")]
        lines.append(f"| `{way}` | {len(took)} | {median_range(took)} | " + " | ".join(counts) + " |")
    return "\n".join([*lines, "", "Target: all gone within 10 s, nothing left."])


def _most(values: Sequence[float]) -> str:
    return f"{max(values):,.0f}" if values else "–"


def limit_table(rows: Sequence[Row]) -> str:
    lines = [
        "| round | reached | resumed from | lost | interval | first step of the next life, s | left |",
        "|---|" + "---:|" * 6,
    ]
    for row in rows:
        if row["what"] == "limit" and "error" not in row:
            counts = [f"{row[key]:,}" for key in ("reached", "resumed_from", "lost_timesteps", "interval")]
            lines.append(
                f"| {row['round']} | {' | '.join(counts)} | {row['first_step_again_s']:.1f} | {row['processes'] + row['files']} |"
            )
    return "\n".join([*lines, "", "Timesteps. Target: at most one interval between checkpoints is lost."])


def leftovers_table(rows: Sequence[Row]) -> str:
    lines = ["| after | jobs | job over → all gone, s | processes left | files left |", "|---|---:|---:|---:|---:|"]
    for way in dict.fromkeys(row["way"] for row in rows if row["what"] == "leftovers"):
        took = column(rows, "gone_s", what="leftovers", way=way)
        counts = [_most(column(rows, key, what="leftovers", way=way)) for key in ("processes", "files")]
        lines.append(f"| {way} | {len(took)} | {median_range(took)} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


PARTS: dict[str, tuple[Callable[[Lab, int], list[Row]], Callable[[Sequence[Row]], str], str]] = {
    "start": (start, start_table, "From the start of the job to the first training step"),
    "cancel": (cancel, cancel_table, "From the order to end to the end"),
    "limit": (limit, limit_table, "The time limit"),
    "leftovers": (leftovers, leftovers_table, "What is left"),
}

HOW = f"""\
A real Slurm on this machine: slurmctld and three slurmd, nodes at 127.0.0.2 to .4, all on the same cores. The job is a CartPole
training (PPO, {STEPS_PER_UPDATE} timesteps per update) with one worker on each of the three nodes, which Ray joins; the learner is on
the first. It runs in PID and mount namespaces of its own with an empty /tmp and /dev/shm: every process and every file there that was
not there before the job is counted as left by it.

The *start* of a job is the moment at which its batch script runs its first command; the *first training step* is the moment at which
the first row is in the run's metrics.jsonl: the first update has been made. The script by hand (bench/launches/bare.sh) starts the
same Ray nodes by `srun ray start --block`, polls the head's port and the number of nodes, never sleeps, and then runs the same
`ludus train --address`. Median [least–most]; ours and the other alternate, and a first job of each is not counted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, _, title) in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=title)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one round, kept elsewhere")
    args = parser.parse_args(argv)
    chosen = [name for name in PARTS if getattr(args, name)] or list(PARTS)
    code = jobs.alone("bench.launch", sys.argv[1:] if argv is None else argv)
    if code is not None:
        return code
    rounds = 1 if args.smoke else args.rounds
    failed = 0
    for name in chosen:
        work, table, title = PARTS[name]
        with jobs.lab() as lab:
            rows = work(lab, rounds)
        body = f"## {title}\n\n{table(rows)}"
        errors = [f"- {row.get('way', name)}, round {row['round']}: {row['error'][:300]}" for row in rows if "error" in row]
        if errors:
            body += "\n\n## What did not work\n\n" + "\n".join(errors)
        keep(f"launch-{name}", rounds >= 3, rows, body, HOW)
        failed += len(errors)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
