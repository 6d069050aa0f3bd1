"""A training over three hosts that form a Ray cluster; one of them is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.ray_hosts import OPTIONS, RUN, end, ray_hosts

INTERRUPTED = 130

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]


def test_training_goes_on_when_one_of_three_hosts_is_cut_off(tmp_path: Path) -> None:
    with ray_hosts(3, tmp_path) as cluster:
        for host in range(3):
            cluster.start_ray(host)
        cluster.formed(3)
        training = cluster.train(0, *OPTIONS)
        cluster.until(lambda: cluster.at_work() == {"h0": 1, "h1": 1, "h2": 1}, 120, training)
        cluster.goes_on(training)
        assert len(list((tmp_path / RUN / "logs" / "sampler").glob("h[12]/sampler-*.log"))) == 2, (
            "logs of all hosts are in the run"
        )

        cluster.hosts.cut(2)
        cluster.until(lambda: "h2" not in cluster.at_work() and sum(cluster.at_work().values()) == 3, 60, training)
        cluster.goes_on(training)
        assert end(training) == INTERRUPTED, cluster.said()
        assert "h2 is lost" in (tmp_path / RUN / "logs" / "learner" / "train.log").read_text()
        assert any((tmp_path / RUN / "checkpoints").iterdir())
        cluster.until(lambda: cluster.agents(1) == [], 10)
