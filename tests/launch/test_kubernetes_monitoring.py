"""Objects of the Prometheus operator: against the operator's schemas, Prometheus' own check of the rules, and the ports of the pods."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.errors import UsageError
from ludus.launch.cluster_file import ClusterConfig, plan_command
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.backend import KubernetesOrchestrator
from ludus.launch.kubernetes.objects import Manifest, job_id
from ludus.launch.kubernetes.render import render_job
from tests.launch.kubernetes_api import running_api
from tests.tools import need

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "serve": ["serve", "s3://games/best"],
    "serve-tls": ["serve", "s3://games/best", "--tls-cert", "/tls/tls.crt"],
    "gamecore": ["gamecore", "serve"],
}


def monitored(name: str, **keys: Any) -> dict[str, Manifest]:
    """Return the objects of a service by kind; of several of a kind, the first."""
    keys = {"pod_monitor": True, "prometheus_rule": True, **keys}
    config = ClusterConfig().merge(on="kubernetes", image="ludus:1", **keys)
    job = plan_command(config, COMMANDS[name], {}).job
    found: dict[str, Manifest] = {}
    for manifest in render_job(job, config.kubernetes_settings(), job_id(job.name)).manifests:
        found.setdefault(manifest["kind"], manifest)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_operators_schema_accepts_the_objects(name: str) -> None:
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator", reason="pip install cloudcoil.models.prometheus-operator"
    ).v1
    found = monitored(name, monitor_labels={"release": "prometheus"}, monitor_interval="1m")
    for kind in ("PodMonitor", "PrometheusRule"):
        if kind in found:
            model = getattr(models, kind).model_validate(found[kind])
            # Unknown fields are ignored by the model: they would be missing here.
            assert model.model_dump(mode="json", by_alias=True, exclude_none=True) == found[kind]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_monitor_selects_the_pods_their_port_and_their_token(name: str) -> None:
    found = monitored(name)
    monitor, pods = found["PodMonitor"]["spec"], found["Deployment"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    container = pods["spec"]["containers"][0]
    assert [port["name"] for port in container["ports"]] == [endpoint["port"]]
    assert endpoint.get("scheme", "http").upper() == container["livenessProbe"]["httpGet"].get("scheme", "HTTP")
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == found["Secret"]["metadata"]["name"]
    assert container["command"][-1] == f"/etc/ludus/secrets/{credentials['key']}", "the token that the server accepts"
    assert pods["metadata"]["labels"][monitor["jobLabel"]] == "ludus", "the job that the alert rules name"


def test_the_alert_rules_are_those_of_deploy_and_valid(tmp_path: Path) -> None:
    rule = monitored("serve")["PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yml").read_text())
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))
    done = subprocess.run(
        [need("promtool"), "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_rendered_unless_it_is_asked_for() -> None:
    off = {"pod_monitor": False, "prometheus_rule": False}
    assert not {"PodMonitor", "PrometheusRule"} & monitored("serve", **off).keys()
    assert "PrometheusRule" not in monitored("gamecore"), "the alerts are about `ludus serve`"


def test_labels_select_the_objects() -> None:
    found = monitored("serve", monitor_labels={"release": "prometheus"})
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "prometheus"
        assert found[kind]["metadata"]["labels"][objects.JOB]


def test_submit_creates_the_objects_or_says_that_the_operator_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    config = ClusterConfig().merge(on="kubernetes", image="ludus:1", pod_monitor=True, prometheus_rule=True)
    job = plan_command(config, COMMANDS["serve"], {}).job
    with running_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config")))
        orchestrator = KubernetesOrchestrator(config.kubernetes_settings())
        with pytest.raises(UsageError, match=r"does not know PodMonitor.*pod_monitor and prometheus_rule out"):
            orchestrator.submit(job)
        assert server.objects == {}, "nothing is left of a submission that failed"
        server.apis.add(objects.MONITORING_API)
        identity = orchestrator.submit(job)
        owners = {
            each["metadata"]["ownerReferences"][0]["name"] for each in server.all("podmonitors") + server.all("prometheusrules")
        }
        assert owners == {identity}
