"""The Grafana dashboard of deploy/: a real Prometheus scrapes `ludus serve` and a gamecore server, and answers the queries of all panels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.gamecore.server.http.app import Settings, running
from tests.cli.programs import program
from tests.gamecore.callers import Caller, catalogue_file
from tests.gateway.wire import ask, raw, step
from tests.serving.releases import checkpointed, observations, policy
from tests.serving.test_deploy import DEPLOY, free_port
from tests.tools import need
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="Debian's Prometheus")]

DASHBOARD = DEPLOY / "grafana" / "ludus.json"
SCRAPE_S = 0.2
WINDOW = "10s"
"""Stands for Grafana's $__rate_interval, which is at least four scrape intervals."""
NOT_HERE = ("ludus_canary_", "ludus_update_refused_total")
"""Series that exist only after a new version was offered."""
TIMEOUT_S = 30.0


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Title of the panel and PromQL, with the variables of Grafana replaced."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", WINDOW).replace("$instance", ".*"))
        for panel in panels()
        for target in panel["targets"]
    ]


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def query(self, expression: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self._url + urllib.parse.urlencode({"query": expression}), timeout=TIMEOUT_S) as reply:
            found = json.load(reply)
        assert found["status"] == "success", found
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def scrapes(self) -> dict[str, float]:
        """Successful scrapes of every target since the start."""
        try:
            found = self.query("sum_over_time(up[1h])")
        except OSError:  # it does not listen yet
            return {}
        return {sample["metric"]["instance"]: float(sample["value"][1]) for sample in found}


@contextmanager
def prometheus(directory: Path, *ports: int) -> Iterator[Prometheus]:
    need("promtool")  # of the same package
    scrape = {"job_name": "ludus", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "scrape_timeout": "200ms"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [
        need("prometheus"),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(words, cwd=directory, stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def play(port: int, session: str) -> None:
    assert ask(port, step("start", session)).status == 200
    for observation in observations(20):
        assert ask(port, step("tick", session, json.dumps({"observation": observation}).encode())).status == 200


def test_every_query_of_the_dashboard_finds_its_series(tmp_path: Path) -> None:
    checkpointed(tmp_path / "run", 1, policy(1))
    settings = Settings(port=0, games=catalogue_file(tmp_path), state_dir=tmp_path / "state")
    serve = ("serve", tmp_path / "run", "--port", "0", "--json")
    with program(*serve, listens=False) as served, running(settings) as gamecore:
        port, call = int(json.loads(served.wait_for('"port"'))["port"]), Caller(gamecore.host, gamecore.port)
        call.start("one", "sleep")
        with prometheus(tmp_path, port, gamecore.port) as monitor:
            wait_until(lambda: len(monitor.scrapes()) == 2, TIMEOUT_S, what="both targets")
            play(port, "open")
            assert ask(port, step("end", "ended")).status != 200, "counted as refused"
            assert ask(port, raw("GET /nothing")).status == 404
            before = monitor.scrapes()
            wait_until(lambda: all(count >= before[at] + 6 for at, count in monitor.scrapes().items()), TIMEOUT_S, what="scrapes")
            empty = [(title, query) for title, query in queries() if not monitor.query(query)]
        call("DELETE", "/v1/games/one?grace_s=0")
    assert [(title, query) for title, query in empty if not any(name in query for name in NOT_HERE)] == []


def test_all_metrics_of_the_dashboard_exist() -> None:
    package = Path(__file__).parents[2] / "src" / "ludus"
    exposed = (package / "serving" / "prometheus.py").read_text() + (package / "gamecore/server/http/prometheus.py").read_text()
    for name in {name for _, query in queries() for name in re.findall(r"\bludus_[a-z_]+", query)}:
        assert f'"{re.sub("_(bucket|sum|count)$", "", name)}"' in exposed, name


def test_panels_have_their_own_numbers_and_do_not_overlap() -> None:
    data = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in data["panels"]}) == len(data["panels"])
    cells = [
        (x, y)
        for panel in data["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels())
