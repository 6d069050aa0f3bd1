"""A training whose gradients are computed on two nodes, as a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ludus.cluster.cluster import Job, wait
from ludus.cluster.launch import launch
from ludus.cluster.local import LocalOrchestrator

STEPS = 4096


def trained(tmp_path: Path, name: str, learner_nodes: int) -> tuple[list[dict[str, float]], list[str]]:
    """Rows of its metrics, and what its learner elsewhere said."""
    words = ["train", "CartPole-v1", "--num-workers", "0", "--seed", "3", "--stop", f"timesteps_total={STEPS}", "--quiet"]
    words += ["--local-dir", str(tmp_path / name), "--set", "config.torch_threads=1", "--set", "config.learner_threads=1"]
    job = launch(words, environ={}, nodes=2, learner_nodes=learner_nodes, wait_s=60.0).job
    without_ray = Job(**{**vars(job), "roles": tuple(role for role in job.roles if role.name != "ray"), "ray": 0})
    with LocalOrchestrator(tmp_path / "state", attached=True) as local:
        job_id = local.submit(replace(without_ray, name=name))
        status = wait(local, job_id, 120)
        said = list(local.logs(job_id))
        assert (status.state, status.exit_code) == ("succeeded", 0), said
    (metrics,) = (tmp_path / name).rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()], said


def test_learners_on_two_nodes_learn_what_one_learns(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path, "alone", 1)
    shared, said = trained(tmp_path, "shared", 2)
    counts = [[row["learner/learners"] for row in rows if "learner/learners" in row] for rows in (alone, shared)]
    assert counts[0] == []
    assert set(counts[1]) == {2.0}
    scores = [[row["evaluation/return_mean"] for row in rows if "evaluation/return_mean" in row] for rows in (alone, shared)]
    assert scores[0] == scores[1] != [], "gradients that were summed in two places make another policy"
    assert any(line.startswith("learner-0:") for line in said), said
